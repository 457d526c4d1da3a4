"""Faults: what may happen to a run of two ranks, and when. tests/executor/test_injected.py has fifty
of them, and tests/executor/soak.py as many as there is time for.

A chain is a training that is hit again and again: restarts (and where the run was ended, --resume)
carry it to its end. A fault happens at a moment that it chooses, by a patch that Python loads before
the program: the rank does it to itself when it begins what is told. After each nothing hangs and no
process is left, the error names the rank and where it was, finished epochs are on disk; in the end
the training is the unbroken one, to the bit."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from calls import Start, Started

from gnnplan.planner.decision import plan
from gnnplan.planner.decision.search import search
from gnnplan.testing.ranks import Case, Result

GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
FULL: dict[str, Any] = {"model": "sage", "layers": 3, "hidden": 8, "dropout": 0.3}
MINI: dict[str, Any] = {"model": "sage", "mode": "mini", "batch": 30, "fanout": (3, 2), "layers": 2}
MINI |= {"hidden": 8, "dropout": 0.3}
CASES = [
    Case("graph_parallel", GRAPH, FULL),
    Case("pipegcn_gf", GRAPH, FULL),
    Case("granndis(max_hop=1,fanout=5,batches=2)", GRAPH, FULL, servers=2),
    Case("gnnpipe(stages=2,chunks=4)", GRAPH, FULL),
    Case("gsplit(prefetch=1)", GRAPH, MINI),
    Case("p3(pipelined=True)", GRAPH, MINI),
]
# epochs from checkpoint to checkpoint (and evaluation to evaluation); [s] a rank waits for its
# peers; [s] in which a run ends
EVERY, TIMEOUT, PATIENCE = 2, 5, 240

PATCH = '''
"""Do to this process, to its sampler, its files or its launcher the first fault that has not happened yet, when its rank begins what the fault waits for."""
import json, multiprocessing, os, re, signal, subprocess, sys, threading, time
from pathlib import Path

def due():
    """The first fault that has not happened, where it is this rank's."""
    for path in sorted(Path(os.environ["FAULTS"]).glob("*.json")):
        if not path.with_suffix(".done").exists():
            return path, json.loads(path.read_text())
    return None, {}

def stop():
    # sent to the process, any thread may take it, and this one goes on until that is scheduled
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

def limit(what, most):
    import resource
    resource.setrlimit(what, (most, resource.getrlimit(what)[1]))

def happen(path, fault, where):
    path.with_suffix(".done").write_text(where)
    kind, out, me = fault["kind"], Path(sys.orig_argv[-1]), fault["rank"]
    if kind.startswith("launcher "):
        os.kill(os.getppid(), getattr(signal, kind.split()[1]))
        time.sleep(1)  # else the training may end before the launcher knows
    elif kind == "SIGSTOP":
        stop()
    elif kind == "SIGSTOP and SIGCONT":
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        stop()
    elif kind == "reads":
        time.sleep(fault["away_s"])
    elif kind.startswith("SIG"):
        signal.pthread_kill(threading.get_ident(), getattr(signal, kind))
    elif kind == "raises":
        if not where:  # Python has not begun the program: it would print a traceback of its own
            os._exit(1)
        raise ZeroDivisionError("injected")
    elif kind == "starves":
        import resource, torch
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + (64 << 20))
        held = []
        while True:  # what the allocator has kept comes first
            held.append(torch.zeros(16 << 20))
    elif kind == "no sampler":
        for sampler in multiprocessing.active_children():
            sampler.kill()
    elif kind == "cut checkpoint":
        files = sorted(out.glob(f"checkpoints/epoch*.rank{me}.safetensors"), key=os.path.getmtime)
        for path in files[-1:]:
            os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "no trace":
        (out / f"trace.rank{me}.json").unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "no metrics":
        os.rename(out / "metrics.jsonl", out / "away")
    elif kind == "no link":
        # of this rank's server, until all have given up waiting for each other
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        mend = f"sleep {fault['away_s']}; ip link set eth0 up"
        subprocess.Popen(["sh", "-c", mend], start_new_session=True)
    elif kind == "no files":
        import resource
        limit(resource.RLIMIT_NOFILE, 3)
    elif kind == "full disk":
        file = os.open(out / "filler", os.O_WRONLY | os.O_CREAT)
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(file, bytes(size))
            except OSError:
                pass

if "RANK" in os.environ and "FAULTS" in os.environ:
    mine, (path, fault) = int(os.environ["RANK"]), due()
    if path is None:
        pass
    elif not fault["at"] and fault["rank"] == mine:
        happen(path, fault, "")
    else:
        import gnnplan.executor.ranks.activity as activity
        begin = activity.Activity.begin

        one_at_a_time = threading.Lock()  # a rank has several lanes

        def watched(self, lane, what):
            global path, fault
            begin(self, lane, what)
            with one_at_a_time:
                if path is not None and path.with_suffix(".done").exists():
                    # what follows a fault that ranks do not outlive is of the next attempt
                    path, fault = due() if fault["outlived"] else (None, {})
            if path is None or fault["rank"] != mine or not fault["at"]:
                return
            said = re.fullmatch(r"(?:(.*) of )??((?:the \\w+ of )?epoch (\\d+)|start|set-up|the end)", str(self))
            if said and re.search(fault["at"], what) and (said[3] is None or int(said[3]) >= fault["epoch"]):
                happen(path, fault, what)

        activity.Activity.begin = watched
'''

# where a fault waits: what a rank begins
PHASES = {"python": "", "start": "^start$", "set-up": "^set-up$"}
PHASES |= {"exchange": "^(halo|pull|receive|all_reduce)", "computation": "^backward"}
PHASES |= {phase: f"^the {phase}" for phase in ("metrics", "evaluation", "checkpoint")}
PHASES |= {"end": "^the end$"}
AMID = list(PHASES)[3:-1]
# the run ends with one of these codes, and is resumed once what was done to it is undone
ENDINGS = {"launcher SIGINT": (130,), "launcher SIGTERM": (128 + signal.SIGTERM,)}
ENDINGS |= {"launcher SIGKILL": (-signal.SIGKILL,), "no metrics": (2,), "no files": (2,)}
ENDINGS |= {"full disk": (2,)}


class Fault(NamedTuple):
    kind: str  # a signal to the rank, 'launcher SIGxxx', or what PATCH calls it
    phase: str

    @property
    def is_outlived(self) -> bool:
        """Whether the ranks go on."""
        return self.kind == "SIGSTOP and SIGCONT"

    def told(self, stderr: str, rank: int, where: str) -> None:
        """The error names rank, server and where it was, or file and remedy."""
        inside = re.escape(where) if where else "start"
        who = rf"rank {rank} \(server \d\)"
        lost = rf"{who} was lost in .*{inside}.*: "
        killed = rf"{lost}killed by SIGKILL\. "
        raised = r"ZeroDivisionError: injected \(traceback in .*\.txt\)"
        said = {
            **dict.fromkeys(("SIGKILL", "cut checkpoint", "no trace"), killed),
            "SIGTERM": rf"{lost}killed by SIGTERM\. ",
            "raises": rf"{lost}({raised}|exit code 1)\. ",
            "starves": (
                rf"{lost}memory ran out .*\n.* predicts for its fullest rank .*:\n( "
                r" .*\n)+measured: .* free on this machine\n"
            ),
            "SIGSTOP": (  # during set-up, peers wait longer, and the launcher tells
                rf"{lost}no rank has done anything for \d+ s; this one is stopped|{who}, in"
                rf" .*{inside}.*, stopped answering: rank {1 - rank} \(server \d\) waited"
                rf" {TIMEOUT} s in "
            ),
            "no sampler": rf"{who} was lost in .*: its sampler( \d of \d)?, a process of its own, (was|exit)",
            "no link": (
                rf"ranks do not reach each other: .*{who} in .* of epoch.* waited {TIMEOUT} s\. None"
                r" of them died"  # stale rows are waited for later than they are sent
            ),
            "no metrics": r"metrics\.jsonl.* put it back",
            "no files": r"Too many open files.* \(ulimit -n 4096\)",
            "full disk": r"No space left on device.* free the disk",
            **dict.fromkeys(
                ("launcher SIGINT", "launcher SIGTERM"),
                r"note: \d+ finished epochs are in .*; go on from epoch \d",
            ),
        }
        how = said.get(self.kind, "")
        assert re.search(how, stderr), f"{self} of rank {rank} in {where!r}: {how}\n{stderr}"


def planned(case: Case, folder: Path) -> Path:
    """The case's plan."""
    problem = case.problem(2)
    plan.write(folder / "plan.json", plan.make(search(problem, forced=case.settled(problem))))
    return folder / "plan.json"


def epochs_of(faults: int) -> int:
    """Epochs in which so many faults find their moment, and are noticed."""
    return EVERY * (faults + 3)


def train_through(
    case: Case,
    faults: Sequence[Fault],
    unbroken: Result,
    start: Start,
    folder: Path,
    *more: str,
    out: Path | None = None,
) -> None:
    """Train, hit by these faults one after the other, as `unbroken` was trained; `more` are options
    of the run."""
    orders = folder / "faults"
    orders.mkdir()
    (folder / "sitecustomize.py").write_text(PATCH)
    for place, fault in enumerate(faults):
        order = {
            "rank": place % 2,
            "kind": fault.kind,
            "outlived": fault.is_outlived,
            "at": PHASES[fault.phase],
            "away_s": TIMEOUT + 2,
            # a run that is ended needs a checkpoint to go on from
            "epoch": 1 + EVERY * (place + 2 * (fault.kind in ENDINGS)),
        }
        (orders / f"{place:02}.json").write_text(json.dumps(order))
    env = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "FAULTS": str(orders)}
    env |= {"GNNPLAN_CACHE": str(folder / "cache")}
    more = (*more, "--restarts", str(len(faults) + 3))
    epochs = epochs_of(len(faults))
    words = f"--epochs {epochs} --eval-every {EVERY} --checkpoint-every {EVERY} --timeout {TIMEOUT}"
    run = start(planned(case, folder), *words.split(), *more, out=out, **env)
    seen, past = 0, ""
    while (code := run.ended(PATIENCE)) != 0:
        done = len(list(orders.glob("*.done")))
        endings = [ENDINGS.get(fault.kind, ()) for fault in faults[seen:done]]
        expected = any(code in codes for codes in endings)
        assert expected, f"exit code {code} after {faults[seen:done]}\n{run.stderr}"
        undo(run.out)
        seen, past = done, past + run.stderr
        run = start(None, *more, resume=run.out, **env)
    check(case, faults, orders, past + run.stderr, replace(unbroken, out=run.out), unbroken, run)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 16 MB; to make one takes root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def undo(out: Path) -> None:
    """Free the disk, and put the metrics back."""
    (out / "filler").unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        if not (out / "metrics.jsonl").exists():
            (out / "away").rename(out / "metrics.jsonl")


def check(
    case: Case,
    faults: Sequence[Fault],
    orders: Path,
    told: str,
    result: Result,
    unbroken: Result,
    run: Started,
) -> None:
    """All faults have happened and were told, and the training is the unbroken one."""
    done = [path.with_suffix(".done") for path in sorted(orders.glob("*.json"))]
    missing = [fault for fault, path in zip(faults, done, strict=True) if not path.exists()]
    assert not missing, f"{missing} did not happen\n{told}"
    for place, (fault, path) in enumerate(zip(faults, done, strict=True)):
        fault.told(told, place % 2, path.read_text())
    assert "Traceback (most recent call last)" not in told, told
    nothing_lost(told, any(fault.kind == "cut checkpoint" for fault in faults))
    left = [path for glob in ("activity*", ".*") for path in run.out.glob(glob)]
    assert not left, f"files are left: {left}\n{told}"
    epochs = [row["epoch"] for row in result.metrics]
    assert epochs == list(range(1, epochs_of(len(faults)) + 1)), f"{case}: {epochs}\n{told}"
    apart, weights = f"{case} is not the unbroken training\n{told}", unbroken.weights
    assert result.weights.keys() == weights.keys(), apart
    assert all(torch.equal(result.weights[name], p) for name, p in weights.items()), apart
    assert result.losses == unbroken.losses, apart
    for rank in range(2):
        assert result.rank(rank)["bytes"] == unbroken.rank(rank)["bytes"], apart


def nothing_lost(told: str, is_cut: bool) -> None:
    """Every checkpoint is there, but one being written. is_cut: one was cut."""
    ends = re.findall(
        r"(\d+) finished epochs are in \S+?(?:; go on from epoch (\d+) with|\n)", told
    )
    lasts = [int(last or 0) for _, last in ends]
    for finished, last in zip((int(finished) for finished, _ in ends), lasts, strict=True):
        least = (finished - 1) // EVERY * EVERY - EVERY
        assert last >= least, f"{finished} epochs are finished, and {last} are kept\n{told}"
    assert is_cut or lasts == sorted(lasts), f"kept: {lasts}\n{told}"
