"""A Kubernetes manifest of a plan: an Indexed Job with a pod per server, and a headless Service.

The Service gives pods names, and the first pod's name is where all meet. The plan travels in a
ConfigMap."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

import yaml

from gnnplan import __version__
from gnnplan.executor.emit.launch import Launch
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes

PORT = 29500
MOST = 1_000_000  # [B] of a ConfigMap; Kubernetes allows 1 MiB with its metadata
RUNS, DATA = "gnnplan-runs", "gnnplan-data"  # claims
# An argument of the script stands for more options of `gnnplan run`.
SCRIPT = """\
exec torchrun --nnodes {servers} --node-rank "$JOB_COMPLETION_INDEX" --nproc-per-node {ranks} \\
  --master-addr {name}-0.{name} --master-port {port} \\
  -m gnnplan run /plan/plan.json --out /runs/{name} "$@"
"""


def kubernetes(launch: Launch, document: dict[str, Any], image: str | None) -> str:
    """The manifest. Raises SpecError where the plan is too large for a ConfigMap."""
    text = json.dumps(document, indent=1)
    if len(text) > MOST:
        raise SpecError(
            f"{launch.plan}: takes {show_bytes(len(text))}, and a ConfigMap holds"
            f" {show_bytes(MOST)}; use --for torchrun in pods of your own"
        )
    image = image or f"gnnplan:{__version__}"
    folders = sorted({str(file.parent) for file in launch.files})
    if any(PurePosixPath(folder).parts[1:2] == () for folder in folders):
        raise SpecError(
            f"{launch.plan}: the graph lies in the root folder, where no volume can be mounted;"
            " move it into a folder and plan again"
        )
    header = launch.header(
        "kubernetes",
        f"the image {image}, with gnnplan and torchrun on its path",
        f"a PersistentVolumeClaim {RUNS} that all pods can write; the run goes into {launch.name}/",
        *(
            [
                f"a PersistentVolumeClaim {DATA} with "
                + " and ".join(f"what {folder} holds here in {folder[1:]}" for folder in folders)
            ]
            if folders
            else []
        ),
        "a pod per node, and nobody else's work on these nodes",
        usage="Start it with: kubectl create -f FILE, and watch it with:"
        f" kubectl logs -f job/{launch.name}\n"
        "Further options of `gnnplan run` go into `args`, after the word run.",
    )
    metadata = {"name": launch.name, "labels": {"app.kubernetes.io/name": "gnnplan"}}
    documents: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"plan.json": text},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # ranks meet before anything is ready
                "selector": {"job-name": launch.name},
                "ports": [{"name": "torchrun", "port": PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {
                "completionMode": "Indexed",
                "completions": launch.servers,
                "parallelism": launch.servers,
                "backoffLimit": 0,
                "template": {"spec": _pod(launch, image, folders)},
            },
        },
    ]
    return header + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, explicit_start=True)


def _pod(launch: Launch, image: str, folders: list[str]) -> dict[str, Any]:
    unit = {"nvidia.com/gpu": launch.gpus} if launch.gpus else {"cpu": launch.ranks}
    container = {
        "name": "gnnplan",
        "image": image,
        "command": [
            "bash",
            "-c",
            SCRIPT.format(servers=launch.servers, ranks=launch.ranks, name=launch.name, port=PORT),
        ],
        "args": ["run"],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": "1"},
            {"name": "PYTHONSAFEPATH", "value": "1"},
        ],
        "resources": {"limits" if launch.gpus else "requests": unit},
        "volumeMounts": [
            {"name": "plan", "mountPath": "/plan"},
            {"name": "runs", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": "data", "mountPath": folder, "subPath": folder[1:], "readOnly": True}
                for folder in folders
            ),
        ],
    }
    pod: dict[str, Any] = {
        "subdomain": launch.name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [
            {"name": "plan", "configMap": {"name": launch.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": RUNS}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's; the default is 64 MB
            *([{"name": "data", "persistentVolumeClaim": {"claimName": DATA}}] if folders else []),
        ],
    }
    if launch.servers > 1:
        term = {
            "labelSelector": {"matchLabels": {"job-name": launch.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        pod["affinity"] = {
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        }
    return pod


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks of lines, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> yaml.ScalarNode:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
