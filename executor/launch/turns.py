"""Runs that train in turns: each waits until the file `turns` in its folder lets it go on.

    gnnplan tune                a run (its launcher, `main`)         its ranks
    InTurns.turn(5)  --5-->     runs/tune-1/01-pipegcn/turns  --5--> epochs 1 to 5, then `allowed`
    InTurns.end()    --end-->                                        waits, until there is more

What waits computes nothing, so runs that live beside each other are measured one after the other.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnnplan.executor.launch.asked import Asked
from gnnplan.executor.launch.emulation import Emulated
from gnnplan.executor.launch.launcher import begin
from gnnplan.executor.launch.options import MOST, Options
from gnnplan.executor.launch.rank_process import TURNS
from gnnplan.executor.ranks.opening import die_with_parent
from gnnplan.planner.decision.plan import read, write
from gnnplan.planner.vocabulary.errors import GnnplanError
from gnnplan.planner.vocabulary.files import make_folder, write_atomically

LOOK_S = 0.05  # [s] between two looks at a run's epochs
GRACE_S = 15.0  # [s] that a run has to end, before it is killed


class InTurns:
    """A run of this machine that trains when it is its turn. Close it: no process stays."""

    def __init__(self, document: dict[str, Any], folder: Path, emulate: Emulated | None) -> None:
        """Begin it; it trains nothing yet. document: its plan, whose best it trains."""
        make_folder(folder)
        self.folder, self.allowed = folder, 0
        self._rows: list[dict[str, Any]] = []  # of metrics.jsonl, as far as it has been read
        self._read = 0  # [B]
        self._allow("0")
        write(folder / "plan.json", document)
        told = None if emulate is None else asdict(emulate)
        self._errors = (folder / "errors.txt").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gnnplan.executor", "turns", folder, json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def turn(self, epochs: int, most_s: float) -> str:
        """Train so many epochs more, within so many seconds -> why it failed, or ''.

        A run that takes longer is ended, and so is one that fails: `is_over`.
        """
        until = time.monotonic() + most_s
        self.allowed += epochs
        self._allow(str(self.allowed))
        while len(self.metrics()) < self.allowed:
            if self._process.poll() is not None:
                return self._why()
            if time.monotonic() > until:
                self.close()
                return ""
            time.sleep(LOOK_S)
        return ""

    @property
    def is_over(self) -> bool:
        """Whether its processes have ended."""
        return self._process.poll() is not None

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl; the run may have begun another."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
            self._rows += [json.loads(line) for line in whole.splitlines()]
            self._read += len(whole) + len(end)
        return self._rows

    def end(self) -> bool:
        """Let it finish as a run does that has trained all its epochs -> whether it did."""
        self._allow("end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        is_finished = self._process.poll() == 0
        self.close()
        return is_finished

    def close(self) -> None:
        """End its processes now."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()
        for name in (TURNS, "errors.txt"):
            (self.folder / name).unlink(missing_ok=True)

    def _allow(self, turns: str) -> None:
        write_atomically(self.folder / TURNS, turns)

    def _why(self) -> str:
        """What the launcher has said last."""
        self._errors.seek(0)
        said = self._errors.read().strip()
        self.close()
        return said.rpartition("error: ")[2] or f"exit code {self._process.returncode}"


def main() -> None:
    """`python -m gnnplan.executor turns FOLDER EMULATED`: launch the folder's plan."""
    die_with_parent()
    folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    options = Options(epochs=MOST, eval_every=0, checkpoint_every=0, quiet=True, turns=True)
    try:
        emulate = told and Emulated(**told)
        begin(Asked(read(folder / "plan.json"), folder, options, emulate=emulate))
    except GnnplanError as error:
        raise SystemExit(f"error: {error}") from None
