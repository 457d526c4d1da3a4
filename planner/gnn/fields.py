"""The fields of a workload (a GNN and its training), each with its rule, default and meaning.

The options of the command line, the keywords of `gnnplan.plan` and the table in
docs/reference/files.md are generated from these fields. workload.py checks their combinations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gnnplan.planner.vocabulary.spec import Spec

FANOUT = 10  # default fanout per layer
MOST = 10**12  # upper bound of vertices, seeds of a batch, epochs
MOST_NEGATIVES = 10_000  # negatives per edge
MOST_LAYERS = 1000  # a plan for 1000 layers takes half a minute
# other names in use, in lower case with _ -> the name of a field's value (files.meant)
USUAL = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    "graphsage": "sage",
    **dict.fromkeys(("minibatch", "mini_batch"), "mini"),
    **dict.fromkeys(("fullgraph", "full_graph", "full_batch"), "full"),
    **{"acc": "accuracy", "micro_f1": "f1_micro", "macro_f1": "f1_macro", "auroc": "roc_auc"},
    **{"l1": "mae", "l2": "mse"},
    **{"batchnorm": "batch", "layernorm": "layer"},
}
# field -> another field and its values; no part reads the field if the other has another value
READ_WITH = {
    "alpha": ("model", ("gcnii",)),
    "theta": ("model", ("gcnii",)),
    "heads": ("model", ("gat", "gatv2", "own")),
    "aggregation": ("model", ("resgcn",)),
    "batch": ("mode", ("mini",)),
    "fanout": ("mode", ("mini",)),
    "negatives": ("task", ("link",)),
    "step_size": ("schedule", ("step",)),
    "gamma": ("schedule", ("step",)),
}
Weights = tuple[Annotated[float, Field(ge=0.0, le=1e9)], ...]


class Fields(Spec):
    """The fields of a workload, each with its meaning in the text below it.

    If a default is None, [default: ...] in the text gives the effective value."""

    model_config = ConfigDict(defer_build=True)  # only the subclass Workload is instantiated

    model: Literal["gcn", "sage", "gcnii", "gat", "resgcn", "sgc", "gin", "gatv2", "own"] = "sage"
    """gcn, sage, gcnii, gat, gatv2, gin, resgcn or sgc; or your own module of torch_geometric.nn or
    dgl.nn convolutions, as model.py:MyGNN; or your own layer, as layer.py:MyLayer. The planner and
    every rank execute that file."""
    layers: int = Field(3, ge=1, le=MOST_LAYERS)
    """GNN layers."""
    hidden: int = Field(256, ge=1, le=1_000_000)  # unused by SGC, whose rows are classes wide
    """Hidden width."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout before every layer."""
    mode: Literal["full", "mini"] = "full"
    """full (full graph) or mini (mini-batch). By default, a plan for GPUs compares both."""
    batch: int = Field(1024, ge=1, le=MOST)
    """Mini-batch size over all ranks together."""
    fanout: tuple[Annotated[int, Field(ge=1, le=MOST)], ...] | Literal["full"] | None = None
    """Neighbours per layer from the seeds outwards, as 15,10 or full.  [default: 10 each]"""
    task: Literal["node", "link"] = "node"
    """What is learned: node (labels of vertices) or link (which vertices an edge links; with
    `mode` mini, a batch is of edges)."""
    negatives: int = Field(1, ge=1, le=MOST_NEGATIVES)
    """Negative samples per edge, for `task` link."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of weights, dropout, batches and sampling. With an exact strategy, the same seed trains
    the same model on any number of ranks."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam, adamw or sgd, as in torch.optim, with its default betas and epsilon."""
    lr: float = Field(0.01, gt=0.0, le=100.0)
    """Learning rate."""
    # factor of the weight that is added to its gradient; adamw subtracts it from the weight
    weight_decay: float | None = Field(None, ge=0.0, le=100.0)
    """Weight decay of the optimizer.  [default: 0.01 for adamw, else 0]"""
    momentum: float = Field(0.0, ge=0.0, lt=1.0)
    """Momentum of sgd."""
    warmup: int = Field(0, ge=0, le=MOST)
    """Number of first epochs in which the learning rate rises to `lr` in equal steps."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """constant, step or cosine: the learning rate after `warmup`. step: times `gamma` every
    `step_size` epochs. cosine: along half a cosine to 0 at the end of `epochs`, so a run cannot
    train more epochs."""
    step_size: int = Field(30, ge=1, le=MOST)
    """Epochs between two steps of `schedule` step."""
    gamma: float = Field(0.1, gt=0.0, le=1.0)
    """Factor on the learning rate in `schedule` step."""
    class_weights: Weights | Literal["balanced"] | None = None
    """Weight of each class in the loss, as 1,2.5, or balanced (inversely proportional to the
    class's training vertices), for one label per vertex; the loss is a weighted mean, as in torch's
    cross_entropy(weight=).  [default: 1]"""
    loss: Literal["mse", "mae"] | None = None
    """Loss of a regression: mse (squared error) or mae (absolute error).  [default: mse]"""
    metric: Literal["accuracy", "f1_micro", "f1_macro", "roc_auc", "mae", "auc"] | None = None
    """Metric of scores: accuracy, f1_macro or roc_auc; with several labels per vertex f1_micro,
    f1_macro or roc_auc; for numbers mae; for links auc.  [default: the first of these]"""
    clip: float | None = Field(None, gt=0.0, le=1e9)
    """Clip the gradient of all parameters of all ranks to this norm, as
    torch.nn.utils.clip_grad_norm_ does.  [default: never]"""
    patience: int | None = Field(None, ge=1, le=MOST)
    """Early stopping: end after so many epochs without a better validation score, checked at each
    evaluation, and keep the weights of the best epoch.  [default: train all epochs]"""
    epochs: int = Field(50, ge=1, le=MOST)
    """Number of epochs. By default, a plan for GPUs takes the number that papers print."""
    dtype: Literal["float32", "float64", "bfloat16", "tf32"] = "float32"
    """Number format of rows: float32; tf32, in which GPUs multiply rounded numbers several times as
    fast; float64; or bfloat16, with half the bytes and memory, and weights in float32. A plan also
    accepts auto, which compares float32 and bfloat16, and takes bfloat16 only if it is surely
    faster, or if nothing else fits."""
    alpha: float = Field(0.1, ge=0.0, le=1.0)
    """Strength of the initial residual of gcnii."""
    theta: float = Field(0.5, gt=0.0, le=1e6)
    """Identity mapping of gcnii: its strength in layer l is log(theta / l + 1)."""
    heads: int = Field(4, ge=1, le=10_000)
    """Attention heads of gat and gatv2 in hidden layers; the last layer has one."""
    aggregation: Literal["softmax", "sum"] = "softmax"
    """Aggregation of resgcn: softmax or sum."""
    norm: Literal["none", "layer", "batch"] | None = None
    """none, layer or batch, before the activation of hidden layers.  [default: layer for resgcn,
    else none]"""
