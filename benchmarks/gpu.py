"""Runs everything that needs a GPU, in stages, and writes the results as a page.

    python benchmarks/gpu.py all --out DIR [--minutes 9] [--stages STAGE[:SECONDS[:WORDS]..] ..]
    python benchmarks/gpu.py STAGE --out DIR [--only WORDS ..]     one stage, without a limit
    python benchmarks/gpu.py table DIR               write DIR/gpu.md for stages that ran alone
    python benchmarks/gpu.py predict                 predict the rows of docs/gpu.md again
    python benchmarks/gpu.py --list                  installed and missing packages

Stages, each in a process of its own:

    kernels     aggregation at the size of ogbn-products, dropout, products and attention, compared
                with the card's bandwidth and peak, which are measured in the same run
    peers       epochs compared with PyG's and DGL's, on the full graph and on mini-batches
    one         plan, train and validate on one rank, for every strategy that one rank can run
    tests       all tests that are marked `gpu`
    measure     `gnnplan measure`, with its ranges
    shared      as `one`, on two and four ranks that share the card (Gloo; NCCL if there are
                enough GPUs), and the share of exchanges that overlaps with computation
    streams     cost of recording spans, launches and waits of a step, a step as a CUDA graph
    further     as `one`, for rows in bfloat16 and in few bits, columns, tiles, split layers, and
                rows in the server's memory
    modules     as `one`, for modules as PyG's users write them, each compared with the module alone
    sampling    neighbours drawn by the GPU and by the host
    references  the trainings of one, shared and further on the CPU; losses must be equal

`all` runs stages in order, those that tell most first, for at most its minutes; `references` runs
at the same time. A stage is killed after its seconds; with WORDS it runs only cases whose names
contain one of them. `--stages more` runs what the default leaves out. After every stage all results
go into DIR/gpu.tar.gz (JSON, logs, traces) and DIR/gpu.md; a second command adds to both.

With --device cpu --small it is a rehearsal without a GPU. It uses the installed torch;
docs/how-to/run-on-a-gpu.md says how to install missing packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from commands import words
from gpu_stages.record import TRAINED, Record, Setting, about, write_json

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "tests": "marked.run",
    "kernels": "kernels.run",
    "measure": "measuring.run",
    "one": "training.run",
    "shared": "training.run",
    "further": "training.run",
    "modules": "training.run",
    "streams": "streams.run",
    "sampling": "sampling.run",
    "peers": "peers.run",
    "references": "training.run_references",
}
# stages with their seconds; those that tell most come first
FIRST = "kernels:80 peers:80 measure:50 one:45 modules:70 tests:75 shared:60 streams:30 further:35"
MORE = "further:70 modules:50 shared:60 sampling:20 peers:30:batches"
# time reserved for writing the page; least time left at which a stage still begins [s]
CLOSING_S, LEAST_S = 8.0, 15.0
MOST_PACKED = 15_000_000  # largest archive [B]


def run(stage: str, setting: Setting) -> dict[str, object]:
    """Run a stage in this process, and return its document."""
    record = Record(setting, stage)
    try:
        record.note(about=about(setting))
        module, function = STAGES[stage].split(".")
        getattr(import_module(f"gpu_stages.{module}"), function)(setting, record)
    except Exception as error:
        record.fail(stage, error)
    return record.end()


def run_all(setting: Setting, out: Path, stages: Sequence[str], seconds: float) -> None:
    """Run stages in processes of their own, and collect their results in `out`."""
    end = time.monotonic() + seconds - CLOSING_S
    compared = [f"{each.split(':')[0]}: " for each in stages if each.startswith(TRAINED)]
    beside = _start(setting, "references", compared) if compared else None
    try:
        for each in stages:
            stage, limit_s, *only = each.split(":") if ":" in each else (each, "inf")
            begin = time.monotonic()
            if end - begin < LEAST_S:
                _say(out, f"{stage:<10} no time is left for it")
                continue
            process = _start(setting, stage, only)
            _wait(setting, stage, process, min(float(limit_s), end - begin))
            _keep(setting, out)
            _say(out, f"{stage:<10} {time.monotonic() - begin:6.1f} s  {_told(setting, stage)}")
    finally:
        if beside is not None:
            _wait(setting, "references", beside, max(end - time.monotonic(), 0.0))
    _keep(setting, out)


def _say(out: Path, words: str) -> None:
    print(words, flush=True)
    with (out / "gpu.log").open("a") as log:
        print(words, file=log)


def _start(setting: Setting, stage: str, only: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, stage, "--out", str(setting.out)]
    command += ["--device", setting.device, *(["--small"] if setting.small else [])]
    command += ["--only", *only] if only else []
    Record(setting, stage)  # in case the process dies before it writes a record
    with (setting.out / f"{stage}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _wait(setting: Setting, stage: str, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a stage and kill its remaining processes; record an end that the stage did not."""
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with suppress(ProcessLookupError):  # the group includes the stage's ranks
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    path = setting.out / f"{stage}.json"
    document = json.loads(path.read_text("utf-8"))
    what = document["under_way"] or stage
    if code is None:
        document["left_out"].append({"what": f"{what} and on", "why": f"{limit_s:.3g} s were over"})
    elif not document["ended"]:
        error = f"its process ended with exit code {code}; see {stage}.log"
        document["failed"].append({"what": what, "error": error, "trace": ""})
    write_json(path, document)


def _keep(setting: Setting, out: Path) -> None:
    """Write the page and an archive of all files, the smallest first, into the folder."""
    table(setting.out)
    shutil.copy(setting.out / "gpu.md", out / "gpu.md")
    files = [path for path in setting.out.rglob("*") if path.is_file()]
    whole, part = out / "gpu.tar.gz", out / ".gpu.tar.gz"
    with part.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for path in sorted(files, key=lambda path: path.stat().st_size):
            if raw.tell() + path.stat().st_size < MOST_PACKED:
                tar.add(path, path.relative_to(setting.out))
    part.replace(whole)


def _told(setting: Setting, stage: str) -> str:
    """Return a stage's numbers of rows, failures and omissions, in a line."""
    document = json.loads((setting.out / f"{stage}.json").read_text("utf-8"))
    counts = {name: len(document[name]) for name in ("rows", "failed", "left_out")}
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def table(out: Path) -> str:
    """Write the page, and return its most important figures."""
    from gpu_stages.table import digest, documents, page

    found = documents(out)
    if not found:
        sys.exit(f"{out} has no document of a stage; run one into it with --out")
    (out / "gpu.md").write_text(page(found), "utf-8")
    return digest(found)


def main() -> None:
    if "--list" in words(__doc__):
        from gpu_stages.wheels import lines

        print("\n".join(lines()))
        return
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("what", choices=["all", "table", "predict", *STAGES])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--stages", nargs="*", default=FIRST.split())
    parser.add_argument("--only", nargs="*", default=())
    given = parser.parse_args()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # gnnplan need not be installed
    sys.path.insert(1, str(ROOT))
    out = (given.folder or given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    setting = Setting(out, given.device, given.small, tuple(given.only))
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if given.what == "table":
        print(table(out))
    elif given.what == "predict":
        print(import_module("gpu_stages.predicted").page())
    elif given.what != "all":
        sys.exit(bool(run(given.what, setting)["failed"]))
    else:
        stages = MORE.split() if given.stages == ["more"] else given.stages
        if unknown := {each.split(":")[0] for each in stages} - set(STAGES):
            parser.error(f"no stages: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
        with tempfile.TemporaryDirectory() as folder:
            if (earlier := out / "gpu.tar.gz").exists():
                with tarfile.open(earlier) as tar:
                    tar.extractall(folder, filter="data")
            setting = replace(setting, out=Path(folder))
            run_all(setting, out, stages, 60 * given.minutes)
            print(table(setting.out))


if __name__ == "__main__":
    main()
