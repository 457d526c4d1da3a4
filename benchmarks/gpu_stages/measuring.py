"""`gnnplan measure` with one rank on the card: constants, their sources and ranges."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from gpu_stages.record import Record, Row, Setting

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, gnnplan
if sys.argv[3]:
    import sitecustomize
    sitecustomize.shrink(setattr)
gnnplan.measure(1, seconds=float(sys.argv[2]), output=sys.argv[1])
"""


def run(setting: Setting, record: Record) -> None:
    _ = setting.torch_device
    record.attempt("measure", lambda: _measured(setting))


def _measured(setting: Setting) -> list[Row]:
    out = setting.out / "cluster.yaml"
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "GNNPLAN_CACHE": folder, "PYTHONPATH": _path(folder, setting.small)}
        if setting.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        seconds, small = ("0.01", "small") if setting.small else ("0.2", "")
        command = [sys.executable, "-c", PROGRAM, str(out), seconds, small]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    cluster = yaml.safe_load(out.read_text("utf-8"))
    return [
        {
            "constant": name,
            "value": value,
            "range": cluster["ranges"].get(name) or cluster["ranges"].get(name.split(".")[0]),
            "from": cluster["provenance"].get(name, "assumed"),
        }
        for name, value in _constants(cluster)
    ]


def _path(folder: str, small: bool) -> str:
    """Where processes find gnnplan; small: and what shrinks its graphs to a tenth, as in tests."""
    if small:
        shutil.copy(ROOT / "tests" / "executor" / "a_tenth.py", Path(folder) / "sitecustomize.py")
    return os.pathsep.join([folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _constants(cluster: dict[str, Any]) -> list[tuple[str, Any]]:
    device = [
        (f"device.{name}", value)
        for name, value in cluster["device"].items()
        if f"device.{name}" in cluster["provenance"]
    ]
    return [*device, ("host_rates", cluster["host_rates"])]
