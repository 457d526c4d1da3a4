"""GraNNDis: islands preload exactly on a graph with skewed degrees; batches and sampling are training
with dense matrices on the same batches and on each server's own graph, written plainly."""

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import NIGHT
from pairwise import covered
from torch import Tensor
from torch.nn import functional as F

from gnnplan.planner.ownership.layout import Expansion, expand
from gnnplan.testing.plain import Plain, difference
from gnnplan.testing.ranks import Case, Ranks, Result, small
from gnnplan.testing.runs import must_have_learnt

pytestmark = pytest.mark.timeout(110)

WORLDS = [(4, 2), (2, 2)]  # ranks, servers


def apart(row: tuple[int, int, int]) -> set[Hashable]:
    """The world and what is trained, not their pairs: one has no part in the other."""
    return {row[:2], row[2]}


CROSSED, SINGLE = "[[0, 2], [1, 3]]", "[[0], [1]]"  # islands of a server


def workload(model: str, **more: object) -> dict[str, object]:
    return small(model, **{"layers": 3, **more})


@pytest.fixture(scope="session")
def skewed(tmp_path_factory):
    """300 vertices of which most have two neighbours and a few have a hundred, far apart from one
    another: 6 hops still grow."""
    n, random = 300, np.random.default_rng(5)
    ring = np.arange(n)
    hubs = np.repeat(np.arange(0, n, 100), 40)
    src = np.concatenate([ring, hubs])
    dst = np.concatenate([(ring + 1) % n, (hubs + random.zipf(1.5, hubs.size).clip(max=60)) % n])
    masks = {f"{name}_mask": ring % 3 == i for i, name in enumerate(("train", "val", "test"))}
    path = tmp_path_factory.mktemp("skewed") / "skewed.npz"
    np.savez(
        path,
        src=src,
        dst=dst,
        x=random.standard_normal((n, 12), dtype=np.float32),
        y=random.integers(0, 4, n),
        **masks,
    )
    return str(path)


# -- preload ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "islands"), [(1, CROSSED), (2, SINGLE)])
def test_islands_preload_exactly(run_ranks, skewed, servers, islands):
    """At every depth one process; and islands of one GPU are servers of one GPU, to the last
    bit. By day at the first depth and the last."""
    # shared out: every other one to either, by day every fourth
    for model, layers in [("gcn", 3), ("gat", 2), ("gcnii", 3), ("sage", 4)][
        servers - 1 :: 2 if NIGHT else 4
    ]:
        case = Case(
            "",
            skewed,
            workload(model, layers=layers, heads=2),
            servers,
            epochs=3,
            eval_every=2,
            islands=islands,
        )
        alone = run_ranks.alone(replace(case, strategy="graph_parallel"))
        depths = [*range(1, layers if NIGHT else 2), None]
        for depth in depths:
            of_islands = replace(
                case, strategy=f"granndis(depth={depth},narrow={depth == 1},group='island')"
            )
            result = run_ranks(4, [of_islands])[0]
            must_have_learnt(result, alone.losses, alone.weights)
            for ours, theirs in zip(result.metrics, alone.metrics, strict=True):
                assert ours["test_accuracy"] == pytest.approx(theirs["test_accuracy"], abs=1e-12)
            if islands == SINGLE:
                of_servers = replace(
                    of_islands,
                    strategy=of_islands.strategy.replace("island", "server"),
                    servers=4,
                    islands="",
                )
                same = run_ranks(4, [of_servers])[0]
                assert (
                    same.losses == result.losses and difference(same.weights, result.weights) == 0.0
                ), str(of_islands)


# -- batches and sampling, plainly -----------------------------------------------------------------


def granndis(case: Case, world: int) -> tuple[list[float], dict[str, Tensor], list[list[float]]]:
    """Every step: the mean loss over the batch's targets, each with the rows and edges of the
    server that owns it. Losses of epochs are over all training vertices; and the accuracies on
    validation and test of the weights that each epoch leaves."""
    problem = case.problem(world)
    strategy, plain, graph = case.settled(problem), Plain(replace(case, servers=1)), problem.graph
    layout = strategy.layout(problem)
    server_of, n = np.asarray(layout.servers)[layout.owner], graph.stats.vertices
    operators = {}
    assert sorted(set(layout.servers)) == list(
        range(2 if case.islands == CROSSED else world if case.islands else case.servers)
    )
    for server in set(layout.servers):
        allowed = np.ones(n, dtype=bool)
        if strategy.sampled:
            allowed = expand(
                graph, server_of == server, Expansion(strategy.max_hop, strategy.fanout, 3), server
            )
            assert (server_of == server).sum() < allowed.sum() < n
        among = torch.from_numpy(np.outer(allowed, allowed) | np.eye(n, dtype=bool))
        operators[server] = plain.operator * among
        if strategy.degrees == "local":
            adjacency = plain.adjacency * among
            operators[server] = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
            if plain.model != "sage":
                looped = adjacency + torch.eye(n, dtype=torch.float64)
                operators[server] = (
                    looped / (looped.sum(1)[:, None] * looped.sum(0)[None, :]).sqrt()
                )
    batch_of = (
        np.where(graph.train, 0, -1)
        if strategy.batches == 1
        else layout.drawn(graph.train, strategy.batches, 3)
    )
    y, losses, scores = torch.from_numpy(np.array(graph.y)), [], []

    def logits_of(step: int | None) -> Tensor:
        out = torch.zeros(n, graph.stats.classes, dtype=torch.float64)
        for server, operator in operators.items():
            plain.operator = operator
            out = torch.where(
                torch.from_numpy(server_of == server)[:, None], plain.forward(step)[0], out
            )
        return out

    for epoch in range(case.epochs):
        total = 0.0
        for step in range(epoch * strategy.batches, (epoch + 1) * strategy.batches):
            targets = torch.from_numpy(batch_of == strategy.turn(problem, step))
            loss = F.cross_entropy(logits_of(step)[targets], y[targets])
            total += loss.item() * int(targets.sum()) / graph.stats.train_vertices
            plain.descend(loss)
        losses.append(total)
        with torch.no_grad():
            right = logits_of(None).argmax(1) == y
        scores.append(
            [
                right[torch.from_numpy(np.array(mask))].double().mean().item()
                for mask in (graph.val, graph.test)
            ]
        )
    return losses, plain.w, scores


def assert_plain(case: Case, result: Result) -> None:
    losses, weights, scores = granndis(case, result.world)
    must_have_learnt(result, losses, weights)
    for row, (val, test) in zip(result.metrics, scores, strict=True):
        assert (row["val_accuracy"], row["test_accuracy"]) == (
            pytest.approx(val, abs=1e-12),
            pytest.approx(test, abs=1e-12),
        ), str(case)


def assert_plain_and_another(run_ranks: Ranks, world: int, case: Case) -> None:
    """As written plainly; and not the training on the whole graph, so the comparison has teeth."""
    (result,) = run_ranks(world, [case])
    assert_plain(case, result)
    whole = run_ranks.alone(replace(case, strategy="graph_parallel"))
    assert difference(result.weights, whole.weights) > 1e-3


BATCHES = (  # batches, model, more knobs, more of the workload
    (2, "gcn", "", {}),
    (3, "sage", ",narrow=True", {"dropout": 0.0}),
    (4, "gcnii", "", {"optimizer": "sgd"}),
    (3, "gcn", "", {"layers": 1, "dropout": 0.0}),
    (2, "gat", "", {"heads": 2}),
    (2, "resgcn", "", {}),
)


@pytest.mark.parametrize(
    ("world", "servers", "number"),
    covered([(*world, n) for world in (*WORLDS, (2, 1)) for n in range(len(BATCHES))], apart),
)
def test_batches_are_mini_batches_with_whole_neighbourhoods(
    run_ranks, skewed, world, servers, number
):
    batches, model, more, how = BATCHES[number]
    text = f"granndis(batches={batches}{more})"
    case = Case(text, skewed, workload(model, **how), servers, epochs=3, eval_every=1)
    assert_plain_and_another(run_ranks, world, case)


SAMPLED = (  # knobs, model, directed
    ("max_hop=1,fanout=1", "gcn", False),
    ("max_hop=1,fanout=2,degrees='local'", "gcn", True),
    ("max_hop=2,fanout=1,degrees='local'", "sage", False),
    ("max_hop=1,fanout=1", "sage", True),
    ("max_hop=1,fanout=2,batches=3", "gcnii", False),
    ("max_hop=1,fanout=2,batches=2,degrees='local'", "gcn", True),
)


@pytest.mark.parametrize(
    ("world", "servers", "number"),
    covered([(*world, n) for world in (*WORLDS, (3, 3)) for n in range(len(SAMPLED))], apart),
)
def test_sampling_trains_on_each_servers_own_graph(run_ranks, graphs, world, servers, number):
    knobs, model, directed = SAMPLED[number]
    case = Case(
        f"granndis({knobs})",
        graphs["rough"],
        workload(model),
        servers,
        epochs=3,
        eval_every=1,
        directed=directed,
    )
    assert_plain_and_another(run_ranks, world, case)


@pytest.mark.parametrize(("servers", "islands"), [(1, CROSSED), (2, SINGLE)])
def test_islands_sample_and_batch_as_servers_do(run_ranks, graphs, servers, islands):
    cases = [
        Case(
            f"granndis({knobs},group='island')",
            graphs["rough"],
            workload(model),
            servers,
            epochs=3,
            eval_every=1,
            islands=islands,
        )
        for knobs, model in (
            ("max_hop=1,fanout=1", "gcn"),
            ("max_hop=1,fanout=2,degrees='local'", "sage"),
            ("batches=3", "sage"),
            ("max_hop=1,fanout=2,batches=2", "gcnii"),
        )
    ]
    for case in cases if NIGHT else cases[servers - 1 :: 2]:  # by day shared out
        assert_plain_and_another(run_ranks, 4, case)


def test_a_graph_with_a_server_that_has_nothing_to_evaluate(run_ranks, graphs):
    """islands trains and validates on one component and tests on the other: one server has no
    target to train on."""
    case = Case(
        "granndis(max_hop=1)", graphs["islands"], workload("sage"), 2, epochs=2, eval_every=1
    )
    assert all(row["test_accuracy"] is not None for row in run_ranks(2, [case])[0].metrics)
