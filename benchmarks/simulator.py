"""Times the simulator: tasks per second with contention, and an all-to-all of 64 ranks as flows.

python benchmarks/simulator.py
"""

from __future__ import annotations

import time

import numpy as np
from commands import words

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric, Link
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Exchange,
    Gather,
    Label,
    Recv,
    Ring,
    Schedule,
    Send,
    Task,
)
from gnnplan.simulator.network import Flows
from gnnplan.simulator.player import play

WORK = Compute(flops=2e9, gathers=(Gather(20_000, 256, 10_000, 1_000),), launches=4)
DEVICE = Device(memory=24e9, gemm=1e13, memory_bandwidth=5e11, gather={16: 1e11, 256: 3e11})
TWO_SERVERS = Cluster(
    servers=2,
    gpus_per_server=4,
    device=DEVICE,
    intra_node=Link(bandwidth=25e9),
    inter_node=Link(bandwidth=3e9),
)


def pipeline(stages: int = 8, chunks: int = 32, steps: int = 20) -> Schedule:
    """Return the schedule of a pipeline's forward pass: receive, compute and send per chunk."""
    schedule = Schedule(stages, steps)
    for step in range(steps):
        for chunk in range(chunks):
            for stage in range(stages):
                forward = Label("forward", step, "f", chunk=chunk)
                sent = Label("pipeline", step, "f", chunk=chunk, peer=stage + 1)
                got = Label("arrive", step, "f", chunk=chunk, peer=stage - 1)
                if stage:
                    receive = Recv(stage - 1, sent._replace(peer=stage))
                    schedule.tasks.append(Task(got, stage, "copy", receive))
                before = (got,) if stage else ()
                schedule.tasks.append(Task(forward, stage, "compute", WORK, before))
                if stage < stages - 1:
                    send = Send(stage + 1, 1_000_000)
                    schedule.tasks.append(Task(sent, stage, "comm", send, (forward,)))
    return schedule


def halo(ranks: int = 8, layers: int = 32, steps: int = 10) -> Schedule:
    """Return a schedule of graph parallelism with irregular halos.

    The all-reduce of a layer's gradients overlaps the next layer's exchange."""
    schedule, group = Schedule(ranks, steps), tuple(range(ranks))
    source, target = np.indices((ranks, ranks))
    sent = Exchange(10_000 * (1 + (3 * source + target) % 5) * (source != target))
    for step in range(steps):
        for layer in range(layers):
            for rank in group:
                exchange, forward, reduced = (
                    Label(op, step, direction, layer)
                    for op, direction in (("halo", "f"), ("forward", "f"), ("all_reduce", "b"))
                )
                before = (Label("forward", step, "f", layer - 1),) if layer else ()
                schedule.tasks += [
                    Task(exchange, rank, "comm", Collective(sent, group, rank), before),
                    Task(forward, rank, "compute", WORK, (exchange,)),
                    Task(
                        reduced, rank, "reduce", Collective(Ring(262_144), group, rank), (forward,)
                    ),
                ]
    return schedule


def flows(cluster: Cluster) -> str:
    """Time an irregular all-to-all (log-normal sizes, sigma 1), in seconds of one core."""
    ranks = cluster.ranks
    sizes = np.random.default_rng(0).lognormal(0, 1, (ranks, ranks)) * 1e6
    exchange = Flows.of(Cost(cluster), sizes * ~np.eye(ranks, dtype=bool))
    start = time.process_time()
    exchange.rates()
    ms = (time.process_time() - start) * 1e3
    words = [f"{exchange.nbytes.size} flows: rates of all in {ms:.1f} ms"]
    for every, how in (
        (0.005, "with rates anew every half per cent of it"),
        (0.0, "with rates anew at every end"),
    ):
        start = time.process_time()
        last = float(exchange.finish(every * exchange.bound).max()) / exchange.bound
        words.append(
            f"to the last one's end {how} in {time.process_time() - start:.2f} s ({last:.4f} of the"
            " port bound)"
        )
    return "; ".join(words)


def main(repeats: int = 3) -> None:
    cost = Cost(TWO_SERVERS)
    for build in (pipeline, halo):
        schedule = build()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            played = play(schedule, cost)
            seconds.append(time.perf_counter() - start)
        tasks = len(schedule.tasks)
        print(
            f"{build.__name__:>9}: {tasks:6d} tasks, best {tasks / min(seconds):7.0f} tasks/s,"
            f" median {tasks / sorted(seconds)[repeats // 2]:7.0f};"
            f" {played.epoch_s(1) * 1e3:.3f} ms per step"
        )
    for fabric in (None, Fabric(kind="leaf_spine", servers_per_leaf=8, oversubscription=4)):
        changed = {"servers": 64, "gpus_per_server": 1, "fabric": fabric}
        text = flows(TWO_SERVERS.model_copy(update=changed))
        print(f"{fabric.kind if fabric else 'one switch'}: {text}")


if __name__ == "__main__":
    words(__doc__)
    main()
