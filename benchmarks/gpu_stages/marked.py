"""All tests that are marked `gpu`, in this process: a row per test as soon as it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_stages.record import Record, Row, Setting

ROOT = Path(__file__).resolve().parents[2]


def run(setting: Setting, record: Record) -> None:
    _ = setting.torch_device
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text("utf-8")
    ]
    # a warning of another torch is no failure here
    options = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += [f"--rootdir={ROOT}", "--continue-on-collection-errors"]
    code = pytest.main([*files, *options], plugins=[_Noted(record)])
    if not record.rows:  # a package of tests/conftest.py is missing, for instance
        raise RuntimeError(f"pytest ran no test: {pytest.ExitCode(code).name}")


class _Noted:
    """A plugin that keeps how each test has ended."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Those of several processes come last: they take longest, and time may run out."""
        items.sort(key=lambda item: "run_ranks" in getattr(item, "fixturenames", ()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        row: Row = {"outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            row["wrong"] = [report.longreprtext[-1500:]]
        self.record.attempt(report.nodeid.rpartition("/")[2], lambda: row)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            wrong = [report.longreprtext[-1500:]]
            self.record.attempt(report.nodeid, lambda: {"outcome": "failed", "wrong": wrong})
