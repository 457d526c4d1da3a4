"""Rows of all layers that meet at the end: what they must have gone through before.

They meet as their sum, or side by side (torch.cat, JumpingKnowledge) before a Linear. A Linear of
rows side by side is a sum of products, so each layer adds its own rows, or their product, to one
sum (Net.added)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnnplan.executor.modules.chain import Meeting, Rows, Step
from gnnplan.executor.modules.convolutions import NoChain


def are_all(terms: Sequence[Rows], layer_of: Mapping[str, int], layers: int) -> bool:
    """Whether these are the rows of every layer, once. layer_of: by their source."""
    numbers = sorted(layer_of.get(term.source, 0) for term in terms)
    return layers > 1 and numbers == list(range(1, layers + 1))


def meeting_of(
    of: str, terms: Sequence[Rows], layer_of: Mapping[str, int], steps: Sequence[Step]
) -> Meeting:
    """The meeting of all layers' rows, which must have gone through the same. Raises NoChain."""
    kinds = {step.convolution.kind for step in steps} & {"gcnii", "sgc"}
    if kinds:
        raise NoChain
    if of == "sum" and len({term.width for term in terms}) > 1:
        raise NoChain
    dropped, relu, p = set(), False, 0.0
    for term in terms:
        number, names = layer_of[term.source], [op.name for op in term.ops]
        dropped.add("drop" in names)
        if number < len(steps):
            _must_be_handed_on(term, steps[number])
            continue
        relu, p = "relu" in names, sum(op.p for op in term.ops)
        if len(set(names)) < len(names) or not {"relu", "drop"}.issuperset(names):
            raise NoChain
    if len(dropped) > 1:
        raise NoChain
    return Meeting(of, tuple(layer_of[term.source] for term in terms), relu, p)


def _must_be_handed_on(term: Rows, following: Step) -> None:
    """A layer ends in ReLU, or hands on raw rows to a layer with a norm of its own."""
    reads, has_norm = following.reads.ops, following.gap.norm != "none"
    handed_on = () if has_norm else tuple(op for op in reads if op.name != "drop")
    if term.ops != handed_on and (has_norm or term.ops != reads):
        raise NoChain
