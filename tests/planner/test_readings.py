"""nccl-tests' JSON and nvidia-smi's matrix, as those tools write them; and clusters of this machine's
GPUs, as a program named nvidia-smi tells of them."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asked
import pytest
from calls import call

from gnnplan.planner.cluster.machines import gpus_here
from gnnplan.planner.cluster.readings import nccl_tests, read, topology
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.laws import cluster

# as a machine printed it; others are written by matrix()
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tNODE\tSYS\t0-23\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\t0-23\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\t0-23\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \t24-47\t1\t\tN/A
"""


def matrix(gpus: int, way: Callable[[int, int], str], nics: dict[str, list[str]]) -> str:
    """What nvidia-smi prints of so many GPUs: `way` between two, and of each NIC to every GPU."""
    names = [f"GPU{gpu}" for gpu in range(gpus)]
    lines = ["\t\x1b[4m" + "\t".join([*names, *nics, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for a in range(gpus):
        ways = [" X " if a == b else way(a, b) for b in range(gpus)]
        lines.append("\t".join([names[a], *ways, *(to[a] for to in nics.values()), "0-47", "0"]))
    lines += ["\t".join([name, *to, *[" X "] * len(nics)]) for name, to in nics.items()]
    return "\n".join([*lines, "", "Legend:", "", "  X    = Self", "  NV#  = a bonded set", ""])


def joined(*islands: range) -> Callable[[int, int], str]:
    """GPUs of an island have NVLink."""
    return lambda a, b: "NV4" if any(a in one and b in one for one in islands) else "SYS"


def each(gpus: int) -> tuple[tuple[int], ...]:
    return tuple((gpu,) for gpu in range(gpus))


def ways(
    gpus: int, count: int, way: Callable[[int, int], str], name: str = "NIC{}"
) -> dict[str, Any]:
    """So many NICs, with `way(gpu, nic)`."""
    return {name.format(nic): [way(gpu, nic) for gpu in range(gpus)] for nic in range(count)}


def near(gpus: int, own: Callable[[int], int], count: int, name: str = "NIC{}") -> dict[str, Any]:
    """NICs, of which number own(gpu) is the nearest of a GPU."""
    return ways(gpus, count, lambda gpu, nic: "PIX" if own(gpu) == nic else "SYS", name)


FIRST_TWO = ways(4, 1, lambda gpu, nic: "NODE" if gpu < 2 else "SYS")
PAIRS = matrix(4, joined(range(2), range(2, 4)), FIRST_TWO)

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
    sizes: Sequence[int] = tuple(2**k for k in range(10, 27)),
    one_visible: bool = False,
    body_of: Callable[[dict[str, Any]], Any] = lambda body: body,
    changed: tuple[str, str] = ("", ""),
) -> Path:
    """What nccl-tests would write of such a link; a size is of `times` messages."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        seconds = latencies * link.latency + wire * size / link.bandwidth
        body = {"time": seconds * 1e6, "alg_bw": size / seconds / 1e9, "bus_bw": 0.0, "nwrong": 0.0}
        row = {"size": size * times, "count": size // 4, "type": "float", "redop": "sum"}
        bodies = {"out_of_place": body_of(body), "in_place": {**body, "time": 1.0}}
        rows.append({**row, "root": "    -1", **bodies})
    devices = []
    for rank, host in enumerate(hosts):
        place = {"rank": rank, "group": groups[rank] if groups else 0, "pid": 1, "hostname": host}
        gpu = hosts[:rank].count(host)
        what = {"device_hex": f"0000:{gpu * one_visible:02x}:00", "device_info": "NVIDIA H100"}
        devices.append({**place, "device": 0 if one_visible else gpu, **what})
    document = {"version": 2, "start_time": "2026-11-20 10:00:00"}
    document |= {"args": [f"./build/{program}", "-J", "out.json"], "env": ["A=1"]}
    document |= {"nccl_version": 22703, "config": {"nthreads": 1, "devices": devices}}
    document |= {"results": rows, "out_of_bounds": {"count": 0, "okay": "true"}}
    path = folder / f"{program}.json"
    path.write_text(json.dumps(document).replace(*changed))
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


SIZES = [2**k for k in range(10, 27)]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"body_of": lambda body: body | {"nwrong": None}}, id="unchecked (-c 0)"),
        pytest.param({"sizes": SIZES * 3}, id="three cycles (-N 3)"),
        pytest.param({"sizes": [size for size in SIZES for _ in range(9)]}, id="all types (-d all)"),
        pytest.param({"sizes": [0, 0, *SIZES]}, id="from nothing on (-b 0)"),
        pytest.param({"sizes": SIZES[::-1]}, id="in any order"),
        pytest.param({"sizes": range(2**20, 2**26, 2**22)}, id="in steps (-i 4M)"),
        pytest.param({"body_of": lambda body: {k: str(v) for k, v in body.items()}}, id="as text"),
        pytest.param({"body_of": lambda body: body | {"min_us": 1.0}}, id="of each iteration (-I 1)"),
        pytest.param({"one_visible": True}, id="a process sees its GPU only"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("program", ["all_reduce_perf", "alltoall_perf", "sendrecv_perf"])
def test_runs_with_other_options(tmp_path, program, how):
    """Unchecked results, repeated sizes and Slurm's one GPU per process were refused."""
    shares = {"all_reduce_perf": (6, 6 / 4), "alltoall_perf": (3, 3), "sendrecv_perf": (1, 1)}
    times = 4 if program == "alltoall_perf" else 1
    found = nccl_tests(written(tmp_path, program, ["a"] * 4, *shares[program], times=times, **how))
    assert found.link.bandwidth == pytest.approx(LINK.bandwidth, rel=0.02)
    assert found.ranks == 4 and found.gpus in ((), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("hosts", "how", "told"),
    [
        # 1 KB takes as long as 8 B, and a bandwidth was told from them
        ("aaaa", {"sizes": [8, 64, 1024]}, "less than 1.5 times as long, which tells no bandwidth"),
        ("aaaa", {"sizes": [2**25] * 3}, "1 size; give at least 3"),
        ("a" * 16, {}, "GPU 15 of one server took part, and a server of the cluster has 8 GPUs"),
        ("a" * 16, {"one_visible": True}, "16 GPUs of one server took part, .* has 8 GPUs"),
    ],
)
def test_results_of_another_machine_or_of_nothing_are_refused(tmp_path, hosts, how, told):
    file = written(tmp_path, "all_reduce_perf", [*hosts], **how)
    with pytest.raises(SpecError, match=told):
        read(read_cluster("dgx_a100"), [file], None)


def test_which_gpus_took_part_must_be_known(tmp_path):
    file = written(tmp_path, "sendrecv_perf", ["a"] * 2, one_visible=True)
    with pytest.raises(SpecError, match="each process saw one GPU, so which 2 of 4 sent is unkno"):
        read(pairs(), [file], None)
    whole = written(tmp_path, "all_reduce_perf", ["a"] * 4, 6, 6 / 4, one_visible=True)
    assert list(read(pairs(), [whole], None).collectives) == ["all_reduce.intra_node"]


def test_they_make_a_cluster(tmp_path):
    base, table = read_cluster("dgx_a100"), tmp_path / "topo.txt"
    table.write_text(matrix(8, EIGHT, near(8, lambda gpu: gpu // 2, 4)))
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
        ("all_reduce_perf", "aaaa", {"groups": [*range(4)]}, "4 groups of one GPU each, which"),
        ("all_reduce_perf", "aaaa", {"groups": [0, 0, 0, 1]}, "2 groups of different sizes"),
        # times of a run that had computed wrong numbers were used as measured
        ("all_reduce_perf", "aa", {"body_of": lambda body: body | {"nwrong": 50.0}}, "wrong .okay: true, wrong values: 850"),
        ("all_reduce_perf", "aa", {"body_of": lambda body: {"cpu_time": body["time"]}}, "its times are the CPU's .-C.*run it without -C"),
        ("all_reduce_perf", "aa", {"body_of": lambda body: None}, "none of 17 sizes has a time out of place"),
        ("all_reduce_perf", "aa", {"body_of": lambda body: body | {"time": "nan"}}, "result 1 .size 1024.: 'nan' is no number"),
        ("all_reduce_perf", "aa", {"body_of": lambda body: "12 us"}, "result 1 .size 1024."),
        ("sendrecv_perf", "aa", {"changed": ('"okay": "true"', '"okay": "false"')}, "okay: false"),
        ("sendrecv_perf", "ll", {"changed": ('"device": 1', '"device": 0')}, "GPU 0 of l is listed twice: servers share a na"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_why(tmp_path, program, hosts, more, said):
    with pytest.raises(SpecError, match=said):
        nccl_tests(written(tmp_path, program, [*hosts], **more))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "[" * 10_000, '{"args": []}', "# nThread 1 nGpus 8 minBytes 8"),
        "[1,0]<stdout>: 8 2 float sum -1 28.90 0.00 0.00 0",
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


EIGHT = joined(range(8))
PAIRS_OF = tuple((gpu, gpu + 1) for gpu in range(0, 8, 2))


def best(near: dict[int, tuple[int, ...]], way: str, half: int) -> Callable[[int, int], str]:
    """`way` to near NICs; others are on its socket, with `half` of GPUs and NICs, or the other."""
    return lambda g, nic: way if nic in near[g] else "NODE" if (g < 4) == (nic < half) else "SYS"


ALL8, ALL4 = (tuple(range(8)),), (tuple(range(4)),)
HALVES, TWO_PAIRS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "islands", "switches", "nics"),
    [
        # ten cards, of which two are for storage
        pytest.param(matrix(8, EIGHT, ways(8, 10, lambda g, n: "PXB" if n in ((0, 1), (2, 3), (6, 7), (8, 9))[g // 2] else "SYS", "mlx5_{}")), ALL8, (), PAIRS_OF, id="DGX A100"),
        pytest.param(matrix(8, EIGHT, ways(8, 12, best(dict(enumerate([(0,), (3,), (4,), (5,), (6,), (9,), (10,), (11,)])), "PXB", 6))), ALL8, (), each(8), id="DGX H100"),
        pytest.param(matrix(8, EIGHT, ways(8, 10, best(dict(enumerate(zip(range(8)))), "PIX", 5))), ALL8, (), each(8), id="DGX H200"),
        pytest.param(matrix(8, EIGHT, ways(8, 14, best(dict(enumerate([(0,), (3,), (4,), (5,), (8,), (9,), (12,), (13,)])), "PXB", 7))), ALL8, (), each(8), id="DGX B200"),
        pytest.param(matrix(4, joined(range(4)), ways(4, 2, lambda g, n: "NODE" if g // 2 == n else "SYS")), ALL4, (), TWO_PAIRS, id="HGX of four, two NICs"),
        pytest.param(matrix(4, joined(range(4)), ways(4, 1, lambda g, n: "PHB" if g < 2 else "SYS")), ALL4, (), ALL4, id="HGX of four, one NIC"),
        pytest.param(PAIRS, TWO_PAIRS, (), ALL4, id="A100 PCIe with bridges"),
        pytest.param(matrix(8, lambda a, b: "NV12" if a // 2 == b // 2 else "PXB" if a // 4 == b // 4 else "SYS", ways(8, 2, lambda g, n: "PXB" if g // 4 == n else "SYS")), PAIRS_OF, HALVES, HALVES, id="H100 NVL"),
        pytest.param(matrix(1, joined(), ways(1, 4, lambda g, n: "NODE")), (), (), ((0,),), id="GH200"),
        pytest.param(matrix(4, joined(range(4)), ways(4, 4, lambda g, n: "PHB" if g == n else "SYS", "hsn{}")), ALL4, (), each(4), id="four GH200"),
        pytest.param(matrix(4, joined(range(4)), ways(4, 6, lambda g, n: "NODE" if g // 2 == n // 3 else "SYS")), ALL4, (), TWO_PAIRS, id="GB200 tray"),
        pytest.param(matrix(8, lambda a, b: "NODE" if a // 4 == b // 4 else "SYS", ways(8, 2, lambda g, n: "NODE" if g // 4 == n else "SYS")), (), (), HALVES, id="L40S, two sockets"),
        pytest.param(matrix(8, lambda a, b: "PIX" if a // 2 == b // 2 else "SYS", {}), (), PAIRS_OF, None, id="L40S, pairs"),
        pytest.param(matrix(10, lambda a, b: "PIX" if a // 5 == b // 5 else "NODE", ways(10, 1, lambda g, n: "NODE")), (), (tuple(range(5)), tuple(range(5, 10))), (tuple(range(10)),), id="ten on two switches"),
        pytest.param(matrix(8, EIGHT, {}), ALL8, (), None, id="p4d"),
        pytest.param(matrix(8, EIGHT, ways(8, 4, lambda g, n: "PXB" if g // 2 == n else "SYS", "rdmap{}s27")), ALL8, (), PAIRS_OF, id="p4d with EFA"),
        pytest.param(matrix(8, EIGHT, ways(8, 32, best({g: tuple(range(4 * g, 4 * g + 4)) for g in range(8)}, "PIX", 16))), ALL8, (), each(8), id="p5 with EFA"),
        pytest.param(matrix(8, EIGHT, ways(8, 9, lambda g, n: "NODE" if (g < 4) == (n < 5) else "SYS")), ALL8, (), HALVES, id="ND H100 v5"),
        pytest.param(matrix(8, EIGHT, ways(8, 9, lambda g, n: "SYS", "mlx5_ib{}")), ALL8, (), ALL8, id="ND A100 v4"),
        pytest.param(matrix(8, EIGHT, ways(8, 4, lambda g, n: "PIX" if g // 2 == n else "NODE")), ALL8, (), PAIRS_OF, id="a3-highgpu"),
        pytest.param(matrix(8, EIGHT, ways(8, 10, lambda g, n: "PIX" if n == g + 1 else "NODE")), ALL8, (), each(8), id="a3-ultragpu"),
        pytest.param(matrix(4, lambda a, b: "NV1" if a // 2 == b // 2 else "SOC", ways(4, 1, lambda g, n: "PHB" if g < 2 else "SOC", "mlx5_{}")), TWO_PAIRS, (), ALL4, id="P100, old driver"),
        pytest.param(matrix(8, lambda a, b: "NV1" if a // 4 == b // 4 or abs(a - b) == 4 else "SYS", {}), (), (), None, id="a cube of V100"),
        pytest.param(PCIE, (), ((0, 1), (2,), (3,)), None, id="PCIe alone"),
        # names that nobody knew shifted the columns
        pytest.param(matrix(8, EIGHT, near(8, lambda g: g // 2, 4, "mlx5_bond_{}")), ALL8, (), PAIRS_OF, id="bonds"),
        pytest.param(matrix(8, EIGHT, near(8, lambda g: g // 4, 2, "rocep{}s0")), ALL8, (), HALVES, id="RoCE"),
        pytest.param(matrix(4, joined(range(3)), {}), ((0, 1, 2), (3,)), (), None, id="one GPU without NVLink"),
        pytest.param(matrix(2, joined(), {}), (), (), None, id="two GPUs without NVLink"),
        # of eight, of which four lack one bridge, the others are an island still
        pytest.param(matrix(8, lambda a, b: "SYS" if {a, b} == {4, 7} else joined(range(4), range(4, 8))(a, b), {}), ((0, 1, 2, 3), (4,), (5,), (6,), (7,)), (), None, id="half a mesh"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(lambda text: text, id="as printed"),
        pytest.param(lambda text: text.replace("\n", "\r\n"), id="line ends of Windows"),
        pytest.param(lambda text: text.replace("\x1b", ""), id="escapes lost in a copy"),
        pytest.param(lambda text: text.replace("\x1b[4m", "").expandtabs(), id="blanks"),
        pytest.param(lambda text: "```\n$ nvidia-smi topo -m\n" + text.partition("Legend")[0] + "```", id="quoted"),
        pytest.param(lambda text: text.replace("\t\x1b[4m", "\x1b[4m\t"), id="underlined from the tab on"),
    ],
)  # fmt: skip
def test_machines_as_they_are(tmp_path, text, islands, switches, nics, copied):
    """Every machine in every copy; without the escape character '[4mGPU0' was no head."""
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):  # a byte order mark made a table none
        (tmp_path / "topo.txt").write_text(copied(text), encoding, newline="")
        found = topology(tmp_path / "topo.txt")
        assert (found["islands"], found["switches"], found.get("nics")) == (islands, switches, nics)


def test_gpus_have_their_numbers_in_any_order(tmp_path):
    """They had those of the columns."""
    order = [0, 2, 1, 3]
    lines = ["\t".join(["", *(f"GPU{a}" for a in order)])]
    for a in order:
        cells = ("X" if a == b else joined(range(2), range(2, 4))(a, b) for b in order)
        lines.append("\t".join([f"GPU{a}", *cells]))
    (tmp_path / "topo.txt").write_text("\n".join(lines))
    assert topology(tmp_path / "topo.txt")["islands"] == TWO_PAIRS


TWO = matrix(2, joined(range(2)), near(2, lambda gpu: gpu, 2))
GLUED = TWO.replace("NIC0\tNIC1\tC", "NIC0NIC1\tC")
FOUR = matrix(4, joined(range(4)), near(4, lambda gpu: gpu, 4)).replace("\x1b[4m", "").expandtabs()
P2P = "topo -p2p` prints; give what `nvidia-smi topo -m` does"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GLUED, "begins with NIC0, .* or blanks missing"),
        (re.sub(r"(?m)^NIC.*\n", "", GLUED), "GPU0 has 4 connections and the head 3 names"),
        (TWO.replace("NV4", "12"), "line GPU0, column GPU1: '12' is no connection"),
        (TWO.replace("NV4", "GNS"), P2P),
        (TWO.replace("NV4", "OK"), P2P),
        (TWO.replace("NV4", "XGMI"), "a table of rocm-smi, which is not read; name the GPUs"),
        ("==== ROCm System Management Interface ====\n GPU0 GPU1\nGPU0 0 15\n", "of rocm-smi"),
        (TWO.replace("GPU1\tNV4", "GPU7\tNV4"), "begins with GPU7, which the head does not name"),
        # GPUs and NICs to the right of the terminal's edge were not there, and nothing said so
        ("\n".join(line[:32] for line in FOUR.splitlines()), "begins with GPU3, which the head"),
        (re.sub("(?m)^(.{64})(.+)", r"\1\n\2", FOUR), "begins with NIC3, which .* lines wrapped"),
        ("\n".join(FOUR.splitlines()[:3]), "the head names 8 GPUs and NICs, and line GPU2 has 0"),
        (FOUR[:300], r"the head names 8 GPUs and NICs, and line GPU2 has \d conn"),
        (FOUR.partition("\n")[2], "not what `nvidia-smi topo -m` prints"),
        ("Topology is not supported on this operating system", "not what `nvidia-smi topo -m`"),
        ("\n".join(f"0: {line}" for line in FOUR.splitlines()), "not what `nvidia-smi topo -m`"),
        (FOUR.replace("NV4", "ERR!"), "line GPU0, column GPU1: 'ERR!' is no connection"),
        (FOUR.replace("NV4     NV4", "NV4NV4  "), "column GPU1: 'NV4NV4' is no connection"),
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
    assert "8 lists of GPUs with NICs of their own; the NICs of a list" in capsys.readouterr().err


def test_links_that_a_table_lacks_are_left_out_and_said(tmp_path, capsys):
    """A preset's NVLink vanished without a word, also where a table has some that is no island."""
    mesh = matrix(3, lambda a, b: "NV1" if abs(a - b) == 1 else "SYS", {})
    (tmp_path / "topo.txt").write_text(mesh)
    assert read(read_cluster("dgx_a100"), [], tmp_path / "topo.txt").islands == ()
    said = capsys.readouterr().err
    assert "has NVLink between some pairs of GPUs 0, 1, 2 only" in said
    assert "dgx_a100's NVLink of 225 GB/s is left out" in said


def test_the_remedy_for_an_unknown_link_helps(tmp_path, capsys):
    """It named the link and not its lists; and measure took no fields after a preset's name."""
    table = tmp_path / "topo.txt"
    table.write_text(PCIE)
    with pytest.raises(SpecError) as refused:
        read(read_cluster("g6.12xlarge"), [], table)
    told = re.search(r"--cluster '(.*)'", str(refused.value))
    assert told
    wired = told[1].replace("..GB/s", "20GB/s")
    call("measure --json --topology", table, f"--cluster '{wired}'")
    assert json.loads(capsys.readouterr().out)["switches"] == [[0, 1], [2], [3]]


def pairs() -> Cluster:
    lists = {"islands": ((0, 1), (2, 3)), "island": Link(bandwidth=40e9, latency=5e-6)}
    return asked.changed(cluster(1, 4, intra=12e9, latency=1e-5), **lists)


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
    for there, shared in ((base, 2), (asked.changed(base, nics=each(8)), 1)):
        reduced = read(there, [file], None).collectives["all_reduce.inter_node"]
        assert reduced.bandwidth == pytest.approx(shared * found.link.bandwidth)


def test_two_files_of_one_place_are_refused(tmp_path):
    """The last one won, and nothing said so."""
    files = []
    for count in (2, 8):
        (tmp_path / str(count)).mkdir()
        files.append(written(tmp_path / str(count), "all_reduce_perf", ["a"] * count))
    with pytest.raises(SpecError, match=r"both measured all_reduce.island, and a cluster has one"):
        read(read_cluster("dgx_a100"), files, None)


TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0
GPU0\t X \tNV18\tSYS\tSYS\tPIX
GPU1\tNV18\t X \tSYS\tSYS\tSYS
GPU2\tSYS\tSYS\t X \tNV18\tSYS
GPU3\tSYS\tSYS\tNV18\t X \tSYS
NIC0\tPIX\tSYS\tSYS\tSYS\t X
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(lines, topology): what nvidia-smi prints from now on; no cluster has been measured."""
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


def test_a_machine_with_a_gpu_is_no_machine_of_two_cpu_ranks(nvidia_smi):
    """On an H200 `gnnplan plan` planned two CPU ranks, which then trained on the GPU."""
    nvidia_smi("NVIDIA H200, 143771\n")
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
def test_rates_are_those_of_the_preset_with_the_same_gpus(nvidia_smi, name, preset):
    nvidia_smi(f"{name}, 16000\n")
    found, expected = read_cluster("local"), read_cluster(preset).device
    device, source = found.device, found.provenance["device.gemm"]
    assert (device.gemm, device.memory_bandwidth) == (expected.gemm, expected.memory_bandwidth)
    assert (source == "generic default (NVIDIA L4)") == ("Future" in name)


def test_several_gpus_are_wired_as_topo_says(nvidia_smi, monkeypatch):
    nvidia_smi("NVIDIA H100 80GB HBM3, 81559\n" * 4, TOPOLOGY)
    cluster = read_cluster("local")
    assert cluster.ranks == 4 and cluster.islands == ((0, 1), (2, 3))
    assert cluster.island == read_cluster("dgx_h100").island
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # which topo does not number anew
    some = read_cluster("local")
    assert some.ranks == 2 and some.islands == () and some.island is None


@pytest.mark.parametrize("lines", ["", "No devices were found\n"])
def test_no_gpus(nvidia_smi, lines, monkeypatch):
    nvidia_smi(lines)
    assert gpus_here() is None and read_cluster("local").device.kind == "cpu"
    nvidia_smi("NVIDIA H200, 143771\nNVIDIA L4, 23034\n")
    for none in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpus_here() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read_cluster("local").device.name == "NVIDIA L4"
