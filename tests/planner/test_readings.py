"""nccl-tests' JSON and nvidia-smi's matrix, as those tools write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asked import changed

from gnnplan.planner.cluster.readings import nccl_tests, read, topology
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.laws import cluster

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
def test_what_nvidia_smi_prints(tmp_path, text, islands, switches, nics):
    (tmp_path / "topo.txt").write_text(text)
    found = topology(tmp_path / "topo.txt")
    assert (found["islands"], found["switches"]) == (islands, switches)
    assert found.get("nics", ()) == nics


LINK = Link(bandwidth=50e9, latency=5e-6)


def written(
    folder: Path,
    program: str,
    hosts: list[str],
    latencies: float = 1,
    wire: float = 1,
    link: Link = LINK,
    times: int = 1,
    groups: list[int] | None = None,
    body_of: Callable[[dict[str, Any]], Any] = lambda body: body,
) -> Path:
    """What nccl-tests would write of such a link; a size is of `times` messages."""
    rows: list[dict[str, Any]] = []
    for size in (2**k for k in range(10, 27)):
        seconds = latencies * link.latency + wire * size / link.bandwidth
        body = {"time": seconds * 1e6, "alg_bw": size / seconds / 1e9, "bus_bw": 0.0, "nwrong": 0.0}
        row = {"size": size * times, "count": size // 4, "type": "float", "redop": "sum"}
        bodies = {"out_of_place": body_of(body), "in_place": {**body, "time": 1.0}}
        rows.append({**row, "root": "    -1", **bodies})
    devices = []
    for rank, host in enumerate(hosts):
        place = {"rank": rank, "group": groups[rank] if groups else 0, "pid": 1, "hostname": host}
        what = {"device_hex": "0000:04:00", "device_info": "NVIDIA H100"}
        devices.append({**place, "device": hosts[:rank].count(host), **what})
    document = {
        "version": 2,
        "start_time": "2026-11-20 10:00:00",
        "args": [f"./build/{program}", "-J", "out.json"],
        "env": ["A=1"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "devices": devices},
        "results": rows,
        "out_of_bounds": {"count": 0, "okay": "true"},
    }
    path = folder / f"{program}.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("program", "hosts", "shares", "told"),
    [
        ("all_reduce_perf", ["a"] * 4, (6, 6 / 4), ("all_reduce", 1, (0, 1, 2, 3))),
        ("all_reduce_perf_mpi", ["a"] * 2, (2, 1), ("all_reduce", 1, (0, 1))),  # any ending
        ("alltoall_perf", ["a", "b", "c"], (2, 2), ("exchange", 3, ())),
        ("sendrecv_perf", ["a", "b"], (1, 1), ("send", 2, ())),
    ],
)
def test_what_nccl_tests_writes(tmp_path, program, hosts, shares, told):
    times = len(hosts) if program == "alltoall_perf" else 1
    found = nccl_tests(written(tmp_path, program, hosts, *shares, times=times))
    assert (found.op, found.servers, found.gpus) == told
    assert found.link.bandwidth == pytest.approx(LINK.bandwidth, rel=0.02)
    assert found.link.latency == pytest.approx(LINK.latency, rel=0.02)


def test_they_make_a_cluster(tmp_path):
    base, table = read_cluster("dgx_a100"), tmp_path / "topo.txt"
    table.write_text(DGX)
    made = read(base, [written(tmp_path, "all_reduce_perf", ["a"] * 8, 14, 14 / 8)], table)
    assert made.device == base.device and made.servers == base.servers
    assert made.nics == ((0, 1), (2, 3), (4, 5), (6, 7))
    # all GPUs of it share an island
    reduced = made.collectives["all_reduce.island"]
    assert reduced.bandwidth == pytest.approx(LINK.bandwidth, rel=0.02)
    assert made.provenance["collectives.all_reduce.island"] == "nccl-tests, all_reduce_perf.json"
    table.write_text(PAIRS)
    assert read(base, [], table).islands == ((0, 1), (2, 3))
    table.write_text(PCIE)
    with pytest.raises(SpecError, match=r"switch lists, and cluster .* does not say how fast"):
        read(base, [], table)


@pytest.mark.parametrize(
    ("program", "hosts", "more", "said"),
    [
        ("broadcast_perf", "aa", {}, "broadcast_perf is not one of all_reduce_perf"),
        ("all_reduce_perf", "a", {}, "1 device is listed"),
        ("alltoall_perf", "a", {}, "on one server add -g N"),
        ("all_reduce_perf", "aabb", {}, "4 GPUs of 2 servers use links of both kinds at once"),
        (
            "all_reduce_perf",
            "aaaa",
            {"groups": [*range(4)]},
            "4 groups of one GPU each, which send",
        ),
        ("all_reduce_perf", "aaaa", {"groups": [0, 0, 0, 1]}, "2 groups of different sizes"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, program, hosts, more, said):
    with pytest.raises(SpecError, match=said):
        nccl_tests(written(tmp_path, program, [*hosts], **more))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 10_000, '{"args": []}'),
        '{"args": ["x/all_reduce_perf"], "config": {}, "results": []}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(SpecError, match="not what nccl-tests writes"):
        nccl_tests(tmp_path / "x")
    with pytest.raises(SpecError, match="not what `nvidia-smi topo -m` prints"):
        topology(tmp_path / "x")
    with pytest.raises(SpecError, match="cannot be read"):
        topology(tmp_path / "absent")


# -- tables of many machines, and files of many runs -------------------------------------------


def matrix(gpus: int, way: Callable[[int, int], str], nics: dict[str, list[str]]) -> str:
    """What nvidia-smi prints of so many GPUs: `way` between two, and of each NIC to every GPU."""
    names = [f"GPU{gpu}" for gpu in range(gpus)]
    lines = ["\t\x1b[4m" + "\t".join([*names, *nics, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for a in range(gpus):
        ways = [" X " if a == b else way(a, b) for b in range(gpus)]
        lines.append("\t".join([names[a], *ways, *(to[a] for to in nics.values()), "0-47", "0"]))
    lines += ["\t".join([name, *to, *[" X "] * len(nics)]) for name, to in nics.items()]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = a bonded set", ""])


def near(gpus: int, own: Callable[[int], int], count: int, name: str = "NIC{}") -> dict[str, Any]:
    """NICs, of which number own(gpu) is the nearest of a GPU."""
    return {
        name.format(nic): ["PIX" if own(gpu) == nic else "SYS" for gpu in range(gpus)]
        for nic in range(count)
    }


def joined(*islands: range) -> Callable[[int, int], str]:
    """GPUs of an island have NVLink."""
    return lambda a, b: "NV4" if any(a in one and b in one for one in islands) else "SYS"


def each(gpus: int) -> tuple[tuple[int], ...]:
    return tuple((gpu,) for gpu in range(gpus))


EIGHT = joined(range(8))
PAIRS_OF = tuple((gpu, gpu + 1) for gpu in range(0, 8, 2))


@pytest.mark.parametrize(
    ("text", "islands", "nics"),
    [
        # a NIC for every GPU was read as one for all of them
        (matrix(8, EIGHT, near(8, lambda gpu: gpu, 8)), (tuple(range(8)),), each(8)),
        (matrix(4, joined(range(4)), near(4, lambda gpu: gpu, 4)), (tuple(range(4)),), each(4)),
        (matrix(8, EIGHT, near(8, lambda gpu: gpu // 2, 4)), (tuple(range(8)),), PAIRS_OF),
        # names that nobody knew shifted the columns
        (matrix(8, EIGHT, near(8, lambda g: g // 2, 4, "mlx5_bond_{}")), (tuple(range(8)),), PAIRS_OF),
        (matrix(8, EIGHT, near(8, lambda g: g // 4, 2, "rocep{}s0")), (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7))),
        (matrix(4, joined(range(2), range(2, 4)), near(4, lambda g: 0, 1, "mlx4_{}")), ((0, 1), (2, 3)), ((0, 1, 2, 3),)),
        (matrix(16, joined(range(16)), near(16, lambda g: g // 4, 4)), (tuple(range(16)),), tuple(tuple(range(g, g + 4)) for g in range(0, 16, 4))),
        # one GPU without NVLink is alone
        (matrix(4, joined(range(3)), {}), ((0, 1, 2), (3,)), None),
        (matrix(2, joined(), {}), (), None),
        (matrix(1, joined(), {}), (), None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_of_many_machines(tmp_path, text, islands, nics, encoding):
    """A byte order mark, as Windows writes it, made a table none."""
    (tmp_path / "topo.txt").write_text(text, encoding=encoding)
    found = topology(tmp_path / "topo.txt")
    assert found["islands"] == islands and found.get("nics") == nics


TWO = matrix(2, joined(range(2)), near(2, lambda gpu: gpu, 2))
P2P = "topo -p2p` prints; give what `nvidia-smi topo -m` does"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TWO.replace("NIC0\tNIC1\tC", "NIC0NIC1\tC"), "GPU0 has 4 connections and the head 3"),
        (TWO.replace("NV4", "12"), "line GPU0, column GPU1: '12' is no connection"),
        (TWO.replace("NV4", "GNS"), P2P),
        (TWO.replace("NV4", "OK"), P2P),
        (TWO.replace("NV4", "XGMI"), "a table of rocm-smi, which is not read; name the GPUs"),
        ("==== ROCm System Management Interface ====\n GPU0 GPU1\nGPU0 0 15\n", "of rocm-smi"),
        (TWO.replace("GPU1\tNV4", "GPU7\tNV4"), "not what `nvidia-smi topo -m` prints"),
        (TWO.replace("\tGPU1", "\tGPU0", 1), "the head names GPU0 twice"),
        (TWO + TWO, "two lines of GPU0; give the table of one server"),
        (TWO.replace("NV4", "SYS", 1), "from GPU0 to GPU1 is SYS, and from GPU1 to GPU0 NV4"),
        (TWO.replace("X", "NV4", 1), "from GPU0 to GPU0 is NV4"),
    ],
)
def test_tables_of_others_are_refused(tmp_path, text, told):
    """They were taken for a server's, and lost islands, NICs or GPUs without a word."""
    (tmp_path / "topo.txt").write_text(text)
    with pytest.raises(SpecError, match=told):
        topology(tmp_path / "topo.txt")


def test_columns_that_are_absent_keep_what_the_cluster_has(tmp_path, capsys):
    """A machine without RDMA cards erased the preset's NICs, and nothing said so."""
    (tmp_path / "topo.txt").write_text(matrix(8, EIGHT, {}))
    base = read_cluster("dgx_a100")
    found = read(base, [], tmp_path / "topo.txt")
    assert found.nics == base.nics and "nics" not in found.provenance  # nothing was read of them
    assert "topo.txt has no columns of NICs; NICs are assumed to be" in capsys.readouterr().err
    # of another machine's table nothing of the GPUs' numbers can stay
    (tmp_path / "topo.txt").write_text(matrix(4, joined(range(4)), {}))
    assert read(base, [], tmp_path / "topo.txt").nics == ()
    assert "has 4 GPUs and dgx_a100 has 8 per server" in capsys.readouterr().err
    (tmp_path / "topo.txt").write_text(matrix(8, EIGHT, near(8, lambda gpu: gpu, 8)))
    assert read(base, [], tmp_path / "topo.txt").nics == each(8)
    assert "8 lists of GPUs with NICs of their own, each as fast as" in capsys.readouterr().err


def pairs() -> Cluster:
    lists = {"islands": ((0, 1), (2, 3)), "island": Link(bandwidth=40e9, latency=5e-6)}
    return changed(cluster(1, 4, intra=12e9, latency=1e-5), **lists)


def test_a_pair_inside_an_island_measures_the_island(tmp_path):
    """Its NVLink became the PCIe's rate."""
    found = read(pairs(), [written(tmp_path, "sendrecv_perf", ["a"] * 2)], None)
    assert found.island and found.island.bandwidth == pytest.approx(50e9, rel=0.02)
    assert found.intra_node == pairs().intra_node and list(found.collectives) == ["send.island"]
    four = written(tmp_path, "all_reduce_perf", ["a"] * 4, 6, 6 / 4)
    assert list(read(pairs(), [four], None).collectives) == ["all_reduce.intra_node"]


def test_groups_that_ran_at_once_are_told_apart(tmp_path):
    """Eight pairs of GPUs, each across two servers, were 16 GPUs that use links of both kinds."""
    hosts, rails = ["a"] * 8 + ["b"] * 8, [*range(8)] * 2
    file = written(tmp_path, "all_reduce_perf", hosts, 2, 1, groups=rails)
    found, base = nccl_tests(file), read_cluster("dgx_a100")
    assert (found.servers, found.groups) == (2, 8)
    # the preset has two GPUs a NIC, which so two groups shared
    for there, shared in ((base, 2), (changed(base, nics=each(8)), 1)):
        reduced = read(there, [file], None).collectives["all_reduce.inter_node"]
        assert reduced.bandwidth == pytest.approx(shared * found.link.bandwidth)


@pytest.mark.parametrize(
    ("body_of", "told"),
    [
        (lambda body: body | {"nwrong": 50.0}, "results were wrong .okay: true, wrong values: 850"),
        (lambda body: {"cpu_time": body["time"]}, "its times are the CPU's .-C.*run it without -C"),
        (lambda body: None, "none of 17 sizes has a time out of place"),
        (lambda body: body | {"time": "nan"}, "result 1 .size 1024.: 'nan' is no number"),
        (lambda body: "12 us", "result 1 .size 1024."),
    ],
)
def test_results_that_are_none_are_refused(tmp_path, body_of, told):
    """Times of a run that had computed wrong numbers were used as measured."""
    with pytest.raises(SpecError, match=told):
        nccl_tests(written(tmp_path, "all_reduce_perf", ["a"] * 2, body_of=body_of))


@pytest.mark.parametrize(
    ("hosts", "old", "new", "told"),
    [
        pytest.param(
            *("aa", '"okay": "true"', '"okay": "false"', "okay: false"), id="a run that failed"
        ),
        pytest.param(
            *("ll", '"device": 1', '"device": 0', "GPU 0 of l is listed twice: servers share a na"),
            id="servers of one name",
        ),
    ],
)
def test_what_a_file_says_of_its_run_is_read(tmp_path, hosts, old, new, told):
    path = written(tmp_path, "sendrecv_perf", [*hosts])
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(SpecError, match=told):
        nccl_tests(path)


def test_two_files_of_one_place_are_refused(tmp_path):
    """The last one won, and nothing said so."""
    files = []
    for count in (2, 8):
        (tmp_path / str(count)).mkdir()
        files.append(written(tmp_path / str(count), "all_reduce_perf", ["a"] * count))
    with pytest.raises(SpecError, match=r"both measured all_reduce.island, and a cluster has one"):
        read(read_cluster("dgx_a100"), files, None)
