"""Plans and cluster files of 0.1.0 are still read, with a notice of what was renamed."""

import json
from pathlib import Path

import pytest
import yaml

from gnnplan.planner.cluster.spec import PRESETS, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem

OLD = {"timeslice_slowdown": "crowding", "cold_cache_penalty": "refill"}
OLD_OF_LINKS = {"core_s_per_byte": "work", "core_s_per_message": "wake"}


def as_before(cluster: dict) -> dict:
    """A cluster's fields under their names of 0.1.0."""
    cluster = {OLD.get(name, name): value for name, value in cluster.items()}
    for name in ("intra_node", "inter_node"):
        if cluster.get(name):
            cluster[name] = {OLD_OF_LINKS.get(n, n): value for n, value in cluster[name].items()}
    return cluster


def test_a_cluster_file_of_the_release_before_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    document = yaml.safe_load((PRESETS / "local.yaml").read_text())
    document |= {"timeslice_slowdown": 1.2, "cold_cache_penalty": 0.001, "cores": 2}
    document["intra_node"] |= {"core_s_per_byte": 1e-9, "core_s_per_message": 1e-5}
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(as_before(document)))
    cluster = read_cluster(str(path))
    assert (cluster.timeslice_slowdown, cluster.cold_cache_penalty) == (1.2, 0.001)
    assert isinstance(cluster.intra_node, Link) and cluster.intra_node.core_s_per_byte == 1e-9
    told = capsys.readouterr().err
    assert str(path) in told and "crowding is now timeslice_slowdown" in told
    assert "wake is now core_s_per_message" in told


def test_a_plan_of_the_release_before_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph = load("synthetic:community?vertices=100&edges=600&features=8&classes=3")
    problem = Problem(
        graph.stats, graph, Workload(layers=2, hidden=8), read_cluster(str(PRESETS / "local.yaml"))
    )
    document = plan.make(search(problem))
    document = {**document, "gnnplan": "0.1.0", "cluster": as_before(document["cluster"])}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert plan.question(plan.read(path)).cluster == problem.cluster
    assert "crowding is now timeslice_slowdown" in capsys.readouterr().err
