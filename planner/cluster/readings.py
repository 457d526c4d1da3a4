"""A cluster from measurements: fits of links to timed messages, and the output of other tools.

The tools are nccl-tests (`-J FILE`) and `nvidia-smi topo -m`."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from pydantic import ValidationError
from scipy.optimize import isotonic_regression, least_squares

from gnnplan.planner.cluster.spec import LISTS, MOST_GPUS, Cluster, Link
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import from_json, read_bytes
from gnnplan.planner.vocabulary.numbers import grouped
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.trace import LONGEST
from gnnplan.planner.vocabulary.units import show_count

# -- the fit of a link: latency, bandwidth, and efficiency by message size -------------------------


# Least share of the largest message's time that the fit attributes to its bytes. Without it, the
# bandwidth would have no upper bound if times do not grow with the size.
LEAST_WIRE_SHARE = 0.1
# Bytes of a message (or buffer), duration [s], core-seconds of all participating ranks.
Sample = tuple[int, float, float]


class Shape(NamedTuple):
    """The messages of an operation on n bytes."""

    latencies: float = 1.0  # number of messages that follow each other
    wire: float = 1.0  # bytes that the busiest rank sends, divided by n
    moved: float = 1.0  # bytes of all messages of all ranks, divided by n
    port: float = 1.0  # ranks that share the limiting port


ONE_MESSAGE = Shape()


def shapes(places: int, ranks_per_place: int = 1) -> dict[str, Shape]:
    """Return the shape of each measured operation among `places` places (GPUs, or servers).

    An exchange is among all ranks of all places, a send is one message from a place to another, and
    an all-reduce is a ring of places.
    """
    ranks, peers = places * ranks_per_place, (places - 1) * ranks_per_place
    steps = 2 * (places - 1)
    return {
        "exchange": Shape(peers, peers, ranks * peers, ranks_per_place),
        "send": ONE_MESSAGE,
        "all_reduce": Shape(steps, steps / places, steps),
    }


def beyond(samples: Sequence[Sample], inside: Link, shape: Shape, groups: int) -> list[Sample]:
    """Subtract the part inside servers from samples of an exchange among all ranks of servers.

    Inside servers, `groups` exchanges of this shape pass the link `inside` at the same time. Only
    their latency is subtracted from the duration, since their bytes pass other ports meanwhile. All
    core-seconds of their bytes are subtracted from the core-seconds.
    """
    latency, per_byte = inside.latency * shape.latencies, inside.core_s_per_byte * shape.moved
    return [
        (nbytes, max(seconds - latency, 0.1 * seconds), max(core_s - groups * per_byte * nbytes, 0))
        for nbytes, seconds, core_s in samples
    ]


def fit(samples: Sequence[Sample], shape: Shape = ONE_MESSAGE) -> tuple[Link, list[float]]:
    """Return a link, and its relative errors at the sizes that it was not fitted to.

    The fit uses every other size, from the first. Latency and bandwidth minimise the squares of
    relative errors (alpha-beta). Then every size whose bytes take longer than the latency gets an
    efficiency, the share of the bandwidth that it reaches.

    >>> sizes = [2**k for k in range(10, 25)]
    >>> link, errors = fit([(n, 1e-4 + n / 1e9, n / 4e9) for n in sizes])
    >>> f"{link.latency:.1e} {link.bandwidth:.1e} {link.core_s_per_byte:.1e} {max(errors):.2f}"
    '1.0e-04 1.0e+09 2.5e-10 0.00'
    """
    n, seconds, core_s = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    nbytes, each_s = n * shape.wire / shape.latencies, seconds / shape.latencies
    fitted = slice(None, None, 2 if len(n) > 3 else 1)
    latency, bandwidth = _alpha_beta(nbytes, each_s, fitted)
    efficiency: dict[float, float] = {}
    large = nbytes[fitted] > latency * bandwidth
    if large.sum() > 2:
        wire_s = np.maximum(each_s[fitted] - latency, 0.2 * each_s[fitted])[large]
        rates = nbytes[fitted][large] / isotonic_regression(wire_s).x
        bandwidth = float(rates.max())
        shares = (rates / bandwidth).round(4)
        efficiency = dict(zip(nbytes[fitted][large].tolist(), shares.tolist(), strict=True))
    large = n >= min(2**20, n.max())
    link = Link(
        latency=latency,
        bandwidth=bandwidth,
        efficiency=efficiency,
        core_s_per_byte=float(np.median(core_s[large] / (n[large] * shape.moved))),
    )
    predicted = link.latency + link.stretched(nbytes) / link.bandwidth
    return (
        link.model_copy(update={"bandwidth": bandwidth * shape.port}),
        np.abs(predicted / each_s - 1)[1::2].tolist(),
    )


def _alpha_beta(nbytes: np.ndarray, seconds: np.ndarray, fitted: slice) -> tuple[float, float]:
    """Return latency [s] and bandwidth [B/s] with least squares of relative errors."""

    def errors(logs: np.ndarray) -> np.ndarray:
        predicted = np.exp(logs[0]) + nbytes[fitted] / np.exp(logs[1])
        return np.asarray(np.log(predicted / seconds[fitted]))

    guess = np.log([seconds.min(), nbytes.max() / seconds.max()])
    upper = [np.inf, guess[1] - np.log(LEAST_WIRE_SHARE)]
    logs = least_squares(errors, guess, bounds=(-np.inf, upper), loss="soft_l1", f_scale=0.1).x
    latency, bandwidth = np.exp(logs).tolist()
    return latency, bandwidth


# -- files of other tools --------------------------------------------------------------------------


MAX_FILE = 16 << 20  # [B]
MOST_SIZES = 10_000  # message sizes in one file of nccl-tests
LARGEST = 1e18  # largest message [B]
LEAST_GROWTH = 1.5  # duration of the largest message over that of the smallest
# Program of nccl-tests -> operation that it measures
PROGRAMS = {"all_reduce_perf": "all_reduce", "alltoall_perf": "exchange", "sendrecv_perf": "send"}
# nvidia-smi's names of connections between GPUs and NICs, from the shortest to the longest
WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
BY_PCIE_SWITCHES = ("PIX", "PXB")
P2P = ("OK", "CNS", "GNS", "TNS", "NS", "U", "DR")  # cells of `nvidia-smi topo -p2p`
AFTER_HEAD = ("CPU", "NUMA", "GPU")  # first words of the columns after those of GPUs and NICs


def _text(path: Path) -> str:
    """Return the text of a file in UTF-8 or UTF-16, as shells write it. Raises SpecError."""
    raw = read_bytes(path, MAX_FILE, "give what the tool wrote")
    wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return raw.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: not a text file ({error.reason} at byte {error.start}); give what the tool"
            " wrote"
        ) from error


# -- nccl-tests


class Member(NamedTuple):
    """A GPU that took part, with the group to which it sent."""

    group: int
    host: str
    gpu: int  # number that its process has for it; -1: unknown
    pci: str  # its place on the PCIe bus


class Reading(NamedTuple):
    """The measurement in a file of nccl-tests."""

    op: str
    servers: int  # servers of a group
    ranks: int  # GPUs of a group
    gpus: tuple[int, ...]  # numbers of a group's GPUs on one server; empty: unknown
    groups: int  # groups that ran at the same time
    link: Link  # the link that the times imply, for one group


def nccl_tests(path: Path) -> Reading:
    """Read the operation that nccl-tests measured, its GPUs, and the link that its times imply.

    Only out-of-place times are used. Raises SpecError.
    """
    why = "it is not what nccl-tests writes with -J (2.17.3 or later; what it prints is not read)"
    document = from_json(path, _text(path), why)
    try:
        name = Path(str(document["args"][0])).name
        devices = [
            Member(
                int(device.get("group", 0)),
                str(device["hostname"]),
                int(device.get("device", -1)),
                str(device.get("device_hex")),
            )
            for device in document["config"]["devices"]
        ]
        results = [(row["size"], row["out_of_place"]) for row in document["results"]]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{path}: not what nccl-tests writes with -J ({type(error).__name__}: {error})"
        ) from error
    program = next((known for known in PROGRAMS if name.startswith(known)), name)
    if program not in PROGRAMS:
        raise SpecError(f"{path}: {program} is not one of {', '.join(PROGRAMS)}; use one of these")
    op, members = PROGRAMS[program], _group(path, devices)
    rows = _rows(path, document, results)
    ranks, servers = len(members), len({device.host for device in members})
    if 1 < servers < ranks:
        raise SpecError(
            f"{path}: {ranks} GPUs of {servers} servers use links of both kinds at once; run it on"
            " one server, or with one GPU per server (mpirun --map-by ppr:1:node, -g 1)"
        )
    messages = ranks if op == "exchange" else 1  # alltoall_perf's size is that of all messages
    timed = (row for row in rows if row[0] >= messages and row[1] > 0)
    # a size is there for each cycle (-N) and type (-d all)
    by_size = grouped(timed, lambda row: int(row[0] // messages))
    samples: list[Sample] = [
        (size, median(seconds for _, seconds in same), 0.0)
        for size, same in sorted(by_size.items())
    ]
    if len(samples) < 3:
        raise SpecError(
            f"{path}: {show_count(len(samples), 'size')}; give at least 3 (-b 1K -e 64M -f 2)"
        )
    (smallest, least_s, _), (largest, most_s, _) = samples[0], samples[-1]
    if most_s < LEAST_GROWTH * least_s:
        raise SpecError(
            f"{path}: messages of {smallest:,} B took {least_s * 1e6:.4g} us and those of"
            f" {largest:,} B {most_s * 1e6:.4g} us, less than {LEAST_GROWTH:g} times as long, which"
            " tells no bandwidth from a latency; time sizes further apart (-b 1K -e 1G -f 2)"
        )
    try:
        link = fit(samples, shapes(ranks)[op])[0]
    except SpecError as error:  # the link is too fast or too slow to be valid
        raise SpecError(
            f"{path}: its times imply no link that there is ({error}); measure again"
        ) from error
    numbers = {device.gpu for device in members if device.gpu >= 0}
    # a process that sees one GPU calls it 0
    known = servers == 1 and len(numbers) == ranks
    return Reading(
        op, servers, ranks, tuple(sorted(numbers)) if known else (), len(devices) // ranks, link
    )


def _group(path: Path, devices: Sequence[Member]) -> list[Member]:
    """Return the devices of the first group; all groups have the same shape. Raises SpecError."""
    groups = grouped(devices, lambda device: device.group)
    first = next(iter(groups.values()), [])
    if len(groups) > 1:
        kinds = {(len(of), len({device.host for device in of})) for of in groups.values()}
        if len(kinds) > 1:
            raise SpecError(
                f"{path}: {len(groups)} groups of different sizes were measured at once; run all"
                " GPUs as one group (without NCCL_TESTS_SPLIT)"
            )
        if len(first) == 1:
            raise SpecError(
                f"{path}: {len(groups)} groups of one GPU each, which send nothing; run all GPUs as"
                " one group (without NCCL_TESTS_SPLIT)"
            )
    if len(first) < 2:
        raise SpecError(
            f"{path}: {len(first)} device is listed, and a message needs two; on one server add"
            " -g N, which is how many GPUs a process uses, and on several start a build with MPI"
        )
    if twice := next((one for one in first if one.gpu >= 0 and first.count(one) > 1), None):
        raise SpecError(
            f"{path}: GPU {twice.gpu} of {twice.host} is listed twice: servers share a name, or two"
            " ranks a GPU; give each server a name and each rank a GPU of its own"
        )
    return first


def _rows(
    path: Path, document: Mapping[str, Any], results: Sequence[tuple[object, Any]]
) -> list[tuple[float, float]]:
    """Return sizes [B] and out-of-place times [s]. Raises SpecError, also for wrong results."""
    if len(results) > MOST_SIZES:
        raise SpecError(
            f"{path}: {len(results):,} sizes, and at most {MOST_SIZES:,} are fitted to; measure"
            " fewer (-f 2)"
        )
    rows, wrong = [], 0.0
    for line, (size, body) in enumerate(results, 1):
        if not body:
            continue
        if isinstance(body, dict) and "time" not in body and "cpu_time" in body:
            raise SpecError(
                f"{path}: its times are the CPU's (-C), which end before a message is there; run it"
                " without -C"
            )
        try:
            rows.append((_number(size, LARGEST), _number(body["time"], LONGEST) * 1e-6))
            wrong += _number(body.get("nwrong") or 0, LARGEST)  # None: not checked (-c 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"{path}: result {line} (size {size!r:.40}): {error}; measure again"
            ) from error
    okay = str((document.get("out_of_bounds") or {}).get("okay", "true")).lower()
    if wrong or okay != "true":
        raise SpecError(
            f"{path}: results were wrong (okay: {okay}, wrong values: {wrong:.0f}), so its times"
            " are of a broken run; mend the network, and measure again"
        )
    if results and not rows:
        raise SpecError(
            f"{path}: none of {len(results)} sizes has a time out of place; measure with those"
        )
    return rows


def _number(value: object, most: float) -> float:
    """Return a number of a file, in [0, most]. Raises ValueError."""
    # older nccl-tests write numbers as text
    number = float(value) if type(value) in (int, float, str) else -1.0  # type: ignore[arg-type]
    if not 0 <= number <= most:
        raise ValueError(f"{value!r:.80} is no number from 0 to {most:g}")
    return number


# -- nvidia-smi topo -m


def topology(path: Path) -> dict[str, Any]:
    """Read fields of a Cluster, lists of a server's GPUs, from `nvidia-smi topo -m`.

    islands: GPUs with NVLink between any two of them; switches: GPUs that are joined by PCIe
    switches; nics: GPUs with the same nearest NICs, absent if the table has no NICs. Raises
    SpecError.
    """
    ways = _matrix(path)
    gpus = list(ways)
    number = {name: i for i, name in enumerate(gpus)}

    def joined_by(pattern: str) -> tuple[nx.Graph, list[tuple[int, ...]]]:
        """Return the connections of this pattern, and the sets of GPUs that they join, directly or
        indirectly."""
        graph = nx.Graph()
        graph.add_nodes_from(number.values())
        pairs = combinations(gpus, 2)
        graph.add_edges_from(
            (number[a], number[b]) for a, b in pairs if re.fullmatch(pattern, ways[a][b])
        )
        return graph, sorted(tuple(sorted(part)) for part in nx.connected_components(graph))

    nvlink, islands = joined_by(r"NV[0-9]+")
    for mesh in [of for of in islands if 0 < nx.density(nvlink.subgraph(of)) < 1]:
        say(
            f"note: {path.name} has NVLink between some pairs of GPUs {', '.join(map(str, mesh))}"
            " only; an island has it between all of its GPUs, so these are in none"
        )
        islands = sorted({*islands, *((gpu,) for gpu in mesh)} - {mesh})  # as the cube of older DGX
    lists = {"islands": islands, "switches": joined_by("|".join(BY_PCIE_SWITCHES))[1]}
    found: dict[str, Any] = {"gpus_per_server": len(gpus)}
    found |= {name: tuple(of) if len(of) < len(gpus) else () for name, of in lists.items()}
    nics = [name for name in ways[gpus[0]] if name not in number]
    if nics:
        nearest = grouped(gpus, lambda name: _nearest(ways[name], nics)).values()
        found["nics"] = tuple(tuple(number[name] for name in shared) for shared in nearest)
    return found


def _matrix(path: Path) -> dict[str, dict[str, str]]:
    """Read a mapping GPU -> GPU or NIC -> nvidia-smi's name of the connection between the two.

    GPUs are in the order of their numbers. Every other column counts as a NIC, whatever its name.
    Raises SpecError.
    """
    rows: dict[str, list[str]] = {}
    head: list[str] = []
    text = _text(path)
    if "ROCm" in text or "XGMI" in text:
        raise SpecError(
            f"{path}: a table of rocm-smi, which is not read; name the GPUs that XGMI joins in the"
            " cluster's file, as islands: [[0, 1, 2, 3]]"
        )
    for line in text.splitlines():
        words = re.sub(r"(\x1b|\^\[)?\[[\d;]*m", "", line).split()  # copies may lack the escape
        if not words:
            continue
        if not head and words[0].startswith("GPU") and "X" not in words:
            head = list(takewhile(lambda word: word not in AFTER_HEAD, words))
            if len(head) > MOST_GPUS:
                raise SpecError(
                    f"{path}: {len(head):,} GPUs and NICs, and a server has at most {MOST_GPUS:,};"
                    " give the table of one server"
                )
            if twice := next((name for name in head if head.count(name) > 1), None):
                raise SpecError(
                    f"{path}: the head names {twice} twice; give the table as nvidia-smi printed it"
                )
        elif words[0] in rows:
            raise SpecError(
                f"{path}: there are two lines of {words[0]}; give the table of one server"
            )
        elif words[0] in head:
            rows[words[0]] = words[1:]
        elif head and len(words) > 1 and _is_way(words[1]):
            raise SpecError(
                f"{path}: a line begins with {words[0]}, which the head does not name; columns are"
                " cut off, lines wrapped or blanks missing; write the table to a file (nvidia-smi"
                " topo -m > FILE)"
            )
    gpus = [name for name in head if re.fullmatch("GPU[0-9]{1,9}", name)]
    gpus.sort(key=lambda name: int(name.removeprefix("GPU")))
    if not gpus:
        raise SpecError(
            f"{path}: not what `nvidia-smi topo -m` prints (a line of GPU0 GPU1 ..., then one for"
            " each)"
        )
    if cut := next((name for name in gpus if len(rows.get(name, [])) < len(head)), None):
        raise SpecError(
            f"{path}: the head names {len(head)} GPUs and NICs, and line {cut} has"
            f" {len(rows.get(cut, []))} connections; give the whole table"
        )
    for name in gpus:
        _must_be_ways(path, name, rows[name], head)
    ways = {name: dict(zip(head, rows[name], strict=False)) for name in gpus}
    for a, b in combinations_with_replacement(gpus, 2):
        if ways[a][b] != ways[b][a] or (ways[a][b] == "X") != (a == b):
            raise SpecError(
                f"{path}: the connection from {a} to {b} is {ways[a][b]}, and from {b} to {a}"
                f" {ways[b][a]}; both directions are the same, and X marks a GPU itself; give the"
                " table as nvidia-smi printed it"
            )
    return ways


def _is_way(cell: str) -> bool:
    """Whether a cell is a connection of GPUs and NICs."""
    return re.fullmatch(rf"X|NV[0-9]+|{'|'.join(WAYS)}", cell) is not None


def _must_be_ways(path: Path, name: str, row: Sequence[str], head: Sequence[str]) -> None:
    """Raise SpecError if a line's cells are not connections to the head's GPUs and NICs."""
    for column, cell in zip(head, row, strict=False):
        if cell in P2P:
            raise SpecError(
                f"{path}: {cell} (line {name}) is what `nvidia-smi topo -p2p` prints; give what"
                " `nvidia-smi topo -m` does"
            )
        if not _is_way(cell):
            raise SpecError(
                f"{path}: line {name}, column {column}: {cell!r:.40} is no connection of GPUs and"
                f" NICs ({', '.join(WAYS)}, NV1 ..); give the table as nvidia-smi printed it"
            )
    more = [cell for cell in row[len(head) :] if _is_way(cell)]
    if more:
        raise SpecError(
            f"{path}: line {name} has {len(head) + len(more)} connections and the head"
            f" {len(head)} names; blanks between names may be missing; give the table as"
            " nvidia-smi printed it"
        )


def _nearest(row: dict[str, str], nics: Sequence[str]) -> tuple[str, ...]:
    """Return the NICs with the shortest connection to a GPU."""
    best = min((WAYS.index(row[nic]) for nic in nics if row.get(nic) in WAYS), default=None)
    return tuple(nic for nic in nics if best is not None and row.get(nic) == WAYS[best])


# -- a cluster


def read(base: Cluster, tests: Sequence[Path], wiring: Path | None) -> Cluster:
    """Return the cluster updated with the files of nccl-tests and nvidia-smi.

    Rates of a GPU, and everything that the files do not have, stay as in `base`; a note says so.
    Raises SpecError.
    """
    fields: dict[str, Any] = {}
    provenance = dict(base.provenance)
    if wiring:
        fields = _wired(base, wiring)
        read_from = f"read from {wiring.name}"
        provenance |= {name: read_from for name in LISTS if fields.get(name)}
    measured = dict(base.collectives)
    path_of: dict[str, Path] = {}
    for path in tests:
        found = nccl_tests(path)
        gpus = fields.get("gpus_per_server", base.gpus_per_server)
        place = _place(path, found, gpus, fields.get("islands", base.islands))
        name = f"{found.op}.{place}"
        if name in path_of:
            raise SpecError(
                f"{path_of[name]} and {path} both measured {name}, and a cluster has one; give the"
                " file that was measured on as many GPUs as will train"
            )
        path_of[name], link = path, found.link
        if found.groups > 1 and place == "inter_node":  # the groups shared the NICs of a server
            nics = len(fields.get("nics", base.nics)) or 1
            port = max(1.0, found.groups / nics)
            link = link.model_copy(update={"bandwidth": link.bandwidth * port})
        measured[name] = link
        provenance[f"collectives.{name}"] = f"nccl-tests, {path.name}"
        if found.op == "send" or not (fields.get(place) or getattr(base, place)):
            fields[place] = link
    try:
        return Cluster.model_validate(
            {**base.model_dump(), **fields, "collectives": measured, "provenance": provenance}
        )
    except ValidationError as error:
        files = ", ".join(str(path) for path in (wiring, *tests) if path)
        raise SpecError(
            f"{files}: no cluster with the rest of {base.name}: {error.errors()[0]['msg']}"
        ) from error


def _place(path: Path, found: Reading, gpus: int, islands: Sequence[Sequence[int]]) -> str:
    """Return the link that a group's messages pass: `island` if one island has all its GPUs.

    A server has so many `gpus`. Raises SpecError."""
    if found.servers > 1:
        return "inter_node"
    if found.ranks > gpus or any(gpu >= gpus for gpu in found.gpus):
        used = f"GPU {found.gpus[-1]}" if found.gpus else show_count(found.ranks, "GPU")
        raise SpecError(
            f"{path}: {used} of one server took part, and a server of the cluster has"
            f" {show_count(gpus, 'GPU')}; give the cluster that was measured, or its --topology"
        )
    if not found.gpus and found.ranks < gpus and len(islands) > 1:
        raise SpecError(
            f"{path}: each process saw one GPU, so which {found.ranks} of {gpus} sent is unknown,"
            " and NVLink joins some of them only; let a process see all (srun: --gpus-per-node and"
            " not --gpus-per-task)"
        )
    inside = any(set(found.gpus) <= set(island) for island in islands) if found.gpus else False
    return "island" if inside or len(islands) == 1 else "intra_node"


def _wired(base: Cluster, wiring: Path) -> dict[str, Any]:
    """Return the fields of a cluster in nvidia-smi's table; notes name the assumed ones.

    Raises SpecError."""
    found = topology(wiring)
    for kind, name in (("island", "islands"), ("switch", "switches")):
        if (lists := found[name]) and getattr(base, kind) is None:
            raise SpecError(
                f"{wiring} has {kind} lists, and cluster {base.name} does not say how fast such"
                f" a link is; give it a rate: --cluster '{base.name}?"
                f"gpus_per_server={found['gpus_per_server']}&{kind}.bandwidth=..GB/s"
                f"&{name}={json.dumps(lists)}'"
            )
    gpus = found["gpus_per_server"]
    if gpus != base.gpus_per_server:
        say(
            f"note: {wiring.name} has {show_count(gpus, 'GPU')} and {base.name} has"
            f" {base.gpus_per_server} per server;"
            f" the cluster has {gpus}, each as fast as a GPU of {base.name}"
        )
    if "nics" not in found:
        if gpus != base.gpus_per_server:
            found["nics"] = ()
        nics = [list(group) for group in found.get("nics", base.nics)] or "one per server"
        say(f"note: {wiring.name} has no columns of NICs; NICs are assumed to be {nics}")
    elif len(found["nics"]) != max(1, len(base.nics)) and base.inter_node:
        say(
            f"note: {wiring.name} has {show_count(len(found['nics']), 'list')} of GPUs with NICs of"
            " their own; the NICs of a list are taken to be as fast together as inter_node"
            f" ({base.inter_node.bandwidth / 1e9:g} GB/s); if they are not, add --set"
            " inter_node.bandwidth=.. to plans"
        )
    if base.island and gpus > 1 and not found["islands"]:
        say(
            f"note: {wiring.name} has no island of GPUs, so {base.name}'s NVLink of"
            f" {base.island.bandwidth / 1e9:g} GB/s is left out"
        )
    return {
        **found,
        "island": base.island if found["islands"] else None,
        "switch": base.switch if found["switches"] else None,
    }
