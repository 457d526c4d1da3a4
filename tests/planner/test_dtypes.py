"""`--dtype auto`: which type of rows a plan takes, by the rule for lossy strategies. And what
models are to a plan: widths, weights and moments by hand."""

import csv
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import changed
from typer.testing import CliRunner

import gnnplan
from gnnplan.cli import app
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import SURE_SHARE
from gnnplan.planner.decision.choices import Choice, choose
from gnnplan.planner.decision.explain import rounding_cost
from gnnplan.planner.decision.objective import Objective, Target, Training
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.model import MASK, Model, describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.strategies.layerwise.feature_parallel import arranged
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.units import show_bytes, show_time

ROOT = Path(__file__).resolve().parents[2]
STATS = load("reddit")
BY_LAYERS = parse("graph_parallel")


def problem_of(
    cluster: Cluster | None = None, stats: GraphStats = STATS, **workload: Any
) -> Problem:
    asked = Workload.model_validate({"layers": 2, "hidden": 64} | workload)
    return Problem(stats, None, asked, cluster or read_cluster("l4_box"))


def device(**fields: Any) -> Cluster:
    return changed(read_cluster("l4_box"), **fields)


def chosen(
    problem: Problem, forced: Strategy | None = BY_LAYERS, objective: Objective | None = None
) -> Choice:
    options = {} if objective is None else {"objective": objective}
    return choose(problem, lambda asked: search(asked, forced=forced, **options))


def test_a_plan_takes_bfloat16_where_it_is_surely_faster(tmp_path):
    """Reddit's sums are bound by memory. The plan is --dtype bfloat16's, and tells of both."""
    plan = gnnplan.plan("reddit", "l4_box", dtype="auto", layers=2, per="epoch")
    asked = {
        dtype: gnnplan.plan("reddit", "l4_box", dtype=dtype, layers=2, per="epoch")
        for dtype in ("float32", "bfloat16")
    }
    told = plan.document["dtypes"]
    assert told["chosen"] == plan.workload.dtype == "bfloat16" and told["refused"] == {}
    assert told["chance_bfloat16_faster"] >= SURE_SHARE
    line = plan.document["summary"].pop("dtype")
    assert line.startswith("bfloat16, since bfloat16 is ")
    assert line in plan.document["explanation"][0]
    for dtype, one in asked.items():
        best = {name: value for name, value in one.document["best"].items() if name != "placement"}
        assert told["answers"][dtype] == best
        assert f"{dtype}: {one.best.strategy}, {show_time(one.best.epoch_s)} per epoch" in line
        assert f"{show_bytes(one.best.memory_bytes)} on the fullest rank" in line
    for run in told["accuracy"]:
        assert f"{run['points']:+.2f} ± {run['two_errors']:.2f} points on {run['graph']}" in line
    # simulate and run read a plan whose type is a type
    plan.write(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["workload"]["dtype"] == "bfloat16"
    assert gnnplan.load_plan(tmp_path / "plan.json").best == asked["bfloat16"].best
    del plan.document["dtypes"], plan.document["explanation"][0]
    assert plan.document == asked["bfloat16"].document


@pytest.mark.parametrize(
    ("times", "launch", "dtype", "why"),
    [
        (4.0, 0.0, "bfloat16", "bfloat16 is "),
        (4.0, 2e-3, "float32", "within doubt"),
        (0.04, 0.0, "float32", "bfloat16 products run at 0.04 of float32's rate here"),
        (None, 0.0, "float32", "for this device's own is not known (`gnnplan measure"),
    ],
)
def test_what_rounds_wins_by_the_rule_for_what_is_lossy(times, launch, dtype, why):
    """A few per cent are no reason to round, nor is a gain by a rate that nobody has measured."""
    gemm = read_cluster("l4_box").device.gemm
    rates = {"gemm_bfloat16": times and times * gemm, "launch": launch}
    choice = chosen(problem_of(device(**rates), hidden=1024))
    plain, rounded = (choice.answers[one].best for one in ("float32", "bfloat16"))
    gain, chance = plain.value / rounded.value - 1, rounded.chance_faster(plain)
    assert choice.chosen == choice.found.problem.workload.dtype == dtype
    assert (dtype == "bfloat16") == (times is not None and chance >= SURE_SHARE)
    assert (gain > 0) == (times != 0.04)
    if why == "within doubt":
        assert 0.05 < gain < 0.3 and 0.5 < chance < SURE_SHARE
        why = f"by prediction, and faster with a chance of {100 * chance:.0f} % (what is lossy"
    assert why in choice.line and choice.line.startswith(f"{dtype}, since ")
    # each type's miss is its own: the ratio of the two is in doubt by more than constants
    misses = np.log(rounded.drawn_s / plain.drawn_s).std()
    assert misses > 0.15


def test_bfloat16_is_taken_where_float32_fits_nowhere():
    """However slow its products: the alternative is no training."""
    problem = problem_of(device(gemm_bfloat16=1e9))
    both = chosen(problem).answers
    small, large = (both[one].best.memory_bytes for one in ("bfloat16", "float32"))
    assert small < large and chosen(problem).chosen == "float32"

    def with_memory(memory: float) -> Problem:
        return replace(problem, cluster=device(gemm_bfloat16=1e9, memory=memory))

    choice = chosen(with_memory((small + large) / 2))
    assert choice.chosen == "bfloat16" and list(choice.answers) == ["bfloat16"]
    assert choice.line.startswith("bfloat16, since float32 is refused: graph_parallel needs ")
    assert choice.chance_faster is None
    with pytest.raises(Infeasible, match=r"=.*\(rows in bfloat16; float32 needs more\)"):
        chosen(with_memory(small * 0.99))


@pytest.mark.parametrize(
    ("fields", "strategy", "why"),
    [
        ({"model": "gat"}, "graph_parallel", "attention sums exponentials"),
        ({"norm": "batch"}, "graph_parallel", "batch norm sums all vertices"),
        ({"mode": "mini", "task": "link"}, "data_parallel", "scores of edges are compared"),
        ({"model": "gcn"}, "tensor3d", "tensor3d has no rows in bfloat16"),
    ],
)
def test_rows_stay_float32_where_they_cannot_be_bfloat16(fields, strategy, why):
    problem = problem_of(**fields)
    choice = chosen(problem, parse(strategy))
    assert choice.chosen == "float32" and list(choice.answers) == ["float32"]
    assert choice.found.best.value == search(problem, forced=parse(strategy)).best.value
    assert choice.line.startswith("float32, since bfloat16 is refused: ") and why in choice.line
    assert "rounding cost" not in choice.line


def test_exact_plans_do_not_round():
    """Reddit is surely faster in bfloat16 here, and float32 is what --exact takes."""
    plan = gnnplan.plan(
        *("reddit", "l4_box"), exact=True, dtype="auto", strategy="graph_parallel", layers=2
    )
    assert plan.workload.dtype == "float32" and [*plan.document["dtypes"]["answers"]] == ["float32"]
    said = "float32, since bfloat16 is refused: --exact leaves out what is lossy"
    assert plan.document["summary"]["dtype"].startswith(said)


def test_what_is_wrong_with_both_types_is_told_of_float32():
    with pytest.raises(SpecError, match="excludes pipegcn: it is lossy"):
        choose(problem_of(), lambda asked: search(asked, exact=True, forced=parse("pipegcn")), True)


def test_runs_that_reach_an_accuracy_in_both_types_lift_the_rule():
    """What rounding costs is then known; rows that runs tell nothing of are refused."""
    problem = problem_of(device(launch=2e-3), replace(STATS, hash="seen"), hidden=1024)

    def run(dtype: str) -> Training:
        workload = problem.workload.model_copy(update={"dtype": dtype})
        return Training(dtype, "seen", workload, BY_LAYERS, 1, ((10, 0.5), (20, 0.95)))

    def of(*dtypes: str) -> Choice:
        target = Target(0.9, [run(dtype) for dtype in dtypes])
        return chosen(problem, objective=Objective("time", target))

    assert chosen(problem).chosen == "float32" and of("float32", "bfloat16").chosen == "bfloat16"
    assert "lossy" not in of("float32", "bfloat16").why
    assert of("float32").chosen == "float32" and "no run shows" in of("float32").why


def test_the_accuracy_that_plans_quote_is_that_of_the_runs(monkeypatch):
    """traces/quoted/rounding.csv and the tables of convergence.md follow from runs in traces."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    convergence = importlib.import_module("convergence")
    with (ROOT / "traces" / "quoted" / "rounding.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == convergence.rounding()
    text = (ROOT / "docs" / "reference" / "convergence.md").read_text(encoding="utf-8")
    for name in convergence.ROUNDING:
        assert f"<!-- table: {name} -->\n{convergence.table(name)}\n<!-- end -->" in text
    assert "+0.03 ± 0.12 points on tolokers (sage, 3 seeds)" in rounding_cost()


def test_the_command_line_says_what_python_says(tmp_path):
    words = "plan --graph reddit --cluster l4_box --dtype auto --strategy graph_parallel"
    asked = [*words.split(), "-o", str(tmp_path / "plan.json")]
    done = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    plan = gnnplan.plan("reddit", "l4_box", dtype="auto", strategy="graph_parallel")
    assert json.loads(done.stdout) == plan.document == gnnplan.load_plan(asked[-1]).document
    assert set(plan.document["dtypes"]["answers"]) == {"float32", "bfloat16"}
    shown = CliRunner().invoke(app, [*asked, "--explain"], catch_exceptions=False).stdout
    assert f"\ndtype:  {plan.document['summary']['dtype']}\n" in shown
    assert f"\n- --dtype auto chose {plan.document['summary']['dtype']}\n" in shown


@pytest.mark.parametrize("where", ["workload", "overrides"])
def test_auto_is_refused_where_nothing_chooses(where):
    given: dict[str, Any] = {where: {"dtype": "auto"}}
    with pytest.raises(SpecError, match=r"auto is no type: .*use float32, tf32, float64 or b"):
        gnnplan.plan("reddit", "l4_box", **given)


def gnn(model: str, *sparse: float, **workload: object) -> Model:
    """Of 40 features and 5 classes, and 16 numbers in between."""
    return describe(Workload(**{"model": model, "hidden": 16, **workload}), 40, 5, *sparse)


def test_a_product_reads_and_writes_rows():
    """Layer 2 of three, 16 -> 16: both ways, and gradients of rows and matrix as much again."""
    model = gnn("gcn")
    assert model.work(2, 10, 20, 50).forward.gemm_bytes == 10 * (16 + 16) * 4
    assert model.work(2, 10, 20, 50).backward.gemm_bytes == 2 * 10 * (16 + 16) * 4
    assert gnn("gcn", 2.5).work(1, 10, 20, 50).forward.gemm_bytes == 0


def test_a_mask_is_made_in_the_forward_pass_alone():
    """What dropout adds forward it adds twice backward, but for the mask's own operations."""
    plain, dropped = gnn("gcn"), gnn("gcn", dropout=0.5)
    both = (one.work(2, 10, 20, 50) for one in (plain, dropped))
    for without, with_mask, more in zip(*both, (MASK + 3, 2 * 3), strict=True):
        assert with_mask.launches - without.launches == more


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sparse_features_are_multiplied_first(dropout):
    """A row of the matrix per number is gathered, and for its gradient a row of the output's: 40
    columns of which 3 are not zero, 16 hidden, on 10 rows, 20 sources and 50 edges. Nothing is as
    wide as the features, and nothing of them is cached."""
    gcn, sage, gat = (gnn(name, 3.0, dropout=dropout) for name in ("gcn", "sage", "gat"))
    product, transposed = (20 * 3, 16, 40, 20), (20 * 3, 16, 20, 40)
    for model, forward, backward in (
        (gcn, ((50 + 10, 16, 20, 10),), ((50 + 10, 16, 10, 20),)),
        # own rows have a product of their own
        (sage, ((50, 16, 20, 10), (30, 16, 40, 10)), ((50, 16, 10, 20), (30, 16, 10, 40))),
        (gat, ((60, 16, 20, 10),), ((60, 16, 10, 20),) * 2),
    ):
        assert [model.rows(layer).multiplied_first for layer in (1, 2)] == [True, False]
        assert not model.aggregate_cached(1)
        assert model.layers[0].projects_first and model.aggregating_first.layers[0].projects_first
        ahead, back = model.work(1, 10, 20, 50)
        assert ahead.flops == back.flops == 0.0
        assert ahead.gathers == (product, *forward) and back.gathers == (transposed, *backward)
    assert gnn("gcn", 3.0, hidden=64, dropout=dropout).layers[0].projects_first  # though it widens
    dense = gnn("gcn", dropout=dropout)
    hashed = [model.work(1, 10, 20, 50).forward.hash_ops for model in (gcn, dense)]
    assert hashed[0] < hashed[1] or not dropout
    assert gcn.work(2, 10, 20, 50).forward == dense.work(2, 10, 20, 50).forward
    assert gcn.feature_transit_bytes(10) == 10 * 3 * 2 * 4
    assert dense.feature_transit_bytes(10) == 10 * 40 * 4


def test_own_rows_of_sparse_features_are_sparse_after_an_aggregation_on_columns():
    """Feature parallelism multiplied all 8,415 columns of Coauthor Physics in plans: an epoch of
    0.16 s was promised to take 0.8."""
    by_columns, _ = arranged(gnn("sage", 3.0), alternating=False)
    ahead, back = by_columns.end(1, 10)
    assert ahead.flops == back.flops == 0.0
    assert ahead.gathers == ((30, 16, 40, 10),) and back.gathers == ((30, 16, 10, 40),)


def test_numbers_of_sparse_features_are_looked_up_and_encoded():
    """In the transpose, which every mini-batch makes anew."""
    sampled = {"mode": "mini", "layers": 2, "fanout": (5, 5), "batch": 8}
    mini, full = (gnn("gcn", 3.0, **more).work(1, 10, 20, 50).backward for more in (sampled, {}))
    assert (mini.hash_ops, full.hash_ops) == (20 * 3 * 5, 20 * 3)
    assert mini.scattered and not full.scattered
    assert not gnn("gcn", 3.0, **sampled).work(1, 10, 20, 50).forward.scattered  # frequent columns
    encoding = gnn("gcnii", 3.0)
    assert [encoding.rows(layer).multiplied_first for layer in (0, 1)] == [True, False]
    ahead, back = encoding.encode(10)
    assert ahead.gathers == ((30, 16, 40, 10),) and back.gathers == ((30, 16, 10, 40),)
    assert back.flops == 0.0
    assert encoding.finish(10)[0].flops == 2 * 10 * 16 * 16 and not encoding.finish(10)[0].gathers


def test_what_multiplies_constant_rows_first_aggregates_their_gradient():
    """Its weight gradient needs the projected rows' one; where it aggregates first it does not."""
    for hidden, gathers in ((16, ((60, 16, 10, 20),)), (64, ())):
        assert (
            gnn("gcn", hidden=hidden, dropout=0.5).work(1, 10, 20, 50).backward.gathers == gathers
        )


def test_batch_norm_stands_between_a_layer_and_a_narrow_exchange():
    for norm, narrows in (("none", True), ("layer", True), ("batch", False)):
        assert gnn("sage", norm=norm).narrows == narrows
