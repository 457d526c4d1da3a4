"""What a plan asks for beside what is here: every row, with each of its verdicts; no process starts."""

import json
import resource
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnnplan import __version__
from gnnplan.executor.launch import preflight
from gnnplan.executor.launch.preflight import Row, look, must_meet, must_start
from gnnplan.executor.launch.run_request import Options, RunRequest
from gnnplan.executor.ranks.machine import ProcessRoom
from gnnplan.planner.decision import plan as documents
from gnnplan.planner.decision.search import search
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes
from gnnplan.testing.ranks import Case

GRAPH = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
HERE = torch.__version__.partition("+")[0]
Patch = pytest.MonkeyPatch
Edit = Callable[[dict[str, Any]], Any]  # of a plan's document


def made(case: Case) -> RunRequest:
    problem = case.problem(2)
    found = search(problem, forced=parse(case.strategy).settle(problem))
    document = documents.runnable_part(found)
    return RunRequest(json.loads(json.dumps(document)), Path("runs/new"), Options())


@pytest.fixture(scope="module")
def asked():
    """Of two ranks on one server, without a file."""
    return made(Case("graph_parallel", GRAPH, {"hidden": 8, "layers": 2, "epochs": 50}))


@pytest.fixture(scope="module")
def ahead():
    """Of mini-batches that a sampler makes two steps ahead."""
    mini = {"mode": "mini", "batch": 30, "fanout": (3, 2), "layers": 2, "hidden": 8}
    return made(Case("data_parallel(prefetch=2)", GRAPH, mini))


@pytest.fixture(autouse=True)
def this_machine(monkeypatch):
    """Two cores without a GPU, with room for everything."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "gpus", lambda: 0)
    monkeypatch.setattr(preflight, "cores", lambda: 2)
    monkeypatch.setattr(preflight, "device_name", lambda device: "AMD EPYC 7763")
    monkeypatch.setattr(preflight, "free_memory", lambda: 8e9)
    monkeypatch.setattr(preflight, "process_room", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**10))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))


def row(asked: RunRequest, what: str) -> Row:
    return next(row for row in look(asked) if row.what == what)


def edited(asked: RunRequest, edit: Edit, **fields: Any) -> RunRequest:
    document = json.loads(json.dumps(asked.document))
    edit(document)
    return replace(asked, document=document, **fields)


def test_a_plan_for_this_machine_starts_without_a_word(asked, ahead):
    for plan in (asked, ahead):
        assert [row for row in look(plan) if row.verdict != "ok"] == []
        assert must_start(plan) == []


def gpu_plan(document: dict[str, Any]) -> None:
    document["cluster"]["device"] |= {"kind": "cuda", "name": "NVIDIA A100 40GB"}


def with_servers(document: dict[str, Any]) -> None:
    document["cluster"] |= {"servers": 2, "gpus_per_server": 1}
    document["best"]["placement"] = [
        {"rank": rank, "server": rank, "gpu": 0} for rank in range(document["best"]["gpus"])
    ]


def lacking(monkeypatch: Patch, name: str, value: Any) -> None:
    monkeypatch.setattr(preflight, name, lambda *_: value)


def device(d: dict[str, Any], name: str) -> None:
    d["cluster"]["device"].update(name=name)


FEW = ProcessRoom(15, "ulimit -u is 20", "allow more processes")
SIXTEEN = FEW._replace(left=16)
FULL = SimpleNamespace(free=10**4)
FREE = "free the disk, give another --out, or train with --checkpoint-every 0"
FACES = "set GLOO_SOCKET_IFNAME to one of these"
# of the plan's document d, and what this machine lacks -> the row's name, verdict and words
CASES: dict[str, tuple[str, Callable[[dict[str, Any], Patch], Any], str, str]] = {
    "an old plan": ("version", lambda d, m: d.update(gnnplan="0.1.0"), "differs", "old names are"),
    "another version": ("version", lambda d, m: d.update(gnnplan="9.9"), "stops", "plan again"),
    "other torch": ("torch", lambda d, m: d.update(torch="2.1.0"), "differs", "gnnplan measure"),
    "torch for CUDA": ("torch", lambda d, m: d.update(torch=f"{HERE}+cu999"), "ok", ""),
    "no torch said": ("torch", lambda d, m: d.pop("torch"), "ok", ""),
    "other data": ("graph", lambda d, m: d["graph"].update(hash="00"), "stops", "for other data"),
    "other sizes": ("graph", lambda d, m: d["graph"].update(vertices=7), "stops", "made for other"),
    "no graph": ("graph", lambda d, m: d["graph"].update(source="g.npz"), "stops", "no such file"),
    "GPUs": ("device", lambda d, m: gpu_plan(d), "differs", "gnnplan plan --cluster local"),
    "no GPU": ("GPUs", lambda d, m: gpu_plan(d), "differs", "on the processor and talk over Gloo"),
    "another": ("device", lambda d, m: device(d, "EPYC 9654"), "differs", "times will not be"),
    "the same": ("device", lambda d, m: device(d, "EPYC 7763 core"), "ok", ""),
    # two ranks use two
    "more cores": ("cores", lambda d, m: d["cluster"].update(cores=4), "ok", ""),
    "two servers": ("servers", lambda d, m: with_servers(d), "differs", "--emulate RATE"),
    "a core": ("cores", lambda d, m: lacking(m, "cores", 1), "differs", "--set cores=1"),
    "a GPU": ("device", lambda d, m: lacking(m, "gpus", 1), "differs", "not be those predi"),
    "memory": ("memory", lambda d, m: lacking(m, "free_memory", 3e8), "stops", "enough for 1: st"),
    "files": ("open files", lambda d, m: few_files(m), "stops", "ulimit -n 4096"),
    "few": ("processes", lambda d, m: lacking(m, "process_room", FEW), "stops", "allow more"),
    "enough": ("processes", lambda d, m: lacking(m, "process_room", SIXTEEN), "ok", ""),
    "disk": ("disk", lambda d, m: m.setattr(shutil, "disk_usage", lambda _: FULL), "stops", FREE),
    "face": ("interface", lambda d, m: m.setenv("GLOO_SOCKET_IFNAME", "lo,eth77"), "stops", FACES),
    "loopback": ("interface", lambda d, m: m.setenv("GLOO_SOCKET_IFNAME", "lo"), "ok", ""),
}


def few_files(monkeypatch: Patch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (99, 99))


@pytest.mark.parametrize("case", CASES)
def test_what_the_plan_says_and_this_machine_lacks(case, asked, monkeypatch):
    what, change, verdict, says = CASES[case]
    found = row(edited(asked, lambda document: change(document, monkeypatch)), what)
    assert found.verdict == verdict and says in found.says, found


def test_a_disk_is_asked_for_as_much_as_checkpoints_take(asked, monkeypatch):
    """Weights and Adam's moments of two ranks, three times; once more where two are there."""
    one = asked.predicted["parameters"] * 3
    for options, needed in (
        (Options(), 6 * one),
        (Options(resume=True), 2 * one),
        (Options(checkpoint_every=0), 0),
        (Options(checkpoint_every=51), 0),  # of 50 epochs
    ):
        for free, verdict in ((needed, "ok"), (needed - 1, "stops")):
            left = SimpleNamespace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda place, left=left: left)
            if free >= 0:
                assert row(replace(asked, options=options), "disk").verdict == verdict


def test_shared_memory_holds_the_batches_that_wait(asked, ahead, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    assert row(asked, "shared memory").verdict == "ok"
    found = row(ahead, "shared memory")
    assert found.verdict == "stops" and "--shm-size" in found.says
    waiting = 2 * ahead.predicted["graph"] * 2 / 4  # one in training, one loaded, two that wait
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=waiting))
    assert row(ahead, "shared memory").verdict == "ok"
    # a tenth is what predictions may be off
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=waiting / 1.2))
    assert row(ahead, "shared memory").verdict == "stops"
    # adjacency lists, as those that ranks gather from a folder of parts, do not wait there
    memory = ahead.document["best"]["predicted"]["memory"]
    assert memory["lists"] >= 8 * ahead.document["graph"]["vertices"], "degrees at least"
    more = edited(ahead, lambda d: d["best"]["predicted"]["memory"].update(lists=1e9))
    assert row(more, "shared memory") == row(ahead, "shared memory")


@pytest.mark.parametrize(("pipelined", "in_flight"), [(False, 1), (True, 3)])
def test_batches_that_wait_are_apart_from_those_in_flight(pipelined, in_flight):
    mini = {"mode": "mini", "batch": 30, "fanout": (3, 2), "layers": 2, "hidden": 8}
    plan = made(Case(f"p3(over='rank',prefetch=2,pipelined={pipelined})", GRAPH, mini))
    waiting = show_bytes(2 * plan.predicted["graph"] * 2 / (in_flight + 2))
    assert row(plan, "shared memory").planned.startswith(f"{waiting} of batches")


def test_graph_data_in_a_servers_memory_is_asked_for(asked, monkeypatch):
    """A plan that needs more than the server has started all the same: only ranks were counted."""
    plan = edited(asked, lambda d: (gpu_plan(d), d["best"]["predicted"].update(host_bytes=8.36e9)))
    assert row(plan, "memory").verdict == "ok"  # 7.6 GB at least, and 400 MB of ranks
    lacking(monkeypatch, "free_memory", 7.9e9)
    assert "enough for 1: " in row(plan, "memory").says
    lacking(monkeypatch, "free_memory", 7e9)
    found = row(plan, "memory")
    assert found.verdict == "stops" and "7.60 GB of graph data" in found.planned
    assert found.says.endswith("plan again with --set host_memory=7.00GB")


def test_gpus_of_a_plan_for_gpus(asked, monkeypatch):
    """Those of another size and form are the same GPU; too few are shared."""
    plan = edited(asked, gpu_plan)
    lacking(monkeypatch, "gpus", 2)
    lacking(monkeypatch, "device_name", "NVIDIA A100-SXM4-80GB")
    assert row(plan, "device").verdict == row(plan, "GPUs").verdict == "ok"
    lacking(monkeypatch, "device_name", "NVIDIA H100 80GB HBM3")
    assert row(plan, "device").verdict == "differs"
    lacking(monkeypatch, "gpus", 1)
    assert row(plan, "GPUs").says == "ranks share GPUs and talk over Gloo"


def launched(asked: RunRequest, monkeypatch: Patch, **env: str) -> RunRequest:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **env}
    for name, value in {"MASTER_PORT": "0", **env}.items():
        monkeypatch.setenv(name, value)
    return replace(asked, launched=True)


def test_ranks_that_a_launcher_started(asked, monkeypatch):
    assert must_start(launched(asked, monkeypatch)) == []
    three = row(launched(asked, monkeypatch, WORLD_SIZE="3"), "ranks")
    assert (three.verdict, three.says) == ("stops", "start 2, or plan again with --ranks 3")
    two = launched(edited(asked, with_servers), monkeypatch, GROUP_WORLD_SIZE="2")
    assert row(two, "servers").verdict == "ok" and two.ranks_here == 1
    one = launched(edited(asked, with_servers), monkeypatch, GROUP_WORLD_SIZE="1")
    assert row(one, "servers").verdict == "differs" and one.ranks_here == 2


def test_where_ranks_meet(asked, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    plan = launched(asked, monkeypatch)
    must_meet()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(SpecError, match=r"port: planned '\d+' .*, here taken .*; choose anoth"):
            must_meet()
        monkeypatch.setenv("RANK", "1")
        must_meet()  # only rank 0 listens
    monkeypatch.setenv("RANK", "0")
    must_meet()
    monkeypatch.setenv("MASTER_PORT", "http")
    assert row(replace(plan), "port").verdict == "stops"
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    assert row(replace(plan), "address").says == "use the address of rank 0's server"


def test_all_that_stops_is_said_at_once(asked, monkeypatch):
    lacking(monkeypatch, "free_memory", 300e6)
    few_files(monkeypatch)
    plan = edited(asked, lambda d: d.update(gnnplan="9.9", torch="2.1.0"))
    with pytest.raises(SpecError) as refused:
        must_start(plan)
    first, *stops = str(refused.value).splitlines()
    assert first == "3 things stop this run:"
    assert stops == [
        f"  version: planned gnnplan 9.9, here gnnplan {__version__}; plan again",
        f"  {row(plan, 'memory')}",
        "  open files: planned up to 100 in a rank, here 99; allow more (ulimit -n 4096)",
    ]
