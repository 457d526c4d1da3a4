"""Measuring gives a usable cluster, says where each number comes from, and leaves nothing behind."""

import math
import subprocess
from pathlib import Path

import pytest

from gnnplan.executor import measure as module
from gnnplan.executor.measure import fit, measure
from gnnplan.planner.errors import LostRank, SpecError
from gnnplan.planner.specs import Cluster


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen]:
    """A small graph, and every process that was started."""
    monkeypatch.setattr(module, "GRAPH", "synthetic:community?vertices=3000&edges=30000&features=8&classes=4&seed=0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started: list[subprocess.Popen] = []

    class Remembered(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Remembered)
    return started


@pytest.mark.timeout(110)
def test_two_ranks(small: list[subprocess.Popen]) -> None:
    said: list[str] = []
    cluster = measure(2, said.append)
    assert (cluster.servers, cluster.gpus_per_server) == (1, 2)
    assert cluster.inter_node == cluster.intra_node  # several servers played on this machine talk over the same loopback
    device = cluster.device
    numbers = [device.gemm, device.memory, device.memory_bandwidth, device.launch, *device.gather.values()]
    numbers += cluster.host_rates.values()
    numbers += [n for link in (cluster.intra_node, *cluster.collectives.values()) for n in (link.bandwidth, link.latency)]
    assert all(math.isfinite(n) and n > 0 for n in numbers) and 0 <= device.overlap_tax <= 1
    assert set(device.gather) == set(module.WIDTHS) and set(cluster.host_rates) == {"draw", "lay"}
    places = ("intra_node", "inter_node")
    assert set(cluster.collectives) == {f"{op}.{where}" for op in ("exchange", "send", "all_reduce") for where in places}
    told = {"device.name", "device.kind", "device.cache", "device.cache_bandwidth"}  # rates by width are measured in the place of caches
    fields = {f"device.{name}" for name in type(device).model_fields} - told
    fields |= {f"collectives.{name}" for name in cluster.collectives} | {"cores", "host_rates"}
    fields |= {f"{where}.{name}" for where in places for name in ("bandwidth", "latency")}
    assert set(cluster.provenance) == fields
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster
    assert "matrix products" in said
    assert len(small) == 2 and all(process.poll() is not None for process in small)


def test_a_rank_that_fails_is_named_and_nothing_stays(small: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_save_parts", lambda folder: None)  # the ranks find no graph
    with pytest.raises(LostRank, match=r"rank \d of 2 failed while measuring: FileNotFoundError"):
        measure(2)
    assert len(small) == 2 and all(process.poll() is not None for process in small)


def test_fit_survives_an_outlier() -> None:
    sizes = [2.0**k for k in range(10, 25, 2)]
    seconds = [2 * 50e-6 + 3 * n / 2e9 for n in sizes]
    seconds[3] *= 10
    link, error = fit(sizes, seconds, latencies=2, wire=3)
    assert link.latency == pytest.approx(50e-6, rel=0.2) and link.bandwidth == pytest.approx(2e9, rel=0.2) and error < 0.1


def test_no_ranks_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        measure(0)
