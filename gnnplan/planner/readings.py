"""What other tools have measured of a cluster of GPUs: nccl-tests' JSON (`-J FILE`) and `nvidia-smi topo -m`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from gnnplan.planner.alphabeta import Sample, fit, shapes
from gnnplan.planner.errors import SpecError
from gnnplan.planner.specs import Cluster, Link

MOST = 16 << 20  # [B] of a file
PROGRAMS = {"all_reduce_perf": "all_reduce", "alltoall_perf": "exchange", "sendrecv_perf": "send"}
NEAR = ("PIX", "PXB")  # no further apart than PCIe switches


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST:
            raise SpecError(f"{path} is larger than {MOST:,} B: not such a file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not a text file ({error.reason} at byte {error.start})") from error


# -- nccl-tests ----------------------------------------------------------------------------------------------------------


def nccl_tests(path: Path) -> tuple[str, str, Link]:
    """What nccl-tests wrote with `-J`: the operation, the place, and the link that it is (out of place). Raises SpecError."""
    try:
        document = json.loads(_text(path))
        program = Path(str(document["args"][0])).name
        hosts = [str(device["hostname"]) for device in document["config"]["devices"]]
        rows = [(int(row["size"]), float(row["out_of_place"]["time"]) * 1e-6) for row in document["results"] if row["out_of_place"]]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise SpecError(f"{path}: not what nccl-tests writes with -J ({type(error).__name__}: {error})") from error
    if program not in PROGRAMS:
        raise SpecError(f"{path}: {program} is not asked about; use {', '.join(PROGRAMS)}")
    ranks, servers, op = len(hosts), len(set(hosts)), PROGRAMS[program]
    if ranks < 2:
        raise SpecError(f"{path}: {ranks} device is listed, and a message needs two (nccl-tests lists all only when built with MPI)")
    if 1 < servers < ranks:
        raise SpecError(f"{path}: {ranks} GPUs of {servers} servers use links of both kinds at once; run it on one server, or with one GPU "
                        "per server (mpirun --map-by ppr:1:node, -g 1)")  # fmt: skip
    each = ranks if op == "exchange" else 1  # an all-to-all's size is of the messages to all
    samples: list[Sample] = [(size // each, seconds, 0.0) for size, seconds in rows if size >= each and seconds > 0]
    if len(samples) < 3:
        raise SpecError(f"{path}: {len(samples)} sizes; give at least 3 (-b 1K -e 64M -f 2)")
    return op, "intra_node" if servers == 1 else "inter_node", fit(samples, shapes(ranks)[op])[0]


# -- nvidia-smi topo -m --------------------------------------------------------------------------------------------------


def topology(path: Path) -> dict[str, Any]:
    """Lists of a server's GPUs as a Cluster has them, by `nvidia-smi topo -m`. Raises SpecError.

    islands: GPUs with NVLink between all of them; switches: GPUs that meet at PCIe switches; nics: GPUs with the same nearest cards.
    """
    rows: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in _text(path).splitlines():
        words = re.sub(r"\x1b\[[\d;]*m|\^\[\[[\d;]*m", "", line).split()
        if not words:
            if rows:
                break  # the legend follows
        elif not head and words[0].startswith("GPU"):
            head = [word for word in words if re.fullmatch(r"GPU\d+|NIC\d+|mlx\d+_\d+", word)]
        elif head and words[0] in head:
            rows[words[0]] = dict(zip(head, words[1:], strict=False))
    gpus = [name for name in head if name.startswith("GPU")]
    if not gpus or any(name not in rows or len(rows[name]) < len(head) for name in gpus):
        raise SpecError(f"{path}: not what `nvidia-smi topo -m` prints (a line of GPU0 GPU1 ..., then one for each)")
    number = {name: place for place, name in enumerate(gpus)}

    def linked(*ways: str) -> list[tuple[int, ...]]:
        """GPUs that are joined in such a way, directly or through others."""
        graph = nx.Graph()
        graph.add_nodes_from(gpus)
        graph.add_edges_from((a, b) for a in gpus for b in gpus if a != b and re.fullmatch("|".join(ways), rows[a][b]))
        return sorted(tuple(sorted(number[name] for name in part)) for part in nx.connected_components(graph))

    islands, switches = linked(r"NV\d+"), linked(*NEAR)
    if any(not rows[gpus[a]][gpus[b]].startswith("NV") for island in islands for a in island for b in island if a != b):
        islands = []  # a cube mesh: some pairs of it have no NVLink
    cards = [name for name in head if name not in number]
    nearest = {name: _nearest(rows[name], cards) for name in gpus}
    nics = sorted(tuple(number[name] for name in gpus if nearest[name] == some) for some in set(nearest.values()))
    return {"gpus_per_server": len(gpus), "islands": _told(islands, len(gpus)), "switches": _told(switches, len(gpus)),
            "nics": _told(nics, len(gpus)) if cards else ()}  # fmt: skip


def _nearest(row: dict[str, str], cards: Sequence[str]) -> tuple[str, ...]:
    """The cards that a GPU has the shortest way to."""
    ways = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
    best = min((ways.index(row[card]) for card in cards if row.get(card) in ways), default=None)
    return tuple(card for card in cards if best is not None and row.get(card) == ways[best])


def _told(lists: Sequence[tuple[int, ...]], gpus: int) -> tuple[tuple[int, ...], ...]:
    """Nothing where every GPU is alone: there is no such thing."""
    return tuple(lists) if lists and len(lists) < gpus else ()


# -- a cluster -----------------------------------------------------------------------------------------------------------


def read(base: Cluster, tests: Sequence[Path], wiring: Path | None) -> Cluster:
    """The cluster with what these files say; a GPU's own rates stay as they are. Raises SpecError."""
    fields: dict[str, Any] = {}
    told = dict(base.provenance)
    if wiring:
        found = topology(wiring)
        for kind, lists in (("island", found["islands"]), ("switch", found["switches"])):
            if lists and getattr(base, kind) is None:
                raise SpecError(f"{wiring} has {kind} lists, and cluster {base.name} does not say how fast such a link is; add "
                                f"{kind}: {{bandwidth: .., latency: ..}} to it")  # fmt: skip
        fields |= {**found, "island": base.island if found["islands"] else None, "switch": base.switch if found["switches"] else None}
        told |= dict.fromkeys((name for name in ("islands", "switches", "nics") if found[name]), f"read from {wiring.name}")
    measured = dict(base.collectives)
    for path in tests:
        op, where, link = nccl_tests(path)
        place = "island" if where == "intra_node" and len(fields.get("islands", base.islands)) == 1 else where
        measured[f"{op}.{place}"] = link
        told[f"collectives.{op}.{place}"] = f"nccl-tests, {path.name}"
        fields[place] = link if op == "send" else fields.get(place) or getattr(base, place) or link
    return Cluster.model_validate({**base.model_dump(), **fields, "collectives": measured, "provenance": told})
