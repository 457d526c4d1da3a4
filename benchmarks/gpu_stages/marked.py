"""All tests that are marked `gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from gpu_stages.record import TIME_S, Record, Row, Setting

ROOT = Path(__file__).resolve().parents[2]


def run(setting: Setting, record: Record) -> None:
    _ = setting.torch_device
    record.attempt("tests marked gpu", lambda: _tested(setting, record))


def _tested(setting: Setting, record: Record) -> Row:
    files = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text("utf-8")
    ]
    report = (setting.out / "tests.xml").resolve()
    command = [sys.executable, "-m", "pytest", *map(str, files), "-m", "gpu", "-q"]
    # a warning of another torch is no failure here
    command += ["-W", "default", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}"]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    with (setting.out / "tests.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            code = process.wait(TIME_S)
        except subprocess.TimeoutExpired as error:
            process.terminate()
            process.wait()
            raise RuntimeError(f"pytest took more than {TIME_S:g} s; see tests.txt") from error
    if not report.exists():
        words = (setting.out / "tests.txt").read_text()[-1500:]
        raise RuntimeError(f"pytest left no report (exit code {code}): {words}")
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [each for each in case if each.tag in ("failure", "error")]
        if bad:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            record.fail(name, RuntimeError((bad[0].get("message") or bad[0].text or "")[:1500]))
        elif any(each.tag == "skipped" for each in case):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return {"files": len(files), **counts, "exit_code": code}
