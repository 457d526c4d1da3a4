"""Specifications from files, flags and --set; writing all or nothing; files of the release before."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import allocations, raising
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.planner.cluster import machines
from gnnplan.planner.cluster.spec import PRESETS, Link
from gnnplan.planner.decision import plan
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import WORKLOADS, Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import (
    LEFT_OUT,
    apply_overrides,
    ask_workload,
    overridden,
    read_cluster,
    read_fitted,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary import files
from gnnplan.planner.vocabulary.errors import SpecError

CONVERGENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "convergence.md"
CLUSTER = """\
name: two
servers: 2
gpus_per_server: 4
device:
  memory: 24GiB
  gemm: 13.9TFLOP/s
  memory_bandwidth: 576GB/s
intra_node: {bandwidth: 23GB/s}
inter_node:
  bandwidth: 200Gbit/s
  latency: 10us
"""


@pytest.fixture
def cluster_with(tmp_path):
    """Writes CLUSTER with one piece of text replaced; gives the path."""

    def write(old="", new=""):
        assert old in CLUSTER
        (tmp_path / "cluster.yaml").write_text(CLUSTER.replace(old, new) if old else CLUSTER + new)
        return str(tmp_path / "cluster.yaml")

    return write


# of CLUSTER, with \n for the end of a line: what is replaced (nothing: put at the end) => by what ->
# what the error says
MISTAKES = r"""
  memory: 24GiB =>   memory: 24 -> cluster.yaml:5: device.memory: a memory size \[B\] must lie in .* Check the unit
  latency: 10us =>   latenzy: 10us -> cluster.yaml:11: inter_node.latenzy: unknown field; did you mean latency
  latency: 10us =>   latency: 10 -> cluster.yaml:11: inter_node.latency: .* 10 is 10. Check the unit, as in 10us
  memory: 24GiB =>   memory: 24GiB\n  launch: 8 -> cluster.yaml:6: device.launch: .* 8 is 8. Check the unit, as in 10us
  latency: 10us =>   latency: -1us -> cluster.yaml:11: inter_node.latency: a latency
200Gbit/s => 200Gfoo/s -> cluster.yaml:10: inter_node.bandwidth: '200Gfoo/s' has an unknown unit
200Gbit/s => -5GB/s -> cluster.yaml:10: inter_node.bandwidth: a bandwidth
{bandwidth: 23GB/s} => {bandwidth: .nan} -> cluster.yaml:8: intra_node.bandwidth: a bandwidth
{bandwidth: 23GB/s} => {bandwidth: []} -> cluster.yaml:8: intra_node.bandwidth: needs a number with a unit
{bandwidth: 23GB/s} => {bandwidth: '٢GB/s'} -> cluster.yaml:8: intra_node.bandwidth: .* is not a number with a unit
{bandwidth: 23GB/s} => {bandwidth: 5000s} -> cluster.yaml:8: intra_node.bandwidth: .*B/s, but '5000s' is in s. Check
  memory: 24GiB =>   memory: 24GiB\n  power: 300GB -> cluster.yaml:6: device.power: .*in W, but '300GB' is in B
  memory: 24GiB =>   memory: 24GiB\n  power: 1MW -> cluster.yaml:6: device.power
servers: 2 => servers: 90000 -> at most 8,192
servers: 2 => servers: two -> cluster.yaml:2: servers: must be a whole number, as 2, not 'two'
servers: 2 => servers: true -> cluster.yaml:2: servers: must be a number or text, not true or false
servers: 2 => servers: 1e1 -> cluster.yaml:2: servers: must be a whole number, as 2
servers: 2 => servers: '٢' -> cluster.yaml:2: servers: must be a whole number, as 2
servers: 2 => servers: 0 -> cluster.yaml:2: servers: must be greater than or equal to 1
  gemm: 13.9TFLOP/s\n =>  -> cluster.yaml:4: device.gemm: missing
  memory: 24GiB =>   memory: -> cluster.yaml:
  memory: 24GiB =>   memory: 24GiB\n  gather: {64: {}} -> cluster.yaml:6: device.gather.64: .*at least 1 item
  memory: 24GiB =>   memory: 24GiB\n  gather: {0: 1GB/s} -> cluster.yaml:6: device.gather.0.*greater than or equal to 1
  memory: 24GiB =>   memory: 24GiB\n  gather: {64: {1MB: 1foo/s}} -> cluster.yaml:6: device.gather.64.1MB: '1foo/s' has
 => servers: 3\n -> cluster.yaml:12: servers: given twice, first in line 2
 => serverz: 3\n -> cluster.yaml:12: serverz: unknown field; did you mean servers?
 => provenance: [1]\n -> cluster.yaml:12: provenance: must be a mapping \(key: value\), not \[1\]
 => ranges: {device.gemm: 2}\n -> cluster.yaml:12: ranges.device.gemm: must be a list, as \[1, 2\], not 2
 => collectives:\n  all_reduce.intra_node: {bandwith: 1GB/s}\n -> cluster.yaml:13: .*bandwith: unknown field; did you mean band
 => collectives:\n  all_redu.intra_node: {bandwidth: 1GB/s}\n -> no operation and link 'all_redu.intra_node'; did you mean all_reduce.intra_node
 => all_reduce: rings\n -> all_reduce: must be 'ring', 'tree' or 'hierarchical'
 => device: *d\n -> cluster.yaml:12: not valid YAML
 => provenance: &p {a: b}\ncollectives: *p\n -> cluster.yaml:.*anchors and aliases
 => provenance: !!python/object/apply:os.getcwd []\n -> cluster.yaml:12: provenance: must be a mapping
 => a: [1\n -> cluster.yaml:.*not valid YAML
 => ? [a]\n: 1\n -> cluster.yaml:12: .*a key must be a word
inter_node:\n  bandwidth: 200Gbit/s\n  latency: 10us\n =>  -> inter_node \(the link between servers\) must be given
"""


@pytest.mark.parametrize("row", MISTAKES.strip("\n").splitlines())
def test_mistakes_are_reported_by_file_line_and_field(cluster_with, row):
    change, words = row.split(" -> ")
    old, new = (text.replace("\\n", "\n") for text in change.split(" => "))
    with pytest.raises(SpecError, match=words):
        read_cluster(cluster_with(old, new))


def test_what_is_no_mistake(cluster_with):
    """`kind: gpu` was asked whether it means cpu; a latency may be as long as the bound."""
    assert read_cluster(cluster_with("device:\n", "device:\n  kind: gpu\n")).device.kind == "cuda"
    assert read_cluster(cluster_with("latency: 10us", "latency: 0.1")).inter_node.latency == 0.1


def test_all_mistakes_are_reported_at_once(cluster_with):
    with pytest.raises(SpecError) as error:
        read_cluster(cluster_with("2\ngpus_per_server: 4", "0\ngpus_per_server: none"))
    assert [line.split(":")[1] for line in str(error.value).splitlines()] == ["2", "3"]


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    """`-o /dev/null` as root made a file of it, a pipe's reader got nothing, a link lost its file."""
    pipe, file, link = tmp_path / "pipe", tmp_path / "file", tmp_path / "link"
    os.mkfifo(pipe)
    file.write_text("before")
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        files.write_atomically(path, "after")
    assert os.read(reader, 10) == b"after" and pipe.is_fifo()
    os.close(reader)
    assert link.is_symlink() and file.read_text() == "after"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 2]", "must be a mapping"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"a: " + b"[" * 1000, "not valid YAML"),
        (b"#" * (5 << 20), "larger than"),
        (None, r"no.yaml: cannot be read \(No such file"),
    ],
    ids=["a list", "bytes", "deep", "large", "absent"],
)
def test_files_that_are_no_specification(tmp_path, content, words):
    if content is not None:
        (tmp_path / "no.yaml").write_bytes(content)
    with pytest.raises(SpecError, match=words):
        read_cluster(str(tmp_path / "no.yaml"))
    with pytest.raises(SpecError, match=r"cannot be read \(Is a directory"):
        files.read_yaml(tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_presets_are_whole_and_say_where_numbers_come_from(name):
    cluster = read_cluster(name)
    assert cluster.name == name
    needed = {f"device.{name}" for name in ("memory", "gemm", "memory_bandwidth")}
    needed |= {"intra_node.bandwidth", "intra_node.latency"}
    needed |= {"inter_node.bandwidth", "inter_node.latency"} if cluster.inter_node else set()
    needed |= {"price"} if cluster.price else set()
    assert needed <= set(cluster.provenance)
    sources = "datasheet", "printed", "derived", "assumed", "generic default", "measured"
    for field, text in cluster.provenance.items():
        assert text.startswith(sources), field


@pytest.mark.parametrize("name", machines.instance_types())
def test_servers_of_clouds_are_whole_and_say_where_numbers_come_from(name):
    cluster = read_cluster(name)
    assert cluster.name == name and cluster.servers == 1 and cluster.sampler == "host"
    assert sorted(gpu for nic in cluster.nics for gpu in nic) == list(range(cluster.ranks))
    row = next(row for row in files.quoted("clouds.csv") if row["name"] == name)
    assert cluster.price * cluster.ranks == pytest.approx(float(row["dollars_per_hour"]))
    whole = cluster.inter_node.bandwidth * len(cluster.nics)
    assert whole == pytest.approx(0.75 * float(row["gbit_per_s"]) * 1e9 / 8)
    told = cluster.provenance
    assert {"price", "host_memory", "device.gemm", "inter_node.bandwidth"} <= set(told)
    assert row["priced"] in told["price"] and row["price_source"] in told["price"]
    for field, text in told.items():
        assert text.startswith(("datasheet", "printed", "derived", "assumed")), field


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gnnpipe_a500", r"did you mean gnnpipe_a5000\? Allowed: dgx_a100, .*local"),
        ("P4D", r"servers have a size too; use one of p4d\.24xlarge"),
        ("DGX_A10", r"did you mean dgx_a100\?"),  # p3_p100 was suggested
    ],
)
def test_an_unknown_preset_or_server_is_told_the_known_ones(name, words):
    with pytest.raises(SpecError, match=words):
        read_cluster(name)


def test_a_name_is_taken_in_any_case_with_either_dash_and_as_others_write_it():
    """`--model GCN`, `--dtype bf16` and `--cluster DGX_A100` were refused, without the nearest."""
    assert read_cluster("DGX-A100") == read_cluster("dgx_a100")
    found = read_fitted("P4D.24XLARGE", "gcn")[0]  # lacked a size
    assert found.device.name == "NVIDIA A100 40GB" and found.gpus_per_server == 8
    assert read_fitted("PipeGCN_2080ti", "sage") == read_fitted("pipegcn_2080ti", "sage")
    assert ask_workload("PipeGCN-Reddit").workload == ask_workload("pipegcn_reddit").workload
    asked = {"model": "GraphSAGE", "dtype": "BF16", "mode": "mini-batch", "metric": "F1-Macro"}
    found = ask_workload(None, {**asked, "fanout": "Full", "optimizer": "AdamW"}).workload
    assert (found.model, found.dtype, found.mode) == ("sage", "bfloat16", "mini")
    assert (found.metric, found.fanout, found.optimizer) == ("f1_macro", "full", "adamw")
    assert ask_workload(None, {"fanout": "5"}).workload.fanout == (5,)
    names = {"GCNConv": "gcn", "GATv2Conv": "gatv2", "GCN2Conv": "gcnii", "SAGEConv": "sage"}
    assert {name: Workload(model=name).model for name in names} == names


def test_local_is_as_measured_where_it_was_measured(own_cache, cluster_with):
    assert set(read_cluster("local").provenance.values()) == {"generic default"}
    (own_cache / "local.yaml").write_text(CLUSTER)
    assert read_cluster("local").name == "two"
    (own_cache / "local.yaml").write_text("servers: 1\n")
    missing = f"(?s){own_cache}/local.yaml:1: device: missing.*; `gnnplan measure` writes"
    with pytest.raises(SpecError, match=missing):
        read_cluster("local")


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    assert files.cache_dir() == type(tmp_path)(os.environ["GNNPLAN_CACHE"])
    monkeypatch.delenv("GNNPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / "gnnplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_dir() == tmp_path / ".cache" / "gnnplan"


def test_the_page_has_what_every_preset_of_a_workload_says():
    """A number in one place is a number in the other; what a paper does not print, neither has."""
    page = CONVERGENCE.read_text()
    names = sorted(path.stem for path in WORKLOADS.glob("*.yaml"))
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == names
    for name in names:
        workload = ask_workload(name).workload
        said = files.read_yaml(WORKLOADS / f"{name}.yaml").data
        row = [workload.model, f"{workload.layers} x {workload.hidden}"]
        row.append("Adam" if "optimizer" in said else "-")
        numbers = (said.get(field) for field in ("lr", "dropout", "epochs"))
        row += ["-" if number is None else f"{number:g}" for number in numbers]
        assert f"| `{name}` | {' | '.join(row)} |" in page


def test_a_workload_is_a_preset_or_a_file(tmp_path):
    assert ask_workload("pipegcn_reddit").workload.epochs == 3000
    assert ask_workload("pipegcn_reddit", {"epochs": 5}).workload.epochs == 5
    odd = tmp_path / "workload"
    odd.write_text("layers: 4\n")
    assert ask_workload(str(odd)).workload.layers == 4
    with pytest.raises(SpecError, match="a preset; did you mean pipegcn_reddit"):
        ask_workload("pipegcn_redit")


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"layers": 0}, "--layers: must be greater than or equal to 1"),
        ({"fanout": "15,x"}, "--fanout: must be full, or a number"),
        ({"class_weights": "1,x"}, "--class-weights: must be balanced, or a number for each class"),
        ({"optimizer": "adam", "momentum": 0.9}, "--momentum: adam has moments of its own"),
        ({"schedule": "cosine", "warmup": 50}, "--warmup: a cosine falls between warmup and the"),
        ({"model": "gatt"}, "--model: must be 'gcn'.*not 'gatt'; did you mean gat"),
        ({"model": "gcm"}, "did you mean gcn"),  # sgc was suggested
        ({"dtype": "fp16"}, "--dtype: must be .*, not 'fp16'"),
        ({"hiden": 3}, "hiden: neither an argument nor a field .* did you mean hidden"),
        ({"model": "gat", "hidden": 10}, r"heads \(hidden: 10, heads: 4\); use heads=2"),
        ({"model": "gat", "heads": 0}, "--heads: must be greater"),
        ({"model": "gcnii", "norm": "batch"}, "gcnii is defined without a norm .*use norm=none"),
        ({"model": "sgc", "norm": "layer"}, "sgc is .* without a norm .*use norm=none, or gcn"),
        ({"model": "resgcn", "aggregation": "max"}, "--aggregation: must be 'softmax' or 'sum'"),
        ({"norm": "group"}, "--norm: must be 'none', 'layer' or 'batch'"),
    ],
)
def test_bad_flags_are_named(flags, words):
    with pytest.raises(SpecError, match=words):
        ask_workload(None, flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"fanout": "5,5"}, "--fanout: fanout has a number per layer.*: 2 numbers, layers: 3"),
        ({"layers": 4}, "--layers: fanout has a number per layer.*: 3 numbers, layers: 4"),
        ({"layers": 4, "fanout": "5,5"}, "--fanout: fanout has a number per layer"),
        ({"layers": 500, "fanout": "full"}, "--layers: a mini-batch reaches a hop further"),
    ],
)
def test_a_rule_about_two_fields_names_the_option_that_was_given(tmp_path, flags, words):
    """`--fanout 5,5` with three layers was refused as `--: fanout has a number per layer`: a rule
    about several fields has no field of its own, and the prefix stood alone. Files and --set had
    the same gap: the first line of the file, and `--set:`."""
    path = tmp_path / "workload.yaml"
    path.write_text("mode: mini\nfanout: 5,5,5\n")
    with pytest.raises(SpecError, match=f"^{words}"):
        ask_workload(str(path), flags)
    settings = {name: str(value) for name, value in flags.items()}
    with pytest.raises(SpecError, match=f"^{words.replace('--', '--set ', 1)}"):
        overridden(ask_workload(str(path)).workload, settings)
    path.write_text("mode: mini\nfanout: 5,5\n")
    with pytest.raises(SpecError, match=r"workload.yaml:2: fanout: fanout has a number per layer"):
        ask_workload(str(path))


def test_overrides_go_where_they_belong():
    given = ["servers=16", "inter_node.bandwidth=25GB/s", "hidden=256", "fanout=3,2"]
    given += ["device.gather.64=5GB/s", "device.power=0.3kW"]
    given += ["collectives.all_reduce.inter_node.bandwidth=2GB/s"]
    # refused, as the last dot was taken for a field of `inter_node`
    about = ["ranges.device.power=[0.8, 1.25]", "provenance.device.power=by hand"]
    given = [*about, *given]
    cluster, workload = apply_overrides(read_cluster("pipegcn_2080ti"), Workload(), given)
    assert (cluster.servers, cluster.inter_node.bandwidth) == (16, 25e9)
    assert cluster.device.gather == {64: {1.0: 5e9}} and cluster.device.power == 300
    assert cluster.collectives["all_reduce.inter_node"].bandwidth == 2e9
    assert cluster.provenance["servers"] == cluster.provenance["inter_node.bandwidth"] == "--set"
    assert cluster.provenance["device.power"] == "by hand"
    assert cluster.ranges == {"device.power": (0.8, 1.25)}
    assert (workload.hidden, workload.fanout) == (256, (3, 2))


@pytest.mark.parametrize(
    "setting, words",
    [
        ("ranks=4", "ranks is no field .* but an option of gnnplan plan: --ranks 4"),
        ("hiden=3", "--set hiden=3: no such field; did you mean hidden.*inter_node.bandwidth"),
        ("servers", "must read field=value"),
        ("servers=", "must read field=value"),
        ("servers=1.5", "--set servers: must be a whole number, as 2, not '1.5'"),
        ("price=2.20EUR", "price: must be a number of dollars per GPU and hour, as 2, not '2.20E"),
        ("intra_node.bandwidt=3GB/s", "--set intra_node.bandwidt: unknown field; .* bandwidth"),
        ("servers.x=3", "servers is a single value without fields"),
        ("intra_node.bandwidth=25", "Check the unit"),
        ("servers=2", "--set servers: servers is 2, so inter_node"),
        ("device=3", "--set device: must be a mapping of fields; give memory, gemm"),
        ("ranges.device.gemm=2", r"--set ranges.device.gemm: must be a list, as \[1, 2\], not 2"),
        ("ranges.device.gemm=[2", r"not JSON .*; write low and high, as \[0.8, 1.25\]"),
    ],
)
def test_bad_overrides_are_named(setting, words):
    with pytest.raises(SpecError, match=words):
        apply_overrides(read_cluster("pipegcn_2080ti"), Workload(), [setting])


def test_what_was_measured_on_a_link_is_carried_to_another(cluster_with):
    """Software's share stays: 1/10 = 1/25 + 0.06 s/GB. Messages between CPU ranks were measured at
    2.6 times the link (the exchange's rate), which took 129 MB/s over a wire declared as 50 MB/s: a
    pipeline was predicted at half of what it took."""
    all_reduce = "  all_reduce.inter_node: {bandwidth: 10GB/s, latency: 40us}\n"
    exchange = "  exchange.intra_node: {bandwidth: 5GB/s}\n"
    measured = read_cluster(cluster_with("", f"collectives:\n{all_reduce}{exchange}"))

    def carried(**changes: str) -> dict[str, Link]:
        told = {name.replace("__", "."): value for name, value in changes.items()}
        return overridden(measured, told).collectives

    for gigabytes in (0.05, 1, 50, 1000):
        there = carried(inter_node__bandwidth=f"{gigabytes}GB/s")
        reduced = there["all_reduce.inter_node"]
        assert reduced.bandwidth == pytest.approx(1e9 / (1 / gigabytes + 0.06))
        assert reduced.latency == pytest.approx(40e-6)
        assert there["exchange.intra_node"].bandwidth == 5e9
    latency = carried(inter_node__latency="1ms")["all_reduce.inter_node"].latency
    assert latency == pytest.approx(1e-3 + 40e-6 - measured.inter_node.latency)
    assert carried(inter_node__bandwidth="25GB/s") == measured.collectives
    own = {"collectives.all_reduce.inter_node.bandwidth": "1GB/s"}
    assert carried(inter_node__bandwidth="50GB/s", **own)["all_reduce.inter_node"].bandwidth == 1e9


@pytest.mark.parametrize("op", ["exchange", "send", "all_reduce"])
@given(
    rates=st.lists(st.floats(1e6, 1e12), min_size=3, max_size=3, unique=True),
    faster=st.floats(1.0, 100.0),
)
def test_a_faster_link_slows_nothing_down(op, rates, faster):
    """And none beats a link that it did not beat where it was measured."""
    own, old, new = (Link(bandwidth=rate) for rate in rates)
    cluster = read_cluster("pipegcn_2080ti").model_copy(
        update={"inter_node": old, "collectives": {f"{op}.inter_node": own}}
    )

    def on(bandwidth):
        changed = cluster.model_copy(update={"inter_node": Link(bandwidth=bandwidth)})
        return changed.carried(cluster).collectives[f"{op}.inter_node"].bandwidth

    assert on(new.bandwidth * faster) >= on(new.bandwidth) * (1 - 1e-9)
    assert own.bandwidth > old.bandwidth or on(new.bandwidth) <= new.bandwidth * (1 + 1e-9)
    assert on(old.bandwidth) == own.bandwidth


def test_writing_replaces_or_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    files.write_atomically(path, "older")
    files.write_atomically(path, b"old")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["plan.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    monkeypatch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
    with pytest.raises(SpecError, match=r"plan.json: cannot be written \(No space left"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_folders_are_made_only_when_asked_for(tmp_path):
    path = tmp_path / "a" / "b" / "x.txt"
    with pytest.raises(SpecError, match="does not exist; create it first"):
        files.write_atomically(path, "x")
    files.write_atomically(path, "x", parents=True)
    assert path.read_text() == "x"


def test_a_folder_that_is_read_only_is_refused_before_long_work(tmp_path, monkeypatch):
    """`partition` cut a graph for minutes first, and `measure` and `plan` worked on."""
    (tmp_path / "there").write_text("old")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in ("new", "there"):
        with pytest.raises(SpecError, match=r"cannot be written \(.* is read-only\); choose"):
            files.must_be_writable(tmp_path / name)
    files.must_be_writable(Path("/dev/null"))
    with pytest.raises(SpecError, match=r"^\.: cannot be written"):
        files.write_atomically(".", "new")


def test_a_small_file_takes_little_memory(tmp_path):
    """A rank out of memory could not read its plan of some kB: the buffer had the size allowed."""
    (tmp_path / "small").write_bytes(b"x" * 100)
    with allocations() as most:
        assert len(files.read_bytes(tmp_path / "small", 64 << 20)) == 100
        assert most() < 1 << 20


def test_what_killed_writers_left_is_removed(tmp_path, monkeypatch):
    for name in (".hidden", "plan.json", ".rank0.safetensors"):
        (tmp_path / name).write_text("kept")
    kept = set(tmp_path.iterdir())
    monkeypatch.setattr(os, "replace", lambda *_: os.write(-1, b""))  # as if killed here
    monkeypatch.setattr(Path, "unlink", lambda *_: None)
    with pytest.raises(SpecError):
        files.write_atomically(tmp_path / "trace.rank0.json", "{}")
    monkeypatch.undo()
    assert len(set(tmp_path.iterdir()) - kept) == 1
    files.forget_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == kept


LOCAL = PRESETS / "local.yaml"


def as_before(cluster: dict[str, Any]) -> dict[str, Any]:
    """A cluster's fields under their names of 0.1.0."""
    for name in ("intra_node", "inter_node"):
        if cluster.get(name):
            cluster[name]["work"] = cluster[name].pop("core_s_per_byte", 1e-9)
    return cluster


def test_a_cluster_file_of_the_release_before_is_read(tmp_path, capsys):
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(as_before(yaml.safe_load(LOCAL.read_text()))))
    assert read_cluster(str(path)).intra_node.core_s_per_byte == 1e-9
    told = capsys.readouterr().err
    assert str(path) in told and "work is now core_s_per_byte" in told


def test_fields_that_bought_little_are_read_and_left_out(tmp_path, capsys):
    """`gnnplan measure` has written them, and so have plans."""
    document = yaml.safe_load(LOCAL.read_text())
    document["device"] |= {"weight_gradient": 1e9, "memory_rates": {1e3: 1e9}}
    document["intra_node"]["core_s_per_message"] = 1e-5
    document |= {"timeslice_slowdown": 1.2, "cold_cache_penalty": 0.001, "host_latency": {}}
    document["ranges"] = {"device.weight_gradient": [0.9, 1.1]}
    document["provenance"] = document.get("provenance", {}) | {"timeslice_slowdown": "measured"}
    path = tmp_path / "measured.yaml"
    path.write_text(yaml.safe_dump(document))
    found, local = read_cluster(str(path)), read_cluster(str(LOCAL))
    alike = {"provenance": local.provenance, "intra_node": local.intra_node}
    assert found.model_copy(update=alike) == local
    assert not capsys.readouterr().err
    for field in ("device.weight_gradient", "timeslice_slowdown"):
        assert field in LEFT_OUT
        with pytest.raises(SpecError, match=rf"{field}.*(no such|unknown) field"):
            apply_overrides(local, Workload(), [f"{field}=1.5e9"])


def test_a_plan_of_the_release_before_is_read(tmp_path, capsys):
    graph = load("synthetic:community?vertices=100&edges=600&features=8&classes=3")
    problem = Problem(graph.stats, graph, Workload(layers=2, hidden=8), read_cluster(str(LOCAL)))
    document = plan.make(search(problem))
    document = {**document, "gnnplan": "0.1.0", "cluster": as_before(document["cluster"])}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert plan.question(plan.read(path)).cluster == problem.cluster
    assert "work is now core_s_per_byte" in capsys.readouterr().err
