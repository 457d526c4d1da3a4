"""What a user may say of a GNN and its training: each field with its rule, default and meaning.

The command line's options, the keywords of `gnnplan.plan` and the table of
docs/reference/files.md are made of these fields. Which of them go together is in workload.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from gnnplan.planner.vocabulary.spec import Spec

FANOUT = 10  # per layer, if the user gives none
MOST = 10**12  # vertices, seeds of a batch, epochs
MOST_NEGATIVES = 10_000  # of an edge
MOST_LAYERS = 1000  # a plan of so many takes half a minute
Weights = tuple[Annotated[float, Field(ge=0.0, le=1e9)], ...]


class Fields(Spec):
    """The fields of a workload, which mean what is said below them.

    Where the default is None, [default: ...] says what that means."""

    model_config = ConfigDict(defer_build=True)  # until it is used; of these a Workload is made

    model: Literal["gcn", "sage", "gcnii", "gat", "resgcn", "sgc", "gin", "gatv2", "own"] = "sage"
    """gcn, sage, gcnii, gat, gatv2, gin, resgcn or sgc; or your own module of torch_geometric.nn or
    dgl.nn convolutions, as model.py:MyGNN, or layer, as layer.py:MyLayer. That file is executed,
    here and by every rank."""
    layers: int = Field(3, ge=1, le=MOST_LAYERS)
    """GNN layers."""
    hidden: int = Field(256, ge=1, le=1_000_000)  # SGC has no hidden rows: all are classes wide
    """Hidden width."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout before every layer."""
    mode: Literal["full", "mini"] = "full"
    """full (full graph) or mini (mini-batch). A plan for GPUs compares both where none is named."""
    batch: int = Field(1024, ge=1, le=MOST)
    """Mini-batch size over all ranks together."""
    fanout: tuple[Annotated[int, Field(ge=1, le=MOST)], ...] | Literal["full"] | None = None
    """Neighbours per layer from the seeds outwards, as 15,10 or full.  [default: 10 each]"""
    task: Literal["node", "link"] = "node"
    """What is learned: node (labels of vertices) or link (which vertices an edge links; with
    `mode` mini, a batch is of edges)."""
    negatives: int = Field(1, ge=1, le=MOST_NEGATIVES)
    """Of `task` link: vertices that an edge is told from."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of weights, dropout, batches and draws. With an exact strategy, the same seed trains the same
    on any number of ranks."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """adam, adamw or sgd, as torch.optim has them, with its betas and epsilon."""
    lr: float = Field(0.01, gt=0.0, le=100.0)
    """Learning rate."""
    # times the weight: added to its gradient, or by adamw taken off the weight
    weight_decay: float | None = Field(None, ge=0.0, le=100.0)
    """Of the optimizer.  [default: 0.01 for adamw, else 0]"""
    momentum: float = Field(0.0, ge=0.0, lt=1.0)
    """Of sgd."""
    warmup: int = Field(0, ge=0, le=MOST)
    """First epochs, in which the learning rate rises to `lr` in equal steps."""
    schedule: Literal["constant", "step", "cosine"] = "constant"
    """constant, step or cosine: how the learning rate falls after `warmup`. step: times
    `gamma` every `step_size` epochs. cosine: along half a cosine to 0 at the end of `epochs`, so a
    run may not have more."""
    step_size: int = Field(30, ge=1, le=MOST)
    """Epochs, of `schedule` step."""
    gamma: float = Field(0.1, gt=0.0, le=1.0)
    """Of `schedule` step."""
    class_weights: Weights | Literal["balanced"] | None = None
    """What classes count in the loss of one label, as 1,2.5, or balanced, inversely to their
    training vertices; the mean is over what they count, as in torch's cross_entropy(weight=).
    [default: 1]"""
    loss: Literal["mse", "mae"] | None = None
    """mse or mae (the absolute error), of numbers (regression).  [default: mse]"""
    metric: Literal["accuracy", "f1_micro", "f1_macro", "roc_auc", "mae", "auc"] | None = None
    """What is measured: accuracy, f1_macro or roc_auc; with several labels per vertex f1_micro,
    f1_macro or roc_auc; of numbers mae; of links auc.  [default: the first of these]"""
    clip: float | None = Field(None, gt=0.0, le=1e9)
    """Shorten longer gradients of all ranks' parameters to this norm, as
    torch.nn.utils.clip_grad_norm_ does.  [default: never]"""
    patience: int | None = Field(None, ge=1, le=MOST)
    """End after so many epochs without a better score of validation, looked at when an epoch is
    evaluated, with the best epoch's weights.  [default: train all epochs]"""
    epochs: int = Field(50, ge=1, le=MOST)
    """Epochs that a run trains. Of a plan for GPUs that does not say: as many as in print."""
    dtype: Literal["float32", "float64", "bfloat16", "tf32"] = "float32"
    """Of rows: float32; tf32, whose products GPUs round and make several times as fast; float64; or
    bfloat16, half the bytes and memory, with weights in float32. Of a plan also auto, which
    compares float32 and bfloat16, and takes bfloat16 only where it is surely faster or alone
    fits."""
    alpha: float = Field(0.1, ge=0.0, le=1.0)
    """Of gcnii: strength of the initial residual."""
    theta: float = Field(0.5, gt=0.0, le=1e6)
    """Of gcnii: layer l has log(theta / l + 1) of its identity mapping."""
    heads: int = Field(4, ge=1, le=10_000)
    """Of gat and gatv2, in hidden layers; the last layer has one."""
    aggregation: Literal["softmax", "sum"] = "softmax"
    """Of resgcn: softmax or sum."""
    norm: Literal["none", "layer", "batch"] | None = None
    """none, layer or batch, before the activation of hidden layers.  [default: layer for resgcn,
    else none]"""
