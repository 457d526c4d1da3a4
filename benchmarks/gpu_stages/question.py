"""The trainings of stages, and the cluster that they are planned for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.problem.inputs import read_cluster
from gpu_stages.record import Setting

GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
SMALL = "synthetic:community?vertices=300&edges=3000&features=12&classes=4&seed=0"


def graph(setting: Setting) -> str:
    """The graph, as `gnnplan plan --graph` takes it."""
    return SMALL if setting.small else GRAPH


def workload(setting: Setting, **more: Any) -> dict[str, Any]:
    """GraphSAGE 3 x 256 with dropout, or a little of it; it learns so slowly that rounding does not
    change its way."""
    hidden = 8 if setting.small else 256
    fixed = {"model": "sage", "layers": 3, "dropout": 0.5, "seed": 3, "lr": 1e-3}
    return {**fixed, "hidden": hidden, **more}


def of_module(name: str, **more: Any) -> dict[str, Any]:
    """A workload of a module of modules.py, as it is."""
    path = Path(__file__).with_name("modules.py")
    return {"model": f"{path}:{name}", "seed": 3, "lr": 1e-3, **more}


def batches(setting: Setting) -> dict[str, Any]:
    """Fields of a workload that make it one of mini-batches."""
    batch, fanout = (32, (3, 3, 3)) if setting.small else (1024, (15, 10, 5))
    return {"mode": "mini", "batch": batch, "fanout": fanout}


def cluster(setting: Setting, ranks: int, servers: int = 1, **of_device: Any) -> Cluster:
    """`ranks` of this device on every server; of_device: fields of the device that are others.

    Constants are those that the stage `measure` has left, or else a datasheet's.
    """
    measured = setting.out / "cluster.yaml"
    found = read_cluster(str(measured) if measured.exists() else "dgx_h100")
    device = found.device.model_copy(update={"kind": setting.device, **of_device})
    update = {"servers": servers, "gpus_per_server": ranks, "device": device}
    if not measured.exists():  # of a preset whose links are of other servers
        link = {"bandwidth": "20GB/s", "latency": "20us"}
        return Cluster(**update, intra_node=link, inter_node=link)
    return found.model_copy(update=update)
