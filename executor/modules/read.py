"""Reads a user's module from a file: as Workload fields, and with its parameters.

The file is executed, which is why the user names it: as `--model file.py:MyGNN`, in a plan that
they run. What the name stands for may be a class or a function, which is called to make the module,
or the module itself."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.executor.modules.convolutions import Unfit, Where
from gnnplan.executor.modules.follow import Chain, Gap, Step, follow
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import read_bytes, suggest

MAX_SOURCE = 1 << 22  # [B] of the file
# Names of parameters that a module is made with, as PyG, DGL and their examples call them.
ARGUMENTS = {
    "features": ("features", "in_channels", "in_feats", "in_dim", "in_size", "num_features"),
    "classes": ("classes", "out_channels", "out_feats", "out_dim", "out_size", "num_classes"),
    "hidden": ("hidden", "hidden_channels", "hid_feats", "hidden_dim", "hid_size", "h_feats"),
    "layers": ("layers", "num_layers", "n_layers"),
    "heads": ("heads", "num_heads"),
    "dropout": ("dropout",),
}
# Workload fields that a module decides.
DECIDED = ("model", "layers", "hidden", "dropout", "heads", "norm", "alpha", "theta")


@dataclass(frozen=True)
class UserModule:
    """A user's module, and what it is among ours.

    fields: of the Workload. places: by the name of each of its parameters and buffers, where our
    Net has it."""

    module: nn.Module
    fields: Mapping[str, Any]
    description: Module
    places: Mapping[str, Where]
    by_in_degree: bool  # right on undirected graphs alone


def read(model: str, workload: Workload, features: int, classes: int) -> UserModule:
    """The module that `file.py:Name` stands for, for a graph of so many columns and classes.

    A class or a function is called with what it requires: widths of the graph, and of `workload`
    the fields in `ARGUMENTS`. torch's random numbers start from the workload's seed. Raises
    SpecError with file and line."""
    path, colon, name = model.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise SpecError(f"model {model}: must read FILE.py:NAME, as model.py:MyGNN")
    file = Path(path).resolve()
    source = read_bytes(file, MAX_SOURCE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        made = _made(file, name, workload, features, max(classes, 1))
    try:
        chain = follow(made)
        return _described(made, chain, file, name, source, features, max(classes, 1))
    except Unfit as unfit:
        raise SpecError(f"{file}: {name}: {unfit}") from unfit


@lru_cache(maxsize=2)
def read_again(workload: Workload) -> UserModule:
    """The module of a plan's workload, with the weights that training starts from.

    Raises SpecError if the file is no longer what was planned."""
    module = workload.module
    assert module is not None
    found = hashlib.sha256(read_bytes(Path(module.file), MAX_SOURCE)).hexdigest()
    if found != module.sha256:
        raise SpecError(
            f"{module.file} has changed since the plan was made; plan again, or put the file back"
        )
    again = read(f"{module.file}:{module.name}", workload, module.features, module.classes)
    for field, value in {**again.fields, "module": again.description}.items():
        if getattr(workload, field) != value:
            raise SpecError(
                f"{module.file}: {module.name} has {field} {value}, and the plan has"
                f" {getattr(workload, field)}; the module decides it, so plan again"
            )
    return again


def with_module(workload: Workload, user: UserModule, given: Iterable[str]) -> Workload:
    """The workload with the user's module as its model.

    given: fields that the user set; SpecError if the module has another value of one of them."""
    for field in given:
        if field in user.fields and getattr(workload, field) != user.fields[field]:
            raise SpecError(
                f"{field}: {user.description.name} of {user.description.file} decides {field}"
                f" ({field}: {getattr(workload, field)}, the module's: {user.fields[field]}); leave"
                f" {field} out, or change the module"
            )
    return Workload.model_validate(
        workload.model_dump() | dict(user.fields) | {"module": user.description.model_dump()}
    )


def must_suit(user: UserModule, directed: bool) -> None:
    """Raise SpecError where the module computes something else than our layers on this graph."""
    if directed and user.by_in_degree:
        raise SpecError(
            f"{user.description.file}: {user.description.name} weighs an edge by in-degrees of both"
            " its ends, and our layers by the out-degree of its source, which differ on a directed"
            " graph; leave out --directed, or use dgl.nn.GraphConv or GraphSAGE"
        )


def fill(net: nn.Module, workload: Workload) -> None:
    """Give our Net the parameters that the user's module starts with."""
    user = read_again(workload)
    put(net, user.places, user.module.state_dict())


def put(net: nn.Module, places: Mapping[str, Where], state: Mapping[str, Tensor]) -> None:
    """Copy a state_dict of the user's module into our Net, as far as it holds these tensors.

    A Net that is cut by columns (P3) has smaller ones, and is filled from a whole Net."""
    ours = net.state_dict()
    for name, (place, view) in places.items():
        if place in ours and view(ours[place]).shape == state[name].shape:
            view(ours[place]).copy_(state[name])


def state_of(weights: Mapping[str, Tensor], workload: Workload) -> dict[str, Tensor]:
    """Our Net's weights as the state_dict of the user's module."""
    user = read_again(workload)
    return {
        name: user.places[name][1](weights[user.places[name][0]]).to(value.dtype).contiguous()
        if name in user.places
        else value.detach().contiguous()
        for name, value in user.module.state_dict().items()
    }


# -- the file ------------------------------------------------------------------------------------


def _made(file: Path, name: str, workload: Workload, features: int, classes: int) -> nn.Module:
    """The user's module in float64 if the workload is, made as `read` says."""
    with _blamed(file, f"{file} cannot be executed"):
        code = _execute(file)
    found = getattr(code, name, None)
    if found is None:
        names = [
            key
            for key, value in vars(code).items()
            if isinstance(value, nn.Module)
            or (isinstance(value, type) and issubclass(value, nn.Module))
        ]
        raise SpecError(f"{file} has no {name}{suggest(name, names)}")
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise SpecError(
                f"{file}: {name} is a {type(found).__name__}; name a torch.nn.Module, a class of"
                " one, or a function that makes one"
            )
        arguments = _arguments(file, name, found, workload, features, classes)
        with _blamed(file, f"{name}({', '.join(map(str, arguments.values()))}) cannot be made"):
            found = found(**arguments)
    if not isinstance(found, nn.Module):
        raise SpecError(
            f"{file}: {name} makes a {type(found).__name__}; let it make a torch.nn.Module"
        )
    return found.to(torch.float64 if workload.dtype == "float64" else torch.float32)


def _execute(file: Path) -> ModuleType:
    """The file as a module; files beside it can be imported by it."""
    spec = importlib.util.spec_from_file_location(f"gnnplan_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    sys.path.insert(0, str(file.parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries that it imports
            spec.loader.exec_module(code)
    finally:
        sys.path.remove(str(file.parent))
    return code


class _blamed:
    """Turns what the user's code raises into a SpecError with its line."""

    def __init__(self, file: Path, what: str) -> None:
        self.file, self.what = file, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, SpecError)):
            return
        lines = [
            str(frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.file)
        ]
        if isinstance(error, SyntaxError):
            lines = [str(error.lineno)]
        words = str(error).strip().splitlines() or [""]
        raise SpecError(
            f"{self.file}{f', line {lines[-1]}' if lines else ''}: {self.what}"
            f" ({type(error).__name__}: {words[0]:.200}); run it with python to see more"
        ) from error


def _arguments(
    file: Path,
    name: str,
    factory: Callable[..., object],
    workload: Workload,
    features: int,
    classes: int,
) -> dict[str, Any]:
    """What the factory requires, by its parameters' names."""
    values = workload.model_dump() | {"features": features, "classes": classes}
    by_name = {alias: values[field] for field, names in ARGUMENTS.items() for alias in names}
    out: dict[str, Any] = {}
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        of_graph = parameter.name in (*ARGUMENTS["features"], *ARGUMENTS["classes"])
        if parameter.default is not parameter.empty and not of_graph:
            continue
        if parameter.name not in by_name:
            raise SpecError(
                f"{file}: {name} requires {parameter.name}, which we do not know; give it a"
                f" default, or one of the names {', '.join(by_name)}"
            )
        out[parameter.name] = by_name[parameter.name]
    return out


# -- what it is ----------------------------------------------------------------------------------


def _described(
    module: nn.Module,
    chain: Chain,
    file: Path,
    name: str,
    source: bytes,
    features: int,
    classes: int,
) -> UserModule:
    """The chain as Workload fields. Raises Unfit."""
    steps = chain.steps
    kinds = list(dict.fromkeys(step.convolution.kind for step in steps))
    if len(kinds) > 1:
        raise Unfit(
            f"its convolutions are of several kinds ({', '.join(kinds)}), and our models have one;"
            f" use {kinds[0]} throughout"
        )
    kind = kinds[0]
    _must_fit_graph(chain, features, classes)
    _must_be_whole(chain, kind)
    gaps = [step.gap for step in steps]
    relus = {gap.relu for gap in gaps[1:]}
    if len(relus) > 1:
        raise Unfit("there is ReLU after some convolutions and not after others; use it after all")
    if kind == "sgc":
        layers = _sgc(steps)
    else:
        layers = [
            ModuleLayer(
                h_in=step.convolution.h_in,
                h_out=step.convolution.h_out,
                heads=step.convolution.heads,
                middle=step.convolution.middle,
                norm=step.gap.norm,
                drops=bool(step.gap.p),
                bias=step.convolution.bias,
            )
            for step in steps
        ]
    norms = {gap.norm for gap in gaps} - {"none"}
    if len(norms) > 1:
        raise Unfit("it has batch norms and layer norms, and our models have one kind; use one")
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
    return UserModule(
        module,
        fields,
        Module(
            file=str(file),
            name=name,
            sha256=hashlib.sha256(source).hexdigest(),
            features=features,
            classes=classes,
            layers=tuple(layers),
            relu=not (relus and not relus.pop()),
        ),
        _places(module, chain),
        any(step.convolution.by_in_degree for step in steps),
    )


def _must_fit_graph(chain: Chain, features: int, classes: int) -> None:
    first, last = chain.steps[0], chain.steps[-1]
    reads, reader = first.convolution.h_in, first.name
    if chain.encoder:
        reads, reader = chain.encoder.h_in, chain.encoder.name
    writes, writer = last.convolution.h_out, last.name
    if chain.decoder:
        writes, writer = chain.decoder.h_out, chain.decoder.name
    if reads != features:
        raise Unfit(
            f"{reader} reads rows of {reads} numbers, and the graph has {features} features; make"
            f" the two equal, by a parameter named {ARGUMENTS['features'][1]} for instance"
        )
    if writes != classes:
        raise Unfit(
            f"{writer} writes rows of {writes} numbers, and the graph has {classes} classes; make"
            f" the two equal, by a parameter named {ARGUMENTS['classes'][1]} for instance"
        )


def _must_be_whole(chain: Chain, kind: str) -> None:
    """A GCNII has its two Linears, other models have none."""
    if kind != "gcnii":
        linear = chain.encoder or chain.decoder
        if linear:
            where = "before the first" if chain.encoder else "after the last"
            raise Unfit(
                f"{linear.name} is a Linear {where} convolution, which models of {kind} have not;"
                " let the convolutions read the features and write the classes, or use GCN2Conv"
            )
        if chain.steps[0].gap.relu or chain.steps[0].gap.norm != "none":
            raise Unfit(
                f"the features go through ReLU or a norm before {chain.steps[0].name}; do that to"
                " the graph's features beforehand"
            )
        return
    if not (chain.encoder and chain.decoder):
        raise Unfit("GCN2Conv stands between two Linears here; add the one that is missing")
    if not all(step.gap.relu for step in chain.steps) or not chain.decoder.gap.relu:
        raise Unfit("GCN2Conv and the Linear before it end in ReLU here; add it after each")
    ends = {bool(chain.encoder.gap.p), bool(chain.decoder.gap.p)}
    if _dropout(chain) and ends != {True}:
        raise Unfit("there is dropout before some layers and not before both Linears; add it there")


def _dropout(chain: Chain) -> float:
    """The one p of all dropouts. Raises Unfit."""
    ends = [linear.gap for linear in (chain.encoder, chain.decoder) if linear]
    found = {gap.p for gap in [*(step.gap for step in chain.steps), *ends] if gap.p}
    if len(found) > 1:
        raise Unfit(
            f"it has dropouts of {', '.join(f'{p:g}' for p in sorted(found))}, and our models have"
            " one p; use one"
        )
    return found.pop() if found else 0.0


def _sgc(steps: Iterable[Step]) -> list[ModuleLayer]:
    """One SGConv of K hops as K layers."""
    first, *others = steps
    if others:
        raise Unfit(
            f"{others[0].name} is a second SGConv, and our SGC is one; raise K, or use GCNConv"
        )
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
    """alpha, and theta of beta_l = log(theta / l + 1). Raises Unfit if layers differ in them."""
    convolutions = [step.convolution for step in steps]
    alpha, theta = convolutions[0].alpha, float(f"{math.expm1(convolutions[0].beta):.12g}")
    for number, conv in enumerate(convolutions, 1):
        if conv.alpha != alpha or not math.isclose(conv.beta, math.log(theta / number + 1)):
            raise Unfit(
                f"GCN2Conv {number} has alpha {conv.alpha:g} and beta {conv.beta:g}, and the first"
                f" one says alpha {alpha:g} and beta {math.log(theta / number + 1):g}; give all the"
                " same alpha and theta, and number layers from 1"
            )
    return {"alpha": alpha, "theta": theta}


def _places(module: nn.Module, chain: Chain) -> dict[str, Where]:
    """Where our Net has each parameter and buffer of the module, by their name there."""
    out: dict[str, Where] = {}

    def same(tensor: Tensor) -> Tensor:
        return tensor

    def norm(gap: Gap, at: str) -> None:
        if gap.module:
            for name in ("weight", "bias", "running_mean", "running_var"):
                if name in module.get_submodule(gap.module).state_dict():
                    out[f"{gap.module}.{name}"] = (f"{at}.{name}", same)

    for number, step in enumerate(chain.steps, 1):
        norm(step.gap, f"layers.{number}.norm")
        for name, (ours, view) in step.convolution.weights.items():
            sgc = step.convolution.kind == "sgc"
            out[f"{step.name}.{name}"] = (
                f"layers.{ours}" if sgc else f"layers.{number}.{ours}",
                view,
            )
    for place, linear in (("encoder", chain.encoder), ("decoder", chain.decoder)):
        if linear:
            for name in ("weight", "bias"):
                out[f"{linear.name}.{name}"] = (f"{place}.{name}", same)
    return out
