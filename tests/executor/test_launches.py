"""What one rank asks of a GPU in a step: no wait, few copies and so many launches, counted on a
device that does not exist (pretend_device.py). The losses are those of a CPU, also of steps that
are replayed as a CUDA graph. And sampling from tensors draws what the planner's numpy does."""

import re
from collections import Counter
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asked import on
from calls import rows_of
from hypothesis import given
from hypothesis import strategies as st
from nightly import covered, every
from pretend_device import CUDA, Device, OnDevice

from gnnplan.executor import train
from gnnplan.executor.layers.kernels import sent
from gnnplan.executor.minibatch import device_sampling as sampling
from gnnplan.executor.minibatch import sampler
from gnnplan.executor.minibatch.sampler import Sampler, drawing_device
from gnnplan.executor.ranks.checkpoint import Checkpoints, question
from gnnplan.executor.ranks.learner import Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import layerwise
from gnnplan.planner.cluster import spec
from gnnplan.planner.evidence.validate import first_order_difference
from gnnplan.planner.graph import sampling as planned
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, parse
from gnnplan.planner.strategies.layerwise.step import blocks_bytes
from gnnplan.planner.strategies.minibatch.supply import held_by_sampler
from gnnplan.planner.vocabulary.schedule import Copy
from gnnplan.testing.ranks import Case, Result

MODELS = ("sage", "gcn", "gcnii", "gat", "gatv2", "gin", "resgcn", "sgc")
# Of a step, by model, with its loss, its answers and the optimizer; they may only fall. 0: the
# strategy refuses the model.
LAYERWISE = (60, 51, 93, 126, 81, 72, 148, 34)
BATCHES = (60, 49, 91, 130, 79, 70, 156, 32)
LAUNCHES = {
    "graph_parallel": LAYERWISE,
    "graph_parallel(narrow=True)": LAYERWISE,
    "graph_parallel(checkpoint=True)": (75, 63, 111, 155, 95, 90, 205, 40),
    "graph_parallel(trim=True)": (58, 47, 89, 126, 77, 68, 152, 30),
    "bns": (60, 51, 93, 0, 0, 72, 0, 34),
    "pipegcn": LAYERWISE,
    "granndis": LAYERWISE,
    "gnnpipe(chunks=4)": (301, 253, 427, 581, 377, 337, 718, 195),
    "feature_parallel": (62, 52, 87, 0, 0, 72, 0, 37),
    "tensor3d": (75, 57, 0, 0, 0, 0, 0, 0),
    "data_parallel": BATCHES,
    "gsplit": BATCHES,
    "dnp": (60, 49, 0, 130, 79, 70, 0, 32),
    "snp": (60, 49, 0, 0, 0, 0, 0, 32),
}
OF_BATCHES = ("data_parallel", "gsplit", "dnp", "snp")
# of an epoch: its end, then its loss and its answers
WAITS = {"waits": 3, "copies": 1}


def case_of(strategy: str, model: str, graph: str, **more: object) -> Case:
    """Three steps: as many epochs, or one epoch of as many batches."""
    of_batches = {"mode": "mini", "batch": 8, "fanout": (3, 3, 2)}
    work = {"model": model, "layers": 3, "hidden": 16, "dropout": 0.5, "lr": 0.01, "seed": 3}
    if strategy.split("(")[0] not in OF_BATCHES:
        return Case(strategy, graph, work | more)
    return Case(strategy, graph, work | of_batches | more, epochs=1)


def on_a_gpu(case: Case, sampler: str = "host") -> Problem:
    """The case's problem, planned for a GPU."""
    return on(case.problem(1), kind="cuda", sampler=sampler)


def trained(
    case: Case,
    device: Device,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    may_wait: bool = False,
    sampler: str = "host",
) -> tuple[Result, Counter[str], Counter[str]]:
    """Train on the pretend device -> what is left, and counts and operations of the second step."""
    open_worker, zero, update = train.open_worker, Learner.zero, Learner.update
    began: list[tuple[Counter[str], Counter[str]]] = []

    def begin(learner: Learner) -> None:
        began.append((device.counts.copy(), device.operations.copy()))
        zero(learner)

    def open_watched(*args: Any) -> Any:
        worker = open_worker(*args)
        step = worker.step

        def watched(number: int) -> Any:
            with nullcontext() if may_wait else device.no_waits():
                return step(number)

        worker.step = watched  # type: ignore[method-assign]
        return worker

    def updated(learner: Learner, step: int) -> None:
        loads_beside = "prefetch" in case.strategy  # in a thread, which may wait
        with nullcontext() if loads_beside else device.no_waits():
            update(learner, step)

    monkeypatch.setattr(train, "open_worker", open_watched)
    monkeypatch.setattr(Learner, "zero", begin)
    monkeypatch.setattr(Learner, "update", updated)
    problem = on_a_gpu(case, sampler) if sampler == "device" else case.problem(1)
    rank = Rank(0, 1, CUDA, "nccl")
    train.train(rank, problem, case.settled(problem), out, case.epochs, eval_every=0)
    rank.close()
    (counts, operations), (counts_after, operations_after) = began[1:3]
    return Result(case, 1, out), counts_after - counts, operations_after - operations


@pytest.fixture
def train_there(pretend_device, tmp_path, monkeypatch):
    return partial(trained, device=pretend_device, out=tmp_path, monkeypatch=monkeypatch)


def needs(row: tuple[Any, ...]) -> set[Hashable]:
    """One of the strategies with equal launches, every model, and both modes with other graphs."""
    return {LAUNCHES[row[0]], row[1], (row[0] in OF_BATCHES, str(row[2:4]))}


STEPS: list[tuple[Any, ...]] = [
    (strategy, model, "rough", {}, most)
    for strategy, budget in LAUNCHES.items()
    for model, most in zip(MODELS, budget, strict=True)
    if most
]
STEPS += [  # other labels, features and numbers
    ("graph_parallel", "sage", "multi", {}, None),
    ("graph_parallel", "sage", "sparse", {}, None),
    ("data_parallel", "sage", "sparse", {}, None),
    ("data_parallel", "sage", "rough", {"task": "link", "negatives": 2, "batch": 80}, None),
    ("data_parallel", "sage", "rough", {"dtype": "float64"}, None),
    ("data_parallel", "sage", "rough", {"norm": "batch"}, None),
    ("snp", "sage", "multi", {}, None),
]


@pytest.mark.parametrize(
    ("strategy", "model", "graph", "more", "launches"), covered(STEPS, needs), ids=str
)
def test_no_step_waits(run_ranks, graphs, train_there, strategy, model, graph, more, launches):
    case = case_of(strategy, model, graphs[graph], **more)
    alone = run_ranks.alone(case)
    found, counts, operations = train_there(case)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert counts["waits"] <= WAITS["waits"] * (strategy not in OF_BATCHES), operations
    if launches is not None:
        assert counts["launches"] <= launches, operations.most_common()
        copies = {"copies": counts["copies"], "waits": counts["waits"]}
        assert strategy in OF_BATCHES or copies == WAITS, operations
        assert counts["copies"] <= 2, operations


@pytest.mark.parametrize(
    ("strategy", "model", "more"),
    [
        ("data_parallel", "sage", {}),
        ("data_parallel(cache=2000)", "gcn", {}),
        ("gsplit", "gat", {"task": "link", "batch": 80}),
        ("dnp", "gin", {}),
        ("snp", "gcn", {}),
    ],
)
def test_a_batch_is_loaded_as_planned(graphs, train_there, strategy, model, more):
    """Its edges and their vertices' ids were copied before anything was recorded, and in no
    operation of the plan: a seventh of a step on an H200. They are loaded with the features. What
    is not counted is small: labels or pairs, and places of rows."""
    case = case_of(strategy, model, graphs["rough"], **more)
    found, counts, _ = train_there(case, may_wait=True)
    planned = loads(on_a_gpu(case), case)
    assert planned == {span.label: span.nbytes for span in found.spans if span.op == "load"}
    assert 0.8 * counts["bytes"] < planned["load:s1"] <= counts["bytes"]


def loads(problem: Problem, case: Case) -> dict[str, int]:
    """Bytes of each planned load."""
    settled = case.settled(problem)
    tasks = settled.schedule(problem, settled.steps(problem)).tasks
    return {str(task.label): task.work.nbytes for task in tasks if isinstance(task.work, Copy)}


SAMPLED = {"sage": 308, "gcn": 369, "gat": 386}  # launches of a step of three layers
DRAWN: list[tuple[Any, ...]] = [
    (f"data_parallel({knobs})", model, "rough", {})
    for model, knobs in product(SAMPLED, ["", "prefetch=1", "cache=1500", "cache=9000"])
]
DRAWN += [
    ("data_parallel", "sage", "sparse", {}),
    ("data_parallel", "sage", "rough", {"task": "link", "negatives": 2, "batch": 80}),
    ("data_parallel(prefetch=2,cache=900)", "sage", "rough", {"dtype": "float64"}),
    ("data_parallel", "sage", "rough", {"dtype": "bfloat16", "fanout": "full"}),
    ("gsplit", "sage", "rough", {}),
]


@pytest.mark.parametrize(
    ("strategy", "model", "graph", "more"),
    covered(DRAWN, lambda row: {row[0], row[1], str(row[2:])}),
    ids=str,
)
def test_a_gpu_samples_with_few_waits(run_ranks, graphs, train_there, strategy, model, graph, more):
    """Two in each layer, for how many edges and rows there are, and one for the rows' ids. Seeds
    and labels go there, with rows from the server's memory; ids come back. Losses are those of a
    sampler on the host. With prefetch a thread does all of it, beside the step before. Rows of a
    cache are found where it is."""
    case = case_of(strategy, model, graphs[graph], **more)
    alone = run_ranks.alone(case_of(strategy.split("(")[0], model, graphs[graph], **more))
    found, counts, operations = train_there(case, may_wait=True, sampler="device")
    assert found.losses == pytest.approx(alone.losses, rel=1e-2 if "fanout" in more else 1e-5)
    if more or graph != "rough" or strategy == "gsplit":
        return
    problem = on_a_gpu(case, "device")
    settled = case.settled(problem)
    steps = settled.steps(problem)
    assert first_order_difference(settled.schedule(problem, steps), found.spans, steps) is None
    loaded = {span.label: span.nbytes for span in found.spans if span.op == "load"}
    assert loads(problem, case) == loaded
    if "prefetch" not in strategy:
        brought = "cache=9000" not in strategy  # by the host; there all rows are
        assert counts["waits"] == 2 * 3 + 1 and counts["copies"] == 3 + brought, operations
        assert counts["launches"] <= SAMPLED[model] + 6 * ("cache" in strategy), operations


@pytest.mark.parametrize("model", every(2, ["gat", "sage"]))
def test_offload_waits_for_its_copies_alone(run_ranks, graphs, train_there, model):
    """Its rows come from the server's memory and go back there."""
    case = case_of("offload(chunks=3)", model, graphs["rough"])
    alone = run_ranks.alone(case)
    assert train_there(case, may_wait=True)[0].losses == pytest.approx(alone.losses, rel=1e-5)


# strategies whose single rank replays its steps
REPLAYED = [
    s for s in LAUNCHES if s.split("(")[0] in ("graph_parallel", "bns", "pipegcn", "granndis")
]


@pytest.mark.parametrize(
    ("strategy", "model"),
    covered(
        [(s, m) for s in REPLAYED for m, most in zip(MODELS, LAUNCHES[s], strict=True) if most], set
    ),
)
def test_replayed_steps_train_as_others(
    run_ranks, graphs, pretend_device, tmp_path, monkeypatch, strategy, model
):
    """From the sixth epoch on a step is a CUDA graph: what the host gives it is the captured step's,
    but for its number, which dropout reads on the device. Epochs are evaluated and kept between."""
    monkeypatch.setattr(layerwise, "triton_kernels", lambda: True)
    norm = {"norm": "batch"} if (strategy, model) == ("graph_parallel", "sage") else {"clip": 0.5}
    case = case_of(strategy, model, graphs["rough"], dtype="float64", **norm)
    case = replace(case, epochs=9)
    problem = case.problem(1)
    settled = case.settled(problem)
    checkpoints = Checkpoints(tmp_path, 0, 1, question(problem, settled))
    rank = Rank(0, 1, CUDA, "nccl")
    train.train(rank, problem, settled, tmp_path, 9, eval_every=2, checkpoints=checkpoints)
    rank.close()
    rows = rows_of(tmp_path)
    assert [row.get("replayed", False) for row in rows] == [False] * 5 + [True] * 4
    losses = pytest.approx(run_ranks.alone(case).losses, rel=1e-9)
    assert [row["loss"] for row in rows] == losses


def test_other_threads_may_wait_while_a_step_is_captured(pretend_device):
    """A checkpoint's thread waits for its stream once the file is on disk: a step that was captured
    meanwhile ended the run. The step itself may not wait."""
    rows = torch.arange(4.0, device=CUDA)

    def step() -> tuple[OnDevice, OnDevice]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.cuda.current_stream().synchronize).result()
        return rows.sum(), rows.add_(1.0)

    replay = train.Replay(SimpleNamespace(clock=None), step, CUDA)
    assert rows.tolist() == [0, 1, 2, 3]
    assert [replay(number)[0].tolist() for number in range(2)] == [6, 10]
    assert rows.tolist() == [2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        train.Replay(SimpleNamespace(clock=None), lambda: float(rows.sum()), CUDA)


def test_devices_do_not_mix(pretend_device):
    here, there = torch.arange(4.0), torch.arange(4.0, device=CUDA)
    assert there.is_cuda and there.device == CUDA
    with pytest.raises(RuntimeError, match="on one device"):
        there + here
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there + torch.tensor(1.0)).cpu().tolist() == [1, 2, 3, 4]  # as CUDA has it


def test_launches_copies_and_waits_are_counted(pretend_device):
    there = torch.arange(4.0, device=CUDA).requires_grad_()
    pretend_device.counts.clear()
    rows = there[1:].view(3, 1).t()
    assert not pretend_device.counts, "a view launches nothing"
    (2 * rows).sum().backward()
    # two forward; the seed, and gradients: of the sum a view, of the product, of the slice two
    assert pretend_device.counts == {"launches": 2 + 4}
    assert isinstance(there.grad, OnDevice) and there.grad.cpu().tolist() == [0, 2, 2, 2]


ASKS = """
float(rows.sum()); bool(rows.any()); rows.tolist(); rows.cpu(); rows.nonzero(); rows[rows > 1]
rows.repeat_interleave(rows.long()); rows.long().bincount(); rows.copy_(torch.ones(4))
torch.tensor([1.0], device=CUDA); torch.ones(4).to(CUDA); torch.ones(4).to(CUDA, non_blocking=True)
torch.cuda.current_stream().synchronize()
"""


@pytest.mark.parametrize("ask", re.split("; |\n", ASKS.strip()))
def test_waits_are_noticed(pretend_device, ask):
    rows = torch.arange(4.0, device=CUDA)
    with pretend_device.no_waits():
        torch.ones(4).pin_memory().to(CUDA, non_blocking=True)
        with pytest.raises(AssertionError, match="the host waits"):
            eval(ask, globals(), {"rows": rows})


def test_what_crosses_together_crosses_once(pretend_device):
    """Tensors of several types and shapes, one of them empty and one transposed."""
    here = [torch.arange(3), torch.zeros(0, 5), torch.arange(6.0).view(2, 3).t()]
    here += [torch.tensor([True, False])]
    with pretend_device.no_waits():
        there = sent(here, CUDA)
    assert pretend_device.counts["copies"] == 1 and pretend_device.counts["launches"] == 0
    for before, after in zip(here, there, strict=True):
        assert after.is_cuda and after.dtype == before.dtype and after.cpu().equal(before)


@pytest.mark.parametrize("strategy", ["graph_parallel", "gnnpipe(chunks=4)"])
@pytest.mark.parametrize("model", MODELS)
def test_launches_are_those_that_are_priced(graphs, monkeypatch, model, strategy):
    """By a device on which nothing else takes time; within a quarter."""
    monkeypatch.setattr(Problem, "uses_cuda_graph", False)
    device = spec.Device(memory=1e12, gemm=1e18, memory_bandwidth=1e14, launch=1.0)
    cluster = spec.Cluster(device=device, intra_node={"bandwidth": "1GB/s"})
    problem = replace(case_of(strategy, model, graphs["rough"]).problem(1), cluster=cluster)
    launches = float(parse(strategy).settle(problem).predict(problem).epoch_s)
    counted = LAUNCHES[strategy][MODELS.index(model)]
    assert 0.75 * counted <= launches <= 1.25 * counted


GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")
WORK = {"model": "sage", "layers": 2, "hidden": 8, "mode": "mini", "batch": 6, "fanout": (3, 2)}


@given(
    vertices=st.lists(st.integers(0, 299), max_size=60, unique=True),
    fanout=st.sampled_from([1, 2, 5, 17, 1000, planned.ALL]),
    key=st.tuples(*[st.integers(0, 2**31 - 1)] * 4),
)
def test_tensors_draw_what_arrays_draw(vertices, fanout, key):
    asked, word = np.array(vertices, dtype=np.int64), planned.key_of(*key)
    found = sampling.DeviceGraph(GRAPH, torch.device("cpu")).draw(asked, fanout, word)
    indptr, places = planned.draw(GRAPH, asked, fanout, word)
    for ours, theirs in zip(found, (indptr, GRAPH.indices[places]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


KINDS = ("mean", "gcn", "one", "loop")
ARRAYS = ("indptr", "indices", "weight", "t_indptr", "t_indices", "t_weight", "order")


@pytest.mark.parametrize("fanout", [(3, 2), (1, 40), "full"])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_lays_out_the_same_blocks(device, kind, directed, fanout, graphs, monkeypatch):
    """To the bit: rows and edges in the same order, weights, and the transpose."""
    work = WORK | {"fanout": fanout, "batch": 9}
    problem = Case("data_parallel", graphs["rough"], work, directed=directed).problem(1)
    batches = DataParallel().batches(problem)
    here = Sampler(batches, 0, [kind] * 2)
    there = Sampler(batches, 0, [kind] * 2, device=torch.device(device), lays_on_device=True)
    expected = [here[step].share for step in range(batches.steps)]
    monkeypatch.setattr(sampler, "draw", None)  # the host's
    monkeypatch.setattr(sampler, "weighted_block", None)
    for share, other in zip(expected, (there[step].share for step in range(5)), strict=False):
        np.testing.assert_array_equal(share.own, other.own)
        assert (share.everyone, share.total) == (other.everyone, other.total)
        for part, twin in zip(share.parts, other.parts, strict=True):
            np.testing.assert_array_equal(part.source, twin.source)
            np.testing.assert_array_equal(part.source, twin.vertices.cpu())
            sizes = ("n_dst", "n_src", "own", "edges")
            assert [getattr(part.block, size) for size in sizes] == [
                getattr(twin.block, size) for size in sizes
            ]
            for name in ARRAYS:
                one, other_one = getattr(part.block, name), getattr(twin.block, name)
                assert (one is None) == (other_one is None)
                if one is not None:
                    torch.testing.assert_close(other_one.cpu(), one, rtol=0, atol=0)


def on_gpus(graphs: dict[str, str], asked: str, memory: float) -> Problem:
    problem = Case("data_parallel", graphs["rough"], WORK).problem(1)
    return on(problem, kind="cuda", memory=memory, sampler=asked)


def test_gpus_draw_where_the_cluster_says_so_and_lists_fit(graphs):
    def drawing(kind: str, asked: str, memory: float, **how: Any) -> torch.device | None:
        rank, supply = Rank(0, 1, torch.device(kind), "gloo"), DataParallel().supply
        return drawing_device(rank, replace(supply(on_gpus(graphs, asked, memory)), **how))

    assert drawing("cuda", "device", 1e9) == torch.device("cuda")
    assert (
        drawing("cuda", "host", 1e9)
        is drawing("cpu", "device", 1e9)
        is drawing("cuda", "device", 1e3)
        is None
    )
    ahead = {"prefetch": 1, "pushes": True}
    assert drawing("cuda", "device", 1e9, **ahead) is None, "a fork has no CUDA"


def test_a_sampler_on_the_host_takes_none_of_a_gpu(graphs):
    """Its degrees, places and edges were taken for the GPU's: for ogbn-papers100M 2.2 GB."""
    problem = on_gpus(graphs, "host", 1e9)
    for strategy in (DataParallel(), P3(over="rank")):
        known = strategy.batches(problem).first()
        most = np.max([blocks_bytes(problem, batch) for batch in known], axis=0)
        found = strategy.memory(problem)
        assert most <= found["graph"] <= 1.3 * most and not found["lists"].any(), strategy


@pytest.mark.parametrize("model", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("fanout", [(5, 15), (12, 9)])
def test_a_sampler_on_a_gpu_holds_what_is_planned(fanout, model, pretend_device):
    """What torch's own sorts take is not seen here."""
    work = WORK | {"fanout": fanout, "batch": 200, "model": model, "heads": 1}
    source = "synthetic:community?vertices=5000&edges=80000&features=4&classes=3&seed=0"
    problem = on_a_gpu(Case("data_parallel", source, work), "device")
    batches = DataParallel().batches(problem)
    edges = [spec.edges for spec in problem.model.layers]
    there = Sampler(batches, 0, edges, device=torch.device("cuda", 0), lays_on_device=True)
    torch.cuda.reset_peak_memory_stats()
    before = pretend_device.live()
    kept = there[0].share
    seen, planned = pretend_device.most - before, float(held_by_sampler(problem, batches.at(0))[0])
    assert 0.7 * planned <= seen <= 1.1 * planned and kept


@pytest.mark.parametrize(
    ("strategy", "memory", "there"),
    [
        (DataParallel(), 1e9, True),
        (P3(over="rank"), 1e9, True),
        (DataParallel(), 1e3, False),
        (DataParallel(prefetch=1), 1e9, True),  # a thread samples
        (P3(over="rank", prefetch=1), 1e9, False),  # a process
    ],
)
def test_lists_take_memory_of_gpus_that_draw(graphs, strategy, memory, there):
    use = {
        asked: strategy.memory(problem := on_gpus(graphs, asked, memory))["lists"]
        for asked in ("device", "host")
    }
    lists = sum(array.nbytes for array in (problem.graph.indptr, problem.graph.indices))
    assert use["device"] - use["host"] == pytest.approx(lists * there)
