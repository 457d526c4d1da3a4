"""Examples in docstrings print what stands there."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"gnnplan": "", "planner": "gnnplan.", "simulator": "gnnplan.", "executor": "gnnplan."}


def with_examples() -> list[str]:
    """Modules whose text has the prompt; the others need not be imported to know that they have none."""
    return [
        ".".join([f"{above}{room}", *file.relative_to(ROOT / room).with_suffix("").parts])
        for room, above in ROOMS.items()
        for file in sorted((ROOT / room).rglob("*.py"))
        if ">>> " in file.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", [*with_examples(), "pairwise"])
def test_examples_print_what_they_say(name):
    name = name.removesuffix(".__init__")
    assert doctest.testmod(importlib.import_module(name)).failed == 0
