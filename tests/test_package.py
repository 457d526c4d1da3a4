"""What `pip install` brings: the wheel holds every file of the package and nothing else, a source
distribution makes the same wheel, and a newcomer who has only that can plan, run and validate."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from gnnplan import __version__

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]


def build(sources: Path, out: Path, *options: str) -> Path:
    """The wheel of a folder of sources; the one way goes through a source distribution."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    result = subprocess.run(
        [*command, str(sources)], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as git keeps it, links included: a build leaves files behind."""
    copy = tmp_path_factory.mktemp("sources") / "gnnplan"
    away = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=away)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the source distribution: what others build from, without git and links."""
    return build(sources, tmp_path_factory.mktemp("dist"))


def package_files() -> set[str]:
    """Files that belong into a wheel; of the traces those that plans quote."""
    package = ROOT / "gnnplan"
    files = [
        (Path(folder) / name).relative_to(ROOT)
        for folder, _, names in os.walk(package, followlinks=True)
        for name in names
    ]
    return {
        str(path)
        for path in files
        if "__pycache__" not in path.parts
        and (path.parts[1] != "traces" or path.parts[2] == "quoted")
    }


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path):
    """Data files and the folders behind links are what a wheel loses first."""
    expected = package_files()
    folders = {Path(name).parts[1] for name in expected}
    assert {"planner", "simulator", "executor", "traces", "cli", "py.typed"} <= folders
    assert {Path(name).suffix for name in expected} >= {".py", ".yaml", ".csv"}
    held = names(wheel)
    extra = f"gnnplan-{__version__}.dist-info/"
    assert {name for name in held if not name.startswith(extra)} == expected
    assert f"{extra}licenses/LICENSE" in held


def test_the_package_says_what_it_is_and_links_nowhere_into_the_repository(wheel: Path):
    """The description stands alone on an index; an image of README.md would be missing there."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"gnnplan-{__version__}.dist-info/METADATA").decode()
    metadata = Parser().parsestr(text)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    assert isinstance(description, str) and description.startswith("# gnnplan")
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", description)
    for extra in metadata.get_all("Provides-Extra", []):
        assert f"`gnnplan[{extra}]`" in description


@pytest.mark.nightly
def test_the_repository_makes_the_same_wheel(sources: Path, wheel: Path, tmp_path: Path):
    """`pip install .` follows the links, a source distribution has copied them."""
    assert names(build(sources, tmp_path, "--wheel")) == names(wheel)
