"""Trains the zoo's modules by every family of strategies, beside the modules themselves.

A module is trained by torch alone, in one process, and by each strategy on two ranks: by night ten
epochs of Adam, in float64. An exact strategy must have its losses and its logits, a lossy one comes close
to its losses. What either reports of validation and test is what the module itself makes of the
weights that were trained."""

import importlib
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from nightly import NIGHT
from torch import Tensor
from torch.nn import functional as F
from zoo_entries import Entry

from gnnplan.executor.layers.kernels import dropout
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.modules.bind import GraphFields, rows_of
from gnnplan.executor.modules.prove import Dropouts, as_pieces_draw, followed
from gnnplan.executor.modules.read import Source, UserModule, read, with_module
from gnnplan.executor.modules.record import COUNTER
from gnnplan.executor.modules.structure import edge_index_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import CsrEdges, Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case, Ranks, Result, with_fields

HERE = Path(__file__).parent
FEATURES, CLASSES = 12, 4  # of the graph `rough`
ENTRIES = {
    f"{keeper} {name}": told
    for keeper in ("zoo", "zoo_dgl")
    for told, name in re.findall(
        r"^@needs\((.*)\)\n(?:class|def) (\w+)", (HERE / f"{keeper}.py").read_text(), re.M
    )
}
OURS = [name for name, told in ENTRIES.items() if "ours" in told]
NAMES = [name for name in ENTRIES if name not in OURS]
OF_FAMILIES = """
graph_parallel graph_parallel(narrow=True) graph_parallel(bits=8) pipegcn granndis
gnnpipe(stages=2,chunks=1) gnnpipe(stages=2,chunks=3) bns(p=1.0) bns(p=0.5) offload(chunks=2)
feature_parallel tensor3d data_parallel gsplit(prefetch=2) dnp snp p3(over='rank')
"""
OF_VARIANTS = """
graph_parallel(checkpoint=True) graph_parallel(buckets=2) graph_parallel(trim=True) pipegcn(bits=8)
granndis(depth=1) granndis(batches=2) gnnpipe(stages=1,chunks=3)
"""
FAMILIES, VARIANTS = OF_FAMILIES.split(), OF_VARIANTS.split()
EPOCHS = 10 if NIGHT else 4
# of a loss or a logit, if the strategy is exact: of our layers, and of a module as it is written
WITHIN = {True: 1e-9, False: 1e-5}
CLOSE = 0.5  # of the module's first loss, if it is lossy


def entry_of(model: Source) -> Entry:
    """What the zoo says of a module, and of a live one, which it lacks."""
    if not isinstance(model, str):
        return Entry()
    keeper, own = model.split()
    os.environ.setdefault("DGLBACKEND", "pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import, the libraries' own
        pytest.importorskip(
            "dgl" if keeper == "zoo_dgl" else "torch_geometric", exc_type=ImportError
        )
        entry: Entry = getattr(importlib.import_module(keeper), own).entry
        return entry


def module_of(model: Source, workload: Workload, directed: bool = False) -> UserModule:
    """The module as the command line reads it, and Python a live one. Raises SpecError."""
    entry = entry_of(model)
    graph = GraphFields(FEATURES, CLASSES, directed, False, entry.vertex, entry.edge)
    if isinstance(model, str):
        model = str(HERE / "{}.py:{}".format(*model.split()))
    return read(model, workload, graph)


def with_all_learned(file: str, folder: Path) -> str:
    """The graph with every vertex in training: a batch of all of them needs all rows, once."""
    with np.load(file) as arrays:
        learned = dict(arrays) | {"train_mask": np.ones_like(arrays["train_mask"])}
    del learned["test_mask"]  # which must not overlap it
    np.savez(folder / "learned.npz", **learned)
    return str(folder / "learned.npz")


def fields_of(entry: Entry, graph: Graph, folder: Path) -> str:
    """A file of numbers for the fields that a module needs; '': it needs none."""
    draw, stats, values = np.random.default_rng(11), graph.stats, {}
    for kind, some, count in (
        ("vertex", entry.vertex, stats.vertices),
        ("edge", entry.edge, stats.edges),
    ):
        for name, (sizes, of, most) in some.items():
            size = (count, *sizes)
            values[f"{kind} {name}"] = (
                draw.integers(0, most, size) if "i" in of else draw.random(size) + 0.25
            )
    if not values:
        return ""
    file = folder / f"{'-'.join(entry.fields)}.npz"
    np.savez(file, **values)
    return str(file)


def as_layers_draw(user: UserModule, seed: int, epoch: int) -> Dropouts:
    """Has a module's dropout draw as that of our layers, which have taken the module's place."""
    layers = user.description.layers
    drops = [n for n, layer in enumerate(layers, 1) if layer.drops]
    if user.fields["model"] == "gcnii":
        drops = [0, *drops, len(layers) + 1]
    left = iter(drops)
    return Dropouts(
        lambda rows, p: dropout(rows, seed, epoch, next(left), torch.arange(len(rows)), p)
    )


class Itself:
    """A module that torch trains, alone and in one process, on a whole graph."""

    def __init__(self, user: UserModule, graph: Graph, workload: Workload) -> None:
        self.module, self.graph, self.workload, self.user = user.module, graph, workload, user
        stats = graph.stats
        shapes = user.description.vertex_fields, user.description.edge_fields
        vertex, edge = ({name: tuple(shape) for name, *shape in of} for of in shapes)
        fields = GraphFields(stats.features, stats.classes, vertex=vertex, edge=edge)
        self.pieces = user.pieces or followed(self.module, fields, torch.float64)[0]
        self.whole = CsrEdges(graph.indptr, graph.indices, graph.edge_fields, self.pieces.loops)
        edges = edge_index_of(self.whole)
        of_edges = {name: tensor_of(value) for name, value in graph.edge_fields.items()}
        self.given: dict[str, Any] = {
            "edge_index": edges,
            "vertex x": tensor_of(graph.features()),
            **{f"vertex {name}": tensor_of(value) for name, value in graph.vertex_fields.items()},
        }
        if "g" in self.pieces.binding.inputs:
            import dgl

            g = dgl.graph((edges[0], edges[1]), num_nodes=stats.vertices)
            g.edata.update(of_edges)
            g.ndata.update(rows_of(self.given))
            self.given["g"] = dgl.add_self_loop(g) if self.pieces.loops else g
            of_edges = {**self.given["g"].edata}
        self.given |= {f"edge {name}": value for name, value in of_edges.items()}
        self.y = tensor_of(graph.y)
        self.losses = self._train()
        self.calls = {n: int(c) for n, c in self.module.named_buffers() if n.endswith(COUNTER)}
        self.trained = self.logits()

    def _train(self) -> list[float]:
        learned = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(learned, lr=self.workload.lr)
        train = torch.from_numpy(np.array(self.graph.train))
        losses = []
        for epoch in range(EPOCHS):
            with self._dropout(epoch):
                out = self.pieces.binding.call(self.module.train(), self.given)
            loss = F.cross_entropy(out[train], self.y[train])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def _dropout(self, epoch: int) -> AbstractContextManager[Any]:
        seed = self.workload.seed
        if self.user.pieces:
            return as_pieces_draw(self.pieces, self.whole, Drop(0.0, seed, epoch))
        return as_layers_draw(self.user, seed, epoch)

    def logits(self, state: Mapping[str, Any] | None = None) -> Tensor:
        """What the module evaluates, with another state if one is given."""
        if state is not None:
            self.module.load_state_dict(state)
        with torch.no_grad():
            return self.pieces.binding.call(self.module.eval(), self.given)

    def accuracies(self, logits: Tensor) -> dict[str, float]:
        """Of validation and of test, where there are such vertices."""
        right = (logits.argmax(1) == self.y).numpy()
        splits = {"val": self.graph.val, "test": self.graph.test}
        return {f"{n}_accuracy": float(right[m].mean()) for n, m in splits.items() if m.any()}


def tensor_of(values: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.array(values))
    return tensor.double() if tensor.is_floating_point() else tensor


# equal to the module itself; lossy, and close to it; ended by a loss that is not finite
Answer = Literal["equal", "runs", "diverged", "refused", "wrong", "crashed"]


@dataclass(frozen=True)
class Outcome:
    """What became of a module under a strategy."""

    answer: Answer
    words: str = ""


def compared(result: Result, itself: Itself, equal: bool, close: float, planned: float) -> Outcome:
    """How a training compares with that of the module itself. planned: bytes of its first epoch."""
    if (sent := result.metrics[0]["bytes"]) != planned:
        return Outcome("wrong", f"{sent} bytes were sent in an epoch, and {planned} planned")
    within = WITHIN[itself.user.pieces is None]
    gap = max(
        abs(loss - own) / (own if equal else itself.losses[0])
        for loss, own in zip(result.losses, itself.losses, strict=True)
    )
    if gap > (within if equal else close):
        return Outcome("wrong", f"losses {result.losses}, and by torch {itself.losses}")
    found = itself.logits(result.weights)
    own = itself.accuracies(itself.trained if equal else found)
    told = {name: result.metrics[-1][name] for name in own}
    if told != pytest.approx(own):
        return Outcome("wrong", f"evaluated {told}, and by torch {own}")
    if not equal:
        return Outcome("runs")
    if (calls := {name: int(result.weights[name]) for name in itself.calls}) != itself.calls:
        return Outcome("wrong", f"norms were called {calls}, and by torch {itself.calls} times")
    if not torch.allclose(found, itself.trained, rtol=within, atol=within):
        off = (found - itself.trained).abs().max().item()
        return Outcome("wrong", f"logits of the trained module are off by {off:g}")
    return Outcome("equal")


@dataclass(frozen=True)
class Keeper:
    """Trains modules of the zoo on two ranks."""

    file: str  # of the graph `rough`
    folder: Path
    run_ranks: Ranks

    def outcomes(self, model: Source, strategies: Iterable[str]) -> dict[str, Outcome]:
        """What becomes of a module under each strategy."""
        entry, workload = entry_of(model), Workload(dtype="float64", lr=0.01)
        user = module_of(model, workload)
        has_norm = user.fields["norm"] == "batch"
        # a batch's moments are of the rows that it needs: of all, where it learns all vertices
        files = {"full": self.file, "mini": self.file}
        if has_norm:
            files["mini"] = with_all_learned(self.file, self.folder)

        @cache
        def case_of(mode: str, servers: int) -> tuple[Case, Problem]:
            graph = load(files[mode])
            assert isinstance(graph, Graph)
            batch = {"mode": "mini", "fanout": "full", "batch": graph.stats.train_vertices}
            asked = workload.model_copy(update=batch if mode == "mini" else {})
            fields = with_module(asked, user, ()).model_dump()
            own = fields_of(entry, graph, self.folder)
            case = Case("", files[mode], fields, servers, EPOCHS, fields=own)
            return case, case.problem(2)

        @cache
        def itself(mode: str) -> Itself:
            if mode == "mini" and not has_norm:
                return itself("full")
            case = case_of(mode, 1)[0]
            graph = with_fields(load(case.graph), case.fields)
            return Itself(module_of(model, workload), graph, workload)

        found = {}
        for text in strategies:
            mode, servers = parse(text).mode, 2 if text.startswith("granndis") else 1
            case, problem = case_of(mode, servers)
            try:
                strategy = parse(text).settle(problem)
                strategy.check(problem)
            except SpecError as refused:
                found[text] = Outcome("refused", str(refused))
                continue
            # a row that two ranks compute for their batches counts twice in its moments
            equal = strategy.exact and not (
                has_norm and mode == "mini" and strategy.name != "gsplit"
            )
            try:
                result = self.run_ranks(2, replace(case, strategy=text))
                # several steps in an epoch go their own way
                close = CLOSE if strategy.steps(problem) == 1 else math.inf
                planned = strategy.predict(problem).bytes_total
                found[text] = compared(result, itself(mode), equal, close, planned)
            except AssertionError as lost:
                is_told = "the loss is nan in epoch" in str(lost) and not strategy.exact
                found[text] = Outcome("diverged" if is_told else "crashed", str(lost))
        return found
