"""Inputs that once fell: each is a call of gnnplan, with the files that it reads made here.

`cases` makes a table of kinds, which test_fuzz.py holds to its law: an answer or a line that says
what is wrong, in little time and memory."""

import itertools
import json
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from string import Template
from typing import Any

GRAPH = "synthetic:community?vertices=60&edges=240&features=4&classes=3"
Make = Callable[[Path], Any]


def nothing(folder: Path) -> None:
    """Make no files."""


@dataclass(frozen=True)
class Case:
    """A call of gnnplan. `{d}` in an argument is the folder in which `make` has put its files."""

    kind: str
    call: str
    about: str = ""
    make: Make = nothing
    env: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (2,)
    starts: bool = False  # a process that starts anew
    leaves: tuple[str, ...] = ()  # what must not be there afterwards

    @property
    def name(self) -> str:
        return f"{self.call}: {self.about}" if self.about else self.call

    @property
    def arguments(self) -> list[str]:
        return shlex.split(Template(self.call).substitute(WORDS))


@cache
def plan_text() -> str:
    """A small plan on two ranks."""
    import gnnplan

    workload = {"model": "gcn", "layers": 2, "hidden": 8, "epochs": 2}
    return json.dumps(gnnplan.plan(GRAPH, "local", workload, ranks=2).document)


def good_plan(folder: Path) -> None:
    (folder / "plan.json").write_text(plan_text())


def spoilt_plan(value: Any, *at: Any) -> Make:
    """plan.json, with this value there."""
    *parents, last = at

    def make(folder: Path) -> None:
        document = json.loads(plan_text())
        reduce(operator.getitem, parents, document)[last] = value
        (folder / "plan.json").write_text(json.dumps(document))

    return make


def text(name: str, content: str | bytes) -> Make:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def pipe(name: str) -> Make:
    return lambda folder: os.mkfifo(folder / name)


def nccl(size: str = "1024", took: str = "10.0", rows: int = 4) -> str:
    """{0} in a size or a time is the number of its row, from 1."""
    row = f'{{{{"size": {size}, "out_of_place": {{{{"time": {took}}}}}}}}}'
    results = ", ".join(row.format(number) for number in range(1, rows + 1))
    return (
        '{"args": ["all_reduce_perf"], "config": {"devices": [{"hostname": "a"},'
        f' {{"hostname": "a"}}]}}, "results": [{results}]}}'
    )


def topo(gpus: int, nics: int = 0, way: str = "NV12") -> str:
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t" + "\t".join(names)]
    for i, name in enumerate(names):
        ways = [way] * len(names)
        ways[i] = "X"
        lines.append("\t".join([name, *ways]))
    return "\n".join(lines) + "\n"


def machine(gpus: int, nics: int, way: str) -> Make:
    """t.txt, written when it is asked for: of 4,096 GPUs it has 80 MB."""
    return lambda folder: (folder / "t.txt").write_text(topo(gpus, nics, way))


def run_folder(folder: Path) -> Path:
    """The folder of a finished run, that was never trained."""
    run = folder / "run"
    run.mkdir()
    good_plan(run)
    options = {"epochs": 3, "eval_every": 10, "timeout_s": 30.0, "staleness_errors": False}
    options |= {"checkpoint_every": 10, "resume": False, "restarts": 0}
    (run / "options.json").write_text(json.dumps(options))
    row = {"loss": 1.0, "epoch_s": 0.1, "train_accuracy": 0.5, "bytes": 100}
    rows = [json.dumps({"epoch": epoch, **row}) + "\n" for epoch in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(rows))
    left = {"backend": "gloo", "bytes": {"halo": 100}, "setup_bytes": {"x": 1}, "rows": {"hit": 3}}
    left |= {"peak_rss_bytes": 10**8, "peak_bytes": None}
    for rank in range(2):
        (run / f"rank{rank}.json").write_text(json.dumps({"rank": rank, **left}))
        trace = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": []}
        (run / f"trace.rank{rank}.json").write_text(json.dumps(trace))
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


LONG = "n" * 300
WORDS = {"GRAPH": GRAPH, "LONG": LONG, "PLAN": f"plan --graph {GRAPH}"}
WORDS |= {"RUN": "run {d}/plan.json --out {d}/out --epochs 1", "READ": "measure --cluster dgx_a100"}
WORDS |= {"NINES": "9" * 5000, "E18": "1" + "0" * 18}


def table(kind: str, calls: str, make: Make = nothing, about: str = "", **more: Any) -> list[Case]:
    """A case per line, which is its call: `$GRAPH` is of WORDS, and `<a|b>` makes two of a line."""
    cases = []
    for line in calls.strip().splitlines():
        parts = re.split("<(.*?)>", line.strip())
        for chosen in itertools.product(*(part.split("|") for part in parts[1::2])):
            call = "".join(map("".join, itertools.zip_longest(parts[::2], chosen, fillvalue="")))
            cases.append(Case(kind, call, about, make, **more))
    return cases


def _plans() -> Iterator[list[Case]]:
    places: list[tuple[str | int, ...]] = [
        *(("best", "predicted", *part.split()) for part in ("", "memory", "memory runtime")),
        *(("best", "predicted", part) for part in ("epoch_s", "by_op", "bytes")),
        *((part,) for part in ("alternatives", "summary", "explanation")),
        ("graph", "notes"),
        ("alternatives", 0, "strategy"),
        ("alternatives", 0),
    ]
    calls = """
        $RUN
        $RUN --strategy NEXT
        report {d}/plan.json -o {d}/r.html
        simulate {d}/plan.json
        tune {d}/plan.json --epochs 2
    """
    for at, value in itertools.product(places, ([1], "x", {"a": "b"})):
        about = f"{'.'.join(map(str, at))} is {value}"
        make = spoilt_plan(value, *at)
        yield table("plan.json", calls, make, about, codes=(0, 2), leaves=("out",))
    for of, names in {
        "cluster": "servers gpus_per_server",
        "workload": "layers seed dropout epochs",
    }.items():
        for name in names.split():
            make = spoilt_plan(True, of, name)
            yield table("plan.json", "simulate {d}/plan.json", make, f"{of}.{name} is true")
    make = spoilt_plan(10**18, "workload", "epochs")
    call = "run {d}/plan.json --out {d}/out"
    yield table("plan.json", call, make, "10^18 epochs", leaves=("out",))


def _readings() -> Iterator[list[Case]]:
    reports = {
        f"{field_} {value:.20} ({len(value)} characters)": nccl(**{field_: value})
        for field_, values in {
            "took": f"Infinity 1e400 NaN {'9' * 400} 0 1e-320 1e300 true [1]",
            "size": f"Infinity 1e400 {'9' * 5000} {'9' * 400} {'9' * 200} -5 true",
        }.items()
        for value in values.split()
    }
    reports |= {"100,000 rows": nccl(rows=100_000), "nested": "[" * 100_000, "no object": "3"}
    call = "$READ --nccl-tests {d}/t.json"
    for about, content in reports.items():
        yield table("nccl-tests", call, text("t.json", content), about)
    older = text("t.json", nccl('"{0}000"', "{0}0.0"))  # nccl-tests once wrote it so
    yield table("nccl-tests", call, older, "size a text", codes=(0,))
    calls = (
        "$READ <--nccl-tests|--topology> </dev/zero|{d}/p|{d}>\nmeasure <--nccl-tests|--topology> x"
    )
    yield table("devices and pipes", calls, pipe("p"))
    machines = {
        f"{gpus} GPUs, {nics} NICs, {way}": machine(gpus, nics, way)
        for gpus, nics in ((1500, 0), (2000, 0), (512, 16), (4096, 0), (64, 64))
        for way in ("NV12", "SYS")
    }
    machines["NV with 5,000 digits"] = machine(4, 0, "NV" + "9" * 5000)
    call = "$READ --topology {d}/t.txt"
    for about, make in machines.items():
        yield table("topology", call, make, about, codes=(0, 2))
    yield table("topology", call, text("t.txt", "GPU0 GPU0\nGPU0 X NV1\n"), "GPUs twice")


def _options() -> Iterator[list[Case]]:
    runs = """
        $RUN --timeout <inf|1e300|nan|1e10>
        <$RUN|measure --servers 2> --emulate <1e400|inf|1e300|0|-1|1.2.3|....|٣|1e99999999999>Mbit/s
        run {d}/plan.json --out {d}/out --epochs $E18
        $RUN <--eval-every|--checkpoint-every> 1000000000000000000000
        $RUN --restarts 1001
    """
    yield table("options", runs, good_plan, leaves=("out",))
    yield table(
        "options",
        """
        simulate {d}/plan.json --jitter <inf|nan|1e400|-1>
        simulate {d}/plan.json --straggler <0=inf|0=nan|0=1e400|0=-1|٠=2.0|0=٢|1_0=2|0=2_0>
        simulate {d}/plan.json --sweep <servers=٢|servers=true|layers=٢|inter_node.bandwidth=٢GB/s>
        measure --seconds <inf|nan|1e400|-1>
        $PLAN <--dropout|--target-accuracy> <inf|nan|1e400|-1>
        $PLAN <--layers|--batch|--ranks> <٣|1_0|$NINES|1000000000000000000000000000000|true|-1>
        $PLAN --set <servers|layers|seed>=٣
        $PLAN --set <servers|layers|epochs>=true
        $PLAN --set inter_node.bandwidth=<٣|1e400>GB/s
        $PLAN --set device.memory=<inf|nan>
        $PLAN --set <lr=nan|lr=٠.١|dropout=٠.١|fanout=٣,٣|batch=$NINES>
        profile $GRAPH --parts <٢,٤|1_0|2,|$NINES|1000000000|0|-1>
        $PLAN --cluster dgx_a100 --scale <1..٦٤|1..1e9|1..1000000000000|٢|1_0|1..$NINES>
        $PLAN --set gpus_per_server=2 --strategy 'gnnpipe(stages=<True,chunks=4|٢,chunks=٤>)'
        $PLAN --set gpus_per_server=2 --strategy 'bns(p=True)'
        plan --graph synthetic:community?vertices=<٦٠|6_0>&edges=240&features=4&classes=3
        plan --graph $GRAPH&<mixing=nan|noise=inf|noise=٠.١>
        """,
        good_plan,
    )


def _names() -> Iterator[list[Case]]:
    yield table(
        "names",
        """
        run {d}/plan.json --epochs 1 --out {d}/$LONG
        run {d}/plan.json --epochs 1 --out {d}/$LONG/x
        run --resume {d}/$LONG
        $RUN --tensorboard {d}/$LONG
        $PLAN -o {d}/$LONG
        $PLAN -o {d}/$LONG/x
        $PLAN --report {d}/$LONG
        $PLAN --target-accuracy 0.5 --evidence {d}/$LONG
        $PLAN <--cluster|--workload|--features> $LONG
        $PLAN --model $LONG.py:X
        plan --graph $NINES
        <simulate|validate> $LONG
        simulate {d}/plan.json --trace {d}/$LONG
        simulate {d}/plan.json --sweep servers=1 --csv {d}/$LONG
        trace $LONG -o {d}/x.json
        report {d}/plan.json -o {d}/$LONG
        emit {d}/plan.json --for <slurm|pyg> -o {d}/$LONG
        $READ --topology {d}/topo -o {d}/$LONG
        convert $GRAPH {d}/$LONG
        convert $LONG {d}/x
        tune {d}/plan.json --epochs 2 --out {d}/$LONG
        """,
        lambda folder: (good_plan(folder), text("topo", topo(8))(folder)),
        leaves=("out",),
    )
    yield table("names", f"$PLAN -o {{d}}/{LONG[:250]}", codes=(0, 2))
    for at in ("graph source", "graph hash", "cluster name", "workload module"):
        make = spoilt_plan("a\0b", *at.split())
        yield table("names", "simulate {d}/plan.json", make, f"{at} with NUL")
    rest = "gpus_per_server: 1\ndevice: {memory: 8GB, gemm: 1e10, memory_bandwidth: 1e10}\n"
    rest += "intra_node: {bandwidth: 10GB/s}\n"
    for name, codes in (("a\\0b", (2,)), ("a\\e[2J", (0, 2))):
        make = text("c.yaml", f'name: "{name}"\n{rest}')
        yield table("names", "$PLAN --cluster {d}/c.yaml", make, repr(name), codes=codes)
    graph = 'name: "a\\0b"\nvertices: 100\nedges: 200\nfeatures: 3\nclasses: 2\n'
    yield table("names", "plan --graph {d}/s.yaml", text("s.yaml", graph), "NUL")
    workload = text("w.yaml", 'model: "a\\0b.py:X"\n')
    yield table("names", "$PLAN --workload {d}/w.yaml", workload, "NUL")


# what torchrun and Slurm set, in turn: a word each that is wrong
STARTED = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517"
SLURM = "SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0"
ENVIRONMENTS = f"""
    WORLD_SIZE=2
    RANK=0
    {STARTED} RANK=<zero|٠>
    {STARTED} <WORLD_SIZE=two|LOCAL_RANK=x|LOCAL_WORLD_SIZE=x|TORCHELASTIC_RESTART_COUNT=x>
    {STARTED} MASTER_PORT=<x|99999|٢٩٥١٧>
    {STARTED} <RANK=0|RANK=1> MASTER_ADDR=no.such.host.invalid
    {STARTED} MASTER_ADDR=
    {STARTED} <GROUP_RANK=x|GLOO_SOCKET_IFNAME=nonesuch0>
    SLURM_STEP_NUM_TASKS=<x|2>
    {SLURM} SLURM_PROCID=0 SLURM_JOB_ID=x
    {SLURM} SLURM_PROCID=<x|7>
    {SLURM} SLURM_PROCID=1 SLURM_STEP_NODELIST=no[1-2].invalid
"""
OF_RUNS = f"""
    {STARTED} SLURM_NTASKS_PER_NODE=2(x2)
    {STARTED} WORLD_SIZE=1 GNNPLAN_THREADS=x
    GNNPLAN_THREADS=x
"""
AT_START = """
    OMP_NUM_THREADS=<abc|-1>
    <TORCH_LOGS|TORCH_CPP_LOG_LEVEL|TORCH_DISTRIBUTED_DEBUG|LOGLEVEL>=nonsense
    TORCH_LOGS_FORMAT=%(
"""


def under(lines: str, calls: str, make: Make = nothing, **more: Any) -> Iterator[list[Case]]:
    """The calls in each of these environments, a line each."""
    for case in table("environment", lines):
        env = dict(word.split("=", 1) for word in case.arguments)
        yield table("environment", calls, make, case.name, env=env, **more)


def _environment() -> Iterator[list[Case]]:
    call = "$RUN --timeout 2"
    lost = {"codes": (2, 4), "starts": True}
    yield from under(ENVIRONMENTS, f"{call}\nmeasure --seconds 0.01", good_plan, **lost)
    yield from under(OF_RUNS, call, good_plan, **lost)
    yield from under(AT_START, "$PLAN\n$RUN", good_plan, codes=(0, 2), starts=True)
    for name in ("GNNPLAN_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        lines = f"GNNPLAN_CACHE= {name}=</dev/null|/nonesuch/x|/$LONG>"
        yield from under(lines, "$PLAN&seed=7", codes=(0, 2), starts=True)


def _terminals() -> Iterator[list[Case]]:
    ascii_ = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def named(folder: Path) -> None:
        import numpy as np

        rng = np.random.default_rng(0)
        ends = dict(zip(("src", "dst"), rng.integers(0, 30, (2, 90)), strict=True))
        x = rng.random((30, 3), np.float32)
        np.savez(folder / "größe.npz", x=x, y=np.arange(30) % 3, **ends)

    calls = "plan --graph größe.npz\nplan --graph größe.npz --json\nprofile größe.npz"
    for env in (ascii_, plain):
        yield table("terminals", calls, named, codes=(0,), starts=True, env=env)
    yield table("terminals", "plan --cluster größe.yaml", named, starts=True, env=ascii_)
    bytes_ = os.fsdecode(b"gr\xf6\xdfe")  # that are no text
    yield table("terminals", f"plan <--graph {bytes_}.npz|--cluster {bytes_}.yaml>")
    calls = f"$PLAN -o {{d}}/{bytes_}.json\nrun {{d}}/plan.json --epochs 1 --out {{d}}/{bytes_}"
    yield table("terminals", calls, good_plan, codes=(0, 2))
    env = {"COLUMNS": "x", "TERM": "nonsense"}
    yield table("terminals", "$PLAN", env=env, codes=(0, 2))


def _work() -> Iterator[list[Case]]:
    refused = """
        $PLAN --layers 10000 --mode <full|mini>
        plan --graph synthetic:community?vertices=1000000000
        profile $GRAPH --batch 10 --layers <1000|1000000000>
        profile $GRAPH --servers 1000000000
        simulate {d}/plan.json --steps <1000000000|$E18>
        simulate {d}/plan.json --jitter 0.1 --repetitions 1000000
        tune {d}/plan.json --epochs $E18
        $PLAN --set <epochs=$E18|servers=1000000000>
    """
    yield table("work", refused, good_plan)
    many = ",".join(map(str, range(1, 5000)))
    yield table("work", f"profile $GRAPH --parts {many}")
    many = ",".join(map(str, range(20_000)))
    yield table("work", f"simulate {{d}}/plan.json --sweep epochs={many}", good_plan)
    mini = "$PLAN --mode mini --batch 36 --set gpus_per_server=2 --strategy"
    either = f"""
        plan --graph reddit --cluster dgx_a100 --layers 10000 --mode <full|mini>
        plan --graph reddit --cluster dgx_a100 --layers 1001 --hidden 1 --mode <full|mini>
        plan --graph reddit --cluster dgx_a100 --scale 1..1024
        {mini} '<gsplit|data_parallel>(presample=1000000000)'
        {mini} '<data_parallel(cache=1000000000)|p3(prefetch=1000000000)|gsplit(presample=100000)>'
        $PLAN --set gpus_per_server=2 --strategy 'gnnpipe(stages=2,chunks=1000000000)'
        $PLAN --set gpus_per_server=2 --strategy 'granndis(max_hop=1,fanout=10,batches=1000000000)'
        $PLAN --set gpus_per_server=2 --strategy 'bns(p=1e-300)'
        profile $GRAPH --batch 10 --layers 100
        profile $GRAPH --hops 1000000000
        simulate {{d}}/plan.json --jitter 0.1 --repetitions 1000
        simulate {{d}}/plan.json --jitter 0.1 --seed 1000000000000000000000000000000
    """
    yield table("work", either, good_plan, codes=(0, 2, 3))
    calls = "<simulate|run> {d}/plan.json\nreport {d}/plan.json -o {d}/r.html"
    for query in (
        "vertices=1000000000&edges=1000",
        "vertices=100000000&edges=2000000000",
        "vertices=100000000&edges=10&features=100000",
        "vertices=60&edges=240&features=100000000000",
        "vertices=20000000&edges=100&features=1",
        "vertices=2000000&edges=20000000&features=1",
    ):
        make = spoilt_plan(f"synthetic:community?{query}", "graph", "source")
        yield table("work", calls, make, query)


def _sizes() -> Iterator[list[Case]]:
    row = b'{"epoch": 1, "loss": 1.0, "epoch_s": 0.1, "train_accuracy": 0.5, "bytes": 100}\n'
    calls = "validate {d}/run\nreport {d}/run/plan.json {d}/run -o {d}/r.html"
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
        about = f"{name} of {size // 10**6} MB of {line[:4]!r}"
        yield table("sizes", calls, long_file(name, line, size), about)
    make = long_file("trace.rank0.json", b"[1,", 500_000_000)
    yield table("sizes", "trace {d}/run -o {d}/all.json", make, "trace.rank0.json of 500 MB")
    make = long_file("options.json", b"[1,", 60_000_000)
    yield table("sizes", "run --resume {d}/run", make, "options.json of 60 MB")
    yield table("sizes", calls, make, "options.json of 60 MB", codes=(0, 1, 2))
    yield table("sizes", calls, run_folder, "empty traces", codes=(0, 1, 2))


def cases() -> list[Case]:
    kinds = [_plans, _readings, _options, _names, _environment, _terminals, _work, _sizes]
    return [case for kind in kinds for some in kind() for case in some]
