"""Over NCCL all ranks begin the operations of all communicators in one order. Where two ranks did
not, each could wait for the other's operation behind its own, for ever.

Every rank's program runs here by itself over torch's fake group, in which nothing moves; what it
begins is noted. Then lanes as they are there: no threads. Their streams are torch.cpu's here, which
do nothing; what they order is tested on GPUs. That they train the same is in trainings.py (streams)."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch
import torch.distributed as dist
from calls import raising
from torch.testing._internal.distributed.fake_pg import FakeStore

from gnnplan.executor.ranks.rank import Lanes, Rank, backend_of
from gnnplan.executor.strategies import open_worker
from gnnplan.executor.train import Replay
from gnnplan.testing.ranks import Case

# what is begun at once: ends of operations, each with a name that all its ranks give it
Begun = frozenset[tuple[Any, ...]]
GRAPH = "synthetic:community?vertices=160&edges=1200&features=12&classes=4&seed=0"


@contextmanager
def fake_rank(number: int, world: int, patch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Any]]:
    """A rank as over NCCL, and what it begins, in its order."""
    begun: list[Begun] = []
    times = Counter[tuple[Any, ...]]()

    def note(*operations: tuple[Any, ...]) -> None:
        times.update(operations)
        begun.append(frozenset((*each, times[each]) for each in operations))

    def name_of(group: Any) -> str:
        return (group or dist.group.WORLD).group_name

    def all_reduce(real: Any, tensor: Any, *args: Any, group: Any = None, **more: Any) -> Any:
        note(("all_reduce", name_of(group), tensor.numel()))
        return real(tensor, *args, group=group, **more)

    def batch(real: Any, ops: list[dist.P2POp]) -> Any:
        ways = [(op.peer, number)[:: 1 if op.op is dist.irecv else -1] for op in ops]
        both = zip(ops, ways, strict=True)
        note(*(("message", name_of(op.group), way, op.tensor.nbytes) for op, way in both))
        return real(ops)

    def fake(real: Any, *args: Any, backend: str = "", **more: Any) -> Any:
        return real(*args, backend="fake", **more)

    def alone(real: Any, *args: Any, **more: Any) -> None:
        raise AssertionError("a message that is in no batch")

    with patch.context() as p:
        p.setattr(dist, "new_group", partial(fake, dist.new_group))
        p.setattr(dist, "all_reduce", partial(all_reduce, dist.all_reduce))
        p.setattr(dist, "batch_isend_irecv", partial(batch, dist.batch_isend_irecv))
        for single in ("send", "recv"):
            p.setattr(dist, single, partial(alone, getattr(dist, single)))
        dist.init_process_group("fake", rank=number, world_size=world, store=FakeStore())
        rank = Rank(number, world, torch.device("cpu"), "nccl")
        rank.groups.exchanges = dist.new_group()
        try:
            yield rank, begun
        finally:
            rank.close()


def order_of(world: int, case: Case, patch: pytest.MonkeyPatch) -> list[list[Begun]]:
    by_rank = []
    for number in range(world):
        with fake_rank(number, world, patch) as (rank, begun):
            problem = case.problem(world)
            worker: Any = open_worker(rank, problem, case.settled(problem))
            learner = worker.open_learner()
            for step in range(3):
                learner.zero()
                worker.step(step)
                learner.update(step)
            worker.drain()
            worker.evaluate(2)
            learner.finish(3)
            worker.close()
            by_rank.append(begun)
    return by_rank


def must_be_one_order(by_rank: list[list[Begun]]) -> int:
    """-> how many communicators were used."""
    together = nx.utils.UnionFind()
    for rank, begun in enumerate(by_rank):
        for place, ends in enumerate(begun):
            together.union((rank, place), *ends)
    ends = Counter(end for begun in by_rank for each in begun for end in each)
    messages = {end: times for end, times in ends.items() if end[0] == "message"}
    assert set(messages.values()) <= {2}, "a message has one end"
    order = nx.DiGraph()
    for rank, begun in enumerate(by_rank):
        places = [together[rank, place] for place in range(len(begun))]
        assert len(set(places)) == len(places), "a rank begins it twice"
        order.add_edges_from(pairwise(places))
    assert nx.is_directed_acyclic_graph(order), nx.find_cycle(order)
    return len({end[1] for end in ends})


@pytest.mark.parametrize(
    ("world", "strategy", "more", "communicators"),
    [
        (3, "pipegcn", {}, 2),
        (3, "pipegcn_gf", {}, 2),
        (4, "graph_parallel(buckets=3)", {}, 2),
        (2, "gnnpipe(chunks=3)", {}, 1),
        (3, "gnnpipe(chunks=4)", {}, 2),
        (4, "gnnpipe(stages=2,chunks=3)", {}, 4),
        (4, "tensor3d", {"model": "gcn"}, 2),
        (2, "offload(chunks=3)", {}, 2),
    ],
)
def test_all_ranks_begin_in_one_order(world, strategy, more, communicators, monkeypatch):
    how = {"model": "sage", "layers": 3, "hidden": 8, "seed": 3, **more}
    by_rank = order_of(world, Case(strategy, GRAPH, how), monkeypatch)
    assert must_be_one_order(by_rank) >= communicators


@pytest.mark.parametrize("model", ["sage", "gat"])
def test_all_ranks_of_p3_begin_in_one_order(run_ranks, model):
    """Its samplers must have real answers. All ranks take part in all that it does."""
    how = {"model": model, "layers": 3, "hidden": 8, "seed": 3}
    how |= {"mode": "mini", "batch": 40, "fanout": (3, 3, 2)}
    case = Case("p3(pipelined=True)", GRAPH, how, streams=True)
    spans = sorted(run_ranks(3, case).spans, key=lambda span: span.start)
    orders = [
        [span.label for span in spans if span.rank == rank and span.lane in ("comm", "reduce")]
        for rank in range(3)
    ]
    assert orders[0] == orders[1] == orders[2] and len(orders[0]) > 20


def test_another_order_is_seen():
    """Two ranks, each of which begins what the other begins last."""
    a, b = frozenset({("all_reduce", "0", 4, 1)}), frozenset({("all_reduce", "1", 4, 1)})
    assert must_be_one_order([[a, b], [a, b]]) == 2
    with pytest.raises(AssertionError):
        must_be_one_order([[a, b], [b, a]])


def test_lanes_without_threads_work_here_and_now():
    """Two communicators are under way in PipeGCN. Were their operations begun by two threads, each
    of two ranks could wait for the other's operation behind its own."""

    def order(streams: bool) -> list[tuple[str, bool]]:
        lanes, seen = Lanes(torch.device("cpu"), streams), []
        main = threading.current_thread()

        def note(what: str) -> None:
            seen.append((what, threading.current_thread() is main))

        asked = [lanes.submit(lane, lambda lane=lane: note(lane)) for lane in ("comm", "reduce")]
        note("compute")
        for future in asked:
            future.result()
        lanes.close()
        return seen

    assert order(True) == [("comm", True), ("reduce", True), ("compute", True)]
    assert {("comm", False), ("reduce", False)} < set(order(False))


def test_nothing_follows_what_failed_on_a_lane():
    """Memory ran out before a message was sent. The next one went in its place, of another length,
    and Gloo ended the peer, which was then named as the rank that was lost."""
    lanes, done = Lanes(torch.device("cpu"), are_streams=False), []
    asked = [lanes.submit("comm", raising(MemoryError("the first")))]
    asked += [lanes.submit("comm", lambda: done.append("comm"))]
    other = lanes.submit("disk", lambda: done.append("disk"))
    for future in asked:
        with pytest.raises(MemoryError, match="the first"):
            future.result()
    other.result()
    assert done == ["disk"]
    lanes.close()


def test_a_checkpoint_keeps_a_thread():
    """To wait for a disk would look like a lost peer."""
    lanes = Lanes(torch.device("cpu"), are_streams=True)
    assert lanes.in_thread("disk", threading.current_thread).result() is not threading.main_thread()
    lanes.close()


def test_nccl_needs_a_gpu_of_its_own_for_every_rank_on_all_servers():
    """A launcher may show each process one GPU and call it the first (Slurm's --gpus-per-task)."""
    assert backend_of(["a GPU-1", "a GPU-2", "b GPU-3"]) == "nccl"
    assert backend_of(["a GPU-1", "a GPU-2", "b GPU-3", "b GPU-3"]) == "gloo"


def test_a_step_that_cannot_be_recorded_is_told_its_number_again():
    """The clock stayed where a module could not be recorded: later steps dropped rows of step 0."""

    class Worker:
        clock: torch.Tensor | None = None

    worker = Worker()
    step = raising(RuntimeError("operation not permitted when stream is capturing"))
    with pytest.raises(RuntimeError):
        Replay(worker, step, torch.device("cpu"))
    assert worker.clock is None
