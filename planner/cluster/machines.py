"""Servers that nobody measured: those of clouds, and this machine's GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import quoted, read_yaml

# -- cloud instance types --------------------------------------------------------------------------

# Servers by the names of their cloud instance types: `--cluster p4d.24xlarge?servers=2`.
#
# traces/quoted/clouds.csv has a row per instance type: the preset with the same device and the same
# links inside a server, the number of GPUs and NICs, Gbit/s of all NICs together, memory and vCPUs
# of the host, the list price with date and source, and the fields of the device that differ. Rates
# are datasheet rates times the same cautious efficiencies as in presets. Prices change:
# `?price=2.20` sets the dollars that you pay per GPU and hour.


REACHED = 0.75  # bandwidth that programs reach, as a share of a link's datasheet bandwidth
USABLE = 0.9  # usable share of a host's memory, and of a GPU's, as in presets
THREADS = 2  # vCPUs per core


def instance_types() -> list[str]:
    """Return the names of all known instance types."""
    return [row["name"] for row in quoted("clouds.csv")]


def fields_of(name: str, base: Cluster) -> dict[str, Any]:
    """Return the cluster fields of an instance type; `base` is the preset named by `base_of`."""
    row = _row(name)
    gpus, nics, gbit = int(row["gpus"]), int(row["nics"]), float(row["gbit_per_s"])
    device = dict(field.split("=") for field in row["device"].split(";") if field)
    per_nic = gpus // nics
    rate = gbit / 8 / nics * REACHED
    sources = {
        "inter_node.bandwidth": f"datasheet {gbit:g} Gbit/s of {nics} NICs together x {REACHED:g}",
        "inter_node.latency": "assumed",
        "host_memory": f"datasheet {row['host_gib']} GiB x {USABLE:g}",
        "cores": f"datasheet {row['vcpus']} vCPUs / {THREADS}",
        "price": f"printed list price {row['priced']}: ${row['dollars_per_hour']} an hour,"
        f" {row['price_source']}",
        **{f"device.{field}": "datasheet" for field in device if field != "name"},
    }
    # these fields depend on the software of the preset's testbed
    dropped = {"host_rates", "host_slowdown", "device_rates", "sampler"}
    of_base = {field: text for field, text in base.provenance.items() if field not in dropped}
    return {
        **base.model_dump(exclude=dropped),
        "servers": 1,
        "gpus_per_server": gpus,
        "islands": [range(gpus)] if base.islands else [],
        "name": name,
        "device": {**base.device.model_dump(), **device},
        "nics": [range(nic * per_nic, (nic + 1) * per_nic) for nic in range(nics)],
        "inter_node": {"bandwidth": f"{rate}GB/s", "latency": f"{row['latency_us']}us"},
        "host_memory": f"{float(row['host_gib']) * USABLE}GiB",
        "cores": int(row["vcpus"]) // THREADS,
        "price": float(row["dollars_per_hour"]) / gpus,
        "provenance": of_base | sources,
    }


def base_of(name: str) -> str:
    """Return the name of the preset that has an instance type's device and links."""
    return _row(name)["base"]


def _row(name: str) -> dict[str, str]:
    return next(row for row in quoted("clouds.csv") if row["name"] == name)


# -- this machine's GPUs ---------------------------------------------------------------------------


UNKNOWN = "l4_box"  # preset with the rates of unknown GPU models: few GPUs are slower than an L4


def gpus_here() -> Cluster | None:
    """Return one server with the GPUs that CUDA_VISIBLE_DEVICES names; None without any GPU.

    Rates and links are those of the preset with the same GPU model, or else of UNKNOWN.
    """
    queried = _nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    found = _visible([line.rsplit(", ", 1) for line in queried.splitlines() if ", " in line])
    if not found:
        return None
    count, (name, memory) = len(found), found[0]
    base = next((each for each in _presets() if _model(each.device.name) == _model(name)), None)
    if base is not None:
        provenance = dict(base.provenance)
    else:
        base = next(each for each in _presets() if each.name == UNKNOWN)
        provenance = dict.fromkeys(base.provenance, f"generic default ({base.device.name})")
    update: dict[str, object] = {"name": name}
    if memory.isdigit():
        update["memory"] = USABLE * int(memory) * 2**20
        provenance["device.memory"] = f"nvidia-smi, x {USABLE}"
    one_server = {"servers": 1, "gpus_per_server": count, "islands": (), "switches": (), "nics": ()}
    device = base.device.model_copy(update=update)
    cluster = base.model_copy(
        update={
            "name": "local",
            "device": device,
            "cores": os.cpu_count(),
            "provenance": {**provenance, "cores": "counted"},
            **one_server,
        }
    )
    unwired = cluster.model_copy(update={"island": None, "switch": None})
    return (count > 1 and _wired(cluster)) or unwired


def _visible(found: list[list[str]]) -> list[list[str]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, up to the first invalid name, as '-1'."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return found
    visible = []
    for name in names.split(","):
        number = name.strip()
        if number.isdigit() and int(number) < len(found):
            visible.append(found[int(number)])
        elif number.startswith(("GPU-", "MIG-")):
            visible.append(found[0])
        else:
            break
    return visible


def _wired(cluster: Cluster) -> Cluster | None:
    """Return the cluster with the islands, switches and NICs that `nvidia-smi topo -m` prints.

    Return None if its table cannot be read, or has another number of GPUs.
    """
    from gnnplan.planner.cluster.readings import read  # takes long to import

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nvidia-smi topo -m"
        path.write_text(_nvidia_smi("topo", "-m"), "utf-8")
        with suppress(SpecError):
            found = read(cluster, (), path)
            return found if found.gpus_per_server == cluster.gpus_per_server else None
    return None


def _presets() -> Iterator[Cluster]:
    """Yield the presets of GPUs, DGX servers first."""
    paths = sorted(PRESETS.glob("*.yaml"), key=lambda path: (not path.stem.startswith("dgx"), path))
    clusters = (Cluster.model_validate(read_yaml(path).data) for path in paths)
    return (each for each in clusters if each.device.kind == "cuda")


def _model(name: str) -> str:
    """Return the model in a GPU's name: 'H200' in 'NVIDIA H200 SXM 141GB', '2080 Ti' in 'NVIDIA
    GeForce RTX 2080 Ti'."""
    found = re.search(r"\b(?:[A-Z]{1,3}\d{1,4}\w?|\d{4})(?: (?:Ti|SUPER))?\b", name)
    return found[0] if found else name


def _nvidia_smi(*words: str) -> str:
    """Return the output of `nvidia-smi`; '' if the program or the driver is missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        result = subprocess.run([program, *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if result.returncode else result.stdout
