"""Documents say what is true: their links lead somewhere, every field is explained, and nothing long;
examples in docstrings print what stands there, and strategies' pages have their programs' drawings."""

import ast
import doctest
import importlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from calls import ended_well
from typer import Context
from typer.main import get_command

import gnnplan
from gnnplan.cli import app
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.gnn.fields import Fields
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import FAMILIES, names, parse
from gnnplan.testing.laws import drawing_of

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "traces").glob("*.md")]
)
CURRENT = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]
# A published name without a page of its own is a variant: pipegcn_gf is on pipegcn's page.
PAGES = [name for name in names() if (ROOT / "docs" / "strategies" / f"{name}.md").exists()]


def docstring_of(module: Path) -> str:
    return ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""


# rooms that say which file to open
ROOMS = [
    path.parent
    for top in ("benchmarks", "executor", "gnnplan", "planner", "simulator")
    for path in sorted((ROOT / top).rglob("__init__.py"))
    if docstring_of(path).count(".py") > 1
]


def anchors_of(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    words = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8"))
    for target, anchor in links:
        if not target.startswith("http"):
            path = document.parent / target if target else document
            assert path.exists(), target
            assert not anchor or anchor in anchors_of(path), f"{target}#{anchor}"


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", ["Cluster", "Link", "Fabric", "Device", "Fields"])
def test_the_table_of_a_specification_is_what_its_fields_say(name):
    """The command line's help says the same of a workload's."""
    file = "gnn/fields.py" if name == "Fields" else "cluster/spec.py"
    tree = ast.parse((ROOT / "planner" / file).read_text(encoding="utf-8"))
    [found] = [one for one in tree.body if getattr(one, "name", "") == name]
    rows = ["| field | meaning | default |", "|---|---|---|"]
    for field, below in pairwise(found.body):
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            text, _, default = " ".join(below.value.value.split()).partition(" [default: ")
            value = (
                next(iter(field.value.args), None)
                if isinstance(field.value, ast.Call)
                else field.value
            )
            if not default and value is not None:
                number = ast.literal_eval(value)
                default = f"{number:g}]" if type(number) in (int, float) else f"{number}]".lower()
            rows.append(f"| `{field.target.id}` | {text} | {default[:-1] or 'required'} |")
    table = "\n".join(rows)
    text = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    assert f"\n{table}\n" in text, f"files.md should have\n{table}"
    assert "`module`" in text and {*Fields.model_fields, "module"} == {*Workload.model_fields}


@pytest.mark.parametrize("name", names())
def test_every_strategy_has_its_page(name):
    """A variant is on the page of its family: pipegcn_gf on pipegcn's."""
    pages = [p for p in (ROOT / "docs" / "strategies").glob("*.md") if name.startswith(p.stem)]
    assert pages and name in pages[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_strategy_s_page_names_its_files_and_tests(name):
    """pipegcn's page named none, and said of graph_parallel's `checkpoint` nothing."""
    text = (ROOT / "docs" / "strategies" / f"{name}.md").read_text(encoding="utf-8")
    for room in ("planner/strategies", "executor/strategies", "tests"):
        assert f"`{room}/" in text, f"{name}.md names nothing in {room}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_knob_is_explained(family):
    """On a page of the family; what a name sets (`staleness` of pipegcn) needs no explanation."""
    pages = [name for name in PAGES if names()[name][0] is family]
    text = "".join((ROOT / "docs" / "strategies" / f"{n}.md").read_text("utf-8") for n in pages)
    set_by_names = {knob for of, knobs in names().values() if of is family for knob in knobs}
    knobs = {field.name for field in fields(family)} - set_by_names
    assert not [knob for knob in knobs if not re.search(rf"^\|.*`{knob}`.*\|", text, re.MULTILINE)]


def test_every_preset_is_listed():
    text = (ROOT / "docs" / "how-to" / "describe-a-cluster.md").read_text(encoding="utf-8")
    assert not [path.stem for path in PRESETS.glob("*.yaml") if f"`{path.stem}`" not in text]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_names_its_files(room):
    """Eleven lists of files had fallen behind."""
    listed = set(re.findall(r"(?<![\w/])\w+\.py", docstring_of(room / "__init__.py")))
    assert listed == {path.name for path in room.glob("*.py")} - {"__init__.py"}


def test_no_document_or_code_names_a_file_that_is_gone():
    """Paths in backticks, such as `planner/cluster/cost.py`, exist."""
    named = r"`((?:planner|executor|simulator|tests|benchmarks|traces|examples)/[\w/.-]+)`"
    for document in CURRENT:
        for path in re.findall(named, document.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{document.relative_to(ROOT)} names {path}"


def commands(document: Path) -> Iterator[list[str]]:
    """The words of every `gnnplan VERB ...` in a document's blocks."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"^```(?:console|bash)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.match(r"(?:\$ |srun.* -m )?gnnplan (.*)", line):
                yield shlex.split(found[1], comments=True)


def test_commands_in_documents_have_options_that_exist():
    """An option that was renamed stayed in a how-to; the commands of tutorials run at night."""
    known = {
        name: {option for one in verb.get_params(Context(verb)) for option in one.opts}
        for name, verb in get_command(app).commands.items()
    }
    count = 0
    for document in CURRENT:
        for verb, *words in commands(document):
            if verb.startswith("-"):
                continue
            used = {word.partition("=")[0] for word in words if word.startswith("-")} - {"--help"}
            assert verb in known and used <= known[verb], f"{document.name}: {verb} {words}"
            count += 1
    assert count > 50


def test_commands_in_documents_have_a_fanout_for_each_layer():
    """The first command about links gave two of three layers, and was refused."""
    for document in DOCUMENTS:
        for verb, *words in commands(document):
            given = dict(pairwise(words))
            if verb == "plan" and "--fanout" in given:
                layers = int(given.get("--layers", Workload().layers))
                assert given["--fanout"].count(",") + 1 == layers, f"{document.name}: {words}"


def test_every_argument_says_what_it_is_good_for():
    """The help is read from docstrings, of the API too; `name` in one is the option's."""
    for name, verb in get_command(app).commands.items():
        for one in verb.get_params(Context(verb)):
            assert one.help and "\n" not in one.help, f"{name} {one.opts}"


def test_every_public_name_is_in_the_reference_of_python():
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: gnnplan\.(\w+)$", text, re.MULTILINE)) == set(gnnplan.__all__)


@pytest.mark.nightly
@pytest.mark.processes
def test_the_site_is_whole_and_fetches_nothing(tmp_path):
    """`--strict` refuses links that lead nowhere, and pages that the navigation leaves out."""
    pytest.importorskip("mkdocs")
    for name in ("mkdocs.yml", "docs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    env = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    ended_well(sys.executable, "-m", "mkdocs", "build", "--strict", cwd=tmp_path, env=env)
    site = tmp_path / "build" / "site"
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    fetched = r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s>]*"
    assert len(pages) > 30 and not [found for page in pages for found in re.findall(fetched, page)]
    verbs = (site / "reference" / "command-line" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="gnnplan-{verb}"' in verbs for verb in ("plan", "simulate", "run", "validate"))
    api = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="gnnplan.{name}"' in api for name in gnnplan.__all__)


PACKAGES = {"gnnplan": "", "planner": "gnnplan.", "simulator": "gnnplan.", "executor": "gnnplan."}


def with_examples() -> list[str]:
    """Modules whose text has the prompt; the others need not be imported to know that they have none."""
    return [
        ".".join([f"{above}{room}", *file.relative_to(ROOT / room).with_suffix("").parts])
        for room, above in PACKAGES.items()
        for file in sorted((ROOT / room).rglob("*.py"))
        if ">>> " in file.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", [*with_examples(), "nightly"])
def test_examples_print_what_they_say(name):
    name = name.removesuffix(".__init__")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


# page, and which of its drawings -> strategy, ranks (each on a server of its own), layers, steps, what is drawn
DRAWN: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "graph_parallel": ("graph_parallel", 2, 2, 1, {}),
    "graph_parallel, buckets": ("graph_parallel(buckets=2)", 2, 2, 1, {}),
    "graph_parallel, bits": ("graph_parallel(bits=2)", 2, 2, 1, {}),
    "pipegcn": ("pipegcn", 2, 2, 2, {}),
    "bns": ("bns", 2, 2, 1, {}),
    "feature_parallel": ("feature_parallel", 2, 2, 1, {}),
    "tensor3d": ("tensor3d(x=1,y=2,z=2)", 4, 2, 1, {"ranks": (0,)}),
    "offload": ("offload(chunks=2)", 1, 2, 1, {}),
    "granndis": ("granndis(depth=2)", 2, 3, 1, {}),
    "gnnpipe": (
        "gnnpipe(stages=3,chunks=4,shuffle=False)",
        *(3, 3, 1),
        {"ranks": (0, 1, 2), "lanes": ("compute",)},
    ),
    "data_parallel": ("data_parallel", 2, 2, 1, {}),
    "gsplit": ("gsplit(group='all')", 2, 2, 1, {}),
    "dnp": ("dnp(group='all')", 2, 2, 1, {}),
    "snp": ("snp(group='all')", 2, 2, 1, {}),
    "p3": ("p3", 2, 2, 1, {}),
}


@pytest.mark.parametrize("page", DRAWN)
def test_a_page_has_the_drawing_of_its_program(page):
    name, ranks, layers, steps, what = DRAWN[page]
    drawing = drawing_of(parse(name), ranks, layers, steps, **what)
    text = (ROOT / "docs" / "strategies" / f"{page.split(',')[0]}.md").read_text(encoding="utf-8")
    assert f"```\n{drawing}\n```" in text, f"{page}.md should have\n{drawing}"


def test_every_family_is_drawn():
    assert {family.family for family in FAMILIES} <= set(DRAWN)
