"""Trains across a slow link: two servers of one rank, network namespaces joined by a token bucket.

    python benchmarks/slow_link.py [MBIT] [EPOCHS]

Needs Linux, root and iproute2 (`apt-get install iproute2`). Prints the seconds per epoch of every
family on the benchmark's graph, in turn and several times, beside synchronous graph parallelism
over the same link. Asserts nothing. The namespaces are gone afterwards, whatever happens.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from commands import words
from floor import GRAPH, HIDDEN, LAYERS

STRATEGIES = (
    "graph_parallel",
    "graph_parallel(narrow=True)",
    "pipegcn",
    "pipegcn(narrow=True)",
    "pipegcn_gf(narrow=True)",
    "granndis(depth=1)",
    "granndis(depth=1,narrow=True)",
    "granndis(depth=2)",
    "gnnpipe",
)
ROUNDS = 3


@contextmanager
def slow_link(mbit: float) -> Iterator[list[tuple[str, str, str]]]:
    """Make two servers: (namespace, interface, address) of each."""
    tag = f"gp{os.getpid() % 10_000}"
    ends = [(f"{tag}n{i}", f"{tag}v{i}", f"10.213.7.{i + 1}") for i in (0, 1)]

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=not check)

    try:
        for space, _, _ in ends:
            ip("netns", "add", space)
        ip("link", "add", ends[0][1], "type", "veth", "peer", "name", ends[1][1])
        for space, device, address in ends:
            ip("link", "set", device, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", space, "link", "set", device, "up")
            ip("-n", space, "link", "set", "lo", "up")
            shape = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
            subprocess.run(
                ["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *shape],
                check=True,
            )
        yield ends
    finally:
        for space, _, _ in ends:
            ip("netns", "del", space, check=False)


def epoch_s(plan: Path, out: Path, ends: list[tuple[str, str, str]], epochs: int) -> float:
    """Train the plan with a rank in each namespace; the median seconds of an epoch.

    The first two epochs warm up.
    """
    ranks = []
    for rank, (space, device, _) in enumerate(ends):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": ends[0][2],
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1",
        }
        run = [
            "run",
            str(plan),
            "--epochs",
            str(epochs),
            "--eval-every",
            "0",
            "--out",
            str(out),
            "--timeout",
            "120",
        ]
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "gnnplan", *run]
        ranks.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    for process in ranks:
        _, error = process.communicate(timeout=600)
        if process.returncode:
            raise SystemExit(error)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return median(line["epoch_s"] for line in lines[2:])


def main(mbit: float = 400.0, epochs: int = 12) -> None:
    if os.geteuid() or not shutil.which("tc"):
        raise SystemExit(
            "slow_link needs root and iproute2 (apt-get install iproute2), for network namespaces"
            " and tc tbf"
        )
    cluster = [
        "--set",
        "servers=2",
        "--set",
        "gpus_per_server=1",
        "--set",
        f"inter_node.bandwidth={mbit / 8}MB/s",
    ]
    with tempfile.TemporaryDirectory() as scratch, slow_link(mbit) as ends:
        seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        told: dict[str, float] = {}
        for turn in range(ROUNDS):
            for i, name in enumerate(STRATEGIES):
                plan, out = Path(scratch, f"plan{i}.json"), Path(scratch, f"run{i}-{turn}")
                model = ["--model", "sage", "--layers", str(LAYERS), "--hidden", str(HIDDEN)]
                ask = [
                    "plan",
                    "--graph",
                    GRAPH,
                    *model,
                    "--strategy",
                    name,
                    *cluster,
                    "-o",
                    str(plan),
                ]
                subprocess.run(
                    [sys.executable, "-m", "gnnplan", *ask], check=True, capture_output=True
                )
                told[name] = json.loads(plan.read_text())["best"]["predicted"]["epoch_s"]
                seconds[name].append(epoch_s(plan, out, ends, epochs))
        base = median(seconds["graph_parallel"])
        print(
            f"2 servers x 1 rank at {mbit:g} Mbit/s, GraphSAGE {LAYERS} x {HIDDEN} on 20k vertices,"
            f" 1M edges; {ROUNDS} rounds in turn"
        )
        for name, values in seconds.items():
            middle = median(values)
            print(
                f"{name:32s} {middle:7.3f} s/epoch  {middle / base:5.2f}x of graph_parallel "
                f" {middle / 1.15:5.2f}x of 1.15 s  predicted {told[name]:7.3f} s"
                f" ({told[name] / middle - 1:+.0%})"
            )


if __name__ == "__main__":
    rate, epochs = words(__doc__)[:1], words(__doc__)[1:2]
    main(*map(float, rate), *map(int, epochs))
