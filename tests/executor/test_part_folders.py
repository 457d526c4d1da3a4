"""Ranks on a folder of parts open no rows of another part, and take little more than their own."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import call, ended_well, planned

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.minibatch.share import share_of, targets_of
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.ownership.parts import write_parts
from gnnplan.testing.ranks import Case

pytestmark = pytest.mark.timeout(170)

FULL = {"model": "gcn", "layers": 3, "hidden": 8, "dropout": 0.5, "lr": 0.05, "seed": 3}


def set_up(tmp_path: Path, name: str, source: str, dropout: float) -> tuple[list[int], float]:
    """Memory of each rank's process at the end of its set-up, and what a part takes [B]."""
    folder, plan, out = (tmp_path / f"{name}{end}" for end in ("", ".json", ".out"))
    call("partition", source, "-k 2 -o", folder)
    model = f"--strategy graph_parallel --layers 2 --hidden 8 --dropout {dropout}"
    planned(plan, "--graph", folder, model)
    ended_well(sys.executable, "-m", "gnnplan", "run", plan, "--epochs", "1", "--out", out)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    use = json.loads(plan.read_text())["best"]["predicted"]["memory"]
    return [rank["setup_rss_bytes"] for rank in ranks], use["features"] + use["graph"]


@pytest.mark.nightly  # that a rank reads its own part only is tested every time
@pytest.mark.processes
@pytest.mark.parametrize(
    ("dropout", "features", "edges"),
    [
        pytest.param(0.0, 700, 400_000, id="aggregated once"),
        pytest.param(0.5, 700, 400_000, id="not"),
        pytest.param(0.5, 8, 5_000_000, id="edges"),
    ],
)
def test_the_set_up_of_a_rank_takes_little_more_than_its_part(tmp_path, dropout, features, edges):
    """Edges were there several times, as 64-bit numbers: 2.1 of a part's size."""
    sizes = "features={}&classes=4&seed=0&vertices={}&edges={}"
    small = "synthetic:community?" + sizes.format(8, 100, 400)
    large = "synthetic:community?" + sizes.format(features, 60_000, edges)
    (nothing, _), (taken, part) = (
        set_up(tmp_path, name, source, dropout)
        for name, source in (("small", small), ("large", large))
    )
    assert part > 90e6
    for before, after in zip(nothing, taken, strict=True):
        assert after - before <= 1.3 * part


def test_a_rank_reads_its_own_part_only(graphs, tmp_path):
    """The others' files are gone when it looks."""
    whole, folder = load(graphs["rough"]), tmp_path / "parts"
    write_parts(whole, partition(whole, 3), "metis", 0, folder)
    problem, me, device = Case("", str(folder), FULL).problem(3), 1, torch.device("cpu")
    for path in folder.glob("part[02]/*.npy"):
        path.unlink()
    layout = problem.layout()
    share = share_of(layout, me, ["gcn"] * 3, problem.workload)
    targets_of(problem, share, device)
    rows = features(problem.data, share.own, problem.workload, device)
    assert np.array_equal(rows.numpy(), whole.features(share.own))
    assert set(share.own.tolist()) == set(np.flatnonzero(partition(whole, 3) == me).tolist())
