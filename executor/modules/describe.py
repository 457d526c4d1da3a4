"""What a chain is as Workload fields, and where our Net has its tensors."""

from __future__ import annotations

from typing import Any

from gnnplan.executor.modules.chain import NORMS, Chain, NoChain, Step
from gnnplan.executor.modules.parameters import Places, Where
from gnnplan.planner.gnn.workload import ModuleLayer


def described(chain: Chain) -> tuple[dict[str, Any], dict[str, Any]]:
    """The chain as fields of a Workload and of a Module. Raises NoChain."""
    first = chain.steps[0]
    kind = first.convolution.kind
    layers = [_layer(step) for step in chain.steps]
    norms = {layer.norm for layer in layers} - {"none"}
    if len(norms) > 1 or (first.residual and not first.residual.linear):
        raise NoChain
    if kind == "sgc":  # one SGConv of K hops as K layers
        (layer,) = layers
        more = ModuleLayer(h_in=layer.h_out, h_out=layer.h_out, drops=False, bias=layer.bias)
        layers += [more] * (first.convolution.hops - 1)
    fields: dict[str, Any] = {
        "model": kind,
        "layers": len(layers),
        "hidden": layers[0].h_out,
        "dropout": chain.dropout,
        "norm": norms.pop() if norms else "none",
        **first.convolution.fields,
    }
    return fields, {"layers": tuple(layers), "relu": chain.relu, "jump": chain.jump}


def _layer(step: Step) -> ModuleLayer:
    return ModuleLayer(
        h_in=step.call.reads.shape[1],
        h_out=step.call.makes.shape[1],
        norm=NORMS[type(step.norm.part)] if step.norm else "none",
        drops=bool(step.p),
        residual=step.residual,
        **step.convolution.layer,
    )


def places(chain: Chain) -> dict[str, Places]:
    """Where our Net has each parameter and buffer of the module, by their name there."""
    found: dict[str, Places] = {}
    parts = {"encoder.{}": chain.encoder, "decoder.{}": None if chain.columns else chain.decoder}
    for number, step in enumerate(chain.steps, 1):
        at = f"layers.{number}"
        parts |= {f"{at}.norm.{{}}": step.norm, f"{at}.{{}}_residual": step.skip}
        for name, where in step.convolution.weights.items():
            is_last = step.convolution.kind == "sgc" and where.name == "bias"
            layer = f"layers.{step.convolution.hops}" if is_last else at
            found[f"{step.call.path}.{name}"] = (where.under(layer),)
    for place, call in parts.items():
        for name in call.part.state_dict() if call else ():
            if call and name != "num_batches_tracked":
                found[f"{call.path}.{name}"] = (Where(place.format(name)),)
    if chain.columns and chain.decoder:  # each layer has the columns that read its rows
        found[f"{chain.decoder.path}.weight"] = tuple(
            Where(f"products.{layer}.weight", after=start)
            for start, layer in sorted(
                zip(chain.columns, range(1, len(chain.columns) + 1), strict=True)
            )
        )
        last = Where(f"products.{len(chain.columns)}.bias")
        found[f"{chain.decoder.path}.bias"] = (last,)
    return found
