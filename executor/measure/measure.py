"""The measurement of this machine, or of several servers, with all ranks active at once.

One process per rank runs the same benchmarks at the same time (microbench.py). The cost model's
numbers (planner/cluster/cost.py) are fitted to the samples of all ranks. Every number is defined by
how the cost model uses it. Message times are fitted at every other size, and the fit is checked at
the sizes between.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import geometric_mean, mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import lsq_linear
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gnnplan.executor.launch.emulation import lab
from gnnplan.executor.launch.failure import name_of
from gnnplan.executor.launch.preflight import must_meet
from gnnplan.executor.layers.kernels import product_codes
from gnnplan.executor.measure.microbench import (
    OUTPUTS,
    PER_OUTPUT,
    PRODUCTS,
    SCATTERED_ROW,
    Bench,
)
from gnnplan.executor.measure.rehearsal import BATCHES, FAR_BATCHES, READS, Piece, held_to
from gnnplan.executor.ranks.activity import Activity, read, seen
from gnnplan.executor.ranks.gather import gather_all
from gnnplan.executor.ranks.machine import cores, free_memory
from gnnplan.executor.ranks.rank import connect, place_rank
from gnnplan.executor.ranks.rendezvous import launcher_env, store_of_all
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.cost import CALLS, Cost
from gnnplan.planner.cluster.readings import beyond, fit, shapes
from gnnplan.planner.cluster.spec import GEMMS, Cluster, Device, Link
from gnnplan.planner.vocabulary.errors import LostRank, SpecError
from gnnplan.planner.vocabulary.numbers import FLOAT32, PRECISIONS
from gnnplan.planner.vocabulary.schedule import HostWork
from gnnplan.planner.vocabulary.units import show_count, show_percent

# Least relative doubt of a link: a machine's speed changes within minutes.
LEAST_DOUBT = 0.05
# Median error at the checked sizes -> half-width of a range with 80 % of normal errors.
MEDIAN_TO_TENTH = 1.9
# Largest minus smallest of ROUNDS normal numbers -> half-width of a range with 80 % of them.
SPAN_TO_TENTH = 0.76
PACED = ("gemm", "memory_bandwidth", "gather", "launch")  # numbers of a device that a round times
OPERATIONS = ("exchange", "send", "all_reduce")


def cluster_of(
    found: dict[str, Any], servers: int, each: int, memory: float, cores: int, one_machine: bool
) -> Cluster:
    """Build a cluster from the samples of `Bench.all`, with the provenance of every number.

    each: ranks per server. memory: of a device [B]. cores: of a server. one_machine: whether the
    servers are emulated.
    """
    active = found["active"]
    source = (
        f"measured {datetime.date.today().isoformat()} on {found['name']},"
        f" {show_count(active, 'rank')} active"
    )
    device, provenance = _device(found, memory, source)
    network, network_provenance = _network(found, servers, each, source)
    provenance |= network_provenance | {
        "device.memory": f"{source}, what is free",
        "host_rates": f"{source}, median",
        "host_slowdown": f"{source}, median",
        "cores": "counted",
        "one_machine": "as started",
    }
    host = None
    if "load" in found:
        fixed, per_byte = line(found["load"])
        host = Link(bandwidth=1 / per_byte, latency=fixed)
        load_source = f"{source}, rows of features picked from the server's memory"
        provenance |= {"host.bandwidth": load_source, "host.latency": load_source}
    cluster = Cluster(
        name="measured",
        servers=servers,
        gpus_per_server=each,
        device=Device(**device),
        host=host,
        cores=cores,
        one_machine=one_machine,
        **network,
    )
    cluster, correction = held_to(cluster, [median(rounds) for (rounds,) in found["steps"]])
    corrected = provenance.keys() & READS
    provenance |= {name: f"{provenance[name]}; {correction}" for name in corrected}
    provenance["device.launch"] = f"{source}; {correction}"
    call_s = float(Cost(cluster).call_s)

    def sampler_rates(piece: Piece, prefix: str = "") -> dict[HostWork, float]:
        of = {work: seconds for work in CALLS for (seconds,) in found[prefix + work]}
        return {work: _sampler_rate(work, piece, of[work], call_s) for work in CALLS}

    rates, far = sampler_rates(BATCHES), sampler_rates(FAR_BATCHES, "far_")
    slower = geometric_mean(rates[work] / far[work] for work in rates)
    slowest, fastest = min(found["paces"]), max(found["paces"])
    provenance["device.gemm"] += f"; rounds at {slowest:.2f} to {fastest:.2f} of the median speed"
    update: dict[str, Any] = {
        "provenance": provenance,
        "host_rates": rates,
        "host_slowdown": float(np.clip(slower, 1.0, 100.0)),
        "ranges": cluster.ranges | _unsteady(fastest / slowest - 1),
    }
    if cluster.device.kind == "cpu":
        ((layers_s,),) = found["layers"]
        slowdown = min(max(median(layers_s) / BATCHES.layers_s(cluster), 0.1), 10.0)
        update["device"] = cluster.device.model_copy(update={"batch_slowdown": slowdown})
        provenance["device.batch_slowdown"] = f"{source}, median of the layers of mini-batches"
    return cluster.model_copy(update=update)


def _unsteady(change: float) -> dict[str, tuple[float, float]]:
    """Return ranges of a device's numbers if its speed changed more than usual between rounds.

    >>> _unsteady(0.05), [round(factor, 2) for factor in _unsteady(0.5)["device.gemm"]]
    ({}, [0.72, 1.38])
    """
    width = SPAN_TO_TENTH * change
    if 1 + width <= scaled.RANGES["measured"][1]:
        return {}
    return {f"device.{name}": (1 / (1 + width), 1 + width) for name in PACED}


def _network(
    found: dict[str, Any], servers: int, each: int, source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of links and their provenance; exchanges stand for all messages."""
    collectives, ranges = dict[str, Link](), dict[str, tuple[float, float]]()
    fields: dict[str, Any] = {"intra_node": Link(bandwidth=1e9, latency=50e-6)}
    assumed = "assumed: one rank of a server has nobody to measure with"
    provenance = {"intra_node.bandwidth": assumed, "intra_node.latency": assumed}
    inside = None  # link and shape of exchanges inside servers; exchanges of all ranks contain them
    for where, places in (("intra_node", (each,)), ("inter_node", (servers, each))):
        samples: list[tuple[int, float, float]] = found.get(f"exchange.{where}", [])
        if not samples:
            continue
        shape = shapes(*places)["exchange"]
        link, errors = fit(beyond(samples, *inside, servers) if inside else samples, shape)
        inside = link, shape
        width = min(max(MEDIAN_TO_TENTH * median(errors), LEAST_DOUBT), 1.0)
        for op in OPERATIONS:
            collectives[f"{op}.{where}"] = link
            ranges[f"collectives.{op}.{where}"] = (1 / (1 + width), 1 + width)
            provenance[f"collectives.{op}.{where}"] = (
                f"{source}, {len(samples)} sizes of exchanges to {samples[-1][0]:,} B, each second"
                f" one fitted; the others {show_percent(median(errors))} off, at most"
                f" {show_percent(max(errors))}"
            )
        # A link's bandwidth is that of large exchanges, without the software's share.
        reached = link.efficiency.get(max(link.efficiency, default=0.0), 1.0)
        fields[where] = Link(bandwidth=link.bandwidth * reached, latency=link.latency)
        for name in ("bandwidth", "latency"):
            provenance[f"{where}.{name}"] = f"{source}, of exchanges"
    if servers == 1:
        # Several servers emulated on this machine use the same loopback, so that
        # `--set servers=2` has a meaningful answer.
        for table in (fields, collectives, ranges):
            table |= {key.replace("intra", "inter"): value for key, value in table.items()}
        provenance |= {
            key.replace("intra", "inter"): f"as inside the server: {origin}"
            for key, origin in provenance.items()
        }
    return {**fields, "collectives": collectives, "ranges": ranges}, provenance


def _device(
    found: dict[str, Any], memory: float, source: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a Device, from its kernels alone, and the provenance of each."""
    cuda, codes = torch.cuda.is_available(), product_codes()
    elementwise_s = [median(per_byte) for (per_byte,) in found["elementwise"]]
    gathering = aggregation(
        [(width, rows, edges, median(samples)) for width, rows, edges, samples in found["gather"]]
    )
    if scattered := found.get("gather_scattered"):
        gathering["gather_scattered"] = {
            rows * SCATTERED_ROW: _scattered_rate(gathering, median(seconds))
            for rows, seconds in scattered
        }
    for rate in ("hash_rate", "edge_rate"):
        if rate in found:
            ((per_one,),) = found[rate]
            gathering[rate] = 1 / median(per_one)
    provenance = {f"device.{name}": "of the library that multiplies there" for name in codes}
    rates: dict[str, float] = {}
    moved_s = 0.0 if cuda else None  # [s/B] of the rows of products; those of float32 tell it
    for name in GEMMS:
        b = PRECISIONS.get(name.removeprefix("gemm_"), FLOAT32).itemsize
        samples = [
            # reads and products are counted as in the cost model
            (PRODUCTS * 2 * rows * h_in * h_out, PRODUCTS * rows * (h_in + h_out) * b, median(each))
            for rows, h_in, h_out, each in found.get(name, ())
        ]
        if not samples:
            continue
        rates[name], moved_s, errors = products(samples, moved_s)
        provenance[f"device.{name}"] = (
            f"{source}, {len(samples)} shapes together, shapes within"
            f" {show_percent(min(errors), sign=True)} and {show_percent(max(errors), sign=True)}"
        )
    if moved_s:
        rates["product_bandwidth"] = min(1 / moved_s, 1e13)  # a cluster file allows 1e14
        provenance["device.product_bandwidth"] = provenance["device.gemm"]
    for precision in PRECISIONS.values():
        if (name := f"gather_{precision.name}") not in found:
            continue
        shares = [
            precision.itemsize / median(rounded) / (4 / median(whole))
            for (*_, whole), (*_, rounded) in zip(found["gather"], found[name], strict=True)
        ]
        rates[name] = median(shares)
        provenance[f"device.{name}"] = (
            f"{source}, median of {len(shares)} widths and sizes, {min(shares):.2g} to"
            f" {max(shares):.2g}"
        )
    provenance |= {
        f"device.{name}": f"{source}, median" for name in ("memory_bandwidth", *gathering)
    }
    fields = {
        "name": found["name"],
        "kind": "cuda" if cuda else "cpu",
        "memory": memory,
        "memory_bandwidth": 1 / mean(elementwise_s),
    }
    return {**fields, **({} if cuda else codes), **gathering, **rates}, provenance


def _scattered_rate(gathering: dict[str, Any], seconds: float) -> float:
    """Return the rate of reading random rows [B/s], without the time of the rows that are written.

    The rows that are read take at least half of the seconds."""
    written_s: float = gathering["row_latency"] + SCATTERED_ROW / gathering["row_bandwidth"]
    return PER_OUTPUT * OUTPUTS * SCATTERED_ROW / max(seconds - OUTPUTS * written_s, seconds / 2)


def _sampler_rate(what: HostWork, piece: Piece, seconds: Sequence[float], call_s: float) -> float:
    """Return a sampler's edges per second, without its calls of `call_s` for a batch's layers.

    seconds: of a batch of `piece`, of which the edges take at least half.
    """
    batch_s, layers = median(seconds), piece.problem.workload.layers
    return piece.batch_edges / max(batch_s - layers * CALLS[what] * call_s, batch_s / 2)


def line(samples: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, float]:
    """Return the fixed seconds of a copy, and its seconds per byte.

    samples: (bytes, seconds) of large copies, then of small ones. A line goes through both medians;
    a byte takes at least half of its time in a large copy.

    >>> line([(3.0, [4.0]), (1.0, [2.0])])
    (1.0, 1.0)
    """
    (most, large), (least, small) = ((edges, median(seconds)) for edges, seconds in samples)
    per_edge = max((large - small) / (most - least), large / most / 2)
    per_edge = min(per_edge, large / most)
    return round(large - per_edge * most, 9), per_edge


def products(
    samples: Sequence[tuple[float, float, float]], moved_s: float | None = None
) -> tuple[float, float, list[float]]:
    """Fit the rate of matrix products, and the seconds of a byte of their rows unless given.

    samples: (flops, bytes, seconds). Returns the rate [flop/s], the seconds per byte, and predicted
    / measured - 1 of each sample. This is a least-squares fit of these errors, in which arithmetic
    takes at least half of a sample's seconds. With the seconds of a byte given (0 on GPUs, which
    read rows while they multiply others), wide layers dominate the rate, as in an epoch.

    >>> samples = [(4e9, 1e8, 0.05), (2e9, 1e8, 0.03)]
    >>> "{:.3g} {:.3g} {}".format(*products(samples)[:2], round(products(samples, 1e-10)[0]))
    '1e+11 1e-10 100000000000'
    """
    flops, nbytes, seconds = np.array(samples).T
    if moved_s is None:
        shares = np.stack([flops, nbytes], axis=1) / seconds[:, np.newaxis]
        per_flop, per_byte = _costs(shares, np.array([(seconds / flops).min() / 2, 0.0]))
    else:
        per_byte = moved_s
        per_flop = np.maximum(seconds - nbytes * moved_s, seconds / 2).sum() / flops.sum()
    errors = (flops * per_flop + nbytes * per_byte) / seconds - 1
    return 1 / float(per_flop), float(per_byte), errors.tolist()


def _costs(shares: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Return the costs [n], at least `least`, at which the shares [samples, n] of the samples' work
    add up to 1, by least squares."""
    unit = shares.max(axis=0)  # scales all unknowns to the same magnitude
    found = lsq_linear(shares / unit, np.ones(len(shares)), (least * unit, np.inf))
    return np.asarray(found.x / unit)


def aggregation(samples: Sequence[tuple[int, int, int, float]]) -> dict[str, Any]:
    """Fit the cost of aggregation: per edge by width and size, and per output row.

    samples: (width, rows, edges, seconds of forward and backward). Returns the device's fields
    gather, row_latency and row_bandwidth. This is a least-squares fit of predicted / measured - 1,
    in which the edges of a sample take at least half of its seconds.
    """
    # the last sample of each width and size then has the most edges per row
    samples = sorted(samples, key=lambda sample: sample[2] / sample[1])
    sizes = sorted({sample[:2] for sample in samples})
    column = {size: number for number, size in enumerate(sizes)}
    # column of each unknown: an edge of each size, a row, a row's byte; share of a sample's seconds
    shares = np.zeros((len(samples), len(sizes) + 2))
    least = np.zeros(len(sizes) + 2)
    for place, (width, rows, edges, seconds) in enumerate(samples):
        gathered, made = 2 * edges * width * 4, 2 * rows * np.array([1, width * 4])
        number = column[width, rows]
        shares[place, number], shares[place, -2:] = gathered / seconds, made / seconds
        least[number] = seconds / gathered / 2
    *per_byte, row_latency, row_byte = _costs(shares, least).tolist()
    gather: dict[int, dict[float, float]] = {}
    for (width, rows), number in column.items():
        gather.setdefault(width, {})[rows * width * 4] = 1 / per_byte[number]
    return {
        "gather": gather,
        "row_latency": row_latency,
        "row_bandwidth": min(1 / max(row_byte, 1e-30), 1e13),  # a cluster file allows 1e14
    }


SECONDS = 0.2  # spent on each number
FOUND = "cluster.json"  # file of the result, in the folder of ranks that we start
STUCK = 60.0  # [s] after which a peer that does not answer counts as lost


def measure(
    ranks: int,
    progress: Callable[[str], None] | None = None,
    servers: int = 1,
    emulated: float = inf,
    seconds: float = SECONDS,
    dtype: str = "float32",
) -> Cluster:
    """Measure `ranks` ranks on each of `servers` servers; takes a minute or two.

    progress: called with a phrase on what is being measured. seconds: spent on each number.
    dtype: 'bfloat16' also measures matrix products and aggregation of bfloat16 rows. Several
    servers are emulated on this machine, with NICs of `emulated` [B/s] (inf: as fast as the
    machine; launch/emulation.py). Ranks use NCCL if each has a CUDA device of its own, and Gloo on
    a machine without CUDA.
    """
    from gnnplan.executor.launch import agent  # its import takes 1 s, and ranks do without it

    if min(ranks, servers) < 1:
        raise SpecError(f"ranks is {ranks} and servers {servers}; measure at least 1")
    if not 0.01 <= seconds <= 60:
        raise SpecError(f"seconds must lie in [0.01, 60] per measurement, not {seconds:g}")
    if emulated < inf and servers == 1:
        raise SpecError(
            "an emulated NIC is between servers, and this is one server; give --servers 2 or more"
        )
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < ranks * servers:
        raise SpecError(
            f"every rank needs a CUDA device (ranks: {ranks * servers}, devices:"
            f" {torch.cuda.device_count()}); use fewer ranks, or CUDA_VISIBLE_DEVICES= to measure"
            " the processor"
        )
    check_dtype(dtype)
    notify = progress or (lambda what: None)
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    places = [rank // ranks for rank in range(ranks * servers)]
    emulation = lab(servers, emulated if servers > 1 else 0.0)
    with emulation as emulated_servers, TemporaryDirectory() as name:
        folder = Path(name)
        words = ["measure", name, str(seconds), dtype, str(ranks)]
        phase = ""

        def listen() -> None:
            nonlocal phase
            if (what := read(seen(folder, 0))) and what != phase:
                phase = what
                notify(what)

        names = [name_of(rank, server) for rank, server in enumerate(places)]
        watched = agent.Watched(folder, names, STUCK, listen, lambda: "Nothing is measured")
        agent.run(words, watched, places, emulated_servers, env)
        return Cluster.model_validate_json((folder / FOUND).read_text())


def check_dtype(dtype: str) -> None:
    """Raise SpecError if rows of this type cannot be measured."""
    if dtype not in ("float32", "bfloat16"):
        raise SpecError(
            f"rows are measured in float32, and in bfloat16 as well if asked (dtype: {dtype}); use"
            " --dtype bfloat16, or leave it out"
        )


def measure_as_rank(
    notify: Callable[[str], None], seconds: float = SECONDS, dtype: str = "float32"
) -> Cluster | None:
    """Be one of the ranks that torchrun or srun started on real servers.

    Returns the measured cluster on rank 0, None on other ranks. Raises SpecError, LostRank.
    """
    check_dtype(dtype)
    env = launcher_env()
    must_meet()
    server = int(env.get("GROUP_RANK", "0"))
    try:
        return _measured(seconds, dtype, notify, one_machine=False, server=server)
    except RuntimeError as error:  # torch's, if peers are gone
        raise LostRank(
            f"rank {env['RANK']} failed while measuring: {type(error).__name__}: {error}"
        ) from error


# -- processes ------------------------------------------------------------------------------------


def _measured(
    seconds: float, dtype: str, notify: Callable[[str], None], one_machine: bool, server: int
) -> Cluster | None:
    """Measure as one rank. Returns the cluster on rank 0, else None. Raises SpecError."""
    memory = free_memory() / int(launcher_env().get("LOCAL_WORLD_SIZE", "1"))
    available = cores()  # before this rank is pinned to a core
    rank = place_rank(STUCK)
    rank.groups.nccl_least_s = 0.0  # measured messages do not wait for a training step
    if rank.device.type == "cuda":  # before this process allocates memory on the GPU
        memory = torch.cuda.mem_get_info()[0]
    # a later run may use the same store of the launcher
    connect(rank, PrefixStore("measure", store_of_all(STUCK)))
    places = gather_all(server)
    counts = Counter(places)
    if len(set(counts.values())) > 1:
        ranks = ", ".join(f"{count} on server {at}" for at, count in sorted(counts.items()))
        raise SpecError(
            f"a cluster has equally many ranks on every server, and here are {ranks}; start as"
            " many on each"
        )
    found = Bench(rank, places, one_machine, available, seconds, getattr(torch, dtype)).all(notify)
    dist.barrier()
    if rank.rank:
        return None
    return cluster_of(found, len(counts), counts[0], memory, available, one_machine)


def work(folder: Path, activity: Activity) -> None:
    """Be a rank of `python -m gnnplan.executor measure FOLDER SECONDS DTYPE EACH`.

    EACH: ranks per server. Rank 0 writes the cluster into the folder.
    """
    for stream in (1, 2):  # Gloo prints to both
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    seconds, dtype, each = float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    rank = int(os.environ["RANK"])

    def notify(what: str) -> None:
        activity.begin("phase", what)

    cluster = _measured(seconds, dtype, notify, one_machine=True, server=rank // each)
    if cluster is not None:
        (folder / FOUND).write_text(cluster.model_dump_json())
