"""Plans and cluster files of before are still read: old names with a notice."""

import json
from typing import Any

import pytest
import yaml

from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import LEFT_OUT, apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError

LOCAL = PRESETS / "local.yaml"


def as_before(cluster: dict[str, Any]) -> dict[str, Any]:
    """A cluster's fields under their names of 0.1.0."""
    for name in ("intra_node", "inter_node"):
        if cluster.get(name):
            cluster[name]["work"] = cluster[name].pop("core_s_per_byte", 1e-9)
    return cluster


def test_a_cluster_file_of_the_release_before_is_read(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(as_before(yaml.safe_load(LOCAL.read_text()))))
    assert read_cluster(str(path)).intra_node.core_s_per_byte == 1e-9
    told = capsys.readouterr().err
    assert str(path) in told and "work is now core_s_per_byte" in told


def test_fields_that_bought_little_are_read_and_left_out(tmp_path, capsys):
    """`gnnplan measure` has written them, and so have plans."""
    document = yaml.safe_load(LOCAL.read_text())
    document["device"] |= {"weight_gradient": 1e9, "memory_rates": {1e3: 1e9}}
    document["intra_node"]["core_s_per_message"] = 1e-5
    document |= {"timeslice_slowdown": 1.2, "cold_cache_penalty": 0.001, "host_latency": {}}
    document["ranges"] = {"device.weight_gradient": [0.9, 1.1]}
    document["provenance"] = document.get("provenance", {}) | {"timeslice_slowdown": "measured"}
    path = tmp_path / "measured.yaml"
    path.write_text(yaml.safe_dump(document))
    found, local = read_cluster(str(path)), read_cluster(str(LOCAL))
    alike = {"provenance": local.provenance, "intra_node": local.intra_node}
    assert found.model_copy(update=alike) == local
    assert not capsys.readouterr().err
    for field in ("device.weight_gradient", "timeslice_slowdown"):
        assert field in LEFT_OUT
        with pytest.raises(SpecError, match=rf"{field}.*(no such|unknown) field"):
            apply_overrides(local, Workload(), [f"{field}=1.5e9"])


def test_a_plan_of_the_release_before_is_read(tmp_path, capsys):
    graph = load("synthetic:community?vertices=100&edges=600&features=8&classes=3")
    problem = Problem(graph.stats, graph, Workload(layers=2, hidden=8), read_cluster(str(LOCAL)))
    document = plan.make(search(problem))
    document = {**document, "gnnplan": "0.1.0", "cluster": as_before(document["cluster"])}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert plan.question(plan.read(path)).cluster == problem.cluster
    assert "work is now core_s_per_byte" in capsys.readouterr().err
