"""nccl-tests' JSON and nvidia-smi's matrix, as those tools write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cluster.readings import nccl_tests, read, topology
from gnnplan.planner.cluster.spec import Cluster, Link
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
def test_what_nvidia_smi_prints(tmp_path, text, islands, switches, nics):
    (tmp_path / "topo.txt").write_text(text)
    found = topology(tmp_path / "topo.txt")
    assert (found["islands"], found["switches"]) == (islands, switches)
    assert found.get("nics", ()) == nics


def written(
    folder: Path,
    program: str,
    hosts: list[str],
    link: Link,
    latencies: float,
    wire: float,
    times: int = 1,
    groups: list[int] | None = None,
    body_of: Callable[[dict[str, Any]], Any] = lambda body: body,
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
                "out_of_place": body_of(body),
                "in_place": {**body, "time": 1.0},
            }
        )
    devices = [
        {
            "rank": rank,
            "group": groups[rank] if groups else 0,
            "pid": 1,
            "hostname": host,
            "device": hosts[:rank].count(host),
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


def test_what_nccl_tests_writes(tmp_path):
    link = Link(bandwidth=20e9, latency=15e-6)
    reduced = nccl_tests(written(tmp_path, "all_reduce_perf", ["a"] * 4, link, 6, 6 / 4))
    swapped = nccl_tests(written(tmp_path, "alltoall_perf", ["a", "b", "c"], link, 2, 2, times=3))
    sent = nccl_tests(written(tmp_path, "sendrecv_perf", ["a", "b"], link, 1, 1))
    told = [("all_reduce", 1), ("exchange", 3), ("send", 2)]
    assert [(one.op, one.servers) for one in (reduced, swapped, sent)] == told
    assert reduced.gpus == (0, 1, 2, 3) and swapped.gpus == sent.gpus == ()
    for found in (reduced.link, swapped.link, sent.link):
        assert found.bandwidth == pytest.approx(20e9, rel=0.02)
        assert found.latency == pytest.approx(15e-6, rel=0.02)


def test_they_make_a_cluster(tmp_path):
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
        ("broadcast_perf", ["a", "a"], "broadcast_perf is not one of all_reduce_perf"),
        ("all_reduce_perf", ["a"], "1 device is listed"),
        (
            "all_reduce_perf",
            ["a", "a", "b", "b"],
            "4 GPUs of 2 servers use links of both kinds at once",
        ),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, program, hosts, said):
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            TWO.replace("NIC0\tNIC1\tCPU", "NIC0NIC1\tCPU"),
            "line GPU0 has 4 connections and the head 3",
        ),
        (TWO.replace("NV4", "12"), "line GPU0, column GPU1: '12' is no connection"),
        (TWO.replace("NV4", "GNS"), "topo -p2p` prints; give what `nvidia-smi topo -m` does"),
        (TWO.replace("NV4", "OK"), "topo -p2p` prints"),
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


LINK = Link(bandwidth=50e9, latency=5e-6)


def pairs() -> Cluster:
    return Cluster.model_validate(
        {
            "gpus_per_server": 4,
            "device": {"memory": "40GiB", "gemm": "15TFLOP/s", "memory_bandwidth": "576GB/s"},
            "intra_node": {"bandwidth": "12GB/s", "latency": "10us"},
            "islands": [[0, 1], [2, 3]],
            "island": {"bandwidth": "40GB/s", "latency": "5us"},
        }
    )


def test_a_pair_inside_an_island_measures_the_island(tmp_path):
    """Its NVLink became the PCIe's rate."""
    found = read(pairs(), [written(tmp_path, "sendrecv_perf", ["a"] * 2, LINK, 1, 1)], None)
    assert found.island and found.island.bandwidth == pytest.approx(50e9, rel=0.02)
    assert found.intra_node == pairs().intra_node and list(found.collectives) == ["send.island"]
    four = written(tmp_path, "all_reduce_perf", ["a"] * 4, LINK, 6, 6 / 4)
    assert list(read(pairs(), [four], None).collectives) == ["all_reduce.intra_node"]


def test_groups_that_ran_at_once_are_told_apart(tmp_path):
    """Eight pairs of GPUs, each across two servers, were 16 GPUs that use links of both kinds."""
    hosts, rails = ["a"] * 8 + ["b"] * 8, [*range(8)] * 2
    file = written(tmp_path, "all_reduce_perf", hosts, LINK, 2, 1, groups=rails)
    found = nccl_tests(file)
    assert (found.servers, found.groups) == (2, 8)
    base = read_cluster("dgx_a100")  # two GPUs a NIC, which so two groups shared
    there = read(base, [file], None).collectives["all_reduce.inter_node"]
    assert there.bandwidth == pytest.approx(2 * found.link.bandwidth)
    own = base.model_copy(update={"nics": each(8)})
    there = read(own, [file], None).collectives["all_reduce.inter_node"]
    assert there.bandwidth == pytest.approx(found.link.bandwidth)
    for groups, told in (
        ([*range(4)], "4 groups of one GPU each, which send nothing"),
        ([0, 0, 0, 1], "2 groups of different sizes"),
    ):
        with pytest.raises(SpecError, match=told):
            nccl_tests(written(tmp_path, "all_reduce_perf", ["a"] * 4, LINK, 1, 1, groups=groups))


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
        nccl_tests(written(tmp_path, "all_reduce_perf", ["a"] * 2, LINK, 1, 1, body_of=body_of))


def test_a_failed_run_is_refused_by_its_verdict(tmp_path):
    path = written(tmp_path, "all_reduce_perf", ["a"] * 2, LINK, 1, 1)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "out_of_bounds": {"count": 3, "okay": "false"}}))
    with pytest.raises(SpecError, match="okay: false"):
        nccl_tests(path)


def test_two_files_of_one_place_are_refused(tmp_path):
    """The last one won, and nothing said so."""
    files = []
    for count in (2, 8):
        (tmp_path / str(count)).mkdir()
        hosts = ["a"] * count
        files.append(written(tmp_path / str(count), "all_reduce_perf", hosts, LINK, 1, 1))
    with pytest.raises(SpecError, match=r"both measured all_reduce.island, and a cluster has one"):
        read(read_cluster("dgx_a100"), files, None)


def test_names_of_programs_may_have_endings(tmp_path):
    found = nccl_tests(written(tmp_path, "all_reduce_perf_mpi", ["a"] * 2, LINK, 2, 1))
    assert found.op == "all_reduce"


def test_servers_of_one_name_are_told(tmp_path):
    path = written(tmp_path, "sendrecv_perf", ["localhost"] * 2, LINK, 1, 1)
    path.write_text(path.read_text().replace('"device": 1', '"device": 0'))
    with pytest.raises(SpecError, match="GPU 0 of localhost is listed twice: servers share a name"):
        nccl_tests(path)


def test_one_gpu_is_told_the_option(tmp_path):
    with pytest.raises(SpecError, match="on one server add -g N"):
        nccl_tests(written(tmp_path, "alltoall_perf", ["a"], LINK, 1, 1))
