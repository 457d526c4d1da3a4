"""The question: a graph, a GNN, a cluster and a number of ranks; and the facts of the graph that answers need."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gnnplan.planner.cost import Cost
from gnnplan.planner.errors import SpecError
from gnnplan.planner.formulas import expected_halo_rows
from gnnplan.planner.gnn import Model, describe
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.layout import LayerFacts, Layout
from gnnplan.planner.partition import partition
from gnnplan.planner.schedule import share
from gnnplan.planner.specs import MOST_RANKS, Cluster, Workload


@dataclass(frozen=True)
class ChunkFacts:
    """The graph cut in K chunks: arrays [K]. `sources`: distinct rows that a chunk's edges read, its own included."""

    rows: np.ndarray
    edges: np.ndarray
    sources: np.ndarray


@dataclass(frozen=True)
class EstimatedLayout:
    """Layout of a graph known by statistics only: equal parts of a random graph (formulas.expected_halo_rows)."""

    vertices: int
    edges: int
    servers: tuple[int, ...]
    layers: int
    first_varying: int
    depth: int

    @property
    def ranks(self) -> int:
        return len(self.servers)

    def hops(self, h: int) -> int:
        return max(0, min(self.first_varying + self.depth - h, self.layers - h)) if self.depth else 0

    def recomputed(self, layer: int) -> bool:
        return bool(self.depth) and layer - 1 < self.first_varying + self.depth

    def _region(self, hops: int) -> float:
        """Rows of a server's part and all within `hops` of it."""
        n, p = float(self.vertices), self.edges / float(self.vertices) ** 2
        rows = n / len(set(self.servers))
        for _ in range(hops):
            rows += (n - rows) * -np.expm1(rows * np.log1p(-min(p, 0.5)))
        return rows

    def facts(self, layer: int) -> LayerFacts:
        m, servers = self.ranks, len(set(self.servers))
        same = np.equal.outer(self.servers, self.servers) & ~np.eye(m, dtype=bool)
        if self.recomputed(layer):
            group = m // servers
            rows, local = self._region(self.hops(layer)) / group, self._region(self.hops(layer - 1)) / group
            among, others = self._region(self.hops(layer - 1)), same
        else:
            rows = local = self.vertices / m
            among, others = float(self.vertices), ~np.eye(m, dtype=bool)
        p = self.edges / float(self.vertices) ** 2
        halo = (among - local) * -np.expm1(rows * np.log1p(-min(p, 0.5)))
        sends = _even(others, halo)
        count = np.full(m, 1.0)
        return LayerFacts(rows * count, local + sends.sum(0), rows / self.vertices * self.edges * count, sends)

    def preloaded(self) -> np.ndarray:
        m, servers = self.ranks, len(set(self.servers))
        across = ~np.equal.outer(self.servers, self.servers)
        external = (self._region(self.hops(0)) - self.vertices / servers) / (m // servers)
        return _even(across, external)


def _even(peers: np.ndarray, rows: float) -> np.ndarray:
    """Whole rows [ranks, ranks] that every rank gets from its `peers`, equally many from each."""
    return peers * round(rows / max(int(peers[0].sum()), 1))


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
    changed: dict[str, object] = {"servers": servers, "gpus_per_server": each}
    if cluster.device.kind == "cpu" and cluster.cores:
        slower = max(1.0, each / cluster.cores) / max(1.0, cluster.gpus_per_server / cluster.cores)
        device = cluster.device
        changed["device"] = device.model_copy(update={
            "gemm": device.gemm / slower, "memory_bandwidth": device.memory_bandwidth / slower,
            "gather": {w: rate / slower for w, rate in device.gather.items()}, "launch": device.launch * slower,
        })  # fmt: skip
        changed["intra_node"] = cluster.intra_node.slowed(slower)
        changed["collectives"] = {
            key: link.slowed(slower) if key.endswith("intra_node") else link for key, link in cluster.collectives.items()
        }
    return cluster.model_copy(update=changed)


@dataclass(frozen=True)
class Job:
    """One question. `graph` is None where only statistics are known; then plans are estimates and cannot be run."""

    stats: GraphStats
    graph: Graph | None
    workload: Workload
    cluster: Cluster
    method: str = "metis"
    _layouts: dict[int, Layout | EstimatedLayout] = field(default_factory=dict, compare=False, repr=False)
    _chunks: dict[int, ChunkFacts] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @cached_property
    def model(self) -> Model:
        return describe(self.workload, self.stats.features, self.stats.classes)

    @cached_property
    def cost(self) -> Cost:
        return Cost.of(self.cluster)

    @property
    def servers(self) -> tuple[int, ...]:
        return self.cost.servers

    def layout(self, depth: int = 0) -> Layout | EstimatedLayout:
        """Rows of every rank at every layer. Depth 0 cuts the graph in a part per rank; deeper ones in a part per server first."""
        depth = min(depth, self.workload.layers - self.model.first_varying) if self.cluster.servers > 1 else 0
        if depth not in self._layouts:
            args = (self.servers, self.workload.layers, self.model.first_varying, depth)
            if self.graph is None:
                self._layouts[depth] = EstimatedLayout(self.stats.vertices, self.stats.edges, *args)
            else:
                self._layouts[depth] = Layout(self.graph, self._owner(depth), *args)
        return self._layouts[depth]

    def _owner(self, depth: int) -> np.ndarray:
        assert self.graph is not None
        if depth == 0:
            return partition(self.graph, self.ranks, self.method)
        first_rank = np.searchsorted(self.servers, np.arange(self.cluster.servers))  # the layout cuts inside servers
        return first_rank[partition(self.graph, self.cluster.servers, self.method)]

    def chunk_of(self, chunks: int) -> np.ndarray:
        """Chunk of every vertex, int32 [N]."""
        assert self.graph is not None
        return partition(self.graph, chunks, self.method)

    def chunks(self, chunks: int) -> ChunkFacts:
        """Counts of the graph cut in `chunks` chunks."""
        if chunks not in self._chunks:
            self._chunks[chunks] = self._count_chunks(chunks)
        return self._chunks[chunks]

    def _count_chunks(self, chunks: int) -> ChunkFacts:
        n, e = self.stats.vertices, self.stats.edges
        if self.graph is None:
            rows = np.array([share(n, chunks, i) for i in range(chunks)])
            return ChunkFacts(rows, rows * (e / n), rows + float(expected_halo_rows(n, chunks, min(e / n**2, 0.5))) / chunks)
        of = self.chunk_of(chunks).astype(np.int64)
        degree = np.diff(self.graph.indptr)
        reader = np.repeat(of, degree)
        pairs = np.unique(np.concatenate([reader * n + self.graph.indices, of * n + np.arange(n)]))
        return ChunkFacts(
            np.bincount(of, minlength=chunks),
            np.bincount(of, weights=degree, minlength=chunks).astype(np.int64),
            np.bincount(pairs // n, minlength=chunks),
        )
