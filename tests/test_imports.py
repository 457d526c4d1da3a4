"""Who may import whom: cli -> api -> report -> simulator -> planner <- executor; cli -> papers."""

import ast
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from calls import ended_well

ROOT = Path(__file__).resolve().parents[1]
# A room may import itself, the rooms above it in its list, and what LIBRARIES lets it. Files that
# are no room come with their package.
OF_PACKAGES = {
    "planner": "vocabulary cluster gnn graph ownership problem strategies decision evidence",
    "simulator": "",
    "report": "",
    "papers": "",
    "api": "view arguments simulation validation running planning scaling tuning",
    "executor": "layers modules ranks minibatch strategies train launch measure emit",
}
ROOMS = {package: rooms.split() for package, rooms in OF_PACKAGES.items()}
# In graph/formats other libraries read their own files: `library` imports one there by its name, when
# such a file is read, and says how to install it where it is absent.
FACES = ("gnnplan.api", "gnnplan.cli", "gnnplan.report", "gnnplan.papers")
HALVES = ("gnnplan.simulator", "gnnplan.executor")
FORBIDDEN = {
    "planner": ("torch", "simpy", "dgl", *HALVES, *FACES),
    "simulator": ("torch", "dgl", "gnnplan.executor", *FACES),
    "report": ("torch", "simpy", "dgl", "gnnplan.executor", *FACES[:2], "gnnplan.papers"),
    "papers": ("torch", "simpy", "dgl", *HALVES, *FACES[:3]),
    "executor": ("simpy", "gnnplan.simulator", *FACES),
    "api": ("gnnplan.papers", "gnnplan.cli"),
}


def sources() -> dict[str, Path]:
    """Our modules by their import names; gnnplan/ holds the packages, or links to them."""
    places = [(ROOT / "gnnplan" / package, f"gnnplan.{package}") for package in (*ROOMS, "cli")]
    return {
        ".".join((name, *path.relative_to(place).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for place, name in places
        for path in sorted(place.rglob("*.py"))
    }


@cache
def imported(path: Path) -> list[str]:
    """Absolute names that a file imports, wherever in it; relative ones are refused."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def arrows() -> dict[str, set[str]]:
    """Which of our modules each imports."""
    modules = sources()
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        found[module] = {name for name in targets if name in modules and name != module}
    return found


@pytest.mark.parametrize("package", ROOMS)
def test_no_file_imports_what_its_package_may_not(package):
    files = [(m, path) for m, path in sources().items() if m.startswith(f"gnnplan.{package}.")]
    assert len(files) > 1
    for module, path in files:
        for name in imported(path):
            bad = [w for w in FORBIDDEN[package] if name == w or name.startswith(w + ".")]
            assert not bad, f"{module} imports {name}"


def test_a_room_imports_rooms_above_it_only():
    """A newcomer who opens a room needs those above it, and none below."""
    for module, targets in arrows().items():
        _, package, room, *_ = [*module.split("."), "", ""]
        if room not in ROOMS.get(package, []):
            continue
        allowed = ROOMS[package][: ROOMS[package].index(room) + 1]
        for target in targets:
            _, of, other, *_ = [*target.split("."), "", ""]
            assert of != package or other in ("", *allowed), (
                f"{module} imports {target}: {room} stands above {other}"
            )


@pytest.mark.slow
def test_no_circle_of_imports():
    """Not even for types: two files that need each other are one idea."""
    assert not [c for c in nx.strongly_connected_components(nx.DiGraph(arrows())) if len(c) > 1]


def test_every_file_of_the_planner_and_executor_is_in_a_room():
    for module in sources():
        _, package, room, *_ = [*module.split("."), "", ""]
        assert not ROOMS.get(package) or room in ("", "__main__", *ROOMS[package]), module


def loaded_by(code: str) -> set[str]:
    """Top-level names of all modules that are loaded after `code`, and full names of our own."""
    program = (
        f"import sys\n{code}\nprint('loaded:', *{{m if m.startswith('gnnplan') else"
        " m.partition('.')[0] for m in sys.modules})"
    )
    result = ended_well(sys.executable, "-W", "error", "-c", program)
    return set(result.stdout.rpartition("loaded:")[2].split())


@pytest.mark.processes
def test_the_simulator_loads_no_torch():
    loaded = loaded_by(
        "import gnnplan.simulator.network, gnnplan.simulator.replay\n"
        "assert 'scipy.stats' not in sys.modules"  # takes a second, and `simulate` ranks nothing
    )
    assert "simpy" in loaded and "torch" not in loaded
    assert not [name for name in loaded if name.startswith("gnnplan.executor")]


TRAINS = """
import torch
from dataclasses import replace
from scipy.sparse import csr_matrix
from gnnplan.executor.train import train
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import parse
graph = load('synthetic:community?vertices=50&edges=200&features=8&classes=4')
cluster = Cluster.model_validate({'intra_node': {'bandwidth': '1GB/s'},
    'device': {'kind': 'cpu', 'memory': '1GB', 'gemm': '1TFLOP/s', 'memory_bandwidth': '9GB/s'}})
for strategy, mode in ('graph_parallel', 'full'), ('gnnpipe(stages=1,chunks=2)', 'full'), ('data_parallel(cache=99)', 'mini'):
    asked = Workload(layers=2, hidden=8, mode=mode, metric='roc_auc')
    problem = Problem(graph.stats, graph, asked, cluster)
    train(Rank(0, 1, torch.device('cpu'), 'gloo'), problem, parse(strategy).settle(problem), None, 2)
    graph = replace(graph, x=csr_matrix(graph.x))
assert 'scipy.stats' not in sys.modules
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_a_rank_trains_without_sympy_and_networkx():
    """torch imports the one, a fabric needs the other: ranks started 0.6 s later."""
    assert not loaded_by(TRAINS) & {"sympy", "networkx"}
