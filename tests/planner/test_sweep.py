"""What if: every combination once, checked before anything is planned; where the recommendation
changes; what an epoch costs."""

import csv
import io
from dataclasses import replace

import pytest

from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision.candidate import evaluate, placed
from gnnplan.planner.decision.search import search
from gnnplan.planner.decision.sweep import axes, changes, points, rows, to_csv
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError


def question(cluster: str = "gnnpipe_a5000", **workload: object) -> Problem:
    stats = load("reddit")
    return Problem(stats, None, Workload.model_validate(workload), read_cluster(cluster))


def test_every_combination_is_asked_once_the_last_field_first():
    base = question()
    asked = points(axes(["servers=1,4", "hidden=64,128,256"]), base, ["layers=5"])
    assert [tuple(at.values()) for at, _ in asked] == [
        (s, h) for s in ("1", "4") for h in ("64", "128", "256")
    ]
    for at, problem in asked:
        assert (problem.cluster.servers, problem.workload.hidden, problem.workload.layers) == (
            int(at["servers"]),
            int(at["hidden"]),
            5,
        )
        assert problem.stats is base.stats and problem.cluster.device == base.cluster.device


def test_batches_are_swept_where_there_are_some():
    [(_, problem)] = points(axes(["batch=512"]), question(mode="mini"))
    assert problem.workload.batch == 512
    [(_, problem)] = points(axes(["batch=512"]), question(), ["mode=mini"])
    assert (problem.workload.batch, problem.workload.mode) == (512, "mini")
    with pytest.raises(SpecError, match="the plan trains on the full graph"):
        points(axes(["batch=512"]), question())


@pytest.mark.parametrize("text", ["hidden=0", "hiden=64", "inter_node.bandwidth=fast"])
def test_a_mistake_is_in_the_option_that_made_it(text):
    """The errors of --sweep spoke of --set."""
    with pytest.raises(SpecError, match="^--sweep " + text.partition("=")[0]):
        points(axes([text]), question())


def test_a_mistake_of_set_alone_is_not_blamed_on_a_sweep():
    """`simulate --set servers=2` was told of --sweep, which nobody had given."""
    with pytest.raises(SpecError, match=r"^--set layers: "):
        points({}, question(), ["layers=0"])


def test_a_device_is_that_of_another_cluster_with_its_price(tmp_path):
    text = (PRESETS / "dgx_a100.yaml").read_text()
    (tmp_path / "rented.yaml").write_text(text + "price: 4.1\n")
    base = question()
    base = replace(base, cluster=base.cluster.model_copy(update={"price": 0.5}))
    asked = points(axes([f"device=gnnpipe_a5000,dgx_a100,{tmp_path / 'rented.yaml'}"]), base)
    devices = [base.cluster.device, *[read_cluster("dgx_a100").device] * 2]
    assert [(problem.cluster.device, problem.cluster.price) for _, problem in asked] == list(
        zip(devices, (0.5, None, 4.1), strict=True)
    )
    assert all(
        (problem.cluster.intra_node, problem.cluster.islands, problem.ranks)
        == (base.cluster.intra_node, (), 8)
        for _, problem in asked
    )


def test_fewer_gpus_are_the_first_of_the_servers_lists_and_more_ranks_on_a_cpu_share_its_cores():
    [(_, problem)] = points(axes(["gpus_per_server=3"]), question("dgx_a100"))
    assert (
        problem.ranks == 6
        and problem.cluster.islands == ((0, 1, 2),)
        and problem.cluster.nics == ((0, 1), (2,))
    )
    base = question("local")
    more = base.cluster.gpus_per_server * 4
    [(_, problem)] = points(axes([f"gpus_per_server={more}"]), base)
    assert problem.cluster.device == with_ranks(base.cluster, base.cluster.servers * more).device


def test_where_the_recommendation_changes():
    swept = axes(["a=1,2,3", "b=x,y"])

    def row(a: str, b: str, family: str | None) -> dict[str, object]:
        return {"at": {"a": a, "b": b}, "best": family, **({"family": family} if family else {})}

    table = [
        row("1", "x", "p"),
        row("1", "y", "q"),
        row("2", "x", None),
        row("2", "y", "q"),
        row("3", "x", "r"),
        row("3", "y", "q"),
    ]
    assert changes(swept, table) == [
        # nothing fits at a=2
        {"field": "a", "value": "3", "with": {"b": "x"}, "from": "p", "to": "r"},
        {"field": "b", "value": "y", "with": {"a": "1"}, "from": "p", "to": "q"},
        {"field": "b", "value": "y", "with": {"a": "3"}, "from": "r", "to": "q"},
    ]
    assert changes(axes(["a=1"]), [row("1", "x", "p")]) == []
    # where only the variant changes, the variants are named
    variants = [row("1", "x", "p") | {"best": f"p(k={k})"} for k in (2, 4)]
    variants[1]["at"] = {"a": "2", "b": "x"}
    assert changes(axes(["a=1,2"]), variants) == [
        {"field": "a", "value": "2", "with": {"b": "x"}, "from": "p(k=2)", "to": "p(k=4)"}
    ]


@pytest.mark.slow
def test_rows_are_plans_of_their_own():
    """The recommendation, and the best of the plan's family on all GPUs, are those of a plan asked
    there."""
    asked = points(axes(["servers=1,2"]), question(layers=4), ["gpus_per_server=2"])
    table = rows(
        asked,
        parse("gnnpipe(chunks=2)"),
        0,
        lambda candidate: {"simulated_s": 2.0 * float(candidate.predicted.epoch_s)},
    )
    for row, (_, problem) in zip(table, asked, strict=True):
        found = search(problem)
        best, same = (
            found.best,
            next(
                c
                for c in found.ranked
                if c.strategy.name == "gnnpipe" and c.problem.ranks == problem.ranks
            ),
        )
        assert (row["best"], row["gpus"], row["predicted_s"]) == (
            str(best.strategy),
            best.problem.ranks,
            float(best.predicted.epoch_s),
        )
        assert (row["plan"], row["plan_predicted_s"]) == (
            str(same.strategy),
            float(same.predicted.epoch_s),
        )
        assert (
            row["simulated_s"] == 2 * row["predicted_s"]
            and row["plan_simulated_s"] == 2 * row["plan_predicted_s"]
        )
        assert "epoch_dollars" not in row
    told = list(csv.DictReader(io.StringIO(to_csv(axes(["servers=1,2"]), table))))
    assert [line["servers"] for line in told] == ["1", "2"] and float(
        told[1]["predicted_s"]
    ) == table[1]["predicted_s"]


def test_a_strategy_that_plans_propose_of_no_family_is_a_column_too():
    """bns, of which users ask by name, was a dash."""
    asked = points(axes(["servers=1,2"]), question())
    for row, (_, problem) in zip(
        rows(asked, parse("bns(p=0.5)"), 0, lambda _: {}), asked, strict=True
    ):
        expected = evaluate(placed(problem, parse("bns(p=0.5)")), parse("bns(p=0.5)"))
        assert row["plan"] == "bns(p=0.5)"
        assert row["plan_predicted_s"] == float(expected.predicted.epoch_s)


@pytest.mark.slow
def test_an_exact_plan_is_compared_with_exact_variants():
    """A plan of granndis was swept as granndis that samples."""
    asked = points(axes(["inter_node.bandwidth=1e7,1e8"]), question())
    for row in rows(asked, parse("granndis"), 0, lambda _: {}):
        assert parse(row["plan"]).exact


@pytest.mark.slow
def test_a_plan_of_as_many_ranks_is_swept_as_it_is():
    """`simulate --set` played the plan's own variant, and --sweep the best of its family."""
    asked = points(axes(["inter_node.bandwidth=1e7,1e8"]), question())
    own, ranks = parse("granndis(depth=1)"), question().ranks
    for row, (_, problem) in zip(rows(asked, own, ranks, lambda _: {}), asked, strict=True):
        assert row["plan"] == str(own)
        assert row["plan_predicted_s"] == float(own.predict(placed(problem, own)).epoch_s)


@pytest.mark.slow
def test_nothing_fits_is_a_row_too():
    asked = points(
        axes(["device.memory=24GB,10MB"]), question(), ["servers=1", "gpus_per_server=2"]
    )
    table = rows(asked, parse("gnnpipe"), 0, lambda _: {})
    assert table[0]["best"] and "simulated_s" not in table[0]
    assert (
        table[1]["best"] is None
        and "nothing fits" in table[1]["reason"]
        and changes(axes(["device.memory=24GB,10MB"]), table) == []
    )
    assert [
        line["best"]
        for line in csv.DictReader(io.StringIO(to_csv(axes(["device.memory=24GB,10MB"]), table)))
    ][1] == ""
