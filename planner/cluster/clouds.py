"""Servers by the names of their cloud instance types: `--cluster p4d.24xlarge?servers=2`.

traces/quoted/clouds.csv has a row per instance type: the preset with the same device and the same
links inside a server, the number of GPUs and NICs, Gbit/s of all NICs together, memory and vCPUs of
the host, the list price with date and source, and the fields of the device that differ. Rates are
datasheet rates times the same cautious efficiencies as in presets. Prices change: `?price=2.20`
sets the dollars that you pay per GPU and hour.
"""

from __future__ import annotations

from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.files import quoted

REACHED = 0.75  # bandwidth that programs reach, as a share of a link's datasheet bandwidth
USABLE = 0.9  # usable share of a host's memory
THREADS = 2  # vCPUs per core


def names() -> list[str]:
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
    dropped = {"host_rates", "device_rates", "sampler"}
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
