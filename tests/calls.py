"""Calls of `gnnplan` in a test's own process, as the fixture `gnnplan` (conftest.py); of programs; what
calls allocate; and a `gnnplan run` from outside: its processes, and what it leaves."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gnnplan.cli import app


class Answer(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which is one JSON document and nothing else."""
        return json.loads(self.out)


def spelt(words: Iterable[object]) -> list[str]:
    """The words of a call: text is split as a shell does, a path is one word."""
    split = [shlex.split(word) if isinstance(word, str) else [str(word)] for word in words]
    return [word for some in split for word in some]


def call(*words: object) -> None:
    """call("validate", path, ...), which prints and raises."""
    app(spelt(words), standalone_mode=False)


def planned(path: Path, *words: object) -> Path:
    """The plan that `gnnplan plan` writes there."""
    call("plan", *words, "-o", path)
    return path


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address that nobody listens on."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def ended_well(
    *command: object, within: float = 100, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A program that must end with 0 within so many seconds; how: as for subprocess.run."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=within, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """`with allocations() as most`: most() is the most that Python held at once in the block [B]."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def raising(error: BaseException, within: Any = None) -> Callable[..., None]:
    """A function that fails whatever it is given, in such a context."""

    def broken(*_: object, **__: object) -> None:
        with within or nullcontext():
            raise error

    return broken


def everything(folder: Path) -> dict[Path, bytes | None]:
    """What is in a folder, and in its folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def turn_a_bit(path: Path, at: int = -1) -> None:
    """Of this byte, as a disk or a copy may."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@contextmanager
def rewritten(path: Path) -> Iterator[Any]:
    """`with rewritten(path) as document`: a file of JSON, as it is changed in the block."""
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps(document))


def rows_of(out: Path) -> list[dict[str, Any]]:
    """What a run wrote of its epochs."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


WITHIN = 30  # [s] all processes must have ended after a rank is lost


def marked(mark: str) -> dict[int, dict[str, str]]:
    """Environment of every process that has this in it, by its id; zombies have ended."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            raw = (folder / "environ").read_bytes()
            if mark.encode() in raw:
                parts = raw.decode(errors="replace").split("\0")
                found[int(folder.name)] = dict(part.split("=", 1) for part in parts if "=" in part)
    return found


@dataclass
class Started:
    """A `gnnplan run` and all processes below it, found by a mark in their environment."""

    process: subprocess.Popen[bytes]
    mark: str
    out: Path
    logs: Path

    def alive(self) -> dict[int, dict[str, str]]:
        """Environment of every process that is left, by its id."""
        return marked(self.mark)

    def rank(self, rank: int) -> int:
        """Process id of a rank."""
        return next(pid for pid, env in self.alive().items() if env.get("RANK") == str(rank))

    def epochs(self) -> list[dict]:
        """The complete lines of metrics.jsonl; raises where one is garbled."""
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until_training(self) -> None:
        end = time.monotonic() + 60
        while len(self.epochs()) < 3:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end, "no epoch within 60 s"
            time.sleep(0.05)

    def ended(self, within: float = WITHIN) -> int:
        """The exit code, once no process is left."""
        end = time.monotonic() + within
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {within:g} s\n{self.stderr}") from None
        while left := self.alive():
            assert time.monotonic() <= end, f"left behind: {list(left)}\n{self.stderr}"
            time.sleep(0.05)
        return code

    @property
    def stdout(self) -> str:
        return (self.logs / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.logs / "stderr").read_text()

    def check_metrics(self) -> None:
        """Every finished epoch is a whole line, none twice, and the error counts them."""
        rows = rows_of(self.out)
        assert rows == self.epochs()
        assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(row["loss"] > 0 for row in rows) and len(rows) >= 3
        assert f"{len(rows)} finished epochs are in {self.out / 'metrics.jsonl'}" in self.stderr


def srun(ranks: int, per_node: int, job: int = 0) -> list[dict[str, str]]:
    """What Slurm has each of so many ranks know, with this machine as every node."""
    step = {"SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_NTASKS_PER_NODE": str(per_node)}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid() + job)}
    step |= {"CUDA_VISIBLE_DEVICES": ""}
    places = ((str(r), str(r // per_node), str(r % per_node)) for r in range(ranks))
    names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID")
    return [step | dict(zip(names, place, strict=True)) for place in places]


Start = Callable[..., Started]


def starting(folder: Path) -> Iterator[Start]:
    """start(plan, ...) begins a `gnnplan run`, start(None, resume=out) goes on with one."""
    begun: list[Started] = []

    def begin(
        plan_file: Path | None,
        *more: str,
        resume: Path | None = None,
        out: Path | None = None,
        launcher: tuple[str, ...] = (),
        **env: str,
    ) -> Started:
        mark = f"GNNPLAN_TEST={uuid.uuid4().hex}"
        name, value = mark.split("=")
        logs = folder / f"logs{len(begun)}"
        logs.mkdir()
        out = resume or out or folder / f"run{len(begun)}"
        what = ["--resume", str(resume)] if resume else [str(plan_file), "--out", str(out)]
        command = [sys.executable, *(launcher or ("-m", "gnnplan")), "run", *what, *more]
        with open(logs / "stdout", "wb") as stdout, open(logs / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | {name: value} | env,
                start_new_session=True,
                # a job in the background ignores it
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        begun.append(Started(process, mark, out, logs))
        return begun[-1]

    try:
        yield begin
    finally:
        left = {pid for started in begun for pid in started.alive()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for started in begun:
            started.process.wait(10)
    assert not left, f"processes were left behind: {left}"
