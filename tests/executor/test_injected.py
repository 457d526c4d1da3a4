"""Fifty faults: kinds x phases, in ranks and in the launcher. After each nothing hangs and no
process is left, the error names the rank and where it was, finished epochs are on disk, and
training goes on from the last checkpoint: in the end it is the unbroken one, to the bit.

A chain is a training that is hit again and again: restarts (and where the launcher was hit
--resume) carry it to its end. A fault happens at a moment that it chooses, by a patch that Python
loads before the program: the rank does it to itself when it begins what is told.

All fifty run at night, shared out among the strategies. Every time a chain of two: a rank that stops
and is started anew, and a launcher that is killed, whose training is resumed."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from ranks import Case, Ranks
from started import Start

from gnnplan.cli import app

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="finds ranks by their environment in /proc"
    ),
]
GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
FULL: dict[str, Any] = {"model": "sage", "layers": 3, "hidden": 8, "dropout": 0.3}
MINI: dict[str, Any] = {
    "model": "sage",
    "mode": "mini",
    "batch": 30,
    "fanout": (3, 2),
    "layers": 2,
    "hidden": 8,
    "dropout": 0.3,
}
# epochs from checkpoint to checkpoint (and evaluation to evaluation); [s] a rank waits for its
# peers
EVERY, TIMEOUT = 2, 5

PATCH = '''
"""Do to this process, or to its launcher, the first fault that has not happened yet, when its rank begins what the fault waits for."""
import json, os, re, signal, threading
from pathlib import Path

def due():
    for path in sorted(Path(os.environ["FAULTS"]).glob("*.json")):
        if not path.with_suffix(".done").exists():
            return path, json.loads(path.read_text())

if "RANK" in os.environ and "FAULTS" in os.environ and (told := due()) and told[1]["rank"] == int(os.environ["RANK"]):
    path, fault = told

    def happen(where):
        path.with_suffix(".done").write_text(where)
        kind = fault["kind"]
        if kind.startswith("launcher "):
            os.kill(os.getppid(), getattr(signal, kind.split()[1]))
        elif kind.startswith("SIG"):
            # sent to the process, any thread may take it, and this one goes on until that is scheduled
            signal.pthread_kill(threading.get_ident(), getattr(signal, kind))
        elif kind == "raises":
            raise ZeroDivisionError("injected") if where else SystemExit(1)
        elif kind == "starves":
            import resource, torch
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), -1))
            held = []
            while True:  # what the allocator has kept comes first
                held.append(torch.zeros(16 << 20))

    if not fault["at"]:
        happen("")
    else:
        import gnnplan.executor.ranks.activity as activity
        begin = activity.Activity.begin

        def watched(self, lane, what):
            begin(self, lane, what)
            said = re.fullmatch(r"(?:(.*) of )??((?:the \\w+ of )?epoch (\\d+)|start|set-up|the end)", str(self))
            if said and not path.with_suffix(".done").exists() and re.search(fault["at"], what):
                if said[3] is None or int(said[3]) >= fault["epoch"]:
                    happen(what)

        activity.Activity.begin = watched
'''

PHASES = {  # where a fault waits: what a rank begins
    "python": "",
    "start": "^start$",
    "set-up": "^set-up$",
    "exchange": "^(halo|pull|receive|all_reduce)",
    "computation": "^backward",
    "metrics": "^the metrics",
    "evaluation": "^the evaluation",
    "checkpoint": "^the checkpoint",
    "end": "^the end$",
}


class Fault(NamedTuple):
    kind: str  # a signal to the rank, 'raises', 'starves', or 'launcher SIGxxx'
    phase: str

    def told(self, stderr: str, rank: int, where: str) -> None:
        """The error names the rank, its server and what it was in."""
        inside = re.escape(where) if where else "start"
        who = rf"rank {rank} \(server \d\)"
        lost = rf"{who} was lost in .*{inside}.*: "
        how = {
            "SIGKILL": rf"{lost}killed by SIGKILL\. ",
            "SIGTERM": rf"{lost}killed by SIGTERM\. ",
            "raises": rf"{lost}(ZeroDivisionError: injected|exit code 1)\. ",
            "starves": (
                rf"{lost}memory ran out .*\n.* predicts for its fullest rank .*:\n( "
                r" .*\n)+measured: .* free on this machine\n"
            ),
            "SIGSTOP": (
                rf"{who}, in .*{inside}.*, stopped answering: rank {1 - rank} \(server \d\) waited"
                rf" {TIMEOUT} s in "
            ),
        }[self.kind]
        assert re.search(how, stderr), f"{self} of rank {rank} in {where!r}: {how}\n{stderr}"


ORDER = list(PHASES)
IN_RANKS = [
    Fault(kind, phase)
    for phase in PHASES
    for kind in ("SIGKILL", "raises", "SIGTERM", "starves", "SIGSTOP")
    if (kind, phase) not in (("starves", "python"), ("SIGSTOP", "python"), ("SIGSTOP", "start"))
]
IN_LAUNCHER = [
    Fault(f"launcher {name}", phase)
    for name in ("SIGINT", "SIGTERM", "SIGKILL")
    for phase in ("exchange", "evaluation", "checkpoint")
][:8]
CASES = [
    Case("graph_parallel", GRAPH, FULL),
    Case("pipegcn_gf", GRAPH, FULL),
    Case("granndis(max_hop=1,fanout=5,batches=2)", GRAPH, FULL, servers=2),
    Case("gnnpipe(stages=2,chunks=4)", GRAPH, FULL),
    Case("gsplit(prefetch=1)", GRAPH, MINI),
    Case("p3(pipelined=True)", GRAPH, MINI),
]


def shared_out(in_ranks: list[Fault], in_launcher: list[Fault], cases: int) -> list[list[Fault]]:
    """A chain per case, so that training gets on: the end comes last, and the launcher is hit when
    there is a checkpoint."""
    chains = []
    for number in range(cases):
        mine = sorted(in_ranks[number::cases], key=lambda fault: ORDER.index(fault.phase))
        last = [fault for fault in mine if fault.phase == "end"]
        chains.append([*mine[: len(mine) - len(last)], *in_launcher[number::cases], *last])
    return chains


# PipeGCN has something under way between two steps
BY_DAY = (CASES[1], [Fault("SIGSTOP", "exchange"), Fault("launcher SIGKILL", "evaluation")])
AT_NIGHT = zip(CASES, shared_out(IN_RANKS, IN_LAUNCHER, len(CASES)), strict=True)
CHAINS = [BY_DAY, *(pytest.param(*chain, marks=pytest.mark.nightly) for chain in AT_NIGHT)]


def test_they_are_fifty() -> None:
    chains = shared_out(IN_RANKS, IN_LAUNCHER, len(CASES))
    faults = [fault for chain in chains for fault in chain]
    assert len(faults) == len(set(faults)) == 50
    assert {fault.phase for fault in faults} == set(PHASES)
    assert set(BY_DAY[1]) <= set(faults)


def planned(case: Case, folder: Path) -> Path:
    """The case's plan."""
    problem = case.problem(2)
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump(problem.cluster.model_dump(mode="json", exclude_defaults=True))
    )
    (folder / "workload.yaml").write_text(
        yaml.safe_dump(problem.workload.model_dump(mode="json", exclude_defaults=True))
    )
    app(
        [
            "plan",
            "--graph",
            case.graph,
            "--cluster",
            str(folder / "cluster.yaml"),
            "--workload",
            str(folder / "workload.yaml"),
            "--strategy",
            case.strategy,
            "-o",
            str(folder / "plan.json"),
        ],
        standalone_mode=False,
    )
    return folder / "plan.json"


@pytest.mark.parametrize(
    ("case", "faults"),
    CHAINS,
    ids=lambda value: value.strategy if isinstance(value, Case) else f"{len(value)} faults",
)
def test_a_training_that_is_hit_again_and_again_is_the_unbroken_one(
    case: Case, faults: list[Fault], run_ranks: Ranks, start: Start, tmp_path: Path
) -> None:
    epochs = EVERY * (len(faults) + 2)
    folder = tmp_path / "faults"
    folder.mkdir()
    (tmp_path / "sitecustomize.py").write_text(PATCH)
    for place, fault in enumerate(faults):
        order = {
            "rank": place % 2,
            "kind": fault.kind,
            "at": PHASES[fault.phase],
            "epoch": 1 + EVERY * place,
        }
        (folder / f"{place:02}.json").write_text(json.dumps(order))
    unbroken = run_ranks(2, [replace(case, epochs=epochs, eval_every=EVERY)])[0]
    flags = [
        "--epochs",
        str(epochs),
        "--eval-every",
        str(EVERY),
        "--checkpoint-every",
        str(EVERY),
        "--timeout",
        str(TIMEOUT),
    ]
    env = {
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "FAULTS": str(folder),
        "GNNPLAN_CACHE": str(tmp_path / "cache"),
    }
    run = start(planned(case, tmp_path), *flags, "--restarts", str(len(faults) + 3), **env)
    seen, past = 0, ""
    while (code := run.ended(240)) != 0:
        done = len(list(folder.glob("*.done")))
        assert done > seen and faults[done - 1].kind.startswith("launcher "), run.stderr
        name = faults[done - 1].kind.split()[1]
        assert (
            code
            == {"SIGINT": 130, "SIGTERM": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[name]
        ), run.stderr
        seen, past = done, past + run.stderr
        run = start(None, "--restarts", str(len(faults) + 3), resume=run.out, **env)
    told = past + run.stderr
    # all have happened
    places = [path.with_suffix(".done").read_text() for path in sorted(folder.glob("*.json"))]
    for place, (fault, where) in enumerate(zip(faults, places, strict=True)):
        if not fault.kind.startswith("launcher "):
            fault.told(told, place % 2, where)
    nothing_lost(told)
    assert not list(run.out.glob("activity*")) and not list(run.out.glob("error*"))
    result = replace(unbroken, out=run.out)
    assert result.weights.keys() == unbroken.weights.keys()
    assert all(torch.equal(result.weights[name], p) for name, p in unbroken.weights.items())
    assert [row["epoch"] for row in result.metrics] == list(
        range(1, epochs + 1)
    ) and result.losses == unbroken.losses
    assert all(result.rank(rank)["bytes"] == unbroken.rank(rank)["bytes"] for rank in range(2))


def nothing_lost(told: str) -> None:
    """Every checkpoint but the one that was being written is there to go on from."""
    ends = re.findall(
        r"(\d+) finished epochs are in \S+?(?:; go on from epoch (\d+) with|\n)", told
    )
    assert ends
    for finished, last in ends:
        assert int(last or 0) >= (int(finished) - 1) // EVERY * EVERY - EVERY
    lasts = [int(last or 0) for _, last in ends]
    assert lasts == sorted(lasts)
