"""The meaning of the names of parameters, as PyG, DGL and their examples call them.

`forward` receives a graph by these names; a class or function that makes a module receives widths
and fields of a workload."""

from __future__ import annotations

from collections.abc import Collection

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
