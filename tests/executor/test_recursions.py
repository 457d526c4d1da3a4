"""What is not exact follows its paper: PipeGCN's and GNNPipe's recursions, written plainly in one
process.

Both are the plain model (plain.py) with another aggregation: rows that a rank does not have yet are
leaves, and what flows into those leaves is added to the next step's gradient where the paper says
so. An added gradient g of rows h is written as a term <h, g> of the objective."""

import itertools
import re
from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch
from crossing import crossed
from pairwise import covered, pairs
from torch import Tensor

from gnnplan.planner.strategies import parse
from gnnplan.planner.strategies.gnnpipe.pipeline import chunk_order
from gnnplan.testing.plain import Plain, Read, difference
from gnnplan.testing.ranks import Case, Ranks, Result, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

MODELS = ("gcn", "sage", "gcnii")


def mixing(
    plain: Plain,
    step: int,
    near: Tensor,
    far: Tensor,
    old: dict[int, Tensor],
    constant: bool = False,
) -> Read:
    """This step's rows along the edges of `near` and old rows along those of `far`, under the same
    masks; `constant`: no gradient flows through old rows, nor to the norm that they pass."""

    def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in old:
            return plain.operator, plain.prepare(layer, step, h)
        now, before = plain.prepare(layer, step, h, old[layer]).split(len(h))
        return torch.cat([near, far], 1), torch.cat([now, before.detach() if constant else before])

    return read


# -- PipeGCN ---------------------------------------------------------------------------------------


Errors = dict[str, list[float]]  # 'f:l2', 'b:l2' -> squared norm per step
Gradients = dict[str, tuple[Tensor, Tensor]]  # of a parameter, used and exact


def pipegcn(
    case: Case,
    part: np.ndarray,
    smoothing: str = "",
    gamma: float = 0.0,
    plain: Plain | None = None,
) -> tuple[list[float], dict[str, Tensor], Errors]:
    """Rows of other parts are those of the step before (zero at first); the gradient that they get
    goes home one step later. What is received is smoothed, s_t = gamma s_{t-1} + (1 - gamma) v_t,
    s_0 = 0: rows ('f'), gradients ('g') or both. The third answer: per layer and step the squared
    norm of used minus true, summed over the parts that read a row (gradients: 2 parts)."""
    plain = plain or Plain(case)
    same = torch.from_numpy(part[:, None] == part[None, :])
    within, across = plain.operator * same, plain.operator * ~same
    n, layers = len(part), [layer for layer in range(1, plain.layers + 1) if plain.varies(layer)]
    width = {layer: case.problem(1).model.input_width(layer) for layer in layers}
    sent = {layer: torch.zeros(n, width[layer], dtype=torch.float64) for layer in layers}
    home = {layer: torch.zeros(n, width[layer], dtype=torch.float64) for layer in layers}
    edges = plain.adjacency.numpy() > 0
    reads = torch.from_numpy(
        sum((edges[part == i].any(0) & (part != i)).astype(int) for i in range(part.max() + 1))
    )
    errors: Errors = {f"{way}:l{layer}": [] for way in "fb" for layer in layers}
    keep = {way: gamma if way in smoothing else 0.0 for way in "fg"}
    losses = []
    for step in range(case.epochs):
        stale = {layer: sent[layer].clone().requires_grad_() for layer in layers}
        logits, rows = plain.forward(step, mixing(plain, step, within, across, stale))
        loss = plain.loss(logits)
        losses.append(loss.item())
        plain.descend(loss + sum((rows[layer - 1] * home[layer]).sum() for layer in layers))
        for layer in layers:
            true, gradient = rows[layer - 1].detach(), stale[layer].grad
            errors[f"f:l{layer}"].append(
                ((sent[layer] - true).square().sum(1) * reads).sum().item()
            )
            errors[f"b:l{layer}"].append(
                ((home[layer] - gradient).square().sum(1) * (reads > 0)).sum().item()
            )
            sent[layer] = keep["f"] * sent[layer] + (1 - keep["f"]) * true
            home[layer] = keep["g"] * home[layer] + (1 - keep["g"]) * gradient
    return losses, plain.state, errors


def pairs_of(row: tuple[Hashable, ...]) -> set[Hashable]:
    return pairs(dict(enumerate(row)))


WAYS = (  # graph, dropout, optimizer
    ("rough", 0.0, "adam"),
    ("rough", 0.5, "sgd"),
    ("multi", 0.5, "adam"),
    ("islands", 0.5, "sgd"),
    ("sparse", 0.5, "sgd"),
)


def must_follow_pipegcn(run_ranks: Ranks, world: int, case: Case) -> Result:
    """The run, whose losses and weights are those of the recursion."""
    asked, part = parse(case.strategy), case.problem(world).layout().owner
    losses, weights, _ = pipegcn(case, part, asked.smoothing, asked.gamma)
    return must_have_learnt(run_ranks(world, [case])[0], losses, weights)


@pytest.mark.parametrize(
    ("model", "world", "way"),
    covered(list(itertools.product(MODELS, (2, 3, 4), WAYS)), set),
)
def test_staleness_one_is_pipegcn(run_ranks, graphs, model, world, way):
    graph, dropout, optimizer = way
    how = small(model, dropout=dropout, optimizer=optimizer)
    strategy = "pipegcn(buckets=4)" if world == 3 else "pipegcn"
    case = Case(strategy, graphs[graph], how, epochs=4, eval_every=2)
    result = must_follow_pipegcn(run_ranks, world, case)
    # the exact run is another one, so the comparison above has teeth
    if graph in ("rough", "sparse"):
        exact = run_ranks.alone(replace(case, strategy="graph_parallel"))
        assert difference(result.weights, exact.weights) > 1e-3


@pytest.mark.parametrize(
    "how",
    [{"model": "gat"}, {"model": "sgc"}, {"model": "resgcn"}, {"model": "sage", "norm": "batch"}],
    ids=lambda how: how["model"],
)
def test_blocks_under_stale_rows_of_pipegcn(run_ranks, graphs, how):
    """A stale row is normalised with this step's weights and moments, and takes part in its
    reader's softmax."""
    case = Case("pipegcn", graphs["rough"], small(**how, optimizer="sgd"), epochs=4, eval_every=2)
    must_follow_pipegcn(run_ranks, 3, case)


SMOOTHINGS = ("pipegcn_gf", "pipegcn_f(gamma=0.5)", "pipegcn_g(gamma=0.7)")


@pytest.mark.parametrize(
    ("model", "world", "strategy"),
    covered(list(itertools.product(("gcn", "sage", "gcnii"), (2, 3, 4), SMOOTHINGS)), set),
)
def test_smoothing_is_pipegcns(run_ranks, graphs, model, world, strategy):
    how = small(model, optimizer="sgd")
    case = Case(strategy, graphs["rough"], how, epochs=5, eval_every=3)
    result = must_follow_pipegcn(run_ranks, world, case)
    unsmoothed = pipegcn(case, case.problem(world).layout().owner)[1]
    assert difference(result.weights, unsmoothed) > 1e-3


def test_narrow_and_stale_lags_projected_rows(run_ranks, graphs):
    """GCN, whose last layer alone shrinks its rows: of it the halo is x W of the step before, and
    so is its gradient."""
    how = small("gcn", optimizer="sgd")
    case = Case("pipegcn(narrow=True)", graphs["rough"], how, epochs=6)
    part = case.problem(3).layout().owner
    plain, last = Plain(case), 4
    same = torch.from_numpy(part[:, None] == part[None, :])
    within, across = plain.operator * same, plain.operator * ~same
    width = {2: 8, 3: 8, last: 4}
    sent = {layer: torch.zeros(len(part), width[layer], dtype=torch.float64) for layer in width}
    home = {layer: torch.zeros_like(rows) for layer, rows in sent.items()}
    losses = []
    for step in range(case.epochs):
        stale = {layer: rows.clone().requires_grad_() for layer, rows in sent.items()}
        _, rows = plain.forward(
            step, mixing(plain, step, within, across, {layer: stale[layer] for layer in (2, 3)})
        )
        projected = plain.drop(rows[last - 1], step, last) @ plain.w[f"layers.{last}.weight"].T
        loss = plain.loss(
            within @ projected + across @ stale[last] + plain.w[f"layers.{last}.bias"]
        )
        losses.append(loss.item())
        exchanged = {2: rows[1], 3: rows[2], last: projected}
        plain.descend(loss + sum((exchanged[layer] * home[layer]).sum() for layer in width))
        sent, home = (
            {layer: rows.detach() for layer, rows in exchanged.items()},
            {layer: rows.grad for layer, rows in stale.items()},
        )
    must_have_learnt(run_ranks(3, [case])[0], losses, plain.w)


def test_no_smoothing_at_gamma_zero(run_ranks, graphs):
    plain, smooth = (
        Case(name, graphs["rough"], small("sage"), epochs=4)
        for name in ("pipegcn", "pipegcn_gf(gamma=0.0)")
    )
    a, b = run_ranks(2, [plain, smooth])
    assert a.losses == b.losses


@pytest.mark.parametrize("strategy", ["pipegcn", "pipegcn_gf(gamma=0.5)"])
def test_the_staleness_error_is_used_minus_true(run_ranks, graphs, strategy):
    """Of every layer and step, over both ranks, for rows ('f') and gradients ('b')."""
    knobs = parse(strategy)
    case = Case(strategy, graphs["rough"], small("gcnii"), epochs=5, staleness_errors=True)
    expected = pipegcn(case, case.problem(2).layout().owner, knobs.smoothing, knobs.gamma)[2]
    result = run_ranks(2, [case])[0]
    left = [result.rank(rank)["staleness"] for rank in range(2)]
    assert left[0].keys() == left[1].keys() == expected.keys()
    for key, steps in expected.items():
        ours = [sum(rank[key][step][0] for rank in left) for step in range(case.epochs)]
        assert ours == pytest.approx(steps, rel=1e-9), key
        assert min(steps) > 0


def gradients_of(case: Case, part: np.ndarray, smoothing: str, gamma: float) -> list[Gradients]:
    """Per step what PipeGCN's pass leaves in the gradients, and what a pass leaves in which every
    row is fresh, at the same weights and under the same masks. All in one process."""
    found: list[Gradients] = []

    class Watched(Plain):
        def descend(self, objective: Tensor) -> None:
            names = list(self.w)
            step, weights = len(found), list(self.w.values())
            exact = self.loss(self.forward(step)[0])
            pairs = zip(
                torch.autograd.grad(objective, weights, retain_graph=True),
                torch.autograd.grad(exact, weights),
                strict=True,
            )
            found.append(dict(zip(names, pairs, strict=True)))
            super().descend(objective)

    pipegcn(case, part, smoothing, gamma, Watched(case))
    return found


MEASURED = [  # model, world, graph, dropout, norm
    ("gcn", 2, "rough", 0.0, None),
    ("sage", 3, "multi", 0.5, None),
    ("gcn", 4, "sparse", 0.5, None),
    ("sage", 2, "rough", 0.0, "batch"),
    ("gcnii", 3, "rough", 0.5, None),
]


@pytest.mark.parametrize(
    ("strategy", "model", "world", "graph", "dropout", "norm"),
    covered(
        [(name, *row) for row in MEASURED for name in ("pipegcn", "pipegcn_gf(gamma=0.5)")],
        lambda row: {row[0], row[1:]},
    ),
)
def test_the_gradient_error_is_that_of_brute_force(
    run_ranks, graphs, strategy, model, world, graph, dropout, norm
):
    """Of every parameter and step; training goes on as if nobody had measured."""
    knobs = parse(strategy)
    how = small(model, dropout=dropout, norm=norm)
    case = Case(strategy, graphs[graph], how, epochs=4, gradient_errors=True)
    expected = gradients_of(case, case.problem(world).layout().owner, knobs.smoothing, knobs.gamma)
    result, unmeasured = run_ranks(world, [case, replace(case, gradient_errors=False)])
    assert unmeasured.losses == result.losses and unmeasured.rank(0)["gradient_errors"] == {}
    assert unmeasured.rank(0)["bytes"] == result.rank(0)["bytes"]
    left = result.rank(0)["gradient_errors"]
    assert left == result.rank(world - 1)["gradient_errors"]
    assert set(left) == {"all", *expected[0]}
    for step, gradients in enumerate(expected):
        total = np.zeros(2)
        for name, (used, exact) in gradients.items():
            error, size = left[name][step]
            assert error == pytest.approx((used - exact).norm().item(), rel=1e-8, abs=1e-13), name
            assert size == pytest.approx(exact.norm().item(), rel=1e-8, abs=1e-13), name
            total += np.square([error, size])
        error, size = left["all"][step]
        assert [error, size] == pytest.approx(np.sqrt(total).tolist())
        assert error > 0


@pytest.mark.parametrize("strategy", ["graph_parallel", "graph_parallel(narrow=True)"])
def test_without_staleness_the_gradient_error_is_zero(run_ranks, graphs, strategy):
    how = small("gcn")
    case = Case(strategy, graphs["rough"], how, epochs=3, gradient_errors=True)
    left = run_ranks(2, [case])[0].rank(0)["gradient_errors"]
    for steps in left.values():
        assert len(steps) == 3
        for error, size in steps:
            assert error == 0 < size


# -- GNNPipe ---------------------------------------------------------------------------------------


def gnnpipe(
    case: Case, world: int, plain: Plain | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Algorithm 1. A neighbour whose chunk is later in the step's order than the reader's is
    historical: epoch t = 1, 2, .. reads the rows of epoch period * floor((t - 1) / period); epoch 0
    is an evaluation with the initial weights."""
    plain, asked = plain or Plain(case), parse(case.strategy).settle(case.problem(world))
    chunk, chunks = case.problem(1).chunk_of(asked.chunks), asked.chunks
    layers = [layer for layer in range(1, plain.layers + 1) if plain.varies(layer)]
    with torch.no_grad():
        epochs = {0: plain.forward(None)[1]}  # epoch -> [h_0 .. h_L]
    late = {layer: torch.zeros_like(epochs[0][layer - 1]) for layer in layers}
    losses = []
    for step in range(case.epochs):
        place = np.empty(chunks, dtype=int)
        order = chunk_order(plain.workload.seed, step, chunks, asked.shuffle)
        place[order] = np.arange(chunks)
        # row v reads column u fresh
        processed = torch.from_numpy(place[chunk][None, :] <= place[chunk][:, None])
        fresh, historical = plain.operator * processed, plain.operator * ~processed
        past = epochs[asked.period * (step // asked.period)]
        history = {layer: past[layer - 1].clone().requires_grad_() for layer in layers}
        constant = not asked.historical_gradients
        logits, rows = plain.forward(
            step, mixing(plain, step, fresh, historical, history, constant)
        )
        loss = plain.loss(logits)
        losses.append(loss.item())
        plain.descend(loss + sum((rows[layer - 1] * late[layer]).sum() for layer in layers))
        epochs[step + 1] = [h.detach() for h in rows]
        if asked.historical_gradients:
            late = {layer: history[layer].grad for layer in layers}
    return losses, plain.state


def must_follow_algorithm_1(run_ranks: Ranks, world: int, case: Case) -> None:
    must_have_learnt(run_ranks(world, [case])[0], *gnnpipe(case, world))


TRICKS = [(*switches, 0.5) for switches in itertools.product((True, False), (False, True), (1, 3))]
# shuffle, historical gradients, period, dropout
TRICKS += [(True, False, 1, 0.0), (False, True, 3, 0.0)]


PIPELINES = [
    (model, *pipeline, *trick)
    for model, pipeline, trick in itertools.product(MODELS, ((2, 8), (3, 5), (4, 4)), TRICKS)
]


@pytest.mark.parametrize(
    ("model", "world", "chunks", "shuffle", "historical_gradients", "period", "dropout"),
    covered(PIPELINES, pairs_of),
)
def test_gnnpipe_is_algorithm_1(
    run_ranks, graphs, model, world, chunks, shuffle, historical_gradients, period, dropout
):
    strategy = f"gnnpipe(chunks={chunks},shuffle={shuffle},historical_gradients={historical_gradients},period={period})"
    graph, optimizer = (
        ("multi", "adam") if period == 3 and dropout else ("rough" if shuffle else "sparse", "sgd")
    )
    how = small(model, dropout=dropout, optimizer=optimizer)
    case = Case(strategy, graphs[graph], how, epochs=5, eval_every=3)
    must_follow_algorithm_1(run_ranks, world, case)


class Handed(Plain):
    """Rows enter a stage in few bits, what goes past all layers beside them, and so do their
    gradients on the way back. Evaluation has whole rows."""

    def __init__(self, case: Case, starts: set[int], bits: int) -> None:
        super().__init__(case)
        self.starts, self.bits = starts, bits

    def enter(
        self, layer: int, step: int | None, h: Tensor, x0: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if step is None or layer not in self.starts:
            return h, x0
        seed, message = self.workload.seed, h if x0 is None else torch.cat([h, x0], 1)
        message = crossed(message, self.bits, seed, step, layer)
        return (message, None) if x0 is None else message.tensor_split([h.shape[1]], 1)


@pytest.mark.parametrize(
    ("model", "world", "strategy"),
    [
        ("gcn", 2, "gnnpipe(chunks=1,bits=2)"),
        ("gcnii", 3, "gnnpipe(chunks=5,historical_gradients=True,period=1,bits=8)"),
        ("sage", 4, "gnnpipe(stages=2,chunks=3,period=1,bits=4)"),
    ],
)
def test_a_stage_hands_on_rounded_rows(run_ranks, graphs, model, world, strategy):
    """And reads them, its own and historical ones."""
    how = small(model, optimizer="sgd")
    case = Case(strategy, graphs["rough"], how, epochs=4, eval_every=2)
    asked = parse(strategy).settle(case.problem(world))
    _, *stages = asked.shape(case.problem(world))[1]
    plain = Handed(case, {layers.start for layers in stages}, asked.bits)
    losses, weights = gnnpipe(case, world, plain)
    must_have_learnt(run_ranks(world, [case])[0], losses, weights)
    assert difference(weights, gnnpipe(case, world)[1]) > 1e-3


@pytest.mark.parametrize("model", covered(MODELS, lambda model: {"any"}))
def test_gnnpipe_with_the_papers_period(run_ranks, graphs, model):
    """alpha = 23: the first 23 epochs read epoch 0, the 24th and later ones epoch 23."""
    case = Case("gnnpipe(chunks=4)", graphs["rough"], small(model), epochs=26)
    assert parse(case.strategy).settle(case.problem(2)).period == 23
    must_follow_algorithm_1(run_ranks, 2, case)


HYBRIDS = [  # graph, directed, tricks, dropout
    ("rough", False, "shuffle=True,period=1", 0.5),
    ("multi", False, "shuffle=True,historical_gradients=True,period=3,checkpoint=True", 0.5),
    ("rough", True, "shuffle=False,historical_gradients=True,period=1", 0.0),
    ("islands", False, "shuffle=True,period=3,checkpoint=True", 0.5),
    ("sparse", False, "shuffle=True,period=1", 0.5),
]
BLOCKS = (  # ranks, tricks
    (2, "shuffle=True,period=1"),
    (2, "shuffle=False,period=3,checkpoint=True"),
    (4, "shuffle=True,period=2"),
    (4, "shuffle=True,period=2,checkpoint=True"),
)
GROUPED = [  # model, ranks, strategy, graph, directed, dropout
    *(
        (model, world, f"gnnpipe({groups},{tricks})", graph, directed, dropout)
        for model in MODELS
        for world, groups in ((4, "stages=2,chunks=6"), (2, "stages=1,chunks=5"))
        for graph, directed, tricks, dropout in HYBRIDS
    ),
    # a historical row is normalised too, but nothing flows back through it, or where nothing but
    # dropout prepares it, one step late; GNNPipe has no batch norm
    *(
        (model, world, f"gnnpipe(stages=2,chunks=5,{tricks}{more})", "rough", False, 0.5)
        for model, more in (
            *(("gat", ",historical_gradients=True"), ("sgc", ",historical_gradients=True")),
            ("resgcn", ""),
        )
        for world, tricks in BLOCKS
    ),
    *((m, 4, "gnnpipe(stages=2,chunks=24,period=2)", "rough", False, 0.5) for m in MODELS[1:]),
]


def needs(row: tuple[Hashable, ...]) -> set[Hashable]:
    """Each world with every knob, and each model and graph with one."""
    return {*((row[1], knob) for knob in re.findall(r"\w+=\w+", row[2])), row[0], *row[3:]}


@pytest.mark.parametrize(
    ("model", "world", "strategy", "graph", "directed", "dropout"), covered(GROUPED, needs)
)
def test_the_hybrid_is_the_pipeline(
    run_ranks, graphs, model, world, strategy, graph, directed, dropout
):
    """A row of another member is fresh or historical when one of its own would be, so the recursion
    does not know of groups. Of 60 vertices in 24 chunks a member without rows has nothing to send
    or hand on, and still meets the other."""
    how = small(model, dropout=dropout, optimizer="sgd")
    case = Case(strategy, graphs[graph], how, epochs=5, eval_every=3, directed=directed)
    if "chunks=24" in strategy:
        assert (case.problem(world).chunks(24, 2).rows == 0).any()
    must_follow_algorithm_1(run_ranks, world, case)
