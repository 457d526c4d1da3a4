"""What `pip install` brings: the wheel holds every file of the package and nothing else, a source
distribution makes the same wheel, and a newcomer who has only that can plan, run and validate."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from calls import ended_well

from gnnplan import __version__

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]


def build(sources: Path, out: Path, *options: str) -> Path:
    """The wheel of a folder of sources; without `--wheel` it goes through a source distribution."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options]
    ended_well(*command, sources)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the repository as git keeps it, links included: a build leaves files behind."""
    copy = tmp_path_factory.mktemp("sources") / "gnnplan"
    away = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=away)
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The wheel that `pip install .` makes, which follows the links."""
    return build(sources, tmp_path_factory.mktemp("dist"), "--wheel")


def package_files() -> set[str]:
    """Files that belong into a wheel; of the traces those that plans quote."""
    files = [
        (Path(folder) / name).relative_to(ROOT)
        for folder, _, names in os.walk(ROOT / "gnnplan", followlinks=True)
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


def test_a_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    """Data files and the folders behind links are what a wheel loses first."""
    expected = package_files()
    folders = {Path(name).parts[1] for name in expected}
    linked = {"planner", "simulator", "executor", "papers", "traces"}
    assert linked | {"cli", "py.typed"} <= folders
    assert {Path(name).suffix for name in expected} >= {".py", ".yaml", ".csv"}
    held = names(wheel)
    extra = f"gnnplan-{__version__}.dist-info/"
    assert {name for name in held if not name.startswith(extra)} == expected
    assert f"{extra}licenses/LICENSE" in held


def test_the_package_says_what_it_is_and_links_nowhere_into_the_repository(wheel):
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
def test_a_source_distribution_makes_the_same_wheel(sources, wheel, tmp_path):
    """What others build from, without git and links: it has copied them."""
    assert names(build(sources, tmp_path)) == names(wheel)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with the wheel; a folder's `.pth` file is not read."""
    pytest.importorskip("torch_geometric")
    pytest.importorskip("plotly")
    folder = tmp_path_factory.mktemp("newcomer") / "venv"
    venv.create(folder)
    (here,) = folder.glob("lib/python*/site-packages")
    (here / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    install = ["install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", str(wheel)]
    for words in (install, ["check"]):
        subprocess.run([*pip, *words], check=True, timeout=100)
    return folder


@pytest.fixture
def run(environment, tmp_path):
    """run('gnnplan', 'plan', ...) of the environment, in an empty folder."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def call(program: str, *words: str) -> str:
        command = environment / "bin" / program, *words
        result = ended_well(*command, within=200, cwd=tmp_path, env=environ)
        assert "Warning" not in result.stderr
        return result.stdout

    return call


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_who_has_only_the_wheel_plans_trains_and_validates(run, environment):
    where = run("python", "-c", "import gnnplan; print(gnnplan.__file__)")
    assert Path(where).is_relative_to(environment)
    run("gnnplan", "plan", "-o", "plan.json")
    run("gnnplan", "simulate", "plan.json")
    run("gnnplan", "run", "plan.json", "--epochs", "3", "--out", "trained")
    assert "diagnosis:" in run("gnnplan", "validate", "trained")
    # files that only `plan --graph NAME --cluster NAME` and `validate --published` read
    assert "predicted" in run(
        "gnnplan", "plan", "--graph", "reddit", "--cluster", "dgx_a100", "--json"
    )
    figures = ROOT / "traces" / "published" / "figures.csv"
    assert "637 figures predicted" in run("gnnplan", "validate", "--published", str(figures))
