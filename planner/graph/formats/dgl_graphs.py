"""DGL: graph objects, and .bin files of dgl.save_graphs.

A damaged .bin makes DGL's C++ end its process, so a process of its own reads it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.graph.arrays import read_own
from gnnplan.planner.graph.fields import EDGE, VERTEX
from gnnplan.planner.graph.formats.mapped import write
from gnnplan.planner.graph.formats.partitioned import read_distdgl
from gnnplan.planner.graph.parts import Parts, library, reading, take_fields, take_vertex_data
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError

MAGIC = (0xDD2E4FF046B4A13F).to_bytes(8, "little")
OWN_MEMORY = 16 << 30  # [B] of address space that the libraries take, far less of it real
PER_BYTE = 8  # [B] of memory per byte of the file


def of_graph(graph: Any, path: str = "a DGLGraph") -> Parts:
    """A homogeneous graph, with features, labels and masks of its ndata; all else are fields."""
    if not graph.is_homogeneous or len(graph.canonical_etypes) != 1:
        raise SpecError(
            f"{path}: has {len(graph.ntypes)} kinds of vertices and {len(graph.canonical_etypes)}"
            " of edges, one of each is needed; give dgl.to_homogeneous(graph)"
        )
    src, dst = (ids.cpu().numpy() for ids in graph.edges(order="eid"))
    parts = Parts(path, [(src, dst)], int(graph.num_nodes()))
    on_vertices, on_edges = take_vertex_data(parts, dict(graph.ndata)), dict(graph.edata)
    for data in (on_vertices, on_edges):
        data.pop("_ID", None)  # DGL's own, in a part of a graph
    take_fields(parts, on_vertices, lambda name, rows: VERTEX)
    take_fields(parts, on_edges, lambda name, rows: EDGE)
    return parts


def read(path: str) -> Parts:
    """The graph of a .bin file, or of DistDGL's folder of parts.

    Raises SpecError, also where DGL ends its process."""
    with tempfile.TemporaryDirectory(prefix="gnnplan-") as folder:
        out = Path(folder) / "graph"
        # -P: a folder named gnnplan in the working directory must not hide the package
        command = [sys.executable, "-P", "-m", __name__, path, str(out)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode == SpecError.exit_code:
            raise SpecError(done.stderr.splitlines()[-1])
        if done.returncode:
            raise SpecError(
                f"{path}: cannot be read as a DGL graph (DGL ended with {done.returncode}); the"
                " file is damaged, save it again with dgl.save_graphs"
            )
        owner = out / "owner.npy"
        kept = np.load(owner, allow_pickle=False) if owner.exists() else None
        owner.unlink(missing_ok=True)
        parts = replace(read_own(str(out)), path=path, owner=kept)
    if parts.x is not None:
        parts.x = np.asarray(parts.x)  # mapped still, but its file has no name any more
    parts.vertex_fields = {name: np.asarray(field) for name, field in parts.vertex_fields.items()}
    parts.notes += [line.removeprefix("note: ") for line in done.stdout.splitlines() if line]
    return parts


def _main(path: str, out: str) -> None:
    """Read a .bin or DistDGL's parts, and write it as a folder of arrays."""
    import resource  # not on Windows

    files = Path(path).rglob("*") if os.path.isdir(path) else [Path(path)]
    limit = OWN_MEMORY + PER_BYTE * sum(file.stat().st_size for file in files)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    dgl = library("dgl")
    if os.path.isdir(path):
        with reading(path, "DistDGL's parts"):
            write(parts := read_distdgl(path), Path(out))
            assert parts.owner is not None
            np.save(Path(out) / "owner.npy", parts.owner)
        print(*(f"note: {note}" for note in parts.notes), sep="\n")
        return
    with reading(path, "a DGL graph"):
        graphs, _ = dgl.load_graphs(path)
        if len(graphs) != 1:
            raise SpecError(
                f"{path}: holds {len(graphs)} graphs, one is needed; save it alone with"
                " dgl.save_graphs(path, [graph])"
            )
        parts = of_graph(graphs[0], path)
        write(parts, Path(out))
    print(*(f"note: {note}" for note in parts.notes), sep="\n")


if __name__ == "__main__":
    try:
        _main(sys.argv[1], sys.argv[2])
    except GnnplanError as problem:
        print(problem, file=sys.stderr)
        sys.exit(SpecError.exit_code)
