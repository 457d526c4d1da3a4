"""Tries everything that only a GPU can show, and writes what it finds.

    python benchmarks/gpu.py all --out DIR           every stage, one after the other (make gpu)
    python benchmarks/gpu.py STAGE --out DIR         one of them
    python benchmarks/gpu.py all --out DIR --device cpu --small    a rehearsal, without a GPU
    python benchmarks/gpu.py table DIR               DIR/gpu.md; of results docs/gpu.md too
    python benchmarks/gpu.py --list                  packages that this Python has, and lacks

Stages, of eight minutes at most, each in a process of its own:

    tests      all tests that are marked `gpu`
    kernels    aggregation (ours, torch.sparse, DGL, PyG), products, dropout, attention, against
               the card's bandwidth and peak, which are measured in the same run
    measure    `gnnplan measure`, with its ranges
    one        plan, train and validate on one rank, for every strategy that one rank can run;
               losses beside the CPU's
    shared     the same on two and four ranks that share the card (Gloo; NCCL where there are
               enough GPUs), and how much of exchanges computation hides
    further    the same of rows in bfloat16 and in few bits, columns, tiles, split layers, and rows
               in the server's memory
    streams    what recording spans costs, launches and waits of a step, a step as a CUDA graph
    sampling   neighbours drawn by the GPU and by the host
    peers      the full-batch epoch beside PyG's and DGL's

A stage writes DIR/STAGE.json after every row: rows, what failed with its error, and what was left
out and why. A stage that fails or hangs stops no other. Traces lie beside them. It uses the torch
that is there; docs/how-to/run-on-a-gpu.md says how to bring what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from commands import words
from gpu_stages.record import LIMIT_S, Record, Setting, about, write_json

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "tests": "marked.run",
    "kernels": "kernels.run",
    "measure": "measuring.run",
    "one": "training.run_one",
    "shared": "training.run_shared",
    "further": "training.run_further",
    "streams": "streams.run",
    "sampling": "sampling.run",
    "peers": "peers.run",
}


def run(stage: str, setting: Setting) -> dict[str, object]:
    """Run a stage in this process -> its document."""
    record = Record(setting, stage)
    try:
        record.note(about=about(setting))
        module, function = STAGES[stage].split(".")
        getattr(import_module(f"gpu_stages.{module}"), function)(setting, record)
    except Exception as error:
        record.fail(stage, error)
    return record.end()


def run_all(setting: Setting, stages: list[str], limit_s: float = LIMIT_S) -> int:
    """Run stages in processes of their own, and write the page -> how many failed in part."""
    for stage in stages:
        command = [sys.executable, __file__, stage, "--out", str(setting.out)]
        command += ["--device", setting.device, *(["--small"] if setting.small else [])]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # its ranks as well
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _close(setting, stage, code, limit_s)
    return table(setting.out)


def _close(setting: Setting, stage: str, code: int | None, limit_s: float) -> None:
    """Note in a stage's document how its process ended, if it has not done so itself."""
    path = setting.out / f"{stage}.json"
    if not path.exists():
        Record(setting, stage)
    document = json.loads(path.read_text("utf-8"))
    if not document["ended"]:
        how = f"took more than {limit_s:g} s" if code is None else f"ended with exit code {code}"
        document["failed"].append({"what": stage, "error": f"its process {how}", "trace": ""})
        write_json(path, document)


def table(out: Path) -> int:
    """Write the page -> how many stages have failed in part."""
    from gpu_stages.table import documents, is_result, page

    found = documents(out)
    if not found:
        sys.exit(
            f"{out} has no document of a stage; run `python benchmarks/gpu.py all --out {out}`"
        )
    pages = [out / "gpu.md", *([ROOT / "docs" / "gpu.md"] if is_result(found) else [])]
    for path in pages:
        path.write_text(page(found), "utf-8")
    for stage, document in found.items():
        counts = {name: len(document[name]) for name in ("rows", "failed", "left_out")}
        told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"{stage:<9} {document['seconds']:6.0f} s  {told}")
    print(f"written to {', '.join(map(str, pages))}")
    return sum(bool(document["failed"]) for document in found.values())


def main() -> None:
    if "--list" in words(__doc__):
        from gpu_stages.wheels import lines

        print("\n".join(lines()))
        return
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("what", choices=["all", "table", *STAGES])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # gnnplan need not be installed
    sys.path.insert(1, str(ROOT))
    setting = Setting((given.folder or given.out).resolve(), given.device, given.small)
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if given.what == "table":
        table(setting.out)
        return
    setting.out.mkdir(parents=True, exist_ok=True)
    if given.what == "all":
        sys.exit(min(run_all(setting, list(STAGES)), 1))
    sys.exit(bool(run(given.what, setting)["failed"]))


if __name__ == "__main__":
    main()
