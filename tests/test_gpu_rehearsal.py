"""`make gpu` on the processor: the same code, small sizes. Its figures say nothing; that they are
there does, so that the first minute on a GPU is not spent on typing errors. By day kernels and
sampling are rehearsed, at night trainings too."""

import json
import pickle
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = [
    pytest.mark.processes,
    # other libraries' warnings are no failure of ours
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def gpu():
    """The program benchmarks/gpu.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "gpu_stages")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def stage(gpu, tmp_path_factory):
    """stage(name) -> what the stage has left; it runs once."""
    from gpu_stages.record import Setting

    out = tmp_path_factory.mktemp("gpu")
    referred = ("one: ", "shared: ", "modules: ")  # two trainings, one and one

    def left(name: str) -> dict[str, Any]:
        if not (out / f"{name}.json").exists():
            only = referred if name == "references" else ()
            gpu.run(name, Setting(out, "cpu", small=True, only=only))
        return json.loads((out / f"{name}.json").read_text()) | {"out": out}

    return left


def whole(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a stage that has ended without a failure."""
    assert document["ended"] and document["failed"] == [] and document["small"]
    assert document["about"]["device"] == "cpu"
    return document["rows"]


def test_kernels(stage):
    document = stage("kernels")
    rows = whole(document)
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kernel.setdefault(row["kernel"], []).append(row)
    assert by_kernel["copy"][0]["rate"] > 1e6
    assert {row["dtype"] for row in by_kernel["product"]} == {"float32", "float32 TF32", "bfloat16"}
    assert all(row["of_peak"] > 0 for row in by_kernel["linear"])
    sums = by_kernel["aggregation"]
    assert {(row["by"], row["graph"]) for row in sums} >= {
        (by, graph) for by in ("ours", "sparse", "pyg") for graph in ("random", "local")
    }
    for row in sums:
        assert row["error"] < (1e-5 if row["dtype"] == "float32" else 0.05) and row["repeats"], row
        assert row["gathered_of_copy"] > 0 and row["of_roofline"] > 0
        if row["by"] == "ours":
            planned = row["seconds"] * (1 + row["roofline_error"])
            assert row["predicted_s"] == pytest.approx(planned)
    for name in ("aggregate", "attend", "attend_pairs", "softmax_aggregate"):
        (row,) = by_kernel[name]
        assert row["forward_s"] > 0 and row["both_s"] > 0
    assert {row["by"] for row in by_kernel["dropout"]} == {"ours", "torch"}
    assert all(0.45 < row["kept"] < 0.55 for row in by_kernel["dropout"])
    # this torch has no products of sparse bfloat16 matrices on the processor
    assert all("bfloat16" in each["what"] for each in document["left_out"])


@pytest.mark.parametrize("local", [True, False])
def test_drawn_graphs_are_graphs(gpu, local):
    """As planner/graph/graph.py promises of a graph."""
    from gpu_stages.graphs import HUBS, csr

    indptr, indices = (each.long() for each in csr(torch.device("cpu"), 20_000, 400_000, local))
    degree = indptr.diff()
    rows = torch.repeat_interleave(degree)
    assert indices.min() >= 0 and indices.max() < 20_000 and not indices.eq(rows).any()
    assert ((indices.diff() > 0) | (rows.diff() > 0)).all()
    edges = rows * 20_000 + indices
    assert torch.equal(edges, (indices * 20_000 + rows).sort().values)
    assert len(indices) == pytest.approx(400_000, rel=0.01)
    assert degree[::HUBS].float().mean() > 5 * degree.float().mean()
    near = (indices - rows).abs().float().median()
    assert near < 2_500 if local else near > 4_000


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "rows"),
    {
        "measure": 4,
        "one": 2,
        "modules": 1,
        "shared": 1,
        "further": 2,
        "streams": 3,
        "peers": 4,
    }.items(),
)
def test_a_stage_of_trainings_has_its_rows(stage, name, rows):
    """Bytes and order are those planned, and losses those of its reference on the processor."""
    if name == "modules":
        pytest.importorskip("torch_geometric", exc_type=ImportError)
    from gpu_stages.table import documents

    left, referred = stage(name), name in ("one", "modules", "shared")
    if referred:
        whole(stage("references"))
        left |= documents(left["out"])[name]
    found = whole(left)
    assert len(found) >= rows, left["left_out"]
    for row in found:
        assert row.get("bytes_equal", True) and row.get("order_equal", True), row
        assert row.get("epoch_s", 1.0) > 0 and (not referred or row["losses_off"] == 0), row


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["one", "modules", "shared", "further"])
def test_every_training_that_a_gpu_is_asked_for_runs(gpu, name, tmp_path, monkeypatch):
    """On the small graph, of which a rehearsal trains a few: no case fails first on a GPU."""
    from gpu_stages import training
    from gpu_stages.record import Setting

    cases, setting = training.cases, Setting(tmp_path, "cpu", small=True)
    monkeypatch.setattr(training, "cases", lambda _: cases(replace(setting, small=False)))
    left = gpu.run(name, setting)
    rows = whole(left)
    assert left["left_out"] == [] and len(rows) > 12
    assert all(row["bytes_equal"] and row["order_equal"] for row in rows)


def test_losses_that_are_not_the_cpus_are_failures(gpu):
    from gpu_stages.table import compare

    def row(case: str, *losses: float) -> dict[str, Any]:
        return {"case": case, "losses": [*losses], "tolerance": 1e-4, "epoch_s": 1.0}

    cpu = {case: row(case, 2.0, 1.0) for case in "abc"}
    device = [row("a", 2.0, 1.00005, 0.5), row("b", 2.0, 1.01), row("c", float("nan"), 1.0)]
    wrong = dict(compare([*device, row("d", 1.0)], cpu))
    assert [*wrong] == ["b", "c"] and "1.0e-02 off" in wrong["b"]
    assert device[0]["losses_off"] == pytest.approx(5e-5)


def test_sampling(stage):
    rows = whole(stage("sampling"))
    assert [row["where"] for row in rows] == ["host", "device"]
    for row in rows:
        assert row["equal"] and row["edges"] > 16 and row["draw_s"] > 0 and row["all_s"] > 0


@pytest.mark.nightly  # that they are found and skip is seen every time
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the tests of a GPU")
def test_marked_tests(tmp_path):
    """In a process of their own, where pytest is not yet at work."""
    command = [sys.executable, BENCHMARKS / "gpu.py", "tests", "--device", "cpu", "--small"]
    subprocess.run([*command, "--out", tmp_path], check=True, capture_output=True)
    rows = whole(json.loads((tmp_path / "tests.json").read_text()))
    assert len(rows) > 60 and {row["outcome"] for row in rows} == {"skipped"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_stage_that_fails_or_hangs_stops_no_other(gpu, tmp_path):
    """The first is killed, the second finds no GPU, the third has no time; all lies packed."""
    work, out = tmp_path / "work", tmp_path / "out"
    for folder in (work, out):
        folder.mkdir()
    from gpu_stages.record import Setting

    (work / "earlier.json").write_text("{}")
    setting = Setting(work, "cuda", small=True)
    began = time.monotonic()
    stages = ["kernels:0.01", "sampling:60:of 16", "streams"]
    gpu.run_all(setting, out, stages[:2], seconds=100)
    gpu.run_all(setting, out, stages[2:], seconds=1)
    assert time.monotonic() - began < 100
    files = work / "kernels.json", work / "sampling.json"
    killed, without = (json.loads(file.read_text()) for file in files)
    assert not killed["ended"]
    assert killed["left_out"] == [{"what": "kernels and on", "why": "0.01 s were over"}]
    assert without["ended"] and "finds no CUDA device" in without["failed"][0]["error"]
    assert sorted(path.name for path in out.iterdir()) == ["gpu.log", "gpu.md", "gpu.tar.gz"]
    page = (out / "gpu.md").read_text()
    assert "0.01 s were over" in page and "finds no CUDA device" in page
    assert "no time is left" in (out / "gpu.log").read_text()
    with tarfile.open(out / "gpu.tar.gz") as tar:
        assert {"earlier.json", "kernels.json", "sampling.log"} <= set(tar.getnames())


def test_a_stage_tries_what_is_asked_for(gpu, tmp_path):
    from gpu_stages.record import Record, Setting

    record = Record(Setting(tmp_path, "cpu", only=("gcn", "2 ranks")), "shared")
    for what in ("gcn, 1 rank", "sage, 2 ranks", "sage, 1 rank"):
        record.attempt(what, lambda what=what: {"what": what})
    assert [row["what"] for row in record.rows] == ["gcn, 1 rank", "sage, 2 ranks"]


def test_an_error_is_kept_with_its_words_and_the_rest_goes_on(gpu, tmp_path):
    from gpu_stages.record import LeftOut, Record, Setting

    def broken() -> None:
        raise ValueError("no such kernel")

    def absent() -> None:
        raise LeftOut("no such library")

    record = Record(Setting(tmp_path, "cpu", small=True), "kernels")
    record.attempt("first", broken)
    record.attempt("second", absent)
    record.attempt("third", lambda: {"kernel": "copy", "rate": 1e9})
    record.attempt("fourth", lambda: {"kernel": "sum", "wrong": ["one is two"]})
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["failed"][0]["error"] == "ValueError: no such kernel"
    assert "in broken" in document["failed"][0]["trace"]
    assert document["left_out"] == [{"what": "second", "why": "no such library"}]
    assert document["rows"][0] == {"kernel": "copy", "rate": 1e9} and not document["ended"]
    assert [each["error"] for each in document["failed"][1:]] == ["one is two"]


def test_an_error_of_a_reference_comes_back_from_its_process(gpu, tmp_path, monkeypatch):
    """One of pydantic could not be pickled, and ended all references after it."""
    from gpu_stages import training
    from gpu_stages.record import Setting

    class Odd(Exception):
        def __init__(self, words: str, *, code: int) -> None:
            super().__init__(words)

    def fail(*_: object) -> None:
        raise Odd("no such field", code=1)

    monkeypatch.setattr(training, "_reference", fail)
    with pytest.raises(RuntimeError, match=r"^Odd: no such field$") as raised:
        training.guarded_reference(Setting(tmp_path, "cpu", small=True), training.Case("snp"))
    assert str(pickle.loads(pickle.dumps(raised.value))) == "Odd: no such field"


def test_tests_that_cannot_start_have_failed(gpu, tmp_path, monkeypatch):
    """Where hypothesis was missing, the stage had no row and no failure."""
    from gpu_stages.record import Setting

    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.ExitCode.USAGE_ERROR)
    document = gpu.run("tests", Setting(tmp_path, "cpu", small=True))
    assert document["failed"][0]["error"] == "RuntimeError: pytest ran no test: USAGE_ERROR"


@pytest.mark.nightly
def test_the_page_has_every_figure_and_is_no_result(gpu, stage):
    from gpu_stages.table import is_result, page

    names = ("kernels", "one", "shared", "streams", "sampling", "peers")
    found = {name: stage(name) for name in names}
    text = page(found)
    assert text.startswith("# A rehearsal: no results") and not is_result(found)
    full = {"small": False, "about": {"device": "cuda"}}
    assert is_result({"kernels": full}) and not is_result({"kernels": full, "one": found["one"]})
    for words in (
        *("| aggregation by |", "| dropout by |", "| recorded |", "| drawn by the |"),
        *("| pipegcn | float32 | sage | 2 | gloo |", "CUDA graphs need a GPU"),
    ):
        assert words in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ours | gcn")}
    assert widths == {10}


def test_constants_are_told_in_few_digits(gpu):
    """A table of rates had all digits of each: 600 characters."""
    from gpu_stages.table import tables

    rates = {"16": {"32000.0": 23548074961.93748}, "64": {"128000.0": 80650789964.74765}}
    line = tables("measure", [{"constant": "device.gather", "value": rates, "from": "measured"}])[2]
    shown = "16: (32000.0: 2.355e+10), 64: (128000.0: 8.065e+10)"
    assert line == f"| device.gather | {shown} | - | measured |"


def test_the_digest_has_figures_and_failures(gpu, stage):
    from gpu_stages.table import digest

    failed = {"failed": [{"what": "all of it", "error": "no such\nkernel", "trace": ""}]}
    text = digest({"kernels": stage("kernels"), "sampling": stage("sampling") | failed})
    assert "  random 200 8 float32: ours " in text and ", pyg " in text
    assert "FAILED all of it: no such kernel" in text and text.index("FAILED") < text.index("copy")
    assert max(map(len, text.splitlines())) <= 250


@pytest.mark.nightly
def test_predictions_of_recorded_rows_have_not_become_worse(gpu):
    """Mean errors of epochs and of memory; docs/gpu.md tells why those of some rows are large."""
    from gpu_stages.predicted import errors, predictions

    most = {"one": 0.16, "shared": 0.38, "further": 0.28, "modules": 0.20, "peers": 0.25}
    most_memory = {"one": 0.05, "shared": 0.15, "further": 0.12, "modules": 0.05}
    found = errors(predictions())
    assert len(found) == len(most) + len(most_memory)
    for (stage, what), each in found.items():
        limit = {"epoch": most, "memory": most_memory}[what][stage]
        assert np.abs(each).mean() < limit, f"{what} of {stage}: {each}"
