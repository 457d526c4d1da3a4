"""Packages that stages need: what this Python has, what it lacks, and how to bring that."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
DEPENDENCIES = [re.split("[^A-Za-z0-9_-]", each)[0] for each in PROJECT["project"]["dependencies"]]
# what `import gnnplan` needs beside torch, and what these packages need
NEEDED = tuple(each for each in DEPENDENCIES if each != "torch")
NEEDED_TOO = ("pydantic_core", "annotated-types", "typing-inspection")
TESTS = ("pytest", "pytest-timeout", "hypothesis")
PEERS = {
    "torch_geometric": "pip has it for every Python; it runs on any CUDA",
    "dgl": "its wheels with CUDA are on data.dgl.ai, for one torch and one CUDA each"
    " (pip's are for the processor); the stage `peers` does without",
    "torch_sparse": "optional: PyG's own kernels; data.pyg.org, for one torch and one CUDA each",
}


def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lines() -> list[str]:
    """The lines that `--list` prints."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {name: version(name) for name in (*NEEDED, *NEEDED_TOO, *TESTS, *PEERS)}
    out = [
        f"Python {platform.python_version()} at {sys.executable}",
        f"torch {version('torch') or 'MISSING: bring one with CUDA (pytorch.org)'}",
    ]
    for title, names in (
        ("all stages need", (*NEEDED, *NEEDED_TOO)),
        ("the stage `tests` needs", TESTS),
        ("the stages `kernels` and `peers` compare with", PEERS),
    ):
        out.append(f"{title}:")
        for name in names:
            why = f"  ({PEERS[name]})" if name in PEERS and not found[name] else ""
            out.append(f"  {name:<18} {found[name] or 'missing'}{why}")
    missing = [name for name in (*NEEDED, *NEEDED_TOO, *TESTS) if not found[name]]
    missing += [] if found["torch_geometric"] else ["torch_geometric"]
    if not missing:
        return [*out, "nothing that is needed is missing"]
    tag = python.replace(".", "")
    return [
        *out,
        "",
        "Bring what is missing without touching torch: on a machine with a network",
        "  pip download --no-deps --only-binary=:all: --python-version " + python,
        f"      --implementation cp --abi cp{tag} --abi abi3 --abi none",
        "      --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64",
        f"      --platform manylinux2014_x86_64 -d wheels {' '.join(missing)}",
        "and on this one",
        "  pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=site",
        "--no-deps: pip would bring another torch. Wheels must be of one Python and processor.",
    ]
