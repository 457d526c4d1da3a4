"""The first hour with gnnplan: what a newcomer reads, and what went wrong for one; people who wait are
told what for, others are not.

Each test tells a story that happened."""

import io
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from calls import planned
from nightly import NIGHT
from typer.testing import CliRunner

import gnnplan
from gnnplan import load_plan
from gnnplan.cli import app
from gnnplan.executor.measure import measure as measuring
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import kept_factors, read_cluster, read_fitted
from gnnplan.planner.strategies import named
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import inner_phase, progress, say

GRAPH = "synthetic:community?vertices=400&edges=4000&features=16&classes=4&seed=0"
CLUSTER = """\
name: two_boxes
servers: 2
gpus_per_server: 2
device: {name: toy, kind: cuda, memory: 24GB, gemm: 10TFLOP/s, memory_bandwidth: 500GB/s}
intra_node: {bandwidth: 10GB/s, latency: 5us}
inter_node: {bandwidth: 1GB/s, latency: 20us}
provenance: {device.gemm: datasheet 20 TFLOP/s x 0.5, inter_node.bandwidth: assumed}
"""
STATISTICS = "vertices: 100000\nedges: 2000000\nfeatures: 64\nclasses: 8\n"
MEASURED = Path(__file__).resolve().parent.parent / "traces" / "measured" / "1x2.1.yaml"
LABELS = ["answer:", "use:", "range:", "sure:", "inputs:", "tested:", "cost:", "close:", "change:"]
PARALLEL = "--strategy graph_parallel"

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """What a plan says with --explain, and its document."""
    folder = tmp_path_factory.mktemp("explained")
    (folder / "cluster.yaml").write_text(CLUSTER)
    asked = f"--graph {GRAPH} --cluster {folder}/cluster.yaml --set gpus_per_server=1"
    words = f"plan {asked} --explain -o {folder}/plan.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNNPLAN_CACHE", str(folder / "cache"))
        told = CliRunner().invoke(app, words.split(), catch_exceptions=False).stdout
    return told, json.loads((folder / "plan.json").read_text())


@pytest.mark.slow
def test_a_plan_opens_with_a_few_lines_and_keeps_the_rest_for_explain(explained, tmp_path):
    """A plan printed dozens of lines; the answer was among them."""
    long, document = explained[0].splitlines(), explained[1]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    # which `gnnplan plan` prints too (test_api.py)
    short = str(load_plan(tmp_path / "plan.json")).splitlines()
    last = 1 + len(LABELS)
    assert [line.split()[0] for line in short[1:last]] == LABELS
    assert short[last].strip() == "the whole training"
    assert not any(line.startswith("- ") for line in short)
    assert short[:last] == long[:last]
    told = [line for line in long if line.startswith("- ")]
    assert len(told) == len(document["explanation"]) + len(document["rejected"])
    assert "placement: server 0: rank 0 on GPU 0" in long  # one was "ranks 0"
    for label, line in zip(LABELS, document["summary"].values(), strict=True):
        assert any(printed.startswith(label) and printed.endswith(line) for printed in short)


def test_an_error_measured_on_cpus_is_not_quoted_for_gpus(gnnplan, explained):
    """'less than predictions were off when measured (median 8 %)' stood in plans for A100s."""
    ask = ("plan", "--graph", GRAPH, "--cluster", MEASURED, PARALLEL)
    measured = gnnplan(*ask, "--json").document
    on_gpus, on_cpus = explained[1]["summary"], measured["summary"]
    assert "predictions have been compared with runs on one GPU only" in on_gpus["tested"]
    assert "median" not in on_gpus["tested"]
    assert "1 datasheet, 1 assumed" in on_gpus["inputs"]
    assert "epochs on CPU ranks were predicted before they were run" in on_cpus["tested"]
    assert "in the median" in on_cpus["tested"]


@pytest.mark.slow
def test_what_cannot_be_trained_is_not_offered_to_run(gnnplan, cluster, tmp_path):
    """It said 'next: gnnplan run', which refuses plans of statistics and of graphs without labels, and
    'partitioning 0 s'."""
    (tmp_path / "stats.yaml").write_text(STATISTICS)
    plan = tmp_path / "plan.json"
    ask = ("plan", "--graph", tmp_path / "stats.yaml", "--cluster", cluster)
    told = gnnplan(*ask, "--strategy", "graph_parallel", "--explain", "-o", plan).out
    assert f"next: gnnplan simulate {plan}\n" in told and "gnnplan run" not in told
    assert "only statistics are known; to train, plan again with the graph itself" in told
    assert "partitioning unknown" in told and "partitioning 0 s" not in told
    assert gnnplan("simulate", plan).code == 0
    src = np.arange(20)
    np.savez(tmp_path / "bare.npz", src=src, dst=(src + 1) % 20)
    told = gnnplan("plan", "--graph", tmp_path / "bare.npz", PARALLEL, "-o", plan).out
    assert "cannot be run: the graph has no labels" in told and "gnnplan run" not in told


@pytest.mark.slow
def test_a_papers_testbed_is_planned_with_what_its_print_has_shown(gnnplan):
    """GNNPipe's own case got PipeGCN: factors fitted to its figures were not used."""
    ask = ["plan", "--graph", "reddit", "--model", "gcn", "--hidden", 100]
    # that it wins by them, with 32 layers, is in planner/test_figures.py
    ask += ["--layers", 32] if NIGHT else ["--layers", 8, "--strategy", "gnnpipe(chunks=8)"]
    result = gnnplan(*ask, "--cluster", "gnnpipe_a5000", "--per", "epoch", "--json")
    document = result.document
    assert document["best"]["strategy"]["name"] == "gnnpipe"
    assert "constants fitted to 36 printed figures" in result.err
    assert "3 fitted to 36 printed figures" in document["summary"]["inputs"]
    plain = read_cluster(str(PRESETS / "gnnpipe_a5000.yaml"))
    factors = kept_factors("gnnpipe_a5000")
    gemm = document["cluster"]["device"]["gemm"]
    assert gemm == pytest.approx(plain.device.gemm * factors["gemm"])
    assert document["cluster"]["provenance"]["device.gemm"].startswith(
        plain.provenance["device.gemm"] + ", x 0.488 fitted to"
    )
    # a factor for GraphSAGE is of GraphSAGE, a file is read as it is, and others have no factors
    sage, note = read_fitted("gnnpipe_a5000", "sage")
    assert "sage x" in note
    assert sage.device.gemm == pytest.approx(gemm * factors["sage"])
    for name in (str(PRESETS / "gnnpipe_a5000.yaml"), "dgx_a100", "local"):
        assert read_fitted(name, "gcn") == (read_cluster(name), "")


@pytest.mark.slow
def test_a_plan_of_exact_strategies_is_swept_with_exact_strategies(gnnplan, cluster, tmp_path):
    """`--exact` was forgotten by plan.json, and the sweep recommended PipeGCN."""
    ask = ("--graph", GRAPH, "--cluster", cluster, "--layers 6 --ranks 4 --per epoch")
    ask += ("--strategy granndis",)
    plan = planned(tmp_path / "plan.json", *ask)
    exact = planned(tmp_path / "exact.json", *ask, "--exact")
    slow = ("--set", "device.gemm=5GFLOP/s", "--sweep", "inter_node.bandwidth=20MB/s", "--json")
    free, kept = (gnnplan("simulate", p, *slow).document for p in (plan, exact))
    assert not all(row["exact"] for row in free["rows"])
    assert all(row["exact"] for row in kept["rows"]) and kept["exact"]
    # on another number of ranks the family's best variant is exact too
    there = gnnplan("simulate", exact, "--set", "servers=1", "--json").document
    assert there["ranks"] == 2
    assert named(there["strategy"].pop("name"), there["strategy"]).exact


def test_the_trace_of_a_straggler_shows_it(gnnplan, cluster, tmp_path):
    """`--straggler --trace` wrote the run in which nobody straggled."""
    plan = planned(tmp_path / "plan.json", "--graph", GRAPH, "--cluster", cluster, PARALLEL)

    def computed(name: str, *words: object) -> list[float]:
        """Microseconds that each rank computes."""
        gnnplan("simulate", plan, "--trace", tmp_path / name, *words)
        files = [tmp_path / name / f"trace.rank{rank}.json" for rank in range(4)]
        traces = [json.loads(file.read_text())["traceEvents"] for file in files]
        spans = [[event for event in trace if event.get("ph") == "X"] for trace in traces]
        of = ("forward", "backward")
        return [sum(e["dur"] for e in each if e["name"].startswith(of)) for each in spans]

    calm, slow = computed("calm"), computed("slow", "--straggler", "1=3")
    assert all(time > 0 for time in calm)
    assert slow == pytest.approx([calm[0], 3 * calm[1], *calm[2:]], rel=0.01)
    told = gnnplan("simulate", plan, "--trace", tmp_path / "again", "--straggler", "1=3").out
    assert "traces of the first repetition with rank 1 3 times as slow in" in told


def test_a_machine_that_nobody_has_measured_promises_nothing(gnnplan):
    """The error of measured machines was quoted for it as if it were its own."""
    ask = ("plan", "--graph", "synthetic:community?vertices=300&edges=900")
    told = gnnplan(*ask, "--strategy", "graph_parallel").out
    assert "tested: this machine has not been measured\n" in told and "in the median" not in told
    assert "not written; to simulate or run it, add -o plan.json" in told


def test_the_rows_of_a_simulation_add_up_to_its_epoch(gnnplan, cluster, tmp_path):
    """The operations' seconds were more than the epoch, for some are hidden behind others."""
    how = ("--cluster", cluster, "--strategy pipegcn")
    told = gnnplan("simulate", planned(tmp_path / "plan.json", "--graph", GRAPH, *how)).out
    assert "halo:f (halo rows, forward)" in told and "(2 servers x 2), 3 epochs, " in told
    rows = [line for line in told.splitlines() if line.endswith(("us", "ms"))]
    seconds = [
        [float(n) * {"us": 1e-6, "ms": 1e-3}[unit] for n, unit in re.findall(r"(\S+) (us|ms)", row)]
        for row in rows
    ]
    *parts, total = np.array(seconds)
    assert rows[-1].startswith("epoch") and (np.array(parts)[-1] < 0).any()
    half_a_digit = 0.05e-3  # of each printed number
    assert np.sum(parts, axis=0) == pytest.approx(total, abs=half_a_digit * len(rows))


def test_a_graphs_name_is_known_in_any_case_and_suggested_to_no_path(tmp_path):
    """REDDIT was unknown, names were listed twice, and a folder's were suggested another graph."""
    assert load("REDDIT").hash == load("reddit").hash
    with pytest.raises(SpecError, match="did you mean friendster") as misspelt:
        load("frendster")
    assert str(misspelt.value).count("orkut") == 1
    with pytest.raises(SpecError, match="no such file or folder") as absent:
        load(str(tmp_path / "frendster"))
    assert "friendster" not in str(absent.value)


@pytest.mark.parametrize("verb", ["plan", "run", "profile"])
def test_help_states_every_default_in_brackets(gnnplan, verb):
    """Some stood in round brackets, some after 'default:', some nowhere."""
    told = " ".join(gnnplan(verb, "--help").out.split())
    assert not re.search(r"\(\d+[;)]|[Dd]efault: ", re.sub(r"\[default: [^]]*\]", "", told))
    assert "[default: 10" in told or verb == "run"


def test_a_slow_phase_is_one_line_with_its_seconds_and_a_fast_one_is_none(capsys):
    """'asking what would change the choice: 8 layers ... 4 s' was printed six times."""
    with progress(every_s=0.05) as notify:
        for name in ("graph", "cluster", "workload"):
            notify("reading", name)
            time.sleep(0.03)
        notify("planning")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines].count("reading") == 1
    assert all(line.endswith(" s") for line in lines)
    with progress(every_s=30.0) as notify:
        notify("reading")
    assert capsys.readouterr().err == ""


def test_a_part_of_a_phase_is_told_and_timed_apart(capsys):
    """65 of 68 s stood under 'evaluating candidates', and were METIS's."""
    with progress(every_s=0.2) as notify:
        notify("evaluating", "all")
        with inner_phase("partitioning into 8 parts"):
            time.sleep(0.25)
    assert capsys.readouterr().err == "partitioning into 8 parts: 0 s\n"
    with inner_phase("nobody waits"):
        pass


def test_a_terminal_keeps_one_line_that_is_cleared(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress(every_s=0.02) as notify:
        notify("reading", "graph")
        while "graph" not in screen.getvalue():
            time.sleep(0.01)
        before = len(screen.getvalue())
        say("a note")  # it takes the line's place, and stays
        assert "\r\x1b[Ka note\n" in screen.getvalue()[before:]
    told = screen.getvalue()
    assert told.count("\n") == 1 and told.startswith("\r\x1b[Kreading: graph ... 0 s")
    assert told.endswith("\r\x1b[K")


def test_measure_tells_what_it_is_doing_as_other_calls_do(capsys, monkeypatch, tmp_path):
    """`with gnnplan.progress()` said nothing for the minute that `gnnplan.measure` takes."""
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))

    def of_ranks(ranks: int, notify: Callable[[str], None], *how: object) -> gnnplan.Cluster:
        for what in ("matrix products", "aggregation"):
            notify(what)
        return read_cluster("l4_box")

    monkeypatch.setattr(measuring, "measure", of_ranks)
    with progress(every_s=0.0):
        gnnplan.measure()
    assert capsys.readouterr().err == "matrix products: 0 s\naggregation: 0 s\n"
    heard = list[str]()
    gnnplan.measure(notify=lambda phase, detail="": heard.append(phase))
    assert heard == ["matrix products", "aggregation"]


def test_a_failure_ends_the_telling(capsys):
    with pytest.raises(ValueError, match="broken"), progress(every_s=0.02) as notify:
        notify("reading")
        raise ValueError("broken")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
