"""Tutorials are true: in an empty folder, one command after the other does what the page shows.

A block with a title is that file. In a `console` block a line after `$` is run, and the lines below
it are in what it prints; `...` stands for anything. Blocks without a language are not run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gnnplan.executor.launch import emulation
from gnnplan.planner.vocabulary.errors import SpecError

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r"^(?P<root><!-- needs root -->\n)?```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n"
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Step(NamedTuple):
    """A file to write, or a command and the lines that it prints."""

    title: str
    text: str
    shown: list[str]
    needs_root: bool


def steps(page: str) -> Iterator[Step]:
    for block in BLOCK.finditer(page):
        if block["title"]:
            yield Step(block["title"], block["text"], [], False)
        elif block["language"] == "console":
            assert block["text"].startswith("$ ")
            lines = block["text"].replace("\\\n", " ")
            for command in re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:]:
                line, _, shown = command.partition("\n")
                yield Step("", line, shown.splitlines(), bool(block["root"]))


def words(line: str) -> str:
    """A line without how wide its columns are."""
    return " ".join(line.split())


def is_among(shown: str, printed: list[str]) -> bool:
    pattern = ".*".join(re.escape(part) for part in words(shown).split("..."))
    return any(re.fullmatch(pattern, words(line)) for line in printed)


def can_play_servers() -> bool:
    try:
        emulation.check()
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_tutorial_does_what_it_shows(page, tmp_path):
    pytest.importorskip("torch_geometric")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": programs, "GNNPLAN_CACHE": str(tmp_path / "cache")}
    folder = tmp_path / "empty"
    folder.mkdir()
    ran = 0
    for step in steps(page.read_text(encoding="utf-8")):
        if step.title:
            (folder / step.title).write_text(step.text, encoding="utf-8")
        elif not step.needs_root or can_play_servers():
            result = subprocess.run(
                ["bash", "-c", step.text],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert result.returncode == 0, f"{step.text}\n{result.stdout}"
            lines = result.stdout.splitlines()
            for shown in step.shown:
                assert is_among(shown, lines), f"{step.text}\n{shown!r} is not in\n{result.stdout}"
            ran += 1
    assert ran > 2
