"""The command line as people and programs meet it: verbs, JSON, exit codes, bad input, files."""

import csv
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import Answer, ended_well, everything, planned, raising, rewritten, rows_of, spelt
from nightly import NIGHT

from gnnplan import __version__
from gnnplan.api.running import Run
from gnnplan.api.view import Blocks
from gnnplan.executor.launch.run_request import Options
from gnnplan.planner.graph.npy import reading

GRAPH = "synthetic:community?vertices=60&edges=400&features=8&classes=3&seed=0"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Plans of graph parallel on two ranks: of a graph, of one without labels, of statistics."""
    folder = tmp_path_factory.mktemp("plans")
    src = np.arange(30)
    np.savez(folder / "graph.npz", src=src, dst=(src + 1) % 30)
    (folder / "stats.yaml").write_text("vertices: 1000\nedges: 5000\nfeatures: 8\nclasses: 3\n")
    graphs = {
        "plan": GRAPH,
        "unlabelled": folder / "graph.npz",
        "statistics": folder / "stats.yaml",
    }
    for name, graph in graphs.items():
        asked = "--ranks 2 --hidden 8 --strategy graph_parallel"
        planned(folder / f"{name}.json", "--graph", graph, asked)
    return folder


@pytest.fixture
def plan_file(plans, tmp_path):
    """A copy of the first."""
    return Path(shutil.copy(plans / "plan.json", tmp_path))


def test_profile(gnnplan):
    """What it counts: planner/test_partition.py."""
    answer = gnnplan("profile", GRAPH, "--parts 2,4 --hops 2 --json")
    graph, parts = answer.document["graph"], answer.document["parts"]
    assert answer.code == 0 and (graph["vertices"], graph["edges"]) == (60, 400)
    assert list(parts) == ["2", "4"] and len(parts["4"]["growth"]) == 2
    shown = gnnplan("profile", GRAPH, "--parts 4")
    assert "60 vertices, 400 directed edges" in shown.out
    assert re.search(rf"^4 +{parts['4']['halo_rows']} ", shown.out, re.M)


def test_plan(gnnplan, tmp_path):
    """What a plan holds: planner/test_search.py. What is to be typed next is quoted."""
    path = tmp_path / "a plan.json"
    answer = gnnplan("plan --graph", GRAPH, "--ranks 2 -o", path, "--json")
    document = answer.document
    assert answer.code == 0 and json.loads(path.read_text()) == document
    assert all(set(item) == {"strategy", "reason"} for item in document["rejected"])
    shown = gnnplan("plan --graph", GRAPH, "--ranks 2 -o", path)
    assert shown.code == 0 and "use:    " in shown.out and "--explain prints " in shown.out
    assert f"written to {path}; next: gnnplan simulate '{path}'" in shown.out


@pytest.mark.slow
def test_plan_options_reach_the_question(gnnplan, tmp_path):
    (tmp_path / "workload.yaml").write_text("model: sage\nlayers: 4\nlr: 0.02\n")
    document = gnnplan(
        "plan --graph",
        GRAPH,
        "--cluster gnnpipe_a5000 --workload",
        tmp_path / "workload.yaml",
        "--layers 5 --hidden 12 --dropout",
        0.25,
        "--seed 9 --fanout 15,10 --batch 99 --exact --ranks 4",
        "--set inter_node.bandwidth=2GB/s --set epochs=7 --json",
    ).document
    w, c = document["workload"], document["cluster"]
    asked = {"model": "sage", "layers": 5, "lr": 0.02, "hidden": 12, "dropout": 0.25, "seed": 9}
    asked |= {"batch": 99, "epochs": 7, "fanout": [15, 10]}
    assert {name: w[name] for name in asked} == asked
    assert (c["servers"], c["gpus_per_server"], c["inter_node"]["bandwidth"]) == (2, 2, 2e9)
    assert all(answer["exact"] for answer in [document["best"], *document["alternatives"]])
    assert any("--exact" in item["reason"] for item in document["rejected"])
    forced = gnnplan(
        "plan --graph", GRAPH, "--ranks 2 --strategy 'gnnpipe(stages=2, chunks=4)' --json"
    ).document
    assert forced["best"]["strategy"]["chunks"] == 4 and forced["alternatives"] == []


def test_simulate(gnnplan, plan_file, tmp_path):
    answer = gnnplan("simulate", plan_file, "--steps 4 --trace", tmp_path / "trace", "--json")
    told = answer.document
    assert answer.code == 0 and told["strategy"]["name"] == "graph_parallel" and told["steps"] == 4
    simulated = told["simulated"]
    assert simulated["bytes"] == told["predicted"]["bytes"]
    files = {path.name for path in (tmp_path / "trace").iterdir()}
    assert files == {"trace.rank0.json", "trace.rank1.json"}
    trace = json.loads((tmp_path / "trace" / "trace.rank1.json").read_text())
    assert trace["distributedInfo"] == {"backend": "simulator", "rank": 1, "world_size": 2}
    shown = gnnplan("simulate", plan_file, "--trace", tmp_path / "trace")
    assert shown.code == 0 and "epoch simulated" in shown.out and "halo:f" in shown.out
    assert "perfetto" in shown.out
    slower = gnnplan("simulate", plan_file, "--set intra_node.bandwidth=1MB/s --json").document
    assert slower["simulated"]["epoch_s"] > 2 * simulated["epoch_s"]
    # more ranks than the plan's: its family, refitted
    more = gnnplan("simulate", plan_file, "--set servers=2 --json").document
    assert more["ranks"] == 4 and more["strategy"]["name"] == "graph_parallel"


def test_simulate_by_flows(gnnplan, plan_file):
    """On a ring of seven servers messages wait for each other."""
    ring = "--set servers=7 --set gpus_per_server=1 --set fabric.kind=ring"
    fields = f"{ring} --set inter_node.bandwidth=10MB/s"
    bundles, flows = (
        gnnplan("simulate", plan_file, fields, words, "--json").document["simulated"]
        for words in ("", "--flows")
    )
    assert flows["epoch_s"] > 1.001 * bundles["epoch_s"] and flows["bytes"] == bundles["bytes"]
    assert flows["critical_path_s"] <= flows["end_s"] * (1 + 1e-9)
    assert flows["end_s"] <= flows["serial_s"] * (1 + 1e-9)
    assert gnnplan("simulate", plan_file, "--flows --sweep servers=1,2").code == 2


def test_a_sweep_of_several_fields_with_prices_and_noise_to_a_table(gnnplan, plan_file, tmp_path):
    """The rows of --csv are those of --json."""
    fields = "--sweep hidden=16,32 --sweep layers=1,3 --set price=2.5"
    noise = "--jitter 0.3 --repetitions 3 --seed 1 --csv"
    shown = gnnplan("simulate", plan_file, fields, noise, tmp_path / "found.csv")
    for word in ("hidden, layers swept", "P50", "P95", "$/epoch", "found.csv"):
        assert shown.code == 0 and word in shown.out
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert 0 < float(row["p50_s"]) < float(row["p95_s"])
        # both GPUs of the server
        assert float(row["epoch_dollars"]) == pytest.approx(5 / 3600 * float(row["predicted_s"]))
    told = gnnplan("simulate", plan_file, fields, "--json").document["rows"]
    swept = [{"hidden": h, "layers": n} for h in ("16", "32") for n in ("1", "3")]
    assert [row["at"] for row in told] == swept
    assert [{name: row[name] for name in ("hidden", "layers")} for row in rows] == swept
    assert [row["predicted_s"] for row in told] == [float(row["predicted_s"]) for row in rows]


def test_measure_is_kept_and_written(gnnplan, tmp_path, own_cache, monkeypatch):
    import gnnplan.executor.measure.measure as module
    from gnnplan.planner.problem.inputs import overridden, read_cluster

    measured = overridden(read_cluster("local"), {"intra_node.bandwidth": "3GB/s"})

    def fake(ranks: int, progress: Callable[[str], None], *_: object) -> Any:
        progress("matrix products")
        return measured

    monkeypatch.setattr(module, "measure", fake)
    answer = gnnplan("measure -o", tmp_path / "cluster.yaml", "--ranks 2 --json")
    assert answer.code == 0 and answer.document == measured.model_dump(mode="json")
    assert "matrix products" in answer.err
    assert read_cluster(str(tmp_path / "cluster.yaml")) == read_cluster("local") == measured
    assert "provenance:" in gnnplan("measure").out
    monkeypatch.setenv("GNNPLAN_CACHE", "/dev/null")  # what was measured is not lost
    answer = gnnplan("measure -o", tmp_path / "again.yaml")
    assert answer.code == 2 and read_cluster(str(tmp_path / "again.yaml")) == measured


def test_the_program_says_its_version_and_its_verbs_in_80_columns(gnnplan, monkeypatch):
    assert gnnplan("--version") == Answer(0, f"gnnplan {__version__}\n", "")
    monkeypatch.setenv("COLUMNS", "80")
    lines = gnnplan("--help").out.partition("Commands:")[2].splitlines()[1:]
    assert len(lines) == 14 and not [line for line in lines if line.endswith("...")]


def test_the_names_that_options_take_are_listed(gnnplan):
    known = gnnplan("presets --json").document
    assert "--cluster: dgx_a100, " in gnnplan("presets").out and "pipegcn" in known["strategy"]
    for option, names in known.items():
        assert all(name in gnnplan(f"plan --{option} -").err for name in (names[0], names[-1]))


@pytest.mark.processes
def test_help_of_every_verb_comes_without_heavy_imports():
    """And `import gnnplan` costs a program that may not use it as good as nothing."""
    program = """
import sys
import gnnplan
assert gnnplan.__version__ and "typer" not in sys.modules
from gnnplan.cli import main
heavy = {"dgl", "networkx", "numpy", "pydantic", "pymetis", "rich", "scipy", "simpy", "torch", "yaml"}
for verb in "", "profile", "check", "plan", "simulate", "tune", "run", "validate", "trace", "emit", "measure", "--version":
    sys.argv = ["gnnplan", *verb.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
    # typer itself loads pydantic for a verb's options
    assert not heavy - ({"pydantic"} if verb else set()) & set(sys.modules)
"""
    done = ended_well(sys.executable, "-W", "error", "-c", program)
    verbs = "profile plan simulate tune run validate measure"
    for word in f"{verbs} --sweep --eval-every --share --partitioner".split():
        assert word in done.stdout
    assert "Exit codes" in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"), [("gnnplan em", ["emit"]), ("gnnplan run --strat", ["--strategy"])]
)
def test_a_shell_completes_verbs_and_options(words, offered, gnnplan, monkeypatch):
    """As the line that `gnnplan --install-completion` writes for bash asks."""
    monkeypatch.setenv("_GNNPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    answer = gnnplan()
    assert answer.code == 0 and answer.out.split() == offered and not answer.err


EPOCHS = 5
# as the installed command `gnnplan` starts: without the working directory in the path
ALONE = ["-P", "-m", "gnnplan"]
BATCHES = "--mode mini --layers 2 --batch 8 --fanout 4,2"
# name -> ranks, strategy and options
RUNS = {"batches": (2, f"gsplit {BATCHES}")}
if NIGHT:
    # the sampler of each rank is a process of its own
    RUNS |= {"ahead": (2, f"gsplit(prefetch=1) {BATCHES}"), "one": (1, "graph_parallel")}
    RUNS |= {"three": (3, "gnnpipe(stages=3,chunks=1)")}


# An editable install finds the package by a hook that Python asks after all folders of its path,
# and a folder without __init__.py is a package too, if nothing better is in a folder.
HOOK = f"""
import sys
from importlib.machinery import PathFinder


class Hook:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(Path(__file__).resolve().parents[1])!r}]) if name == "gnnplan" else None


sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Hook)
"""


class Trained(NamedTuple):
    out: Path
    code: int
    stdout: str
    stderr: str

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in rows_of(self.out)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same question, trained in these ways at once, in the folder above a clone."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "gnnplan").mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(HOOK)
    env = os.environ | {"GNNPLAN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(folder / "site"), "CUDA_VISIBLE_DEVICES": ""}
    begun = {}
    for name, (ranks, strategy) in RUNS.items():
        out = folder / name
        out.mkdir()
        # a plan may already lie where its run goes
        plan = out / "plan.json" if name == "batches" else folder / f"{name}.json"
        asked = f"--ranks {ranks} --strategy {strategy} --hidden 8 --dropout 0.3"
        planned(plan, "--graph", GRAPH, asked)
        asked = spelt(["run", plan, "--out", out, f"--epochs {EPOCHS} --eval-every 2 --json"])
        how = {"cwd": folder, "env": env, "text": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun[name] = subprocess.Popen([sys.executable, *ALONE, *asked], **how)
    try:
        return {
            name: Trained(folder / name, process.wait(100), *process.communicate(timeout=10))
            for name, process in begun.items()
        }
    finally:
        for process in begun.values():
            process.kill()


@pytest.mark.timeout(150)
def test_run_says_one_document_and_leaves_all_files(trained):
    """From the folder above a clone there is a folder gnnplan/, which is no package: all ranks
    imported that and died. Nor is a plan for the machine that it runs on one for another."""
    for name, (ranks, _) in RUNS.items():
        run = trained[name]
        takes_turns = ranks > len(os.sched_getaffinity(0))  # which a note says
        assert run.code == 0 and (takes_turns or "here" not in run.stderr), run.stderr
        told = json.loads(run.stdout)
        assert (told["epochs"], told["backend"], told["out"]) == (EPOCHS, "gloo", str(run.out))
        assert told["first_loss"] == run.losses[0]
        assert told["loss"] == run.losses[-1] < run.losses[0]
        assert len(told["peak_rss_bytes"]) == ranks
        assert all(told[f"{part}_accuracy"] is not None for part in ("train", "val", "test"))
        assert f"epoch {EPOCHS}/{EPOCHS}" in run.stderr  # progress is on standard error
        per_rank = [f"{k}{rank}.json" for k in ("rank", "trace.rank") for rank in range(ranks)]
        always = {"plan.json", "options.json", "metrics.jsonl", "weights.safetensors"}
        assert {path.name for path in run.out.iterdir()} == {*always, *per_rank}
        rows = rows_of(run.out)
        assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
        assert all(row["epoch_s"] > 0 for row in rows)
        # as the umask says, not only for the owner
        assert (run.out / "weights.safetensors").stat().st_mode & 0o044


def test_a_report_shows_what_runs_measured(trained, copied, gnnplan, tmp_path):
    """Losses are the file's, errors validate's, the measured epoch is under the simulated."""
    out, output = trained["batches"].out, tmp_path / "report.html"
    answer = gnnplan("report", out / "plan.json", out, copied, "-o", output, "--json")
    assert answer.code == 0 and answer.document["report"] == str(output)
    text = output.read_text(encoding="utf-8")
    pictures = json.loads(re.search(r'id="pictures">(.*?)</script>', text, re.S)[1])
    losses = [line for line in pictures["losses"]["data"] if line["yaxis"] == "y"]
    assert [line["y"] for line in losses] == 2 * [trained["batches"].losses]
    told = gnnplan("validate", out, "--json").document
    bars = pictures["errors"]["data"][0]
    assert (bars["name"], bars["y"][0]) == (str(out), "whole epoch")
    assert bars["x"][0] == pytest.approx(100 * told["step"]["predicted_error"], abs=1e-3)
    assert {line["yaxis"] for line in pictures["timeline"]["data"]} == {"y", "y2"}
    diamonds = pictures["epochs"]["data"][-1]
    assert (diamonds["name"], diamonds["y"]) == ("measured", [0])


def test_a_report_refuses_a_run_of_another_plan(trained, gnnplan, tmp_path, plan_file):
    output, run = tmp_path / "report.html", trained["batches"].out
    answer = gnnplan("report", plan_file, run, "-o", output)
    assert answer.code == 2 and f"{run} is a run of another question" in answer.err
    answer = gnnplan("report", plan_file, tmp_path, "-o", output)
    assert answer.code == 2 and "is not a finished run" in answer.err
    assert list(tmp_path.iterdir()) == [plan_file]


def test_a_runs_epoch_is_the_median_of_all_but_its_first_two(tmp_path):
    """The first two warm up; a slow one among the others says nothing of an epoch."""
    accuracies = {f"{part}_accuracy": None for part in ("train", "val", "test")}
    rows = [
        json.dumps({"epoch": epoch, "loss": 1.0, "epoch_s": seconds, **accuracies}) + "\n"
        for epoch, seconds in enumerate([9.0, 8.0, 1.0, 2.0, 6.0], 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    rank = {"backend": "gloo", "bytes": {}, "setup_bytes": {}, "peak_rss_bytes": 1}
    (tmp_path / "rank0.json").write_text(json.dumps({**rank, "peak_bytes": None}))
    assert Run(tmp_path).document["epoch_s"] == 2.0


@pytest.mark.parametrize("name", RUNS)
def test_validate(name, trained, gnnplan):
    answer = gnnplan("validate", trained[name].out, "--json")
    told = answer.document
    assert answer.code == 0 and told["bytes"]["equal"] and told["order"]["equal"], told
    seconds = {"predicted_s", "simulated_s", "measured_s", "predicted_error", "simulated_error"}
    assert seconds <= set(told["step"])
    names = {row["operation"] for row in told["operations"]}
    assert {"forward", "backward", "update"} <= names and told["diagnosis"]
    if name in ("batches", "ahead"):
        # what a rank waits for its sampler is no operation with a cost
        assert {"draw", "ids", "lay", "load"} <= names and "wait" not in names
        assert set(told["bytes"]["predicted"]) == {"ids", "halo", "all_reduce"}
        assert name == "batches" or told["sampler_wait_s"] > 0
        assert told["bytes"]["epochs"] == EPOCHS
    else:  # of batches the first epoch is predicted, and all are compared with the schedule
        assert told["bytes"]["counted"] == told["bytes"]["predicted"]
    shown = gnnplan("validate", trained[name].out)
    assert shown.code == 0 and "equal" in shown.out
    assert "as scheduled on every rank and lane" in shown.out and "wrong" not in shown.out
    lines = shown.out.splitlines()
    whole = "epoch " if name in ("batches", "ahead") else "step "
    assert lines[1].split()[:2] == ["predicted", "measured"] and lines[2].startswith(whole)
    assert lines[-1].startswith("diagnosis: ")


@pytest.fixture
def copied(trained, tmp_path):
    """A run that may be damaged."""
    return Path(shutil.copytree(trained["batches"].out, tmp_path / "run"))


def swap_first_computations(path: Path) -> None:
    with rewritten(path) as trace:
        one, other, *_ = (e for e in trace["traceEvents"] if e["args"].get("lane") == "compute")
        one["name"], other["name"] = other["name"], one["name"]


def test_validate_says_1_where_bytes_or_order_differ(copied, gnnplan):
    path = copied / "metrics.jsonl"
    written = path.read_text()
    first, *others = map(json.loads, written.splitlines())
    rows = [first | {"bytes": first["bytes"] + 1}, *others]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = gnnplan("validate", copied, "--json")
    assert answer.code == 1 and not answer.document["bytes"]["equal"]
    assert "the volume is wrong; " in answer.document["diagnosis"]
    path.write_text(written)
    swap_first_computations(copied / "trace.rank1.json")
    answer = gnnplan("validate", copied)
    assert answer.code == 1 and "rank 1, lane compute, place 0: planned " in answer.out


def test_validate_of_several_runs_says_1_where_the_order_of_one_differs(copied, trained, gnnplan):
    """All their bytes are as predicted."""
    runs = [trained["batches"].out, copied]
    answer = gnnplan("validate", *runs, "--json")
    assert answer.code == 0 and answer.document["order_equal"] == 2
    swap_first_computations(copied / "trace.rank1.json")
    answer = gnnplan("validate", *runs, "--json")
    assert answer.code == 1
    assert (answer.document["bytes_equal"], answer.document["order_equal"]) == (2, 1)


def test_validate_says_first_that_a_run_was_on_another_kind_of_device(copied, gnnplan):
    """A plan for GPUs that ran on CPUs: its seconds say nothing of the prediction."""
    with rewritten(copied / "plan.json") as plan:
        plan["cluster"]["device"] |= {"kind": "cuda", "name": "NVIDIA A100"}
    lines = gnnplan("validate", copied).out.splitlines()
    assert lines[0].startswith("note: this run was on cpu, and its plan is for cuda (NVIDIA A100);")
    said = "costs of another kind of device are not judged: plan for the one that it ran on"
    assert lines[-1] == f"diagnosis: volume and order are as planned; {said}"
    document = gnnplan("validate", copied, "--json").document
    assert document["device"] == {"planned": "cuda", "ran_on": ["cpu"], "equal": False}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metrics.jsonl", "", "no epoch in metrics.jsonl"),
        ("metrics.jsonl", '{"epoch": 1, "lo', "no epoch in metrics.jsonl"),
        ("metrics.jsonl", '{"epoch": 1, "lo\n', "metrics.jsonl: not JSON"),
        ("metrics.jsonl", "[1]\n", "every line needs numbers epoch, loss and epoch_s"),
        ("metrics.jsonl", '{"epoch": 1, "loss": "x", "epoch_s": 1}\n', "every line needs numbers"),
        (  # said to be a fault of gnnplan, which predicted too few bytes
            "metrics.jsonl",
            '{"epoch": 1, "loss": 1, "epoch_s": 1}\n{"epo',
            "has 1 epochs of this plan, and a rank.*json counted 5; put it back, or train again",
        ),
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read .No such file"),
        ("rank0.json", '{"bytes": 3}', "rank.*json needs bytes and setup_bytes by operation"),
        ("rank0.json", "[]", "rank.*json needs bytes"),
        ("trace.rank1.json", None, "that of rank 1 is missing"),
        ("trace.rank1.json", "{", "trace.rank1.json: not JSON"),
        ("plan.json", None, "plan.json: cannot be read"),
        ("plan.json", "{}", "plan.json: not a plan"),
    ],
)
def test_a_damaged_run_is_bad_input(name, content, words, copied, gnnplan):
    (copied / name).unlink()
    if content is not None:
        (copied / name).write_text(content)
    answer = gnnplan("validate", copied, "--json")
    assert answer.code == 2 and re.search(words, answer.document["error"]), answer


def test_a_run_is_gone_on_with_only_where_it_can_be(plan_file, gnnplan, tmp_path):
    """Answers before anything starts, and leaves the folder as it is."""
    from safetensors.torch import save_file
    from torch import ones

    from gnnplan.executor.launch.run_request import RunRequest
    from gnnplan.executor.ranks.checkpoint import question
    from gnnplan.planner.decision.plan import read

    out = tmp_path / "run"

    def must_say(words: str, *call: object) -> None:
        answer = gnnplan("run", *call)
        assert answer.code == 2 and words in answer.err, answer.err

    must_say(f"{out} holds no run to resume", "--resume", out)
    out.mkdir()
    (out / "plan.json").write_bytes(plan_file.read_bytes())
    must_say(f"{out} has no checkpoint that all ranks have finished", "--resume", out)
    must_say("leave one of them out", plan_file, "--resume", out, "--out", tmp_path / "other")
    must_say("")
    (out / "checkpoints").mkdir()
    prepared = RunRequest(read(plan_file), out, Options())
    asked = question(prepared.problem, prepared.settled)
    whole: dict[str, Any] = {"whole": {}}
    going_on = ["--resume", out, "--epochs 5"]
    changed_plan = [plan_file, "--resume", out, "--epochs 10"]
    p3, cubes = "p3(pipelined=True)", "tensor3d(x=1,y=1,z=2)"
    of, gives = "is of another training", "neither hands over weights nor takes them over"
    both = f"of {p3} on 2 ranks, and this plan of graph_parallel on 2 ranks"
    for call, changed, more, words in (
        (going_on, {"workload.seed": 9}, {}, f"{of} (workload.seed 9 there and 0 "),
        (going_on, {"gnnplan": "0"}, {}, f"{of} (gnnplan '0' there"),
        (going_on, {}, {}, "a checkpoint of epoch 10, but only 5 epochs"),
        (changed_plan, {"strategy": p3}, whole, f"{both}: {p3} {gives} (its batches"),
        (changed_plan, {"strategy": cubes}, {}, f"{cubes} {gives}; resume with"),
        (changed_plan, {"strategy": "granndis"}, whole, "use --epochs 11 or more"),
        (changed_plan, {"ranks": 1}, whole, "use --epochs 11 or more"),
        (changed_plan, {"ranks": 3}, whole, "no checkpoint that all ranks have finished"),
    ):
        for rank in range(2):
            about = {"question": {**asked, **changed}, "notes": {}, **more}
            path = out / "checkpoints" / f"epoch10.rank{rank}.safetensors"
            save_file({"x": ones(1)}, path, {"gnnplan": json.dumps(about)})
        before = everything(out)
        must_say(words, *call)
        assert everything(out) == before
    (out / "options.json").write_text('{"epochs": 5, "colour": 1}')
    must_say("options.json is damaged or of another version", "--resume", out)


@pytest.fixture
def untrained(monkeypatch):
    """Runs that are asked for, of which none is trained."""
    from gnnplan.api import running
    from gnnplan.executor.launch import agent, launcher

    asked: list[Any] = []
    begin = launcher.begin
    monkeypatch.setattr(launcher, "begin", lambda run: begin(asked.append(run) or run))
    monkeypatch.setattr(agent, "run", lambda *_: None)
    monkeypatch.setattr(running, "Run", lambda out: Blocks([]))
    return asked


def test_where_a_run_goes_by_default(plan_file, gnnplan, tmp_path, monkeypatch, untrained):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "community-graph_parallel-1").mkdir(parents=True)
    assert gnnplan("run", plan_file).code == 0
    out = Path("runs/community-graph_parallel-2")
    (asked,) = untrained
    assert (asked.out, asked.options) == (out, Options())
    assert asked.problem.by_gpu == (0, 1)
    assert json.loads((out / "plan.json").read_text()) == json.loads(plan_file.read_text())


def test_an_interrupted_run_says_what_is_kept(plan_file, gnnplan, tmp_path, monkeypatch):
    """It said `interrupted` alone. That an epoch is named to go on from: executor/faults.py."""
    from gnnplan.executor.launch import agent

    monkeypatch.setattr(agent, "run", raising(KeyboardInterrupt()))
    answer = gnnplan("run", plan_file, "--out", tmp_path / "out")
    assert answer.code == 130 and "metrics.jsonl\nerror: interrupted" in answer.err
    assert "note: 0 finished epochs are in " in answer.err


@pytest.mark.usefixtures("untrained")
def test_a_run_of_the_next_strategy_keeps_it_in_its_plan(gnnplan, tmp_path, monkeypatch):
    """So that `validate` compares with the strategy's own prediction, and --resume goes on with it.
    That a run of it is predicted right is tested with the launch files (test_launchers.py)."""
    monkeypatch.chdir(tmp_path)
    plan = gnnplan("plan --graph", GRAPH, "--ranks 2 --hidden 8 -o plan.json --json").document
    answer = gnnplan("run plan.json --strategy NEXT --out run")
    assert answer.code == 0, answer.err
    second = plan["alternatives"][0]
    kept = json.loads(Path("run/plan.json").read_text())["best"]
    assert kept["strategy"] == second["strategy"] and kept["predicted"] == second["predicted"]
    answer = gnnplan("run plan.json --strategy gnnpipe(chunks=77) --out other")
    assert answer.code == 2 and "the plan holds" in answer.err and not Path("other").exists()
    answer = gnnplan("run --resume run --strategy NEXT")
    assert answer.code == 2 and "give the plan too (gnnplan run PLAN --strategy" in answer.err


@pytest.mark.usefixtures("untrained")
def test_the_plan_before_is_kept_where_another_goes_on(plan_file, gnnplan, tmp_path, monkeypatch):
    from gnnplan.executor.launch import run_request

    monkeypatch.setattr(run_request, "last_of", lambda *words: (10, {}))
    out, other = tmp_path / "run", json.loads(plan_file.read_text()) | {"objective": "cost"}
    out.mkdir()
    (out / "plan.json").write_text(json.dumps(other))
    (out / "metrics.jsonl").write_text('{"epoch": 1}\n' * 10)
    for objective in ("time", "energy"):  # the first of the two trained nothing
        with rewritten(plan_file) as plan:
            plan["objective"] = objective
        assert gnnplan("run", plan_file, "--resume", out).code == 0
        assert json.loads((out / "plan.until10.json").read_text()) == other
        assert json.loads((out / "plan.json").read_text()) == plan


ALONE_OF_TORCHRUN = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (dict(RANK="0", WORLD_SIZE="2"), "MASTER_ADDR and MASTER_PORT not"),
        (dict(RANK="x", WORLD_SIZE="2"), "RANK is 'x'"),
        (dict(RANK="2", WORLD_SIZE="2"), "numbered from 0 to WORLD_SIZE - 1"),
        (ALONE_OF_TORCHRUN, "--out is needed"),
    ],
)
def test_a_launcher_that_forgot_something(env, words, plan_file, gnnplan, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    answer = gnnplan("run", plan_file)
    assert answer.code == 2 and words in answer.err


def test_a_started_rank_says_what_is_wrong(plan_file, gnnplan, tmp_path, monkeypatch):
    """One rank of torchrun for a plan of two; and a folder that holds a run. Nothing is written."""
    from gnnplan.executor.ranks import rank

    for name, value in ALONE_OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank, "leave", raising(SystemExit(2)))
    answer = gnnplan("run", plan_file, "--out", tmp_path / "out")
    assert answer.code == 2 and not (tmp_path / "out").exists()
    said = "ranks: planned 2, here 1 started; start 2, or plan again with --ranks 1"
    assert re.search(rf"error: rank 0 \(.*\) in start: {said}", answer.err)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("{}\n")
    answer = gnnplan("run", plan_file, "--out", tmp_path / "old")
    assert answer.code == 2 and "holds a run already" in answer.err
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["metrics.jsonl"]


def edited(folder: Path, call: str) -> list[object]:
    """'simulate graph.source 5': the verb, on the good plan with that value changed."""
    verb, where, to = call.split(" ", 2)
    document = json.loads((folder / "plan.json").read_text())
    *parents, last = where.split(".")
    functools.reduce(dict.__getitem__, parents, document)[last] = json.loads(to)
    (folder / "changed.json").write_text(json.dumps(document))
    return [verb, folder / "changed.json", "--out out" if verb == "run" else ""]


PLAN, PLAY = f"plan --graph {GRAPH}", "simulate plan.json"
# calls, in a folder that holds the plans and a run -> what the message must say
CALLED = {
    "plan --scale 1,2 -o p.json": "--scale compares sizes and makes no plan for -o; leave it out",
    "plan --scale 1,2 --report r.html --explain": "makes no plan for --report, --explain; leave them out",
    f"{PLAN} -o no/p.json": "the folder .*no does not exist; create it first",
    f"{PLAN} -o plan.json/p": "plan.json: is a file, but a folder is needed; give another place",
    # each was lost
    f"{PLAN} --cluster plan.json -o plan.json": "--output plan.json: is read too, and would be lost; give",
    "emit plan.json --for slurm -o ./plan.json": "--output plan.json: is read too, and would",
    "simulate plan.json --sweep hidden=8 --csv plan.json": "--csv plan.json: is read too, and would be lost",
    f"{PLAN} -o p.json --report ./p.json": "--output and --report p.json: are one file; write two",
    f"{PLAN} -o .": "is a folder; give the name of a file",
    "profile synthetic:comunity": "unknown generator 'comunity'; did you mean community",
    f"profile {GRAPH} --parts 2,x": "--parts '2,x' is not a list of whole numbers; write it as 2,4,8",
    f"profile {GRAPH} --hops 0": r"hops must lie in \[1, 1000\], got 0",
    "simulate absent.json": "absent.json: cannot be read .* make one with `gnnplan plan",
    "run .": "cannot be read .Is a directory",
    "run plan.json --out plan.json": "plan.json: is a file, but a folder is needed; give another place",
    "run plan.json --out plan.json/x": "plan.json: is a file, but a folder is needed; give another place",
    "run plan.json --out ''": "--out '': is empty",  # it trained in the working directory
    "run plan.json --epochs 0": "--epochs",
    "run plan.json --timeout 0": "--timeout",
    "run plan.json --emulate 10us": "not a rate such as 400Mbit/s",
    "validate .": "is not a finished run",
    # after a minute it was written, with "next: gnnplan run"
    "tune statistics.json --out out": "is known by statistics only and cannot be trained; plan with a graph file",
    "run statistics.json --out out": "known by statistics only and cannot be trained; plan with",
    "run unlabelled.json --out out": "no labelled training vertices.*plan with a graph that has y",
    "simulate plan.json --trace run": "holds a run, whose traces would be lost; give another",
    "measure --ranks 0": "--ranks",
    "planz": "No such command 'planz'",
    "plan --grap x": "No such option: --grap",
}
# what is asked of PLAN and of PLAY -> what the message must say
ASKED = {
    "--graph reddit --features 100": "statistics take no parameters; leave them out, or write",
    "--dropout 1.5": "--dropout: must be less than 1",
    "--hidden 1000000000": "--hidden: must be less than or equal to 1000000",
    "--workload absent.yaml": "absent.yaml: cannot be read",
    "--model MyGNN": "'gatv2' or a module of your own, as model.py:MyGNN, not 'MyGNN'",
    "--mode medium": "--mode: must be 'full' or 'mini'",
    "--dtype float16": "--dtype: must be 'float32', 'float64', 'bfloat16' or 'tf32', not 'float16'; did you mean bfloat16",
    "--dtype auto --scale 1,2": "--dtype: auto is no type: only a plan on one number of GPUs chooses one",
    "--dtype auto --set dtype=bfloat16": "--set dtype=bfloat16 and --dtype name one field; leave",
    "--layers 3 --set layers=2": "--set layers=2 and --layers name one field; leave one out",
    "--set servers=2 --set servers=4": "--set servers: given twice; keep one",
    "--cluster 'l4_box?servers=4' --set servers=2": "--set servers=2 and --cluster l4_box.servers=4 name one",
    "--cluster 'l4_box?servers=4&servers=2'": "servers=2: a field is given twice; keep one",
    "--set servers=0": "--set servers: must be greater than or equal to 1, not 0",
    "--cluster l4_box --cluster dgx_a100": "--cluster dgx_a100: several clusters are compared by numbers of GPUs; add --scale",
    "--scale 1,2 --ranks 2": "--ranks 2 asks for one size and --scale 1,2 for several; leave one out",
    "--objective energy --cluster local": "add it, as --set device.power=300W",
    "--target-accuracy 93": "a share of right answers, above 0 and below 1; write 0.93 for 93 %",
    "--evidence runs": "say which, as --target-accuracy 0.93",
    "--scale 1,2 --objective cost --cluster dgx_a100": "dgx_a100 has none; add it, as --set price=2.50",
    "--strategy ''": "--strategy '': is empty, as a shell variable without a value is; give it a value",
    "--features=": "--features=: is empty",
    "--ranks 0": r"--ranks must lie in \[1, 8192\], got 0",
    "--ranks 64 --cluster gnnpipe_a5000": "32 GPUs per server, but cluster gnnpipe_a5000 has 4.*use --ranks 8 or less",
    "--ranks 7 --cluster gnnpipe_a5000": "cannot be spread equally over 2 servers; use a multiple of 2",
    "--ranks 61": r"every rank needs a vertex \(vertices: 60, ranks: 61\); use --ranks 60 or less",
    "--partitioner metiz": "--partitioner 'metiz' is unknown; did you mean metis.? Allowed: auto, metis, metis-volume, kaminpar",
    "--per epoc": "--per 'epoc' is unknown; did you mean epoch",
}
SIMULATED = {
    f"--sweep hidden={','.join(map(str, range(1, 1002)))}": "1,001 combinations",
    "--sweep hidden=1,2 --trace t": "leave one of them out",
    "--csv t.csv": "--csv writes what a sweep finds",
    "--sweep hidden=1 --csv no/t.csv": "does not exist; create it",
    "--trace plan.json": "plan.json: is a file, but a folder is needed",
    "--steps 100000000": r"more than 4,000,000 tasks; use --steps \d+ or less",
    "--sweep servers": "--sweep 'servers': write a field",
    "--trace ''": "--trace '': is empty",  # it wrote into the working directory
    "--sweep servers=1,,2": "--sweep 'servers=1,,2': write a field",
    "--sweep servers=1 --sweep servers=2": "give all its values at once",
    "--sweep servers=1,1": "a value is there twice",
    "--sweep servers=1,2 --set servers=1": "servers: given twice; keep one",
    "--sweep device=dgx_a10": "did you mean dgx_a100",
    "--straggler 7=2": r"there is no rank 7 \(ranks: 2, counted from 0\); use rank 1",
    "--jitter 1 --repetitions 100000 --steps 100": "--repetitions ",
    "--steps 0": "--steps",
}
EDITED = {  # a verb, a value of the good plan, what it becomes
    'simulate workload.dtype "auto"': "workload.dtype: auto is no type",
    'run gnnplan "9.9"': rf"version: planned gnnplan 9.9, here gnnplan {re.escape(__version__)}; plan again",
    'simulate graph.source "gone.npz"': "gone.npz: no such file.* put it back, or plan again",
    "simulate graph 5": "changed.json: graph must be an object",
    "simulate graph.source 5": "changed.json: graph.source must be text",
    'simulate graph.directed "x"': "changed.json: graph.directed must be true or false",
    "simulate cluster []": "changed.json: cluster must be an object",
    'run workload.layers "x"': "changed.json: workload.layers: must be a whole number, as 2, not 'x'",
    'run partitioner "zzz"': "changed.json: partitioner 'zzz' is unknown; allowed: metis",
    "simulate best [1]": "changed.json: best must be an object",
    'run best.strategy "gnnpipe"': "changed.json: best.strategy must be an object",
    'simulate best.strategy {"name": "x"}': "changed.json: best.strategy: there is no strategy 'x'",
    'simulate best.strategy.staleness "x"': "changed.json: best.strategy: graph_parallel: staleness is int, not 'x'",
    'run best.strategy {"name": "gnnpipe", "stages": 99}': "use stages <= 3",
}
BAD = CALLED | ASKED | SIMULATED | EDITED


@pytest.mark.parametrize("words", BAD)
def test_bad_input(words, gnnplan, tmp_path, plans, monkeypatch):
    """Exit 2, a line for people and a document for programs; nothing written."""
    monkeypatch.chdir(shutil.copytree(plans, tmp_path, dirs_exist_ok=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    verb = PLAN if words in ASKED else PLAY if words in SIMULATED else ""
    call = edited(tmp_path, words) if words in EDITED else [verb, words]
    before = everything(tmp_path)
    answer = gnnplan(*call, "--json")
    assert answer.code == 2, answer
    document = answer.document
    assert document["exit_code"] == 2 and set(document) == {"error", "exit_code"}
    assert re.search(BAD[words], document["error"], re.S), document["error"]
    assert document["error"].lower() in answer.err.lower() and "Traceback" not in answer.err
    assert "pydantic" not in answer.err and "NoneType" not in answer.err
    assert everything(tmp_path) == before


def test_a_dry_run_prints_what_the_plan_asks_for(plan_file, tmp_path, gnnplan, monkeypatch):
    """The table ends with what would happen, and nothing does."""
    from gnnplan.executor.launch import preflight

    monkeypatch.setattr(preflight, "cores", lambda: 2)
    call = ("run", plan_file, "--out", tmp_path / "out", "--dry-run")
    answer = gnnplan(*call)
    assert answer.code == 0 and answer.out.splitlines()[-1] == "it would run as planned"
    assert re.search(r"^memory +2 ranks with .* each at least .* GB free .* +ok", answer.out, re.M)
    monkeypatch.setattr(preflight, "cores", lambda: 1)
    assert "it would run; 1 line would be printed first" in gnnplan(*call).out
    monkeypatch.setattr(preflight, "free_memory", lambda: 300e6)
    answer = gnnplan(*call, "--json")
    rows = {row.pop("what"): row for row in answer.document["rows"]}
    assert answer.code == 2 and answer.document["stops"] and rows["memory"]["verdict"] == "stops"
    assert set(rows["memory"]) == {"planned", "here", "verdict", "says"}
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_dry_run_refuses_what_a_run_refuses(plan_file, plans, tmp_path, gnnplan, monkeypatch):
    """It said `it would run as planned` of folders, options and plans that the run then refused."""
    from gnnplan.executor.launch import emulation, preflight

    old, new, board = (tmp_path / name for name in ("old", "new", "board"))
    old.mkdir()
    (old / "metrics.jsonl").write_text("{}\n")
    (old / "plan.json").write_bytes(plan_file.read_bytes())
    _, bits, _ = edited(tmp_path, "run best.strategy.bits 2")
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    monkeypatch.setattr(emulation.shutil, "which", lambda tool: None)
    before = everything(tmp_path)
    for what, words in {
        "run folder": [plan_file, "--out", old],
        "run folder: planned new, here": [plan_file, "--out", plan_file],
        "run folder: planned a checkpoint": ["--resume", old],
        "training": [plans / "unlabelled.json", "--out", new],
        "training: planned graph_parallel(bits=2)": [bits, "--staleness-errors --out", new],
        "TensorBoard": [plan_file, "--tensorboard", board, "--out", new],
        "servers": [plan_file, "--emulate unshaped --out", new],
    }.items():
        dry = gnnplan("run", *words, "--dry-run --json")
        stops = [row for row in dry.document["rows"] if row["verdict"] == "stops"]
        assert dry.code == 2 and len(stops) == 1, (what, dry)
        (row,) = stops
        run = gnnplan("run", *words)
        said = f"{row['what']}: planned {row['planned']}, here {row['here']}; {row['says']}"
        assert said.startswith(what) and (run.code, run.err) == (2, f"error: {said}\n"), run
        assert everything(tmp_path) == before


def test_an_old_plan_stays_when_a_new_one_fails(plan_file, gnnplan, monkeypatch):
    before, ask = everything(plan_file.parent), ("plan --strategy graph_parallel --graph", GRAPH)
    for words in ("--set device.memory=1MB", "--set servers=x"):
        assert gnnplan(*ask, "-o", plan_file, words).code in (2, 3)
    monkeypatch.setattr(os, "replace", raising(OSError(28, "No space left on device")))
    answer = gnnplan(*ask, "-o", plan_file)
    assert answer.code == 2 and "No space left on device" in answer.err
    assert everything(plan_file.parent) == before


def test_wrong_use_without_json(gnnplan):
    answer = gnnplan("plan --grap x")
    assert answer.code == 2 and answer.out == "" and "Usage: gnnplan plan" in answer.err
    assert "No such option: --grap" in answer.err
    assert gnnplan("profile absent.npz") == Answer(2, "", "error: absent.npz: no such file\n")
    nothing = gnnplan()
    assert nothing.code == 2 and "Usage: gnnplan" in nothing.out + nothing.err


DENIED = PermissionError(13, "Permission denied", "graph/x.npy")


@pytest.mark.parametrize(
    ("broken", "ends"),
    [
        (raising(ZeroDivisionError()), ZeroDivisionError),  # our own mistakes keep their traceback
        # code that was installed on a full disk was `interrupted`
        (raising(EOFError("marshal data too short")), EOFError),
        # these were tracebacks, or `damaged or of another kind, write it again`
        (raising(DENIED), "Permission denied"),
        (raising(DENIED, reading("graph", "arrays")), "cannot be read (Permission denied)"),
        (raising(KeyboardInterrupt()), "interrupted"),
    ],
    ids=["a mistake", "a file too short", "denied", "a graph denied", "interrupted"],
)
def test_errors_of_others_are_a_line_and_ours_a_traceback(broken, ends, gnnplan, monkeypatch):
    monkeypatch.setattr("gnnplan.planner.graph.load.load", broken)
    if not isinstance(ends, str):
        with pytest.raises(ends):
            gnnplan("profile", GRAPH)
        return
    answer = gnnplan("profile", GRAPH, "--json")
    said, code = f"graph/x.npy: {ends}; get the right to use it, or choose another", 2
    if ends == "interrupted":
        said, code = ends, 130
    assert answer.code == code and answer.err == f"error: {said}\n"
    assert answer.document == {"error": said, "exit_code": code}


def test_interrupted_while_it_imports(monkeypatch, capsys):
    """It was a traceback."""
    from gnnplan.__main__ import main

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr("builtins.__import__", raising(KeyboardInterrupt()))
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "error: interrupted\n"


def test_nothing_fits(gnnplan):
    """Exit 3, what fills the memory, and a remedy (that it works: planner/test_search.py)."""
    answer = gnnplan(PLAN, "--ranks 2 --strategy graph_parallel --set device.memory=1MB --json")
    assert answer.code == 3 and answer.document["exit_code"] == 3
    needs = r"on its fullest rank but a .* has 1.00 MB; most of it is \w+"
    remedy = r"the smallest change that would fit: --set device.memory="
    assert re.search(f"{needs}.*{remedy}", answer.document["error"], re.S), answer
    # the name of a strategy stood twice in its line
    said = gnnplan(PLAN, "--ranks 2 --set device.memory=1MB").err
    assert "\n  graph_parallel: needs 30" in said and "graph_parallel: graph" not in said


def test_a_simulation_says_how_much_of_the_cluster_is_used(gnnplan, tmp_path):
    """A plan on one of eight GPUs was simulated 'on l4_box (1 server x 8)'."""
    graph = "synthetic:community?vertices=60&edges=240&features=4&classes=3"
    path = planned(tmp_path / "plan.json", f"--graph '{graph}' --cluster l4_box --mode full")
    assert "on 1 of 8 ranks of l4_box (1 server x 8)" in gnnplan("simulate", path).out
