"""A user's module as a workload that every strategy can train, with its parameters.

It is FILE.py:NAME, or a live object: a torch.nn.Module, a class of one, or a function that makes
one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.executor.modules.convolutions import Unfit
from gnnplan.executor.modules.describe import described, places, widths
from gnnplan.executor.modules.follow import follow
from gnnplan.executor.modules.make import ARGUMENTS, in_file, make
from gnnplan.executor.modules.parameters import SUFFIX, Parameters, Places, cast, kept
from gnnplan.planner.gnn.workload import Module, Workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir, read_bytes

MAX_SOURCE = 1 << 22  # [B] of a file that is executed
MAX_PARAMETERS = 1 << 40  # [B] of a live module's file
# FILE.py:NAME, or a live object
Source = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class UserModule:
    """A user's module, and what it is among ours.

    fields: of the Workload. places: by the name of each of its parameters and buffers, where our
    Net has it. arguments: that the class or function was called with, by its own names."""

    module: nn.Module
    fields: Mapping[str, Any]
    description: Module
    places: Mapping[str, Places]
    by_in_degree: bool  # right on undirected graphs alone
    arguments: Mapping[str, Any]


def with_user_module(
    problem: Problem, model: Source, given: Iterable[str] = (), folder: Path | None = None
) -> tuple[Problem, list[str]]:
    """The problem with the user's module as its model, and notes on how that was made.

    model: `FILE.py:NAME`; or a live torch.nn.Module, which stays as it is and whose parameters
    training starts from; or its class, or a function that makes it, which is called with the
    graph's widths. given: fields of the workload that the user set, which the module must not
    contradict. folder: see `read`. Raises SpecError.

    >>> problem, notes = with_user_module(problem, MyGNN(100, 64, 47))  # doctest: +SKIP
    """
    stats = problem.stats
    user = read(model, problem.workload, stats.features, stats.classes, folder)
    must_suit(user, stats.directed)
    given = list(given)
    workload = with_module(problem.workload, user, given)
    return replace(problem, workload=workload), assumed(user, given)


def read(
    model: Source,
    workload: Workload,
    features: int,
    classes: int,
    folder: Path | None = None,
    own_widths: tuple[bool, bool] = (False, False),
) -> UserModule:
    """The user's module, for a graph of so many columns and classes.

    A class or a function is called with what it requires: widths of the graph, and of `workload`
    the fields in `ARGUMENTS`. torch's random numbers start from the workload's seed, before a file
    is executed.

    A live object may be from anywhere, a notebook's cell too: ranks read its parameters from a
    file, which is written to `folder` (default: modules/ in gnnplan's cache directory), under a
    name that says its content. Ranks on other servers need it at the same path.

    own_widths: whether `features` and `classes` are but what a class is called with, and the module
    may read and write rows of other widths.

    Raises SpecError, of a file with its line."""
    classes = max(classes, 1)
    dtype = torch.float64 if workload.dtype == "float64" else torch.float32
    file, sha256 = None, ""
    if isinstance(model, str):
        path, colon, name = model.rpartition(":")
        if not colon or not path.endswith(".py"):
            raise SpecError(f"model {model}: must read FILE.py:NAME, as model.py:MyGNN")
        file = Path(path).resolve()
        sha256 = hashlib.sha256(read_bytes(file, MAX_SOURCE)).hexdigest()
    else:
        name = getattr(model, "__name__", type(model).__name__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        found = in_file(file, name) if file else model
        module, arguments = make(found, name, file, workload, features, classes)
    if file:
        module = module.to(dtype)
    try:
        with _modes_kept(module):
            chain = follow(module)
        reads, writes = (width for _, width in widths(chain))
        features = reads if own_widths[0] else features
        classes = writes if own_widths[1] else classes
        fields, own = described(chain, features, classes)
    except Unfit as unfit:
        raise SpecError(f"{f'{file}: ' if file else ''}{name}: {unfit}") from unfit
    where = places(module, chain)
    if file is None:
        start = Parameters(cast(module.state_dict(), dtype), where)
        file, sha256 = start.keep(folder or cache_dir() / "modules", name)
    description = Module(
        file=str(file), name=name, sha256=sha256, features=features, classes=classes, **own
    )
    by_in_degree = any(step.convolution.by_in_degree for step in chain.steps)
    return UserModule(module, fields, description, where, by_in_degree, arguments)


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    """`follow` looks at both modes of a module; afterwards its parts have those that they had."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@lru_cache(maxsize=2)
def read_again(workload: Workload) -> Parameters:
    """What training of a plan's workload starts from.

    Raises SpecError if the file is no longer what was planned."""
    module = workload.module
    assert module is not None
    path = Path(module.file)
    is_live = path.suffix == SUFFIX
    source = read_bytes(path, MAX_PARAMETERS if is_live else MAX_SOURCE, "plan again")
    if hashlib.sha256(source).hexdigest() != module.sha256:
        raise SpecError(
            f"{path} has changed since the plan was made; plan again, or put the file back"
        )
    if is_live:
        return kept(path)
    again = read(f"{path}:{module.name}", workload, module.features, module.classes)
    for field, value in {**again.fields, "module": again.description}.items():
        if getattr(workload, field) != value:
            raise SpecError(
                f"{path}: {module.name} has {field} {value}, and the plan has"
                f" {getattr(workload, field)}; the module decides it, so plan again"
            )
    return Parameters(again.module.state_dict(), again.places)


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


def assumed(user: UserModule, given: Collection[str]) -> list[str]:
    """A note for each argument of the module that has the workload's default, as nobody gave it."""
    field_of = {alias: field for field, aliases in ARGUMENTS.items() for alias in aliases}
    return [
        f"{user.description.name} is made with {argument}={value}, the default, since it requires"
        f" one and none was given; --set {field}=.. gives another"
        for argument, value in user.arguments.items()
        if (field := field_of[argument]) not in ("features", "classes", *given)
    ]


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
    read_again(workload).fill(net)


def state_of(weights: Mapping[str, Tensor], workload: Workload) -> dict[str, Tensor]:
    """Our Net's weights as the state_dict of the user's module."""
    return read_again(workload).trained(weights)
