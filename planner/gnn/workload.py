"""The workload: the specification of a GNN and its training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from gnnplan.planner.gnn.fields import FANOUT, READ_WITH, USUAL, Fields
from gnnplan.planner.gnn.kinds import KINDS, Counted, Kind
from gnnplan.planner.vocabulary.numbers import PRECISIONS, Precision
from gnnplan.planner.vocabulary.spec import Conflict, Spec

WORKLOADS = Path(__file__).resolve().parent / "workloads"  # presets: the settings of papers
ALL = -1  # the fanout that takes every neighbour
TASKS = ("node", "link")
# kind of target -> metrics, the default first: edges, one label per vertex, several labels per
# vertex, numbers
METRICS = {
    "link": ("auc",),
    "label": ("accuracy", "f1_macro", "roc_auc"),
    "labels": ("f1_micro", "f1_macro", "roc_auc"),
    "numbers": ("mae",),
}
FALLING = ("mae",)  # metrics for which lower is better
PARTS = ("train", "val", "test")
BALANCED = "balanced"  # the value of class_weights that is not a list of numbers
ROUNDED_MODELS = [name for name, kind in KINDS.items() if kind.rounds_rows]
AUTO = "auto"  # the value of --dtype that lets the plan choose (decision/choices.py)
MOST_BATCH_LAYERS = 32  # layers in mode mini: every layer extends a batch by one hop


def scores_of(fields: Iterable[str]) -> list[str]:
    """Return the names of scores among the fields of a line of metrics.jsonl.

    >>> scores_of(["epoch", "loss", "train_f1_micro", "val_f1_micro", "test_f1_micro", "epoch_s"])
    ['train_f1_micro', 'val_f1_micro', 'test_f1_micro']
    """
    metrics = dict.fromkeys(metric for metrics in METRICS.values() for metric in metrics)
    names = [f"{part}_{metric}" for metric in metrics for part in PARTS]
    return [name for name in names if name in fields]


def show_scores(row: Mapping[str, Any]) -> str:
    """Return the scores of a line of metrics.jsonl as text; '' if the line has none.

    >>> show_scores({"train_f1_micro": 0.8, "val_f1_micro": 0.75, "test_f1_micro": None})
    'f1_micro: training pass 0.800, val 0.750'
    """
    names = [name for name in scores_of(row) if row[name] is not None]
    if not names:
        return ""
    parts = [name.partition("_")[0] for name in names]
    scores = [
        f"{'training pass' if part == 'train' else part} {row[name]:.3f}"
        for part, name in zip(parts, names, strict=True)
    ]
    return f"{names[0].partition('_')[2]}: {', '.join(scores)}"


def is_module(model: object) -> bool:
    """Whether a model is given by a file instead of the name of a kind.

    >>> is_module("file.py:MyGNN"), is_module("gcn")
    (True, False)
    """
    return isinstance(model, str) and ".py" in model


class ModuleLayer(Spec):
    """A layer of a user's module: its widths, and the preparation of its inputs."""

    h_in: int = Field(ge=1)
    h_out: int = Field(ge=1)
    heads: int = Field(0, ge=0)  # attention heads
    middle: int = Field(0, ge=0)  # GIN: numbers per row between its two products
    norm: Literal["none", "layer", "batch"] = "none"  # norm of the inputs, before their ReLU
    drops: bool = True  # dropout of the inputs
    bias: bool = True
    residual: None = None  # only in older plans; a module with residuals runs as written
    counted: Counted | None = None  # counts of a layer of the user's own
    half: Counted | None = None  # counts for half of the input's columns, if P3 can split them
    # number of the earlier layer that owns parameters which this layer shares; 0: none are shared
    shares: int = Field(0, ge=0)


class Module(Spec):
    """A description of a user's torch module that does not need torch.

    executor/modules/read.py derives it from the file, and reads the file again for weights."""

    file: str  # absolute path
    name: str  # a class, a function or an instance in the file
    sha256: str  # digest of the file
    imports: tuple[tuple[str, str], ...] = ()  # the user's files that it imports, and their digests
    features: int = Field(ge=1)
    classes: int = Field(ge=1)
    layers: tuple[ModuleLayer, ...] = Field(min_length=1)
    relu: bool = True  # ReLU between layers
    jump: None = None  # only in older plans, as `ModuleLayer.residual`
    # True: `forward` runs as written, cut into pieces, one or more per layer. False: the module is
    # converted to layers of our kinds, or `layers` are layers of the user's own.
    cut: bool = False
    arguments: tuple[tuple[str, int | float], ...] = ()  # keyword arguments of the module
    # cut modules: vertex fields that are concatenated to layer 1's inputs, with their widths
    inputs: tuple[tuple[str, int], ...] = ()
    directed: bool = False
    # cut modules: other fields that `forward` reads: name, shape of a row, numpy's dtype, and for
    # integers the largest value + 1, else 0
    vertex_fields: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    edge_fields: tuple[tuple[str, tuple[int, ...], str, int], ...] = ()
    ends: bool = False  # cut modules: batch norm, and perhaps more, follows the last layer
    norms_edges: bool = False  # cut modules: a batch norm of rows of edges

    @property
    def reads(self) -> set[str]:
        """The fields of the graph that `forward` reads, such as 'vertex pos'."""
        of_vertices = (*self.inputs, *self.vertex_fields)
        names = {f"vertex {name}" for name, *_ in of_vertices}
        return names | {f"edge {name}" for name, *_ in self.edge_fields}


class Workload(Fields):
    """A GNN and its training options. `unread` names options that have no effect on it."""

    usual: ClassVar[Mapping[str, str]] = USUAL | {
        words.split()[0].lower(): name  # the classes of PyG and DGL
        for name, kind in KINDS.items()
        for words in (kind.pyg, kind.dgl)
        if words
    }
    module: Module | None = None
    """Your own model, as `plan --model file.py:MyGNN` found it; it decides `model`, `layers`,
    `hidden`, `dropout`, `norm`, `heads`, `alpha` and `theta`."""

    @field_validator("fanout", "class_weights", mode="before")
    @classmethod
    def _may_be_written_as_text(cls, value: object) -> object:
        """Read '15,10' as (15, 10); leave full, or balanced, as it is."""
        if isinstance(value, str) and value.lower() not in ("full", BALANCED):
            return tuple(map(str.strip, value.split(",")))
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _must_name_a_type(cls, dtype: object) -> object:
        if str(dtype).lower() == AUTO:
            raise ValueError(
                f"{AUTO} is no type: only a plan on one number of GPUs chooses one (`gnnplan plan"
                f" --dtype {AUTO}`, gnnplan.plan(..., dtype='{AUTO}')); use float32, tf32,"
                " float64 or bfloat16 here"
            )
        return dtype

    @model_validator(mode="after")
    def _must_match_the_module(self) -> Workload:
        if self.module is None and self.model == "own":
            raise Conflict(
                ("model",), "a layer of your own is in a file; use model=FILE.py:MyLayer"
            )
        if self.module is None:
            return self
        decided = {"layers": len(self.module.layers)}
        if not self.module.cut:  # `hidden` of a cut module is an argument of the module
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
    def _must_suit_the_model(self) -> Workload:
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
    def _must_suit_the_precision(self) -> Workload:
        rounded, few = self.dtype, self.precision.coarseness
        if not self.precision.rounds_rows:
            return self
        if self.module is not None or self.model not in ROUNDED_MODELS:
            name = self.module.name if self.module else self.model
            raise Conflict(
                ("dtype", "model"),
                f"rows are {rounded} in {', '.join(ROUNDED_MODELS)} only: attention sums"
                " exponentials, and the loss of accuracy of other layers is not known (model:"
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
    def _must_suit_the_task(self) -> Workload:
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
    def _must_suit_the_optimizer(self) -> Workload:
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
        """Return the learning rate of an epoch, counted from 0.

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

    def unread(self, given: Iterable[str], modes: Sequence[str] = ()) -> dict[str, str]:
        """Return the given fields that no part reads beside this workload's other fields, and why.

        modes: the modes that are planned, if they are others than `mode`.

        >>> Workload(model="gcn").unread(["heads", "hidden"])
        {'heads': 'has no effect with model=gcn, only with model=gat or gatv2'}
        """
        out = {}
        for name in filter(READ_WITH.__contains__, given):
            other, reading = READ_WITH[name]
            values = (other == "mode" and modes) or [getattr(self, other)]
            if not set(values) & set(reading):
                reads = " or ".join(value for value in reading if value != "own")
                out[name] = f"has no effect with {other}={values[0]}, only with {other}={reads}"
        return out

    @property
    def own(self) -> Module:
        """The user's module, for code that runs only if there is one."""
        assert self.module is not None
        return self.module

    @property
    def varies_lr(self) -> bool:
        """Whether the learning rate differs between epochs."""
        return self.warmup > 1 or self.schedule != "constant"

    @property
    def ends_on_time(self) -> bool:
        """Whether the learning rates depend on the planned number of epochs."""
        return self.schedule == "cosine"

    @property
    def decay(self) -> float:
        """The weight decay, with the optimizer's default."""
        if self.weight_decay is None:
            return 0.01 if self.optimizer == "adamw" else 0.0
        return self.weight_decay

    @property
    def state_per_weight(self) -> int:
        """Numbers stored beside each weight: gradient, optimizer state, best value (patience)."""
        state = int(self.momentum > 0) if self.optimizer == "sgd" else 2
        return 1 + state + (self.patience is not None)

    def metric_of(self, learned: str) -> str:
        """Return the metric of training, validation and test scores, as metrics.jsonl names it.

        learned: the kind of target per vertex (GraphStats.learned).
        """
        return self.metric or METRICS["link" if self.task == "link" else learned][0]

    @property
    def called(self) -> str:
        """The name of the model's kind; for layers of the user's own, the name of their module."""
        return self.module.name if self.module and self.model == "own" else self.model

    @property
    def is_cut(self) -> bool:
        """Whether the model is the user's module, run as written."""
        return self.module is not None and self.module.cut

    @property
    def repeats(self) -> bool:
        """Whether the host launches the same kernels with the same arguments in every step."""
        layers = self.module.layers if self.module else ()
        reads_host = any(layer.counted and layer.counted.reads_host for layer in layers)
        return self.task == "node" and not self.varies_lr and not reads_host

    @property
    def is_converted(self) -> bool:
        """Whether the model is the user's module, converted to layers of our kinds."""
        return self.module is not None and self.model != "own"

    @property
    def is_module(self) -> bool:
        """Whether the model is the user's torch module, converted to our layers or as written."""
        return self.is_converted or self.is_cut

    @property
    def fanouts(self) -> tuple[int, ...]:
        """The neighbours sampled per layer, from the seeds outwards; ALL: every neighbour."""
        if isinstance(self.fanout, tuple):
            return self.fanout
        return (ALL if self.fanout == "full" else FANOUT,) * self.layers

    @property
    def precision(self) -> Precision:
        """The number format of rows."""
        return PRECISIONS[self.dtype]
