"""Finds state that a module keeps between calls, and parts that a copy of the module would lack.

A module is recorded once, and every rank trains a copy."""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gnnplan.executor.modules.record import Unfit, is_the_users

HOOKED = (
    "{} has a hook of gradients, and a rank has those of its own rows alone; leave it out (--set"
    " clip=.. clips the gradient of all parameters)"
)


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module. Raises Unfit if it has hooks of gradients, or cannot be copied."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unfit(HOOKED.format(name))
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Unfit(HOOKED.format(path or "it"))
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise Unfit(f"it cannot be copied ({type(error).__name__}: {error})") from error


def must_learn_its_own(output: Tensor, module: nn.Module) -> None:
    """Raise Unfit if the output depends on a trained tensor that is no parameter of the module."""
    own, seen, todo = {*map(id, module.parameters())}, set(), [output.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in own:
            raise Unfit(
                f"forward reads a tensor {list(node.variable.shape)} that learns and is none of its"
                " parameters, but a file's, or of a part that a function has kept, as in"
                " conv.forward = lambda *given: old(*given); make it a parameter, and the function"
                " a method"
            )
        todo += [read for read, _ in node.next_functions]


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return the state that a module, its submodules, functions and the user's files keep, by name.

    That is numbers and texts, tensors of one number or of integers, the sizes of containers, and
    the states of iterators and random generators; but not batch norm's count of batches."""
    found: dict[str, Any] = {}
    files = {
        name: code
        for name, code in tuple(sys.modules.items())
        if is_the_users(getattr(code, "__file__", None) or "<none>")
    }

    def note(name: str, value: Any, depth: int) -> None:
        """Add a value, and values inside it to a depth."""
        if isinstance(value, (list, tuple, dict, set, deque)):
            found[f"the size of {name}"] = len(value)
        if isinstance(value, (int, float, str, np.generic)):
            if value == value:  # NaN differs from itself
                found[name] = value
        elif isinstance(value, Tensor):
            counts = value.numel() == 1 or not value.is_floating_point()
            learns = isinstance(value, nn.Parameter) or value.grad_fn is not None
            if counts and not learns and value.layout == torch.strided:
                found[name] = value.tolist()
        elif isinstance(value, (Iterator, random.Random, np.random.Generator)):
            with suppress(Exception):  # some cannot be pickled
                found[name] = pickle.dumps(value)
        elif depth and isinstance(value, (list, tuple)):
            note(name, dict(enumerate(value)), depth)
        elif depth and isinstance(value, dict):
            for key, each in tuple(value.items()):
                note(f"{name}.{key}", each, depth - 1)
        elif isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
            return
        elif getattr(value, "__module__", None) in files:
            note(name, dict(vars(value)), depth)
            if isinstance(value, FunctionType):
                captured = [c.cell_contents for c in value.__closure__ or () if c != CellType()]
                note(name, [*(value.__defaults__ or ()), *captured], depth)

    note("os.environ", dict(os.environ), 1)
    for path, part in module.named_modules():
        if not isinstance(part, _NormBase):
            note(f"self.{path}".rstrip("."), vars(part), 3)
    for code in files.values():
        file = Path(str(code.__file__)).name
        for name, value in tuple(vars(code).items()):
            note(f"{file}: {name}", value, 3)
    return found
