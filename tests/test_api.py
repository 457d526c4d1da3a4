"""`import gnnplan`: the answers are those of the command line, and they show themselves."""

import inspect
import json
import pickle
import re
import shutil
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from calls import rewritten
from typer.testing import CliRunner

import gnnplan
from gnnplan.cli import app
from gnnplan.executor.launch.run_request import Options

GRAPH, CLUSTER = "flickr", "p3_p100"  # by statistics: the same each time
ONE_SERVER = f"{CLUSTER}?servers=1&gpus_per_server=2"
FIELDS = {"model": "sage", "layers": 2, "hidden": 8}
TRAINABLE = "synthetic:community?vertices=300&edges=900"
OPTIONS = ("--model", "sage", "--layers", "2", "--hidden", "8")
FAST = {**FIELDS, "lr": 0.05}
STAND_INS = {"task": "none", "features": "8"}


@pytest.fixture(scope="module")
def plan():
    """The plan of GRAPH on a server of CLUSTER with FIELDS; nobody changes it."""
    return gnnplan.plan(GRAPH, ONE_SERVER, mode="full", **FIELDS)


@pytest.fixture(scope="module")
def epoch():
    """The same by the epoch alone, without sizes and modes: simulations and sweeps need no more."""
    return gnnplan.plan(GRAPH, ONE_SERVER, per="epoch", **FIELDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six epochs of an object in memory on two ranks."""
    edges = torch.randint(0, 200, (2, 2000), generator=torch.Generator().manual_seed(1))
    plan = gnnplan.plan(edges, ranks=2, strategy="graph_parallel", seed=4, **STAND_INS, **FAST)
    runs = tmp_path_factory.mktemp("runs")
    return plan.run(runs / "one", epochs=6, eval_every=1, checkpoint_every=2)


def command(*words: object) -> str:
    """What a command prints on standard output."""
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def must_say_the_same(found: Any, *words: object) -> None:
    """The command line prints the same, and its document is the same."""
    assert command(*words).rstrip() == str(found)
    assert json.loads(command(*words, "--json")) == json.loads(json.dumps(found.document))


def test_all_that_is_listed_is_there_and_documented():
    assert {"plan", "load_plan", "validate", "measure", "convert"} <= set(gnnplan.__all__)
    assert set(gnnplan.__all__) <= set(dir(gnnplan))
    for name in gnnplan.__all__:
        assert getattr(gnnplan, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'plant'"):
        _ = gnnplan.plant


@pytest.mark.slow
def test_a_plan_of_python_is_the_plan_of_the_command_line(plan, tmp_path):
    asked = ("--graph", GRAPH, "--cluster", ONE_SERVER, "--mode", "full", *OPTIONS)
    theirs = command("plan", *asked, "-o", tmp_path / "p")
    plan.write(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == (tmp_path / "p").read_text()
    # the command line prints notes beside it
    shown = [line for line in str(plan).splitlines() if not line.startswith("note: ")]
    assert len(str(plan).splitlines()) == len(shown) + len(plan.notes) > len(shown)
    assert theirs.startswith("\n".join(shown))
    read = gnnplan.load_plan(tmp_path / "p")
    assert str(read).splitlines() == shown and str(plan) == repr(plan)
    assert read.answers == plan.answers and read.best == plan.answers[0]
    assert [row["strategy"] for row in plan.table] == [a.strategy for a in plan.answers]
    # every reason is there, and the answers are in the order of the document
    assert all(f"- {line}" in str(plan.explain()) for line in plan.document["explanation"])
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + len(plan.document["sizes"])
    assert escape(plan.best.strategy) in html


@pytest.mark.slow
def test_a_simulation_and_a_sweep_of_python_are_those_of_the_command_line(epoch, tmp_path):
    epoch.write(tmp_path / "p")
    played = epoch.simulate(jitter=0.1, stragglers={0: 2.0}, overrides={"hidden": 16})
    noise = ("--jitter", "0.1", "--straggler", "0=2.0")
    must_say_the_same(played, "simulate", tmp_path / "p", *noise, "--set", "hidden=16")
    assert played.epoch_s == played.document["simulated"]["epoch_s"]
    other = epoch.simulate(jitter=0.1, stragglers={0: 2.0}, overrides={"hidden": 16}, seed=2)
    noise = played.document["noise"]
    assert played.epoch_s < noise["p50_s"] < noise["p95_s"] != other.document["noise"]["p95_s"]
    swept = epoch.sweep({"hidden": [8, 512]})
    must_say_the_same(swept, "simulate", tmp_path / "p", "--sweep", "hidden=8,512")
    assert [row["at"] for row in swept.rows] == [{"hidden": "8"}, {"hidden": "512"}]


@pytest.mark.slow
def test_a_scale_of_python_is_that_of_the_command_line(epoch):
    asked = ("--per", "epoch", "--scale", "1..2")
    fields = {**FIELDS, "per": "epoch"}
    found = gnnplan.scale(GRAPH, CLUSTER, gpus="1..2", **fields)
    must_say_the_same(found, "plan", "--graph", GRAPH, "--cluster", CLUSTER, *OPTIONS, *asked)
    listed = gnnplan.scale(GRAPH, CLUSTER, gpus=(n for n in (2, 1)), **fields)
    assert listed.rows == found.rows and [row["gpus"] for row in found.rows] == [1, 2]
    # a row has the numbers of a plan's answers
    assert set(epoch.table[0]) < set(found.rows[0])
    told = found.document
    for name in ("best", "fastest", "cheapest", "slower_from"):
        assert getattr(found, name) == told[name]
    assert found._repr_html_().count("<tr>") == 1 + len(found.rows)


@pytest.mark.nightly
def test_offers_of_python_are_those_of_the_command_line():
    offered = [f"{CLUSTER}?price=1", f"{CLUSTER}?price=4&host.bandwidth=100GB/s"]
    words = ("--graph", GRAPH, *OPTIONS, "--scale", "1,2", "--objective", "time")
    fields = {**FIELDS, "objective": "time"}
    clusters = (word for one in offered for word in ("--cluster", one))
    found = gnnplan.offers(GRAPH, offered, gpus=[1, 2], **fields)
    shown = command("plan", *words, *clusters)
    assert shown.rstrip() == str(found)
    for name, scale in found.scales.items():
        assert scale.document == gnnplan.scale(GRAPH, name, gpus=[1, 2], **fields).document
    assert [row["cluster"] for row in found.rows] == [name for name in offered for _ in range(2)]
    told = found.document
    assert found.best == (offered[1], told["fastest"]["gpus"]) and told["best"] == told["fastest"]
    assert told["cheapest"]["cluster"] == offered[0]
    assert offered[0] in shown  # names that fields alone tell apart are whole
    apart = str(gnnplan.offers(GRAPH, [offered[0], "l4_box"], gpus=[1], **FIELDS))
    assert f"\n{CLUSTER} " in apart and "?" not in apart and "cheapest" not in apart


def test_offers_override_all_clusters_from_one_generator():
    """The first cluster used up the generator, and the others kept their own prices."""
    prices = (f"price={price}" for price in (3,))
    found = gnnplan.offers(GRAPH, ["l4_box", CLUSTER], gpus=[1], overrides=prices, **FIELDS)
    assert [one.document["cluster"]["price"] for one in found.scales.values()] == [3, 3]


@pytest.mark.slow
def test_where_nothing_fits_on_one_cluster_the_others_are_offered():
    large = {"graph": "ogbn-papers100M", "gpus": [4], "strategy": "graph_parallel"}
    small = "l4_box?host_memory=1GB"  # too little to train chunk by chunk
    found = gnnplan.offers(clusters=[small, "l4_box?device.memory=320GB"], **large)
    assert found.best == ("l4_box?device.memory=320GB", 4)
    assert f"{small}: nothing fits on any of 4 GPUs" in str(found)
    with pytest.raises(gnnplan.Infeasible, match=r"l4_box.*: nothing fits .*smallest change"):
        gnnplan.offers(clusters=[small], **large)
    with pytest.raises(gnnplan.SpecError, match=r"--cluster l4_box\?pice=2: pice: unknown field"):
        gnnplan.offers(clusters=["l4_box?pice=2"], **large)


@pytest.mark.slow
def test_an_objective_of_python_is_that_of_the_command_line(epoch):
    asked = ("--objective", "energy", "--per", "epoch")
    words = ("plan", "--graph", GRAPH, "--cluster", ONE_SERVER, *OPTIONS, *asked)
    plan = gnnplan.plan(GRAPH, ONE_SERVER, objective="energy", per="epoch", **FIELDS)
    assert json.loads(command(*words, "--json")) == json.loads(json.dumps(plan.document))
    assert "energy/epoch" in str(plan) and "energy" not in str(epoch)
    energies = [row["energy_j"] for row in plan.table]
    assert energies == [answer.counted["energy_j"] for answer in plan.answers]
    assert plan.choose("NEXT").best.counted == plan.answers[1].counted
    found = gnnplan.scale(GRAPH, CLUSTER, gpus=[1, 4], objective="energy", per="epoch", **FIELDS)
    assert "energy/epoch" in str(found) and found.best == 1
    assert found.rows[0]["energy_j"] == pytest.approx(250 * found.rows[0]["epoch_s"])
    assert found.worse_from == 4 and "4 GPUs are dearer in energy than 1" in str(found)


WRONG = {
    "strategy must be text, not 3": {"strategy": 3},
    "exact must be True or False, not 'no'": {"exact": "no"},
    "directed must be True or False, not 'no'": {"directed": "no"},  # was directed
    "target_accuracy must be a number, not '0.9'": {"target_accuracy": "0.9"},
    "evidence must be text or a path or several values, not None": {"evidence": None},
    "overrides must be a mapping or several values, not None": {"overrides": None},
    "an override must be text, not ('hidden', 4)": {"overrides": [("hidden", 4)]},
    "workload must be text or a path or a mapping or Workload, not 5": {"workload": 5},
    "cluster must be text or a path or a mapping or Cluster, not None": {"cluster": None},
    "ranks must be a whole number, not '2'": {"ranks": "2"},
    "ranks must be a whole number, not True": {"ranks": True},
    "features must be text or a whole number or a path, not array": {"features": np.zeros((5, 2))},
    "--dtype: must be .*, not torch.bfloat16; did you mean bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("said", WRONG)
def test_an_argument_of_a_wrong_type_is_named(said):
    """Half of these were a TypeError from deep inside, and directed='no' was directed."""
    words = said if ".*" in said else re.escape(said)
    asked = {"graph": GRAPH, "cluster": ONE_SERVER, **FIELDS} | WRONG[said]
    with pytest.raises(gnnplan.SpecError, match=words):
        gnnplan.plan(**asked)
    if not {"ranks", "cluster", "dtype"} & WRONG[said].keys():
        with pytest.raises(gnnplan.SpecError, match=words):
            gnnplan.scale(gpus=[1], **asked)


def test_other_calls_name_wrong_arguments_too(plan, tmp_path):
    trainable = gnnplan.plan(TRAINABLE, CLUSTER, strategy="graph_parallel", **FIELDS)
    mine = [*({"name": "mine", "servers": servers} for servers in (1, 2)), CLUSTER]
    calls = {
        "jitter must be a number, not '0.1'": lambda: plan.simulate(jitter="0.1"),
        "time of straggler 1 must be a number": lambda: plan.simulate(stragglers={1: "2"}),
        "steps must be a whole number": lambda: plan.sweep({"hidden": 8}, steps=2.0),
        "strategy must be text, not Answer": lambda: plan.choose(plan.answers[1]),
        "gpus must be text or several values, not 2": lambda: gnnplan.scale(GRAPH, gpus=2),
        "share must be a number, not '0.1'": lambda: gnnplan.tune(plan, share="0.1"),
        "--epochs 0: a training has 1 to": lambda: gnnplan.tune(trainable, epochs=0),
        "runs must be text or a path or several values": lambda: gnnplan.validate(None),
        "path must be text or a path, not {": lambda: gnnplan.load_plan(plan.document),
        "features must be a whole number, not '4'": lambda: gnnplan.check("gcn", features="4"),
        "seconds must lie in [0.01, 60]": lambda: gnnplan.measure(2, seconds=-1),
        "ranks must be a whole number, not '2'": lambda: gnnplan.measure("2"),
        "epochs must be a whole number": lambda: plan.run(tmp_path / "out", epochs=2.5),
        "of a dataset give a graph (dataset[0])": lambda: gnnplan.plan([1, 2, 3]),
        "give numpy.stack(edge_index.nonzero())": lambda: gnnplan.plan(np.eye(9)),
        "ranks must be a whole number, not 2.0": lambda: gnnplan.plan(GRAPH, CLUSTER, ranks=2.0),
        "steps must be 1 or more": lambda: plan.simulate(steps=0),
        "repetitions must be 1 or more": lambda: plan.simulate(jitter=0.1, repetitions=0),
        "seed must be 0 or more": lambda: plan.simulate(jitter=0.1, seed=-1),
        "--sweep '': write a field and its": lambda: plan.sweep({}),  # it was a table of nothing
        "rank must be a whole number": lambda: plan.simulate(stragglers={"0": 2.0}),
        "no run is given": lambda: gnnplan.validate([]),
        "is given twice": lambda: gnnplan.validate([Path("a"), "./a"]),
        "dgx_a10: neither a .yaml file nor a preset": lambda: gnnplan.plan(GRAPH, "dgx_a10"),
        "layer: neither an argument nor a fi": lambda: gnnplan.plan(GRAPH, CLUSTER, layer=2),
        "of a workload; did you mean ranks?": lambda: gnnplan.plan(GRAPH, CLUSTER, rank=2),
        # both raised pydantic's own error
        "layer: unknown field; did you mean layers?": lambda: gnnplan.Workload(layer=3),
        "Cluster: device: missing; this field is": lambda: gnnplan.Cluster(servers=1),
        "workload: hidden: must be greater": lambda: gnnplan.plan(GRAPH, CLUSTER, {"hidden": 0}),
        # the second of two clusters of a name replaced the first, and none was an empty error
        "a name of its own (mine (2 times)); rename": lambda: gnnplan.offers(GRAPH, mine, gpus=[1]),
        "clusters is empty, ": lambda: gnnplan.offers(GRAPH, [], gpus=[1], **FIELDS),
    }
    for said, call in calls.items():
        with pytest.raises(gnnplan.SpecError, match=re.escape(said)):
            call()
    tiny = {"strategy": "gnnpipe", "overrides": {"device.memory": "1GB"}}
    with pytest.raises(gnnplan.Infeasible, match="memory"):
        gnnplan.plan("ogbn-papers100M", "dgx_a100", **tiny)
    assert issubclass(gnnplan.Infeasible, gnnplan.GnnplanError)


def test_values_are_taken_as_python_has_them(epoch):
    """Nested and listed overrides were texts of Python's; one value was not iterable."""
    bandwidth = epoch.cluster.intra_node.bandwidth * 2
    nested = {"intra_node": {"bandwidth": bandwidth}, "hidden": np.int64(16)}
    dotted = {"intra_node.bandwidth": bandwidth, "hidden": "16"}
    assert epoch.simulate(overrides=nested).document == epoch.simulate(overrides=dotted).document
    mini = {"overrides": {"mode": "mini", "fanout": [5, 3]}, "strategy": "data_parallel"}
    assert gnnplan.plan(GRAPH, ONE_SERVER, **mini, **FIELDS).workload.fanout == (5, 3)
    rows = epoch.sweep({"hidden": [16]}).rows
    for one in ({"hidden": 16}, {"hidden": "16"}, "hidden=16"):
        assert epoch.sweep(one).rows == rows
    assert pickle.loads(pickle.dumps(epoch)).document == epoch.document
    forced = {"strategy": "graph_parallel", **FIELDS}
    assert gnnplan.plan(GRAPH, CLUSTER, ranks=np.int64(2), **forced).document["best"]["gpus"] <= 2
    alone = epoch.simulate(overrides="hidden=16")
    assert alone.document == epoch.simulate(overrides=["hidden=16"]).document
    assert gnnplan.offers(GRAPH, CLUSTER, gpus=[1], per="epoch", **FIELDS).best == (CLUSTER, 1)


def test_an_option_that_no_part_reads_is_said():
    """`heads` of a GCN and `batch` of the full graph were taken without a word."""
    asked = {"model": "GCN", "layers": 2, "hidden": 8, "batch": 64}
    found = gnnplan.plan(GRAPH, ONE_SERVER, overrides={"heads": 8}, per="epoch", **asked)
    notes = [note for note in found.notes if "has no effect" in note]
    assert [note.split()[0] for note in notes] == ["--batch", "--heads"]
    assert notes[1].endswith("has no effect with model=gcn, only with model=gat or gatv2")
    whole = gnnplan.plan(GRAPH, ONE_SERVER, **asked)  # of both modes
    assert not any("has no effect" in note for note in whole.notes)


def test_a_tuning_of_python_is_that_of_the_command_line(tmp_path, monkeypatch):
    """Without --out a second tuning wrote its plan over the first, whose runs had no folder."""
    plan = gnnplan.plan(TRAINABLE, CLUSTER, strategy="graph_parallel", **FIELDS)
    plan.write(tmp_path / "p")
    tuned = gnnplan.tune(plan, tmp_path / "runs")
    assert "not tuned: nothing else was compared" in str(tuned)
    told = command("tune", tmp_path / "p", "--out", tmp_path / "runs", "-o", tmp_path / "tuned")
    assert told.startswith(f"{tuned}\nwritten to") and str(tuned).startswith("use:    graph_par")
    written = json.loads((tmp_path / "tuned").read_text())
    del written["explanation"], tuned.document["explanation"]  # it has seconds of partitioning
    assert written == tuned.document
    monkeypatch.chdir(tmp_path)
    for name in ("tune-1", "tune-2"):
        assert f"written to runs/{name}.json" in command("tune", "p")


def test_a_tuned_plan_shows_what_its_runs_took(tmp_path):
    plan = gnnplan.plan(GRAPH, CLUSTER, strategy="graph_parallel", **FIELDS)
    row = {"exact": True, "predicted_s": 1.0, "turns": 2, "epochs": 8, "cost_s": 30.0}
    ran = {"measured_s": 1.1, "certain": True, "failed": ""}
    none = {"measured_s": None, "worse": None, "doubt": None, "certain": None}
    strategies = [
        row | ran | {"strategy": "graph_parallel", "worse": None, "doubt": None},
        row | ran | {"strategy": "pipegcn", "worse": 0.25, "doubt": 0.05, "exact": False},
        row | none | {"strategy": "gnnpipe", "failed": "no port"},
    ]
    document = plan.document | {"tuned": {"strategies": strategies, "refit": None}}
    document["summary"]["tuned"] = "certain after 4 runs"
    text = str(gnnplan.Tuned(document, tmp_path / "runs"))
    assert "tuned:  certain after 4 runs" in text and "+25 % ± 5 %" in text
    assert "gnnpipe was left out: no port" in text and "refit:  too few runs" in text
    assert f"gnnplan validate {tmp_path / 'runs'}/*" in text


def test_inputs_are_files_mappings_and_objects(tmp_path):
    fields = {**FIELDS, "mode": "full", "epochs": 50}
    by_name = gnnplan.plan(GRAPH, CLUSTER, strategy="gnnpipe", **fields)
    cluster, workload = by_name.cluster, by_name.workload
    (tmp_path / "cluster.yaml").write_text(cluster.to_yaml())
    (tmp_path / "workload.yaml").write_text(workload.to_yaml())
    forms = (cluster, cluster.model_dump(), tmp_path / "cluster.yaml")
    for form, work in zip(forms, (workload, fields, tmp_path / "workload.yaml"), strict=True):
        assert gnnplan.plan(GRAPH, form, work, strategy="gnnpipe").document == by_name.document
    asked = {"strategy": "gnnpipe", "hidden": 32, "overrides": {"layers": 3}}
    more = gnnplan.plan(GRAPH, cluster, workload, **asked)
    assert (more.workload.hidden, more.workload.layers) == (32, 3)


def test_graphs_in_memory_are_planned_and_kept_by_content(own_cache):
    """A ring with chords as four libraries hold it, and sources with destinations: one graph, kept once per content."""
    n = 60
    src = np.r_[np.arange(n), np.arange(n)]
    dst = np.r_[(np.arange(n) + 1) % n, (np.arange(n) + 7) % n]
    matrix = scipy.sparse.coo_matrix((np.ones(2 * n), (src, dst)), (n, n))
    ring = nx.DiGraph()
    ring.add_nodes_from(range(n))
    ring.add_edges_from(zip(src.tolist(), dst.tolist(), strict=True))
    ends = torch.tensor(np.stack([src, dst]))
    entries = torch.sparse_coo_tensor(ends, torch.ones(2 * n), (n, n))
    forms = [matrix, ring, ends, ends.numpy(), tuple(ends), [*ends.numpy()], entries]

    def planned(graph: object) -> gnnplan.Plan:
        return gnnplan.plan(graph, ranks=2, strategy="graph_parallel", **STAND_INS, **FIELDS)

    plans = [planned(graph) for graph in forms]
    assert {plan.document["graph"]["edges"] for plan in plans} == {4 * n}
    assert len({plan.document["graph"]["hash"] for plan in plans}) == 1
    before = sorted((own_cache / "graphs").iterdir())
    planned(matrix)
    assert sorted((own_cache / "graphs").iterdir()) == before


def test_python_says_what_was_done_with_a_graph():
    """gnnplan.plan was silent where the command line said that a graph was made undirected."""
    edges = np.array([[0, 1, 2, 2], [1, 2, 0, 2]])
    plan = gnnplan.plan(edges, "dgx_a100", task="none", features=4, ranks=1)
    assert "dropped 1 self-loop" in plan.notes and "note: made undirected: 3 -> 6" in str(plan)


@pytest.mark.processes
def test_from_an_object_in_memory_to_a_validated_run(run, tmp_path):
    assert len(run.metrics) == run.document["epochs"] == 6 and run.weights.is_file()
    stats = gnnplan.load_plan(run.out / "plan.json").problem.stats
    assert any("losses and accuracy mean nothing" in note for note in stats.notes)
    report = gnnplan.validate(run)
    assert report.ok and str(run.validate()) == str(report)
    assert report.document["bytes"]["counted"] == report.document["bytes"]["predicted"]
    step = report.document["step"]
    assert report.error == pytest.approx(step["predicted_s"] / step["measured_s"] - 1)
    assert str(report) == command("validate", run.out).rstrip()
    assert gnnplan.validate([run]).document["runs"] == 1
    spoilt = shutil.copytree(run.out, tmp_path / "spoilt")
    with rewritten(spoilt / "rank0.json") as rank:
        rank["bytes"]["halo"] += 1
    assert not gnnplan.validate(spoilt).ok
    plan = gnnplan.load_plan(run.out / "plan.json")
    with pytest.raises(gnnplan.SpecError, match="holds a run already"):
        plan.run(run.out)
    tuned = gnnplan.tune(plan, tmp_path / "tuned")  # nothing to compare: --strategy named it
    assert tuned.best == plan.best and "--strategy names one" in tuned.document["tuned"]["why"]


@pytest.mark.nightly
@pytest.mark.processes
def test_a_run_goes_on(tmp_path):
    plan = gnnplan.plan("synthetic:community?vertices=60&edges=400", ranks=2, **FIELDS)
    run = plan.run(tmp_path / "run", epochs=3, checkpoint_every=2)
    onwards = gnnplan.load_plan(run.out / "plan.json").resume(run, epochs=4)
    assert [row["epoch"] for row in onwards.metrics] == [1, 2, 3, 4]


def test_defaults_of_a_run_are_those_of_its_options():
    """Its keywords say what is taken where none is given, and options.json is read with these."""
    keywords = inspect.signature(gnnplan.Plan.run).parameters
    own = {one.name: one.default for one in fields(Options) if one.name in keywords}
    assert own == {name: keywords[name].default for name in own} and len(own) == 8


def test_a_strategy_that_no_plan_proposes_moves_to_other_ranks():
    """bns "cannot run there: no variant fits", it said, for it was looked for among proposals."""
    plan = gnnplan.plan(GRAPH, CLUSTER, strategy="bns(p=0.5)", **FIELDS)
    moved = plan.simulate(overrides={"servers": 2}).document["strategy"]
    assert (moved["name"], moved["p"]) == ("bns", 0.5)


@pytest.mark.processes
def test_a_run_says_in_how_many_epochs_an_accuracy_is_reached(run):
    """A run on two ranks counts for exact strategies on one, and for a longer training."""
    graph = gnnplan.load_plan(run.out / "plan.json").problem.stats.source
    accuracies = [row["val_accuracy"] for row in run.metrics]
    wanted = max(accuracies)
    first = 1 + accuracies.index(wanted)
    told = gnnplan.plan(graph, ranks=1, target_accuracy=wanted, evidence=[run.out.parent], **FAST)
    best = told.best
    assert best.counted["epochs_to_accuracy"] == pytest.approx(first)
    assert best.counted["time_to_accuracy_s"] == pytest.approx(first * best.epoch_s)
    assert told.document["evidence"] == [str(run.out)]
    assert f"epochs to {wanted:g}" in str(told).replace("\n", " ")
    beyond = max(accuracies) + 0.001
    with pytest.raises(gnnplan.SpecError, match=f"gnnplan run --resume {run.out} --epochs 12"):
        gnnplan.plan(graph, ranks=1, target_accuracy=beyond, evidence=[run], **FAST)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of PyG
def test_a_live_module_is_planned_with_its_own_shape(own_cache):
    """A class of no file, as a notebook's cell makes it, and an instance of it."""
    from torch_geometric.nn import GCNConv

    class Mine(torch.nn.Module):
        def __init__(self, in_channels: int, out_channels: int) -> None:
            super().__init__()
            self.first, self.second = GCNConv(in_channels, 24), GCNConv(24, out_channels)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    alone = "graph_parallel"  # what the others would take has no part in it
    by_class = gnnplan.plan(GRAPH, CLUSTER, model=Mine, strategy=alone)
    about = by_class.document["graph"]
    made = Mine(about["features"], about["classes"])
    by_object = gnnplan.plan(GRAPH, CLUSTER, model=made, strategy=alone)
    for found in (by_class, by_object):
        of = found.workload
        assert (of.model, of.layers, of.hidden) == ("gcn", 2, 24)
    assert by_class.best.epoch_s == by_object.best.epoch_s
    with pytest.raises(gnnplan.SpecError, match=r"Mine.* decides hidden"):
        gnnplan.plan(GRAPH, CLUSTER, model=Mine, hidden=8)
