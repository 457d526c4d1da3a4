"""The preset `perlmutter`, and the rooflines of other presets, against what was measured there.

Figures: github.com/hpcgroup/plexus, commit c3f26604, analysis/kernel_curve.json (torch.sparse.mm on
an A100 40GB) and analysis/collective_curve.json (NCCL, 4 GPUs per server)."""

import pytest

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.problem.inputs import read_cluster

ROWS, EDGES = 2_400_000, 108_268_300  # rows that are in memory
FEW, FEWER_EDGES = 120_000, 5_177_174  # rows that the cache holds, if they are narrow
# numbers per row -> seconds per edge, among many rows and among few
EDGE_S = {16: (1.8188e-10, 1.2377e-10), 32: (1.9143e-10, 1.4212e-10), 64: (2.5778e-10, 1.9484e-10)}
EDGE_S |= {128: (4.0156e-10, 3.0743e-10), 256: (7.9974e-10, 5.9759e-10)}
# GPUs -> an all-gather and a reduce-scatter of so many MB [ms]
MB = (0.0625, 1.0, 4.0, 16.0, 64.0)
MS = {
    4: "0.0426 0.0447  0.0427 0.0457  0.0582 0.0526  0.1987 0.1043  0.3179 0.2924",
    8: "0.0501 0.0497  0.0836 0.0805  0.1736 0.2019  0.2793 0.2905  0.9144 0.8642",
    16: "0.1201 0.0508  0.1568 0.1500  0.2520 0.2421  0.3538 0.3321  0.9253 0.9238",
}
BOTH_MS = {
    (g, mb): list(map(float, t.split()))
    for g, row in MS.items()
    for mb, t in zip(MB, row.split("  "), strict=True)
}


@pytest.fixture(scope="module")
def cluster():
    return read_cluster("perlmutter")


def share_of_measured(cost: Cost, width: int, few: bool) -> float:
    """Predicted over measured seconds of a sum of so wide rows."""
    rows, edges = (FEW, FEWER_EDGES) if few else (ROWS, EDGES)
    # a roofline reads no more than a line of each narrow row
    read = 4 * width if cost.cluster.device.gather else min(4 * width, 128)
    rate = float(cost.roofline.gather_rate(width, rows * read, edges / rows))
    return 4 * width / rate / EDGE_S[width][few]


@pytest.mark.parametrize("width", EDGE_S)
@pytest.mark.parametrize("few", [False, True])
def test_sums_take_what_was_measured(cluster, width, few):
    assert share_of_measured(Cost(cluster), width, few) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(("width", "share"), [(256, 0.96), (64, 0.74), (32, 0.50), (16, 0.22)])
def test_rooflines_promise_too_much_of_narrow_rows(cluster, width, share):
    """As docs/explanation/cost-model.md says. All vertices are read alike often there."""
    device = cluster.device.model_copy(update={"gather": {}})
    cost = Cost(cluster.model_copy(update={"device": device}), spread=0.0)
    assert share_of_measured(cost, width, few=False) == pytest.approx(share, abs=0.01)
    assert share_of_measured(cost, 256, few=True) == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize(("gpus", "mb"), BOTH_MS)
def test_all_reduces_are_near_what_was_measured(cluster, gpus, mb):
    """As the preset says. Constants were derived from those of 4 and 16 GPUs."""
    told = Cost(cluster).all_reduce(int(mb * 1e6), range(gpus))
    seconds = float(told.latency) + max(map(float, told.busy.values()))
    assert 0.47 < seconds / (1e-3 * sum(BOTH_MS[gpus, mb])) < 1.26
