"""Samplers in processes of their own: what happens when one dies (being ahead: trainings.py). What a
sampler has of a structure that is spread."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.executor import train as module
from gnnplan.executor.minibatch.sampler import Sampled, Sampler, missing
from gnnplan.executor.minibatch.share_queue import ShareQueue
from gnnplan.executor.ranks.rank import Groups, Rank
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.graph.sampling import draw, key_of
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.strategies import DataParallel
from gnnplan.planner.strategies.minibatch.adjacency_store import bytes_at
from gnnplan.planner.vocabulary.errors import LostRank
from gnnplan.testing.ranks import Case, Forked, small

pytestmark = pytest.mark.processes
WORK = {"model": "sage", "layers": 2, "hidden": 8, "mode": "mini", "batch": 6, "fanout": (3, 2)}


def samplers() -> list[multiprocessing.process.BaseProcess]:
    """Children of this process that are no ranks of other tests."""
    return [child for child in multiprocessing.active_children() if not isinstance(child, Forked)]


class Doing(Sampler):
    """Does something before each batch."""

    do: Callable[[int], object]

    def __getitem__(self, step: int) -> Sampled:
        self.do(step)
        return super().__getitem__(step)


def arriving(
    graphs: dict[str, str],
    prefetch: int,
    do: Callable[[int], object] = lambda step: None,
    load: Callable[[int, Sampled], Sampled] | None = None,
    timeout_s: float = 30.0,
) -> ShareQueue:
    problem = Case("data_parallel", graphs["rough"], WORK).problem(1)
    rank = Rank(0, 1, torch.device("cpu"), "gloo", timeout_s=timeout_s)
    sampler = Doing(DataParallel().batches(problem), 0, ["mean", "mean"])
    sampler.do = do
    return ShareQueue(rank, sampler, prefetch, load=load)


def broken(step: int) -> None:
    if step == 2:
        raise ValueError("no such neighbour")


def killed(step: int) -> None:
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def cut(step: int) -> None:
    """Of a sampler that is alive, a peer of its own may be gone."""
    raise ConnectionResetError("Connection reset by peer")


KILLED = r"a process of its own, was killed by .*Killed"


@pytest.mark.parametrize(
    ("does", "ahead", "words"),
    [
        (broken, 1, "no such neighbour"),
        (killed, 1, f"^its sampler, {KILLED}"),
        (killed, 3, f"^its sampler 3 of 3, {KILLED}"),
        (cut, 1, "^its sampler, .*, was lost: Connection reset by peer"),
    ],
)
def test_a_sampler_that_dies_ends_the_run_with_its_words(does, ahead, words, graphs):
    shares = arriving(graphs, ahead, does)
    with pytest.raises((ValueError, LostRank), match=words):
        for step in range(4):
            shares.next(step)
    assert not samplers()


def test_a_sampler_that_stops_is_named(graphs):
    """Of several, those that are alive wait for their turn."""
    shares = arriving(graphs, 3, timeout_s=1)
    shares.next(0)
    os.kill(shares.processes[1][0].pid or 0, signal.SIGSTOP)
    words = r"^its sampler 2 of 3, a process of its own, has said nothing for 1 s; was it stopped"
    with pytest.raises(LostRank, match=words):
        for step in range(1, 20):
            shares.next(step)
    shares.close()
    assert not samplers()


def test_a_slow_load_is_not_the_samplers_fault(graphs):
    """Its time counted as the sampler's, which was killed and named."""

    def load(step: int, made: Sampled) -> Sampled:
        time.sleep(2 * (step == 1))
        return made

    ahead = arriving(graphs, 1, load=load, timeout_s=0.5)
    for step in range(3):
        ahead.next(step)
    ahead.close()


def test_a_sampler_leaves_what_it_inherits_alone(graphs, tmp_path):
    """One in a hundred runs hung: its sampler collected a process group, and waited for threads."""
    told = tmp_path / "told"

    class Group:
        def __init__(self) -> None:
            self.circle = self

        def __del__(self) -> None:
            with told.open("a") as file:
                file.write(f"{os.getpid()}\n")

    gc.disable()
    try:
        Group()
        ahead = arriving(graphs, 1, lambda step: gc.collect())
        ahead.next(0)
        ahead.close()
    finally:
        gc.enable()
    assert told.read_text() == f"{os.getpid()}\n"


def test_what_a_rank_has_frozen_stays_frozen(graphs):
    """A fork thawed all that the rank had imported: to collect took 0.2 s from then on."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    arriving(graphs, 1).close()
    assert gc.get_freeze_count() > 0.9 * frozen > 0 and gc.isenabled()


def test_samplers_begin_when_all_have_forked(graphs, tmp_path, monkeypatch):
    """One in a hundred runs hung: a rank forked amid a look-up, whose lock stayed taken."""
    told = tmp_path / "told"

    def tell(step: int) -> None:
        with told.open("a") as file:
            file.write(f"item {step}\n")

    def late(*of: object) -> None:
        time.sleep(0.3)
        told.write_text("all are here\n")

    monkeypatch.setattr(Groups, "await_all", late)
    ahead = arriving(graphs, 1, tell)
    ahead.next(0)
    ahead.close()
    assert told.read_text().splitlines()[:2] == ["all are here", "item 0"]


def test_samplers_take_turns(graphs, tmp_path):
    """k of them, k batches ahead and no more; who is slow is waited for."""
    told = tmp_path / "told"

    def tell(step: int) -> None:
        time.sleep(0.1 * (step % 3 == 1))
        with told.open("a") as file:
            file.write(f"{step} {os.getpid()}\n")

    ahead, line = arriving(graphs, 3, tell), arriving(graphs, 0)
    for step in range(7):
        assert np.array_equal(ahead.next(step)[0].own, line.next(step)[0].own)
        assert max([int(row.split()[0]) for row in told.read_text().splitlines()]) <= step + 3
    pids = [process.pid for process, _ in ahead.processes]
    ahead.close()
    by_step = dict(map(int, row.split()) for row in told.read_text().splitlines())
    assert [by_step[step] for step in range(7)] == [pids[step % 3] for step in range(7)]


def test_a_run_ends_its_samplers(monkeypatch):
    """Of P3's pipeline, part of a circle, idle samplers stayed for runs, until collected."""
    graph = "synthetic:community?vertices=300&edges=1500&features=8&classes=3"
    case = Case("data_parallel(prefetch=2)", graph, {**WORK, "batch": 40}, epochs=1)
    problem, kept = case.problem(1), list[Any]()
    # as a circle would
    monkeypatch.setattr(module, "open_worker", lambda *of: kept.append(open_worker(*of)) or kept[0])
    rank = Rank(0, 1, torch.device("cpu"), "gloo", traced=0)
    module.train(rank, problem, case.settled(problem), None, case.epochs)
    assert kept[0].arriving.sampler and not samplers()


def test_the_next_batch_is_loaded_before_anybody_asks(graphs):
    """One, and no more: its rows would be in memory."""
    loaded: list[int] = []
    come = threading.Semaphore(0)

    def load(step: int, made: Sampled) -> Sampled:
        loaded.append(step)
        come.release()
        return made

    ahead = arriving(graphs, 2, load=load)
    for step in range(4):
        ahead.next(step)
        assert come.acquire(timeout=20) and (step or come.acquire(timeout=20))
        time.sleep(0.05)
        assert loaded == list(range(step + 2))
    ahead.close()
    assert not samplers()


def test_an_error_of_a_load_is_the_steps(graphs):
    def load(step: int, made: Sampled) -> Sampled:
        if step == 1:
            raise ValueError("no such row")
        return made

    ahead = arriving(graphs, 1, load=load)
    ahead.next(0)
    with pytest.raises(ValueError, match="no such row"):
        ahead.next(1)
    ahead.close()


@given(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(1, 60), st.sampled_from([1, 99]))
def test_new_vertices_are_found_by_a_pass_or_by_a_sort(seed, count, vertices, sparsely):
    """Of few ids among many vertices a sort is quicker; both give the same."""
    draw = np.random.default_rng(seed)
    present = draw.random(vertices * sparsely) < 0.3
    ids = draw.integers(0, present.size, count).astype(np.int32)
    new = missing(present, [ids[:3], ids])
    assert new.dtype == np.int64 and new.tolist() == sorted(
        {*ids.tolist()} - {*present.nonzero()[0]}
    )


def test_a_batch_leaves_no_vertex_behind_for_the_next(graphs):
    batches = DataParallel().batches(Case("data_parallel", graphs["rough"], WORK).problem(1))
    often, once = (Sampler(batches, 0, ["mean", "mean"]) for _ in range(2))
    for step in (0, 1):
        often[step]
    parts = zip(often[2].share.parts, once[2].share.parts, strict=True)
    assert all(np.array_equal(a.source, b.source) for a, b in parts)


@pytest.mark.parametrize(
    "text",
    [
        "data_parallel(structure='spread',structure_cache=300)",
        "p3(structure='spread')",
        "gsplit(structure='spread',splitter='random')",
    ],
)
@pytest.mark.parametrize("directed", [False, True])
def test_a_sampler_has_no_list_that_is_elsewhere(graphs, text, directed):
    """Nor the graph that has; its memory is as predicted, and it says whose list it lacks."""
    asked = small("gcn", layers=3, heads=2, mode="mini", batch=6, fanout=(3, 2, 2))
    what = Case(text, graphs["rough"], asked, directed=directed)
    problem = what.problem(2)
    strategy = what.settled(problem)
    lists, graph, batches = strategy.lists(problem), problem.graph, strategy.batches(problem)
    for rank in (0, 1):
        sampler, keeps = Sampler(batches, rank, ["gcn"] * 3, lists=lists), lists.keeps(rank)
        assert 0 < keeps.sum() < keeps.size
        assert not any(
            isinstance(value, Batches) or value is graph or value is graph.indices
            for value in vars(sampler).values()
        )
        assert sampler.graph.degree.tolist() == np.where(keeps, graph.degree, 0).tolist()
        arrays = {
            id(array): array.nbytes
            for array in (sampler.graph.indptr, sampler.graph.indices, *sampler._degrees)
        }
        assert sum(arrays.values()) == bytes_at(problem, lists, [rank])
        assert sampler._degrees[0].tolist() == graph.degree.tolist()
        assert sampler._degrees[1].tolist() == np.bincount(graph.indices, None, keeps.size).tolist()
        here, key = np.flatnonzero(keeps), key_of(3, 0, 1, 2)
        indptr, neighbours = sampler._draw(here, 2, key)
        expected, places = draw(graph, here, 2, key)
        assert indptr.tolist() == expected.tolist()
        assert neighbours.tolist() == graph.indices[places].tolist()
        with pytest.raises(AssertionError, match=f"rank {rank} has no adjacency lists of vertices"):
            sampler._draw(np.flatnonzero(~keeps)[:1], 2, key)
