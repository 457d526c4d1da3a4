"""What if: every combination once, checked before; where the recommendation changes; costs."""

import csv
import io

import pytest
from asked import on

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


@pytest.mark.parametrize("text", ["batch=512", "heads=2", "theta=0.1", "negatives=2", "gamma=0.5"])
def test_what_no_part_reads_is_not_swept(text):
    """Every row was the same, and nothing said why."""
    field = text.partition("=")[0]
    with pytest.raises(SpecError, match=f"--sweep {field} has no effect with .* add --set"):
        points(axes([text]), question(model="gcn"))
    with pytest.raises(SpecError, match=f"--set {field} has no effect .* add --set") as told:
        points({}, question(model="gcn"), [text])
    remedy = str(told.value).rpartition("--set ")[2]
    if field != "negatives":  # links are learnt in mini-batches only
        points({}, question(model="gcn"), [text, remedy])
    both = axes([text, "model=gcn,gat", "mode=full,mini", "task=node", "schedule=constant,step"])
    both["model"] += ("gcnii",)
    assert points(both, question())


def test_ranks_are_swept_as_ranks_asks_for_them():
    """`--sweep ranks=1,2` was told of `ranges`."""
    assert [p.ranks for _, p in points(axes(["ranks=1,2,8"]), question("local"))] == [1, 2, 8]
    with pytest.raises(SpecError, match="--ranks 7 cannot be spread equally over 2 servers"):
        points(axes(["ranks=7"]), question("gnnpipe_a5000"))
    with pytest.raises(SpecError, match="ranks=x: must be whole numbers, as ranks=1,2,4"):
        points(axes(["ranks=1,x"]), question())


@pytest.mark.parametrize("text", ["hidden=0", "hiden=64", "inter_node.bandwidth=fast"])
def test_a_mistake_is_in_the_option_that_made_it(text):
    """The errors of --sweep spoke of --set, and those of --set alone of --sweep."""
    with pytest.raises(SpecError, match="^--sweep " + text.partition("=")[0]):
        points(axes([text]), question())
    with pytest.raises(SpecError, match="^--set " + text.partition("=")[0]):
        points({}, question(), [text])


def test_a_device_is_that_of_another_cluster_with_its_price(tmp_path):
    rented = tmp_path / "rented.yaml"
    rented.write_text((PRESETS / "dgx_a100.yaml").read_text() + "price: 4.1\n")
    base = on(question(), price=0.5)
    asked = points(axes([f"device=gnnpipe_a5000,dgx_a100,{rented}"]), base)
    a100 = read_cluster("dgx_a100").device
    found = [(problem.cluster.device, problem.cluster.price) for _, problem in asked]
    assert found == [(base.cluster.device, 0.5), (a100, None), (a100, 4.1)]
    for _, problem in asked:
        assert problem.cluster.intra_node == base.cluster.intra_node
        assert problem.cluster.islands == () and problem.ranks == 8


def test_fewer_gpus_are_the_first_of_the_servers_lists_and_more_ranks_on_a_cpu_share_its_cores():
    [(_, problem)] = points(axes(["gpus_per_server=3"]), question("dgx_a100"))
    assert problem.ranks == 6 and problem.cluster.islands == ((0, 1, 2),)
    assert problem.cluster.nics == ((0, 1), (2,))
    base = question("local")
    more = base.cluster.gpus_per_server * 4
    [(_, problem)] = points(axes([f"gpus_per_server={more}"]), base)
    assert problem.cluster.device == with_ranks(base.cluster, base.cluster.servers * more).device


def test_where_the_recommendation_changes():
    table = []
    for text in ("1 x p", "1 y q", "2 x", "2 y q", "3 x r", "3 y q"):  # nothing fits at a=2, b=x
        a, b, *family = text.split()
        best = {"best": family[0], "family": family[0]} if family else {"best": None}
        table.append({"at": {"a": a, "b": b}, **best})
    found = changes(axes(["a=1,2,3", "b=x,y"]), table)
    assert [tuple(change.values()) for change in found] == [
        ("a", "3", {"b": "x"}, "p", "r"),
        ("b", "y", {"a": "1"}, "p", "q"),
        ("b", "y", {"a": "3"}, "r", "q"),
    ]
    assert changes(axes(["a=1"]), table[:1]) == []
    # where only the variant changes, the variants are named
    at = {"1": "p(k=2)", "2": "p(k=4)"}
    alike = [{"at": {"a": a, "b": "x"}, "best": best, "family": "p"} for a, best in at.items()]
    assert changes(axes(["a=1,2"]), alike) == [
        {"field": "a", "value": "2", "with": {"b": "x"}, "from": "p(k=2)", "to": "p(k=4)"}
    ]


@pytest.mark.slow
def test_rows_are_plans_of_their_own():
    """The recommendation, and the best of the plan's family, are those of a plan asked there."""
    swept = axes(["servers=1,2"])
    asked = points(swept, question(layers=4), ["gpus_per_server=2"])

    def twice(candidate):
        return {"simulated_s": 2.0 * float(candidate.predicted.epoch_s)}

    table = rows(asked, parse("gnnpipe(chunks=2)"), question("h200"), twice)
    for row, (_, problem) in zip(table, asked, strict=True):
        found = search(problem)
        pipes = [c for c in found.ranked if c.strategy.name == "gnnpipe"]
        same = next(c for c in pipes if c.problem.ranks == problem.ranks)
        for of, candidate in (("", found.best), ("plan_", same)):
            assert row[f"{of}predicted_s"] == float(candidate.predicted.epoch_s)
            assert row[f"{of}simulated_s"] == 2 * row[f"{of}predicted_s"]
        assert (row["best"], row["plan"]) == (str(found.best.strategy), str(same.strategy))
        assert row["gpus"] == found.best.problem.ranks and "epoch_dollars" not in row
    told = list(csv.DictReader(io.StringIO(to_csv(swept, table))))
    assert [line["servers"] for line in told] == ["1", "2"]
    assert float(told[1]["predicted_s"]) == table[1]["predicted_s"]


def test_a_strategy_that_plans_propose_of_no_family_is_a_column_too():
    """bns, of which users ask by name, was a dash."""
    asked, bns = points(axes(["servers=1,2"]), question()), parse("bns(p=0.5)")
    table = rows(asked, bns, question("h200"), lambda _: {})
    for row, (_, problem) in zip(table, asked, strict=True):
        expected = evaluate(placed(problem, bns), bns)
        assert row["plan"] == "bns(p=0.5)"
        assert row["plan_predicted_s"] == float(expected.predicted.epoch_s)


@pytest.mark.slow
def test_a_plan_of_as_many_ranks_is_swept_as_it_is():
    """--sweep played the best of the family, and compared plans of some GPUs with those of all; a
    plan of granndis on others was swept as granndis that samples."""
    asked = points(axes(["inter_node.bandwidth=1e7"]), question())
    for row in rows(asked, parse("granndis"), question("h200"), lambda _: {}):
        assert parse(row["plan"]).exact
    one, all_ = parse("offload"), parse("granndis(depth=1)")
    for own, plan in ((one, question().placed((0,))), (all_, question())):
        for row, (_, problem) in zip(rows(asked, own, plan, lambda _: {}), asked, strict=True):
            there = placed(problem.placed(plan.placement), own)
            assert row["plan_predicted_s"] == float(own.settle(there).predict(there).epoch_s)


@pytest.mark.slow
def test_nothing_fits_is_a_row_too():
    swept = axes(["device.memory=24GB,10MB"])
    asked = points(swept, question(layers=2), ["servers=1", "gpus_per_server=2"])
    first, second = table = rows(asked, parse("gnnpipe"), question("h200"), lambda _: {})
    assert first["best"] and "simulated_s" not in first
    assert second["best"] is None and "nothing fits" in second["reason"]
    assert changes(swept, table) == []
    assert [line["best"] for line in csv.DictReader(io.StringIO(to_csv(swept, table)))][1] == ""
