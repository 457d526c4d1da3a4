"""The graph of a plan in a part per rank, in the files of other libraries.

Their own code writes them, with our assignment where it would call METIS. Parts count in the order
of the GPUs: part k is what torchrun's rank k has."""

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

COPIES = 4  # of the graph and its features that a writer holds at once, about
GRAPH_NAME = "graph"


def assignment(problem: Problem, strategy: Strategy) -> tuple[np.ndarray, str | None]:
    """The part of each vertex, int64 [N], and a note where the strategy itself owns no vertices."""
    part = np.argsort(problem.by_gpu)  # of each rank
    own = strategy.layout(problem)
    parts = problem.layout() if own is None else own
    assert isinstance(parts, Layout)
    return part[parts.owner], None if own is not None else (
        f"{strategy.name} gives no rank vertices of its own; the parts are the partitioner's"
        f" ({problem.method})"
    )


def distdgl(problem: Problem, strategy: Strategy, folder: Path) -> str | None:
    """Write DistDGL's partition: a part per server, a trainer per rank, and graph.json.

    Returns a note or None. Raises SpecError where DGL is absent.
    """
    dgl = library("dgl")
    import torch

    graph = _graph(problem)
    assigned, told = assignment(problem, strategy)
    per_server = _per_server(problem)
    src, dst = _edges(graph)
    whole = dgl.graph((src, dst), num_nodes=graph.stats.vertices)
    # DGL numbers vertices anew, so that those of a part follow each other
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
        contextlib.redirect_stdout(io.StringIO()),  # timings
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
    return told


def pyg(problem: Problem, strategy: Strategy, folder: Path) -> str | None:
    """Write the folder of PyG's Partitioner, a part per rank, with label.pt and split.pt beside it.

    Returns a note or None. Raises SpecError where PyG is absent.
    """
    data, writer = library("torch_geometric.data"), library("torch_geometric.distributed.partition")
    import torch

    graph = _graph(problem)
    if problem.ranks == 1:
        raise SpecError("PyG's Partitioner writes two parts or more, and the plan has one rank")
    assigned, told = assignment(problem, strategy)
    ours = _Assignment(assigned)

    class Clusters(writer.ClusterData):  # type: ignore[misc, name-defined]
        """PyG's clusters, by our assignment."""

        def _metis(self, *_: Any) -> Tensor:
            return ours()

    class Partitioner(writer.Partitioner):  # type: ignore[misc, name-defined]
        """PyG's partitioner, of our clusters."""

        generate_partition = _with(writer.Partitioner.generate_partition, ClusterData=Clusters)

    whole = data.Data(
        x=_tensor(graph.features()),
        edge_index=torch.stack(_edges(graph)),
        num_nodes=graph.stats.vertices,
    )
    with (
        complete(folder) as temporary,
        contextlib.redirect_stderr(io.StringIO()),  # 'Computing METIS partitioning...'
    ):
        Partitioner(whole, problem.ranks, str(temporary)).generate_partition()
        ours.must_be_taken("torch_geometric")
        torch.save(_tensor(graph.y), temporary / "label.pt")
        torch.save(_masks(graph), temporary / "split.pt")
    return told


class _Assignment:
    """Stands where a library calls METIS, and gives the plan's parts."""

    def __init__(self, assigned: np.ndarray) -> None:
        self.assigned, self.taken = assigned, False

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        self.taken = True
        return _tensor(self.assigned)

    def must_be_taken(self, name: str) -> None:
        """Raise SpecError if the library has not called it: then the parts are not the plan's."""
        if not self.taken and self.assigned.any():
            raise SpecError(
                f"this version of {name} partitions graphs in another way than those that gnnplan"
                " knows; see pyproject.toml for their versions"
            )


def _with(function: FunctionType, **names: Any) -> FunctionType:
    """The function, for which these names of its module stand for something else.

    The libraries take no assignment. Their own functions and modules stay as they are."""
    scope = {**function.__globals__, **names}
    return FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )


def _graph(problem: Problem) -> Graph:
    """The problem's graph. Raises SpecError where it is not there or exceeds memory."""
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
    """Sources and destinations, int64 [E] each."""
    dst = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    return _tensor(graph.indices.astype(np.int64)), _tensor(dst)


def _masks(graph: Graph) -> dict[str, Tensor]:
    masks = {"train_mask": graph.train, "val_mask": graph.val, "test_mask": graph.test}
    return {name: _tensor(mask) for name, mask in masks.items()}


def _tensor(array: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.array(array))  # a copy: ours are read-only
