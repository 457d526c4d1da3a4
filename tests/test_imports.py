"""Who may import whom: simulator -> planner <- executor. The planner decides without torch and simpy; help comes at once."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "gnnplan"
PACKAGES = ("planner", "simulator", "executor")
FORBIDDEN = {
    "planner": ("torch", "simpy", "dgl", "gnnplan.simulator", "gnnplan.executor", "gnnplan.cli"),
    "simulator": ("torch", "dgl", "gnnplan.executor", "gnnplan.cli"),
    "executor": ("simpy", "gnnplan.simulator", "gnnplan.cli"),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that a file imports, wherever in it, relative ones refused."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_what_its_package_may_not(package: str):
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 1
    for path in files:
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            bad = [word for word in FORBIDDEN[package] if name == word or name.startswith(word + ".")]
            assert not bad, f"{path.relative_to(ROOT)} imports {name}"


def loaded_by(code: str) -> set[str]:
    """Top-level names of all modules that are loaded after `code`, and full names of our own."""
    program = f"import sys\n{code}\nprint('loaded:', *{{m if m.startswith('gnnplan') else m.partition('.')[0] for m in sys.modules}})"
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("module", ["search", "plan", "profile", "trace", "files", "validate"])
def test_the_planner_loads_neither_torch_nor_simpy(module: str):
    if importlib.util.find_spec(f"gnnplan.planner.{module}") is None:
        pytest.skip(f"gnnplan.planner.{module} is not there yet")
    loaded = loaded_by(f"import gnnplan.planner.{module}")
    assert not loaded & {"torch", "simpy", "dgl"}
    assert not [name for name in loaded if name.startswith(("gnnplan.simulator", "gnnplan.executor", "gnnplan.cli"))]


def test_the_simulator_loads_no_torch():
    loaded = loaded_by("import gnnplan.simulator.player, gnnplan.simulator.network")
    assert "simpy" in loaded and "torch" not in loaded
    assert not [name for name in loaded if name.startswith("gnnplan.executor")]


HELP = """
sys.argv = ['gnnplan', '--help']
from gnnplan.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""


def test_help_imports_nothing_heavy():
    """Under 150 ms is only possible without these; time itself is for the benchmark."""
    loaded = loaded_by(HELP)
    assert "gnnplan.cli" in loaded
    assert not loaded & {"torch", "scipy", "simpy", "pydantic", "pymetis", "networkx", "dgl"}


TRAINS = """
import torch
from gnnplan.executor.train import train
from gnnplan.executor.worker import Rank
from gnnplan.planner.graph import load
from gnnplan.planner.job import Job
from gnnplan.planner.specs import Cluster, Workload
from gnnplan.planner.strategies import parse
graph = load('synthetic:community?vertices=50&edges=200&features=8&classes=4')
job = Job(graph.stats, graph, Workload(layers=2, hidden=8), Cluster.model_validate({'intra_node': {'bandwidth': '1GB/s'},
    'device': {'kind': 'cpu', 'memory': '1GB', 'gemm': '1TFLOP/s', 'memory_bandwidth': '9GB/s'}}))
train(Rank(0, 1, torch.device('cpu'), 'gloo'), job, parse('STRATEGY').settle(job), None, 2)
"""


@pytest.mark.parametrize("strategy", ["graph_parallel", "gnnpipe(stages=1,chunks=2)"])
def test_a_rank_trains_without_sympy_and_networkx(strategy: str):
    """torch imports the one to compare the shapes of gradients, a fabric needs the other: ranks started 0.6 s later, with 30 MB more."""
    assert not loaded_by(TRAINS.replace("STRATEGY", strategy)) & {"sympy", "networkx"}
