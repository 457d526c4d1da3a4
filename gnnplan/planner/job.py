"""The question: a graph, a GNN, a cluster and a number of ranks; and the facts of the graph that answers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gnnplan.planner.chunks import ChunkFacts, Chunks, estimated_chunks
from gnnplan.planner.cost import Cost
from gnnplan.planner.errors import SpecError
from gnnplan.planner.estimate import EstimatedLayout, mixing_of
from gnnplan.planner.expected import EstimatedBatches
from gnnplan.planner.gnn import Model, describe
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.layout import Expansion, Layout
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.partition import Stopwatch, partition
from gnnplan.planner.specs import MOST_RANKS, Cluster, Workload
from gnnplan.planner.splitting import owners

LISTS = ("islands", "switches", "nics")  # of a server's GPUs


def shape(cluster: Cluster, servers: int, each: int) -> dict[str, object]:
    """The fields of a cluster that say how many servers it has and which GPUs: the first `each` of every one."""
    lists = {name: tuple(kept for gpus in getattr(cluster, name) if (kept := tuple(g for g in gpus if g < each))) for name in LISTS}
    return {"servers": servers, "gpus_per_server": each, **lists}


def with_ranks(cluster: Cluster, ranks: int | None) -> Cluster:
    """The cluster with `ranks` ranks, equally many on each of its servers. GPUs cannot be invented; ranks on a CPU can,
    and share its cores. Raises SpecError."""
    if ranks is None or ranks == cluster.ranks:
        return cluster
    if not 1 <= ranks <= MOST_RANKS:
        raise SpecError(f"--ranks must lie in [1, {MOST_RANKS}], got {ranks}")
    if (ranks % cluster.servers and ranks > cluster.gpus_per_server):
        raise SpecError(
            f"--ranks {ranks} cannot be spread equally over {cluster.servers} servers; use a multiple of {cluster.servers} "
            f"or at most {cluster.gpus_per_server} (one server)"
        )
    servers = cluster.servers if ranks % cluster.servers == 0 else 1
    each = ranks // servers
    if each > cluster.gpus_per_server and cluster.device.kind != "cpu":
        raise SpecError(
            f"--ranks {ranks} asks for {each} GPUs per server, but cluster {cluster.name} has {cluster.gpus_per_server} "
            f"(servers: {cluster.servers}); use --ranks {cluster.ranks} or less, or --set gpus_per_server={each}"
        )
    for name in LISTS:
        if getattr(cluster, name) and each > cluster.gpus_per_server:
            raise SpecError(f"--ranks {ranks} asks for {each} ranks per server, but {name} of cluster {cluster.name} holds "
                            f"{cluster.gpus_per_server}; use --ranks {cluster.ranks} or less, or add them to {name}")  # fmt: skip
    changed = shape(cluster, servers, each)
    return cluster.model_copy(update=changed)


@dataclass(frozen=True)
class Job:
    """One question. `graph` is None where only statistics are known; then plans are estimates and cannot be run.

    `seats[r]` is the GPU that rank r sits on, counted over all servers (grouping.py chooses); empty: all GPUs in order.
    """

    stats: GraphStats
    graph: Graph | None
    workload: Workload
    cluster: Cluster
    method: str = "metis"
    seats: tuple[int, ...] = ()
    _layouts: dict[object, Layout | EstimatedLayout] = field(default_factory=dict, compare=False, repr=False)
    _batches: dict[object, list[Layout]] = field(default_factory=dict, compare=False, repr=False)
    _mini: dict[object, Batches] = field(default_factory=dict, compare=False, repr=False)
    _chunks: dict[tuple[int, int], Chunks] = field(default_factory=dict, compare=False, repr=False)
    _lengths: dict[range, np.ndarray] = field(default_factory=dict, compare=False, repr=False)
    _seconds: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    _fewest: dict[object, int] = field(default_factory=dict, compare=False, repr=False)  # batches that fit the memory
    _costs: dict[tuple[int, ...], Cost] = field(default_factory=dict, compare=False, repr=False)  # by seats, of one cluster

    @property
    def ranks(self) -> int:
        return len(self.seats) or self.cluster.ranks

    @cached_property
    def model(self) -> Model:
        return describe(self.workload, self.stats.features, self.stats.classes, self.stats.nonzeros / self.stats.vertices)

    def features_bytes(self, rows: np.ndarray, columns: range | None = None) -> np.ndarray:
        """Of the features (all, or these columns) of these vertices in transit (int64 ids [R] -> int64 [R]) [B]."""
        graph, columns = self.graph, columns or range(self.model.features)
        if not self.model.nonzeros or graph is None:
            return np.full(rows.size, round(self.model.features_moved(1.0) * len(columns) / self.model.features))
        if columns not in self._lengths:
            whole = len(columns) == self.model.features
            self._lengths[columns] = graph.lengths if whole else np.diff(graph.x[:, columns.start : columns.stop].indptr)  # type: ignore
        return np.asarray(2 * self._lengths[columns][rows].astype(np.int64) * self.model.itemsize)

    @cached_property
    def cost(self) -> Cost:
        known = self._costs.get(self.seats)
        if known is None or known.cluster is not self.cluster or known.spread != self.stats.spread:
            known = self._costs[self.seats] = Cost.of(self.cluster, self.seats, self.stats.spread)
        return known

    @property
    def servers(self) -> tuple[int, ...]:
        """The server of each rank."""
        return self.cost.servers

    @property
    def by_gpu(self) -> tuple[int, ...]:
        """Ranks in the order of their GPUs: what torchrun and srun call rank k is rank by_gpu[k]."""
        return tuple(int(rank) for rank in np.argsort(self.cost.seats))

    def seated(self, seats: tuple[int, ...]) -> Job:
        """The same question with its ranks on these GPUs."""
        return replace(self, seats=() if seats == tuple(range(self.cluster.ranks)) else seats)

    def layout(self, depth: int = 0, expansion: Expansion | None = None, groups: tuple[int, ...] = ()) -> Layout | EstimatedLayout:
        """Rows of every rank at every layer. Depth 0 cuts the graph in a part per rank; deeper ones in a part per group of ranks that
        preloads its surroundings first: `groups` says which each rank belongs to, without it servers."""
        groups = groups or self.servers
        deepest = self.workload.layers - self.model.first_varying
        several = len(set(groups)) > 1
        depth, expansion = (min(depth, deepest), expansion) if several else (0, None)
        key = (depth, expansion, groups if depth or expansion else self.ranks)
        if key not in self._layouts:
            args = (groups, self.workload.layers, self.model.first_varying, depth, expansion)
            if self.graph is None:
                self._layouts[key] = EstimatedLayout(self.stats.vertices, self.stats.edges, *args, mixing_of(self.stats, self.method))
            else:
                with Stopwatch() as watch:
                    self._layouts[key] = Layout(self.graph, self._owner(groups if depth or expansion else ()), *args)
                self._seconds[id(self._layouts[key])] = watch.seconds
        return self._layouts[key]

    def batches(self, layout: Layout | EstimatedLayout, count: int) -> Sequence[Layout | EstimatedLayout]:
        """Every group's training vertices in `count` batches, drawn once by the seed, each with the rows it needs."""
        if isinstance(layout, EstimatedLayout):
            return [replace(layout, targets=self.stats.train_vertices / len(set(layout.servers)) / count)] * count
        assert self.graph is not None
        key = (layout, count)
        if key not in self._batches:
            batch_of = layout.drawn(self.graph.train, count, self.workload.seed)
            self._batches[key] = [layout.batch(batch_of == b) for b in range(count)]
        return self._batches[key]

    def minibatches(self, groups: tuple[int, ...], splitter: str = "", epochs: int = 0) -> Batches:
        """The workload's mini-batches, each shared by groups of ranks; in a group vertices are owned as the splitter says, which
        pre-samples for so many epochs."""
        key = (groups, splitter, epochs, self.workload)
        if key not in self._mini and self.graph is None:
            self._mini[key] = EstimatedBatches(self.stats, self.workload, groups, self.model.first_varying, splitter)
        if key not in self._mini:
            assert self.graph is not None
            with Stopwatch() as watch:
                size = groups.count(groups[0])
                member = owners(self.graph, size, splitter, self.workload, epochs) if size > 1 else None
                self._mini[key] = Batches(self.graph, self.workload, groups, member, self.model.first_varying)
            self._seconds[id(self._mini[key])] = watch.seconds
        return self._mini[key]

    def seconds_of(self, made: Layout | EstimatedLayout | Chunks | Batches) -> float:
        """How long the job took to make it, partitioning included [s]."""
        return self._seconds.get(id(made), 0.0)

    def _owner(self, groups: tuple[int, ...]) -> np.ndarray:
        assert self.graph is not None
        if not groups:
            return partition(self.graph, self.ranks, self.method)
        _, first_rank = np.unique(groups, return_index=True)  # the layout cuts inside groups
        return np.asarray(first_rank[partition(self.graph, len(first_rank), self.method)])

    def chunk_of(self, chunks: int) -> np.ndarray:
        """Chunk of every vertex, int32 [N]."""
        assert self.graph is not None
        return partition(self.graph, chunks, self.method)

    def cut(self, chunks: int, members: int = 1) -> Chunks:
        """The graph in `chunks` chunks, each over the members of a stage."""
        assert self.graph is not None
        if (chunks, members) not in self._chunks:
            with Stopwatch() as watch:
                self._chunks[chunks, members] = Chunks(self.graph, self.chunk_of(chunks), chunks, members)
            self._seconds[id(self._chunks[chunks, members])] = watch.seconds
        return self._chunks[chunks, members]

    def chunks(self, chunks: int, members: int = 1) -> ChunkFacts:
        """Counts of `cut`, estimated where the graph is not known."""
        return estimated_chunks(self.stats, chunks, members, self.method) if self.graph is None else self.cut(chunks, members).facts
