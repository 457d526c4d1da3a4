"""A cluster from the output of other tools: nccl-tests (`-J FILE`) and `nvidia-smi topo -m`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
from pydantic import ValidationError

from gnnplan.planner.cluster.link_fit import Sample, fit, shapes
from gnnplan.planner.cluster.spec import LISTS, MOST_GPUS, Cluster, Link
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import from_json, read_bytes
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.trace import LONGEST
from gnnplan.planner.vocabulary.units import show_count

MAX_FILE = 16 << 20  # [B]
MOST_SIZES = 10_000  # message sizes in one file of nccl-tests
LARGEST = 1e18  # largest message [B]
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


class Reading(NamedTuple):
    """The measurement in a file of nccl-tests."""

    op: str
    servers: int  # servers of a group
    gpus: tuple[int, ...]  # GPUs of a group on one server; empty: unknown
    groups: int  # groups that ran at the same time
    link: Link  # the link that the times imply, for one group


def nccl_tests(path: Path) -> Reading:
    """Read the operation that nccl-tests measured, its GPUs, and the link that its times imply.

    Only out-of-place times are used. Raises SpecError.
    """
    document = from_json(path, _text(path), "it is not what nccl-tests writes with -J")
    try:
        name = Path(str(document["args"][0])).name
        devices = [
            (int(device.get("group", 0)), str(device["hostname"]), int(device.get("device", -1)))
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
    ranks, servers = len(members), len({host for host, _ in members})
    if 1 < servers < ranks:
        raise SpecError(
            f"{path}: {ranks} GPUs of {servers} servers use links of both kinds at once; run it on"
            " one server, or with one GPU per server (mpirun --map-by ppr:1:node, -g 1)"
        )
    messages = ranks if op == "exchange" else 1  # alltoall_perf's size is that of all messages
    samples: list[Sample] = [
        (int(size // messages), seconds, 0.0)
        for size, seconds in rows
        if size >= messages and seconds > 0
    ]
    if len(samples) < 3:
        raise SpecError(f"{path}: {len(samples)} sizes; give at least 3 (-b 1K -e 64M -f 2)")
    try:
        link = fit(samples, shapes(ranks)[op])[0]
    except ValidationError as error:  # the link is too fast or too slow to be valid
        what = error.errors()[0]["msg"]
        raise SpecError(
            f"{path}: its times imply no link that there is ({what}); measure again"
        ) from error
    gpus = tuple(sorted(gpu for _, gpu in members if gpu >= 0)) if servers == 1 else ()
    return Reading(op, servers, gpus, len(devices) // ranks, link)


def _group(path: Path, devices: Sequence[tuple[int, str, int]]) -> list[tuple[str, int]]:
    """Return the (server, GPU) pairs of the first group; all groups have the same shape.

    Raises SpecError."""
    groups: dict[int, list[tuple[str, int]]] = {}
    for group, host, gpu in devices:
        groups.setdefault(group, []).append((host, gpu))
    first = next(iter(groups.values()), [])
    if len(groups) > 1:
        kinds = {(len(of), len({host for host, _ in of})) for of in groups.values()}
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
    numbered = [member for member in first if member[1] >= 0]
    if twice := next((member for member in numbered if numbered.count(member) > 1), None):
        raise SpecError(
            f"{path}: GPU {twice[1]} of {twice[0]} is listed twice: servers share a name, or two"
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
            wrong += _number(body.get("nwrong", 0), LARGEST)
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

    def joined_by(pattern: str) -> list[tuple[int, ...]]:
        """Return sets of GPUs that connections of this pattern join, directly or indirectly."""
        matches = re.compile(pattern).fullmatch
        graph = nx.Graph()
        graph.add_nodes_from(gpus)
        graph.add_edges_from((a, b) for a in gpus for b in gpus if a != b and matches(ways[a][b]))
        return sorted(
            tuple(sorted(number[name] for name in part)) for part in nx.connected_components(graph)
        )

    islands, switches = joined_by(r"NV[0-9]+"), joined_by("|".join(BY_PCIE_SWITCHES))
    if any(
        not ways[gpus[a]][gpus[b]].startswith("NV")
        for island in islands
        for a in island
        for b in island
        if a != b
    ):
        islands = []  # a cube mesh, in which some pairs of GPUs have no NVLink
    found: dict[str, Any] = {
        "gpus_per_server": len(gpus),
        "islands": _unless_alone(islands, len(gpus)),
        "switches": _unless_alone(switches, len(gpus)),
    }
    nics = [name for name in ways[gpus[0]] if name not in number]
    if nics:
        nearest = {name: _nearest(ways[name], nics) for name in gpus}
        found["nics"] = tuple(
            sorted(
                tuple(number[name] for name in gpus if nearest[name] == shared)
                for shared in set(nearest.values())
            )
        )
    return found


def _matrix(path: Path) -> dict[str, dict[str, str]]:
    """Read a mapping GPU -> GPU or NIC -> nvidia-smi's name of the connection between the two.

    GPUs are in the order of the table's head. Every other column counts as a NIC, whatever its
    name. Raises SpecError.
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
        words = re.sub(r"\x1b\[[\d;]*m|\^\[\[[\d;]*m", "", line).split()
        if not words:
            continue
        if not head and words[0].startswith("GPU"):
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
    gpus = [name for name in head if re.fullmatch("GPU[0-9]+", name)]
    if not gpus or any(name not in rows or len(rows[name]) < len(head) for name in gpus):
        raise SpecError(
            f"{path}: not what `nvidia-smi topo -m` prints (a line of GPU0 GPU1 ..., then one for"
            " each)"
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


def _must_be_ways(path: Path, name: str, row: Sequence[str], head: Sequence[str]) -> None:
    """Raise SpecError if a line's cells are not connections to the head's GPUs and NICs."""
    is_way = re.compile(rf"X|NV[0-9]+|{'|'.join(WAYS)}").fullmatch
    for column, cell in zip(head, row, strict=False):
        if cell in P2P:
            raise SpecError(
                f"{path}: {cell} (line {name}) is what `nvidia-smi topo -p2p` prints; give what"
                " `nvidia-smi topo -m` does"
            )
        if not is_way(cell):
            raise SpecError(
                f"{path}: line {name}, column {column}: {cell!r:.40} is no connection of GPUs and"
                f" NICs ({', '.join(WAYS)}, NV1 ..); give the table as nvidia-smi printed it"
            )
    more = [cell for cell in row[len(head) :] if is_way(cell)]
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


def _unless_alone(lists: Sequence[tuple[int, ...]], gpus: int) -> tuple[tuple[int, ...], ...]:
    """Return the lists, or none if every list has one GPU."""
    return tuple(lists) if lists and len(lists) < gpus else ()


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
        place = _place(found, fields.get("islands", base.islands))
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


def _place(found: Reading, islands: Sequence[Sequence[int]]) -> str:
    """Return the link that a group's messages pass: `island` if one island has all its GPUs."""
    if found.servers > 1:
        return "inter_node"
    inside = any(set(found.gpus) <= set(island) for island in islands) if found.gpus else False
    return "island" if inside or len(islands) == 1 else "intra_node"


def _wired(base: Cluster, wiring: Path) -> dict[str, Any]:
    """Return the fields of a cluster in nvidia-smi's table; notes name the assumed ones.

    Raises SpecError."""
    found = topology(wiring)
    for kind, lists in (("island", found["islands"]), ("switch", found["switches"])):
        if lists and getattr(base, kind) is None:
            raise SpecError(
                f"{wiring} has {kind} lists, and cluster {base.name} does not say how fast such"
                f" a link is; add {kind}: {{bandwidth: .., latency: ..}} to it"
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
            f"note: {wiring.name} has {len(found['nics'])} lists of GPUs with NICs of their own,"
            f" each as fast as inter_node ({base.inter_node.bandwidth / 1e9:g} GB/s); if that is"
            " not the rate of one of them, add --set inter_node.bandwidth=.. to plans"
        )
    return {
        **found,
        "island": base.island if found["islands"] else None,
        "switch": base.switch if found["switches"] else None,
    }
