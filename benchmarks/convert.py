"""Measures time and memory of `gnnplan convert` for edge lists in each format.

    python benchmarks/convert.py                                     10 million edges, all formats
    python benchmarks/convert.py --edges 100e6 --vertices 10e6 csv parquet bin

The format's library writes a graph with random edges only, and a separate process converts it. The
kernel limits the memory of this process (--limit). Mapped files do not count, because the kernel
evicts their pages if memory is short. The table has the most resident memory, mapped files
included, and the floor of the seconds: one process reads the file and writes the folder once, in
blocks. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from commands import header, line

from gnnplan.planner.vocabulary.units import quantity

BLOCK = 1 << 24  # [B] read or written at a time
ROWS = 1 << 20  # edges written at a time


def drawn(vertices: int, edges: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random sources and destinations; the last edge ends at the last vertex."""
    rng = np.random.default_rng(0)
    src, dst = (rng.integers(0, vertices, edges, np.int32) for _ in range(2))
    dst[-1] = vertices - 1
    return src, dst


def tables(src: np.ndarray, dst: np.ndarray) -> Iterator[Any]:
    import pyarrow

    for start in range(0, len(src), ROWS):
        some = slice(start, start + ROWS)
        yield pyarrow.table({"src": src[some], "dst": dst[some]})


def written(path: str, pieces: Iterator[Any], writer_of: Callable[..., Any]) -> None:
    first = next(pieces)
    with writer_of(path, first.schema) as writer:
        for table in (first, *pieces):
            writer.write_table(table)


def csv(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    import pyarrow.csv

    written(path, tables(src, dst), pyarrow.csv.CSVWriter)


def csv_gz(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    csv(path.removesuffix(".gz"), src, dst, vertices)
    subprocess.run(["gzip", "-1", path.removesuffix(".gz")], check=True)


def parquet(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    import pyarrow.parquet

    written(path, tables(src, dst), pyarrow.parquet.ParquetWriter)


def mtx(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    import scipy.io

    scipy.io.mmwrite(path, matrix(src, dst, vertices), field="pattern")


def sparse(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    import scipy.sparse

    scipy.sparse.save_npz(path, matrix(src, dst, vertices), compressed=False)


def matrix(src: np.ndarray, dst: np.ndarray, vertices: int) -> Any:
    import scipy.sparse

    return scipy.sparse.coo_matrix((np.ones(len(src), np.int8), (src, dst)), (vertices, vertices))


def npy(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    np.save(path, np.stack([src, dst]))


def npz(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    np.savez(path, src=src, dst=dst)


def pt(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    import torch

    torch.save(torch.stack([torch.from_numpy(src).long(), torch.from_numpy(dst).long()]), path)


def dgl_bin(path: str, src: np.ndarray, dst: np.ndarray, vertices: int) -> None:
    os.environ.setdefault("DGLBACKEND", "pytorch")
    import dgl
    import torch

    ends = torch.from_numpy(src).long(), torch.from_numpy(dst).long()
    dgl.save_graphs(path, [dgl.graph(ends, num_nodes=vertices)])


# format -> (name in the table, file, writer)
FORMATS: dict[str, tuple[str, str, Callable[[str, np.ndarray, np.ndarray, int], None]]] = {
    "csv": ("edge list, CSV", "edges.csv", csv),
    "csv.gz": ("edge list, CSV, gzip", "edges.csv.gz", csv_gz),
    "parquet": ("edge list, Parquet", "edges.parquet", parquet),
    "mtx": ("MatrixMarket", "graph.mtx", mtx),
    "npy": ("edge_index in .npy, int32", "edges.npy", npy),
    "pt": ("edge_index in .pt, int64", "edges.pt", pt),
    "bin": ("DGL .bin, int64", "graph.bin", dgl_bin),
    "sparse": ("SciPy sparse .npz", "sparse.npz", sparse),
    "npz": ("gnnplan's .npz, int32", "graph.npz", npz),
}


def converted(source: Path, folder: Path, limit: float) -> tuple[float, int, int]:
    """Run `gnnplan convert`; return (seconds, most resident memory [B], exit code)."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))

    started = time.perf_counter()
    command = [sys.executable, "-m", "gnnplan", "convert", str(source), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=limited)
    _, status, used = os.wait4(process.pid, 0)  # resources of the process and of its children
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - started, used.ru_maxrss * 1024, process.returncode


def floor(source: Path, folder: Path) -> float:
    """Return the seconds to read the source and to write as many bytes as the folder has."""
    started = time.perf_counter()
    with source.open("rb", buffering=0) as stream:
        while stream.read(BLOCK):
            pass
    sizes = [file.stat().st_size for file in folder.iterdir()]
    block = np.random.default_rng(0).bytes(BLOCK)
    for size in sizes:
        with (folder.parent / "floor").open("wb", buffering=0) as stream:
            for start in range(0, size, BLOCK):
                stream.write(block[: min(BLOCK, size - start)])
            os.fsync(stream.fileno())
    return time.perf_counter() - started


def row(name: str, scratch: Path, vertices: int, edges: int, limit: float) -> str:
    what, file, _ = FORMATS[name]
    source, folder = scratch / file, scratch / "graph"
    sizes = ["--vertices", str(vertices), "--edges", str(edges)]
    subprocess.run([sys.executable, __file__, "--write", str(source), *sizes, name], check=True)
    seconds, peak, code = converted(source, folder, limit)
    size, most = f"{source.stat().st_size / 1e9:.2f}", f"{peak / 1e9:.2f}"
    if code:
        return line(what, f"{edges:,}", size, f"failed ({code})", "", most, "")
    rate, least = f"{edges / seconds / 1e6:.1f}", f"{floor(source, folder):.1f}"
    return line(what, f"{edges:,}", size, f"{seconds:.1f}", rate, most, least)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--edges", type=float, default=10e6)
    parser.add_argument("--vertices", type=float, default=1e6)
    parser.add_argument("--limit", default="8GB", help="memory that a conversion may take")
    parser.add_argument("--folder", help="where files are written and removed again")
    parser.add_argument("--write", metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.formats) - FORMATS.keys():
        parser.error(f"unknown format {', '.join(unknown)}; use {', '.join(FORMATS)}")
    vertices, edges = int(arguments.vertices), int(arguments.edges)
    if arguments.write:
        FORMATS[arguments.formats[0]][2](arguments.write, *drawn(vertices, edges), vertices)
        return
    columns = ("edges", "source GB", "seconds", "million edges/s", "peak GB", "floor, seconds")
    print(header("format", *columns), flush=True)
    for name in arguments.formats or FORMATS:
        scratch = Path(tempfile.mkdtemp(dir=arguments.folder))
        try:
            print(row(name, scratch, vertices, edges, quantity(arguments.limit)), flush=True)
        finally:
            shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
