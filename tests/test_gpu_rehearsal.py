"""`make gpu` on the processor: the same code, small sizes. Its figures say nothing; that they are
there does, so that the first minute on a GPU is not spent on typing errors."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(110),
    # other libraries' warnings are no failure of ours
    pytest.mark.filterwarnings("ignore"),
]
Stage = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The program benchmarks/gpu.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "gpu_stages")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def stage(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """stage(name) -> what the stage has left; it runs once."""
    from gpu_stages.record import Setting

    out = tmp_path_factory.mktemp("gpu")
    setting = Setting(out, "cpu", small=True)

    def left(name: str) -> dict[str, Any]:
        if not (out / f"{name}.json").exists():
            gpu.run(name, setting)
        return json.loads((out / f"{name}.json").read_text()) | {"out": out}

    return left


def whole(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a stage that has ended without a failure."""
    assert document["ended"] and document["failed"] == [] and document["small"]
    assert document["about"]["device"] == "cpu"
    return document["rows"]


def test_kernels(stage: Stage) -> None:
    document = stage("kernels")
    rows = whole(document)
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kernel.setdefault(row["kernel"], []).append(row)
    assert by_kernel["copy"][0]["rate"] > 1e6
    assert {row["dtype"] for row in by_kernel["product"]} == {
        "float32",
        "float32 TF32",
        "bfloat16",
    }
    assert all(row["of_peak"] > 0 for row in by_kernel["linear"])
    sums = by_kernel["aggregation"]
    assert {row["by"] for row in sums} >= {"ours", "sparse", "gather_and_add", "pyg"}
    assert {(row["by"], row["pass"]) for row in sums} >= {("ours", "forward"), ("ours", "both")}
    for row in sums:
        assert row["error"] < (1e-5 if row["dtype"] == "float32" else 0.05), row
        assert row["of_roofline"] > 0 and row["seconds"] > 0
    for name in ("attend", "attend_pairs", "softmax_aggregate"):
        (row,) = by_kernel[name]
        assert row["forward_s"] > 0 and row["both_s"] > 0
    assert {row["by"] for row in by_kernel["dropout"]} == {"ours", "torch"}
    assert all(0.45 < row["kept"] < 0.55 for row in by_kernel["dropout"])
    # this torch has no products of sparse bfloat16 matrices on the processor
    assert all("bfloat16" in each["what"] or "dgl" in each["what"] for each in document["left_out"])


@pytest.mark.nightly  # what `gnnplan measure` does is tested every time
def test_measure(stage: Stage) -> None:
    rows = {row["constant"]: row for row in whole(stage("measure"))}
    assert {"device.gemm", "device.memory_bandwidth", "device.launch", "host_rates"} <= set(rows)
    low, high = rows["device.gemm"]["range"]
    assert low < 1 < high and "measured" in rows["device.gemm"]["from"]


def test_one_rank(stage: Stage) -> None:
    rows = whole(stage("one"))
    assert [row["strategy"] for row in rows] == ["graph_parallel", "data_parallel"]
    for row in rows:
        assert row["bytes_equal"] and row["order_equal"] and row["ranks"] == 1
        assert row["losses_off"] == 0 < row["epoch_s"]
        assert row["memory_bytes"] is None or row["memory_bytes"] > 0 < row["predicted_bytes"]


def test_ranks_that_share_the_card(stage: Stage) -> None:
    document = stage("shared")
    (row,) = whole(document)
    assert (row["strategy"], row["ranks"], row["backend"]) == ("pipegcn", 2, "gloo")
    assert row["bytes_equal"] and row["bytes"] > 0 and row["order_equal"]
    assert 0 <= row["overlapped"] <= 1
    traces = sorted(path.name for path in document["out"].glob("shared.pipegcn.trace.rank*.json"))
    assert len(traces) == 2


def test_rounded_rows_and_rows_in_the_servers_memory(stage: Stage) -> None:
    rows = whole(stage("further"))
    assert [(row["strategy"], row["ranks"]) for row in rows] == [
        ("offload(chunks=3)", 1),
        ("graph_parallel(bits=2)", 2),
    ]
    assert all(row["bytes_equal"] and row["order_equal"] and row["epoch_s"] > 0 for row in rows)


def test_streams(stage: Stage) -> None:
    document = stage("streams")
    rows = whole(document)
    recording = [row for row in rows if row["what"] == "recording"]
    assert [row["strategy"] for row in recording] == ["graph_parallel", "gnnpipe(chunks=4)"]
    assert all(row["spans"] > 5 and row["not_recorded_s"] > 0 for row in recording)
    assert all(row["operations"] > 50 for row in rows if row["what"] == "launches")
    assert (document["out"] / "streams.graph_parallel.200.json.gz").stat().st_size > 1000
    left_out = [each["what"] for each in document["left_out"]]
    assert left_out == ["CUDA graph, 200 vertices", "two communicators under way"]


def test_sampling(stage: Stage) -> None:
    rows = whole(stage("sampling"))
    assert [row["where"] for row in rows] == ["host", "device"]
    for row in rows:
        assert row["equal"] and row["edges"] > 16 and row["draw_s"] > 0 and row["all_s"] > 0


def test_peers(stage: Stage) -> None:
    rows = whole(stage("peers"))
    assert {row["by"] for row in rows} >= {"ours", "pyg", "pyg_edges"}
    assert {row["model"] for row in rows} == {"gcn", "sage"}
    assert all(row["epoch_s"] > 0 for row in rows)


@pytest.mark.nightly  # that they are found and skip is seen every time
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the tests of a GPU")
def test_marked_tests(stage: Stage) -> None:
    (row,) = whole(stage("tests"))
    assert row["files"] == 3 and row["skipped"] > 60 and row["failed"] == row["passed"] == 0


# -- what happens when something fails ---------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_stage_that_fails_or_hangs_stops_no_other(gpu: Any, tmp_path: Path) -> None:
    """Both fail here: one is ended at once, the other finds no GPU."""
    from gpu_stages.record import Setting

    setting = Setting(tmp_path, "cuda", small=True)
    assert gpu.run_all(setting, ["kernels"], limit_s=0.01) == 1
    assert gpu.run_all(setting, ["sampling"]) == 2
    hung, without = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("kernels", "sampling")
    )
    assert not hung["ended"] and "took more than 0.01 s" in hung["failed"][-1]["error"]
    assert without["ended"] and "finds no CUDA device" in without["failed"][0]["error"]
    page = (tmp_path / "gpu.md").read_text()
    assert "took more than 0.01 s" in page and "finds no CUDA device" in page


def test_an_error_is_kept_with_its_words_and_the_rest_goes_on(gpu: Any, tmp_path: Path) -> None:
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


# -- the page ----------------------------------------------------------------------------------------


def test_the_page_has_every_figure_and_is_no_result(gpu: Any, stage: Stage) -> None:
    from gpu_stages.table import is_result, page

    names = ("kernels", "one", "shared", "streams", "sampling", "peers")
    found = {name: stage(name) for name in names}
    text = page(found)
    assert text.startswith("# A rehearsal: no results") and not is_result(found)
    for words in (
        "| aggregation by |",
        "| dropout by |",
        "| pipegcn | float32 | sage | 2 | gloo |",
        "| recorded |",
        "| drawn by the |",
        "CUDA graphs need a GPU",
    ):
        assert words in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ours | gcn")}
    assert widths == {7}


def test_what_ran_on_a_gpu_at_full_size_is_a_result(gpu: Any) -> None:
    from gpu_stages.table import is_result

    def stage(small: bool, device: str) -> dict[str, Any]:
        return {"small": small, "about": {"device": device}}

    whole, small, on_cpu = stage(False, "cuda"), stage(True, "cuda"), stage(False, "cpu")
    assert is_result({"kernels": whole, "one": whole})
    assert not any(is_result({"kernels": whole, "one": other}) for other in (small, on_cpu))
    # without a GPU a stage does not get as far as to say where it ran
    assert not is_result({"kernels": {"small": False}}) and not is_result({})


def test_a_rehearsal_writes_no_page_of_the_documentation(gpu: Any, stage: Stage) -> None:
    out = stage("sampling")["out"]
    gpu.table(out)
    assert (out / "gpu.md").exists() and not (BENCHMARKS.parent / "docs" / "gpu.md").exists()


def test_the_list_says_what_is_there(gpu: Any) -> None:
    from gpu_stages.wheels import lines

    text = "\n".join(lines())
    assert f"torch {torch.__version__}" in text and "simpy" in text
