"""Layouts against the definitions, read aloud with Python's sets on graphs small enough for that."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.graph import Graph, GraphStats, in_neighbours
from gnnplan.planner.layout import Layout


def graph_of(vertices: int, edges: list[tuple[int, int]], directed: bool = False) -> Graph:
    """A graph of these edges (src, dst); its features do not matter here."""
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    indptr, indices, _ = in_neighbours(src, dst, vertices, directed)
    content = f"small {vertices} {edges} {directed}"
    stats = GraphStats("small", "small", vertices, len(indices), 2, 2, vertices, False, content, directed=directed)
    mask = np.ones(vertices, bool)
    return Graph(stats, indptr, indices, np.zeros((vertices, 2), np.float32), np.zeros(vertices, np.int64), mask, ~mask, ~mask)


@dataclass(frozen=True)
class Case:
    graph: Graph
    owner: list[int]
    servers: tuple[int, ...]  # of each rank
    layers: int
    first_varying: int
    depth: int

    def layout(self) -> Layout:
        return Layout(self.graph, np.array(self.owner), self.servers, self.layers, self.first_varying, self.depth)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """1-3 servers x 1-3 GPUs, every depth, isolated vertices, directed or not; every server owns a row per GPU."""
    servers, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = servers * gpus
    vertices = draw(st.integers(ranks, 14))
    ids = st.integers(0, vertices - 1)
    edges = draw(st.lists(st.tuples(ids, ids), max_size=3 * vertices))
    others = draw(st.lists(st.integers(0, ranks - 1), min_size=vertices - ranks, max_size=vertices - ranks))
    owner = draw(st.permutations([*range(ranks), *others]))
    layers, first_varying = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    graph = graph_of(vertices, edges, draw(st.booleans()))
    return Case(graph, owner, tuple(r // gpus for r in range(ranks)), layers, first_varying, draw(st.integers(0, layers)))


def neighbours(graph: Graph, rows: set[int]) -> set[int]:
    return {int(u) for v in rows for u in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]}


def computed_by_servers(case: Case) -> dict[int, list[set[int]]]:
    """Server -> rows of h_0, ..., h_L that it computes: its own, and one hop more for each recomputed layer below."""
    several = len(set(case.servers)) > 1
    last = case.first_varying + min(case.depth, case.layers - case.first_varying)  # below h_last a server asks no other
    out = {}
    for server in set(case.servers):
        rows = [{v for v, rank in enumerate(case.owner) if case.servers[rank] == server}] * (case.layers + 1)
        for h in range(last - 1, -1, -1) if several and last > case.first_varying else ():
            rows[h] = rows[h + 1] | neighbours(case.graph, rows[h + 1])
        out[server] = rows
    return out


@given(cases())
@settings(deadline=None, max_examples=150)
def test_every_row_is_computed_where_the_definition_says_and_once(case: Case):
    layout, expected = case.layout(), computed_by_servers(case)
    for h in range(case.layers + 1):
        for server, rows in expected.items():
            shares = [layout.rows(rank, h).tolist() for rank, its in enumerate(case.servers) if its == server]
            together = [v for share in shares for v in share]
            assert len(together) == len(set(together)) and set(together) == rows[h]
    owned = [v for rank in range(layout.ranks) for v in layout.own(rank).tolist()]
    assert sorted(owned) == list(range(case.graph.stats.vertices))
    for rank in range(layout.ranks):
        assert all(layout.owner[v] == rank for v in layout.own(rank))
        assert all(case.servers[case.owner[v]] == case.servers[rank] for v in layout.own(rank))
        if not layout.depth:
            assert {v for v, its in enumerate(case.owner) if its == rank} == set(layout.own(rank).tolist())
        shares = [layout.rows(rank, h).tolist() for h in range(case.layers + 1)]
        assert all(wide[: len(narrow)] == narrow for wide, narrow in pairwise(shares))  # own rows first, near before far


@given(cases())
@settings(deadline=None, max_examples=150)
def test_halo_is_what_a_rank_reads_and_does_not_have_and_providers_have_it(case: Case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        inside = layer - 1 < case.first_varying + layout.depth and layout.depth > 0
        for rank in range(layout.ranks):
            piece = layout.piece(rank, layer)
            rows, local = set(layout.rows(rank, layer).tolist()), set(layout.rows(rank, layer - 1).tolist())
            assert set(piece.halo.tolist()) == neighbours(case.graph, rows) - local and len(set(piece.halo)) == len(piece.halo)
            assert piece.received[rank] == 0 and piece.received.sum() == len(piece.halo)
            for peer, part in enumerate(np.split(piece.halo, np.cumsum(piece.received)[:-1])):
                assert set(part.tolist()) <= set(layout.rows(peer, layer - 1).tolist())
                assert all(layout.owner[v] == peer for v in part) or inside
                assert len(part) == 0 or case.servers[peer] == case.servers[rank] or not inside


@given(cases())
@settings(deadline=None, max_examples=150)
def test_what_one_sends_is_what_the_other_receives_in_the_same_order(case: Case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        sent = [layout.sent(rank, layer) for rank in range(layout.ranks)]
        for taker in range(layout.ranks):
            piece = layout.piece(taker, layer)
            arrived = [layout.rows(giver, layer - 1)[sent[giver][taker]] for giver in range(layout.ranks)]
            assert [len(rows) for rows in arrived] == piece.received.tolist()
            assert np.concatenate(arrived).tolist() == piece.halo.tolist()
            assert all((np.diff(sent[giver][taker]) > 0).all() for giver in range(layout.ranks))  # memory is read in order


@given(cases())
@settings(deadline=None, max_examples=150)
def test_blocks_are_rows_of_the_adjacency(case: Case):
    layout, graph = case.layout(), case.graph
    for layer in range(1, case.layers + 1):
        for rank in range(layout.ranks):
            indptr, indices = layout.block(rank, layer)
            source = np.concatenate([layout.rows(rank, layer - 1), layout.piece(rank, layer).halo])
            assert indptr[0] == 0 and indptr[-1] == len(indices)
            assert len(indptr) == len(layout.rows(rank, layer)) + 1
            for k, v in enumerate(layout.rows(rank, layer)):
                mine = source[indices[indptr[k] : indptr[k + 1]]].tolist()
                assert sorted(mine) == graph.indices[graph.indptr[v] : graph.indptr[v + 1]].tolist()
            assert source[: len(layout.rows(rank, layer))].tolist() == layout.rows(rank, layer).tolist()  # self edges: k reads k


@given(cases())
@settings(deadline=None, max_examples=150)
def test_facts_count_the_pieces(case: Case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        facts, degree = layout.facts(layer), case.graph.degree
        for rank in range(layout.ranks):
            rows, halo = layout.rows(rank, layer), layout.piece(rank, layer).halo
            assert (facts.rows[rank], facts.sources[rank]) == (len(rows), len(layout.rows(rank, layer - 1)) + len(halo))
            assert facts.edges[rank] == degree[rows].sum() == layout.block(rank, layer)[0][-1]
            assert facts.sends[rank].tolist() == [len(rows) for rows in layout.sent(rank, layer)]


@given(cases())
@settings(deadline=None, max_examples=150)
def test_recomputed_layers_never_cross_servers(case: Case):
    layout = case.layout()
    across = ~np.equal.outer(case.servers, case.servers)
    if layout.depth:
        for layer in range(1, case.first_varying + layout.depth + 1):  # h_0 .. of the features, then `depth` hidden layers
            assert not layout.facts(layer).sends[across].any()
    assert layout.depth == (min(case.depth, case.layers - case.first_varying) if across.any() else 0)


@given(cases())
@settings(deadline=None, max_examples=150)
def test_preloaded_rows_are_the_servers_surroundings(case: Case):
    layout, regions = case.layout(), computed_by_servers(case)
    external = {server: rows[0] - rows[-1] for server, rows in regions.items()}
    preloaded = layout.preloaded()
    assert preloaded.sum() == sum(map(len, external.values()))
    assert not preloaded[np.equal.outer(case.servers, case.servers)].any()
    for rank, server in enumerate(case.servers):
        mine = [v for v in layout.rows(rank, 0).tolist() if v in external[server]]
        assert preloaded[:, rank].tolist() == np.bincount(layout.owner[mine], minlength=layout.ranks).tolist()


# -- drawn by hand -------------------------------------------------------------------------------------------------------


def path(vertices: int) -> Graph:
    return graph_of(vertices, list(pairwise(range(vertices))))


def test_depth_0_is_the_textbook_halo():
    """0 - 1 | 2 - 3 | 4 - 5, a part per rank, two ranks per server: ranks 0 1 | 2."""
    layout = Layout(path(6), np.array([0, 0, 1, 1, 2, 2]), (0, 0, 1), 2, 1)
    for layer in (1, 2):
        assert [layout.piece(rank, layer).halo.tolist() for rank in range(3)] == [[2], [1, 4], [3]]
        assert layout.facts(layer).sends.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
        assert layout.facts(layer).edges.tolist() == [3, 4, 3]
    assert layout.preloaded().sum() == 0


def test_a_path_on_two_servers_at_every_depth():
    """0 1 2 3 | 4 5 6 7, three layers of which the first reads constant features: each depth moves the cut a row out."""
    owner = np.repeat([0, 1], 4)
    rows = []
    for depth in range(4):
        layout = Layout(path(8), owner, (0, 1), 3, 1, depth)
        halos = [int(layout.facts(layer).sends.sum()) for layer in (1, 2, 3)]
        rows.append(([layout.rows(0, h).size for h in range(4)], halos, int(layout.preloaded().sum())))
    assert rows == [
        ([4, 4, 4, 4], [2, 2, 2], 0),
        ([6, 5, 4, 4], [0, 0, 2], 4),  # 6 features give 5 rows of h_1 give 4 of h_2
        ([7, 6, 5, 4], [0, 0, 0], 6),
        ([7, 6, 5, 4], [0, 0, 0], 6),  # no deeper than the layers that vary
    ]


def test_an_encoder_makes_the_first_layer_vary():
    layout = Layout(path(8), np.repeat([0, 1], 4), (0, 1), 2, 0, 1)
    assert [layout.rows(0, h).size for h in range(3)] == [5, 4, 4]
    assert [int(layout.facts(layer).sends.sum()) for layer in (1, 2)] == [0, 2]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_layer(depth: int):
    """Nothing hidden is exchanged: with constant inputs there is nothing to recompute, after an encoder there is h_0."""
    constant = Layout(path(6), np.repeat([0, 1], 3), (0, 1), 1, 1, depth)
    assert constant.depth == 0 and constant.facts(1).sends.tolist() == [[0, 1], [1, 0]] and constant.preloaded().sum() == 0
    encoded = Layout(path(6), np.repeat([0, 1], 3), (0, 1), 1, 0, depth)
    assert (encoded.facts(1).sends.sum(), encoded.preloaded().sum()) == ((0, 2) if depth else (2, 0))


def test_no_edges_no_halo():
    layout = Layout(graph_of(6, []), np.repeat([0, 1, 2, 3], [1, 2, 1, 2]), (0, 0, 1, 1), 3, 1, 2)
    assert sum(layout.facts(layer).sends.sum() + layout.facts(layer).edges.sum() for layer in (1, 2, 3)) == 0
    assert layout.block(0, 1)[1].size == 0 and layout.preloaded().sum() == 0


def test_direction_counts():
    """1 reads 0, not the other way round: only rank 1 has a halo."""
    layout = Layout(graph_of(2, [(0, 1)], directed=True), np.array([0, 1]), (0, 1), 2, 1)
    assert [layout.piece(rank, 2).halo.tolist() for rank in (0, 1)] == [[], [0]]
    assert layout.facts(2).sends.tolist() == [[0, 1], [0, 0]]
