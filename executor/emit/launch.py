"""Launch files of a plan: bash scripts for torchrun and Slurm, and a Kubernetes manifest.

The manifest is an Indexed Job with a pod per server, and a headless Service, which gives the pods
host names: ranks meet at the first pod. A ConfigMap carries the plan."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import Template
from textwrap import indent
from urllib.parse import parse_qsl

import yaml

from gnnplan import __version__
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.plan import chosen, placement
from gnnplan.planner.graph.load import FILE_OPTIONS, well_known
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_time

PORT = 29500
MOST = 1_000_000  # [B] of a ConfigMap's data; Kubernetes allows 1 MiB with metadata
RUNS, DATA = "gnnplan-runs", "gnnplan-data"  # names of PersistentVolumeClaims
LONGEST_NAME = 40  # characters; Kubernetes allows 63 with the suffixes that it adds
# `args` takes more options of `gnnplan run`. Ranks meet before pods are ready, so the Service
# publishes their addresses earlier. NCCL needs more shared memory than a pod's default of 64 MB.
MANIFEST = Template(Path(__file__).with_name("manifest.yaml").read_text())
# `--resume DIR` goes on with the plan in DIR, so the file's own plan and folder are left out
START = 'case " $*" in *" --resume"*) ;; *) set -- PLAN --out OUT "$@" ;; esac'
MOUNT = """\
        - name: data
          mountPath: {}
          subPath: {}
          readOnly: true
"""
VOLUME = f"""\
      - name: data
        persistentVolumeClaim:
          claimName: {DATA}
"""
APART = """\
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - labelSelector:
              matchLabels:
                job-name: {}
            topologyKey: kubernetes.io/hostname
"""


@dataclass(frozen=True)
class Launch:
    """The facts of a plan that a launch file needs."""

    plan: Path
    name: str  # the job's name: lower-case letters, digits and dashes
    strategy: str
    servers: int
    ranks: int  # per server
    gpus: int  # per server, used or not; 0: ranks on CPUs
    epoch_s: float  # predicted seconds of an epoch
    files: tuple[Path, ...]  # files of the graph, and of the user's model

    @classmethod
    def of(cls, path: Path, document: Json) -> Launch:
        """Read a plan's document. Raises SpecError if no launch file can start it."""
        about, cluster = document["graph"], Cluster.model_validate(document["cluster"])
        head, _, query = about["source"].partition("?")
        if not about.get("known", True) or well_known(head):
            raise SpecError(
                f"{path}: the graph {head} is known by statistics only and cannot be trained; plan"
                " with a graph file"
            )
        per_server = Counter(gpu // cluster.gpus_per_server for gpu in placement(document))
        if len(set(per_server.values())) > 1:
            raise SpecError(
                f"{path}: servers have {', '.join(map(str, per_server.values()))} ranks, and"
                " launchers start equally many on each; plan again"
            )
        files = [] if head.startswith("synthetic:") else [head]
        files += [value for name, value in parse_qsl(query) if name in FILE_OPTIONS and value]
        if module := document["workload"].get("module"):
            files.append(module["file"])
        path = path.resolve()
        for file in (str(path), *files):
            if not file.isprintable():
                raise SpecError(f"{file!r}: a launch file cannot name it; rename it and plan again")
        strategy = chosen(document)
        graph = Path(head).stem.removeprefix("synthetic:")
        return cls(
            path,
            _name(f"{graph}-{strategy.name}"),
            str(strategy),
            len(per_server),
            next(iter(per_server.values())),
            0 if cluster.device.kind == "cpu" else cluster.gpus_per_server,
            float(document["best"]["predicted"]["epoch_s"]),
            tuple(Path(file) for file in files if not file.isdecimal()),
        )

    def header(self, target: str, *assumptions: str, usage: str) -> str:
        """Return a launch file's first comment: what it starts, its usage and its assumptions."""
        where = show_count(self.ranks, "rank")
        where += f" on each of {self.servers} servers" if self.servers > 1 else " of one server"
        lines = [
            f"{self.strategy} on {where}; {show_time(self.epoch_s)} per epoch predicted.",
            f"Written by `gnnplan emit --for {target}` (gnnplan {__version__}).",
            "",
            *usage.splitlines(),
            "",
            "It assumes",
            *(f"- {line}" for line in assumptions),
        ]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)

    def where_files_lie(self) -> list[str]:
        """Return the assumptions about where the plan, the graph and the model are stored."""
        lines = [f"the plan in {self.plan}"]
        if self.files:
            lines.append(f"where the plan says: {', '.join(map(str, self.files))}")
        return lines


def _name(text: str) -> str:
    """Return a job's name for Kubernetes: lower-case letters, digits and dashes, a letter first.

    >>> _name("3D mesh_2-pipegcn")
    'd-mesh-2-pipegcn'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())[-LONGEST_NAME:]
    return re.sub(r"^[^a-z]+|-+$", "", plain)


def torchrun(launch: Launch) -> str:
    """Return a bash script that starts the ranks of a server with torchrun."""
    several = launch.servers > 1
    usage = "Start it with: bash FILE [more options of gnnplan run]"
    if several:
        usage = (
            f"Start it on each of {launch.servers} servers, with its number NODE_RANK from 0 and"
            " the first server's\naddress:\n"
            "    MASTER_ADDR=first-server NODE_RANK=0 bash FILE [more options of gnnplan run]"
        )
    assumptions = [
        "gnnplan in the environment of the `torchrun` that is found first",
        *launch.where_files_lie(),
    ]
    if launch.gpus:
        assumptions.append(f"{launch.gpus} GPUs that nobody else uses, on each server")
    if several:
        assumptions += [
            "port MASTER_PORT (29500) of the first server, reachable by all; no common disk",
        ]
    where = "--standalone --local-addr 127.0.0.1"  # the server's own name may not resolve
    if several:
        where = (
            f'--nnodes {launch.servers} --node-rank "${{NODE_RANK:?is the number of this server}}"'
            ' \\\n    --master-addr "${MASTER_ADDR:?is the address of server 0}"'
            ' --master-port "${MASTER_PORT:-29500}"'
        )
    return (
        "#!/usr/bin/env bash\n"
        + launch.header("torchrun", *assumptions, usage=usage)
        + _settings(launch, f"runs/{launch.name}")
        + f"exec torchrun {where} \\\n    --nproc-per-node {launch.ranks}"
        + ' -m gnnplan run "$@"\n'
    )


def slurm(launch: Launch) -> str:
    """Return an sbatch script that starts all ranks with srun."""
    asked = [
        f"--job-name={launch.name}",
        f"--nodes={launch.servers}",
        f"--ntasks-per-node={launch.ranks}",
        *([f"--gpus-per-node={launch.gpus}"] if launch.gpus else []),
        "--exclusive",
        "--output=%x-%j.log",
    ]
    header = launch.header(
        "slurm",
        "gnnplan in the environment of the `python` that is found first",
        *launch.where_files_lie(),
        "a folder runs/ on a disk of all servers, or one on each: the run goes there",
        usage="Submit it with: sbatch FILE [more options of gnnplan run]\n"
        "Add what your cluster asks for: sbatch --partition=.. --account=.. --time=.. FILE",
    )
    return (
        "#!/usr/bin/env bash\n"
        + "".join(f"#SBATCH {line}\n" for line in asked)
        + "#\n"
        + header
        + _settings(launch, f"runs/{launch.name}-", "$SLURM_JOB_ID")
        + 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\n"
        "export MASTER_ADDR MASTER_PORT\n"
        'exec srun --kill-on-bad-exit=1 python -m gnnplan run "$@"\n'
    )


def _settings(launch: Launch, out: str, more: str = "") -> str:
    """Return the variables of both scripts; more: appended to the folder's name, as bash code."""
    return (
        "set -euo pipefail\n"
        f"plan={shlex.quote(str(launch.plan))}\n"
        f"out={shlex.quote(out)}{more}  # must not hold a run yet\n"
        + START.replace("PLAN", '"$plan"').replace("OUT", '"$out"')
        + "\n"
        # PYTHONSAFEPATH: a folder named gnnplan in the working directory must not hide the package
        "export PYTHONSAFEPATH=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}\n"
    )


def kubernetes(launch: Launch, document: Json, image: str | None) -> str:
    """Return the manifest. Raises SpecError if the plan is too large for a ConfigMap."""
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
    asked = f"limits:\n            nvidia.com/gpu: {launch.gpus}"
    if not launch.gpus:
        asked = f"requests:\n            cpu: {launch.ranks}"
    return header + MANIFEST.substitute(
        name=launch.name,
        plan=indent(text, 4 * " "),
        port=PORT,
        servers=launch.servers,
        ranks=launch.ranks,
        image=_scalar(image),
        start=START.replace("PLAN", "/plan/plan.json").replace("OUT", f"/runs/{launch.name}"),
        asked=asked,
        mounts="".join(MOUNT.format(_scalar(each), _scalar(each[1:])) for each in folders),
        runs=RUNS,
        data=VOLUME * bool(folders),
        apart=APART.format(launch.name) * (launch.servers > 1),
    )


def _scalar(text: str) -> str:
    """Quote a text as a YAML scalar on one line."""
    return yaml.safe_dump(text, width=len(text) * 2 + 80).partition("\n")[0]
