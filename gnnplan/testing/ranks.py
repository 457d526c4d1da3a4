"""Real ranks for tests: processes over Gloo on 127.0.0.1 that stay up and train one case after the
other.

`run_ranks(world, case)` (a fixture in fixtures.py) returns a Result, read from the files that the
ranks wrote. Importing torch takes seconds, so only one process, the fork server, imports it, and
ranks are forks of the fork server. The ranks of a world size start when first needed; a rank
receives a case, trains it, and answers. If a rank fails or hangs, all ranks of its world are
killed, the test fails with that rank's stderr, and the next case starts new ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gnnplan.planner.vocabulary.files import Json

# timeout per case, with the start of the ranks; generous, since a busy disk may delay rank 0
SECONDS = 90
# workload fields with which small graphs train quickly
SMALL = {"layers": 4, "hidden": 8, "dropout": 0.5, "lr": 0.05, "seed": 3}


def small(model: str, **more: Any) -> dict[str, Any]:
    """Return a small workload in float64, so that rounding hides no error."""
    return {"model": model, **SMALL, "dtype": "float64", **more}


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
    gradient_errors: bool = False
    checkpoint_every: int = 0
    resume: str = ""  # folder of a run to resume
    islands: str = ""  # groups of a server's ranks, as --set takes them; not for one process
    streams: bool = False  # run lanes as streams instead of threads, as over NCCL
    device: str = "cpu"  # kind of device to plan for
    fields: str = ""  # a .npz of vertex and edge fields, named 'vertex pos' or 'edge edge_attr'

    def problem(self, world: int) -> Any:

        from gnnplan.executor.layers.kernels import product_codes
        from gnnplan.planner.cluster.spec import Cluster
        from gnnplan.planner.gnn.workload import Workload
        from gnnplan.planner.graph.load import load
        from gnnplan.planner.problem.problem import Problem

        graph = with_fields(load(self.graph, self.directed), self.fields)
        device: dict[str, Any] = {"kind": self.device, "memory": "24GB"}
        device |= {"gemm": "14TFLOP/s", "memory_bandwidth": "600GB/s"}
        if self.device == "cpu":
            device |= product_codes()
        islands: dict[str, Any] = {}
        if self.islands and world > 1:
            islands = {"islands": self.islands, "island": {"bandwidth": "100GB/s"}}
        cluster = Cluster(
            servers=self.servers,
            gpus_per_server=world // self.servers,
            device=device,
            intra_node={"bandwidth": "20GB/s"},
            inter_node={"bandwidth": "1GB/s"},
            **islands,
        )
        return Problem(graph.stats, graph, Workload(**self.workload), cluster, self.method)

    def settled(self, problem: Any) -> Any:
        from gnnplan.planner.strategies import parse

        strategy = parse(self.strategy).settle(problem)
        strategy.check(problem)
        return strategy

    def __str__(self) -> str:
        words = " ".join(f"{k}={v}" for k, v in self.workload.items() if k != "module")
        return (
            f"{self.strategy} on {self.servers} server(s),"
            f" {Path(self.graph).name}{' directed' if self.directed else ''}, {words}"
        )


@dataclass(frozen=True)
class Result:
    """A finished run of a case, read from its folder."""

    case: Case
    world: int
    out: Path

    @property
    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.out / "weights.safetensors")

    @property
    def metrics(self) -> list[Json]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics]

    @property
    def scores(self) -> list[float | None]:
        """The scores on training, validation and test vertices of each epoch, in one list."""
        from gnnplan.planner.gnn.workload import scores_of

        return [row[name] for row in self.metrics for name in scores_of(row)]

    def rank(self, rank: int) -> Json:
        """Return the content of a rank's rank*.json: bytes by operation, peak memory, backend .."""
        left: Json = json.loads((self.out / f"rank{rank}.json").read_text())
        return left

    def fullest(self) -> int:
        """Return the largest peak memory of any rank [B]."""
        return int(max(self.rank(rank)["peak_bytes"] for rank in range(self.world)))

    @property
    def spans(self) -> list[Any]:
        from gnnplan.planner.vocabulary.trace import read_traces

        return read_traces(self.out)


def with_fields(graph: Any, file: str) -> Any:
    """Return the graph with the fields in `file` (Case.fields) added, if it is not ''."""
    import numpy as np

    if not file:
        return graph

    fields: dict[str, dict[str, Any]] = {"vertex": {}, "edge": {}}
    with np.load(file) as arrays:
        for name in arrays.files:
            kind, _, own = name.partition(" ")
            fields[kind][own] = arrays[name]
    return replace(graph, vertex_fields=fields["vertex"], edge_fields=fields["edge"])


def meeting(world: int) -> tuple[Any, dict[str, str]]:
    """Return a TCP store, hosted in this process while the object lives, and the environment with
    which ranks of this machine join it, except RANK. The system chooses the port as the store
    opens: a port that is only looked up may be taken before rank 0 opens it."""
    from gnnplan.executor.ranks.rendezvous import on_this_machine, store_of_this_machine

    store = store_of_this_machine()
    return store, {
        **on_this_machine(store.port, "tests"),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }


Program = tuple[Sequence[str], Mapping[str, str]]  # argv as `start` takes it, environment


class Ended(NamedTuple):
    """The exit code and the output of a program."""

    code: int
    stdout: str
    stderr: str


class ForkServer:
    """The fork server of multiprocessing, with torch, the executor and the strategies loaded.

    What it has not loaded, every rank imports again: 0.3 s of a processor for each."""

    def __init__(self) -> None:
        from gnnplan.planner.strategies import families

        loaded = [__name__, "gnnplan.executor.train", "gnnplan.executor.launch.rank_process"]
        loaded += ["gnnplan.cli", *(family.executor for family in families())]
        multiprocessing.set_forkserver_preload(loaded)
        with pytest.MonkeyPatch.context() as env:
            env.setenv("OMP_NUM_THREADS", "1")
            env.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
            forkserver.ensure_running()

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: Path) -> Forked:
        """Start a process that does what `python argv...` would; argv: a file, or '-m' and a
        module, then arguments. Without argv, start a rank."""
        return Forked({**os.environ, **env}, stderr, argv)

    def run(self, programs: Sequence[Program], folder: Path, seconds: float = 90) -> list[Ended]:
        """Run these programs at the same time until all have ended; kill those that remain."""
        stderrs = [folder / f"stderr{number}" for number in range(len(programs))]
        begun = [self.start(*each, path) for each, path in zip(programs, stderrs, strict=True)]
        try:
            ended = [process.ended(seconds) for process in begun]
        finally:
            for process in begun:
                process.close()
        return [Ended(*each, path.read_text()) for each, path in zip(ended, stderrs, strict=True)]


class Forked(multiprocessing.context.ForkServerProcess):
    """A forked process: a rank that trains the cases sent to `channel`, or a program."""

    def __init__(self, env: Mapping[str, str], stderr: Path, argv: Sequence[str] = ()) -> None:
        channel, child_channel = multiprocessing.Pipe()
        self.stdout = stderr.with_name(f"{stderr.name}.out")
        files = str(self.stdout), str(stderr)
        super().__init__(target=_be, args=(child_channel, dict(env), files, list(argv)))
        self.start()
        child_channel.close()
        self.channel = channel

    def ended(self, seconds: float) -> tuple[int, str]:
        """Wait for the end; return the exit code and standard output. Raises TimeoutError."""
        self.join(seconds)
        if self.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {seconds} s")
        return self.exitcode, self.stdout.read_text()

    def close(self) -> None:
        """Kill the process and release its resources."""
        self.kill()
        self.join()
        self.channel.close()


class World:
    """A group of `world` ranks that wait for cases. Not thread-safe; `close` ends all of them."""

    def __init__(self, world: int, folder: Path, cuda: bool = False, memory: bool = False) -> None:
        folder.mkdir(parents=True)
        self.store, env = meeting(world)
        env |= {name: value for name, value in os.environ.items() if name == "GNNPLAN_CACHE"}
        if not cuda:
            env["CUDA_VISIBLE_DEVICES"] = ""
        if memory:
            env["LOOK_CLOSELY"] = "1"
        self.world, self.folder = world, folder
        self.errors: list[Path] = [folder / f"stderr{rank}" for rank in range(world)]
        self.processes = [
            Forked(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, path)
            for rank, path in enumerate(self.errors)
        ]

    def run(self, case: Case, out: Path) -> Result:
        """Train a case. Raises AssertionError with the stderr of the rank that failed first."""
        try:
            self._await(case, out)
        except BaseException:
            self.close()  # else the next case would get the answers to this one
            raise
        return Result(case, self.world, out)

    def _await(self, case: Case, out: Path) -> None:
        waiting = {process.channel: rank for rank, process in enumerate(self.processes)}
        for channel in waiting:
            with contextlib.suppress(OSError):  # a dead rank is reported when it does not answer
                channel.send((case, out))
        until = time.monotonic() + SECONDS
        while waiting:
            ready = multiprocessing.connection.wait([*waiting], max(0.0, until - time.monotonic()))
            if not ready:
                missing = [*waiting.values()]
                what = f"ranks {missing} of {self.world} gave no answer in {SECONDS} s"
                self._fail(case, what, missing[0])
            for channel in [one for one in waiting if one in ready]:
                rank = waiting.pop(channel)
                try:
                    channel.recv()
                except (EOFError, OSError):
                    self._fail(case, f"rank {rank} of {self.world} failed", rank)

    def _fail(self, case: Case, what: str, rank: int) -> None:
        for process in self.processes:
            # running ranks print their stacks on SIGUSR1; a rank may end meanwhile
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self.close()
        others = [r for r in range(self.world) if r != rank]
        words = "\n".join(
            f"-- rank {r}\n{self.errors[r].read_text()[-3000:]}" for r in [rank, *others]
        )
        raise AssertionError(f"{case}: {what}\n{words}")

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.channel.close()  # a rank ends when its channel closes
        until = time.monotonic() + 2
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.close()
        self.processes = []


class Ranks:
    """Worlds of ranks by size, started when first needed; a call runs a case.

    memory: sample the ranks' memory every 0.1 ms, in all epochs, instead of rarely. Sampling every
    millisecond takes a quarter of the ranks' processor time, and under load it still missed a peak
    of one millisecond (3 % of the memory of some runs) in three epochs in a row."""

    def __init__(self, server: ForkServer, folder: Path, memory: bool = False) -> None:
        """Take a running fork server, and a folder for the runs."""
        self.folder, self.memory = folder, memory
        self.worlds: dict[tuple[int, bool], World] = {}
        self.runs = 0

    def __call__(self, world: int, case: Case, cuda: bool = False) -> Result:
        key = (world, cuda)
        if key not in self.worlds or not self.worlds[key].alive:
            if key in self.worlds:
                self.worlds[key].close()
            folder = self.folder / f"world{world}-{self.runs}"
            self.worlds[key] = World(world, folder, cuda, self.memory)
        return self.worlds[key].run(case, self._folder(case))

    def _folder(self, case: Case) -> Path:
        """Return the run's folder: a new one, or the folder of the run to resume."""
        self.runs += 1
        out = Path(case.resume) if case.resume else self.folder / f"run{self.runs}"
        out.mkdir(parents=True, exist_ok=bool(case.resume))
        return out

    def alone(self, case: Case) -> Result:
        """Train the case in this process, on the CPU: graph parallel on one rank is ordinary
        training."""
        import torch

        from gnnplan.executor.ranks.rank import Rank

        out = self._folder(case)
        gc.freeze()  # as ranks do
        _train(Rank(0, 1, torch.device("cpu"), "gloo"), replace(case, servers=1), out)
        return Result(case, 1, out)

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


def _train(rank: Any, case: Case, out: Path) -> None:
    from gnnplan.executor.launch.run_request import last_of
    from gnnplan.executor.ranks.checkpoint import Checkpoints, question
    from gnnplan.executor.train import train

    problem = case.problem(rank.world)
    strategy = case.settled(problem)
    asked = question(problem, strategy)
    checkpoints = Checkpoints(out, rank.rank, case.checkpoint_every, asked)
    if case.resume:
        checkpoints.go_on(*last_of(out, problem, strategy))
    train(rank, problem, strategy, out, case.epochs, case.eval_every, checkpoints=checkpoints)


def be_rank(channel: Connection[Any, Any]) -> None:
    """Train the cases received from the channel until it closes."""
    faulthandler.register(signal.SIGUSR1)
    import warnings

    import torch

    from gnnplan.executor import train
    from gnnplan.executor.ranks import machine
    from gnnplan.executor.ranks.rank import open_rank

    closely = "LOOK_CLOSELY" in os.environ
    machine.INTERVAL = 1e-4 if closely else 0.05

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
    base = open_rank(timeout_s=SECONDS - 10)
    known = 0
    while True:
        try:
            case, out = channel.recv()
        except EOFError:
            break
        # training collects garbage; freezing keeps imported modules out of it, which saves 0.1 s
        if known != len(sys.modules):
            known = len(sys.modules)
            gc.collect()
            gc.freeze()
        torch.manual_seed(base.rank)  # nothing may depend on torch's own random numbers
        if closely:
            train.WATCHED_EPOCHS = case.epochs
        rank = base.anew()
        rank.staleness_errors = case.staleness_errors or case.gradient_errors
        rank.gradient_errors = case.gradient_errors
        rank.lanes.are_streams = base.backend == "nccl" or case.streams
        _train(rank, case, out)
        channel.send(None)
    base.close()


def be_program(argv: list[str]) -> None:
    """Run the file argv[0], or after '-m' the module argv[1], with the remaining arguments."""
    module = argv[0] == "-m"
    name, sys.argv = argv[module], argv[module:]
    (runpy.run_module if module else runpy.run_path)(name, run_name="__main__")


def _be(
    channel: Connection[Any, Any], env: dict[str, str], files: tuple[str, str], argv: list[str]
) -> None:
    """Run a rank or a program in a forked process, with stdout and stderr written to `files`."""
    code = 1
    try:
        for number, path in enumerate(files, 1):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), number)
        os.environ.update(env)
        gc.freeze()
        if argv:
            be_program(argv)
        else:
            be_rank(channel)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: Gloo's threads sometimes abort a regular exit
