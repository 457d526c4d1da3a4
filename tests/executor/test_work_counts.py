"""What the planner counts of our layers is what torch's dispatcher counts of them.

A layer runs forward and backward on small blocks of several sizes, as its worker runs it: with
dropout, moments and initial rows. Its flops, gathered numbers and element-wise bytes per row,
source and edge are compared with Model.forward and Model.backward on a large block."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from counting import multiply
from nightly import covered

from gnnplan.executor.layers.count import SIZES, Notes, Work, block_of, factors_of
from gnnplan.executor.layers.kernels import Shapes, backward, dropout
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.planner.gnn.kinds import amount
from gnnplan.planner.gnn.model import Model, describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.schedule import Compute

ROWS, SOURCES, EDGES = 1e5, 1.5e5, 2e6
NEAR = 0.02
WIDTH = 160
NARROWS, WIDENS = (192, 128), (128, 192)
# so wide that a head's own numbers, which attention_edges stand for, weigh little
WIDE = 8
HEADS = 2


def noted_on(case: Case, model: Model, net: Net, sizes: tuple[int, int, int]) -> Notes:
    """The layer on a block, forward and backward.

    Only the forward pass goes by pieces: the pieces of the backward pass are small here, and to add
    up their gradients would take most of the time.
    """
    rows, sources, edges = sizes
    width, relu = case.shape[0], model.relu_after(case.number)
    layer, norm = net.layer(case.number), net.batch_norm(case.number)
    block = block_of(layer, rows, sources, edges, torch.float32)
    x = torch.randn(rows if case.narrow else sources, width)
    x.requires_grad_(case.number > model.first_varying)
    initial = torch.randn(rows, width, requires_grad=True)
    initial.grad = torch.zeros_like(initial)  # other layers have added theirs
    moments = torch.ones(2, width, requires_grad=True) if norm else None
    drop, own = dropped(case, len(x)), x.detach()[:rows]
    notes = Notes()
    with Shapes.varying(case.in_pieces), notes.during("forward"):
        if norm:
            norm.sums(own)
        if case.narrow:
            prepared = layer.prepare(x, drop)
            first = [layer.project(prepared), prepared[:rows]]
        else:
            out = layer(block, x, drop, initial[:rows], relu, moments)
    if case.narrow:  # the exchange comes between
        read = torch.randn(sources, first[0].shape[1], requires_grad=True)
        mine = first[1].detach().requires_grad_()
        with Shapes.varying(case.in_pieces), notes.during("forward"):
            out = layer.update(layer.gather(block, read), mine, mine, None, relu)
    gradient = torch.ones_like(out)
    with notes.during("backward"):
        backward([out], [gradient])
    if case.narrow:
        to_first = [torch.ones_like(first[0])] + [mine.grad] * (mine.grad is not None)
        with notes.during("backward"):
            backward(first[: len(to_first)], to_first)
    if moments is not None:
        with notes.during("backward"):
            x.grad[:rows] += BatchNorm.home(own, moments.detach(), moments.grad, 9)
    return notes


def dropped(case: Case, rows: int) -> Drop:
    vertices = torch.arange(rows)
    return lambda x: dropout(x, 0, 0, 0, vertices, case.p)


class Case(NamedTuple):
    """A layer of a model of three."""

    kind: str
    number: int = 2
    shape: tuple[int, int] = (WIDTH, WIDTH)
    norm: str | None = None
    p: float = 0.0
    aggregation: str = "softmax"
    narrow: bool = False
    mini: bool = False  # products go by pieces
    in_place: bool = False  # and are made by MKL, which writes them into place

    def __str__(self) -> str:
        told = [self.kind, f"layer {self.number}", "x".join(map(str, self.shape))]
        told += [f"norm {self.norm}"] if self.norm else []
        told += ["dropout"] * (self.p > 0) + ["narrow"] * self.narrow
        told += ["mini-batches"] * self.mini + ["in place"] * self.in_place
        return ", ".join(told + ["sum"] * (self.aggregation == "sum"))

    @property
    def in_pieces(self) -> bool:
        return self.mini or self.number == 1  # where layer 1 aggregates in every step

    @property
    def workload(self) -> Workload:
        return Workload(
            model=self.kind,
            layers=3,
            hidden=self.shape[0],
            heads=HEADS,
            norm=self.norm,
            dropout=self.p,
            aggregation=self.aggregation,
            mode="mini" if self.in_pieces else "full",
        )

    @property
    def model(self) -> Model:
        model, (h_in, h_out) = describe(self.workload, *self.shape), self.shape
        layers = list(model.layers)
        spec = replace(layers[self.number - 1], h_in=h_in, h_out=h_out)
        if not spec.heads and self.number == 2:
            spec = replace(spec, projects_first=h_out < h_in)
        layers[self.number - 1] = spec
        where = {"in_pieces": self.in_pieces and not self.in_place, "in_place": self.in_place}
        return replace(model, layers=tuple(layers), **where)

    def counted(self) -> tuple[list[Work], list[Work]]:
        """Forward and backward work on blocks of SIZES, by torch."""
        model = self.model
        net = Net(model, self.workload)
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        noted = [noted_on(self, model, net, sizes) for sizes in SIZES]
        return [note.forward for note in noted], [note.backward for note in noted]

    def stated(self) -> tuple[Compute, Compute]:
        """Forward and backward work by the planner."""
        model, block = self.model, (self.number, ROWS, SOURCES, EDGES, self.narrow)
        forward, backward = model.work(*block)
        if not self.narrow:
            return forward, backward
        first = model.project(self.number, ROWS)
        return forward + first[0], backward + first[1]


def amounts(case: Case) -> Iterator[tuple[str, list[float], list[float]]]:
    """Of each pass flops, gathered and element-wise numbers on the large block, by torch and by the
    planner; without what a block of no rows does. What is gathered number by number, or a number
    per head, is attention's."""
    spec = case.model.layers[case.number - 1]
    edges = EDGES + ROWS * spec.self_edges
    # attention's work along edges is attention_edges, but for the rows that GATv2 makes of them
    passed = edges if spec.kind != "gat" else 0.0

    for way, works, told in zip(
        ("forward", "backward"), case.counted(), case.stated(), strict=True
    ):
        rows = [
            sum(each["rows"] * each["width"] for each in work.gathers if each["width"] > HEADS)
            for work in works
        ]
        numbers = zip(works, rows, strict=True)
        found = factors_of([[w.flops, row, w.elementwise_bytes / 4] for w, row in numbers])
        counted = [
            amount((*linear[:3], 0.0), ROWS, SOURCES, along)
            for linear, along in zip(found, (edges, edges, passed), strict=True)
        ]
        gathered = sum(gather.rows * gather.width for gather in told.gathers)
        yield way, counted, [told.flops, gathered, told.elementwise_bytes / told.itemsize]


def shaped(kind: str, shape: tuple[int, int] = NARROWS) -> tuple[int, int]:
    return (shape[0] * WIDE, shape[1] * WIDE) if kind in ATTENTION else shape


NORMS = ("none", "layer", "batch")
CONVOLUTIONS = ("gcn", "sage", "gat", "gatv2", "gin")
ATTENTION = ("gat", "gatv2")
CASES = [
    *(
        Case(kind, shape=shaped(kind, shape), norm=norm, p=p)
        for kind in CONVOLUTIONS
        for shape in (NARROWS, WIDENS)
        for norm in (None, "layer", "batch")
        for p in (0.0, 0.5)
    ),
    *(Case(kind, 1, shaped(kind)) for kind in CONVOLUTIONS),
    *(
        Case(kind, shape=shaped(kind), norm=norm, p=p, narrow=True)
        for kind in ("gcn", "sage", "gat")
        for norm, p in ((None, 0.5), ("layer", 0.0))
    ),
    *(
        Case(kind, shape=shaped(kind, shape), mini=True)
        for kind in CONVOLUTIONS
        for shape in (NARROWS, WIDENS)
    ),
    *(Case(kind, mini=True) for kind in ("resgcn", "gcnii")),
    *(Case("sgc", 3, mini=mini) for mini in (False, True)),
    *(Case("gcnii", p=p) for p in (0.0, 0.5)),
    Case("gcn", shape=NARROWS, narrow=True, mini=True),
    *(
        case
        for way in ("softmax", "sum")
        for case in (
            Case("resgcn", 1, aggregation=way),
            *(Case("resgcn", norm=n, p=p, aggregation=way) for n in NORMS for p in (0.0, 0.5)),
        )
    ),
]

CASES += [case._replace(in_place=True) for case in CASES if not case.norm]


@pytest.fixture(autouse=True)
def whole_pieces(monkeypatch):
    """The blocks' rows leave no rest."""
    monkeypatch.setattr(Shapes, "least", 32)


def fields_of(case: Case) -> set[Hashable]:
    """What is not as usual with its kind of layer, and each value with any kind."""
    fields, usual = case._asdict(), Case(case.kind)._asdict()
    unusual = {(case.kind, name) for name, value in fields.items() if value != usual[name]}
    return {case.kind, *fields.items(), *unusual}


@pytest.mark.parametrize("case", covered(CASES, fields_of, several=False), ids=str)
def test_a_layers_work_is_what_torch_counts(case, monkeypatch):
    multiply(monkeypatch, case.in_place)
    for way, counted, stated in amounts(case):
        assert stated[:2] == pytest.approx(counted[:2], rel=1e-6), way
        if not (case.p and way == "forward"):  # making a mask is hash_ops
            assert stated[2] == pytest.approx(counted[2], rel=NEAR, abs=1), way


def ends(case: Case, rows: int) -> list[tuple[float, float]]:
    """Flops and element-wise bytes of the encoder, forward and backward, and of the decoder."""
    model, width = case.model, case.shape[0]
    net, drop = Net(model, case.workload), dropped(case, rows)
    norm = net.batch_norm(4)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, h = torch.randn(rows, width), torch.randn(rows, width, requires_grad=True)
    own, moments = h.detach(), torch.ones(2, width, requires_grad=True) if norm else None
    encoder, decoder = Notes(), Notes()
    with Shapes.varying(case.in_pieces), encoder.during("forward"):
        out = net.encode(x, drop)
    gradient, of_initial = torch.ones_like(out), torch.ones_like(out)
    with encoder.during("backward"):
        backward([out], [gradient + of_initial if net.initial else gradient])
    with Shapes.varying(case.in_pieces), decoder.during("forward"):
        if norm:
            norm.sums(own)
        out = net.decode(h, drop, moments)
    gradient = torch.ones_like(out)
    with decoder.during("backward"):
        backward([out], [gradient])
        if moments is not None:
            h.grad[:rows] += BatchNorm.home(own, moments.detach(), moments.grad, 9)
    works = (encoder.forward, encoder.backward, decoder.forward, decoder.backward)
    return [(work.flops, work.elementwise_bytes) for work in works]


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("mini", [False, True], ids=["full", "mini"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize(("kind", "norm"), [("gcnii", None), *(("resgcn", n) for n in NORMS)])
def test_the_ends_work_is_what_torch_counts(kind, norm, p, mini, in_place, monkeypatch):
    """What more rows are more; the loss is apart."""
    multiply(monkeypatch, in_place)
    case, rows = Case(kind, norm=norm, p=p, mini=mini, in_place=in_place), 256
    model = case.model
    told = [*model.encode(rows), *model.finish(rows)]
    for place, (less, more, stated) in enumerate(
        zip(ends(case, rows), ends(case, 2 * rows), told, strict=True)
    ):
        assert stated.flops == pytest.approx(more[0] - less[0], rel=1e-6), place
        if not (p and place % 2 == 0):  # making a mask is hash_ops
            found = more[1] - less[1]
            assert stated.elementwise_bytes == pytest.approx(found, rel=NEAR), place
