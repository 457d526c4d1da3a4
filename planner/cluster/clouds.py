"""Servers by the names that clouds rent them under: `--cluster p4d.24xlarge?servers=2`.

traces/quoted/clouds.csv has a row for each: the preset whose device and links inside a server it
has, how many GPUs and NICs, Gbit/s of the NICs together, memory and vCPUs of the host, the list
price with date and source, and fields of a device that differ. Rates are datasheets' times the same
cautious efficiencies as in presets. Prices change: `?price=2.20` is what you pay, per GPU and hour.
"""

from __future__ import annotations

from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.files import quoted

REACHED = 0.75  # of a link's datasheet
USABLE = 0.9  # of a host's memory
THREADS = 2  # vCPUs of a core


def names() -> list[str]:
    """The names of all that is known."""
    return [row["name"] for row in quoted("clouds.csv")]


def fields_of(name: str, base: Cluster) -> dict[str, Any]:
    """The fields of a server by its name; `base` is the preset that `base_of` names."""
    row = _row(name)
    gpus, nics, gbit = int(row["gpus"]), int(row["nics"]), float(row["gbit_per_s"])
    device = dict(field.split("=") for field in row["device"].split(";") if field)
    per_nic = gpus // nics
    rate = gbit / 8 / nics * REACHED
    told = {
        "inter_node.bandwidth": f"datasheet {gbit:g} Gbit/s of {nics} NICs together x {REACHED:g}",
        "inter_node.latency": "assumed",
        "host_memory": f"datasheet {row['host_gib']} GiB x {USABLE:g}",
        "cores": f"datasheet {row['vcpus']} vCPUs / {THREADS}",
        "price": f"printed list price {row['priced']}: ${row['dollars_per_hour']} an hour,"
        f" {row['price_source']}",
        **{f"device.{field}": "datasheet" for field in device if field != "name"},
    }
    gone = {"host_rates", "device_rates", "sampler"}  # of the software on the preset's testbed
    kept = {field: text for field, text in base.provenance.items() if field not in gone}
    return {
        **base.model_dump(exclude=gone),
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
        "provenance": kept | told,
    }


def base_of(name: str) -> str:
    """The preset that a server is made of."""
    return _row(name)["base"]


def _row(name: str) -> dict[str, str]:
    return next(row for row in quoted("clouds.csv") if row["name"] == name)
