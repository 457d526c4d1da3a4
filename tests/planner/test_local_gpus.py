"""Clusters of this machine's GPUs, as a program named nvidia-smi tells of them."""

import pytest

from gnnplan.planner.cluster.machines import gpus_here
from gnnplan.planner.problem.inputs import read_cluster

TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0
GPU0\t X \tNV18\tSYS\tSYS\tPIX
GPU1\tNV18\t X \tSYS\tSYS\tSYS
GPU2\tSYS\tSYS\t X \tNV18\tSYS
GPU3\tSYS\tSYS\tNV18\t X \tSYS
NIC0\tPIX\tSYS\tSYS\tSYS\t X
"""

pytestmark = pytest.mark.processes


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told(lines, topology): what nvidia-smi prints from now on; no cluster has been measured."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def tell(lines: str, topology: str = "") -> None:
        (tmp_path / "lines").write_text(lines)
        (tmp_path / "topology").write_text(topology)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$*" in topo*) cat {tmp_path}/topology;; *) cat {tmp_path}/lines;;'
            " esac\n"
        )
        program.chmod(0o755)

    return tell


def test_a_machine_with_a_gpu_is_no_machine_of_two_cpu_ranks(told):
    """On an H200 `gnnplan plan` planned two CPU ranks, which then trained on the GPU."""
    told("NVIDIA H200, 143771\n")
    cluster = read_cluster("local")
    assert (cluster.name, cluster.ranks, cluster.device.kind) == ("local", 1, "cuda")
    assert cluster.device.name == "NVIDIA H200" and cluster.islands == ()
    assert cluster.device.memory == pytest.approx(0.9 * 143771 * 2**20)
    assert cluster.device.memory_bandwidth == read_cluster("dgx_h200").device.memory_bandwidth
    assert cluster.provenance["device.memory"] == "nvidia-smi, x 0.9"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx_h100"),
        ("NVIDIA A100-SXM4-40GB", "dgx_a100"),
        ("NVIDIA L4", "l4_box"),
        ("Tesla P100-PCIE-16GB", "p3_p100"),
        ("NVIDIA GeForce RTX 2080 Ti", "pipegcn_2080ti"),
        ("NVIDIA RTX A6000", "granndis_a6000_nvlink"),
        ("NVIDIA Future 9999", "l4_box"),  # that no preset tells of
    ],
)
def test_rates_are_those_of_the_preset_with_the_same_gpus(told, name, preset):
    told(f"{name}, 16000\n")
    found, expected = read_cluster("local"), read_cluster(preset).device
    device, source = found.device, found.provenance["device.gemm"]
    assert (device.gemm, device.memory_bandwidth) == (expected.gemm, expected.memory_bandwidth)
    assert (source == "generic default (NVIDIA L4)") == ("Future" in name)


def test_several_gpus_are_wired_as_topo_says(told, monkeypatch):
    told("NVIDIA H100 80GB HBM3, 81559\n" * 4, TOPOLOGY)
    cluster = read_cluster("local")
    assert cluster.ranks == 4 and cluster.islands == ((0, 1), (2, 3))
    assert cluster.island == read_cluster("dgx_h100").island
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # which topo does not number anew
    some = read_cluster("local")
    assert some.ranks == 2 and some.islands == () and some.island is None


@pytest.mark.parametrize("lines", ["", "No devices were found\n"])
def test_no_gpus(told, lines, monkeypatch):
    told(lines)
    assert gpus_here() is None and read_cluster("local").device.kind == "cpu"
    told("NVIDIA H200, 143771\nNVIDIA L4, 23034\n")
    for none in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpus_here() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read_cluster("local").device.name == "NVIDIA L4"
