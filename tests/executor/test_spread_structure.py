"""Of a structure that is spread a sampler has its share only."""

import numpy as np
import pytest

from gnnplan.executor.minibatch.sampler import Sampler
from gnnplan.planner.graph.sampling import draw, key_of
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.strategies.minibatch.adjacency_store import bytes_at
from gnnplan.testing.ranks import Case, small


@pytest.mark.parametrize(
    "text",
    [
        "data_parallel(structure='spread',structure_cache=300)",
        "p3(structure='spread')",
        "gsplit(structure='spread',splitter='random')",
    ],
)
@pytest.mark.parametrize("directed", [False, True])
def test_a_sampler_has_no_list_that_is_elsewhere(graphs, text, directed):
    """Nor the graph that has; its memory is as predicted, and it says whose list it lacks."""
    asked = small("gcn", layers=3, heads=2, mode="mini", batch=6, fanout=(3, 2, 2))
    what = Case(text, graphs["rough"], asked, directed=directed)
    problem = what.problem(2)
    strategy = what.settled(problem)
    lists, graph, batches = strategy.lists(problem), problem.graph, strategy.batches(problem)
    for rank in (0, 1):
        sampler, keeps = Sampler(batches, rank, ["gcn"] * 3, lists=lists), lists.keeps(rank)
        assert 0 < keeps.sum() < keeps.size
        assert not any(
            isinstance(value, Batches) or value is graph or value is graph.indices
            for value in vars(sampler).values()
        )
        assert sampler.graph.degree.tolist() == np.where(keeps, graph.degree, 0).tolist()
        arrays = {
            id(array): array.nbytes
            for array in (sampler.graph.indptr, sampler.graph.indices, *sampler._degrees)
        }
        assert sum(arrays.values()) == bytes_at(problem, lists, [rank])
        assert sampler._degrees[0].tolist() == graph.degree.tolist()
        assert sampler._degrees[1].tolist() == np.bincount(graph.indices, None, keeps.size).tolist()
        here, key = np.flatnonzero(keeps), key_of(3, 0, 1, 2)
        indptr, neighbours = sampler._draw(here, 2, key)
        expected, places = draw(graph, here, 2, key)
        assert indptr.tolist() == expected.tolist()
        assert neighbours.tolist() == graph.indices[places].tolist()
        with pytest.raises(AssertionError, match=f"rank {rank} has no adjacency lists of vertices"):
            sampler._draw(np.flatnonzero(~keeps)[:1], 2, key)
