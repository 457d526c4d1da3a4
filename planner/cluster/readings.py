"""From the files of other tools to a cluster: nccl-tests (`-J FILE`) and `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx
from pydantic import ValidationError

from gnnplan.planner.cluster.link_fit import Sample, fit, shapes
from gnnplan.planner.cluster.spec import MOST_GPUS, Cluster, Link
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import from_json, read_bytes
from gnnplan.planner.vocabulary.trace import LONGEST

MAX_FILE = 16 << 20  # [B]
MOST_SIZES = 10_000  # that one file of nccl-tests has
LARGEST = 1e18  # message [B]
# The programs of nccl-tests, and the operations that they measure.
PROGRAMS = {"all_reduce_perf": "all_reduce", "alltoall_perf": "exchange", "sendrecv_perf": "send"}
# What nvidia-smi calls ways between GPUs and NICs, from the shortest to the longest.
WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
BY_PCIE_SWITCHES = ("PIX", "PXB")


def _text(path: Path) -> str:
    """The text of a file. Raises SpecError."""
    try:
        return read_bytes(path, MAX_FILE, "give what the tool wrote").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: not a text file ({error.reason} at byte {error.start}); give what the tool"
            " wrote"
        ) from error


# -- nccl-tests


def nccl_tests(path: Path) -> tuple[str, str, Link]:
    """The operation that nccl-tests measured, where, and the link that its times imply.

    Times are those out of place. Raises SpecError.
    """
    document = from_json(path, _text(path), "it is not what nccl-tests writes with -J")
    try:
        program = Path(str(document["args"][0])).name
        hosts = [str(device["hostname"]) for device in document["config"]["devices"]]
        rows = [
            (_number(row["size"], LARGEST), _number(row["out_of_place"]["time"], LONGEST) * 1e-6)
            for row in document["results"]
            if row["out_of_place"]
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SpecError(
            f"{path}: not what nccl-tests writes with -J ({type(error).__name__}: {error})"
        ) from error
    if program not in PROGRAMS:
        raise SpecError(f"{path}: {program} is not asked about; use {', '.join(PROGRAMS)}")
    ranks, servers, op = len(hosts), len(set(hosts)), PROGRAMS[program]
    if ranks < 2:
        raise SpecError(
            f"{path}: {ranks} device is listed, and a message needs two (nccl-tests lists all only"
            " when built with MPI)"
        )
    if 1 < servers < ranks:
        raise SpecError(
            f"{path}: {ranks} GPUs of {servers} servers use links of both kinds at once; run it on"
            " one server, or with one GPU per server (mpirun --map-by ppr:1:node, -g 1)"
        )
    messages = ranks if op == "exchange" else 1  # a size is that of all messages together
    if len(rows) > MOST_SIZES:
        raise SpecError(
            f"{path}: {len(rows):,} sizes, and at most {MOST_SIZES:,} are fitted to; measure fewer"
            " (-f 2)"
        )
    samples: list[Sample] = [
        (int(size // messages), seconds, 0.0)
        for size, seconds in rows
        if size >= messages and seconds > 0
    ]
    if len(samples) < 3:
        raise SpecError(f"{path}: {len(samples)} sizes; give at least 3 (-b 1K -e 64M -f 2)")
    try:
        link = fit(samples, shapes(ranks)[op])[0]
    except ValidationError as error:  # no such link: too fast or too slow
        what = error.errors()[0]["msg"]
        raise SpecError(
            f"{path}: its times imply no link that there is ({what}); measure again"
        ) from error
    return op, "intra_node" if servers == 1 else "inter_node", link


def _number(value: object, most: float) -> float:
    """A number of a file in [0, most]. Raises ValueError."""
    # older nccl-tests write numbers as text
    number = float(value) if type(value) in (int, float, str) else -1.0  # type: ignore[arg-type]
    if not 0 <= number <= most:
        raise ValueError(f"{value!r:.80} is no number from 0 to {most:g}")
    return number


# -- nvidia-smi topo -m


def topology(path: Path) -> dict[str, Any]:
    """Lists of a server's GPUs as fields of a Cluster, from `nvidia-smi topo -m`. Raises SpecError.

    islands: GPUs with NVLink between any two of them; switches: GPUs that are joined by PCIe
    switches; nics: GPUs with the same nearest NICs.
    """
    ways = _matrix(path)
    gpus = [name for name in ways if name.startswith("GPU")]
    number = {name: i for i, name in enumerate(gpus)}

    def joined_by(pattern: str) -> list[tuple[int, ...]]:
        """GPUs that are joined in such a way, directly or through others."""
        is_such = re.compile(pattern).fullmatch
        joined = nx.Graph()
        joined.add_nodes_from(gpus)
        joined.add_edges_from((a, b) for a in gpus for b in gpus if a != b and is_such(ways[a][b]))
        return sorted(
            tuple(sorted(number[name] for name in part)) for part in nx.connected_components(joined)
        )

    islands, switches = joined_by(r"NV[0-9]+"), joined_by("|".join(BY_PCIE_SWITCHES))
    if any(
        not ways[gpus[a]][gpus[b]].startswith("NV")
        for island in islands
        for a in island
        for b in island
        if a != b
    ):
        islands = []  # a cube mesh: some pairs of it have no NVLink
    nics = [name for name in ways[gpus[0]] if name not in number]
    nearest = {name: _nearest(ways[name], nics) for name in gpus}
    gpus_by_nics = sorted(
        tuple(number[name] for name in gpus if nearest[name] == own)
        for own in set(nearest.values())
    )
    return {
        "gpus_per_server": len(gpus),
        "islands": _unless_alone(islands, len(gpus)),
        "switches": _unless_alone(switches, len(gpus)),
        "nics": _unless_alone(gpus_by_nics, len(gpus)) if nics else (),
    }


def _matrix(path: Path) -> dict[str, dict[str, str]]:
    """GPU or NIC -> GPU or NIC -> the way between them, as nvidia-smi names it.

    GPUs come in the order of the table's head. Raises SpecError.
    """
    is_name = re.compile(r"GPU[0-9]+|NIC[0-9]+|mlx[0-9]+_[0-9]+").fullmatch
    rows: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in _text(path).splitlines():
        words = re.sub(r"\x1b\[[\d;]*m|\^\[\[[\d;]*m", "", line).split()
        if not words:
            if rows:
                break  # the legend follows
        elif not head and words[0].startswith("GPU"):
            head = [word for word in words if is_name(word)]
            if len(head) > MOST_GPUS:
                raise SpecError(
                    f"{path}: {len(head):,} GPUs and NICs, and a server has at most {MOST_GPUS:,};"
                    " give the table of one server"
                )
        elif head and words[0] in head:
            rows[words[0]] = dict(zip(head, words[1:], strict=False))
    gpus = [name for name in head if name.startswith("GPU")]
    if not gpus or any(name not in rows or len(rows[name]) < len(head) for name in gpus):
        raise SpecError(
            f"{path}: not what `nvidia-smi topo -m` prints (a line of GPU0 GPU1 ..., then one for"
            " each)"
        )
    return {name: rows[name] for name in gpus}


def _nearest(row: dict[str, str], nics: Sequence[str]) -> tuple[str, ...]:
    """The NICs that a GPU has the shortest way to."""
    best = min((WAYS.index(row[nic]) for nic in nics if row.get(nic) in WAYS), default=None)
    return tuple(nic for nic in nics if best is not None and row.get(nic) == WAYS[best])


def _unless_alone(lists: Sequence[tuple[int, ...]], gpus: int) -> tuple[tuple[int, ...], ...]:
    """The lists, or none if every GPU has its own."""
    return tuple(lists) if lists and len(lists) < gpus else ()


# -- a cluster


def read(base: Cluster, tests: Sequence[Path], wiring: Path | None) -> Cluster:
    """The cluster with what the files of nccl-tests and nvidia-smi say of it.

    A GPU's own rates stay as they are. Raises SpecError.
    """
    fields: dict[str, Any] = {}
    provenance = dict(base.provenance)
    if wiring:
        found = topology(wiring)
        for kind, lists in (("island", found["islands"]), ("switch", found["switches"])):
            if lists and getattr(base, kind) is None:
                raise SpecError(
                    f"{wiring} has {kind} lists, and cluster {base.name} does not say how fast such"
                    f" a link is; add {kind}: {{bandwidth: .., latency: ..}} to it"
                )
        fields |= {
            **found,
            "island": base.island if found["islands"] else None,
            "switch": base.switch if found["switches"] else None,
        }
        for name in ("islands", "switches", "nics"):
            if found[name]:
                provenance[name] = f"read from {wiring.name}"
    measured = dict(base.collectives)
    for path in tests:
        op, place, link = nccl_tests(path)
        if place == "intra_node" and len(fields.get("islands", base.islands)) == 1:
            place = "island"  # all GPUs of a server share it
        measured[f"{op}.{place}"] = link
        provenance[f"collectives.{op}.{place}"] = f"nccl-tests, {path.name}"
        fields[place] = link if op == "send" else fields.get(place) or getattr(base, place) or link
    try:
        return Cluster.model_validate(
            {**base.model_dump(), **fields, "collectives": measured, "provenance": provenance}
        )
    except ValidationError as error:
        files = ", ".join(str(path) for path in (wiring, *tests) if path)
        raise SpecError(
            f"{files}: no cluster with the rest of {base.name}: {error.errors()[0]['msg']}"
        ) from error
