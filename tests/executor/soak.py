"""`make soak`: trainings that are hit again and again, for as long as you say.

    make soak                      ten minutes
    SOAK=3600 SEED=7 make soak     an hour, with the faults of seed 7

Faults are drawn by the seed: first a cover of all pairs of kinds, phases and strategies, then the
rest of their product. A chain of them hits one training (faults.py), which restarts and resumes carry
to its end; its weights, losses and bytes must be those of the unbroken training, to the bit.

All happens in namespaces of its own (Linux; no root where the system lets users have them). So all
processes, network namespaces, listening ports and shared memory that are there are the runs', and
they, and the temporary files, are counted before and after every chain. The folder of a run is on a
disk of 16 MB, which is easily full.

The table that ends it counts, by kind of fault, what must be 0; then the exit code is 0, else 1."""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from calls import starting
from faults import (
    AMID,
    CASES,
    EVERY,
    FULL,
    GRAPH,
    MINI,
    PHASES,
    Fault,
    epochs_of,
    small_disk,
    train_through,
)
from nightly import cover, pairs

from gnnplan.testing.ranks import Case, ForkServer, Ranks, Result

CHAIN = 5  # faults that hit one training
CASES = [*CASES, Case("bns(p=0.5)", GRAPH, FULL), Case("pipegcn", GRAPH, FULL, servers=2)]
CASES += [Case("data_parallel(prefetch=1)", GRAPH, MINI)]
CASES += [Case("p3(pipelined=True,prefetch=2)", GRAPH, MINI)]
# kind -> phases in which it makes sense: a rank that has just begun has no files yet
ALL, LATE = list(PHASES), [*AMID, "end"]
KINDS: dict[str, list[str]] = {"SIGKILL": ALL, "SIGTERM": ALL, "raises": ALL, "starves": ALL[1:]}
KINDS |= {"SIGSTOP": ALL[2:], "SIGSTOP and SIGCONT": AMID, "no sampler": AMID}
KINDS |= {"cut checkpoint": LATE, "no trace": LATE, "no metrics": AMID, "no link": ["exchange"]}
KINDS |= {"no files": LATE, "full disk": LATE, "launcher SIGINT": AMID, "launcher SIGTERM": AMID}
KINDS |= {"launcher SIGKILL": AMID}
LEFT = ("processes", "namespaces", "ports", "shared memory", "files")
NAMESPACES = ["--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
INSIDE = {"GNNPLAN_SOAK": "inside", "TORCH_CPP_LOG_LEVEL": "ERROR"}
Row = tuple[Fault, Case]


def product() -> list[Row]:
    """Every kind, phase and strategy that go together."""
    return [
        (Fault(kind, phase), case)
        for kind, phases in KINDS.items()
        for phase in phases
        for case in CASES
        if (kind != "no sampler" or "prefetch" in case.strategy)
        and (kind != "no link" or case.servers > 1)
    ]


def chains(rng: random.Random) -> Iterator[tuple[Case, list[Fault]]]:
    """Chains without end: first those of a cover of all pairs."""
    rows = product()
    rng.shuffle(rows)
    wave = cover(
        rows, lambda row: pairs({"kind": row[0].kind, "phase": row[0].phase, "on": row[1].strategy})
    )
    while True:
        waiting: dict[str, list[Fault]] = defaultdict(list)
        for fault, case in wave:
            waiting[case.strategy].append(fault)
        while waiting:
            name = rng.choice(list(waiting))
            own, waiting[name] = waiting[name][:CHAIN], waiting[name][CHAIN:]
            if not waiting[name]:
                del waiting[name]
            case = next(case for case in CASES if case.strategy == name)
            others = [fault for fault, of in rows if of is case and fault not in own]
            yield case, ordered([*own, *rng.sample(others, CHAIN - len(own))], rng)
        rng.shuffle(rows)
        wave = rows


def ordered(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Faults so that each finds its moment: a rank that begins again does so after a fault."""
    amid = [fault for fault in faults if fault.phase != "end"]
    rng.shuffle(amid)
    for place in range(1, len(amid)):
        if amid[place - 1].is_outlived and amid[place].phase not in LATE:
            amid.insert(0, amid.pop(place))
    return [*amid, *(fault for fault in faults if fault.phase == "end")]


def there(temporary: Path) -> dict[str, set[str]]:
    """What is in this world: by LEFT's names. Zombies have ended."""
    found: dict[str, set[str]] = {name: set() for name in LEFT}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found["processes"].add(process.name)
                found["namespaces"].add(os.readlink(process / "ns" / "net"))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            if line.split()[3] == "0A":  # it listens
                found["ports"].add(line.split()[1])
    found["shared memory"] |= set(os.listdir("/dev/shm"))
    found["files"] |= {str(path) for path in temporary.rglob("*")}
    return found


def more_than(before: dict[str, set[str]], temporary: Path) -> dict[str, set[str]]:
    """What is there and was not; what is about to end has five seconds."""
    for _ in range(50):
        left = {name: now - before[name] for name, now in there(temporary).items()}
        if not any(left.values()):
            break
        time.sleep(0.1)
    return left


def unbroken(folder: Path) -> dict[str, Result]:
    """What each strategy trains when nothing happens."""
    ranks = Ranks(ForkServer(), folder)
    whole = [replace(case, epochs=epochs_of(CHAIN), eval_every=EVERY) for case in CASES]
    results = ranks(2, whole)
    ranks.close()
    return {case.strategy: result for case, result in zip(CASES, results, strict=True)}


def soak(base: Path, seconds: float, rng: random.Random) -> Counter[tuple[str, str]]:
    """(kind, 'faults' or what fell) -> how often."""
    temporary = base / "tmp"
    temporary.mkdir()
    os.environ |= {"TMPDIR": str(temporary), "GNNPLAN_CACHE": str(base / "cache")}
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    wholes = unbroken(base / "unbroken")
    counts: Counter[tuple[str, str]] = Counter()
    before, until = there(temporary), time.monotonic() + seconds
    for number, (case, faults) in enumerate(chains(rng), 1):
        if time.monotonic() > until:
            return counts
        folder, began, fell = base / f"chain{number}", time.monotonic(), ""
        folder.mkdir()
        emulate = ["--emulate", "unshaped"] if case.servers > 1 else []
        try:
            with small_disk(folder / "disk") as disk, contextmanager(starting)(folder) as start:
                whole, out = wholes[case.strategy], disk / "run"
                train_through(case, faults, whole, start, folder, *emulate, out=out)
        except AssertionError as error:
            fell = "fell"
            print(f"{error}\n", flush=True)
        done = len(list(folder.glob("faults/*.done")))
        happened = faults[:done] or faults[:1]
        counts.update((fault.kind, "faults") for fault in happened)
        if fell:
            counts[happened[-1].kind, fell] += 1
        for name, left in more_than(before, temporary).items():
            if left:
                counts[happened[-1].kind, name] += len(left)
                fell = f"{fell}; left: {len(left)} {name}, as {min(left)}"
                before[name] |= left
        said = ", ".join(f"{fault.kind} in {fault.phase}" for fault in faults)
        print(
            f"chain {number}, {time.monotonic() - began:.0f} s, {case.strategy}: {said}:"
            f" {fell.strip('; ') or 'good'}",
            flush=True,
        )
        if not fell:
            shutil.rmtree(folder)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    asked = parser.parse_args()
    if "GNNPLAN_SOAK" not in os.environ:
        words = [__file__, "--seconds", str(asked.seconds), "--seed", str(asked.seed)]
        users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *users, *NAMESPACES, sys.executable, *words]
        os.execvpe(command[0], command, os.environ | INSIDE)
    print(f"seed {asked.seed}: repeat it with SEED={asked.seed} make soak", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as base:
        counts = soak(Path(base), asked.seconds, random.Random(asked.seed))
    columns = ["faults", "fell", *LEFT]
    print("  ".join([f"{'kind':20}", *(f"{name:>11}" for name in columns)]))
    for (_, name), count in list(counts.items()):
        counts["all", name] += count
    for kind in [*KINDS, "all"]:
        print("  ".join([f"{kind:20}", *(f"{counts[kind, name]:11}" for name in columns)]))
    fell = sum(counts["all", name] for name in columns[1:])
    print(f"seed {asked.seed}; {fell} fell")
    return 1 if fell else 0


if __name__ == "__main__":
    raise SystemExit(main())
