"""Tiles of a grid and chunks that pass devices train as one process that has the whole graph: losses,
weights, and right answers. What chunks fill is in test_memory.py, bytes and order in
test_conformance.py."""

import json

import pytest

from gnnplan.testing.ranks import Case
from gnnplan.testing.runs import must_train_as_one_process

pytestmark = [pytest.mark.timeout(110), pytest.mark.processes]

SETTINGS = """
    # ranks, servers, strategy, graph, model and more of the workload
    # every axis alone; more ranks than classes (4), labels (5) or columns; three ranks on an axis
    2 1 tensor3d(x=2,y=1,z=1) rough gcn layers=4
    2 1 tensor3d(x=1,y=2,z=1) multi sage layers=4 dropout=0.5
    2 1 tensor3d(x=1,y=1,z=2) rough gcn layers=4 dropout=0.5 directed
    3 1 tensor3d(x=1,y=3,z=1) islands gcn layers=4
    3 1 tensor3d(x=1,y=3,z=1) rough sage layers=4 hidden=2
    3 1 tensor3d(x=3,y=1,z=1) rough sage layers=4 directed
    4 1 tensor3d(x=2,y=2,z=1) multi gcn layers=4 dropout=0.5
    4 1 tensor3d(x=1,y=2,z=2) rough sage layers=4 dropout=0.5
    4 1 tensor3d(x=2,y=1,z=2) rough gcn layers=4 nightly
    8 1 tensor3d(x=2,y=2,z=2) rough sage layers=4 dropout=0.5
    8 1 tensor3d(x=2,y=2,z=2) rough gcn layers=4 nightly
    8 1 tensor3d(x=1,y=8,z=1) multi sage layers=4 dropout=0.5 directed nightly
    8 1 tensor3d(x=8,y=1,z=1) multi gcn layers=4 nightly
    # chunks of all sizes: one, some, and of a vertex each, of which some have no edges
    1 1 offload(chunks=3,trim=True) rough gcn nightly
    1 1 offload(chunks=5) multi gcn dropout=0.5 norm="layer" directed
    1 1 offload(chunks=4,trim=True) rough sage dropout=0.5 directed
    1 1 offload(chunks=60) rough sage nightly
    1 1 offload(chunks=60,trim=True) rough sage
    1 1 offload(chunks=2,trim=True) multi sage layers=1 dropout=0.5
    1 1 offload(chunks=4) rough gcn norm="batch" optimizer="sgd" dropout=0.5
    1 1 offload(chunks=1) rough gcn layers=2 dropout=0.5 nightly
    1 1 offload(chunks=3) islands gat heads=2 dropout=0.5
    1 1 offload(chunks=3,trim=True) rough gin optimizer="sgd"
    1 1 offload(chunks=4,trim=True) islands sgc dropout=0.5
    # of several ranks; of islands nothing crosses
    2 1 offload(chunks=3) rough gcn dropout=0.5 nightly
    2 1 offload(chunks=3,trim=True) rough gcn dropout=0.5
    3 1 offload(chunks=2,trim=True) rough sage directed
    2 2 offload(chunks=1) multi sage dropout=0.5 nightly
    2 2 offload(chunks=1,trim=True) multi sage dropout=0.5
    2 1 offload(chunks=4) rough gcn norm="batch" optimizer="sgd" dropout=0.5
    2 1 offload(chunks=3,trim=True) rough gat heads=2 dropout=0.5
    2 1 offload(chunks=2) islands gin optimizer="sgd"
    2 1 offload(chunks=2) multi sage layers=1 dropout=0.5 nightly
    4 2 offload(chunks=15,trim=True) rough sage layers=4 nightly
"""
LINES = [line.strip() for line in SETTINGS.strip().splitlines() if "#" not in line]


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.nightly if "nightly" in line else ()) for line in LINES],
)
def test_it_trains_as_one_process_does(line, run_ranks, graphs):
    ranks, servers, strategy, graph, model, *more = line.split()
    how = {"model": model, "layers": 3, "hidden": 8, "dropout": 0.0, "lr": 0.05, "seed": 3}
    fields = dict(word.split("=") for word in more if "=" in word)
    how |= {"dtype": "float64", **{name: json.loads(told) for name, told in fields.items()}}
    directed = "directed" in more
    case = Case(strategy, graphs[graph], how, int(servers), eval_every=1, directed=directed)
    # biases that a batch norm takes away again move by rounding alone
    idle = ("layers.1.bias", "layers.2.bias") if how.get("norm") == "batch" else ()
    must_train_as_one_process(run_ranks, int(ranks), [case], 1e-9, 1e-9, idle)
