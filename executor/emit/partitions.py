"""Partitions of a plan's graph, one part per rank, in the file formats of other libraries.

The libraries' own code writes the files; only its call of METIS returns our assignment. Parts are
numbered in the order of the ranks' GPUs: part k belongs to torchrun's rank k."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnplan.planner.graph.arrays import complete
from gnnplan.planner.graph.graph import Graph, must_fit
from gnnplan.planner.graph.parts import library
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

COPIES = 4  # approximate number of copies of graph and features that a writer holds at once
GRAPH_NAME = "graph"


def assignment(problem: Problem, strategy: Strategy) -> tuple[np.ndarray, str | None]:
    """Return the part of each vertex, int64 [N], and a note if the strategy assigns no vertices."""
    part = np.argsort(problem.by_gpu)  # rank -> part
    own = strategy.layout(problem)
    parts = problem.layout() if own is None else own
    assert isinstance(parts, Layout)
    return part[parts.owner], None if own is not None else (
        f"{strategy.name} gives no rank vertices of its own; the parts are the partitioner's"
        f" ({problem.method})"
    )


def distdgl(problem: Problem, strategy: Strategy, folder: Path) -> str | None:
    """Write DistDGL's partition: a part per server, a trainer per rank, and graph.json.

    Returns a note or None. Raises SpecError if DGL is not installed.
    """
    dgl = library("dgl")
    import torch

    graph = _graph(problem)
    assigned, note = assignment(problem, strategy)
    per_server = _per_server(problem)
    src, dst = _edges(graph)
    whole = dgl.graph((src, dst), num_nodes=graph.stats.vertices)
    # DGL renumbers vertices, so that the vertices of a part are contiguous
    ids = torch.arange(graph.stats.vertices)
    data = {
        "feat": _tensor(graph.features()),
        "label": _tensor(graph.y),
        **_masks(graph),
        "orig_id": ids,
    }
    whole.ndata.update(data)
    ours = _Assignment(assigned)
    write = _with(dgl.distributed.partition_graph, metis_partition_assignment=ours)
    with (
        complete(folder) as temporary,
        contextlib.redirect_stdout(io.StringIO()),  # DGL prints timings
    ):
        write(
            whole,
            GRAPH_NAME,
            problem.ranks // per_server,
            str(temporary),
            num_hops=1,
            num_trainers_per_machine=per_server,
        )
        ours.must_be_taken(dgl.__name__)
    return note


def pyg(problem: Problem, strategy: Strategy, folder: Path) -> str | None:
    """Write the folder of PyG's Partitioner, a part per rank, with label.pt and split.pt beside it.

    Returns a note or None. Raises SpecError if PyG is not installed.
    """
    data, writer = library("torch_geometric.data"), library("torch_geometric.distributed.partition")
    import torch

    graph = _graph(problem)
    if problem.ranks == 1:
        raise SpecError("PyG's Partitioner writes two parts or more, and the plan has one rank")
    assigned, note = assignment(problem, strategy)
    ours = _Assignment(assigned)

    class Clusters(writer.ClusterData):  # type: ignore[misc, name-defined]
        """PyG's clusters, with our assignment."""

        def _metis(self, *_: Any) -> Tensor:
            return ours()

    class Partitioner(writer.Partitioner):  # type: ignore[misc, name-defined]
        """PyG's partitioner, with our clusters."""

        generate_partition = _with(writer.Partitioner.generate_partition, ClusterData=Clusters)

    whole = data.Data(
        x=_tensor(graph.features()),
        edge_index=torch.stack(_edges(graph)),
        num_nodes=graph.stats.vertices,
    )
    with (
        complete(folder) as temporary,
        contextlib.redirect_stderr(io.StringIO()),  # PyG prints 'Computing METIS partitioning...'
    ):
        Partitioner(whole, problem.ranks, str(temporary)).generate_partition()
        ours.must_be_taken("torch_geometric")
        torch.save(_tensor(graph.y), temporary / "label.pt")
        torch.save(_masks(graph), temporary / "split.pt")
    return note


class _Assignment:
    """A stand-in for a library's call of METIS, which returns the plan's parts."""

    def __init__(self, assigned: np.ndarray) -> None:
        self.assigned, self.is_called = assigned, False

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        self.is_called = True
        return _tensor(self.assigned)

    def must_be_taken(self, name: str) -> None:
        """Raise SpecError if the library did not call it, so that the parts are not the plan's."""
        if not self.is_called and self.assigned.any():
            raise SpecError(
                f"this version of {name} partitions graphs in another way than those that gnnplan"
                " knows; see pyproject.toml for their versions"
            )


def _with(function: FunctionType, **names: Any) -> FunctionType:
    """Return a copy of the function, in which these global names have other values.

    The libraries accept no assignment. Their own functions and modules stay unchanged."""
    scope = {**function.__globals__, **names}
    return FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )


def _graph(problem: Problem) -> Graph:
    """Return the problem's graph. Raises SpecError if it is absent or exceeds memory."""
    graph, stats = problem.graph, problem.stats
    if graph is None:
        raise SpecError(
            f"the graph {stats.name} is known by statistics only, so it has no parts; plan with a"
            " graph file"
        )
    nbytes = 4.0 * stats.vertices * stats.features + 16.0 * stats.edges
    must_fit(stats.source, "to write its parts", COPIES * nbytes)
    return graph


def _per_server(problem: Problem) -> int:
    counts = set(Counter(problem.servers).values())
    if len(counts) > 1:
        raise SpecError(
            f"servers have {' or '.join(map(str, sorted(counts)))} ranks, and DistDGL starts"
            " equally many trainers on each; plan again"
        )
    return counts.pop()


def _edges(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return sources and destinations, int64 [E] each."""
    dst = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    return _tensor(graph.indices.astype(np.int64)), _tensor(dst)


def _masks(graph: Graph) -> dict[str, Tensor]:
    masks = {"train_mask": graph.train, "val_mask": graph.val, "test_mask": graph.test}
    return {name: _tensor(mask) for name, mask in masks.items()}


def _tensor(array: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.array(array))  # a copy: ours are read-only
