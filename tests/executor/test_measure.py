"""Measuring gives a usable cluster, says where each number is from, and leaves nothing behind."""

import itertools
import math
import os
import subprocess
import sys
from statistics import median

import pytest
from calls import srun
from nightly import at_night
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from gnnplan.executor.measure import measure as module
from gnnplan.executor.measure.measure import aggregation, cluster_of, measure
from gnnplan.executor.measure.microbench import GRAPHS, SCATTERED, WIDTHS, Bench
from gnnplan.executor.measure.rehearsal import BATCHES, PIECES, held_to, in_steps
from gnnplan.executor.ranks.machine import cores
from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.readings import Shape, beyond, fit, shapes
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.errors import LostRank, SpecError
from gnnplan.planner.vocabulary.files import cache_dir


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Every process that is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[subprocess.Popen] = []

    class Remembered(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess_handler, "Popen", Remembered)
    return started


@pytest.fixture
def one_core():
    """That this process and those that it starts may use."""
    several = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(several)})
    yield
    os.sched_setaffinity(0, several)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("sizes")
def test_ranks_that_stay_on_cores_of_their_own_count_all_of_them():
    """Each counted its own: plans had one core for two ranks, and epochs twice as long."""
    cluster = measure(2, seconds=0.02)
    assert cluster.cores == cores()
    active = "2 ranks active" if cores() > 1 else "1 rank active"
    assert active in cluster.provenance["device.gemm"]


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has it")
@pytest.mark.usefixtures("one_core", "sizes")
def test_two_ranks_that_share_a_core(started):
    said: list[str] = []
    cluster = measure(2, said.append, seconds=0.02, dtype="bfloat16")
    assert (cluster.servers, cluster.gpus_per_server, cluster.cores) == (1, 2, 1)
    # several servers played on this machine talk over the same loopback
    assert cluster.inter_node == cluster.intra_node
    device = cluster.device
    numbers = [device.gemm, device.memory, device.memory_bandwidth, device.launch]
    numbers += [rate for rates in device.gather.values() for rate in rates.values()]
    numbers += [device.row_bandwidth, *cluster.host_rates.values()]
    numbers += [
        n
        for link in (cluster.intra_node, *cluster.collectives.values())
        for n in (link.bandwidth, link.latency)
    ]
    assert all(math.isfinite(n) and n > 0 for n in numbers) and device.overlap_tax == 0
    assert cluster.one_machine
    # seconds of a core per byte
    assert all(0 < link.core_s_per_byte < 1e-6 for link in cluster.collectives.values())
    assert set(device.gather) == set(WIDTHS) and set(cluster.host_rates) == {"draw", "lay"}
    assert all(len(rates) == len(dict(GRAPHS)) for rates in device.gather.values())
    assert len(device.gather_scattered) == len(SCATTERED)
    assert device.hash_rate and 1e7 < device.hash_rate < 1e11
    assert device.edge_rate and 1e6 < device.edge_rate < 1e10
    places = ("intra_node", "inter_node")
    assert set(cluster.collectives) == {
        f"{op}.{where}" for op in ("exchange", "send", "all_reduce") for where in places
    }
    # rates by width stand for them
    told = {"name", "kind", "overlap_tax", "power", "cache", "gemm_tf32"}  # which no CPU has
    fields = {f"device.{name}" for name in {*type(device).model_fields} - told}
    fields |= {f"collectives.{name}" for name in cluster.collectives}
    fields |= {"cores", "one_machine", "host_rates", "host_slowdown"}
    fields |= {f"{where}.{name}" for where in places for name in ("bandwidth", "latency")}
    assert set(cluster.provenance) == fields
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster
    assert "matrix products" in said
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_what_an_edge_costs_and_what_a_row_costs_are_told_apart():
    """20 ns a row and 10 GB/s are found again: graphs of few edges were a quarter too fast."""
    rates = {(16, 2_500): 40e9, (16, 80_000): 20e9, (256, 2_500): 80e9, (256, 80_000): 25e9}
    samples = []
    for width, (rows, edges) in itertools.product(
        (16, 256), ((2_500, 125_000), (2_500, 20_000), (80_000, 800_000))
    ):
        of_rows = 2 * rows * (20e-9 + width * 4 / 10e9)
        samples.append((width, rows, edges, 2 * edges * width * 4 / rates[width, rows] + of_rows))
    found = aggregation(samples)
    assert (found["row_latency"], found["row_bandwidth"]) == pytest.approx((20e-9, 10e9), rel=1e-3)
    for width in (16, 256):
        expected = {width * 4 * rows: rates[width, rows] for rows in (2_500, 80_000)}
        assert found["gather"][width] == pytest.approx(expected, rel=1e-3)
    free = aggregation([(w, rows, edges, 1e-11 * edges * w) for w, rows, edges, _ in samples])
    # a file may have ten times that
    assert free["row_latency"] < 1e-12 and 1e12 < free["row_bandwidth"] <= 1e13
    busy = [(width, rows, e, s * 5 if e == 20_000 else s) for width, rows, e, s in samples]
    rates_then = aggregation(busy)["gather"]
    # others had the machine at times: rows get the blame, but not for all that edges take
    for width, rows, edges, seconds in busy:
        assert (
            2 * edges * width * 4 / rates_then[width][rows * width * 4] >= 0.49 * seconds
            or edges == 20_000
        )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("exit 3", "exit code 3"),
        at_night("export MASTER_PORT=none", "ValueError: .*'none'"),
    ],
)
def test_a_rank_that_fails_is_named_and_nothing_stays(started, monkeypatch, tmp_path, does, said):
    broken = tmp_path / "python"
    broken.write_text(
        f'#!/bin/sh\nif [ "$RANK" = 1 ]; then {does}; fi\nexec {sys.executable} "$@"\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(broken))
    with pytest.raises(LostRank, match=rf"rank \d \(server 0\) was lost in .*: {said}"):
        measure(2)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


SIZES = [2**k for k in range(10, 25)]


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.nightly  # trainings that srun starts are tested every time
@pytest.mark.usefixtures("sizes")
def test_ranks_that_srun_has_started_measure_together(tmp_path):
    """One on each of two servers, by Slurm's names alone; the first has the cluster."""
    env = os.environ | {"GNNPLAN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    (cache_dir() / "partitions").mkdir(parents=True, exist_ok=True)
    (tmp_path / "partitions").symlink_to(cache_dir() / "partitions")  # METIS has cut these graphs
    command = [sys.executable, "-m", "gnnplan", "measure", "--seconds", "0.01", "-o"]
    ranks = [
        subprocess.Popen(
            [*command, str(tmp_path / f"{rank}.yaml")],
            env=env | of_slurm,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, of_slurm in enumerate(srun(2, 1))
    ]
    try:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    cluster = read_cluster(str(tmp_path / "0.yaml"))
    assert (cluster.servers, cluster.gpus_per_server, cluster.one_machine) == (2, 1, False)
    assert set(cluster.collectives) == {
        f"{op}.inter_node" for op in ("exchange", "send", "all_reduce")
    }
    assert not (tmp_path / "1.yaml").exists() and "between servers" in said[0] and not said[1]


def steps_of(cluster: Cluster, launch: float, slowdown: float) -> tuple[Cluster, list[float]]:
    """The cluster in training steps, and what the pieces take on it."""
    true = in_steps(cluster, launch, slowdown)
    return true, [piece.seconds(true) for piece in PIECES]


@pytest.mark.slow
def test_steps_tell_what_an_operation_costs_and_how_much_slower_memory_is():
    """Steps whose reads of memory take 1.3 times as long as in kernels alone, with 25 us of the
    framework for an operation; and one of them taken by a neighbour. An operation's price was once
    that of the smallest piece alone: where that was slow, all kernels were said to be fast. And
    arithmetic was once as much faster in steps as reads are: graphs whose time goes to products
    were promised 10 to 17 % too fast."""
    core = Device(kind="cpu", memory=1e9, gemm=1e11, memory_bandwidth=2e10)
    kernels = Cluster(device=core, intra_node=Link(bandwidth=1e9))
    slow, steps = steps_of(kernels, 25e-6, 1.3)
    held, told = held_to(kernels, steps)
    assert (held.device.launch, held.device.memory_bandwidth) == pytest.approx(
        (25e-6, slow.device.memory_bandwidth), rel=1e-3
    ) and "25.0 us" in told
    # Steps whose rows stay in the caches are faster than their kernels. Mini-batches have a number
    # of their own, but not on GPUs: there they were promised the same, and took a fifth longer.
    fast, quick = steps_of(kernels, 25e-6, 0.8)
    held, told = held_to(kernels, quick)
    assert held.device.memory_bandwidth == pytest.approx(fast.device.memory_bandwidth, rel=1e-3)
    assert held.device.gemm == core.gemm and "0.80 times" in told
    # A sum over edges finds its rows in the same caches in a step as alone: it was promised 1.6
    # times as fast. In steps with slower reads it is slower.
    gather = {64: {4e6: 6e10, 3e7: 3e10}}
    sums = kernels.model_copy(update={"device": core.model_copy(update={"gather": gather})})
    for slowdown, expected in ((0.8, [6e10, 3e10]), (1.3, [6e10 / 1.3, 3e10 / 1.3])):
        rates = held_to(sums, steps_of(sums, 25e-6, slowdown)[1])[0].device.gather[64]
        assert [*rates.values()] == pytest.approx(expected, rel=1e-3)
    gpu = kernels.model_copy(update={"device": core.model_copy(update={"kind": "cuda"})})
    held, told = held_to(gpu, steps_of(gpu, 25e-6, 0.8)[1])
    assert held.device.memory_bandwidth == pytest.approx(2e10) and "1.00 times" in told
    held, _ = held_to(kernels, [1.4 * steps[0], *steps[1:]])
    # 35 us by the smallest alone
    assert held.device.launch < 34e-6
    assert held.device.memory_bandwidth == pytest.approx(slow.device.memory_bandwidth, rel=0.06)


def test_times_that_do_not_grow_with_the_size_are_a_link_all_the_same():
    """On a busy machine the best bandwidth had no end, and `measure` ended in a traceback."""
    link, errors = fit(
        [
            (2**k, took, 1e-5)
            for k, took in zip(range(10, 16), (4e-3, 3e-3, 5e-3, 4e-3, 3e-3, 4e-3), strict=True)
        ]
    )
    assert 2**15 / 4e-3 <= link.bandwidth <= 2**15 / 3e-4
    assert link.latency == pytest.approx(4e-3, rel=0.3) and len(errors) == 3


def test_fit_survives_an_outlier():
    samples = [(n, 2 * 50e-6 + 3 * n / 2e9, n * 1e-10) for n in SIZES]
    samples[4] = (SIZES[4], 10 * samples[4][1], 0.0)
    link, errors = fit(samples, Shape(latencies=2, wire=3, moved=2))
    assert link.latency == pytest.approx(50e-6, rel=0.2) and max(errors) < 0.1
    assert link.bandwidth == pytest.approx(2e9, rel=0.2)
    assert link.core_s_per_byte == pytest.approx(5e-11)


def test_an_exchange_among_all_costs_what_both_its_links_cost():
    """Squirrel's epochs on two servers of two ranks were predicted 54 % too long: pairs inside and
    between servers, measured one after the other, waited for each other twice. Two servers of two
    ranks on two cores: what is told of both links adds up to the samples."""
    inside, between = shapes(2)["exchange"], shapes(2, 2)["exchange"]
    assert (inside.latencies, between.latencies, between.port) == (1, 2, 2)
    near = Link(bandwidth=1e9, latency=1e-3, core_s_per_byte=1e-9)
    samples = [(n, 1.9e-3 + max(n / 1e9, 2 * 2 * n / 4e8), n * (4e-9 + 8 * 2e-9)) for n in SIZES]
    far, errors = fit(beyond(samples, near, inside, groups=2), between)
    assert (far.core_s_per_byte, far.bandwidth) == pytest.approx((2e-9, 4e8), rel=0.05)
    assert max(errors) < 0.05
    assert near.latency + 2 * far.latency == pytest.approx(1.9e-3, rel=0.02)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.slow
def test_what_ranks_have_found_becomes_a_cluster(monkeypatch, cuda):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: cuda)
    samples = [(n, 500e-6 + n / 1e9, 100e-6 + n * 1e-9) for n in SIZES]
    # products of 64 and of 16 columns, whose rows move at 10 GB/s and are multiplied at 60 GFLOP/s
    took = [3 * 1000 * (2 * h * h / 6e10 + 2 * h * 4 / 1e10) for h in (64, 16)]
    found = {"name": "a device", "active": 2}
    found |= {"gemm": [(1000, h, h, [s] * 2) for h, s in zip((64, 16), took, strict=True)]}
    found |= {"gather": [(64, 1e6, 1e9, [0.1, 0.1])], "elementwise": [([1e-10, 1e-10],)]}
    found |= {"draw": [([0.1],)], "lay": [([0.08],)], "layers": [([0.02],)]}
    # batches whose edges are a third of those, from lists that no cache holds
    found |= {"far_draw": [([0.1],)], "far_lay": [([0.08],)]}
    found |= {"steps": [([0.01],)] * 6, "paces": [0.8, 1.0, 1.2]}
    found |= {"exchange.intra_node": samples}
    cluster = cluster_of(found, 1, 2, 1e9, 2, one_machine=True)
    link, device = cluster.collectives["send.intra_node"], cluster.device
    # training steps correct all reads of memory, and no arithmetic
    corrected = device.memory_bandwidth * 1e-10
    # a GPU reads rows while it multiplies others
    flops = sum(6 * 1000 * h * h for h in (64, 16))
    assert device.gemm == pytest.approx(flops / sum(took) if cuda else 6e10)
    moved = None if cuda else pytest.approx(corrected * 1e10)
    assert device.product_bandwidth == moved
    for name in ("memory_bandwidth", "gather"):
        assert "times as long as in kernels" in cluster.provenance[f"device.{name}"]
    for name in ("gemm", "row_latency", "row_bandwidth"):
        assert "kernels" not in cluster.provenance[f"device.{name}"]
    # a batch costs what it took: of its layers and of its edges
    edges, cost = BATCHES.batch_edges, Cost(cluster)
    batch = {work: cost.host_s(work, edges, layers=3) for work in ("draw", "lay")}
    assert batch == pytest.approx({"draw": 0.1, "lay": 0.08})
    assert cluster.host_rates["draw"] > 1.001 * edges / 0.1
    assert cuda or BATCHES.layers_s(cluster) == pytest.approx(0.02)
    low, high = cluster.ranges["collectives.send.intra_node"]
    assert 0 < low <= 0.96 and 1.05 <= high <= 2
    # its speed changed by half within the measurement, so four of five draws lie within 38 %
    assert cluster.ranges["device.launch"] == pytest.approx((1 / 1.38, 1.38))
    assert "0.80 to 1.20 of the median" in cluster.provenance["device.gemm"]
    # a GPU loads rows from the server's memory: without a link of its own plans took intra_node's
    loads = {"load": [(4e7, [1.1e-2]), (5e5, [1.1e-3])]}
    host = cluster_of(found | loads, 1, 2, 1e9, 2, one_machine=True).host
    assert cluster.host is None and host is not None
    assert (host.bandwidth, host.latency) == pytest.approx((3.99e9, 0.975e-3), rel=1e-2)
    assert link.latency == fit(samples)[0].latency


def test_a_slow_moment_leaves_enough_sizes_to_fit(monkeypatch):
    """On a busy machine the first message took too long: nothing was left to check the fit with."""
    bench = object.__new__(Bench)
    sent = dict[int, list[tuple[float, float]]]()
    times = itertools.count(20)
    bench.rank, bench.seconds, bench.groups = 0, 0.01, {"intra_node": [(0, 1)]}
    monkeypatch.setattr(Bench, "_exchange", lambda *asked: lambda: None)
    monkeypatch.setattr(Bench, "_time_messages", lambda *asked: (next(times) * 1e-3, 1e-3))
    bench.exchanges("intra_node", sent)
    assert fit([(size, *rounds[0]) for size, rounds in sent.items()])[1]


def test_fit_finds_what_sizes_reach_and_is_right_between_them():
    """A link that is half as fast beyond 1 MiB (a cache is full), as loopback is."""
    truth = Link(bandwidth=4e9, latency=20e-6, efficiency={2**18: 1.0, 2**21: 0.5})
    link, errors = fit(
        [(n, truth.latency + float(truth.stretched(n)) / truth.bandwidth, 0.0) for n in SIZES]
    )
    # most at 2 MiB, where the truth has a corner that is not fitted
    assert median(errors) < 0.03 and max(errors) < 0.12
    plain = link.model_copy(update={"efficiency": {}})
    assert plain.latency + 2**24 / plain.bandwidth < 0.6 * (
        truth.latency + float(truth.stretched(2**24)) / truth.bandwidth
    )


@pytest.mark.parametrize(
    ("ranks", "told", "how"),
    [(2, "this is one server; give --servers 2", {"emulated": 5e7}), (0, "at least 1", {})],
)
def test_what_cannot_be_measured_is_refused(ranks, told, how):
    with pytest.raises(SpecError, match=told):
        measure(ranks, **how)
