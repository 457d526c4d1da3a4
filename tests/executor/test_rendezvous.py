"""Who may reach the ranks of a run, and what their messages may be; what is wrong before training
starts is said in words, by all ranks alike."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from asked import on
from calls import Started, free_port, planned, raising
from torch.distributed import HashStore, PrefixStore

from gnnplan.executor.launch import rank_process
from gnnplan.executor.launch.rank_process import Agreement, Found, Ready
from gnnplan.executor.launch.run_request import Options, RunRequest
from gnnplan.executor.ranks import rendezvous
from gnnplan.executor.ranks.checkpoint import Checkpoints
from gnnplan.executor.ranks.comm import all_reduce, swap
from gnnplan.executor.ranks.gather import collect, gather_all
from gnnplan.executor.ranks.near import DONE, MESSAGE, Near, _Peer
from gnnplan.executor.ranks.rank import Rank, open_rank
from gnnplan.executor.ranks.rendezvous import (
    join,
    launcher_env,
    on_this_machine,
    store_of_this_machine,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, Mismatch, SpecError
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.testing.ranks import Case, ForkServer

GRAPH = "synthetic:community?vertices=2000&edges=20000&features=16&classes=4&seed=0"
ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = timedelta(seconds=20)
LISTENS = "0A"  # in /proc/net/tcp


def listening(run: Started) -> dict[tuple[str, int], set[int]]:
    """Address in hexadecimals and port of every socket that a run listens at -> its processes."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            address, port = local.split(":")
            if state == LISTENS:
                sockets[f"socket:[{inode}]"] = address, int(port, 16)
    found: dict[tuple[str, int], set[int]] = {}
    for pid in run.alive():
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                place = sockets[str(file.readlink())]
            except (OSError, KeyError):
                continue
            found.setdefault(place, set()).add(pid)
    return found


@pytest.mark.nightly  # by day a store alone, below
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="finds sockets in /proc")
def test_only_this_machine_reaches_a_run_of_one_server(tmp_path, start):
    """All interfaces were listened on: whoever reached the store could set keys of any run."""
    mini = "--mode mini --batch 256 --fanout 5,5 --layers 2 --strategy gsplit"
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, f"{mini} --hidden 8 --ranks 2")
    run = start(plan, "--epochs", "1000000", CUDA_VISIBLE_DEVICES="")
    run.until_training()
    places = listening(run)
    assert len(places) >= 3, places  # the store's, and two ranks'
    assert {address for address, _ in places} == {"0100007F"}  # 127.0.0.1
    # where a host's name leads to its loopback, Gloo would listen there without being told
    interfaces = {env.get("GLOO_SOCKET_IFNAME") for env in run.alive().values() if "RANK" in env}
    assert interfaces == {"lo"}
    (port,) = (port for (_, port), pids in places.items() if run.process.pid in pids)
    with pytest.raises(SpecError, match=rf"meet at 127.0.0.1 port {port} are another run's"):
        join(on_this_machine(port, "a guess"), LIMIT)
    seen, limit = len(run.epochs()), time.monotonic() + 60
    while len(run.epochs()) < seen + 2:  # it goes on
        assert run.process.poll() is None and time.monotonic() < limit, run.stderr
        time.sleep(0.02)
    os.killpg(run.process.pid, signal.SIGINT)  # as in a terminal
    assert run.ended() == 130, run.stderr
    assert "error: interrupted" in run.stderr
    assert "Traceback" not in run.stderr and "death signal" not in run.stderr


def test_runs_at_one_store_do_not_meet():
    store = store_of_this_machine()
    ours = join(on_this_machine(store.port, "ours"), LIMIT)
    ours.set("rank 0", "its address")
    assert join(on_this_machine(store.port, "ours"), LIMIT).get("rank 0") == b"its address"
    restarted = {**on_this_machine(store.port, "ours"), "TORCHELASTIC_RESTART_COUNT": "1"}
    assert not join(restarted, LIMIT).check(["rank 0"])
    with pytest.raises(SpecError, match="choose another MASTER_PORT"):
        join(on_this_machine(store.port, "theirs"), LIMIT)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
def test_a_store_listens_where_ranks_were_told_to_meet(address):
    """Not on all interfaces; 127.0.0.3 stands for one of two cards."""
    port = free_port(address)
    env = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "SLURM_JOB_ID": "7"}
    store = join(env | {"RANK": "0"}, LIMIT)
    join(env, LIMIT).set("a", "b")
    assert store.get("a") == b"b"
    other = "127.0.0.2"
    with pytest.raises(ConnectionRefusedError), socket.create_connection((other, port), timeout=5):
        pass


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_a_store_that_others_may_reach_by_another_address_listens_on_all(address, monkeypatch):
    """On its own server a name may lead to 127.0.1.1, on the others to the server's address; a
    container is reached by its host's address, which it cannot listen at."""
    port = free_port()
    if address != "localhost":
        outside = raising(OSError("cannot assign requested address"))
        monkeypatch.setattr(socket, "create_server", outside)
    store = join({"RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(port)}, LIMIT)
    with socket.create_connection(("127.0.0.2", port), timeout=5):
        assert store.num_keys() >= 1


SAID = [{"host": "größe", "numbers": [1, 0.1, None]}, ["longer " * 100], 3]


def run_three(talk: Callable[[int, int], None], folder: Path, fork_server: ForkServer) -> None:
    """Let three ranks, who know the port of their store, talk to each other."""
    store, script = store_of_this_machine(), folder / "rank.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {sys.path}\nimport test_rendezvous\n"
        f"test_rendezvous.{talk.__name__}(int(sys.argv[1]), {store.port})\nprint('done')\n"
    )
    ended = fork_server.run([([str(script), rank], {}) for rank in "012"], folder, 40)
    assert [rank.stdout for rank in ended] == ["done\n"] * 3, ended


def say(rank: int, port: int) -> None:
    env = on_this_machine(port, "tests")
    dist.init_process_group("gloo", store=join(env, LIMIT), rank=rank, world_size=3, timeout=LIMIT)
    assert gather_all(SAID[rank]) == SAID
    for silent in range(3):
        own = b"" if rank == silent else bytes(range(rank * 100 + 1))
        spoken = [bytes(range(r * 100 + 1)) for r in range(3) if r != silent]
        assert [*collect(own)] == (spoken if rank == 0 else [])
    dist.destroy_process_group()


def test_what_ranks_say_arrives_as_it_is(tmp_path, fork_server):
    run_three(say, tmp_path, fork_server)


def exchange(number: int, port: int) -> None:
    os.environ |= on_this_machine(port, "near") | {"RANK": str(number), "WORLD_SIZE": "3"}
    rank = open_rank(10)
    dist.isend = dist.irecv = dist.all_reduce = None  # over Gloo it would fail

    def message(sender: int, receiver: int) -> torch.Tensor:
        rows = 0 if sender == 2 else 1 + 100_000 * receiver  # rank 2 sends nothing
        return torch.full((rows, 3), float(10 * sender + receiver))

    for _ in range(2):
        ins = [torch.empty_like(message(peer, number)) for peer in range(3)]
        outs = [message(number, peer) for peer in range(3)]
        swap(rank, outs, ins, rank.groups.exchanges)
        for peer in {0, 1, 2} - {number}:
            assert torch.equal(ins[peer], message(peer, number))
    for length in (0, 1, 2, 100_000):
        flat = torch.arange(length) + 10.0**number
        all_reduce(rank, Label("all_reduce", 0), flat, (0, 1, 2))
        assert torch.equal(flat, 3 * torch.arange(length) + 111.0)
    rank.close()


@pytest.fixture
def ends():
    """Two ranks' connections to each other, in one process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.settimeout(0.2)
    yield [_Peer(1 - rank, end, os.getpid()) for rank, end in enumerate(ends)]
    for end in ends:
        end.close()


@pytest.mark.processes
def test_no_row_between_ranks_on_one_machine_passes_through_gloo(tmp_path, fork_server, ends):
    with subprocess.Popen(["sleep", "60"]) as child:
        ends[1].tell(MESSAGE.pack(8, 4))  # nothing is at address 8
        with pytest.raises(RuntimeError) as refused:
            replace(ends[0], process=child.pid).take(torch.zeros(1))
        child.kill()
    if "not permitted" in str(refused.value):
        pytest.skip("a process may not read another here")
    run_three(exchange, tmp_path, fork_server)


def test_a_peer_that_is_silent_or_gone_or_sends_other_rows_is_named(ends):
    rows, peer = torch.zeros(4), Near({1: ends[0]})
    with pytest.raises(RuntimeError, match=re.escape("Connection to rank 1: timed out")):
        peer.swap({}, {1: rows})
    ends[1].offer(torch.zeros(5))
    with pytest.raises(RuntimeError, match="rank 1 sends 20 B instead of 16 B"):
        peer.swap({}, {1: rows})
    ends[1].connection.close()
    with pytest.raises(RuntimeError, match="Connection closed by rank 1"):
        peer.swap({}, {1: rows})
    with pytest.raises(RuntimeError, match="Connection to rank 1 is lost"):
        peer.swap({1: rows}, {})


def test_memory_that_may_not_be_read_goes_over_gloo(ends):
    ends[0].tell(MESSAGE.pack(8, 4))  # nothing is at address 8
    ends[0].tell(DONE)
    assert not ends[1].readable()


def test_nothing_from_a_network_is_unpickled():
    """torch's collectives of objects run whatever code a peer has sent."""
    unpickling = re.compile(r"\b(?:\w+_object(?:_list)?|pickle\.loads?)\(")
    calls = [
        (path.name, found[0])
        for path in (ROOT / "executor").rglob("*.py")
        for found in unpickling.finditer(path.read_text())
    ]
    assert calls == []


def test_a_machine_without_a_loopback_is_told_in_seconds(monkeypatch):
    """Ranks waited five minutes for their store, deaf to SIGTERM; without IPv4 a traceback came.
    192.0.2.1 is nobody's address (RFC 5737)."""
    monkeypatch.setattr(rendezvous, "LOOPBACK", "192.0.2.1")
    began = time.monotonic()
    with pytest.raises(SpecError, match=r"cannot be reached .*; bring it up: ip link set lo up"):
        store_of_this_machine()
    assert time.monotonic() - began < 10


def test_a_node_of_slurm_has_its_own_number_of_ranks(monkeypatch):
    """Memory was divided by the tasks of all nodes, and b2u[05,02]n3 began with b2u05."""
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "7"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_STEP_NODELIST": "b2u[05,02]n3,c1"}
    step |= {"SLURM_PROCID": "6", "SLURM_LOCALID": "2"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    for node, ranks in (("0", "2"), ("1", "2"), ("2", "3")):
        monkeypatch.setenv("SLURM_NODEID", node)
        found = launcher_env()
        assert found["LOCAL_WORLD_SIZE"] == ranks and found["MASTER_ADDR"] == "b2u05n3"


SMALL = "synthetic:community?vertices=200&edges=1600&features=8&classes=4&seed=0"
CASE = Case("graph_parallel", SMALL, servers=2)
CPU = torch.device("cpu")
ON_CPU, OTHER = (Rank(number, 2, CPU, "gloo") for number in (0, 1))
QUESTION = {"gnnplan": "1", "graph": "abc", "ranks": 2}


@pytest.fixture(scope="module")
def problem():
    return CASE.problem(2)


def found(
    problem: Problem,
    predicted: dict[str, float] | None = None,
    rank: Rank = ON_CPU,
    question: dict[str, Any] = QUESTION,
    **other: Any,
) -> Found:
    """What a rank says, but for what is `other`."""
    checkpoints = Checkpoints(Path(), rank.rank, 0, question)
    document = {"best": {"predicted": {"memory": predicted or {}}}}
    asked = RunRequest(document, Path(), Options(epochs=3), loaded=problem)
    stored = {10: question, 20: question}
    return {**rank_process.found(rank, Ready(asked, checkpoints, stored, [])), **other}


def test_ranks_that_agree(problem):
    theirs = found(problem, rank=OTHER, host="elsewhere")
    theirs["checkpoints"].pop()
    # processes are in the order of their GPUs
    agreed = rank_process.compare([theirs, found(problem)])
    assert agreed == Agreement([socket.gethostname(), "elsewhere"], 10, [])


def test_ranks_with_disks_of_their_own_choose_one_plan(problem):
    """Rank 0 had epoch 10 of both plans, rank 1 that of this one: each loaded what it had."""
    for ours, theirs, last in (
        ([[10, "a"]], [[10, "a"], [20, "a"]], 10),
        ([[10, "a"], [20, "other"]], [[10, "a"], [20, "other"]], 20),
        ([[10, "a"], [20, "other"]], [[10, "a"], [20, "third"]], 10),
        ([[10, "other"]], [[10, "a"]], 0),
        ([], [[10, "a"]], 0),
    ):
        own = found(problem, checkpoints=ours)
        other = found(problem, rank=OTHER, checkpoints=theirs)
        assert rank_process.compare([own, other]).last == last


@pytest.mark.parametrize("name", ["gnnplan", "torch", "data", "plan", "options"])
def test_ranks_that_differ(name, problem):
    theirs = found(problem, rank=OTHER, host="elsewhere", **{name: "other"})
    words = (
        rf"ranks differ in {name}: rank 1 \(server 1, elsewhere\) has other, rank 0 .*; give all"
    )
    with pytest.raises(Mismatch, match=words):
        rank_process.compare([found(problem), theirs])


def test_another_question_is_another_plan(problem):
    """Of the data and the version other facts tell."""

    def plan(**more: Any) -> str:
        return found(problem, question={**QUESTION, **more})["plan"]

    assert plan(**{"workload.seed": 1}) != plan(**{"workload.seed": 2})
    assert plan(graph="abd") == plan()


def test_what_does_not_fit_a_gpu_is_refused(monkeypatch):
    """Two ranks on one GPU, of which 100 MB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100e6, 200e6))
    planned = CASE.problem(2)
    problem = on(planned, kind="cuda")

    def both(problem: Problem, features: float, **theirs: Any) -> Agreement:
        predicted = {"features": features, "runtime": 30e6, "communicators": 20e6}
        of_one = [Rank(r, 2, torch.device("cuda", 0), "gloo", card="one") for r in (0, 1)]
        ranks = [found(problem, predicted, rank) for rank in of_one]
        return rank_process.compare([ranks[0], {**ranks[1], **theirs}])

    both(problem, 50e6)  # twice 50 MB more
    both(problem, 90e6, host="elsewhere")
    # a launcher that shows each rank its own GPU calls all of them cuda:0
    both(problem, 90e6, card="another")
    with pytest.raises(Infeasible, match=r"1 ranks need 120(\.00)? MB more"):  # over NCCL
        both(problem, 100e6, card="another")
    both(planned, 90e6)  # the prediction is for other devices
    words = r"2 ranks need 180(\.00)? MB more on \S+ cuda:0, where 100(\.00)? MB are free; stop the"
    with pytest.raises(Infeasible, match=words):
        both(problem, 90e6)


class Slow(PrefixStore):  # type: ignore[misc]
    """The store as a rank far away reads it."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(0.3)
        return list(super().multi_get(keys))


def all_begin(*everyone: Found) -> list[list[str] | GnnplanError]:
    """What every rank is told; the last one is the slowest."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def begin(rank: int) -> list[str] | GnnplanError:
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(everyone))}
        own = (Slow if rank == len(everyone) - 1 else PrefixStore)("run", store)
        try:
            return rank_process.agree(own, env, everyone[rank]).differs
        except GnnplanError as error:
            # the store ends with its host
            heard = own.add("found/finished/num_members", 0)
            assert rank or heard == len(everyone), "rank 0 left before all had heard"
            return error

    with ThreadPoolExecutor(len(everyone)) as threads:
        return list(threads.map(begin, range(len(everyone))))


def test_what_differs_is_said_once(problem):
    everyone = [found(problem, differs=differs) for differs in (["a"], ["a", "b"], ["a"])]
    assert all_begin(*everyone) == [["a", "b"]] * 3
    everyone[1] = {**everyone[1], "host": "second"}
    assert rank_process.compare(everyone).differs == ["a", "b (second)"]


@pytest.mark.parametrize("refusing", [0, 2])
def test_what_one_refuses_all_refuse(refusing, problem):
    everyone = [found(problem)] * 3
    everyone[refusing] = rank_process.refusal(refusing, SpecError("open files: too few"))
    words = f"rank {refusing} ({socket.gethostname()}) cannot train: open files: too few"
    for said in all_begin(*everyone):
        assert isinstance(said, GnnplanError) and (said.exit_code, str(said)) == (2, words)


@pytest.mark.nightly
def test_ranks_of_srun_do_not_wait_for_one_that_refuses(tmp_path, fork_server):
    """Rank 0 hosts the store: rank 1 waited for it until --timeout, and did not know why."""
    how = "--hidden 8 --ranks 2 --strategy graph_parallel"
    document = json.loads(planned(tmp_path / "plan.json", "--graph", SMALL, how).read_text())
    document["graph"]["hash"] = "00"
    (tmp_path / "other.json").write_text(json.dumps(document))
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    run = ["-m", "gnnplan", "run", "--timeout", "600", "--out", str(tmp_path / "out")]
    files = enumerate(("other.json", "plan.json"))
    ranks = [([*run, str(tmp_path / file)], env | {"RANK": str(rank)}) for rank, file in files]
    ended = fork_server.run(ranks, tmp_path)
    assert [rank.code for rank in ended] == [2, 2], ended
    why = "graph: planned synthetic:.* hash 00, here hash .*; it was made for other data.*"
    for rank, words_before in enumerate(("", r"rank 0 \(.*\) cannot train: ")):
        error = rf"error: rank {rank} \(.*\) in start: {words_before}{why}"
        assert any(re.fullmatch(error, line) for line in ended[rank].stderr.splitlines()), ended
    assert not (tmp_path / "out").exists()
