"""Real ranks for tests: processes over Gloo on 127.0.0.1 that stay up and train one case after the
other.

`run_ranks(world, cases)` (a fixture in fixtures.py) gives a Result per case, made of what the ranks
left on disk. Importing torch takes seconds of a processor. One process imports it, the fork server,
and ranks are forks of it. The ranks of a world size start when they are first needed; a rank is
sent a case, and answers when it is trained. A rank that fails or hangs ends its world: all of it is
killed, the test fails with the rank's own words, and the next case starts afresh."""

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

# per case, the start of the ranks included; much, for a busy disk may hold up rank 0 for long
SECONDS = 90
# of a workload that trains small graphs in no time
SMALL = {"layers": 4, "hidden": 8, "dropout": 0.5, "lr": 0.05, "seed": 3}


def small(model: str, **more: Any) -> dict[str, Any]:
    """A small workload in float64, in which rounding hides no fault."""
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
    resume: str = ""  # the folder of a run to go on with
    islands: str = ""  # of a server's ranks, as --set takes them; one process has none
    streams: bool = False  # lanes without threads, as over NCCL
    device: str = "cpu"  # that is planned for
    fields: str = ""  # a .npz of more numbers of the graph, as 'edge edge_attr' and 'vertex pos'

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
    """The files that a run left."""

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

    @property
    def scores(self) -> list[float | None]:
        """Of training, validation and test, of all epochs one after the other."""
        from gnnplan.planner.gnn.workload import scores_of

        return [row[name] for row in self.metrics for name in scores_of(row)]

    def rank(self, rank: int) -> dict[str, Any]:
        """Bytes by operation, peak memory, backend."""
        left: dict[str, Any] = json.loads((self.out / f"rank{rank}.json").read_text())
        return left

    def fullest(self) -> int:
        """The peak of the rank that filled most [bytes]."""
        return int(max(self.rank(rank)["peak_bytes"] for rank in range(self.world)))

    @property
    def spans(self) -> list[Any]:
        from gnnplan.planner.vocabulary.trace import read_traces

        return read_traces(self.out)


def with_fields(graph: Any, file: str) -> Any:
    """The graph with the fields in a file of a Case, if it has one."""
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
    """A store at a port that the system chooses, hosted here for as long as it is held, and what
    ranks of this machine must know to meet there, but their numbers. A port that was only found
    free may be somebody else's when rank 0 wants it."""
    from gnnplan.executor.ranks.meeting import on_this_machine, store_of_this_machine

    store = store_of_this_machine()
    return store, {
        **on_this_machine(store.port, "tests"),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }


Program = tuple[Sequence[str], Mapping[str, str]]  # its words as `start` takes them, environment


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    stdout: str
    stderr: str


class ForkServer:
    """Starts processes that have torch and the executor loaded: multiprocessing's."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload([__name__, "gnnplan.executor.train"])
        with pytest.MonkeyPatch.context() as env:
            env.setenv("OMP_NUM_THREADS", "1")
            env.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
            forkserver.ensure_running()

    def start(self, argv: Sequence[str], env: Mapping[str, str], stderr: Path) -> Forked:
        """A process that does what `python argv...` would: a file, or '-m' and a module, and
        words."""
        return Forked({**os.environ, **env}, stderr, argv)

    def run(self, programs: Sequence[Program], folder: Path, seconds: float = 90) -> list[Ended]:
        """Be these programs side by side until all have ended; none of them is left."""
        told = [folder / f"stderr{number}" for number in range(len(programs))]
        begun = [self.start(*each, path) for each, path in zip(programs, told, strict=True)]
        try:
            ended = [process.ended(seconds) for process in begun]
        finally:
            for process in begun:
                process.close()
        return [Ended(*each, path.read_text()) for each, path in zip(ended, told, strict=True)]


class Forked(multiprocessing.context.ForkServerProcess):
    """A rank that trains what comes through `channel`, or a program."""

    def __init__(self, env: Mapping[str, str], stderr: Path, argv: Sequence[str] = ()) -> None:
        channel, its = multiprocessing.Pipe()
        self.said = stderr.with_name(f"{stderr.name}.out")
        files = str(self.said), str(stderr)
        super().__init__(target=_be, args=(its, dict(env), files, list(argv)))
        self.start()
        its.close()
        self.channel = channel

    def ended(self, seconds: float) -> tuple[int, str]:
        """The exit code, once it has ended, and what it has said on standard output."""
        self.join(seconds)
        if self.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {seconds} s")
        return self.exitcode, self.said.read_text()

    def close(self) -> None:
        """Leave nothing of it."""
        self.kill()
        self.join()
        self.channel.close()


class World:
    """`world` processes that wait for cases. Not thread-safe; `close` leaves none behind."""

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
        """Raises AssertionError with the words of the rank that failed first."""
        try:
            self._await(case, out)
        except BaseException:
            self.close()  # else the next case would get the answers to this one
            raise
        return Result(case, self.world, out)

    def _await(self, case: Case, out: Path) -> None:
        waiting = {process.channel: rank for rank, process in enumerate(self.processes)}
        for channel in waiting:
            with contextlib.suppress(OSError):  # it has died: its answer says so
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
            # those that still run say where they are; one may end meanwhile
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
            process.channel.close()  # a rank ends then
        until = time.monotonic() + 2
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.close()
        self.processes = []


class Ranks:
    """Worlds by size, started when first needed. Calling it runs cases. `memory`: whether somebody
    looks at their peak memory; to look for it every millisecond takes a quarter of their
    processors' time. Who does looks ten times as often, in all epochs: beside other tests a peak of
    a millisecond, 3 % of some, was now and then missed in each of three."""

    def __init__(self, server: ForkServer, folder: Path, memory: bool = False) -> None:
        """server: it runs."""
        self.folder, self.memory = folder, memory
        self.worlds: dict[tuple[int, bool], World] = {}
        self.runs = 0

    def __call__(self, world: int, cases: Sequence[Case], cuda: bool = False) -> list[Result]:
        results = []
        for case in cases:
            key = (world, cuda)
            if key not in self.worlds or not self.worlds[key].alive:
                if key in self.worlds:
                    self.worlds[key].close()
                folder = self.folder / f"world{world}-{self.runs}"
                self.worlds[key] = World(world, folder, cuda, self.memory)
            results.append(self.worlds[key].run(case, self._folder(case)))
        return results

    def _folder(self, case: Case) -> Path:
        """The folder of a run, which is there if it goes on."""
        self.runs += 1
        out = Path(case.resume) if case.resume else self.folder / f"run{self.runs}"
        out.mkdir(parents=True, exist_ok=bool(case.resume))
        return out

    def alone(self, case: Case) -> Result:
        """The case in one process, this one: graph parallel with one rank is plain training. Always
        on the CPU."""
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
    from gnnplan.executor.launch.asked import last_of
    from gnnplan.executor.ranks.checkpoint import Checkpoints, handed_over, question
    from gnnplan.executor.train import train

    problem = case.problem(rank.world)
    strategy = case.settled(problem)
    asked = question(problem, strategy)
    checkpoints = Checkpoints(out, rank.rank, case.checkpoint_every, asked)
    if case.resume:
        last, of_another = last_of(out, problem, strategy)
        checkpoints.go_on(last, handed_over(out, asked)[last] if of_another else None)
    train(rank, problem, strategy, out, case.epochs, case.eval_every, checkpoints=checkpoints)


def be_rank(channel: Connection[Any, Any]) -> None:
    """Train the cases that come in, until there are no more."""
    faulthandler.register(signal.SIGUSR1)
    import warnings

    import torch

    from gnnplan.executor import train
    from gnnplan.executor.ranks import machine
    from gnnplan.executor.ranks.opening import open_rank

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
        # trainings collect circles, but not in what earlier ones have imported: that takes a tenth
        # of a second
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
    """Run the file, or after '-m' the module, with these words."""
    module = argv[0] == "-m"
    name, sys.argv = argv[module], argv[module:]
    (runpy.run_module if module else runpy.run_path)(name, run_name="__main__")


def _be(
    channel: Connection[Any, Any], env: dict[str, str], files: tuple[str, str], argv: list[str]
) -> None:
    """Be a Forked, whose standard output and errors go into these files."""
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
