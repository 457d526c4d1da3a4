"""A folder with a part of a graph per rank: writing it, and the layout of such a folder.

A part's files have the rank's rows, edges and halo in a layout without preloading. `PartLayout`
reads them, where Layout computes them from the whole graph. graph/part_folder.py describes the
files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from gnnplan import __version__
from gnnplan.planner.graph.arrays import Rows, must_be_new, renamed
from gnnplan.planner.graph.data import EDGE, VERTEX
from gnnplan.planner.graph.graph import AT_ONCE, Array, Graph, feature_arrays
from gnnplan.planner.graph.part_folder import (
    DESCRIPTION,
    OF_PART,
    VERSION,
    Description,
    Part,
    PartFolder,
    PartGraph,
    Stored,
    digest_of,
    parsed,
    sealed,
)
from gnnplan.planner.ownership.layout import LayerCounts, Layout, RankLayer, reached
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import folder_lock, remedy_of
from gnnplan.planner.vocabulary.numbers import PerRank, offsets, ranges, split
from gnnplan.planner.vocabulary.progress import notify, say
from gnnplan.planner.vocabulary.units import show_count

HOPS = 16  # the folder has the numbers of vertices within 0 .. 16 hops of training vertices


class _RankRows(Sequence[tuple[np.ndarray, np.ndarray]]):
    """A lazy `Layout._rank_rows` for depth 0: rank -> (ids, last), read at access."""

    def __init__(self, folder: PartFolder, layers: int) -> None:
        self.folder, self.last = folder, np.int16(layers)

    def __len__(self) -> int:
        return len(self.folder.parts)

    def __getitem__(self, rank: Any) -> Any:
        ids = self.folder.array(rank, "ids")
        return ids, np.broadcast_to(self.last, ids.size)


class PartLayout(Layout):
    """The layout of a folder with a part per rank, without preloading.

    About other ranks it reads only counts, and the ids of the rows that they send."""

    @property
    def folder(self) -> PartFolder:
        assert isinstance(self.graph, PartGraph)
        return self.graph.folder

    @property
    def _position(self) -> np.ndarray:
        return self.folder.place

    @property
    def _sends(self) -> np.ndarray:
        return self.folder.array(None, "sends")

    def _parts(self) -> Any:
        return _RankRows(self.folder, self.layers)

    def _sizes(self, h: int) -> PerRank:
        return tuple(part.vertices for part in self.folder.parts)

    def _piece(self, rank: int, layer: int, rows: int, local: int) -> RankLayer:
        halo, edges = self.folder.array(rank, "halo"), self.folder.parts[rank].edges
        return RankLayer(rows, local, halo, self._sends[:, rank], edges)

    def sent(self, rank: int, layer: int) -> list[np.ndarray]:
        return split(self.folder.array(rank, "give"), self._sends[rank])

    def _counted(self, layer: int) -> LayerCounts:
        parts, sends = self.folder.parts, self._sends
        rows = np.array(self._sizes(layer))
        return LayerCounts(rows, rows + sends.sum(0), np.array([p.edges for p in parts]), sends)


def is_stored(graph: Graph, ranks: int) -> bool:
    """Whether the graph is stored as a folder with a part per rank."""
    return isinstance(graph, PartGraph) and len(graph.folder.parts) == ranks


# -- writing --------------------------------------------------------------------------------------


def write_parts(
    graph: Graph,
    owner: np.ndarray,
    method: str,
    seed: int,
    folder: Path,
) -> Description:
    """Write a graph as a folder of parts, which is complete or absent.

    owner: the part of each vertex [N]. After a failure, the parts written so far stay beside the
    folder, and the next call reuses them. Raises SpecError."""
    must_be_new(folder)
    parts = int(owner.max()) + 1
    layout = Layout(graph, owner, tuple(range(parts)), layers=1, first_varying=0, method=method)
    name = _name_of(graph, owner, method, seed)
    begun = folder.with_name(f".{folder.name}.begun")
    known: dict[int, Part] = {}
    try:
        with _alone_beside(folder, begun):
            for number in range(parts):
                if part := _written(begun, number, name):
                    known[number] = part
            _keep_only({f"part{number}" for number in known}, begun)
            for number in range(parts):
                if number not in known:
                    notify(f"writing part {number + 1} of {parts}")
                    known[number] = _write_part(layout, number, name, begun)
            notify("writing what all parts share")
            about = _describe(layout, known, name, method, seed, begun)
            must_be_new(folder)
            os.rename(begun, folder)
    except OSError as error:
        raise SpecError(
            f"{folder}: cannot be written ({error.strerror or error}); {remedy_of(error)};"
            f" {_kept(known, parts, begun)}"
        ) from error
    except (KeyboardInterrupt, SystemExit):
        say(f"note: {folder} is not complete; {_kept(known, parts, begun)}")
        raise
    return about


def _kept(known: Mapping[int, Part], parts: int, begun: Path) -> str:
    """Return a sentence for the user about the parts that an incomplete write has kept."""
    if not known:
        return "no part of it is kept, and the same command begins anew"
    kept = f"{len(known)} of {show_count(parts, 'part')} are kept in {begun}"
    return f"{kept}, and the same command goes on from there"


def _name_of(graph: Graph, owner: np.ndarray, method: str, seed: int) -> str:
    """Return a digest that identifies the graph and its partition."""
    digest = blake2b(f"{VERSION} {graph.stats.hash} {method} {seed}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(owner, np.int32).data)
    return digest.hexdigest()


def _written(begun: Path, number: int, name: str) -> Part | None:
    """Return a part of the partition `name` that an earlier call wrote.

    None if there is none, or if a file of it is not what was written."""
    folder = begun / f"part{number}"
    try:
        part = parsed(Part, folder / OF_PART)
        intact = (digest_of(folder / f"{of}.npy") == at.digest for of, at in part.files.items())
        return part if part.cut == name and all(intact) else None
    except (SpecError, OSError):
        return None


@contextmanager
def _alone_beside(folder: Path, begun: Path) -> Iterator[None]:
    """Make and lock the folder `begun` for a block; afterwards, remove `begun` if it is empty.

    Raises SpecError, OSError."""
    begun.mkdir(exist_ok=True)
    with folder_lock(begun, "another gnnplan partition writes in", "give another folder"):
        try:
            must_be_new(folder)  # another process may just have finished it
            yield
        finally:
            with suppress(OSError):  # `begun` has parts, or was renamed to `folder`
                begun.rmdir()


def _keep_only(names: set[str], begun: Path) -> None:
    """Remove parts of other partitions, and files left by killed writers."""
    for path in begun.iterdir():
        if not path.is_dir():
            path.unlink()
        elif path.name not in names:
            shutil.rmtree(path)


def _write_part(layout: Layout, number: int, name: str, begun: Path) -> Part:
    with renamed(begun / f"part{number}") as folder:
        arrays = _arrays_of(layout, number)
        files = {of: _save(folder / f"{of}.npy", pieces) for of, pieces in arrays.items()}
        vertices, edges = files["ids"].shape[0], files["indices"].shape[0]
        part = Part(name, number, vertices, edges, files)
        _save_text(folder / OF_PART, part)
    return part


def _rows_of(array: Any, ids: np.ndarray) -> Iterator[Array]:
    """Yield rows of an array in blocks of about AT_ONCE bytes."""
    step = max(1, AT_ONCE // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:]))))
    return (array[ids[start : start + step]] for start in range(0, max(ids.size, 1), step))


def _arrays_of(layout: Layout, number: int) -> dict[str, Iterable[Array]]:
    """Return a part's arrays by name, each as an iterable of blocks of rows."""
    graph, ids, piece = layout.graph, layout.rows(number, 0), layout.piece(number, 1)
    indptr = offsets(graph.degree_of(ids))
    out: dict[str, Iterable[Array]] = {
        "ids": [ids.astype(np.int64, copy=False)],
        "indptr": [indptr],
        "indices": [graph.neighbours(ids)],
        "halo": [piece.halo.astype(np.int64, copy=False)],
        "give": [np.concatenate(layout.sent(number, 1))],
    }
    if graph.stats.dense:
        out["x"] = _rows_of(graph.x, ids)
    else:
        out |= {name: [array] for name, array in feature_arrays(graph.x[ids]).items()}
    rows = {name: getattr(graph, name) for name in ("y", "train", "val", "test")}
    rows |= {VERTEX + name: field for name, field in graph.vertex_fields.items()}
    out |= {name: _rows_of(array, ids) for name, array in rows.items()}
    for name, field in graph.edge_fields.items():
        out[EDGE + name] = _rows_of(field, ranges(graph.indptr[ids], graph.degree_of(ids)))
    return out


def _describe(
    layout: Layout, known: dict[int, Part], name: str, method: str, seed: int, begun: Path
) -> Description:
    """Write the arrays that all parts share, then the description of the folder."""
    graph = layout.graph
    degree = {"degree": graph.degree}
    if graph.stats.directed:
        degree["out_degree"] = graph.out_degree
    arrays = {"owner": layout.owner, "place": layout._position, "order": layout._order, **degree}
    files = {
        of: _save(begun / f"{of}.npy", [array.astype(np.int32, copy=False)])
        for of, array in arrays.items()
    }
    files["sends"] = _save(begun / "sends.npy", [np.asarray(layout.facts(1).sends)])
    about = Description(
        VERSION,
        __version__,
        graph.stats,
        len(known),
        method,
        seed,
        name,
        [known[number].vertices for number in range(len(known))],
        [known[number].edges for number in range(len(known))],
        [known[number].files["halo"].shape[0] for number in range(len(known))],
        reached(graph, HOPS),
        files,
        [digest_of(begun / f"part{number}" / OF_PART) for number in range(len(known))],
    )
    _save_text(begun / DESCRIPTION, about)
    return about


def _save_text(path: Path, about: Part | Description) -> None:
    with open(path, "xb") as stream:
        # defaults are left out: JSON has no infinity (GraphStats.near_seed)
        text = TypeAdapter(type(about)).dump_json(about, exclude_defaults=True)
        stream.write(json.dumps(sealed(json.loads(text)), indent=1).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _save(path: Path, pieces: Iterable[Array]) -> Stored:
    """Write an array, and return its description."""
    with closing(Rows(path)) as rows:
        for piece in pieces:
            rows.append(piece)
    return Stored(rows.shape, rows.dtype.str, path.stat().st_size, digest_of(path))
