"""The planning problem: a graph, a GNN, a cluster and a number of ranks.

`Problem` also makes the layouts, mini-batches and chunks that strategies need. A problem derived
from another one shares its cache (`Cache`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import LISTS, MOST_PAIRED, MOST_RANKS, Cluster
from gnnplan.planner.gnn.model import Model, describe
from gnnplan.planner.gnn.workload import BALANCED, METRICS, Workload
from gnnplan.planner.graph.disk_cache import Stopwatch
from gnnplan.planner.graph.graph import Graph, GraphStats, with_inputs
from gnnplan.planner.graph.partition import BLIND, IMBALANCE, owners, partition
from gnnplan.planner.graph.sampling import expect_held_out, hold_out
from gnnplan.planner.ownership.estimated import (
    EstimatedBatches,
    EstimatedLayout,
    estimated_chunks,
    mixing_of,
)
from gnnplan.planner.ownership.layout import (
    ChunkCounts,
    Chunks,
    Expansion,
    Layout,
    cut_parts,
    reached,
)
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.ownership.parts import PartLayout, is_stored
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import FLOAT64, PerRank

# -- a cache of results ----------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
AnyLayout = Layout | EstimatedLayout  # counted on a graph, or estimated from its statistics

RECENT = 16  # default number of answers per kind that `get_recent` keeps


class Cache:
    """A cache of answers keyed by questions; a problem derived from another one shares its cache.

    A question is a tuple of everything that the answer depends on. An answer therefore stays
    correct, and no entry needs to be invalidated.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, float]] = {}  # answer, seconds to compute it [s]
        self._recent: dict[str, OrderedDict[Hashable, Any]] = {}  # kind -> question -> answer

    def get(self, question: Hashable, make: Callable[[], T]) -> T:
        """Return the answer to a question, which `make` computes at the first request."""
        if question not in self._results:
            with Stopwatch() as watch:
                answer = make()
            self._results[question] = answer, watch.seconds
        cached: T = self._results[question][0]
        return cached

    def get_recent(
        self, kind: str, question: Hashable, make: Callable[[], T], most: int = RECENT
    ) -> T:
        """Return the answer like `get`, but keep only the `most` recently used ones of a kind.

        What-if analyses ask thousands of questions, and some answers are large.
        """
        answers = self._recent.setdefault(kind, OrderedDict())
        if question not in answers:
            answers[question] = make()
            if len(answers) > most:
                answers.popitem(last=False)
        answers.move_to_end(question)
        cached: T = answers[question]
        return cached

    def seconds_of(self, answer: object) -> float:
        """Return the time that computing an answer took, with partitioning [s]; 0 for an object not
        in the cache."""
        return next((s for cached, s in self._results.values() if cached is answer), 0.0)


def cached_by(*fields: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method of a problem: cache results, keyed by the arguments and these fields."""
    values = attrgetter(*fields)

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def ask(*args: P.args, **options: P.kwargs) -> T:
            problem: Any = args[0]
            question = (method.__name__, args[1:], *options.items(), values(problem))
            answer: T = problem.cache.get(question, lambda: method(*args, **options))
            return answer

        return ask

    return decorate


# -- the problem -----------------------------------------------------------------------------------


# Rows that no training vertex needs are left out if at most this share of the rows of all layers
# is needed.
MOST_NEEDED = 2 / 3
# Seconds per kernel of a replayed step (CUDA graph): its launch, and the shortest run time of any
# kernel [s]. On an H200 a step on 1,000 vertices and 10,000 edges took 223 us (2026-11-27): its
# bytes and flops take 28 us, and plans count 69 launches.
REPLAYED_LAUNCH = 2.8e-6


def with_ranks(cluster: Cluster, ranks: int | None) -> Cluster:
    """Return the cluster with `ranks` ranks, the same number on each server.

    A GPU has at most one rank. CPU ranks may exceed gpus_per_server; they share the cores. Raises
    SpecError for a number of ranks that the cluster cannot have."""
    if ranks is None or ranks == cluster.ranks:
        return cluster
    if not 1 <= ranks <= MOST_RANKS:
        raise SpecError(f"--ranks must lie in [1, {MOST_RANKS}], got {ranks}")
    if ranks % cluster.servers and ranks > cluster.gpus_per_server:
        raise SpecError(
            f"--ranks {ranks} cannot be spread equally over {cluster.servers} servers; use a"
            f" multiple of {cluster.servers} or at most {cluster.gpus_per_server} (one server)"
        )
    servers = cluster.servers if ranks % cluster.servers == 0 else 1
    per_server = ranks // servers
    if per_server > cluster.gpus_per_server and cluster.device.kind != "cpu":
        raise SpecError(
            f"--ranks {ranks} asks for {per_server} GPUs per server, but cluster {cluster.name} has"
            f" {cluster.gpus_per_server} (servers: {cluster.servers}); use --ranks {cluster.ranks}"
            f" or less, or --set gpus_per_server={per_server}"
        )
    for name in LISTS:
        if getattr(cluster, name) and per_server > cluster.gpus_per_server:
            raise SpecError(
                f"--ranks {ranks} asks for {per_server} ranks per server, but {name} of cluster"
                f" {cluster.name} holds {cluster.gpus_per_server}; use --ranks {cluster.ranks} or"
                f" less, or add them to {name}"
            )
    return cluster.shaped(servers, per_server)


MOST_SCORES = 1 << 27  # vertices times classes, whose scores every rank gathers for roc_auc


@dataclass(frozen=True, eq=False)
class Problem:
    """An immutable planning problem.

    `graph` is None if only statistics are known. Then plans are estimates and cannot be run. For
    link prediction, `graph` and `stats` lack the held-out edges (graph/sampling.py). Raises
    SpecError for another task on a graph without its held-out edges."""

    stats: GraphStats
    graph: Graph | None
    workload: Workload
    cluster: Cluster
    method: str = "metis"  # partitioner (graph/partition.py)
    # placement[r] is the GPU of rank r, counted over all servers (cluster/placement.py chooses it);
    # empty: all GPUs in order
    placement: PerRank = ()
    replayed: bool = True  # a step may be one CUDA graph (`uses_cuda_graph`: whether it is)
    cache: Cache = field(default_factory=Cache, compare=False, repr=False)

    def __post_init__(self) -> None:
        graph, stats, module = self.graph, self.stats, self.workload.module
        if graph and self.workload.precision != FLOAT64:
            graph = graph.in_float32(module.reads if module else ())
        if graph and self.workload.is_cut:  # the user's code may need dense features
            graph, stats = graph.dense(), stats.made_dense()
        if module is not None and module.inputs:
            graph, stats = with_inputs(graph, stats, module.inputs, self.workload.precision)
        if self.workload.task == "link":
            graph = None if graph is None else hold_out(graph)
            stats = graph.stats if graph else expect_held_out(stats)
        elif stats.held_out:
            raise SpecError(
                f"task=node learns from all edges, and {stats.name} lacks those held out for"
                f" link prediction ({stats.held_out:,}); load the graph again"
            )
        object.__setattr__(self, "graph", graph)
        object.__setattr__(self, "stats", stats)
        if self.graph and self.ranks > MOST_PAIRED:
            raise SpecError(
                "a plan for a partitioned graph counts rows between every two ranks, for at most"
                f" {MOST_PAIRED:,} ranks (ranks: {self.ranks:,}); use fewer, or the graph's"
                " statistics (--graph FILE.yaml)"
            )
        self._check_targets()

    def _check_targets(self) -> None:
        """Raise SpecError if loss, metric or class weights do not suit the kind of target."""
        workload, stats = self.workload, self.stats
        learned = "link" if workload.task == "link" else stats.learned
        targets = {
            "link": "edges",
            "label": "one class per vertex",
            "labels": "several labels per vertex",
            "numbers": "numbers",
        }
        found = f"the targets of {stats.name} are {targets[learned]}"
        if workload.metric and workload.metric not in METRICS[learned]:
            raise SpecError(
                f"metric={workload.metric} does not suit the targets: {found}; use"
                f" {' or '.join(METRICS[learned])}"
            )
        if workload.loss and learned != "numbers":
            raise SpecError(
                f"loss={workload.loss} needs numbers as targets, and {found}; use --task regression"
                " if its y holds numbers, or leave loss out"
            )
        weights = workload.class_weights
        if weights and learned != "label":
            raise SpecError(f"class_weights need one class per vertex, and {found}; leave them out")
        if weights not in (None, BALANCED) and stats.known and len(weights) != stats.classes:
            raise SpecError(
                f"class_weights needs a number per class ({len(weights):,} numbers, classes of"
                f" {stats.name}: {stats.classes:,}); give as many numbers, or balanced"
            )
        if weights not in (None, BALANCED) and 0.0 in weights and self.graph:
            trained = np.bincount(self.graph.y[self.graph.train], minlength=stats.classes)
            if not trained @ np.array(weights):
                raise SpecError(
                    f"class_weights must weigh a class of a training vertex, and all weigh 0 (of"
                    f" {np.count_nonzero(trained):,} classes); give one of them more, or balanced"
                )
        if workload.patience and self.graph and learned != "link" and not self.graph.val.any():
            raise SpecError(
                f"patience={workload.patience} needs scores of validation vertices, and"
                f" {stats.name} has none (val_mask); leave it out, or give a split"
            )
        scores = stats.vertices * stats.classes
        if workload.metric == "roc_auc" and scores > MOST_SCORES:
            raise SpecError(
                f"metric=roc_auc gathers the scores of all vertices on every rank, and {scores:,}"
                f" are more than {MOST_SCORES:,}; use {METRICS[learned][0]}, which ranks add up"
            )

    @property
    def metric(self) -> str:
        """The metric of training, validation and test scores, as metrics.jsonl names it."""
        return self.workload.metric_of(self.stats.learned)

    @property
    def data(self) -> Graph:
        """The graph, for code that needs more than statistics."""
        assert self.graph is not None
        return self.graph

    @property
    def ranks(self) -> int:
        return len(self.placement) or self.cluster.ranks

    @property
    def on_cpu(self) -> bool:
        """Whether ranks are processes on CPUs, whose memory is the server's."""
        return self.cluster.device.kind == "cpu"

    @property
    def partitioner(self) -> str:
        """The partitioner's name; for a graph that is stored in parts, with the parts' name."""
        cut = None if self.graph is None else self.graph.cut
        return self.method if cut is None else f"{self.method} {cut.name[:12]}"

    @cached_property
    def model(self) -> Model:
        """The GNN's layers on this graph's features and classes, and on this cluster's device."""
        return self._described()

    def _described(self) -> Model:
        stats, device = self.stats, self.cluster.device
        model = describe(self.workload, stats.features, stats.classes, stats.stored_per_row)
        b = model.itemsize
        if device.kind != "cpu":
            return replace(model, in_place=True, on_gpu=True)
        return replace(
            model,
            in_pieces=model.resamples and device.code_of(b) > 0,
            in_place=b != 4 or not device.product_code,
        )

    def features_bytes(self, rows: np.ndarray, columns: range | None = None) -> np.ndarray:
        """Return the bytes in transit of each vertex's features: int64 ids [R] -> int64 [R] [B].

        columns: the columns of the features that are sent; default: all."""
        graph, columns = self.graph, columns or range(self.model.features)
        if self.model.inputs.is_dense or graph is None:
            row_bytes = (
                float(self.model.feature_transit_bytes(1.0)) * len(columns) / self.model.features
            )
            return np.full(rows.size, round(row_bytes))
        whole = len(columns) == self.model.features
        sliced = graph if whole else replace(graph, x=graph.x[:, columns.start : columns.stop])
        lengths = self.cache.get(
            ("lengths", graph, columns), lambda: sliced.lengths(np.arange(self.stats.vertices))
        )
        return np.asarray(
            lengths[rows].astype(np.int64) * self.model.inputs.transit_bytes_per_number
        )

    @cached_property
    def cost(self) -> Cost:
        """The cost model of the cluster, with the ranks on the GPUs of `placement`."""
        device = self.cluster.device.multiplying(self.workload.dtype)
        if self.uses_cuda_graph:
            launch = np.minimum(device.launch, REPLAYED_LAUNCH)
            device = device.model_copy(update={"launch": launch})
        cluster = self.cluster.model_copy(update={"device": device})
        return Cost(cluster, self.placement, self.stats.spread)

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether one launch starts all kernels of a step (executor/train.py).

        Steps that fill much of a GPU's memory are not replayed: their kernels run longer than their
        launches take, so launches cost nothing. Steps that differ from each other cannot be
        replayed.
        """
        one_gpu = self.cluster.device.kind == "cuda" and self.ranks == 1
        return self.replayed and one_gpu and self.repeats and self.workload.mode == "full"

    @property
    def repeats(self) -> bool:
        """`Workload.repeats`, and dense features: only these have dropout in a CUDA graph."""
        return self.workload.repeats and self.model.inputs.is_dense

    def with_cuda_graph(self, replayed: bool) -> Problem:
        """Return the same problem with `replayed` set; several ranks never replay."""
        same = self.ranks > 1 or replayed == self.replayed
        return self if same else replace(self, replayed=replayed)

    @property
    def servers(self) -> PerRank:
        """The server of each rank."""
        return self.cost.servers

    @property
    def server_count(self) -> int:
        """The number of servers that have ranks."""
        return len(set(self.servers))

    @property
    def by_gpu(self) -> PerRank:
        """The ranks in the order of their GPUs: rank k of torchrun and srun is rank by_gpu[k]."""
        return tuple(int(rank) for rank in np.argsort(self.cost.placement))

    def placed(self, placement: PerRank) -> Problem:
        """Return the same problem with rank r on GPU placement[r]."""
        placement = () if placement == tuple(range(self.cluster.ranks)) else placement
        return self if placement == self.placement else replace(self, placement=placement)

    def layout(
        self, depth: int = 0, expansion: Expansion | None = None, groups: PerRank = ()
    ) -> AnyLayout:
        """Return the layout: the rows that each rank computes and reads in each layer.

        Depth 0 cuts the graph into a part per rank. A larger depth cuts it into a part per group of
        ranks, and each group preloads the rows around its part. groups: the group of each rank;
        default: its server."""
        groups = groups or self.servers
        deepest = self.workload.layers - self.model.first_varying
        several = len(set(groups)) > 1
        depth, expansion = (min(depth, deepest), expansion) if several else (0, None)
        cut = groups if depth or expansion else ()
        args = (groups, self.workload.layers, self.model.first_varying, depth, expansion)
        question = ("layout", *args[1:], cut or self.ranks)
        graph = self.graph
        kind = PartLayout if graph and not cut and is_stored(graph, self.ranks) else Layout
        return self._laid_out(question, args, lambda graph: self._owner(graph, cut), kind)

    def chunked(self, chunks: int) -> AnyLayout:
        """Return the layout of chunks: each chunk takes the role of a rank in the layout.

        Each real rank has `chunks` consecutive chunks, which are one group of the layout."""
        groups = tuple(rank for rank in range(self.ranks) for _ in range(chunks))
        args = (groups, self.workload.layers, self.model.first_varying, 0, None)
        return self._laid_out(
            ("chunked", *args), args, lambda graph: self._chunks_of_ranks(graph, chunks)
        )

    def _laid_out(
        self,
        question: tuple[object, ...],
        args: tuple[PerRank, int, int, int, Expansion | None],
        owner: Callable[[Graph], np.ndarray],
        kind: type[Layout] = Layout,
    ) -> AnyLayout:
        """Make a layout with arguments `args`; `owner` partitions the vertices of a known graph."""

        def make() -> AnyLayout:
            if self.graph is None:
                mixing = mixing_of(self.stats, self.method)
                return EstimatedLayout(self.stats.vertices, self.stats.edges, *args, mixing)
            return kind(self.graph, owner(self.graph), *args, method=self.method)

        return self.cache.get((*question, self.graph, self.stats, self.method), make)

    @cached_by("stats", "workload.seed")
    def batches(self, layout: AnyLayout, count: int) -> Sequence[AnyLayout]:
        """Return the layouts of `count` batches, drawn from each group's training vertices."""
        if isinstance(layout, EstimatedLayout):
            targets = self.stats.train_vertices / len(set(layout.servers)) / count
            return [replace(layout, depth=layout.layers, targets=targets)] * count
        batch_of = layout.drawn(layout.graph.train, count, self.workload.seed)
        return [layout.needed(batch_of == b, layout.layers) for b in range(count)]

    @cached_by("stats")
    def trimmed(self, layout: AnyLayout) -> AnyLayout:
        """Return the layout without the rows that no training vertex needs."""
        if isinstance(layout, EstimatedLayout):
            return replace(layout, targets=self.stats.train_vertices / len(set(layout.servers)))
        return layout.needed(layout.graph.train)

    @property
    def needed_share(self) -> float:
        """The share of all layers' rows that training vertices need; with batch norm, all rows.

        If the training vertices alone exceed MOST_NEEDED, their share of the vertices is returned
        as a lower bound."""
        trained = self.stats.train_vertices / self.stats.vertices
        if self.workload.norm == "batch":
            return 1.0
        return trained if trained > MOST_NEEDED else self._count_needed()

    @cached_by("graph", "stats", "workload.layers")
    def _count_needed(self) -> float:
        stats, layers = self.stats, self.workload.layers
        if self.graph is None:
            one_rank = EstimatedLayout(
                stats.vertices, stats.edges, (0,), layers, 0, 0, targets=stats.train_vertices
            )
            rows = [one_rank.region(h) for h in range(1, layers + 1)]
        else:
            rows = [float(count) for count in reached(self.graph, layers - 1)]
        return float(np.mean(rows)) / stats.vertices

    @property
    def needs_few_rows(self) -> bool:
        """Whether training vertices need so few rows that leaving out the other rows pays."""
        return self.needed_share <= MOST_NEEDED

    @cached_by("workload", "graph", "stats")
    def minibatches(
        self,
        groups: PerRank,
        splitter: str = "",
        epochs: int = 0,
        imbalance: float = IMBALANCE,
        split: str = "all",
    ) -> Batches:
        """Return the workload's mini-batches, shared among groups of ranks.

        splitter: the method that assigns vertices to the ranks of a group. epochs: pre-sampling
        epochs of the splitter. imbalance: the share of the mean load by which a rank's load may
        exceed the mean; estimates know METIS's default only. split: as in Batches."""
        if self.graph is None:
            return EstimatedBatches(self.stats, self.workload, groups, splitter)
        size = groups.count(groups[0])
        member = (
            owners(self.graph, size, splitter, self.workload, epochs, imbalance)
            if size > 1
            else np.zeros(self.stats.vertices, np.int32)
        )
        return Batches(self.graph, self.workload, groups, member, split)

    def _owner(self, graph: Graph, groups: PerRank) -> np.ndarray:
        """Return the rank that owns each vertex [N]; with groups, the first rank of the group."""
        if not groups:
            return partition(graph, self.ranks, self.method)
        # The layout later divides a group's part among its ranks.
        _, first_rank = np.unique(groups, return_index=True)
        return np.asarray(first_rank[partition(graph, len(first_rank), self.method)])

    def chunk_of(self, chunks: int) -> np.ndarray:
        """Return the chunk of every vertex, int32 [N]."""
        return partition(self.data, chunks, self.method)

    def _chunks_of_ranks(self, graph: Graph, chunks: int) -> np.ndarray:
        """Return the chunk of every vertex [N], `chunks` in each rank's part of the graph."""
        if self.ranks > 1 and self.method not in BLIND:
            owner = self._owner(graph, ())
            if np.bincount(owner).min() >= chunks:  # else a chunk would be empty
                return np.asarray(
                    owner * chunks + cut_parts(graph, owner, self.ranks, chunks, self.method)
                )
        return self.chunk_of(self.ranks * chunks)

    @cached_by("graph", "method")
    def cut(self, chunks: int, members: int = 1) -> Chunks:
        """Partition the graph into `chunks` chunks, and each chunk among the members of a stage."""
        return Chunks(self.data, self.chunk_of(chunks), chunks, members, self.method)

    @cached_by("graph", "stats", "method")
    def chunks(self, chunks: int, members: int = 1) -> ChunkCounts:
        """Return the counts of `cut`; estimates if only statistics are known."""
        if self.graph is not None:
            return self.cut(chunks, members).facts
        return estimated_chunks(self.stats, chunks, members, self.method)
