"""Mini-batches shared by ranks train as one process does on the same batches; and one process as
training written plainly does.

Batches and samples follow from seed, epoch, batch, layer and vertex: the plain training draws them
with planner/graph/sampling.py, whose distribution tests/planner/test_sampling.py holds."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import NIGHT
from pairwise import covered
from torch import Tensor

from gnnplan.executor.layers.kernels import Shapes
from gnnplan.planner.graph.sampling import Frontier, frontier, seeds_of
from gnnplan.testing.plain import Plain, difference
from gnnplan.testing.ranks import Case, Ranks, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

MODELS = ("gcn", "sage", "gat", "gcnii", "resgcn", "sgc", "gin", "gatv2")
SPLITS = [
    (2, 1, "data_parallel"),
    (3, 1, "data_parallel"),
    (4, 2, "data_parallel(checkpoint=True)"),
    (2, 1, "gsplit"),
    (3, 1, "gsplit(splitter='random')"),
    (4, 1, "gsplit(splitter='node',narrow=True)"),
    (2, 1, "gsplit(splitter='edge',imbalance=1.0)"),
    (4, 2, "gsplit"),
    (4, 2, "gsplit(group='all',splitter='random',checkpoint=True)"),
    (2, 1, "data_parallel(prefetch=1)"),
    (2, 1, "gsplit(prefetch=2)"),
    (2, 1, "data_parallel(buckets=3)"),
    (3, 1, "gsplit(buckets=2,narrow=True)"),
]
SNP = {"hidden": 12, "norm": "layer"}  # aggregates before it multiplies
FIRST = [
    (2, 1, "dnp", "rough", "sage", {"dropout": 0.5}),
    (3, 1, "dnp(splitter='random',checkpoint=True)", "sparse", "gcn", {"dropout": 0.5}),
    (4, 2, "dnp(prefetch=1)", "multi", "gat", {"dropout": 0.5}),
    (4, 2, "dnp(group='all',splitter='random',buckets=2)", "rough", "gin", {}),
    (2, 1, "snp", "rough", "sage", {"dropout": 0.5}),
    (3, 1, "snp(splitter='random',checkpoint=True)", "sparse", "gcn", {"dropout": 0.5}),
    (4, 2, "snp(prefetch=1,features='spread')", "multi", "sgc", {"dropout": 0.5}),
    (4, 2, "snp(group='all',splitter='random',buckets=2)", "multi", "sage", SNP),
    (2, 1, "p3", "rough", "sage", {"dropout": 0.5}),
    (2, 2, "p3", "sparse", "gat", {}),
    (3, 1, "p3(prefetch=2)", "rough", "gcn", {}),
    (4, 2, "p3", "multi", "gat", {"dropout": 0.5}),
    (4, 2, "p3(over='rank')", "sparse", "sage", {"dropout": 0.5}),
    (4, 2, "p3(over='rank',copies=2)", "rough", "sgc", {"dropout": 0.5}),
    (2, 2, "p3(copies=2)", "rough", "gat", {"heads": 4}),
    (2, 1, "p3", "sparse", "sgc", {"layers": 1, "fanout": (3,)}),
    (4, 2, "p3", "islands", "gcn", {"batch": 4, "fanout": "full", "norm": "layer"}),
]


PAIRS = [
    ("rough", "sage", {"dropout": 0.5}),
    ("rough", "gcn", {}),
    ("multi", "gat", {"dropout": 0.5}),
    ("sparse", "gcn", {"dropout": 0.5}),
    ("sparse", "gcnii", {}),
    ("rough", "resgcn", {"dropout": 0.5}),
    ("rough", "sgc", {"dropout": 0.5}),
    ("rough", "gin", {"dropout": 0.5}),
    ("sparse", "gatv2", {"hidden": 32}),
    ("islands", "sage", {"batch": 4, "fanout": "full"}),
]


def workload(model: str, **more: object) -> dict[str, object]:
    """10 steps: 3 epochs of 4 batches on `rough`'s training vertices, the last of an epoch
    smaller."""
    batches = {"layers": 3, "dropout": 0.0, "heads": 2, "mode": "mini", "batch": 6}
    return small(model, **{**batches, "fanout": (3, 2, 2), **more})


def drawn_operator(plain: Plain, found: Frontier, layer: int) -> Tensor:
    """[N, N]: what rows of h_l read in this batch. An edge drawn stands for degree / drawn edges of
    its row."""
    n, graph = plain.graph.stats.vertices, plain.graph
    indptr, places = found.edges[layer - 1]
    taken = torch.zeros(n, n, dtype=torch.float64)
    for i, v in enumerate(found.nodes[layer].tolist()):
        for place in places[indptr[i] : indptr[i + 1]]:
            taken[v, graph.indices[place]] = 1.0
    if plain.model == "sage":
        return taken / taken.sum(1, keepdim=True).clamp(min=1)
    if plain.model == "resgcn":
        return taken
    if plain.model in ("gat", "gatv2", "gin"):
        return taken + torch.eye(n, dtype=torch.float64)
    ratio = plain.adjacency.sum(1) / taken.sum(1).clamp(min=1)
    return plain.operator * (taken * ratio[:, None] + torch.eye(n, dtype=torch.float64))


def batches_of(plain: Plain, epochs: int) -> Iterator[tuple[float, Callable[[], Tensor], bool]]:
    """Batch after batch: its share of the training vertices, its mean loss at the weights of the
    moment, whether it ends an epoch."""
    w, graph, step = plain.workload, plain.graph, itertools.count()
    labels = torch.from_numpy(np.array(graph.y))
    for epoch in range(epochs):
        for number, seeds in enumerate(drawn := seeds_of(graph, w.batch, w.seed, epoch)):
            found, at = frontier(graph, seeds, w.fanouts, w.seed, epoch, number), next(step)
            operators = {
                layer: drawn_operator(plain, found, layer) for layer in range(1, w.layers + 1)
            }

            def loss(
                seeds: np.ndarray = seeds, at: int = at, operators: dict[int, Tensor] = operators
            ) -> Tensor:
                def read(of: int, h: Tensor) -> tuple[Tensor, Tensor]:
                    return operators[of], plain.prepare(of, at, h)

                logits = plain.forward(at, read)[0][seeds]
                return plain.loss_of(logits, labels[seeds])

            yield seeds.size / graph.stats.train_vertices, loss, number + 1 == len(drawn)


def train_plainly_in_batches(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    plain, losses, total = Plain(case), [], 0.0
    for share, loss_of, last in batches_of(plain, case.epochs):
        plain.begin(len(losses))
        loss = loss_of()
        total += loss.item() * share
        plain.descend(loss)
        if last:
            losses.append(total)
            total = 0.0
    return losses, plain.state


_references: dict[str, object] = {}


def assert_as_one_process(
    run_ranks: Ranks, world: int, cases: list[Case], tolerance: float = 1e-9
) -> None:
    for case, result in zip(cases, run_ranks(world, cases), strict=True):
        alone = replace(case, strategy="data_parallel", servers=1)
        if str(alone) not in _references:
            _references[str(alone)] = run_ranks.alone(alone)
        reference = _references[str(alone)]
        assert difference(result.weights, reference.weights) <= tolerance, str(case)
        assert result.losses == pytest.approx(reference.losses, rel=tolerance), str(case)
        assert result.scores[-3:] == pytest.approx(reference.scores[-3:], abs=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_plain_training_on_the_same_batches(run_ranks, graphs, model):
    """By day each model in one of the ways."""
    ways: list[tuple[str, bool, dict[str, object]]] = [
        ("rough", False, {}),
        ("rough", True, {"dropout": 0.5, "optimizer": "sgd"}),
        ("multi", False, {"fanout": "full", "batch": 20}),
        ("sparse", False, {"dropout": 0.5}),
    ]
    for graph, directed, more in ways if NIGHT else ways[MODELS.index(model) % 4 :: 4]:
        case = Case("data_parallel", graphs[graph], workload(model, **more), directed=directed)
        losses, weights = train_plainly_in_batches(case)
        must_have_learnt(run_ranks.alone(case), losses, weights)
        # it outlived the run once, and who multiplied after it in this process got other roundings
        assert not Shapes.vary


@pytest.mark.parametrize(
    ("split", "pair"),
    covered(
        list(itertools.product(SPLITS, PAIRS)),
        # a strategy and each of its knobs, a world, a model and a graph
        lambda row: {row[0][:2], *re.findall(r"^\w+|[a-z]+='?\w+", row[0][2]), *row[1][:2]},
    ),
    ids=lambda value: "-".join(map(str, value)),
)
def test_ranks_train_as_one_process(run_ranks, graphs, split, pair):
    world, servers, strategy = split
    graph, model, more = pair
    case = Case(strategy, graphs[graph], workload(model, **more), servers, eval_every=2)
    assert_as_one_process(run_ranks, world, [case])


@pytest.mark.parametrize(
    ("world", "servers", "strategy", "graph", "model", "more"),
    # both strategies, and every knob, world, model and graph with one of them
    covered(FIRST, lambda row: {row[:2], *re.findall(r"^\w+|[a-z]+='?\w+", row[2]), *row[3:5]}),
    ids=str,
)
def test_ranks_that_split_layer_1_alone_train_as_one_process(
    run_ranks, graphs, world, servers, strategy, graph, model, more
):
    case = Case(strategy, graphs[graph], workload(model, **more), servers, eval_every=2)
    assert_as_one_process(run_ranks, world, [case])


def test_batch_norm_is_over_a_batchs_rows_of_all_ranks(run_ranks, graphs):
    """gsplit computes every row at one rank, so its moments are those of one process. A row that
    two ranks of data_parallel compute counts twice, as in torch.nn.SyncBatchNorm."""
    more = {"norm": "batch", "dropout": 0.5, "optimizer": "sgd"}
    cases = [
        Case("gsplit", graphs[graph], workload(model, **more), servers=1)
        for graph, model in (("rough", "gcn"), ("multi", "sage"))
    ]
    for case, result in zip(cases, run_ranks(2, cases), strict=True):
        alone = run_ranks.alone(replace(case, strategy="data_parallel"))
        assert result.losses == pytest.approx(alone.losses, rel=1e-9)
        kept = [name for name in alone.weights if not name.endswith(".bias")]  # moved by rounding
        of_ranks, of_one = ({n: each.weights[n] for n in kept} for each in (result, alone))
        assert difference(of_ranks, of_one) <= 1e-9
    case = replace(cases[0], strategy="data_parallel")
    (result,) = run_ranks(2, [case])
    assert result.losses != pytest.approx(run_ranks.alone(case).losses, rel=1e-6)
