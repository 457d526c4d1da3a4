"""Layouts against the definitions, read aloud with Python's sets on graphs small enough for
that."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.graph.graph import Graph, GraphStats, in_neighbours
from gnnplan.planner.ownership import layout as layout_module
from gnnplan.planner.ownership.layout import Expansion, Layout, distances, expand


def graph_of(vertices: int, edges: list[tuple[int, int]], directed: bool = False) -> Graph:
    """A graph of these edges (src, dst); its features do not matter here."""
    src, dst = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    indptr, indices, _ = in_neighbours(src, dst, vertices, directed)
    content = f"small {vertices} {edges} {directed}"
    stats = GraphStats(
        "small", "small", vertices, len(indices), 2, 2, vertices, False, content, directed=directed
    )
    mask = np.ones(vertices, bool)
    return Graph(
        stats,
        indptr,
        indices,
        np.zeros((vertices, 2), np.float32),
        np.zeros(vertices, np.int64),
        mask,
        ~mask,
        ~mask,
    )


@dataclass(frozen=True)
class Case:
    graph: Graph
    owner: list[int]
    servers: tuple[int, ...]  # of each rank
    layers: int
    first_varying: int
    depth: int
    targets: set[int]  # all vertices: nothing is left out

    def layout(self) -> Layout:
        layout = self.whole()
        if len(self.targets) == self.graph.stats.vertices:
            return layout
        return layout.needed(np.isin(np.arange(self.graph.stats.vertices), list(self.targets)))

    def whole(self, expansion: Expansion | None = None) -> Layout:
        return Layout(
            self.graph,
            np.array(self.owner),
            self.servers,
            self.layers,
            self.first_varying,
            self.depth,
            expansion,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """1-3 servers x 1-3 GPUs, every depth, isolated vertices, directed or not; every server owns a
    row per GPU. All vertices are targets, or some."""
    servers, gpus = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = servers * gpus
    vertices = draw(st.integers(ranks, 14))
    ids = st.integers(0, vertices - 1)
    edges = draw(st.lists(st.tuples(ids, ids), max_size=3 * vertices))
    others = draw(
        st.lists(st.integers(0, ranks - 1), min_size=vertices - ranks, max_size=vertices - ranks)
    )
    owner = draw(st.permutations([*range(ranks), *others]))
    layers, first_varying = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    graph = graph_of(vertices, edges, draw(st.booleans()))
    return Case(
        graph,
        owner,
        tuple(r // gpus for r in range(ranks)),
        layers,
        first_varying,
        draw(st.integers(0, layers)),
        draw(st.just(set(range(vertices))) | st.sets(ids)),
    )


def neighbours(graph: Graph, rows: set[int]) -> set[int]:
    return {int(u) for v in rows for u in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]}


def computed_by_servers(case: Case) -> dict[int, list[set[int]]]:
    """Server -> rows of h_0, ..., h_L that it computes: its own that the targets need, and one hop
    more for each recomputed layer below."""
    several = len(set(case.servers)) > 1
    # below h_last a server asks no other
    last = case.first_varying + min(case.depth, case.layers - case.first_varying)
    last = last if several and last > case.first_varying else 0
    needed = [case.targets] * (case.layers + 1)
    for h in range(case.layers - 1, last - 1, -1):
        needed[h] = needed[h + 1] | neighbours(case.graph, needed[h + 1])
    out = {}
    for server in set(case.servers):
        own = {v for v, rank in enumerate(case.owner) if case.servers[rank] == server}
        rows = [own & each for each in needed]
        for h in range(last - 1, -1, -1):
            rows[h] = rows[h + 1] | neighbours(case.graph, rows[h + 1])
        out[server] = rows
    return out


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_every_row_is_computed_where_the_definition_says_and_once(case):
    layout, expected = case.layout(), computed_by_servers(case)
    for h in range(case.layers + 1):
        for server, rows in expected.items():
            shares = [
                layout.rows(rank, h).tolist()
                for rank, its in enumerate(case.servers)
                if its == server
            ]
            together = [v for share in shares for v in share]
            assert len(together) == len(set(together)) and set(together) == rows[h]
    owned = [v for rank in range(layout.ranks) for v in layout.own(rank).tolist()]
    assert sorted(owned) == sorted(case.targets)
    for rank in range(layout.ranks):
        assert all(layout.owner[v] == rank for v in layout.own(rank))
        assert all(case.servers[case.owner[v]] == case.servers[rank] for v in layout.own(rank))
        if not layout.depth:
            mine = {v for v, its in enumerate(case.owner) if its == rank}
            assert mine & case.targets == set(layout.own(rank).tolist())
        shares = [layout.rows(rank, h).tolist() for h in range(case.layers + 1)]
        # own rows first, near before far
        assert all(wide[: len(narrow)] == narrow for wide, narrow in pairwise(shares))


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_halo_is_what_a_rank_reads_and_does_not_have_and_providers_have_it(case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        inside = layer - 1 < case.first_varying + layout.depth and layout.depth > 0
        for rank in range(layout.ranks):
            piece = layout.piece(rank, layer)
            rows, local = (
                set(layout.rows(rank, layer).tolist()),
                set(layout.rows(rank, layer - 1).tolist()),
            )
            assert set(piece.halo.tolist()) == neighbours(case.graph, rows) - local and len(
                set(piece.halo)
            ) == len(piece.halo)
            assert piece.received[rank] == 0 and piece.received.sum() == len(piece.halo)
            for peer, part in enumerate(np.split(piece.halo, np.cumsum(piece.received)[:-1])):
                assert set(part.tolist()) <= set(layout.rows(peer, layer - 1).tolist())
                assert all(layout.owner[v] == peer for v in part) or inside
                assert len(part) == 0 or case.servers[peer] == case.servers[rank] or not inside


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_what_one_sends_is_what_the_other_receives_in_the_same_order(case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        sent = [layout.sent(rank, layer) for rank in range(layout.ranks)]
        for taker in range(layout.ranks):
            piece = layout.piece(taker, layer)
            arrived = [
                layout.rows(giver, layer - 1)[sent[giver][taker]] for giver in range(layout.ranks)
            ]
            assert [len(rows) for rows in arrived] == piece.received.tolist()
            assert np.concatenate(arrived).tolist() == piece.halo.tolist()
            # memory is read in order
            assert all((np.diff(sent[giver][taker]) > 0).all() for giver in range(layout.ranks))


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_blocks_are_rows_of_the_adjacency(case):
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
            # self edges: k reads k
            assert (
                source[: len(layout.rows(rank, layer))].tolist()
                == layout.rows(rank, layer).tolist()
            )


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_facts_count_the_pieces(case):
    layout = case.layout()
    for layer in range(1, case.layers + 1):
        facts, degree = layout.facts(layer), case.graph.degree
        for rank in range(layout.ranks):
            rows, halo = layout.rows(rank, layer), layout.piece(rank, layer).halo
            assert (facts.rows[rank], facts.sources[rank]) == (
                len(rows),
                len(layout.rows(rank, layer - 1)) + len(halo),
            )
            assert facts.edges[rank] == degree[rows].sum() == layout.block(rank, layer)[0][-1]
            assert facts.sends[rank].tolist() == [len(rows) for rows in layout.sent(rank, layer)]


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_recomputed_layers_never_cross_servers(case):
    layout = case.layout()
    across = ~np.equal.outer(case.servers, case.servers)
    if layout.depth:
        # h_0 .. of the features, then `depth` hidden layers
        for layer in range(1, case.first_varying + layout.depth + 1):
            assert not layout.facts(layer).sends[across].any()
    assert layout.depth == (
        min(case.depth, case.layers - case.first_varying) if across.any() else 0
    )


@given(cases())
@settings(deadline=None, max_examples=examples(80))
def test_preloaded_rows_are_the_servers_surroundings(case):
    case = replace(case, targets=set(range(case.graph.stats.vertices)))
    layout, regions = case.layout(), computed_by_servers(case)
    external = {server: rows[0] - rows[-1] for server, rows in regions.items()}
    preloaded = layout.preloaded()
    assert preloaded.sum() == sum(map(len, external.values()))
    assert not preloaded[np.equal.outer(case.servers, case.servers)].any()
    for rank, server in enumerate(case.servers):
        mine = [v for v in layout.rows(rank, 0).tolist() if v in external[server]]
        assert (
            preloaded[:, rank].tolist()
            == np.bincount(layout.owner[mine], minlength=layout.ranks).tolist()
        )


# -- drawn rows and batches ------------------------------------------------------------------------


def induced(case: Case, allowed: set[int], rows: set[int]) -> set[int]:
    return neighbours(case.graph, rows & allowed) & allowed


@given(cases(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
@settings(deadline=None, max_examples=examples(80))
def test_a_server_draws_at_most_k_external_neighbours_of_each_vertex_it_visits(
    case, max_hop, fanout, seed
):
    for server in set(case.servers):
        own = np.array([case.servers[rank] == server for rank in case.owner])
        drawn = expand(case.graph, own, Expansion(max_hop, fanout, seed), server)
        assert (
            drawn == expand(case.graph, own, Expansion(max_hop, fanout, seed), server)
        ).all() and drawn[own].all()
        external = {
            v: neighbours(case.graph, {v}) - set(np.flatnonzero(own).tolist())
            for v in range(len(own))
        }
        visited, within = set(np.flatnonzero(own).tolist()), set(np.flatnonzero(own).tolist())
        for _ in range(max_hop):
            within |= {u for v in within for u in external[v]}
        found = set(np.flatnonzero(drawn & ~own).tolist())
        assert found <= within
        assert len(found) <= sum(min(fanout, len(external[v])) for v in visited | found)
        for v in visited:
            # each own vertex gets what it may
            assert len(external[v] & found) >= min(fanout, len(external[v]))
        everything = expand(case.graph, own, Expansion(max_hop, 99, seed), server)
        assert set(np.flatnonzero(everything).tolist()) == within


@given(cases(), st.integers(1, 2), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(80))
def test_a_sampled_layout_has_all_edges_among_the_rows_of_a_server_and_no_others(
    case, max_hop, fanout
):
    expansion = Expansion(max_hop, fanout, 7)
    layout = case.whole(expansion)
    if len(set(case.servers)) == 1:
        assert layout.inside == 0  # nothing is external
        return
    for server in set(case.servers):
        own = np.array([case.servers[rank] == server for rank in case.owner])
        allowed = set(np.flatnonzero(expand(case.graph, own, expansion, server)).tolist())
        ranks = [rank for rank, its in enumerate(case.servers) if its == server]
        expected = set(np.flatnonzero(own).tolist())
        for h in range(case.layers, -1, -1):
            held = [layout.rows(rank, h).tolist() for rank in ranks]
            assert sorted(v for rows in held for v in rows) == sorted(expected)
            expected = expected | induced(case, allowed, expected)
        ins, outs = layout.degrees(ranks[0])
        for v in allowed:
            assert ins[v] == len(induced(case, allowed, {v}))
            assert outs[v] == sum(v in induced(case, allowed, {u}) for u in allowed)
        for layer in range(1, case.layers + 1):
            for rank in ranks:
                indptr, indices = layout.block(rank, layer)
                source = np.concatenate(
                    [layout.rows(rank, layer - 1), layout.piece(rank, layer).halo]
                )
                for k, v in enumerate(layout.rows(rank, layer).tolist()):
                    assert set(source[indices[indptr[k] : indptr[k + 1]]].tolist()) == induced(
                        case, allowed, {v}
                    )
    across = ~np.equal.outer(case.servers, case.servers)
    assert not any(layout.facts(layer).sends[across].any() for layer in range(1, case.layers + 1))


@given(cases(), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None, max_examples=examples(80))
def test_batches_cut_each_servers_targets_and_hold_what_they_need_where_the_layout_has_it(
    case, count, seed
):
    layout = case.whole(Expansion(case.layers, 99, 0))  # all that is within reach
    rows = np.arange(case.graph.stats.vertices) % 3 > 0
    batch_of = layout.drawn(rows, count, seed)
    assert ((batch_of >= 0) == rows).all() and (batch_of < count).all()
    assert (batch_of == layout.drawn(rows, count, seed)).all()
    server_of = np.array([case.servers[rank] for rank in layout.owner])
    for server in set(case.servers):
        sizes = np.bincount(batch_of[rows & (server_of == server)], minlength=count)
        assert sizes.max() - sizes.min() <= 1
    for b in range(count):
        batch = layout.batch(batch_of == b)
        for server in set(case.servers):
            ranks = [rank for rank, its in enumerate(case.servers) if its == server]
            expected = {v for v in np.flatnonzero(batch_of == b).tolist() if server_of[v] == server}
            for h in range(case.layers, -1, -1):
                held = [v for rank in ranks for v in batch.rows(rank, h).tolist()]
                assert sorted(held) == sorted(expected)
                expected = expected | neighbours(case.graph, expected)
            for rank in ranks:
                assert set(batch.rows(rank, 0).tolist()) <= set(layout.rows(rank, 0).tolist())
                for layer in range(1, case.layers + 1):
                    piece, needed = (
                        batch.piece(rank, layer),
                        set(batch.rows(rank, layer - 1).tolist()),
                    )
                    assert (
                        set(piece.halo.tolist())
                        == neighbours(case.graph, set(batch.rows(rank, layer).tolist())) - needed
                    )
                    taken = [
                        batch.rows(peer, layer - 1)[batch.sent(peer, layer)[rank]]
                        for peer in range(batch.ranks)
                    ]
                    assert np.concatenate(taken).tolist() == piece.halo.tolist()
                    assert all(
                        case.servers[peer] == server for peer in np.flatnonzero(piece.received)
                    )


@given(cases(), st.integers(1, 3))
@settings(deadline=None, max_examples=examples(100))
def test_drawing_everything_is_full_preload(case, more):
    """max_hop = layers and a fanout no degree exceeds: piece by piece the same layout."""
    if len(set(case.servers)) == 1 or case.layers == case.first_varying:
        return
    args = (case.graph, np.array(case.owner), case.servers, case.layers, case.first_varying)
    full, drawn = (
        Layout(*args, case.layers),
        Layout(*args, 0, Expansion(case.layers + more - 1, 99, 0)),
    )
    assert (full.owner == drawn.owner).all() and (full.preloaded() == drawn.preloaded()).all()
    for layer in range(1, case.layers + 1):
        for rank in range(full.ranks):
            a, b = full.piece(rank, layer), drawn.piece(rank, layer)
            assert (a.rows, a.local, a.edges) == (b.rows, b.local, b.edges) and (
                a.halo == b.halo
            ).all()


def test_distances_look_at_a_few_edges_at_a_time(monkeypatch):
    graph = graph_of(40, [(u, v) for u in range(40) for v in (u + 1, 3 * u % 40) if v < 40])
    roots = np.arange(40) == 7
    at_once = distances(graph, roots, 4), expand(graph, roots, Expansion(3, 99, 0), 0)
    for few in (1, 2, 7):
        monkeypatch.setattr(layout_module, "AT_ONCE", few)
        assert (distances(graph, roots, 4) == at_once[0]).all() and (
            expand(graph, roots, Expansion(3, 99, 0), 0) == at_once[1]
        ).all()
