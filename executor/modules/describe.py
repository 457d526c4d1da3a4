"""What a module that has been followed is as Workload fields, and where our Net has its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from gnnplan.executor.modules.chain import Chain, Gap, Linear, Step
from gnnplan.executor.modules.convolutions import NoChain
from gnnplan.executor.modules.parameters import Places, Where
from gnnplan.planner.gnn.workload import Jump, ModuleLayer


def described(chain: Chain, features: int, classes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The chain as fields of a Workload and of a Module. Raises NoChain."""
    steps = chain.steps
    kinds = list(dict.fromkeys(step.convolution.kind for step in steps))
    if len(kinds) > 1:
        raise NoChain
    kind = kinds[0]
    if widths(chain) != (features, classes):
        raise NoChain
    _must_be_whole(chain, kind)
    gaps = [step.gap for step in steps]
    if steps[0].residual and not steps[0].residual.linear:
        raise NoChain
    for step, after in pairwise(steps):
        if after.gap.relu and step.residual and step.residual.after_relu:
            raise NoChain
    relus = {
        after.gap.relu or bool(step.residual and step.residual.after_relu)
        for step, after in pairwise(steps)
    }
    last = steps[-1].residual
    if last and last.after_relu:
        raise NoChain
    if len(relus) > 1:
        raise NoChain
    layers = _sgc(steps) if kind == "sgc" else [_layer(step) for step in steps]
    norms = {gap.norm for gap in gaps} - {"none"}
    if len(norms) > 1:
        raise NoChain
    fields: dict[str, Any] = {
        "model": kind,
        "layers": len(layers),
        "hidden": layers[0].h_out,
        "dropout": _dropout(chain),
        "norm": norms.pop() if norms else "none",
    }
    if kind in ("gat", "gatv2"):
        fields["heads"] = layers[0].heads
    if kind == "gcnii":
        fields |= _gcnii(steps)
    return fields, {
        "layers": tuple(layers),
        "relu": not (relus and not relus.pop()),
        "jump": _jump(chain),
    }


def _jump(chain: Chain) -> Jump | None:
    met = chain.meeting
    if met is None:
        return None
    return Jump(of=met.of, relu=met.relu, drops=bool(met.p), linear=chain.decoder is not None)


def _layer(step: Step) -> ModuleLayer:
    return ModuleLayer(
        h_in=step.convolution.h_in,
        h_out=step.convolution.h_out,
        heads=step.convolution.heads,
        middle=step.convolution.middle,
        norm=step.gap.norm,
        drops=bool(step.gap.p),
        bias=step.convolution.bias,
        residual=step.residual,
    )


def widths(chain: Chain) -> tuple[int, int]:
    """Columns of the features, and of the logits."""
    first, last = chain.encoder or chain.steps[0], chain.decoder or chain.steps[-1]
    reads = first.h_in if isinstance(first, Linear) else first.convolution.h_in
    writes = last.h_out if isinstance(last, Linear) else last.convolution.h_out
    return reads, writes


def _must_be_whole(chain: Chain, kind: str) -> None:
    """A GCNII has its two Linears, other models have none."""
    if kind != "gcnii":
        linear = chain.encoder or (None if chain.meeting else chain.decoder)
        if linear:
            raise NoChain
        if chain.steps[0].gap.relu or chain.steps[0].gap.norm != "none":
            raise NoChain
        return
    if not (chain.encoder and chain.decoder):
        raise NoChain
    if not all(step.gap.relu for step in chain.steps) or not chain.decoder.gap.relu:
        raise NoChain
    ends = {bool(chain.encoder.gap.p), bool(chain.decoder.gap.p)}
    if _dropout(chain) and ends != {True}:
        raise NoChain


def _dropout(chain: Chain) -> float:
    """The one p of all dropouts. Raises NoChain."""
    ends = [linear.gap for linear in (chain.encoder, chain.decoder) if linear]
    found = {gap.p for gap in [*(step.gap for step in chain.steps), *ends] if gap.p}
    if chain.meeting and chain.meeting.p:
        found.add(chain.meeting.p)
    if len(found) > 1:
        raise NoChain
    return found.pop() if found else 0.0


def _sgc(steps: Iterable[Step]) -> list[ModuleLayer]:
    """One SGConv of K hops as K layers."""
    first, *others = steps
    if others:
        raise NoChain
    conv = first.convolution
    layers = [
        ModuleLayer(
            h_in=conv.h_in if hop == 0 else conv.h_out,
            h_out=conv.h_out,
            drops=hop == 0 and bool(first.gap.p),
            bias=conv.bias,
        )
        for hop in range(conv.hops)
    ]
    return layers


def _gcnii(steps: Iterable[Step]) -> dict[str, float]:
    """alpha, and theta of beta_l = log(theta / l + 1). Raises NoChain if layers differ in them."""
    convolutions = [step.convolution for step in steps]
    alpha, theta = convolutions[0].alpha, float(f"{math.expm1(convolutions[0].beta):.12g}")
    for number, conv in enumerate(convolutions, 1):
        if conv.alpha != alpha or not math.isclose(conv.beta, math.log(theta / number + 1)):
            raise NoChain
    return {"alpha": alpha, "theta": theta}


def places(module: nn.Module, chain: Chain) -> dict[str, Places]:
    """Where our Net has each parameter and buffer of the module, by their name there."""
    out: dict[str, Where] = {}

    def norm(gap: Gap, at: str) -> None:
        if gap.module:
            for name in ("weight", "bias", "running_mean", "running_var"):
                if name in module.get_submodule(gap.module).state_dict():
                    out[f"{gap.module}.{name}"] = Where(f"{at}.{name}")

    for number, step in enumerate(chain.steps, 1):
        norm(step.gap, f"layers.{number}.norm")
        at = "layers" if step.convolution.kind == "sgc" else f"layers.{number}"
        for name, where in step.convolution.weights.items():
            out[f"{step.name}.{name}"] = where.under(at)
        if step.skip and step.residual:
            out[f"{step.skip}.weight"] = Where(f"{at}.weight_residual")
            if step.residual.bias:
                out[f"{step.skip}.bias"] = Where(f"{at}.bias_residual")
    met = chain.meeting
    beside = chain.decoder if met and met.of == "cat" else None
    decoder = None if beside else chain.decoder
    for place, linear in (("encoder", chain.encoder), ("decoder", decoder)):
        if linear:
            for name in ("weight", "bias"):
                out[f"{linear.name}.{name}"] = Where(f"{place}.{name}")
    found: dict[str, Places] = {name: (where,) for name, where in out.items()}
    if met and beside:  # each layer has the columns that read its rows
        widths = [chain.steps[layer - 1].convolution.h_out for layer in met.layers]
        found[f"{beside.name}.weight"] = tuple(
            Where(f"products.{layer}.weight", after=sum(widths[:i]))
            for i, layer in enumerate(met.layers)
        )
        found[f"{beside.name}.bias"] = (Where(f"products.{len(chain.steps)}.bias"),)
    return found
