"""Trainings as lines of text, each with what is claimed of it; test_conformance.py runs them on
ranks and in one process.

A line has ranks, servers, a strategy, a graph, the dropout, a model, and more words: `key=value` of
the workload or of the case, or one of

    mini       mini-batches of 6 vertices
    directed   edges one way
    streams    lanes without threads, as over NCCL
    as=..      to the bit what this strategy trains
    uncompared what is trained is compared with nothing
    often      runs by day too: tests/mutants.toml asks for it
    resumes    broken off and resumed it is, to the bit, the unbroken training

`a|b` are two strategies, a training each. On parts or a folder of a graph a training is to the bit
that on its plain file, and without threads that with them."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from nightly import NIGHT

from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.ownership.parts import write_parts
from gnnplan.planner.strategies import families, parse
from gnnplan.testing.ranks import SMALL, Case

BATCHES = {
    "mode": "mini",
    "batch": 6,
    "fanout": (1, 2, 2, 3),
}  # layer 1, whose edges ranks may share, draws three
OF_THE_CASE = ("epochs", "staleness_errors", "gradient_errors")
FEW = "synthetic:community?vertices=400&edges=1200&features=12&classes=4&train=0.03"


class Setting(NamedTuple):
    """A line of the table."""

    world: int
    servers: int
    strategy: str
    graph: str
    dropout: float
    model: str
    words: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Setting:
        world, servers, strategy, graph, dropout, model, *words = line.split()
        return cls(int(world), int(servers), strategy, graph, float(dropout), model, tuple(words))

    def __str__(self) -> str:
        words = "-".join([self.model, *self.words])
        return f"{self.strategy}-{words}-{self.world}x{self.servers}-{self.graph}-{self.dropout}"

    @property
    def fields(self) -> dict[str, Any]:
        """What the words say: {'batch': 9, 'norm': 'batch'}."""
        pairs = (word.partition("=")[::2] for word in self.words if "=" in word)
        return {name: value_of(text) for name, text in pairs}

    @property
    def twin(self) -> Setting | None:
        """What must train the same to the bit."""
        strategy = self.fields.get("as", self.strategy)
        plain = tuple(word for word in self.words if word != "streams" and "as=" not in word)
        twin = self._replace(strategy=strategy, graph=self.graph.partition("/")[0], words=plain)
        return None if twin == self else twin

    def case(self, sources: Any) -> Case:
        """The training; sources: the path of a graph's name."""
        fields = self.fields
        fields.pop("as", None)
        of_case = {name: fields.pop(name) for name in OF_THE_CASE if name in fields}
        batches = BATCHES if "mini" in self.words else {}
        if "epochs" in of_case:  # a cosine ends with them
            fields["epochs"] = of_case["epochs"]
        epochs = 5 if "resumes" in self.words else 2 if batches else 4 if NIGHT else 3
        how = {**SMALL, "heads": 2, "dtype": "float64", **batches, "model": self.model}
        how |= {"dropout": self.dropout, "optimizer": self.optimizer, **fields}
        if batches and isinstance(how["fanout"], tuple):
            how["fanout"] = how["fanout"][-how["layers"] :]
        of_four = {1: "[[0, 2], [1, 3]]", 2: "[[0], [1]]"}
        islands = of_four[self.servers] if "island'" in self.strategy else ""
        flags = {"directed": "directed" in self.words, "streams": "streams" in self.words}
        options = {"epochs": epochs, "eval_every": 1, "islands": islands, **flags, **of_case}
        return Case(self.strategy, sources(self.graph), how, self.servers, **options)

    @property
    def optimizer(self) -> str:
        """Adam divides a gradient by its own size, and so turns the rounding of a gradient that is
        almost zero into a step. Batch norm's idle biases have such gradients, and its running means
        follow them; so has GATv2's `bias_in` (1.4e-9 apart on one kind of processor)."""
        rounds = "norm=batch" in self.words or self.model == "gatv2" or "dtype" in self.fields
        return "sgd" if rounds or not parse(self.strategy).exact else "adam"

    def needs(self) -> set[Hashable]:
        """Of each family every knob, of numbers none, a part, one and more, and every world; of
        each program of ranks a model that reads attention, one that reads its first rows again, and
        bfloat16; every model, graph and other word, of numbers whichever, on the full graph and in
        batches."""
        parsed = parse(self.strategy)
        knobs = {(k, size(v)) for k, v in parsed.knobs().items() if f"{k}=" in self.strategy}
        sizes = {"batch", "fanout", "epochs", "layers", "hidden", "as", "lr"}
        words = {word for word in self.words if "=" not in word}
        words |= {
            f"{name}={value}" if isinstance(value, str) else name
            for name, value in self.fields.items()
            if name not in sizes
        }
        base, _, way = self.graph.partition("/")
        reads = "attention" if self.model in ATTENTION else "deep" if self.model in DEEP else ""
        by_program = {reads, way, *words & {"resumes", "streams", "dtype=bfloat16"}}
        of_ranks = {*words - {"uncompared"}, base, self.model} if self.world > 1 else ()
        return {
            *((parsed.name, *knob) for knob in knobs),
            *((parsed.name, self.world > 2), (parsed.name, self.servers > 1)),
            (self.world, self.servers),
            *((parsed.executor, word) for word in by_program),
            str(self) if "often" in words else "",
            (parsed.executor, self.dropout > 0),
            *((parsed.mode, word) for word in of_ranks),
        }


def size(value: object) -> Hashable:
    """None, a part, one or more."""
    if type(value) not in (int, float):
        return str(value)
    return "a part" if 0 < value < 1 else min(value, 2)


def value_of(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def idle(case: Case) -> tuple[str, ...]:
    """Biases that batch norm takes away again: rounding alone moves them."""
    how = case.workload
    if how.get("norm") != "batch":
        return ()
    last = how["layers"] - (how["model"] != "resgcn")
    name = "bias_out" if how["model"] == "gin" else "bias"
    return tuple(f"layers.{layer}.{name}" for layer in range(1, last + 1))


def source(name: str, graphs: dict[str, str], folder: Path) -> str:
    """The path of a graph: 'rough'; 'rough/parts' in two; 'rough/folder', features in a file."""
    base, _, way = name.partition("/")
    if base == "few":
        return FEW
    file, made = Path(graphs.get(base, folder / f"{base}.npz")), folder / name.replace("/", " ")
    if not file.exists():
        with np.load(graphs["rough"]) as arrays:
            np.savez(file, **MADE[base](dict(arrays)))
    if not way:
        return f"{file}?task=regression" if base == "whole" else str(file)
    if made.exists():
        return str(made)
    if way == "parts":
        graph = load(str(file))
        write_parts(graph, partition(graph, 2), "metis", 0, made)
        return str(made)
    made.mkdir()
    with np.load(file) as arrays:
        for array in arrays:
            np.save(made / f"{array}.npy", arrays[array])
    return str(made)


def one(rough: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A number of each vertex to predict, which five lack."""
    y = np.random.default_rng(4).standard_normal(60) * 2
    y[np.flatnonzero(~rough["train_mask"])[:5]] = np.nan
    return {**rough, "y": y}


def three(rough: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**rough, "y": np.random.default_rng(5).standard_normal((60, 3))}


def whole(rough: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**rough, "y": np.random.default_rng(6).integers(-1, 3, 60)}


def skewed(_: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """300 vertices, most of two neighbours, a few far apart of a hundred: 6 hops still grow."""
    n, random = 300, np.random.default_rng(5)
    ring = np.arange(n)
    hubs = np.repeat(np.arange(0, n, 100), 40)
    far = (hubs + random.zipf(1.5, hubs.size).clip(max=60)) % n
    masks = {f"{name}_mask": ring % 3 == i for i, name in enumerate(("train", "val", "test"))}
    return {
        "src": np.concatenate([ring, hubs]),
        "dst": np.concatenate([(ring + 1) % n, far]),
        "x": random.standard_normal((n, 12), dtype=np.float32),
        "y": random.integers(0, 4, n),
        **masks,
    }


MADE = {"one": one, "three": three, "whole": whole, "skewed": skewed}

LINES = """
    # ranks, servers, strategy, graph, dropout, model and more of the workload
    2 1 graph_parallel islands 0.0 gcnii  # no halo at all
    4 2 gnnpipe(stages=2,chunks=5,historical_gradients=True,period=1,layers_per_stage=(3,1)) multi 0.0 gcn
    # chunks of which nothing crosses
    4 1 gnnpipe(stages=2,chunks=3,checkpoint=True) islands 0.0 sage
    3 1 gnnpipe(stages=1,chunks=40) rough 0.0 gcn  # chunks smaller than the group
    4 2 granndis(max_hop=2,fanout=1,degrees='local') rough 0.0 sage
    4 2 granndis(batches=3,narrow=True) rough 0.5 sage  # loads rows and their halo
    2 1 graph_parallel(narrow=True) rough 0.5 gatv2 often
    # gradients in buckets: beside exchanges, stale ones, and moments; of an encoder; in batches
    2 1 pipegcn(buckets=4) rough 0.5 sage norm=batch
    4 2 granndis(batches=2,buckets=3) rough 0.0 gcn
    # packed rows: fresh, stale and sampled ones; of ranks that send none; beside buckets
    3 1 graph_parallel(bits=2,buckets=3) rough 0.5 gcnii
    4 1 graph_parallel(bits=4,narrow=True) islands 0.0 sage
    2 1 graph_parallel(bits=8,checkpoint=True) multi 0.0 resgcn norm=batch
    3 1 pipegcn(bits=4,narrow=True) sparse 0.0 gcn
    2 1 bns(p=0.5,bits=2) rough 0.5 gcn often
    4 2 granndis(batches=2,bits=4) rough 0.0 sage uncompared
    4 1 gnnpipe(stages=2,chunks=24,bits=2) rough 0.5 gcnii  # some hand on nothing
    # tiles of a grid: the sums of layer 1 made in every step, and once; fewer columns than ranks
    2 1 tensor3d(x=2,y=1,z=1) multi 0.0 sage
    3 1 feature_parallel(order='alternating') rough 0.5 gcn often
    3 1 snp(splitter='random',checkpoint=True) sparse 0.5 gcn mini often
    4 2 snp(group='all',splitter='random',buckets=2) multi 0.0 sage mini hidden=12 norm=layer often  # sums first
    4 2 p3 islands 0.0 gcn mini batch=4 fanout=full norm=layer
    2 1 p3 sparse 0.5 sgc mini layers=1
    4 2 p3(over='rank',copies=2,prefetch=1,cache=200) rough 0.0 gat mini heads=4
    # an encoder, stages without weights, rows of few numbers
    3 1 pipegcn rough 0.5 sgc
    4 1 gnnpipe(stages=2,chunks=3,layers_per_stage=(1,3)) rough 0.0 sgc
    4 1 gnnpipe(chunks=3) rough 0.5 sgc  # two stages without weights
    2 1 pipegcn sparse 0.0 gat
    4 2 granndis(batches=2) sparse 0.0 sage  # loads them
    4 2 gsplit(splitter='node',prefetch=2,imbalance=0.5) rough 0.0 gat mini
    4 2 p3(pipelined=True,prefetch=2) sparse 0.0 gcn mini batch=9
    2 2 p3(pipelined=True) rough 0.5 sgc mini
    4 2 p3(over='rank',copies=2,pipelined=True) rough 0.5 gat mini
    # nobody to push to
    2 1 p3(copies=2) sparse 0.0 gat mini
    3 3 data_parallel(features='spread',cache=100,hot='degree') sparse 0.0 gcnii mini
    4 2 gsplit(cache=480,features='spread',group='all',hot='degree') sparse 0.0 sage mini
    3 1 data_parallel(structure='spread',structure_cache=300,prefetch=3) rough 0.5 gcn mini
    4 2 p3(pipelined=True,structure='spread') rough 0.0 sage mini batch=9
    # link prediction: rows of edges' ends cross where ranks split a batch
    4 2 dnp(group='all',cache=480,prefetch=1) sparse 0.5 gat mini
    4 2 snp(group='all',cache=480,features='spread',prefetch=1) sparse 0.5 gcn mini
    2 1 p3(pipelined=True) rough 0.5 sage mini batch=60 task=link
    # rows in bfloat16, weights in float32
    2 1 graph_parallel(narrow=True,buckets=2) rough 0.5 gcn dtype=bfloat16 norm=layer
    4 2 granndis(batches=2) sparse 0.5 sage dtype=bfloat16
    3 1 feature_parallel multi 0.5 gcn dtype=bfloat16
    1 1 offload(chunks=3) rough 0.5 sgc dtype=bfloat16
    4 2 data_parallel(cache=480,shared_cache=True,features='spread',prefetch=1) sparse 0.5 gcnii mini dtype=bfloat16
    # chunk by chunk, layer 1 on a constant aggregate, and with edges and attention of its own
    1 1 offload(chunks=3) rough 0.5 gat often
    2 1 offload(chunks=2,trim=True) multi 0.5 sage often
    # chunks of a vertex each, of which some have no edges; of islands nothing crosses
    1 1 offload(chunks=60,trim=True) rough 0.0 sage
    1 1 offload(chunks=2,trim=True) multi 0.5 sage layers=1
    2 1 offload(chunks=2) islands 0.0 gin optimizer=sgd
    4 2 offload(chunks=15,trim=True) rough 0.0 sage
    # every axis; more ranks than classes (4), labels (5) or columns; three ranks on an axis
    2 1 tensor3d(x=1,y=2,z=1) multi 0.5 sage often
    3 1 tensor3d(x=1,y=3,z=1) rough 0.0 sage hidden=2
    8 1 tensor3d(x=2,y=2,z=2) rough 0.5 sage
    8 1 tensor3d(x=1,y=8,z=1) multi 0.5 sage directed
    8 1 tensor3d(x=8,y=1,z=1) multi 0.0 gcn
    # rows that few training vertices need, fresh, late and of servers' own graphs
    4 2 graph_parallel(narrow=True,trim=True) few 0.0 gat
    4 2 graph_parallel(checkpoint=True,trim=True) few 0.0 gcnii
    4 2 pipegcn(trim=True) few 0.0 sage
    4 2 pipegcn_gf(narrow=True,trim=True) few 0.0 gcn norm=layer
    4 2 granndis(max_hop=1,fanout=2,degrees='local',trim=True) few 0.0 gcn
    # servers and islands that preload, sample and batch
    4 1 granndis(depth=1,narrow=True,group='island') skewed 0.5 gcn layers=3
    4 2 granndis(depth=2,group='island') skewed 0.5 sage
    2 1 granndis(batches=4) skewed 0.5 gcnii layers=3
    4 2 granndis(batches=3) skewed 0.0 gcn layers=1
    2 2 granndis(batches=2) skewed 0.5 gat layers=3
    4 2 granndis(max_hop=1,fanout=2,batches=2,degrees='local') rough 0.5 gcn directed layers=3
    4 2 granndis(max_hop=1,fanout=2,batches=2,group='island') rough 0.5 gcnii layers=3
    2 2 granndis(max_hop=1) islands 0.5 sage layers=3  # one server has nothing to train on
    # late rows: normalised with this step's moments, smoothed, multiplied by old weights
    4 1 pipegcn multi 0.5 gcnii optimizer=adam
    3 1 pipegcn rough 0.5 resgcn
    3 1 pipegcn_f(gamma=0.5) rough 0.5 sage
    4 1 pipegcn_g(gamma=0.7) rough 0.5 gcnii often
    2 1 pipegcn_gf(gamma=0.0) rough 0.5 sage as=pipegcn
    # rows of a share of the boundary
    3 1 bns(p=0.6,narrow=True,checkpoint=True,buckets=2) rough 0.5 gcnii
    3 1 bns(p=0) rough 0.5 gcn
    2 1 bns(p=1) rough 0.5 sage as=graph_parallel
    # rows in few bits, chosen twice where they adapt
    3 3 granndis(depth=0,bits=2) rough 0.5 gin
    3 1 graph_parallel(bits='adaptive') rough 0.5 sage epochs=13
    3 1 pipegcn(bits='adaptive') rough 0.5 gcn epochs=13
    # alpha = 23: the first 23 epochs read epoch 0, later ones epoch 23
    2 1 gnnpipe(chunks=4) rough 0.5 gcn epochs=26
    2 1 gnnpipe(chunks=8,historical_gradients=True,period=3) rough 0.5 sage optimizer=adam
    4 1 gnnpipe(chunks=4,shuffle=False,period=3) sparse 0.5 gcn
    2 1 gnnpipe(stages=1,chunks=5,shuffle=False,historical_gradients=True,period=1) rough 0.0 sage directed
    4 1 gnnpipe(stages=2,chunks=5,historical_gradients=True,period=2) rough 0.5 gat often
    4 1 gnnpipe(stages=2,chunks=5,period=2,checkpoint=True) rough 0.5 resgcn
    4 1 gnnpipe(stages=2,chunks=24,period=2) rough 0.5 sage  # members without rows
    3 1 gnnpipe(chunks=5,historical_gradients=True,period=1,bits=8) rough 0.5 gcnii often
    # batch norm over a batch's rows of all ranks; links with an encoder
    2 1 gsplit multi 0.5 sage mini norm=batch
    3 1 gsplit(splitter='random',checkpoint=True) rough 0.5 resgcn mini batch=80 task=link negatives=2 often
    # three updates late, at rates that change
    4 4 p3(pipelined=True,copies=2) rough 0.5 gat mini lr=0.02 schedule=step step_size=1
    # where rows, lists and parts lie changes no bit
    2 1 data_parallel(cache=1920,hot='degree') rough 0.5 sage mini as=data_parallel
    2 1 data_parallel(cache=100000) sparse 0.5 sage mini as=data_parallel
    4 2 data_parallel(features='spread',cache=864,shared_cache=True) sparse 0.5 sage mini as=data_parallel
    4 2 gsplit(features='spread',cache=864,hot='degree') rough 0.5 sage mini as=gsplit
    4 2 p3(cache=864,prefetch=1)|p3(cache=100000) sparse 0.5 sage mini as=p3
    3 1 data_parallel(structure='spread',structure_cache=300,prefetch=1) rough 0.5 gcn mini directed as=data_parallel
    4 2 data_parallel(features='spread',structure='spread',structure_cache=300,hot='degree') rough 0.5 sage mini fanout=full as=data_parallel
    2 1 gsplit(structure='spread') rough 0.5 gcn mini directed as=gsplit
    2 1 p3(structure='spread',structure_cache=300) rough 0.5 gcn mini directed as=p3
    2 1 gsplit(splitter='random',prefetch=3) rough 0.5 sage mini as=gsplit(splitter='random')
    2 1 graph_parallel(narrow=True,trim=True)|graph_parallel(bits='adaptive')|pipegcn|bns(p=0.5) rough/parts 0.5 gcn
    2 1 granndis(batches=2)|feature_parallel rough/parts 0.5 gcn
    2 1 gnnpipe(chunks=4) rough/parts 0.0 gcn
    2 1 gsplit|p3|data_parallel(cache=960) rough/parts 0.5 sage mini
    2 1 graph_parallel sparse/parts 0.5 gcn
    2 1 p3 sparse/parts 0.5 sage mini
    2 1 data_parallel(cache=960,shared_cache=True)|p3(cache=480)|gsplit rough/folder 0.5 sage mini
    2 1 graph_parallel rough/folder 0.5 gcn
    # nor do lanes without threads
    2 1 pipegcn|pipegcn_gf|graph_parallel(buckets=2)|gnnpipe(chunks=3) rough 0.0 sage streams
    2 1 p3(pipelined=True) rough 0.0 sage mini streams
    # broken off and resumed
    2 1 graph_parallel(narrow=True,checkpoint=True) rough 0.3 gcn norm=batch warmup=4 schedule=cosine resumes
    2 1 pipegcn|pipegcn_f|pipegcn_g rough 0.3 sage staleness_errors=True resumes
    2 1 pipegcn_gf rough 0.3 sage staleness_errors=True gradient_errors=True resumes
    2 1 pipegcn(buckets=3) rough 0.3 sage norm=batch resumes
    2 1 pipegcn|gnnpipe(stages=2,chunks=4) rough 0.3 sage dtype=bfloat16 resumes
    2 1 graph_parallel(bits=2)|pipegcn(bits='adaptive')|bns(p=0.5,bits=2) rough 0.3 sage resumes
    2 1 gnnpipe(stages=2,chunks=4,period=3,historical_gradients=True) rough 0.3 gat clip=0.1 resumes
    2 1 gnnpipe(stages=1,chunks=3) rough 0.3 gcnii resumes
    2 2 granndis|granndis(max_hop=1,fanout=3,batches=3) rough 0.3 sage resumes
    2 1 feature_parallel|tensor3d(x=2,y=1,z=1)|offload(chunks=2) rough 0.3 sage resumes
    # after eight batches as far from one process as its float32 is
    2 1 data_parallel(prefetch=1) rough 0.3 sage mini dtype=bfloat16 resumes uncompared
    2 1 gsplit(buckets=2,prefetch=3) rough 0.3 sage mini optimizer=sgd momentum=0.9 schedule=step step_size=2 resumes
    2 1 gsplit rough 0.3 sage mini batch=80 task=link negatives=2 resumes
    2 1 data_parallel(cache=480)|dnp(prefetch=1)|snp(prefetch=1)|p3|p3(pipelined=True,cache=480) rough 0.3 sage mini resumes
    2 1 p3(pipelined=True,prefetch=2) rough 0.3 gat mini resumes
    2 1 p3(pipelined=True) rough 0.3 sage mini batch=20 resumes  # batches of several epochs at once
"""
# what is trained -> on the full graph and in batches: graph, dropout, model and more
# (of their gradients all are longer than 0.1, and some than 1: these are clipped, the others are not)
HOW = """
    rough 0.3 sage optimizer=adamw lr=0.05 warmup=2 schedule=cosine epochs=5 clip=1.0 class_weights=balanced metric=f1_macro
    rough 0.3 sage optimizer=sgd lr=0.2 momentum=0.9 weight_decay=0.05 clip=0.1 schedule=step step_size=2 gamma=0.3 class_weights=(0.5,2.0,0.0,1.5) metric=roc_auc
    multi 0.3 sage optimizer=adam lr=0.05 weight_decay=0.1 warmup=3 metric=f1_macro
    multi 0.0 sage metric=roc_auc
    one 0.3 sage
    three 0.3 sage loss=mae
    whole 0.3 sage loss=mse
    rough 0.5 sage|sgc|gin
    rough 0.0 gcn
    multi 0.5 gat
    sparse 0.5 gcn
"""
ON_FULL_GRAPHS = f"""{HOW}
    rough 0.5 gcnii optimizer=sgd
    multi 0.0 gcnii
    rough 0.0 gcn directed optimizer=sgd
    rough 0.5 sage directed
    islands 0.5 sage optimizer=sgd
    multi 0.5 sgc directed
    sparse 0.5 sage|gcnii|gin
    sparse 0.5 sage hidden=48
    sparse 0.0 resgcn
    sparse|rough 0.5 gatv2 hidden=32
    rough 0.5 gat|resgcn
    rough 0.5 resgcn aggregation=sum norm=batch
    rough 0.5 gcn norm=layer
    multi 0.0 sage norm=batch
    rough 0.5 gat norm=batch
    multi 0.0 gin norm=layer
    rough 0.5 gcn dtype=float32
    rough 0.5 gcnii dtype=bfloat16
"""
ON_BATCHES = f"""{HOW}
    sparse 0.0 gcnii
    rough 0.5 resgcn
    sparse 0.0 gatv2 hidden=32
    islands 0.0 sage batch=4 fanout=full
    rough 0.5 gcn directed optimizer=sgd
    multi 0.0 gcn batch=20 fanout=full
    rough 0.5 sage batch=80 task=link negatives=2 layers=2
    rough 0.5 gcn directed batch=80 task=link layers=2
    rough 0.5 resgcn batch=80 task=link layers=2
    sparse 0.5 gcn dtype=bfloat16
"""
FULL = """
    2 1 graph_parallel|graph_parallel(narrow=True)|graph_parallel(narrow=True,checkpoint=True,buckets=3)
    2 1 gnnpipe(chunks=1)|feature_parallel|tensor3d(x=1,y=2,z=1)|offload(chunks=3,trim=True)
    3 1 graph_parallel(trim=True)|graph_parallel(buckets=4)|feature_parallel
    4 1 gnnpipe(stages=2,chunks=1)|graph_parallel(narrow=True,checkpoint=True,trim=True)|tensor3d(x=2,y=1,z=2)
    2 2 granndis(depth=0)|granndis(depth=1,narrow=True)
    3 3 granndis(depth=1)
    4 2 granndis(depth=1,buckets=2)|granndis(depth=2,trim=True)|granndis|feature_parallel(order='alternating')
    1 1 offload(chunks=3)
"""
MINI = """
    2 1 data_parallel|gsplit|gsplit(splitter='edge',imbalance=1.0)|dnp|snp|p3
    3 1 data_parallel(buckets=3)|gsplit(buckets=2,narrow=True)|dnp(splitter='random',checkpoint=True)
    3 1 snp(splitter='random',checkpoint=True)|p3(prefetch=2)
    4 1 gsplit(splitter='node',narrow=True)
    4 2 gsplit(group='all',splitter='random',checkpoint=True)|data_parallel(checkpoint=True)
    4 2 dnp(group='all',splitter='random',buckets=2)|snp(group='all',splitter='random',buckets=2)|p3(over='rank',copies=2)
"""
DEEP, ATTENTION = {"gcnii", "resgcn"}, {"gat", "gatv2"}
REFUSES = {  # family -> models
    "feature_parallel": {*ATTENTION, "resgcn"},
    "tensor3d": {*DEEP, *ATTENTION, "sgc", "gin"},
    "offload": DEEP,
    "dnp": DEEP,
    "snp": {*DEEP, *ATTENTION, "gin"},
    "p3": {*DEEP, "gin", "gatv2"},
}


def lines(text: str) -> list[str]:
    """Without comments, of each word of `a|b`."""
    told = [words for line in text.splitlines() if (words := line.partition("#")[0].split())]
    return [" ".join(line) for words in told for line in product(*(w.split("|") for w in words))]


def shared_out(plans: str, trained: str, share: int) -> list[Setting]:
    """Every plan with its share of the trainings, every training with its share of the plans."""
    mini = " mini" if plans is MINI else ""
    return [
        setting
        for number, plan in enumerate(lines(plans))
        for place, training in enumerate(lines(trained))
        if (number + place) % share == 0
        for setting in [Setting.of(f"{plan} {training}{mini}")]
        if suits(setting)
    ]


def suits(setting: Setting) -> bool:
    """Whether the strategy has such a model, and such norms and types."""
    family = setting.strategy.partition("(")[0]
    trims = "trim=True" in setting.strategy
    normed = "norm=batch" in setting.words and (trims or family in ("gnnpipe", "tensor3d"))
    rounded = "dtype=bfloat16" in setting.words and family in ("tensor3d", "offload", "p3")
    thin = setting.graph == "sparse" and family in ("tensor3d", "offload")
    return setting.model not in REFUSES.get(family, set()) and not (normed or rounded or thin)


SHARED_OUT = [*shared_out(FULL, ON_FULL_GRAPHS, 4), *shared_out(MINI, ON_BATCHES, 4)]
SETTINGS = list(dict.fromkeys([*(Setting.of(line) for line in lines(LINES)), *SHARED_OUT]))
HAVE_LINES = {type(parse(setting.strategy)) for setting in SETTINGS}
SETTINGS += [  # of families that have none above: their own examples
    Setting.of(
        f"{example.ranks} {example.servers} {example.strategy} rough 0.5 gcn"
        f"{' mini' * (family.mode == 'mini')}"
    )
    for family in families()
    if family not in HAVE_LINES
    for example in family.examples
]
