"""The specification of what is trained: a GNN and its training options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gnnplan.planner.gnn.counted import Counted
from gnnplan.planner.gnn.fields import FANOUT, Fields
from gnnplan.planner.gnn.kinds import KINDS, Kind
from gnnplan.planner.vocabulary.precision import PRECISIONS, Precision
from gnnplan.planner.vocabulary.spec import Spec

WORKLOADS = Path(__file__).resolve().parent / "workloads"  # presets: what papers trained with
ALL = -1  # the fanout that takes every neighbour
TASKS = ("node", "link")
# what tells how good a model is, by what it learns: edges, one label of a vertex, several, or
# numbers; the first is the default
METRICS = {
    "link": ("auc",),
    "label": ("accuracy", "f1_macro", "roc_auc"),
    "labels": ("f1_micro", "f1_macro", "roc_auc"),
    "numbers": ("mae",),
}
FALLING = ("mae",)  # those of which less is better
PARTS = ("train", "val", "test")
BALANCED = "balanced"  # what class_weights may say besides numbers
ROUNDED_MODELS = [name for name, kind in KINDS.items() if kind.rounds_rows]
AUTO = "auto"  # what --dtype may say besides types: the plan chooses one (decision/dtypes.py)
MOST_BATCH_LAYERS = 32  # of a mini-batch, which reaches one hop further by every layer


def scores_of(fields: Iterable[str]) -> list[str]:
    """The names of scores among the fields of a line of metrics.jsonl.

    >>> scores_of(["epoch", "loss", "train_f1_micro", "val_f1_micro", "test_f1_micro", "epoch_s"])
    ['train_f1_micro', 'val_f1_micro', 'test_f1_micro']
    """
    metrics = dict.fromkeys(metric for metrics in METRICS.values() for metric in metrics)
    names = [f"{part}_{metric}" for metric in metrics for part in PARTS]
    return [name for name in names if name in fields]


def show_scores(row: Mapping[str, Any]) -> str:
    """The scores of a line of metrics.jsonl, in words; '' if it has none.

    >>> show_scores({"train_f1_micro": 0.8, "val_f1_micro": 0.75, "test_f1_micro": None})
    'f1_micro: training pass 0.800, val 0.750'
    """
    names = [name for name in scores_of(row) if row[name] is not None]
    if not names:
        return ""
    parts = [name.partition("_")[0] for name in names]
    said = [
        f"{'training pass' if part == 'train' else part} {row[name]:.3f}"
        for part, name in zip(parts, names, strict=True)
    ]
    return f"{names[0].partition('_')[2]}: {', '.join(said)}"


def is_module(model: object) -> bool:
    """Whether a model is named by a file, and is no kind of ours.

    >>> is_module("file.py:MyGNN"), is_module("gcn")
    (True, False)
    """
    return isinstance(model, str) and ".py" in model


class Conflict(ValueError):
    """Values of several fields that do not go together.

    `fields` names the fields, the likeliest mistake first."""

    def __init__(self, fields: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.fields = fields


class ModuleLayer(Spec):
    """A layer of a user's module: its widths, and what the module does to its inputs."""

    h_in: int = Field(ge=1)
    h_out: int = Field(ge=1)
    heads: int = Field(0, ge=0)  # of attention
    middle: int = Field(0, ge=0)  # GIN: numbers per row between its two products
    norm: Literal["none", "layer", "batch"] = "none"  # of its inputs, before their ReLU
    drops: bool = True  # dropout of its inputs
    bias: bool = True
    residual: None = None  # in plans from before; a module with one is run as it is written
    counted: Counted | None = None  # a layer of the user's own
    half: Counted | None = None  # the same for half of its input's columns, where P3 can cut them
    # number of the first layer that has some of its parameters, which belong to that; 0: no other
    shares: int = Field(0, ge=0)


class Module(Spec):
    """A user's torch module, in words that need no torch.

    executor/modules/read.py makes this of the file, and reads the file again for weights."""

    file: str  # whole path
    name: str  # of a class, a function or an instance in the file
    sha256: str  # of the file
    features: int = Field(ge=1)
    classes: int = Field(ge=1)
    layers: tuple[ModuleLayer, ...] = Field(min_length=1)
    relu: bool = True  # between layers
    jump: None = None  # as a layer's residual
    # `forward` is cut in pieces, and these are its layers; else they are our layers, or the user's
    cut: bool = False
    arguments: tuple[tuple[str, int | float], ...] = ()  # that it is made with
    # of a cut module: fields of vertices that layer 1 is given side by side, and their widths
    inputs: tuple[tuple[str, int], ...] = ()
    directed: bool = False
    # of a cut module: other fields that it is given, the sizes of a row, numpy's type, and how many
    # whole numbers there are
    vertex_fields: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    edge_fields: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    ends: bool = False  # of a cut module: batch norm after the last layer, and what follows it


class Workload(Fields):
    """A GNN and its training options. Options that a model does not know have no effect."""

    module: Module | None = None
    """Your own model, as `plan --model file.py:MyGNN` found it; it decides `model`, `layers`,
    `hidden`, `dropout`, `norm`, `heads`, `alpha` and `theta`."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_chosen(cls, dtype: object) -> object:
        if dtype == AUTO:
            raise ValueError(
                f"{AUTO} is no type: only a plan on one number of GPUs chooses one (`gnnplan plan"
                f" --dtype {AUTO}`, gnnplan.plan(..., dtype='{AUTO}')); use float32, tf32,"
                " float64 or bfloat16 here"
            )
        return dtype

    @model_validator(mode="after")
    def _is_the_module(self) -> Workload:
        if self.module is None and self.model == "own":
            raise Conflict(
                ("model",), "a layer of your own is in a file; use model=FILE.py:MyLayer"
            )
        if self.module is None:
            return self
        decided = {"layers": len(self.module.layers)}
        if not self.module.cut:  # whose `hidden` is what the module was made with
            decided["hidden"] = self.module.layers[0].h_out
        for field, found in decided.items():
            if getattr(self, field) != found:
                raise Conflict(
                    (field, "module"),
                    f"{self.module.name} of {self.module.file} decides {field} ({field}:"
                    f" {getattr(self, field)}, the module's: {found}); leave {field} out, or change"
                    " the module",
                )
        return self

    @model_validator(mode="after")
    def _is_a_model(self) -> Workload:
        kind = KINDS.get(self.model, Kind())
        if kind.attends and self.layers > 1 and self.hidden % self.heads:
            fitting = max(n for n in range(1, self.heads + 1) if self.hidden % n == 0)
            raise Conflict(
                ("hidden", "heads", "model", "layers"),
                f"hidden must be a multiple of {self.model}'s heads (hidden: {self.hidden}, heads:"
                f" {self.heads}); use heads={fitting}",
            )
        if kind.instead and self.norm in ("layer", "batch"):
            raise Conflict(
                ("norm", "model"),
                f"{self.model} is defined without a norm (norm: {self.norm}); use norm=none, or"
                f" {kind.instead} with one",
            )
        if (
            self.mode == "mini"
            and isinstance(self.fanout, tuple)
            and len(self.fanout) != self.layers
        ):
            raise Conflict(
                ("fanout", "layers", "mode"),
                "fanout has a number per layer, from the seeds outwards (fanout:"
                f" {len(self.fanout)} numbers, layers: {self.layers}); use {self.layers} numbers,"
                " or fanout=full",
            )
        if self.mode == "mini" and self.layers > MOST_BATCH_LAYERS:
            raise Conflict(
                ("layers", "mode"),
                f"a mini-batch reaches a hop further by every layer, and {MOST_BATCH_LAYERS:,} are"
                f" the most (layers: {self.layers:,}); use fewer layers, or mode=full",
            )
        return self

    @model_validator(mode="after")
    def _sums_what_rows_hold(self) -> Workload:
        rounded, few = self.dtype, self.precision.coarseness
        if not self.precision.rounds_rows:
            return self
        if self.module is not None or self.model not in ROUNDED_MODELS:
            name = self.module.name if self.module else self.model
            raise Conflict(
                ("dtype", "model"),
                f"rows are {rounded} in {', '.join(ROUNDED_MODELS)} only: attention sums"
                " exponentials, and what other layers lose is not known (model:"
                f" {name}, dtype: {rounded}); use one of these, or dtype=float32",
            )
        if self.norm == "batch":
            raise Conflict(
                ("dtype", "norm"),
                f"batch norm sums all vertices, for which {few} are too few (dtype: {rounded},"
                " norm: batch); use norm=layer or dtype=float32",
            )
        if self.task == "link":
            raise Conflict(
                ("dtype", "task"),
                f"scores of edges are compared with each other, and {few} make many of them equal"
                f" (dtype: {rounded}, task: link); use task=node or dtype=float32",
            )
        return self

    @model_validator(mode="after")
    def _can_predict_links(self) -> Workload:
        if self.task == "link" and self.mode == "full":
            raise Conflict(
                ("task", "mode"),
                "link prediction trains on batches of edges, and the full graph is one batch of"
                " vertices (task: link, mode: full); use mode=mini, or task=node",
            )
        if self.task == "link" and (self.module is not None or self.model == "own"):
            raise Conflict(
                ("task", "model"),
                "link prediction reads rows of the last layer as wide as `hidden`, and a module of"
                " your own ends in classes (task: link); use one of our models, or task=node",
            )
        return self

    @model_validator(mode="after")
    def _trains(self) -> Workload:
        if self.momentum and self.optimizer != "sgd":
            raise Conflict(
                ("momentum", "optimizer"),
                f"{self.optimizer} has moments of its own (momentum: {self.momentum:g}); use"
                " optimizer=sgd, or momentum=0",
            )
        if self.schedule == "cosine" and self.warmup >= self.epochs:
            raise Conflict(
                ("warmup", "epochs", "schedule"),
                "a cosine falls between warmup and the end, and no epoch is left for it (warmup:"
                f" {self.warmup:,}, epochs: {self.epochs:,}); use a shorter warmup or more epochs",
            )
        return self

    def lr_of(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0.

        >>> cosine = Workload(lr=1.0, warmup=2, schedule="cosine", epochs=6)
        >>> [round(cosine.lr_of(epoch), 3) for epoch in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        if epoch < self.warmup:
            return self.lr * (epoch + 1) / self.warmup
        after = epoch - self.warmup
        if self.schedule == "step":
            return float(self.lr * self.gamma ** (after // self.step_size))
        if self.schedule == "cosine":
            share = min(after / (self.epochs - self.warmup), 1.0)
            return self.lr * (1.0 + math.cos(math.pi * share)) / 2.0
        return self.lr

    @property
    def own(self) -> Module:
        """The user's module, where the model is one."""
        assert self.module is not None
        return self.module

    @property
    def varies_lr(self) -> bool:
        """Whether the learning rate is not the same in all epochs."""
        return self.warmup > 1 or self.schedule != "constant"

    @property
    def ends_on_time(self) -> bool:
        """Whether the learning rates depend on how many epochs are planned."""
        return self.schedule == "cosine"

    @property
    def decay(self) -> float:
        """The weight decay."""
        if self.weight_decay is None:
            return 0.01 if self.optimizer == "adamw" else 0.0
        return self.weight_decay

    @property
    def beside_a_weight(self) -> int:
        """Numbers held beside a weight: its gradient, the optimizer's state, its best value."""
        state = int(self.momentum > 0) if self.optimizer == "sgd" else 2
        return 1 + state + (self.patience is not None)

    def metric_of(self, learned: str) -> str:
        """What is measured of training, validation and test, as metrics.jsonl names it.

        learned: what is predicted of a vertex (GraphStats.learned).
        """
        return self.metric or METRICS["link" if self.task == "link" else learned][0]

    @property
    def called(self) -> str:
        """The model's kind; of layers of the user's own, the name of their module."""
        return self.module.name if self.module and self.model == "own" else self.model

    @property
    def is_cut(self) -> bool:
        """Whether it is the user's module, run as it is written."""
        return self.module is not None and self.module.cut

    @property
    def repeats(self) -> bool:
        """Whether the host launches the same kernels with the same arguments in every step."""
        layers = self.module.layers if self.module else ()
        reads_host = any(layer.counted and layer.counted.reads_host for layer in layers)
        return self.task == "node" and not self.varies_lr and not reads_host

    @property
    def is_converted(self) -> bool:
        """Whether it is the user's module of convolutions, whose parameters are put into ours."""
        return self.module is not None and self.model != "own"

    @property
    def is_module(self) -> bool:
        """Whether it is the user's torch module, as our layers or as it is written."""
        return self.is_converted or self.is_cut

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours drawn per layer, from the seeds outwards; ALL for every one."""
        if isinstance(self.fanout, tuple):
            return self.fanout
        return (ALL if self.fanout == "full" else FANOUT,) * self.layers

    @property
    def precision(self) -> Precision:
        """How the numbers of a row are held."""
        return PRECISIONS[self.dtype]
