"""Guesses which of our layers a module is, from the rows of its forward that were recorded.

Rows are compared, not calls. What a convolution reads is ReLU of what the one before made if its
numbers are; a residual is what is added, if the sum's numbers are. The recorder multiplies rows by
another factor in each dropout, so they tell which ones they went through. The guess need not be
right: convert.py proves it.

A module that we can train is a chain. Rows go from convolution to convolution; between two of them
they may get a norm, ReLU and dropout, in this order or with the last two exchanged. To a
convolution's output the rows that it reads may be added (a residual), or a Linear of them. GCNII's
chain begins and ends with a Linear, and its convolutions also read the first one's output. At the
end the rows of all layers may meet: as a sum, or side by side before a Linear."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gnnplan.executor.modules.convolutions import Convolution, is_known, known
from gnnplan.executor.modules.cut import live_nodes
from gnnplan.executor.modules.record import Node, Opaque, Recorded
from gnnplan.planner.gnn.kinds import Residual
from gnnplan.planner.gnn.workload import Jump

CLOSE = 1e-9  # of the largest number
NORMS: dict[type[nn.Module], Literal["batch", "layer"]] = {
    nn.BatchNorm1d: "batch",
    nn.LayerNorm: "layer",
}


class NoChain(Exception):
    """The module is no chain of our layers; it is run as it is written."""


@dataclass(frozen=True)
class Call:
    """A call of a convolution, a norm or a Linear, which is recorded as one node."""

    node: Node
    path: str  # in the user's module
    part: Any
    reads: Tensor  # [N, H_in]
    makes: Tensor  # [N, H_out], with the heads of a convolution side by side

    @staticmethod
    def of(node: Node, path: str, part: Any) -> Call:
        """Raises NoChain if it reads no rows."""
        rows = [read.value for read in node.reads if _is_rows(read.value)]
        if not rows:
            raise NoChain
        return Call(node, path, part, rows[0], node.value.flatten(1))


@dataclass(frozen=True)
class Step:
    """A convolution, and what happens to rows before and after it.

    given: rows that the layer before hands on."""

    call: Call
    convolution: Convolution
    given: Tensor
    drop: Node | None
    norm: Call | None = None
    residual: Residual | None = None
    skip: Call | None = None  # of a residual with a product: the Linear

    @property
    def p(self) -> float:
        """Of the dropout of its inputs."""
        return self.drop.drops if self.drop else self.convolution.drops


@dataclass(frozen=True)
class End:
    """What happens to the rows of the last layer, or to those of all.

    drop: the dropout after which they are read. columns: where each layer's rows begin, if they lie
    side by side."""

    last: Step
    drop: Node | None
    jump: Jump | None = None
    columns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chain:
    """A whole module.

    relu: between layers. columns: as of End. drawn: by call of dropout, in their order, the layer
    before which it is. softmax: whether it ends with one."""

    steps: Sequence[Step]
    encoder: Call | None
    decoder: Call | None
    relu: bool
    jump: Jump | None
    columns: tuple[int, ...]
    dropout: float
    drawn: tuple[int, ...]
    softmax: bool


def parts_of(module: nn.Module) -> list[str]:
    """Names of parts that are recorded as one call each. Raises NoChain if no convolution is."""
    parts = dict(module.named_modules())
    if not any(map(is_known, parts.values())):
        raise NoChain
    return [n for n, part in parts.items() if is_known(part) or type(part) in (nn.Linear, *NORMS)]


def chain_of(module: nn.Module, recorded: Recorded) -> Chain:
    """The chain that a module seems to be. Raises NoChain."""
    return _Guess(module, recorded).chain()


class _Guess:
    def __init__(self, module: nn.Module, recorded: Recorded) -> None:
        live, parts = live_nodes(recorded.output), dict(module.named_modules())
        self.calls = [
            Call.of(node, node.call.path, parts[node.call.path])
            for node in live
            if isinstance(node.call, Opaque)
        ]
        self.linears = [call for call in self.calls if type(call.part) is nn.Linear]
        self.output: Tensor = recorded.output.value
        self.nodes = recorded.nodes
        self.drops = [node for node in live if node.drops]

    def chain(self) -> Chain:
        steps: list[Step] = []
        relus: list[bool] = []
        for call in self.calls:
            if is_known(call.part):
                before, drop = self.undropped(call)
                step = Step(call, known(call.part), before, drop)
                if steps:
                    steps[-1], step = self.joined(steps[-1], step)
                    relus.append(_is_active(before, steps[-1]))
                steps.append(step)
        if not steps:
            raise NoChain
        decoder = next((call for call in self.linears if self.is_output(call.makes)), None)
        encoder = self.linears[0] if steps[0].convolution.kind == "gcnii" else None
        end = self.end(steps, decoder)
        steps[-1] = end.last
        drawn = {node: 0 for node in self.nodes if node.drops}
        drawn |= {step.drop or step.call.node: n for n, step in enumerate(steps, 1) if step.p}
        drawn |= {end.drop: len(steps) + 1} if end.drop else {}
        ends = [end.drop, encoder and self.undropped(encoder)[1]]
        return Chain(
            steps,
            encoder,
            decoder,
            relu=not relus or any(relus),
            jump=end.jump,
            columns=end.columns,
            dropout=max([*(step.p for step in steps), *(drop.drops for drop in ends if drop)]),
            drawn=tuple(drawn[node] for node in sorted(drawn, key=lambda node: node.index)),
            softmax=_same(self.output, self.output.log_softmax(1)),
        )

    def undropped(self, call: Call) -> tuple[Tensor, Node | None]:
        """What a call reads, before the dropout that it went through, if any."""
        for drop in reversed([drop for drop in self.drops if drop.index < call.node.index]):
            before: Tensor = drop.reads[0].value
            if _same(drop.value, call.reads):
                return before, drop
            if _same(drop.value.relu(), call.reads):
                return before.relu(), drop
        return call.reads, None

    def is_output(self, rows: Tensor) -> bool:
        """Whether these are the logits; log_softmax is part of our loss."""
        return _same(rows, self.output) or _same(rows.log_softmax(1), self.output)

    def joined(self, last: Step, step: Step) -> tuple[Step, Step]:
        """Two steps, of which the second reads what the first makes."""
        start, stop = last.call.node.index, step.call.node.index
        norms = [c for c in self.calls if type(c.part) in NORMS and start < c.node.index < stop]
        for ended, rows in self.endings(last):
            if _same(rows, step.given) or _same(rows.relu(), step.given):
                return ended, step
            for norm in norms:
                if _same(norm.reads, rows) and _same(norm.makes.relu(), step.given):
                    return ended, replace(step, given=rows, norm=norm)
        raise NoChain

    def endings(self, step: Step) -> Iterator[tuple[Step, Tensor]]:
        """The step with each residual that it may have, and what it then makes."""
        own, convolution = step.convolution.residual, step.convolution
        terms: list[tuple[Any, Tensor, Call | None]] = []
        if not own and convolution.kind not in ("gcnii", "sgc"):
            # what a convolution drops inside nobody else reads
            terms += [("prepared", step.call.reads, None)] if not convolution.drops else []
            terms += [("inputs", step.given, None)]
        for of, rows, _ in tuple(terms):
            terms += [(of, c.makes, c) for c in self.linears if _same(c.reads, rows)]
        for made in (step.call.makes, step.call.makes.relu()):
            yield replace(step, residual=own), made
            for of, rows, skip in terms:
                if rows.shape == made.shape:
                    residual = Residual(
                        of=of,
                        linear=skip is not None,
                        bias=skip is not None and skip.part.bias is not None,
                        after_relu=bool((made >= 0).all()),
                    )
                    yield replace(step, residual=residual, skip=skip), made + rows

    def end(self, steps: Sequence[Step], decoder: Call | None) -> End:
        """How the last steps' rows become the output. Raises NoChain."""
        if steps[0].convolution.kind == "gcnii" and decoder:
            before, drop = self.undropped(decoder)
            for last, rows in self.endings(steps[-1]):
                if _same(rows.relu(), before):
                    return End(last, drop)
        if decoder is None:
            for last, rows in self.endings(steps[-1]):
                if self.is_output(rows) and not _is_after_relu(last):
                    return End(last, None)
        if steps[0].convolution.kind not in ("gcnii", "sgc") and len(steps) > 1:
            return self.meeting(steps, decoder)
        raise NoChain

    def meeting(self, steps: Sequence[Step], decoder: Call | None) -> End:
        """How the rows of all layers meet. Raises NoChain."""
        for last, rows in self.endings(steps[-1]):
            for handed in (rows, rows.relu()):
                drops = [drop for drop in self.drops if _same(drop.reads[0].value, handed)]
                for drop in (None, *drops):
                    terms = [step.call.reads if drop else step.given for step in steps[1:]]
                    terms.append(drop.value if drop else handed)
                    jump = {
                        "relu": _is_active(handed, last),
                        "drops": drop is not None,
                        "linear": decoder is not None,
                    }
                    if len({term.shape for term in terms}) == 1:
                        met = torch.stack(terms).sum(0)
                        if _same(met, decoder.reads) if decoder else self.is_output(met):
                            return End(last, drop, Jump(of="sum", **jump))
                    if columns := _columns(terms, decoder.reads) if decoder else ():
                        return End(last, drop, Jump(of="cat", **jump), columns)
        raise NoChain


def _columns(terms: Sequence[Tensor], rows: Tensor) -> tuple[int, ...]:
    """Where each term begins in rows that are all terms side by side; (): they are not that."""
    if rows.shape[1] != sum(term.shape[1] for term in terms):
        return ()
    found = []
    for term in terms:
        width = term.shape[1]
        starts = (rows[0].unfold(0, width, 1) == term[0]).all(1).nonzero().flatten().tolist()
        found += [start for start in starts if _same(rows[:, start : start + width], term)][:1]
    return tuple(found) if len(found) == len(terms) else ()


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2


def _is_active(rows: Tensor, step: Step) -> bool:
    """Whether a layer that makes these rows ends in ReLU."""
    return bool((rows >= 0).all()) or _is_after_relu(step)


def _is_after_relu(step: Step) -> bool:
    return step.residual is not None and step.residual.after_relu


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max())
