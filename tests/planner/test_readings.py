"""nccl-tests' JSON and nvidia-smi's matrix, as those tools write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cluster.readings import nccl_tests, read, topology
from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.errors import SpecError

# A server with eight A100 behind NVSwitch: pairs of GPUs share a PCIe switch and two cards with it
# (documented by its vendor).
DGX = """\
        \x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tmlx5_1\tmlx5_2\tmlx5_3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\tPXB\tSYS\tSYS\tSYS\t48-63,176-191\t3
GPU1\tNV12\t X \tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\tPXB\tSYS\tSYS\tSYS\t48-63,176-191\t3
GPU2\tNV12\tNV12\t X \tNV12\tNV12\tNV12\tNV12\tNV12\tSYS\tPXB\tSYS\tSYS\t16-31,144-159\t1
GPU3\tNV12\tNV12\tNV12\t X \tNV12\tNV12\tNV12\tNV12\tSYS\tPXB\tSYS\tSYS\t16-31,144-159\t1
GPU4\tNV12\tNV12\tNV12\tNV12\t X \tNV12\tNV12\tNV12\tSYS\tSYS\tPXB\tSYS\t112-127,240-255\t7
GPU5\tNV12\tNV12\tNV12\tNV12\tNV12\t X \tNV12\tNV12\tSYS\tSYS\tPXB\tSYS\t112-127,240-255\t7
GPU6\tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\t X \tNV12\tSYS\tSYS\tSYS\tPXB\t80-95,208-223\t5
GPU7\tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\tNV12\t X \tSYS\tSYS\tSYS\tPXB\t80-95,208-223\t5
mlx5_0\tPXB\tPXB\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tSYS\tSYS\tSYS

Legend:

  X    = Self
  GPU9 = nobody
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tNODE\tSYS\t0-23\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\t0-23\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\t0-23\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \t24-47\t1\t\tN/A
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0
GPU0\t X \tNV3\tSYS\tSYS\tNODE
GPU1\tNV3\t X \tSYS\tSYS\tNODE
GPU2\tSYS\tSYS\t X \tNV3\tSYS
GPU3\tSYS\tSYS\tNV3\t X \tSYS
NIC0\tNODE\tNODE\tSYS\tSYS\t X
"""
MESH = """\
\tGPU0\tGPU1\tGPU2
GPU0\t X \tNV1\tSYS
GPU1\tNV1\t X \tNV1
GPU2\tSYS\tNV1\t X
"""


@pytest.mark.parametrize(
    ("text", "islands", "switches", "nics"),
    [
        (DGX, ((0, 1, 2, 3, 4, 5, 6, 7),), (), ((0, 1), (2, 3), (4, 5), (6, 7))),
        (PCIE, (), ((0, 1), (2,), (3,)), ()),
        (PAIRS, ((0, 1), (2, 3)), (), ((0, 1, 2, 3),)),
        (MESH, (), (), ()),
    ],
)
def test_what_nvidia_smi_prints(
    tmp_path: Path, text: str, islands: tuple, switches: tuple, nics: tuple
):
    (tmp_path / "topo.txt").write_text(text)
    found = topology(tmp_path / "topo.txt")
    assert (found["islands"], found["switches"], found["nics"]) == (islands, switches, nics)


def written(
    folder: Path,
    program: str,
    hosts: list[str],
    link: Link,
    latencies: float,
    wire: float,
    times: int = 1,
) -> Path:
    """What nccl-tests would write of such a link; a size is of `times` messages."""
    rows: list[dict[str, Any]] = []
    for size in (2**k for k in range(10, 27)):
        seconds = latencies * link.latency + wire * size / link.bandwidth
        body = {"time": seconds * 1e6, "alg_bw": size / seconds / 1e9, "bus_bw": 0.0, "nwrong": 0.0}
        rows.append(
            {
                "size": size * times,
                "count": size // 4,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": body,
                "in_place": {**body, "time": 1.0},
            }
        )
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 1,
            "hostname": host,
            "device": 0,
            "device_hex": "0000:04:00",
            "device_info": "NVIDIA H100",
        }
        for rank, host in enumerate(hosts)
    ]
    path = folder / f"{program}.json"
    path.write_text(
        json.dumps(
            {
                "version": 2,
                "start_time": "2026-11-20 10:00:00",
                "args": [f"./build/{program}", "-J", "out.json"],
                "env": ["A=1"],
                "nccl_version": 22703,
                "config": {"nthreads": 1, "devices": devices},
                "results": rows,
                "out_of_bounds": {"count": 0, "okay": "true"},
            }
        )
    )
    return path


def test_what_nccl_tests_writes(tmp_path: Path):
    link = Link(bandwidth=20e9, latency=15e-6)
    reduced = nccl_tests(written(tmp_path, "all_reduce_perf", ["a"] * 4, link, 6, 6 / 4))
    swapped = nccl_tests(written(tmp_path, "alltoall_perf", ["a", "b", "c"], link, 2, 2, times=3))
    sent = nccl_tests(written(tmp_path, "sendrecv_perf", ["a", "b"], link, 1, 1))
    told = [("all_reduce", "intra_node"), ("exchange", "inter_node"), ("send", "inter_node")]
    assert [found[:2] for found in (reduced, swapped, sent)] == told
    for _, _, found in (reduced, swapped, sent):
        assert found.bandwidth == pytest.approx(20e9, rel=0.02) and found.latency == pytest.approx(
            15e-6, rel=0.02
        )


def test_they_make_a_cluster(tmp_path: Path):
    base = read_cluster("dgx_a100")
    (tmp_path / "topo.txt").write_text(DGX)
    link = Link(bandwidth=180e9, latency=9e-6)
    made = read(
        base,
        [written(tmp_path, "all_reduce_perf", ["a"] * 8, link, 14, 14 / 8)],
        tmp_path / "topo.txt",
    )
    assert (
        made.device == base.device
        and made.nics == ((0, 1), (2, 3), (4, 5), (6, 7))
        and made.servers == base.servers
    )
    # all GPUs of it share an island
    assert made.collectives["all_reduce.island"].bandwidth == pytest.approx(180e9, rel=0.02)
    assert made.provenance["collectives.all_reduce.island"] == "nccl-tests, all_reduce_perf.json"
    (tmp_path / "pairs.txt").write_text(PAIRS)
    assert read(base, [], tmp_path / "pairs.txt").islands == ((0, 1), (2, 3))
    with pytest.raises(SpecError, match=r"switch lists, and cluster .* does not say how fast"):
        (tmp_path / "pcie.txt").write_text(PCIE)
        read(base, [], tmp_path / "pcie.txt")


@pytest.mark.parametrize(
    ("program", "hosts", "said"),
    [
        ("broadcast_perf", ["a", "a"], "broadcast_perf is not asked about; use all_reduce_perf"),
        ("all_reduce_perf", ["a"], "1 device is listed"),
        (
            "all_reduce_perf",
            ["a", "a", "b", "b"],
            "4 GPUs of 2 servers use links of both kinds at once",
        ),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path: Path, program: str, hosts: list[str], said: str):
    with pytest.raises(SpecError, match=said):
        nccl_tests(written(tmp_path, program, hosts, Link(bandwidth=1e9), 1, 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"args": []}',
        '{"args": ["x/all_reduce_perf"], "config": {}, "results": []}',
        "[" * 10_000,
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str):
    (tmp_path / "x").write_text(text)
    with pytest.raises(SpecError, match="not what nccl-tests writes"):
        nccl_tests(tmp_path / "x")
    with pytest.raises(SpecError, match="not what `nvidia-smi topo -m` prints"):
        topology(tmp_path / "x")
    with pytest.raises(SpecError, match="cannot be read"):
        topology(tmp_path / "absent")
