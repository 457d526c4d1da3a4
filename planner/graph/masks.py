"""Masks [N] of training, validation and test vertices: read, told from lists of ids, or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.graph.ids import must_be_ids
from gnnplan.planner.vocabulary.errors import SpecError

T = TypeVar("T")
MASKS = ("train_mask", "val_mask", "test_mask")
# words for them in files' names and lists, the likeliest first
WORDS = {
    "train_mask": ("train", "train_mask", "train_idx", "tr"),
    "val_mask": ("val", "valid", "val_mask", "val_idx", "valid_idx", "va"),
    "test_mask": ("test", "test_mask", "test_idx", "te"),
}


def named(held: Mapping[str, T]) -> dict[str, T]:
    """What is held under a word for a mask, by the names of the masks."""
    words = {mask: next((w for w in words if w in held), "") for mask, words in WORDS.items()}
    return {mask: held[word] for mask, word in words.items() if word}


def mask_of_ids(path: str, name: str, ids: Array, vertices: int) -> Array:
    """The mask [N] of a list of vertex ids. Raises SpecError for ids beyond them, or twice."""
    ids = column(ids if ids.size else ids.astype(np.int64))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SpecError(
            f"{path}: {name}: must be a list of vertex ids, is {ids.dtype} of shape"
            f" {list(ids.shape)}; write whole numbers"
        )
    must_be_ids(path, name, ids, vertices)
    must_fit(path, f"masks of {vertices:,} vertices", 3.0 * vertices)
    mask = np.zeros(vertices, bool)
    mask[ids] = True
    if (different := int(mask.sum())) < ids.size:
        raise SpecError(
            f"{path}: {name}: must name every vertex once, has {ids.size:,} ids of"
            f" {different:,} vertices; write each once, or booleans for all"
            f" {vertices:,} vertices if it is a mask"
        )
    return mask


def mask_of(path: str, name: str, array: Array, vertices: int) -> Array:
    """The mask [N] of a mask, of booleans or of zeros and ones, or of a list of vertex ids.

    Raises SpecError for what is neither, or may be both."""
    array = column(array)
    flags = array.dtype.kind == "b"
    if flags and array.shape != (vertices,):
        raise SpecError(
            f"{path}: {name}: must have a value for each of {vertices:,} vertices, has shape"
            f" {list(array.shape)}; write all, or a list of ids"
        )
    bits = array.dtype.kind in "iuf" and array.shape == (vertices,) != (0,)
    bits = bits and bool(np.isin(array, (0, 1)).all())
    if bits and np.unique(array).size == vertices:
        raise SpecError(
            f"{path}: {name}: {array.tolist()} may be ids of vertices or a mask of {vertices};"
            f" save {name}.astype(bool) if it is a mask"
        )
    return array.astype(bool) if flags or bits else mask_of_ids(path, name, array, vertices)


def column(array: Array) -> Array:
    """An array of a single column as that column [N]; another as it is."""
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def as_mask(path: str, name: str, mask: Array, notes: list[str]) -> Array:
    """A mask [N] of booleans, or of zeros and ones; of several splits [N, S] the first, and it is
    said. Raises SpecError."""
    if mask.ndim == 2 and mask.shape[1] >= 1:
        if mask.shape[1] > 1:
            notes.append(f"{name} holds {mask.shape[1]} splits; the first is taken")
        mask = mask[:, 0]
    if mask.dtype.kind == "b":
        return mask
    if (bad := ~np.isin(mask, (0, 1))).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: {name}[{first}]: must hold booleans, or zeros and ones, found"
            f" {mask.flat[first]}; save True or False for each vertex"
        )
    return mask.astype(bool)


def split_of(
    path: str,
    given: Mapping[str, Array],
    labelled: Array,
    classes: int,
    rng: np.random.Generator,
    notes: list[str],
    seed: int,
) -> list[Array]:
    """Training, validation and test masks [N]. given: those that were read.

    Without masks labelled vertices are split at random, with a note; without labels all are.
    Without train_mask those are trained on that the other masks leave, with a note."""
    vertices = len(labelled)
    if classes == 0:
        notes.append("no labels: can be planned, not trained")
    if given:
        masks = [given.get(name, np.zeros(vertices, bool)) for name in MASKS]
    else:
        notes.append(f"random 60/20/20 split by seed {seed}: the file has no train_mask")
        masks = list(random_split(labelled, rng))
    if given and "train_mask" not in given:
        masks[0] = labelled & ~masks[1] & ~masks[2]
        notes.append(
            f"the file has no train_mask: {int(masks[0].sum()):,} vertices are trained on, all with"
            f" a label outside of {' and '.join(given)}"
        )
    train, val, test = masks
    if not train.any():
        raise SpecError(
            f"{path}: train_mask: marks no vertex; at least 1 of {vertices:,} must be trained on"
        )
    if classes and (bad := train & ~labelled).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: y[{first}]: a training vertex needs a label, found none ({int(bad.sum()):,}"
            " such vertices); take them out of train_mask"
        )
    if (shared := train & test).any():
        raise SpecError(
            f"{path}: train_mask, test_mask: must not overlap, share {int(shared.sum()):,} vertices"
            f" (first: {int(np.flatnonzero(shared)[0])}); take these out of one"
        )
    if (train & val).any() or (val & test).any():
        notes.append("val_mask overlaps train_mask or test_mask")
    for name, i in (("val_mask", 1), ("test_mask", 2)):
        if classes and (unlabelled := int((masks[i] & ~labelled).sum())):
            masks[i] = masks[i] & labelled
            notes.append(f"took {unlabelled:,} vertices without label out of {name}")
    return masks


def random_split(
    labelled: Array, rng: np.random.Generator, train: float = 0.6
) -> tuple[Array, Array, Array]:
    """Training, validation and test masks [N] that split the labelled vertices.

    `train` is the share of the first; the other two are equal: 60/20/20."""
    order = rng.permutation(np.flatnonzero(labelled))
    cuts = [round(train * len(order)), round((1 + train) / 2 * len(order))]
    masks = []
    for ids in np.split(order, cuts):
        mask = np.zeros(len(labelled), bool)
        mask[ids] = True
        masks.append(mask)
    return masks[0], masks[1], masks[2]
