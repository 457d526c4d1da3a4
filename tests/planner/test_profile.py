"""Profiles: halo, cut and growth by brute force; the cache; expectations for absent graphs."""

import json

import numpy as np
import pytest
from asked import graph_of
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.ownership import profile as module
from gnnplan.planner.ownership.profile import profile, within
from gnnplan.planner.vocabulary.errors import SpecError

COMMUNITY = "synthetic:community?vertices=4000&edges=80000&features=2&classes=8"


@st.composite
def partitioned_graphs(draw):
    """(edges (src, dst), vertices, part of each, parts): parts may be empty, vertices isolated."""
    vertices, parts = draw(st.integers(1, 14)), draw(st.sampled_from([1, 2, 3, 5, 70]))
    ids = st.integers(0, vertices - 1)
    edges = {(u, v) for u, v in draw(st.lists(st.tuples(ids, ids), max_size=50)) if u != v}
    edges |= set() if draw(st.booleans()) else {(v, u) for u, v in edges}
    part = draw(st.lists(st.integers(0, parts - 1), min_size=vertices, max_size=vertices))
    return edges, vertices, np.array(part, np.int32), parts


@settings(max_examples=examples(200))
@given(partitioned_graphs(), st.integers(1, 4))
def test_rows_within_hops_are_what_sets_say(case, hops):
    edges, vertices, part, parts = case
    sizes = within(graph_of(vertices, sorted(edges), directed=True), part, parts, hops)
    for i in range(parts):
        needed = {v for v in range(vertices) if part[v] == i}
        for hop in range(hops + 1):
            assert sizes[hop, i] == len(needed)
            needed |= {u for u, v in edges if v in needed}


def test_a_path_in_two(tmp_path):
    """0-1-2 | 3-4-5: one vertex from either side, one more with every hop."""
    np.savez(tmp_path / "path.npz", src=np.arange(5), dst=np.arange(1, 6), x=np.ones((6, 1)))
    found = profile(load(str(tmp_path / "path.npz")), [1, 2, 2])
    assert json.loads(json.dumps(found)) == found and list(found["parts"]) == ["1", "2"]
    degrees = {"min": 1, "median": 2.0, "mean": 10 / 6, "p90": 2.0, "p99": 2.0, "max": 2}
    assert found["graph"]["degree"] == degrees
    one, two = found["parts"]["1"], found["parts"]["2"]
    counts = {"halo_rows": 2, "halo_rows_per_part": [1, 1], "edge_cut": 2, "balance": 1.0}
    counts |= {"rows_per_part": [3, 3], "edges_per_part": [5, 5], "train_per_part": [3, 1]}
    assert {name: two[name] for name in counts} == counts
    assert two["growth"] == pytest.approx([4 / 3, 5 / 3, 2])
    assert (one["halo_rows"], one["edge_cut"], one["growth"]) == (0, 0, [1, 1, 1])


def test_servers_hold_several_parts():
    graph = load(COMMUNITY)
    on_two = profile(graph, [8], servers=2)["parts"]["8"]
    alone = profile(graph, [8])["parts"]["8"]
    assert on_two["halo_rows"] == alone["halo_rows"]
    assert max(on_two["growth"]) <= 2.1 < max(alone["growth"])
    sizes = within(graph, partition(graph, 8) // 4, 2, 1)
    assert on_two["growth"][0] == pytest.approx((sizes[1] / sizes[0]).mean())


def test_the_cache_says_so_and_survives_damage(own_cache, monkeypatch):
    graph = load(COMMUNITY)
    first = profile(graph, [4])["parts"]["4"]
    assert not first["cached"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "partition", None)
        assert profile(graph, [4])["parts"]["4"] == {**first, "cached": True}
    assert not profile(graph, [4], hops=2)["parts"]["4"]["cached"]
    (own_cache / "profiles").mkdir(exist_ok=True)
    for rubbish in ("", "{", "[]", "{}", '{"key": 1}'):
        for path in own_cache.glob("profiles/*.json"):
            path.write_text(rubbish)
        again = profile(graph, [4])["parts"]["4"]
        assert not again["cached"] and again["halo_rows"] == first["halo_rows"]


def of_statistics(folder, vertices: int, edges: int, more: str = ""):
    text = f"vertices: {vertices}\nedges: {edges}\nfeatures: 10\nclasses: 2\n{more}"
    (folder / "told.yaml").write_text(text)
    return load(str(folder / "told.yaml"))


def test_statistics_only_gives_expectations(tmp_path):
    stats = of_statistics(tmp_path, 1_000_000, 20_000_000)
    found = profile(stats, [8], "random")
    eight = found["parts"]["8"]
    # GNNPipe Section 3.1.1
    assert eight["estimated"] and eight["halo_rows"] / 7e6 == pytest.approx(0.92, abs=0.005)
    assert sum(eight["halo_rows_per_part"]) == eight["halo_rows"]
    assert sum(eight["rows_per_part"]) == 1_000_000
    assert found["graph"]["degree"] == {"mean": 20.0} and found["graph"]["statistics_only"]
    cut = profile(stats, [8])["parts"]["8"]["halo_rows"]
    assert cut == pytest.approx(7e6 * -np.expm1(-0.04 * 20 / 8), rel=1e-3)  # as METIS usually finds


def test_a_halo_that_was_counted_says_what_others_are(tmp_path):
    """Two halo sizes as the declared mixings make them; a third between them, and one beyond."""
    n, degree = 1_000_000, 20

    def halo(m: int, phi: float) -> float:
        return n * (m - 1) * -np.expm1(-phi * degree / m)

    counted = ", ".join(f"{m}: {round(halo(m, phi))}" for m, phi in ((2, 0.01), (8, 0.04)))
    stats = of_statistics(tmp_path, n, n * degree, f"halo_rows: {{{counted}}}\n")
    found = profile(stats, [2, 4, 8, 32])["parts"]
    methods = {m: found[m]["method"] for m in found}
    assert methods == {"2": "declared", "4": "estimated", "8": "declared", "32": "estimated"}
    # log phi over log m is a line between them, and grows as the square root of m after
    for m, phi in ((4, 0.02), (32, 0.08)):
        assert found[str(m)]["halo_rows"] == pytest.approx(halo(m, phi), rel=0.001)
        # a halo says nothing of how many edges lead there: hubs have most
        assert found[str(m)]["edge_cut"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parts": [11]}, r"parts must lie in \[1, 10\] .*, got 11; ask for 10 or fewer"),
        ({"parts": [0]}, "got 0"),
        ({"parts": [2], "hops": 0}, "hops"),
        ({"parts": [2], "servers": 3}, "2 parts cannot fill 3 servers"),
    ],
)
def test_refusals(tmp_path, arguments, words):
    with pytest.raises(SpecError, match=words):
        profile(of_statistics(tmp_path, 10, 20), **arguments)
