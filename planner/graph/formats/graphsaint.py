"""GraphSAINT's folders: adj_full.npz, feats.npy, class_map.json, role.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.graph.formats.sparse import load_matrix, of_matrix
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.graph.labels import labels_of
from gnnplan.planner.graph.masks import mask_of, mask_of_ids, named
from gnnplan.planner.graph.parts import Parts, mapped_array, reading
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import read_json

LARGEST_JSON = 1 << 30  # [B]


def read(path: str) -> Parts:
    """The whole graph (adj_full), its features, its labels by class_map, its split by role."""
    folder = Path(path)
    edges = str(folder / "adj_full.npz")
    parts = of_matrix(matrix := load_matrix(edges), edges)
    parts.path, vertices = path, int(matrix.shape[0])
    if os.path.lexists(folder / "feats.npy"):
        parts.x = mapped_array(str(folder / "feats.npy"))
    if os.path.lexists(folder / "class_map.json"):
        parts.y = _labels(folder / "class_map.json", vertices)
    if os.path.lexists(folder / "role.json"):
        parts.masks = roles(folder / "role.json", vertices)
    return parts


def roles(path: Path, vertices: int) -> dict[str, Array]:
    """Masks by a JSON object of lists of ids: tr, va, te or train, val, test."""
    found = read_json(path, LARGEST_JSON, 'write {"tr": [ids], "va": [ids], "te": [ids]}')
    if not isinstance(found, dict):
        raise SpecError(f'{path}: must be an object {{"tr": [ids], "va": [ids], "te": [ids]}}')
    masks = {}
    for name, ids in named(found).items():
        with reading(str(path), f"{name}: a list of vertex ids"):
            masks[name] = mask_of(str(path), name, np.asarray(ids), vertices)
    if not masks:
        raise SpecError(f"{path}: must have lists tr, va, te of vertex ids, has none of them")
    return masks


def _labels(path: Path, vertices: int) -> Array:
    """Class ids [N], or targets [N, C], by an object of a class or a list for every vertex."""
    found: Any = read_json(path, LARGEST_JSON, 'write {"vertex": class}')
    if not isinstance(found, dict) or not found:
        raise SpecError(f'{path}: must be an object {{"vertex": class}}')
    with reading(str(path), "classes of vertices"):
        ids = np.array([int(key) for key in found])
        values = np.array(list(found.values()))
    if values.ndim > 2 or values.dtype.kind not in "iuf":
        raise SpecError(
            f"{path}: must hold a class, or as many zeros and ones, for every vertex, holds"
            f" {values.dtype} of shape {list(values.shape)}; mend its values"
        )
    mask_of_ids(str(path), "class_map", ids, vertices)
    return labels_of(str(path), vertices, [(ids, values)])
