"""Inputs that once fell: each is a call of gnnplan, with the files that it reads made here.

`CASES` is a table of kinds. tests/test_corpus.py runs every one as a process of its own and holds
it to the law of tests/test_fuzz.py: an answer or a line that says what is wrong, in little time
and memory. `python tests/corpus.py` prints the table with counts, seconds and memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

GRAPH = "synthetic:community?vertices=60&edges=240&features=4&classes=3"
SECONDS = 10.0  # of work that a call may take
PATIENCE = 30.0  # [s] with a busy machine
MEMORY = 1e9  # [B] that it may hold
SPARSE = 5 * 10**8  # [B] of files that are all zeros, or all newlines
Make = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """A call of gnnplan. `{d}` in an argument is the folder in which `make` has put its files."""

    kind: str
    name: str
    arguments: tuple[str, ...]
    make: Make = lambda folder: None
    env: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (2,)
    starts: bool = False  # a process that starts anew
    leaves: tuple[str, ...] = ()  # what must not be there afterwards


@dataclass(frozen=True)
class End:
    code: int
    seconds: float
    peak_bytes: int
    stdout: str
    stderr: str

    @property
    def fell(self) -> str:
        """What the law says against it; '': nothing."""
        if "Traceback (most recent call last)" in self.stderr + self.stdout:
            return "traceback"
        if self.peak_bytes > MEMORY:
            return "memory"
        if self.seconds > SECONDS:
            return "hang"
        return f"ended by signal {-self.code}" if self.code < 0 else ""


def call(case: Case, folder: Path) -> End:
    """Run the case in `folder`, which is empty; killed after SECONDS of work.

    A fork of this process runs it, which has imported what calls need: a start takes a second.
    What Python and torch read of the environment as they start needs a start.
    """
    case.make(folder)
    arguments = [argument.replace("{d}", str(folder)) for argument in case.arguments]
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _be(case, arguments, folder)
    started = time.monotonic()
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() - started > PATIENCE or _resident(pid) > 2 * MEMORY:
            os.killpg(pid, signal.SIGKILL)
            ended = os.wait4(pid, 0)
            break
        time.sleep(0.01)
    _, status, used = ended
    code = os.waitstatus_to_exitcode(status)
    # work counts: a busy machine is nobody's fault
    seconds = used.ru_utime + used.ru_stime
    return End(
        code,
        max(seconds, SECONDS + 1) if code in (-signal.SIGKILL, -signal.SIGXCPU) else seconds,
        used.ru_maxrss * 1024,
        (folder / ".stdout").read_text(errors="replace"),
        (folder / ".stderr").read_text(errors="replace"),
    )


def _resident(pid: int) -> int:
    """Memory that a process holds now [B]; 0 where nobody says."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _be(case: Case, arguments: list[str], folder: Path) -> NoReturn:
    """Become the call."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
        for number, name in ((0, os.devnull), (1, ".stdout"), (2, ".stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.update(case.env)
        sys.argv = ["gnnplan", *arguments]
        if case.starts:
            program = [sys.executable, "-m", *sys.argv]
            os.execv(program[0], [os.fsencode(word) for word in program])
        from gnnplan import cli

        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- files -----------------------------------------------------------------------------------------

_plan: list[str] = []


def plan(folder: Path, **options: Any) -> dict[str, Any]:
    """A small plan in `folder`, as a document."""
    import gnnplan

    if not _plan or options:
        made = gnnplan.plan(
            GRAPH, "local", {"model": "gcn", "layers": 2, "hidden": 8, "epochs": 2}, **options
        )
        if options:
            return made.document
        _plan.append(json.dumps(made.document))
    return json.loads(_plan[0])


def spoilt_plan(change: Callable[[dict[str, Any]], Any]) -> Make:
    """plan.json, with the document changed."""

    def make(folder: Path) -> None:
        document = plan(folder)
        change(document)
        (folder / "plan.json").write_text(json.dumps(document))

    return make


def set_at(value: Any, *at: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *parents, last = at
        target: Any = document
        for name in parents:
            target = target[name]
        target[last] = value

    return change


def good_plan(folder: Path) -> None:
    (folder / "plan.json").write_text(json.dumps(plan(folder)))


def text(name: str, content: str | bytes) -> Make:
    def make(folder: Path) -> None:
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(raw)

    return make


def pipe(name: str) -> Make:
    return lambda folder: os.mkfifo(folder / name)


def nccl(size: str = "1024", took: str = "10.0", rows: int = 4) -> str:
    row = f'{{"size": {size}, "out_of_place": {{"time": {took}}}}}'
    return (
        '{"args": ["all_reduce_perf"], "config": {"devices": [{"hostname": "a"},'
        f' {{"hostname": "a"}}]}}, "results": [{", ".join([row] * rows)}]}}'
    )


def topo(gpus: int, nics: int = 0, way: str = "NV12") -> str:
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t" + "\t".join(names)]
    for i, name in enumerate(names):
        lines.append(f"{name}\t" + "\t".join("X" if i == j else way for j in range(len(names))))
    return "\n".join(lines) + "\n"


def run_folder(folder: Path) -> Path:
    """The folder of a finished run, that was never trained."""
    run = folder / "run"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(plan(folder)))
    (run / "options.json").write_text(json.dumps({"epochs": 3}))
    row = {"loss": 1.0, "epoch_s": 0.1, "train_accuracy": 0.5, "bytes": 100}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"epoch": epoch + 1, **row}) + "\n" for epoch in range(3))
    )
    for rank in range(2):
        (run / f"rank{rank}.json").write_text(
            json.dumps(
                {
                    "rank": rank,
                    "backend": "gloo",
                    "bytes": {"halo": 100},
                    "setup_bytes": {"x": 1},
                    "peak_rss_bytes": 10**8,
                    "peak_bytes": None,
                }
            )
        )
        (run / f"trace.rank{rank}.json").write_text(
            json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": []})
        )
    return run


def long_file(name: str, line: bytes, size: int) -> Make:
    """A run whose file `name` repeats a line up to so many bytes."""

    def make(folder: Path) -> None:
        run = run_folder(folder)
        block = line * (2**20 // len(line))
        with open(run / name, "wb") as stream:
            for _ in range(size // len(block) + 1):
                stream.write(block)

    return make


# -- cases -----------------------------------------------------------------------------------------


def _plans() -> Iterator[Case]:
    for field_, at in {
        "predicted": ("best", "predicted"),
        "memory": ("best", "predicted", "memory"),
        "epoch_s": ("best", "predicted", "epoch_s"),
        "memory's part": ("best", "predicted", "memory", "runtime"),
        "by_op": ("best", "predicted", "by_op"),
        "bytes": ("best", "predicted", "bytes"),
        "alternatives": ("alternatives",),
        "summary": ("summary",),
        "explanation": ("explanation",),
        "notes": ("graph", "notes"),
        "alternative's strategy": ("alternatives", 0, "strategy"),
        "alternative": ("alternatives", 0),
    }.items():
        for value in ([1], "x", {"a": "b"}):
            make = spoilt_plan(set_at(value, *at))
            said = f"{field_} is {json.dumps(value)}"
            common = {"make": make, "codes": (0, 2)}
            yield Case(
                "plan.json",
                f"run, {said}",
                ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/out"),
                leaves=("out",),
                **common,
            )
            yield Case(
                "plan.json",
                f"report, {said}",
                ("report", "{d}/plan.json", "-o", "{d}/r.html"),
                **common,
            )
            yield Case("plan.json", f"simulate, {said}", ("simulate", "{d}/plan.json"), **common)
            yield Case(
                "plan.json",
                f"run NEXT, {said}",
                ("run", "{d}/plan.json", "--strategy", "NEXT", "--epochs", "1", "--out", "{d}/out"),
                **common,
            )
            yield Case(
                "plan.json", f"tune, {said}", ("tune", "{d}/plan.json", "--epochs", "2"), **common
            )


READ = ("measure", "--cluster", "dgx_a100")


def _readings() -> Iterator[Case]:
    for name, content in {
        "Infinity seconds": nccl(took="Infinity"),
        "1e400 seconds": nccl(took="1e400"),
        "NaN seconds": nccl(took="NaN"),
        "size Infinity": nccl(size="Infinity"),
        "size 1e400": nccl(size="1e400"),
        "size of 5,000 digits": nccl(size="9" * 5000),
        "size of 400 digits": nccl(size="9" * 400),
        "time of 400 digits": nccl(took="9" * 400),
        "size of 200 digits": nccl(size="9" * 200),
        "no seconds": nccl(took="0"),
        "1e-320 seconds": nccl(took="1e-320"),
        "1e300 seconds": nccl(took="1e300"),
        "size below 0": nccl(size="-5"),
        "size true": nccl(size="true"),
        "time true": nccl(took="true"),
        "time a list": nccl(took="[1]"),
        "size a text": nccl(size='"1024"'),
        "a million rows": nccl(rows=100_000),
        "nested": "[" * 100_000,
        "no object": "3",
    }.items():
        codes = (0,) if name == "size a text" else (2,)  # older nccl-tests write it so
        yield Case(
            "nccl-tests",
            name,
            (*READ, "--nccl-tests", "{d}/t.json"),
            text("t.json", content),
            codes=codes,
        )
    for option in ("--nccl-tests", "--topology"):
        yield Case("devices and pipes", f"{option} /dev/zero", (*READ, option, "/dev/zero"))
        yield Case("devices and pipes", f"{option} a pipe", (*READ, option, "{d}/p"), pipe("p"))
        yield Case("devices and pipes", f"{option} a folder", (*READ, option, "{d}"))
        yield Case("devices and pipes", f"{option} a name with NUL", ("measure", option, "x"))
    for gpus, nics in ((1500, 0), (2000, 0), (512, 16), (4096, 0), (64, 64)):
        yield Case(
            "topology",
            f"{gpus} GPUs, {nics} NICs",
            (*READ, "--topology", "{d}/t.txt"),
            lambda folder, gpus=gpus, nics=nics: (folder / "t.txt").write_text(topo(gpus, nics)),
            codes=(0, 2),
        )
        yield Case(
            "topology",
            f"{gpus} GPUs, {nics} NICs by PCIe",
            (*READ, "--topology", "{d}/t.txt"),
            lambda folder, gpus=gpus, nics=nics: (folder / "t.txt").write_text(
                topo(gpus, nics, "SYS")
            ),
            codes=(0, 2),
        )
    yield Case(
        "topology",
        "NV with 5,000 digits",
        (*READ, "--topology", "{d}/t.txt"),
        text("t.txt", topo(4, 0, "NV" + "9" * 5000)),
        codes=(0, 2),
    )
    yield Case(
        "topology",
        "GPUs twice",
        (*READ, "--topology", "{d}/t.txt"),
        text("t.txt", "GPU0 GPU0\nGPU0 X NV1\n"),
    )


RUN = ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/out")


def _options() -> Iterator[Case]:
    for value in ("inf", "1e300", "nan", "1e10"):
        yield Case(
            "options", f"--timeout {value}", (*RUN, "--timeout", value), good_plan, leaves=("out",)
        )
    for value in (
        "1e400Mbit/s",
        "infMbit/s",
        "1e300Mbit/s",
        "0Mbit/s",
        "-1Mbit/s",
        "1.2.3Mbit/s",
        "....Mbit/s",
        "٣Mbit/s",
        "1e99999999999Mbit/s",
    ):
        yield Case(
            "options",
            f"run --emulate {value}",
            (*RUN, "--emulate", value),
            good_plan,
            leaves=("out",),
        )
        yield Case(
            "options",
            f"measure --emulate {value}",
            ("measure", "--servers", "2", "--emulate", value),
        )
    for value in ("inf", "nan", "1e400", "-1"):
        yield Case(
            "options",
            f"--jitter {value}",
            ("simulate", "{d}/plan.json", "--jitter", value),
            good_plan,
        )
        yield Case(
            "options",
            f"--straggler 0={value}",
            ("simulate", "{d}/plan.json", "--straggler", f"0={value}"),
            good_plan,
        )
        yield Case("options", f"--seconds {value}", ("measure", "--seconds", value))
        yield Case("options", f"--dropout {value}", ("plan", "--graph", GRAPH, "--dropout", value))
        yield Case(
            "options",
            f"--target-accuracy {value}",
            ("plan", "--graph", GRAPH, "--target-accuracy", value),
        )
    for option, value in (
        ("--epochs", "1000000000000000000"),
        ("--eval-every", "1000000000000000000000"),
        ("--checkpoint-every", "1000000000000000000000"),
        ("--restarts", "1001"),
    ):
        arguments = ("run", "{d}/plan.json", "--out", "{d}/out", option, value)
        yield Case("options", f"run {option} {value}", arguments, good_plan, leaves=("out",))
    for option in ("--layers", "--batch", "--ranks"):
        for value in ("٣", "1_0", "9" * 5000, "1" + "0" * 30, "true", "-1"):
            yield Case(
                "options",
                f"plan {option} {value:.20}",
                ("plan", "--graph", GRAPH, option, value),
                codes=(2,),
            )
    for setting in (
        "servers=true",
        "servers=٣",
        "layers=٣",
        "layers=true",
        "seed=٣",
        "epochs=true",
        "inter_node.bandwidth=٣GB/s",
        "inter_node.bandwidth=1e400GB/s",
        "device.memory=inf",
        "device.memory=nan",
        "lr=nan",
        "lr=٠.١",
        "dropout=٠.١",
        "fanout=٣,٣",
        "batch=" + "9" * 5000,
    ):
        yield Case("options", f"--set {setting:.30}", ("plan", "--graph", GRAPH, "--set", setting))
    for value in ("٢,٤", "1_0", "2,", "9" * 5000, "1000000000", "0", "-1"):
        yield Case("options", f"profile --parts {value:.20}", ("profile", GRAPH, "--parts", value))
    for value in ("1..٦٤", "1..1e9", "1..1000000000000", "٢", "1_0", "1.." + "9" * 5000):
        yield Case(
            "options",
            f"--scale {value:.20}",
            ("plan", "--graph", GRAPH, "--cluster", "dgx_a100", "--scale", value),
        )
    for value in ("٠=2.0", "0=٢", "1_0=2", "0=2_0"):
        yield Case(
            "options",
            f"--straggler {value}",
            ("simulate", "{d}/plan.json", "--straggler", value),
            good_plan,
        )
    for value in ("servers=٢", "servers=true", "layers=٢", "inter_node.bandwidth=٢GB/s"):
        yield Case(
            "options",
            f"--sweep {value}",
            ("simulate", "{d}/plan.json", "--sweep", value),
            good_plan,
        )
    for value in (
        "gnnpipe(stages=True,chunks=4)",
        "gnnpipe(stages=٢,chunks=٤)",
        "bns(p=True)",
    ):
        yield Case(
            "options",
            f"--strategy {value}",
            ("plan", "--graph", GRAPH, "--set", "gpus_per_server=2", "--strategy", value),
        )
    for query in (
        "vertices=٦٠&edges=240&features=4&classes=3",
        "vertices=6_0&edges=240&features=4&classes=3",
        "vertices=60&edges=240&features=4&classes=3&mixing=nan",
        "vertices=60&edges=240&features=4&classes=3&noise=inf",
        "vertices=60&edges=240&features=4&classes=3&noise=٠.١",
    ):
        yield Case(
            "options",
            f"graph {query[:30]}{query[-10:]}",
            ("plan", "--graph", f"synthetic:community?{query}"),
        )


def _documents() -> Iterator[Case]:
    cluster = "name: c\nservers: {}\ngpus_per_server: {}\ndevice: {{memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}}\nintra_node: {{bandwidth: 10GB/s}}\ninter_node: {{bandwidth: 10GB/s}}\n"
    for value in ("true", "1.0", "'٢'", "0x2", "'2'", "1e1", "yes", "2:3"):
        yield Case(
            "YAML",
            f"servers: {value}",
            ("plan", "--graph", GRAPH, "--cluster", "{d}/c.yaml"),
            text("c.yaml", cluster.format(value, 1)),
            codes=(0, 2) if value in ("1_0", "0x2", "'2'", "1.0", "2:3") else (2,),
        )
    for name in ("layers", "hidden", "batch", "seed", "epochs", "heads", "dropout", "lr"):
        for value in ("true", "'٢'"):
            yield Case(
                "YAML",
                f"{name}: {value}",
                ("plan", "--graph", GRAPH, "--workload", "{d}/w.yaml"),
                text("w.yaml", f"{name}: {value}\n"),
            )
    for name in ("bandwidth", "latency", "efficiency"):
        for value in ("true", "'٢GB/s'", "[]", "{{}}"):
            yield Case(
                "YAML",
                f"inter_node.{name}: {value}",
                ("plan", "--graph", GRAPH, "--cluster", "{d}/c.yaml"),
                text(
                    "c.yaml",
                    f"name: c\nservers: 2\ngpus_per_server: 1\ndevice: {{memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}}\nintra_node: {{bandwidth: 10GB/s}}\ninter_node: {{bandwidth: 10GB/s, {name}: {value}}}\n"
                    if name != "bandwidth"
                    else f"name: c\nservers: 2\ngpus_per_server: 1\ndevice: {{memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}}\nintra_node: {{bandwidth: 10GB/s}}\ninter_node: {{bandwidth: {value}}}\n",
                ),
            )
    yield Case(
        "YAML",
        "price: true",
        ("plan", "--graph", GRAPH, "--cluster", "{d}/c.yaml"),
        text(
            "c.yaml",
            "name: c\nprice: true\ngpus_per_server: 1\ndevice: {memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}\nintra_node: {bandwidth: 10GB/s}\n",
        ),
    )
    for at in (
        ("cluster", "servers"),
        ("workload", "layers"),
        ("workload", "seed"),
        ("cluster", "gpus_per_server"),
        ("workload", "dropout"),
        ("workload", "epochs"),
    ):
        yield Case(
            "plan.json",
            f"{'.'.join(at)} is true",
            ("simulate", "{d}/plan.json"),
            spoilt_plan(set_at(True, *at)),
        )
    yield Case(
        "plan.json",
        "10^18 epochs",
        ("run", "{d}/plan.json", "--out", "{d}/out"),
        spoilt_plan(set_at(10**18, "workload", "epochs")),
        leaves=("out",),
    )


LONG = "n" * 300


def _names() -> Iterator[Case]:
    yield Case(
        "names",
        "run --out of 300",
        ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/" + LONG),
        good_plan,
    )
    yield Case(
        "names",
        "run --out in 300",
        ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/" + LONG + "/x"),
        good_plan,
    )
    yield Case("names", "run --resume of 300", ("run", "--resume", "{d}/" + LONG))
    yield Case(
        "names",
        "run --tensorboard of 300",
        (*RUN, "--tensorboard", "{d}/" + LONG),
        good_plan,
        leaves=("out",),
    )
    yield Case("names", "plan -o of 300", ("plan", "--graph", GRAPH, "-o", "{d}/" + LONG))
    yield Case("names", "plan -o in 300", ("plan", "--graph", GRAPH, "-o", "{d}/" + LONG + "/x"))
    yield Case(
        "names",
        "plan -o of 250",
        ("plan", "--graph", GRAPH, "-o", "{d}/" + LONG[:250]),
        codes=(0, 2),
    )
    yield Case(
        "names", "plan --report of 300", ("plan", "--graph", GRAPH, "--report", "{d}/" + LONG)
    )
    yield Case(
        "names",
        "plan --evidence of 300",
        ("plan", "--graph", GRAPH, "--target-accuracy", "0.5", "--evidence", "{d}/" + LONG),
    )
    yield Case("names", "plan --cluster of 300", ("plan", "--graph", GRAPH, "--cluster", LONG))
    yield Case("names", "plan --workload of 300", ("plan", "--graph", GRAPH, "--workload", LONG))
    yield Case("names", "plan --graph of 5,000", ("plan", "--graph", "x" * 5000))
    yield Case(
        "names", "plan --model of 300", ("plan", "--graph", GRAPH, "--model", LONG + ".py:X")
    )
    yield Case("names", "simulate of 300", ("simulate", LONG))
    yield Case(
        "names",
        "simulate --trace of 300",
        ("simulate", "{d}/plan.json", "--trace", "{d}/" + LONG),
        good_plan,
    )
    yield Case(
        "names",
        "simulate --csv of 300",
        ("simulate", "{d}/plan.json", "--sweep", "servers=1", "--csv", "{d}/" + LONG),
        good_plan,
    )
    yield Case("names", "validate of 300", ("validate", LONG))
    yield Case("names", "trace of 300", ("trace", LONG, "-o", "{d}/x.json"))
    yield Case(
        "names", "report -o of 300", ("report", "{d}/plan.json", "-o", "{d}/" + LONG), good_plan
    )
    yield Case(
        "names",
        "emit -o of 300",
        ("emit", "{d}/plan.json", "--for", "slurm", "-o", "{d}/" + LONG),
        good_plan,
    )
    yield Case(
        "names",
        "emit --for pyg -o of 300",
        ("emit", "{d}/plan.json", "--for", "pyg", "-o", "{d}/" + LONG),
        good_plan,
    )
    yield Case(
        "names",
        "measure -o of 300",
        (*READ, "--topology", "{d}/t", "-o", "{d}/" + LONG),
        text("t", topo(8)),
    )
    yield Case("names", "convert to 300", ("convert", GRAPH, "{d}/" + LONG))
    yield Case("names", "convert from 300", ("convert", LONG, "{d}/x"))
    yield Case("names", "--features of 300", ("plan", "--graph", GRAPH, "--features", LONG))
    yield Case(
        "names",
        "tune --out of 300",
        ("tune", "{d}/plan.json", "--epochs", "2", "--out", "{d}/" + LONG),
        good_plan,
    )
    for at in (("graph", "source"), ("graph", "hash"), ("cluster", "name"), ("workload", "module")):
        yield Case(
            "names",
            f"{'.'.join(at)} with NUL",
            ("simulate", "{d}/plan.json"),
            spoilt_plan(set_at("a\0b", *at)),
        )
    yield Case(
        "names",
        "cluster.yaml's name with NUL",
        ("plan", "--graph", GRAPH, "--cluster", "{d}/c.yaml"),
        text(
            "c.yaml",
            'name: "a\\0b"\ngpus_per_server: 1\ndevice: {memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}\nintra_node: {bandwidth: 10GB/s}\n',
        ),
    )
    yield Case(
        "names",
        "cluster.yaml's name with an escape",
        ("plan", "--graph", GRAPH, "--cluster", "{d}/c.yaml"),
        text(
            "c.yaml",
            'name: "a\\e[2J"\ngpus_per_server: 1\ndevice: {memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}\nintra_node: {bandwidth: 10GB/s}\n',
        ),
        codes=(0, 2),
    )
    yield Case(
        "names",
        "statistics' name with NUL",
        ("plan", "--graph", "{d}/s.yaml"),
        text("s.yaml", 'name: "a\\0b"\nvertices: 100\nedges: 200\nfeatures: 3\nclasses: 2\n'),
    )
    yield Case(
        "names",
        "model with NUL",
        ("plan", "--graph", GRAPH, "--workload", "{d}/w.yaml"),
        text("w.yaml", 'model: "a\\0b.py:X"\n'),
    )


def _environment() -> Iterator[Case]:
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    one = rank | {"WORLD_SIZE": "1"}
    for name, env in {
        "WORLD_SIZE without RANK": {"WORLD_SIZE": "2"},
        "RANK without WORLD_SIZE": {"RANK": "0"},
        "RANK of letters": rank | {"RANK": "zero"},
        "RANK of other digits": rank | {"RANK": "٠"},
        "WORLD_SIZE of letters": rank | {"WORLD_SIZE": "two"},
        "LOCAL_RANK of letters": rank | {"LOCAL_RANK": "x"},
        "LOCAL_WORLD_SIZE of letters": rank | {"LOCAL_WORLD_SIZE": "x"},
        "MASTER_PORT of letters": rank | {"MASTER_PORT": "x"},
        "MASTER_PORT too large": rank | {"MASTER_PORT": "99999"},
        "MASTER_PORT of other digits": rank | {"MASTER_PORT": "٢٩٥١٧"},
        "MASTER_ADDR that does not resolve": rank
        | {"RANK": "1", "MASTER_ADDR": "no.such.host.invalid"},
        "MASTER_ADDR that does not resolve, rank 0": rank | {"MASTER_ADDR": "no.such.host.invalid"},
        "MASTER_ADDR empty": rank | {"MASTER_ADDR": ""},
        "TORCHELASTIC_RESTART_COUNT of letters": rank | {"TORCHELASTIC_RESTART_COUNT": "x"},
        "SLURM_STEP_NUM_TASKS of letters": {"SLURM_STEP_NUM_TASKS": "x"},
        "SLURM_STEP_NUM_TASKS alone": {"SLURM_STEP_NUM_TASKS": "2"},
        "SLURM_JOB_ID of letters": {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_ID": "x",
        },
        "SLURM_PROCID of letters": {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "x",
            "SLURM_LOCALID": "0",
        },
        "SLURM_PROCID beyond": {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "7",
            "SLURM_LOCALID": "0",
        },
        "SLURM_NTASKS_PER_NODE of letters": rank | {"SLURM_NTASKS_PER_NODE": "2(x2)"},
        "SLURM node list that does not resolve": {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": "no[1-2].invalid",
        },
        "GNNPLAN_THREADS of letters": one | {"GNNPLAN_THREADS": "x"},
        "GNNPLAN_THREADS, own ranks": {"GNNPLAN_THREADS": "x"},
        "GROUP_RANK of letters": rank | {"GROUP_RANK": "x"},
        "GLOO_SOCKET_IFNAME": rank | {"GLOO_SOCKET_IFNAME": "nonesuch0"},
    }.items():
        yield Case("environment", name, (*RUN, "--timeout", "2"), good_plan, env, codes=(2, 4))
        if "own ranks" not in name and "NTASKS" not in name and "THREADS" not in name:
            yield Case(
                "environment",
                f"measure, {name}",
                ("measure", "--seconds", "0.01"),
                good_plan,
                env,
                codes=(2, 4),
            )
    for name, value in (
        ("OMP_NUM_THREADS", "abc"),
        ("OMP_NUM_THREADS", "-1"),
        ("TORCH_LOGS", "nonsense"),
        ("TORCH_CPP_LOG_LEVEL", "nonsense"),
        ("TORCH_DISTRIBUTED_DEBUG", "nonsense"),
        ("LOGLEVEL", "nonsense"),
        ("TORCH_LOGS_FORMAT", "%("),
    ):
        for verb in (
            ("plan", "--graph", GRAPH),
            ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/out"),
        ):
            yield Case(
                "environment",
                f"{verb[0]}, {name}={value}",
                verb,
                good_plan,
                {name: value},
                codes=(0, 2),
                starts=True,
            )
    for name in ("GNNPLAN_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        for value in ("/dev/null", "/nonesuch/x", "/" + LONG):
            yield Case(
                "environment",
                f"{name}={value[:20]}",
                ("plan", "--graph", GRAPH + "&seed=7"),
                env={"GNNPLAN_CACHE": "", name: value},
                codes=(0, 2),
            )
    ascii_ = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}

    def named(folder: Path) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        np.savez(
            folder / "größe.npz",
            src=rng.integers(0, 30, 90),
            dst=rng.integers(0, 30, 90),
            x=rng.random((30, 3), np.float32),
            y=np.arange(30) % 3,
        )

    yield Case(
        "terminals",
        "ASCII, größe.npz",
        ("plan", "--graph", "größe.npz"),
        named,
        ascii_,
        codes=(0,),
        starts=True,
    )
    yield Case(
        "terminals",
        "ASCII, größe.npz, --json",
        ("plan", "--graph", "größe.npz", "--json"),
        named,
        ascii_,
        codes=(0,),
        starts=True,
    )
    yield Case(
        "terminals",
        "ASCII, größe.npz, profile",
        ("profile", "größe.npz"),
        named,
        ascii_,
        codes=(0,),
        starts=True,
    )
    yield Case(
        "terminals",
        "ASCII, fehlt: größe.yaml",
        ("plan", "--cluster", "größe.yaml"),
        named,
        ascii_,
        starts=True,
    )
    yield Case(
        "terminals",
        "C locale alone, größe.npz",
        ("plan", "--graph", "größe.npz"),
        named,
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        codes=(0,),
        starts=True,
    )
    yield Case(
        "terminals", "bytes that are no text", ("plan", "--graph", os.fsdecode(b"gr\xf6\xdfe.npz"))
    )
    yield Case(
        "terminals",
        "bytes that are no text, --cluster",
        ("plan", "--cluster", os.fsdecode(b"gr\xf6\xdfe.yaml")),
    )
    yield Case(
        "terminals",
        "bytes that are no text, -o",
        ("plan", "--graph", GRAPH, "-o", "{d}/" + os.fsdecode(b"gr\xf6\xdfe.json")),
        codes=(0, 2),
    )
    yield Case(
        "terminals",
        "bytes that are no text, run --out",
        ("run", "{d}/plan.json", "--epochs", "1", "--out", "{d}/" + os.fsdecode(b"gr\xf6\xdfe")),
        good_plan,
        codes=(0, 2),
    )
    yield Case(
        "terminals",
        "an unknown encoding",
        ("plan", "--graph", GRAPH),
        env={"COLUMNS": "x", "TERM": "nonsense"},
        codes=(0, 2),
    )


def _work() -> Iterator[Case]:
    for mode in ("full", "mini"):
        yield Case(
            "work",
            f"10,000 layers, {mode}",
            ("plan", "--graph", GRAPH, "--layers", "10000", "--mode", mode),
            codes=(2,),
        )
        yield Case(
            "work",
            f"10,000 layers of reddit on dgx_a100, {mode}",
            (
                "plan",
                "--graph",
                "reddit",
                "--cluster",
                "dgx_a100",
                "--layers",
                "10000",
                "--mode",
                mode,
            ),
            codes=(2, 3),
        )
        yield Case(
            "work",
            f"1,001 layers of reddit on dgx_a100, {mode}",
            (
                "plan",
                "--graph",
                "reddit",
                "--cluster",
                "dgx_a100",
                "--layers",
                "1001",
                "--hidden",
                "1",
                "--mode",
                mode,
            ),
            codes=(0, 2, 3),
        )
    for strategy in (
        "gsplit(presample=1000000000)",
        "data_parallel(presample=1000000000)",
        "data_parallel(cache=1000000000)",
        "p3(prefetch=1000000000)",
        "gsplit(presample=100000)",
    ):
        yield Case(
            "work",
            strategy,
            (
                "plan",
                "--graph",
                GRAPH,
                "--mode",
                "mini",
                "--batch",
                "36",
                "--set",
                "gpus_per_server=2",
                "--strategy",
                strategy,
            ),
            codes=(0, 2, 3),
        )
    for strategy in (
        "gnnpipe(stages=2,chunks=1000000000)",
        "granndis(max_hop=1,fanout=10,batches=1000000000)",
        "bns(p=1e-300)",
    ):
        yield Case(
            "work",
            strategy,
            ("plan", "--graph", GRAPH, "--set", "gpus_per_server=2", "--strategy", strategy),
            codes=(0, 2, 3),
        )
    for verb in ("simulate", "run", "report"):
        for query in (
            "vertices=1000000000&edges=1000",
            "vertices=100000000&edges=2000000000",
            "vertices=100000000&edges=10&features=100000",
            "vertices=60&edges=240&features=100000000000",
            "vertices=20000000&edges=100&features=1",
            "vertices=2000000&edges=20000000&features=1",
        ):
            more = ("-o", "{d}/r.html") if verb == "report" else ()
            make = spoilt_plan(set_at(f"synthetic:community?{query}", "graph", "source"))
            yield Case("work", f"{verb} a graph of {query}", (verb, "{d}/plan.json", *more), make)
    yield Case(
        "work",
        "plan of 10^9 vertices",
        ("plan", "--graph", "synthetic:community?vertices=1000000000"),
    )
    yield Case(
        "work", "profile --layers 1000", ("profile", GRAPH, "--batch", "10", "--layers", "1000")
    )
    yield Case(
        "work",
        "profile --layers 100",
        ("profile", GRAPH, "--batch", "10", "--layers", "100"),
        codes=(0, 2),
    )
    yield Case(
        "work",
        "profile --layers 10^9",
        ("profile", GRAPH, "--batch", "10", "--layers", "1000000000"),
    )
    yield Case(
        "work", "profile --hops 10^9", ("profile", GRAPH, "--hops", "1000000000"), codes=(0, 2)
    )
    yield Case(
        "work",
        "profile --parts 1..100000",
        ("profile", GRAPH, "--parts", ",".join(map(str, range(1, 5000)))),
        codes=(2,),
    )
    yield Case("work", "profile --servers 10^9", ("profile", GRAPH, "--servers", "1000000000"))
    yield Case(
        "work",
        "simulate --steps 10^9",
        ("simulate", "{d}/plan.json", "--steps", "1000000000"),
        good_plan,
    )
    yield Case(
        "work",
        "simulate --steps 10^18",
        ("simulate", "{d}/plan.json", "--steps", "1" + "0" * 18),
        good_plan,
    )
    yield Case(
        "work",
        "simulate --seed 10^30",
        ("simulate", "{d}/plan.json", "--jitter", "0.1", "--seed", "1" + "0" * 30),
        good_plan,
        codes=(0, 2),
    )
    yield Case(
        "work",
        "tune --epochs 10^18",
        ("tune", "{d}/plan.json", "--epochs", "1" + "0" * 18),
        good_plan,
    )
    yield Case(
        "work", "--set epochs=10^18", ("plan", "--graph", GRAPH, "--set", "epochs=1" + "0" * 18)
    )
    yield Case(
        "work", "--set servers=10^9", ("plan", "--graph", GRAPH, "--set", "servers=1000000000")
    )
    yield Case(
        "work",
        "--sweep of 10^6 values",
        ("simulate", "{d}/plan.json", "--sweep", "epochs=" + ",".join(map(str, range(20_000)))),
        good_plan,
    )
    yield Case(
        "work",
        "--scale 1..4096 of reddit",
        ("plan", "--graph", "reddit", "--cluster", "dgx_a100", "--scale", "1..4096"),
        codes=(0, 2),
    )


def _sizes() -> Iterator[Case]:
    row = b'{"epoch": 1, "loss": 1.0, "epoch_s": 0.1, "train_accuracy": 0.5, "bytes": 100}\n'
    for verb in (
        ("validate", "{d}/run"),
        ("report", "{d}/run/plan.json", "{d}/run", "-o", "{d}/r.html"),
    ):
        for name, line, size in (
            ("metrics.jsonl", row, 200_000_000),
            ("metrics.jsonl", b"\n", 200_000_000),
            ("metrics.jsonl", b"[", 500_000_000),
            ("rank0.json", b"[[],", 200_000_000),
            ("rank0.json", b" ", 500_000_000),
            ("trace.rank0.json", b"[[],", 200_000_000),
            ("trace.rank0.json", b"[1,", 500_000_000),
            ("plan.json", b"[1,", 60_000_000),
        ):
            yield Case(
                "sizes",
                f"{verb[0]}, {name} of {size // 10**6} MB of {line[:4]!r}",
                verb,
                long_file(name, line, size),
                codes=(0, 1, 2) if name == "options.json" else (2,),
            )
    yield Case(
        "sizes",
        "trace of 500 MB",
        ("trace", "{d}/run", "-o", "{d}/all.json"),
        long_file("trace.rank0.json", b"[1,", 500_000_000),
    )


def cases() -> list[Case]:
    """All of them; a kind's cases stand together."""
    return [
        case
        for make in (_plans, _readings, _options, _documents, _names, _environment, _work, _sizes)
        for case in make()
    ]


def warm() -> None:
    """Import what the verbs import."""
    import gnnplan.api.planning
    import gnnplan.api.running
    import gnnplan.api.simulation
    import gnnplan.api.validation
    import gnnplan.executor.launch.launcher
    import gnnplan.executor.measure.measure
    import gnnplan.planner.cluster.readings
    import gnnplan.planner.decision.explain
    import gnnplan.planner.graph.formats
    import gnnplan.planner.strategies.minibatch.profile
    import gnnplan.report  # noqa: F401
    from gnnplan import cli  # noqa: F401


def main() -> None:
    as_json = sys.argv[1:2] == ["--json"]
    wanted = sys.argv[1 + as_json :]
    warm()
    fell: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for case in cases():
        if wanted and case.kind not in wanted:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            end = call(case, Path(folder))
            left = [name for name in case.leaves if (Path(folder) / name).exists()]
        why = end.fell or ("" if end.code in case.codes else f"exit code {end.code}")
        if not why and left and end.code:
            why = f"leaves {', '.join(left)} behind"
        counts[case.kind] += 1
        fell[case.kind] += bool(why)
        last = (end.stderr.strip().splitlines() or [""])[-1][:200]
        if as_json:
            told = {"name": case.name, "why": why, "code": end.code, "last": last}
            print(json.dumps(told | {"stderr": end.stderr[-2000:] if why else ""}), flush=True)
        elif why or "CORPUS_ALL" in os.environ:
            seconds, memory = f"{end.seconds:.1f} s", f"{end.peak_bytes / 1e6:.0f} MB"
            print(
                f"{case.kind}: {case.name}: {why or 'good'}, {seconds}, {memory}: {last}",
                flush=True,
            )
    if not as_json:
        for kind, count in counts.items():
            print(f"{kind:20} {count:4} calls, {fell[kind]} fell")


if __name__ == "__main__":
    main()
