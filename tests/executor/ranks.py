"""Real ranks for tests: processes over Gloo on 127.0.0.1 that stay up and train one case after the other.

`run_ranks(world, cases)` (a fixture in conftest.py) gives a Result per case, made of what the ranks left on disk. Importing
torch takes seconds, so ranks of a world size are started once per test session, when first needed. A rank that fails or
hangs ends its world: all of it is killed, the test fails with the rank's own words, and the next case starts afresh.
Run as a script this file is one rank: it reads a case per line and answers a line per case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
SECONDS = 90  # per case, the start of the ranks included; much, for a busy disk may hold up rank 0 for long


def in_turn(found: list[T], number: int) -> list[T]:
    """Every other one: settings one after the other share them out."""
    return found[number % 2 :: 2]


@dataclass(frozen=True)
class Case:
    """One training run."""

    strategy: str  # as --strategy takes it
    graph: str  # as `load` takes it
    workload: dict[str, Any] = field(default_factory=dict)
    servers: int = 1
    epochs: int = 3
    eval_every: int = 0
    directed: bool = False
    method: str = "metis"
    staleness_errors: bool = False
    checkpoint_every: int = 0
    resume: str = ""  # the folder of a run to go on with
    islands: str = ""  # of a server's ranks, as --set takes them; one process has none

    def job(self, world: int) -> Any:
        from gnnplan.planner.graph import load
        from gnnplan.planner.job import Job
        from gnnplan.planner.specs import Cluster, Workload

        graph = load(self.graph, self.directed)
        device = {"kind": "cpu", "memory": "24GB", "gemm": "14TFLOP/s", "memory_bandwidth": "600GB/s"}
        islands = {"islands": self.islands, "island": {"bandwidth": "100GB/s"}} if self.islands and world > 1 else {}
        cluster = Cluster(servers=self.servers, gpus_per_server=world // self.servers, device=device,
                          intra_node={"bandwidth": "20GB/s"}, inter_node={"bandwidth": "1GB/s"}, **islands)  # fmt: skip
        return Job(graph.stats, graph, Workload(**self.workload), cluster, self.method)

    def settled(self, job: Any) -> Any:
        from gnnplan.planner.strategies import parse

        strategy = parse(self.strategy).settle(job)
        strategy.check(job)
        return strategy

    def __str__(self) -> str:
        words = " ".join(f"{k}={v}" for k, v in self.workload.items())
        return f"{self.strategy} on {self.servers} server(s), {Path(self.graph).name}{' directed' if self.directed else ''}, {words}"


@dataclass(frozen=True)
class Result:
    """What a run left on disk."""

    case: Case
    world: int
    out: Path

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.out / "weights.safetensors")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics]

    def rank(self, rank: int) -> dict[str, Any]:
        """Bytes by operation, peak memory, backend."""
        return json.loads((self.out / f"rank{rank}.json").read_text())

    @property
    def spans(self) -> list[Any]:
        from gnnplan.planner.trace import read_traces

        return read_traces(self.out)


def meeting(world: int) -> tuple[Any, dict[str, str]]:
    """A store at a port that the system chooses, hosted here for as long as it is held, and what ranks of this machine must know to
    meet there, but their numbers. A port that was only found free may be somebody else's when rank 0 wants it."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                   "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}  # fmt: skip


class World:
    """`world` processes that wait for cases. Not thread-safe; `close` leaves none behind."""

    def __init__(self, world: int, folder: Path, cuda: bool = False, memory: bool = False) -> None:
        folder.mkdir(parents=True)
        self.store, where = meeting(world)
        env = os.environ | where | {"GNNPLAN_CACHE": str(folder / "cache"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if not cuda:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if memory:
            env["LOOK_CLOSELY"] = "1"
        self.world, self.folder = world, folder
        self.errors: list[Path] = [folder / f"stderr{rank}" for rank in range(world)]
        self.processes: list[subprocess.Popen[str]] = []
        for rank, path in enumerate(self.errors):
            with path.open("w") as stderr:
                self.processes.append(subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                    env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                ))  # fmt: skip

    def run(self, case: Case, out: Path) -> Result:
        """Raises AssertionError with the words of the rank that failed first."""
        out.mkdir(parents=True, exist_ok=bool(case.resume))
        for process in self.processes:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # it has died: its answer says so
                process.stdin.write(json.dumps({"case": asdict(case), "out": str(out)}) + "\n")
                process.stdin.flush()
        until = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                assert process.stdout
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready:
                    missing = [key.data for key in waiting.get_map().values()]
                    self._fail(case, f"ranks {missing} of {self.world} gave no answer in {SECONDS} s", missing[0])
                for key, _ in ready:
                    stream: IO[str] = key.fileobj  # type: ignore[assignment]
                    if stream.readline() != "done\n":
                        self._fail(case, f"rank {key.data} of {self.world} failed", key.data)
                    waiting.unregister(stream)
        return Result(case, self.world, out)

    def _fail(self, case: Case, what: str, rank: int) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGUSR1)  # those that still run say where they are
        time.sleep(0.5)
        self.close()
        others = [r for r in range(self.world) if r != rank]
        words = "\n".join(f"-- rank {r}\n{self.errors[r].read_text()[-3000:]}" for r in [rank, *others])
        raise AssertionError(f"{case}: {what}\n{words}")

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin and process.stdout
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # the end of its input ends a rank
        until = time.monotonic() + 2
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
        self.processes = []


class Ranks:
    """Worlds by size, started when first needed. Calling it runs cases. `memory`: whether somebody looks at their peak memory; to look
    for it every millisecond takes a quarter of their processors' time. Who does looks ten times as often, in all epochs: beside other
    tests a peak of a millisecond, 3 % of some, was now and then missed in each of three."""

    def __init__(self, folder: Path, memory: bool = False) -> None:
        self.folder, self.worlds, self.runs, self.memory = folder, dict[tuple[int, bool], World](), 0, memory

    def __call__(self, world: int, cases: Sequence[Case], cuda: bool = False) -> list[Result]:
        results = []
        for case in cases:
            key = (world, cuda)
            if key not in self.worlds or not self.worlds[key].alive:
                if key in self.worlds:
                    self.worlds[key].close()
                self.worlds[key] = World(world, self.folder / f"world{world}-{self.runs}", cuda, self.memory)
            self.runs += 1
            results.append(self.worlds[key].run(case, Path(case.resume) if case.resume else self.folder / f"run{self.runs}"))
        return results

    def alone(self, case: Case) -> Result:
        """The case in one process, this one: graph parallel with one rank is plain training. Always on the CPU."""
        import torch

        from gnnplan.executor.worker import Rank

        self.runs += 1
        out = self.folder / f"run{self.runs}"
        out.mkdir(parents=True)
        gc.freeze()  # as ranks do
        _train(Rank(0, 1, torch.device("cpu"), "gloo"), replace(case, servers=1), out)
        return Result(case, 1, out)

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


def _train(rank: Any, case: Case, out: Path) -> None:
    from gnnplan.executor.checkpoint import Checkpoints, latest, question
    from gnnplan.executor.train import train

    job = case.job(rank.world)
    strategy = case.settled(job)
    of_all = [Checkpoints(out, r, case.checkpoint_every, question(job, strategy)) for r in range(rank.world)]
    checkpoints = of_all[rank.rank]
    if case.resume:
        checkpoints.go_on(latest(each.epochs() for each in of_all))
    train(rank, job, strategy, out, case.epochs, case.eval_every, checkpoints=checkpoints)


def main() -> None:
    """Be a rank until the input ends."""
    faulthandler.register(signal.SIGUSR1)
    answers, sys.stdout = sys.stdout, sys.stderr
    import warnings

    import torch

    from gnnplan.executor import memory, train, worker

    closely = "LOOK_CLOSELY" in os.environ
    memory.INTERVAL = 1e-4 if closely else 0.05

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    base = worker.open_rank(timeout_s=SECONDS - 10)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        if number == 1:  # trainings collect circles, but not in what the first has imported: that takes a tenth of a second
            gc.collect(), gc.freeze()
        torch.manual_seed(base.rank)  # nothing may depend on torch's own random numbers
        case = Case(**request["case"])
        if closely:
            train.WATCHED_EPOCHS = case.epochs
        _train(replace(base, spans=[], sent={}, staleness_errors=case.staleness_errors), case, Path(request["out"]))
        answers.write("done\n")
        answers.flush()
    base.close()


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # at once: Gloo's threads sometimes abort a regular exit
