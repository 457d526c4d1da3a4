"""The fit of the cost model's numbers (planner/cluster/cost.py) to the samples of all ranks.

Every number is defined by how the cost model uses it. Message times are fitted at every other size,
and the fit is checked at the sizes between.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from scipy.optimize import lsq_linear

from gnnplan.executor.layers.kernels import product_codes
from gnnplan.executor.measure.microbench import (
    OUTPUTS,
    PER_OUTPUT,
    PRODUCTS,
    SCATTERED_ROW,
)
from gnnplan.executor.measure.rehearsal import BATCHES, held_to
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.cost import CALLS, Cost
from gnnplan.planner.cluster.readings import beyond, fit, shapes
from gnnplan.planner.cluster.spec import GEMMS, Cluster, Device, Link
from gnnplan.planner.vocabulary.numbers import FLOAT32, PRECISIONS
from gnnplan.planner.vocabulary.schedule import HostWork
from gnnplan.planner.vocabulary.units import show_count, show_percent

# Least relative doubt of a link: a machine's speed changes within minutes.
LEAST_DOUBT = 0.05
# Median error at the checked sizes -> half-width of a range with 80 % of normal errors.
MEDIAN_TO_TENTH = 1.9
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
    corrected = {name.removeprefix("/") for name in scaled.DEVICE} & provenance.keys()
    provenance |= {name: f"{provenance[name]}; {correction}" for name in corrected}
    provenance["device.launch"] = f"{source}; {correction}"
    call_s = float(Cost(cluster).call_s)
    rates = {
        work: _sampler_rate(work, seconds, call_s) for work in CALLS for (seconds,) in found[work]
    }
    update: dict[str, Any] = {"provenance": provenance, "host_rates": rates}
    if cluster.device.kind == "cpu":
        ((layers_s,),) = found["layers"]
        slowdown = min(max(median(layers_s) / BATCHES.layers_s(cluster), 0.1), 10.0)
        update["device"] = cluster.device.model_copy(update={"batch_slowdown": slowdown})
        provenance["device.batch_slowdown"] = f"{source}, median of the layers of mini-batches"
    return cluster.model_copy(update=update)


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
    device = Device(
        name=found["name"],
        kind="cuda" if cuda else "cpu",
        memory=memory,
        gemm=1e12,
        memory_bandwidth=1 / mean(elementwise_s),
        **({} if cuda else codes),
        **gathering,
    )
    products: dict[str, float] = {}
    provenance = {f"device.{name}": "of the library that multiplies there" for name in codes}
    for name in GEMMS:
        flops, seconds = [], []
        b = PRECISIONS.get(name.removeprefix("gemm_"), FLOAT32).itemsize
        for rows, h_in, h_out, samples in found.get(name, ()):
            # reads and products are counted as in the cost model
            read = PRODUCTS * rows * (h_in + h_out) * b
            reading_s = 0.0 if cuda else read / device.memory_bandwidth
            flops.append(PRODUCTS * 2 * rows * h_in * h_out)
            seconds.append(max(median(samples) - reading_s, median(samples) / 2))
        if not flops:
            continue
        rate = products[name] = sum(flops) / sum(seconds)  # wide layers dominate, as in an epoch
        errors = [n / s / rate - 1 for n, s in zip(flops, seconds, strict=True)]
        provenance[f"device.{name}"] = (
            f"{source}, {len(flops)} shapes together, shapes within"
            f" {show_percent(min(errors), sign=True)} and {show_percent(max(errors), sign=True)}"
        )
    for precision in PRECISIONS.values():
        if (name := f"gather_{precision.name}") not in found:
            continue
        shares = [
            precision.itemsize / median(rounded) / (4 / median(whole))
            for (*_, whole), (*_, rounded) in zip(found["gather"], found[name], strict=True)
        ]
        products[name] = median(shares)
        provenance[f"device.{name}"] = (
            f"{source}, median of {len(shares)} widths and sizes, {min(shares):.2g} to"
            f" {max(shares):.2g}"
        )
    provenance |= {
        f"device.{name}": f"{source}, median" for name in ("memory_bandwidth", *gathering)
    }
    return device.model_dump() | products, provenance


def _scattered_rate(gathering: dict[str, Any], seconds: float) -> float:
    """Return the rate of reading random rows [B/s], without the time of the rows that are written.

    The rows that are read take at least half of the seconds."""
    written_s: float = gathering["row_latency"] + SCATTERED_ROW / gathering["row_bandwidth"]
    return PER_OUTPUT * OUTPUTS * SCATTERED_ROW / max(seconds - OUTPUTS * written_s, seconds / 2)


def _sampler_rate(what: HostWork, seconds: Sequence[float], call_s: float) -> float:
    """Return a sampler's edges per second, without its calls of `call_s` for a batch's layers.

    seconds: of a batch of BATCHES, of which the edges take at least half.
    """
    batch_s, layers = median(seconds), BATCHES.problem.workload.layers
    return BATCHES.batch_edges / max(batch_s - layers * CALLS[what] * call_s, batch_s / 2)


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
    unit = shares.max(axis=0)  # scales all unknowns to the same magnitude
    solution = lsq_linear(shares / unit, np.ones(len(samples)), (least * unit, np.inf))
    *per_byte, row_latency, row_byte = (solution.x / unit).tolist()
    gather: dict[int, dict[float, float]] = {}
    for (width, rows), number in column.items():
        gather.setdefault(width, {})[rows * width * 4] = 1 / per_byte[number]
    return {
        "gather": gather,
        "row_latency": row_latency,
        "row_bandwidth": min(1 / max(row_byte, 1e-30), 1e13),  # a cluster file allows 1e14
    }
