"""The inputs that `forward` receives, by the names of its parameters; and small random graphs, on
which a module is recorded and proved.

Names mean what they mean in PyG, DGL and their examples. `forward` receives a graph by them; a
class or function that makes a module receives widths and fields of a workload."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import count, takewhile
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.overrides import TorchFunctionMode

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.modules.record import Unfit, graphs_by, leaves_of, words_of
from gnnplan.executor.modules.structure import edge_index_of, inputs_on, typed
from gnnplan.planner.graph.graph import CsrEdges
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.files import suggest
from gnnplan.planner.vocabulary.numbers import offsets

# Vertices of the graph that a module is recorded on, and of another one to prove it on; one more if
# a tensor of the module has as many rows or columns, which would pass for rows of vertices.
VERTICES = (53, 78)
MANY_VERTICES = 1201  # of a larger graph, which tells sizes from other numbers
FORWARD_BYTES = 4e9  # that forward may allocate on the smaller one, beside parameters
PARTS = 4
HUB = 53  # edges into one vertex of larger graphs
MOST_BLOCKS = 33  # of a mini-batch: one per layer
EACH = 4  # rows of each value of an integer field, if the graph has enough rows

HOOKED = (
    "{} has a hook of gradients, and a rank has those of its own rows alone; leave it out (--set"
    " clip=.. clips the gradient of all parameters)"
)
# parameters of forward, beside fields of the graph
FEATURES = {"x", "h", "feat", "feats", "feature", "features", "input", "inputs"}
BESIDE_FEATURES = {"in", "n", "node"}  # words that may stand beside, as in in_feat
EDGES = ("edge_index", "edges", "adj", "adj_t", "edge_idx")
MATRICES = ("adj", "adj_t")  # in PyG, sparse tensors that also hold the edge weights
GRAPHS = ("g", "graph", "G", "block", "blocks", "mfgs", "bipartites")
DATA = ("data", "batch", "graph")

# parameters of a class or function that receive the graph's width though they have a default
WIDTHS = (
    *("features", "h_in", "in_channels", "in_feats", "in_dim", "in_size", "num_features"),
    *("classes", "h_out", "out_channels", "out_feats", "out_dim", "out_size", "num_classes"),
)
# (field of a workload, words that mean it); the first match counts. A name with a word that is
# neither here nor in PLAIN means something else.
WORDS = (
    ("dropout", {"dropout", "drop", "droprate"}),
    ("layers", {"layer", "layers"}),
    ("heads", {"head", "heads"}),
    ("features", {"in", "input"}),
    ("classes", {"out", "output", "class", "classes", "labels"}),
    ("hidden", {"hid", "hidden", "h"}),
    ("features", {"feat", "feats", "feature", "features"}),
)
PLAIN = {"n", "num", "node", "d", "dim", "dims", "size", "units", "channels", "c", "rate", "prob"}
KNOWN = PLAIN.union(*(words for _, words in WORDS))


# name -> (sizes of a row, numpy type, for integers their number: they lie below it)
Fields = Mapping[str, tuple[tuple[int, ...], str, int]]


def is_features(name: str) -> bool:
    """Whether a parameter of forward with this name means the graph's features.

    >>> is_features("node_feat"), is_features("x0"), is_features("nfeat"), is_features("edge_feat")
    (True, True, True, False)
    """
    words = _words(name.removesuffix("0"), FEATURES | BESIDE_FEATURES)
    return words <= FEATURES | BESIDE_FEATURES and bool(words & FEATURES)


def field_of(parameter: str) -> str:
    """Return the field of a workload, 'features' or 'classes' that a class's parameter means.

    '': none of these.

    >>> field_of("hidden_channels"), field_of("nclass"), field_of("edge_dim")
    ('hidden', 'classes', '')
    """
    words = _words(parameter, KNOWN)
    found = (field for field, some in WORDS if words & some)
    return next(found, "") if words <= KNOWN else ""


def _words(name: str, known: Collection[str]) -> set[str]:
    """Return the words of a name, without the n of 'nfeat', which stands for 'number of'."""
    words = name.lower().split("_")
    return {word if word in known else word.removeprefix("n") for word in words}


@dataclass(frozen=True)
class GraphFields:
    """What a module may know of a graph: widths, fields, and whether it is directed.

    own: whether the module may have other features, or classes; the graph's then only serve as
    arguments of the call that makes it. unsummed: why its features cannot be summed as they are."""

    features: int
    classes: int
    directed: bool = False
    multilabel: bool = False
    vertex: Fields = field(default_factory=dict)
    edge: Fields = field(default_factory=dict)
    own: tuple[bool, bool] = (False, False)
    unsummed: str = ""

    @staticmethod
    def of(problem: Problem) -> GraphFields:
        stats, graph = problem.stats, problem.graph
        fields = graph.vertex_fields if graph else {}, graph.edge_fields if graph else {}
        vertex, edge = ({n: shape_of(v) for n, v in some.items()} for some in fields)
        classes, facts = max(stats.classes, 1), (stats.directed, stats.multilabel)
        why = problem.model.inputs.why_unsummed
        unsummed = f"of {stats.name} {why}" if why else ""
        return GraphFields(stats.features, classes, *facts, vertex, edge, unsummed=unsummed)


def shape_of(field: np.ndarray) -> tuple[tuple[int, ...], str, int]:
    """Return a field's entry in Fields."""
    whole = field.dtype.kind in "iu"
    return field.shape[1:], field.dtype.str, 1 + max(int(field.max(initial=0)), 0) if whole else 0


class InDouble(TorchFunctionMode):
    """A mode that makes float64 where a module asks for float32, as x.float() and torch.zeros do.

    A module is proved in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(_doubled(each) for each in args)
        kwargs = {name: _doubled(each) for name, each in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        is_single = isinstance(result, Tensor) and result.dtype == torch.float32
        if is_single and not any(isinstance(leaf, Tensor) for leaf in leaves_of((args, kwargs))):
            with suppress(TypeError):
                return func(*args, **{**kwargs, "dtype": torch.float64})
        return result


def _doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@dataclass(frozen=True)
class Bound:
    """The inputs that `forward` receives.

    inputs: their names, as of a graph: 'vertex x', 'edge_index', 'edge edge_attr', 'g'. takes: the
    input of each parameter; or 'data', or 'blocks'. needed: the parameters without a default.
    positional: how many of the first are given by position. attributes: the input of each attribute
    of `data`. blocks: the length of the list of blocks."""

    inputs: tuple[str, ...]
    takes: Mapping[str, str]
    needed: Collection[str]
    positional: int
    attributes: Mapping[str, str]
    blocks: int = 1

    def call(self, module: nn.Module, values: Mapping[str, Any]) -> Tensor:
        """Return the output of `forward` for inputs by name; in float64 if the inputs are.

        Raises Unfit if that is no tensor, alone or in a list of one."""
        numbers = [v for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()]
        is_double = any(number.dtype == torch.float64 for number in numbers)
        given = [(name, self._argument(taken, values)) for name, taken in self.takes.items()]
        # by position where it can be: hooks of calls and PyG's Sequential expect it
        by_position = [argument for _, argument in given[: self.positional]]
        with InDouble() if is_double else nullcontext():
            output = module(*by_position, **dict(given[self.positional :]))
        if isinstance(output, (tuple, list)):
            if len(output) != 1:
                raise Unfit("forward returns several values; return the logits alone")
            output = output[0]
        if not isinstance(output, Tensor):
            raise Unfit(f"forward returns a {type(output).__name__}; return the logits alone")
        return output

    def _argument(self, taken: str, values: Mapping[str, Any]) -> Any:
        if taken == "data":
            from torch_geometric.data import Data

            return Data(**{each: values[name] for each, name in self.attributes.items()})
        return [values["g"]] * self.blocks if taken == "blocks" else values[taken]


def rows_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ndata of a DGL graph: the fields of vertices, and the features as 'feat'."""
    rows = {n.partition(" ")[2]: v for n, v in values.items() if n.startswith("vertex ")}
    return {"feat": rows["x"]} | rows


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module. Raises Unfit if it has hooks of gradients, or cannot be copied."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unfit(HOOKED.format(name))
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise Unfit(HOOKED.format(path or "it"))
    lazy = [buffer for buffer in module.buffers() if is_lazy(buffer)]  # which torch does not copy
    try:
        return copy.deepcopy(module, {id(buffer): UninitializedBuffer() for buffer in lazy})
    except Exception as error:
        raise Unfit(
            f"it cannot be copied ({words_of(error)}); let __init__ keep no"
            " tensor that it has computed from parameters, as torch.nn.utils.weight_norm does:"
            " torch.nn.utils.parametrizations computes them in each call"
        ) from error


def uses_dgl(module: nn.Module) -> bool:
    """Whether a module derives from DGL's classes, or its file imports DGL."""
    names = {base.__module__ for part in module.modules() for base in type(part).__mro__}
    code = getattr(type(module).forward, "__globals__", {})
    names |= {each.__name__ for each in code.values() if inspect.ismodule(each)}
    return any(name.partition(".")[0] == "dgl" for name in names)


def bound(module: nn.Module, graph: GraphFields) -> Bound:
    """Return the inputs that `forward` receives of such a graph. Raises Unfit."""
    vertex, edge = ["x", *graph.vertex], list(graph.edge)
    # in DGL, edges may have a feat, x or h; these names otherwise mean fields of vertices
    fields = {name: f"edge {name}" for name in edge if not is_features(name)}
    fields = {f"edge_{n}": f"edge {n}" for n in edge if not n.startswith("edge_")} | fields
    fields |= {name: f"vertex {name}" for name in vertex}
    parameters = _parameters(module)
    has_dgl, takes = uses_dgl(module), {}
    attributes = {"edge_index": "edge_index", **fields}
    has_features = any(each.name == "x" for each in parameters)
    needed = [each.name for each in parameters if each.default is each.empty]
    for parameter in (each.name for each in parameters):
        is_needed = parameter in needed
        if parameter in fields:
            takes[parameter] = fields[parameter]
        elif parameter in GRAPHS and (has_dgl or parameter != "graph"):
            takes[parameter] = "blocks" if parameter.endswith("s") else "g"
        elif parameter in DATA and (needed == [parameter] or (is_needed and parameter != "batch")):
            takes[parameter] = "data"
        elif parameter in EDGES:
            if parameter in MATRICES and "edge_weight" in edge:
                raise Unfit(
                    f"forward asks for {parameter}, which holds the graph's edge_weight, and would"
                    " get edge_index, which does not; take edge_index and edge_weight"
                )
            takes[parameter] = "edge_index"
        elif is_features(parameter) and (is_needed or not takes) and not has_features:
            takes[parameter], has_features = "vertex x", True
        elif is_needed:
            names = ", ".join(["x", "edge_index", *(n for n in (*vertex, *edge) if n != "x")])
            remedy = "name the parameter as the graph does, or give it a default"
            if "edge_index" in parameter:
                remedy = (
                    "it has one set of edges: choose from it by a field of edges, as"
                    " edge_index[:, edge_type == 1]"
                )
            raise Unfit(
                f"forward asks for {parameter}, and the graph has {names}"
                f"{suggest(parameter, fields) if fields.keys() - {'x'} else ''}; {remedy}"
            )
    holds = {"data": attributes.values(), "blocks": ("g",)}
    inputs = dict.fromkeys(name for taken in takes.values() for name in holds.get(taken, (taken,)))
    if "g" in inputs:  # all fields are in g.edata and g.ndata
        inputs |= dict.fromkeys(fields.values())
    leading = takewhile(lambda p: p.name in takes and p.kind != p.KEYWORD_ONLY, parameters)
    return Bound(tuple(inputs), takes, needed, len([*leading]), attributes)


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of `forward`. Raises Unfit."""
    for path, part in module.named_modules():
        is_script = isinstance(part, torch.jit.ScriptModule) and any(
            True for _ in part.parameters()
        )
        if is_script or (part is module and hasattr(module, "_orig_mod")):
            raise Unfit(
                f"{path and f'{path}: '}its forward is compiled, and its calls of torch cannot be"
                " seen; give the module from before torch.jit.script, torch.jit.trace or"
                " torch.compile"
            )
    own: Any = getattr(module, "signature", None)
    if hasattr(own, "param_dict"):  # PyG's Sequential
        return [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in own.param_dict]
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise Unfit("it has no forward; write one that returns a row of logits for each vertex")
    found: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind == parameter.VAR_POSITIONAL and is_features(name):  # DGL's Sequential
            parameter = parameter.replace(kind=parameter.POSITIONAL_ONLY)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if not found and parameter.kind == parameter.VAR_POSITIONAL:
                raise Unfit(f"forward takes *{name}; name what it takes, as x and edge_index")
            continue
        found.append(parameter)
    if not found:
        raise Unfit(
            "forward takes nothing; let it take x and edge_index: a rank has a part of them"
        )
    return found


@cache
def _drawn_edges(
    vertices: int, directed: bool
) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Draw the edges of a `Small`; return their CSR and the generator that has drawn them."""
    draw = np.random.default_rng(vertices)
    dense = draw.random((vertices, vertices)) < 1.5 / vertices
    dense[np.arange(vertices), (np.arange(vertices) + 1) % vertices] = True
    # Many edges into vertex 1, of which a module may leave out some. Fewer than 64, which tables
    # by degree hold.
    dense[1, : 2 * HUB : 2] = True
    dense[0, :] = False  # vertex 0 has no edges into it
    if not directed:
        dense[:, 0] = False
        dense |= dense.T
    np.fill_diagonal(dense, False)
    sources = np.nonzero(dense)[1].astype(np.int32)
    return offsets(dense.sum(1)), sources, draw


class Small:
    """A random graph with so many vertices and such fields, and the inputs that a module takes of
    it. Raises Unfit if the module asks for something else."""

    def __init__(self, vertices: int, module: nn.Module, graph: GraphFields) -> None:
        own = [p.shape for p in (*module.parameters(), *module.buffers()) if not is_lazy(p)]
        sizes = {graph.features, graph.classes, *(size for shape in own for size in shape)}
        vertices = next(n for n in count(vertices) if n not in sizes)
        indptr, sources, draw = copy.deepcopy(_drawn_edges(vertices, graph.directed))
        self.vertices, self.graph, self.binding = vertices, graph, bound(module, graph)
        self.module, self.adds_loops = module, False
        self.fields = {"x": draw.standard_normal((vertices, graph.features))}
        self.fields |= {n: _drawn(draw, vertices, *shape) for n, shape in graph.vertex.items()}
        on_edges = {name: _drawn(draw, len(sources), *shape) for name, shape in graph.edge.items()}
        self.whole = CsrEdges(indptr, sources, on_edges)
        # PARTS parts, none of which reads all vertices
        self.parts = torch.from_numpy(draw.permutation(vertices)).tensor_split(PARTS)
        if "g" in self.binding.inputs:
            blocks = self._blocks_taken()
            # a DGL convolution may refuse vertices without edges: users add self-loops then
            if self.adds_loops or not blocks:
                self.whole = replace(self.whole, loops=True)
                blocks = self._blocks_taken()
            self.binding = replace(self.binding, blocks=blocks or 1)

    def _blocks_taken(self) -> int:
        """Return the number of blocks that `forward` takes; 1 for a graph; 0: it fails on any.

        That is the largest number that works, or the number from which more blocks change nothing,
        since `forward` has no layers for them."""
        module = copied(self.module).eval()
        weights = [weight for weight in module.parameters() if not is_lazy(weight)]
        values = self.given(weights[0].dtype if weights else torch.float32)
        most = MOST_BLOCKS if "blocks" in self.binding.takes.values() else 1
        taken, before = 0, torch.empty(0)

        def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.adds_loops |= function.__name__ == "add_self_loop"
            return function(*args, **kwargs)

        quietly = warnings.catch_warnings(action="ignore")
        with torch.no_grad(), quietly, graphs_by(self.module, noted):
            for weight in weights:
                weight.add_(0.1)  # so that a layer whose weights are 0 at first changes rows
            for blocks in range(1, most + 1):
                try:
                    output = replace(self.binding, blocks=blocks).call(module, values)
                    is_finite = bool(output.isfinite().all())  # a degree of 0 may divide
                except (Exception, SystemExit):
                    if taken:
                        break
                    continue
                if taken and torch.equal(before, output):
                    break
                taken, before = (blocks if is_finite else 0), output
        return taken

    @cached_property
    def larger(self) -> Small:
        """A graph with many vertices, on which `forward` must make the same calls."""
        return Small(MANY_VERTICES, self.module, self.graph)

    def given(self, dtype: torch.dtype, is_recorded: bool = False) -> dict[str, Any]:
        """Return the inputs of `forward` by name, in new tensors.

        is_recorded: a DGL graph has the self-loops that `forward` adds."""
        loops = self.whole.loops and (is_recorded or not self.adds_loops)
        whole, names = replace(self.whole, loops=loops), self.binding.inputs
        on_edges = {name: typed(field, dtype) for name, field in whole.fields.items()}
        values = inputs_on(whole, edge_index_of(whole), on_edges, names)
        values |= {f"vertex {name}": typed(rows, dtype) for name, rows in self.fields.items()}
        if "g" in names:
            values["g"].ndata.update(rows_of(values))
        return {name: values[name] for name in names}


def block_of(whole: CsrEdges, own: Tensor) -> Block:
    """Return the edges into some vertices, which are the first sources of the block."""
    rows = sp.csr_matrix((whole.indices, whole.indices, whole.indptr))[own.numpy()]
    source = np.concatenate([own.numpy(), np.setdiff1d(rows.indices, own.numpy())])
    place = np.zeros(whole.vertices, dtype=np.int32)
    place[source] = np.arange(source.size)
    block = Block(rows.indptr, place[rows.indices], source.size)
    block.source, block.graph_edges = torch.from_numpy(source), whole
    return block


def _drawn(
    draw: np.random.Generator, rows: int, sizes: tuple[int, ...], kind: str, kinds: int
) -> np.ndarray:
    """Return a random field; kind: the numpy type, kinds: the number of values of integers."""
    if np.dtype(kind).kind in "iu":
        numbers = draw.integers(0, kinds, (rows, *sizes))
        if EACH * kinds <= rows and np.bincount(numbers.ravel(), minlength=kinds).min() < EACH:
            # a module may select the edges of one kind, and an empty selection has no size
            numbers = np.resize(draw.permutation(rows) % kinds, (*sizes, rows)).T
        if 0 < kinds <= rows:
            numbers.flat[0] = kinds - 1  # a module may ask for the largest
        return numbers.reshape(rows, *sizes).astype(kind)
    if np.dtype(kind).kind == "b":
        return draw.random((rows, *sizes)) < 0.5
    return draw.random((rows, *sizes)) + 0.25
