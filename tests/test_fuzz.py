"""Inputs under attack: whatever a file holds, reading it works or says in a line what is wrong with
it, in little time and memory.

The law is the same for every kind of file: a GnnplanError that names the file, or an answer; no
other exception (a traceback), no hang, no gigabytes, no code that a file brought along."""

import copy
import csv
import functools
import io
import json
import operator
import os
import pickle
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import corpus
import numpy as np
import pytest
import yaml
from calls import Answer, rewritten
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nightly import examples, text

import gnnplan.planner.graph.arrays as graphs
import gnnplan.planner.graph.graph as graph_module
from gnnplan.executor.launch.run_request import Options
from gnnplan.papers.published import COLUMNS, evaluate_rows
from gnnplan.papers.published import read as read_published
from gnnplan.planner.cluster.spec import PRESETS
from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.search import search
from gnnplan.planner.evidence import runs as recorded
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import ask_workload, overridden, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import read_json
from gnnplan.planner.vocabulary.trace import read_traces, write_traces
from gnnplan.simulator.player import play
from gnnplan.simulator.replay import must_be_playable, replay

SECONDS = 10.0  # of CPU that one reading may take; they take milliseconds
MEMORY = 2 << 30  # [B] that it may map beside what is there
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class Hung(BaseException):
    """No OSError, as TimeoutError is, which readers may take for a bad file."""


@contextmanager
def hung_after(seconds: float, clock: int, alarm: int, why: str) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Hung(why)

    previous = signal.signal(alarm, late)
    signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        signal.setitimer(clock, 0)
        signal.signal(alarm, previous)


@contextmanager
def limits() -> Iterator[None]:
    """Hung after SECONDS of CPU, MemoryError beyond MEMORY."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    busy = f"still busy after {SECONDS} s"
    with hung_after(SECONDS, signal.ITIMER_VIRTUAL, signal.SIGVTALRM, busy):
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def obeys(name: str, call: Callable[[], Any]) -> str | None:
    """What the error says, which names the file; None: there was none."""
    try:
        with limits():
            call()
    except GnnplanError as error:
        said = str(error)
        assert name in said and len(said) < 10_000, said[:1000]
        return said
    return None


NUMBERS = [0, -1, 1, 2, 3, 1.5, 1e-300, 1e300, -1e300, float("nan"), float("inf")]
LARGE = [10**6, 10**9, 2**31, 2**63, 10**18, -(10**18), 10**40, 10**299, 10**310]
WORDS = ["", " ", "x", "-1", "1e400", "9" * 400, "25GB/s", "1e300s", "A" * 20_000]
WORDS += ["\0", "\ud800", "../../etc/passwd", "é" * 3]
NESTED = [[], [[]], {}, {"": None}, [1, 2], ["x"] * 50, [[0, 1], [2, 3]], {"name": "x"}, {"1": 1}]
EXTREME = [*NUMBERS, *LARGE, *WORDS, *NESTED, True, None]
garbage = st.one_of(st.sampled_from(EXTREME), st.integers(), st.floats(), text(5))


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside."""
    inside = enumerate(document) if isinstance(document, list) else ()
    for name, value in document.items() if isinstance(document, dict) else inside:
        yield (*at, name)
        yield from places(value, (*at, name))


def there(document: Any, at: Iterable[Any]) -> Any:
    return functools.reduce(operator.getitem, at, document)


@st.composite
def changed(draw: st.DrawFn, document: Any, kept: tuple[str, ...] = ()) -> Any:
    """A document with one to three places dropped, renamed, repeated or changed, but for `kept`."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        everywhere = [at for at in places(document) if at[0] not in kept]
        if not everywhere:
            return copy.deepcopy(draw(garbage))
        *parents, last = draw(st.sampled_from(everywhere))
        target = there(document, parents)
        how = draw(st.sampled_from(["value", "value", "value", "drop", "rename", "wrap", "swap"]))
        if how == "drop":
            del target[last]
        elif how == "rename" and isinstance(target, dict):
            target[draw(text(4))] = target.pop(last)
        elif how == "wrap":
            target[last] = [target[last]] * draw(st.integers(1, 3))
        else:
            other = there(document, draw(st.sampled_from(everywhere))) if how == "swap" else None
            target[last] = copy.deepcopy(draw(garbage) if other is None else other)
    return document


SIZES = [0, 1, 2, 7, 1000, 4096, 10_000, 10**6, 10**9, 10**12, 2**62, 10**30, 1e-12, 0.01, 1e300]


@st.composite
def numbers_changed(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A document with other numbers, of any size: such as its fields may well take."""
    document = copy.deepcopy(document)
    for at in draw(st.lists(st.sampled_from(list(places(document))), min_size=1, max_size=3)):
        *parents, last = at
        target = there(document, parents)
        if not isinstance(target[last], dict | list):
            target[last] = draw(st.sampled_from(SIZES))
    return document


@st.composite
def damaged(draw: st.DrawFn, raw: bytes, pieces: tuple[bytes, ...] = (b"",)) -> bytes:
    """Bytes cut short, overwritten, or with something put in between."""
    raw = bytes(raw)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        how = draw(st.sampled_from(["cut", "over", "in", "piece"]))
        some = st.sampled_from(pieces) if how == "piece" else st.binary(min_size=1, max_size=4)
        new = b"" if how == "cut" else draw(some)
        rest = {"cut": b"", "over": raw[at + len(new) :]}
        raw = raw[:at] + new + rest.get(how, raw[at:])
    return raw


CLUSTER = yaml.safe_load((PRESETS / "gnnpipe_a5000.yaml").read_text()) | {
    "gpus_per_server": 4,
    "islands": [[0, 1], [2, 3]],
    "island": {"bandwidth": "50GB/s", "efficiency": {1000: 0.1, 1e6: 1.0}},
    "nics": [[0, 1], [2, 3]],
    "fabric": {"kind": "leaf_spine", "servers_per_leaf": 1, "oversubscription": 2.0},
    "price": 1.0,
    "host_rates": {"draw": 1e7},
    "collectives": {"all_reduce.intra_node": {"bandwidth": "5GB/s"}},
}
WORKLOAD = yaml.safe_load(
    "{model: gat, layers: 2, hidden: 16, dropout: 0.1, mode: mini, batch: 100, fanout: [5, 3],"
    " seed: 1, optimizer: adam, lr: 0.01, epochs: 3, dtype: float32, alpha: 0.1, theta: 0.5,"
    " heads: 2, aggregation: softmax, norm: layer}"
)
STATISTICS = yaml.safe_load(
    "{vertices: 10000, edges: 100000, features: 50, classes: 7, train_fraction: 0.5, name: some,"
    " multilabel: false, halo_rows: {2: 500, 4: 900}, spread: 1.0, batch_spread: [0.5, 1.0],"
    " near_seed: 300, train_popular: true, directed: false}"
)
TAGGED = "timestamp soon|int x|float ''|bool maybe|map x|set x|binary x|null x|omap x"
PIECES = (
    *(f"!!{tagged}".encode() for tagged in TAGGED.split("|")),
    *(b"!!python/object/apply:os.getcwd []", b"&a ", b"*a", b"<<: ", b"? ", b"- ", b": "),
    *(b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"---\n", b"%YAML 9\n", b"2001-99-99"),
    *(b"0x" + b"f" * 5000, b"1" * 5000, b"1:" * 3000 + b"1"),
    *(b"[\n" * 600, b"{\n" * 600, b"- " * 600),
    *(b"=", b"|", b">", b"'", b'"', b"\t", b"#"),
)
READERS: list[tuple[str, Any, Callable[[str], Any]]] = [("cluster.yaml", CLUSTER, read_cluster)]
READERS += [("workload.yaml", WORKLOAD, ask_workload), ("statistics.yaml", STATISTICS, load)]


@pytest.mark.parametrize("name, document, read", READERS, ids=[each[0] for each in READERS])
@settings(shared, max_examples=examples(200))
@given(data=st.data())
def test_specifications_with_wrong_values_and_bytes(tmp_path, data, name, document, read):
    values = st.builds(yaml.safe_dump, changed(document)).map(str.encode)
    spoilt = st.one_of(values, values, damaged(yaml.safe_dump(document).encode(), PIECES))
    (tmp_path / name).write_bytes(data.draw(spoilt))
    obeys(name, lambda: read(str(tmp_path / name)))


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_of_yaml_as_a_value_and_as_a_key(tmp_path, piece):
    for name, _, read in READERS:
        for raw in (
            b"layers: " + piece,
            b"vertices: " + piece + b"\nedges: 3\nfeatures: 1\nclasses: 0\n",
            piece + b": 1\n",
            piece,
        ):
            (tmp_path / name).write_bytes(raw)
            obeys(name, lambda read=read, name=name: read(str(tmp_path / name)))


@pytest.mark.slow
@settings(shared, max_examples=examples(40))
@given(data=st.data())
def test_any_allowed_question_has_an_answer(tmp_path, data):
    """What files say may be absurd and yet allowed: planning answers, or says what does not fit."""
    spoilt = data.draw(st.sampled_from(READERS))[0]
    for name, document, _ in READERS:
        held = data.draw(numbers_changed(document)) if name == spoilt else document
        (tmp_path / name).write_text(yaml.safe_dump(held))
    try:
        cluster = read_cluster(str(tmp_path / "cluster.yaml"))
        workload = ask_workload(str(tmp_path / "workload.yaml")).workload
        stats = load(str(tmp_path / "statistics.yaml"))
    except SpecError:
        return
    problem = Problem(stats, None, workload, cluster)
    obeys("", lambda: json.dumps(plans.make(search(problem, may_use_fewer=False)), allow_nan=False))


@pytest.mark.parametrize(
    ("strategy", "workload"),
    [
        ("gnnpipe(stages=2,chunks=1000000000)", {}),
        ("gnnpipe(stages=2,chunks=8,period=10000000000)", {}),
        ("granndis(max_hop=1,fanout=10,batches=1000000000)", {}),
        ("granndis(max_hop=1000000000,fanout=1000000000)", {}),
        ("data_parallel(prefetch=1000000000)", {"mode": "mini"}),
        ("gsplit(presample=1000000000)", {"mode": "mini"}),
        ("p3(prefetch=100000000)", {"mode": "mini"}),
        ("data_parallel", {"mode": "mini", "batch": 8}),
        ("data_parallel", {"mode": "mini", "fanout": f"{10**12},10,10"}),
        ("data_parallel", {"mode": "mini", "layers": 10_000}),
        ("data_parallel", {"mode": "mini", "layers": 1000, "hidden": 1}),
        ("graph_parallel", {"layers": 10_000}),
    ],
)
def test_strategies_of_absurd_sizes_are_weighed_or_refused(tmp_path, strategy, workload):
    """On a graph that has room for them."""
    sizes = f"vertices: {10**12}\nedges: {10**13}\nfeatures: 100\nclasses: 10\n"
    (tmp_path / "s.yaml").write_text(sizes)
    cluster = overridden(read_cluster("gnnpipe_a5000"), {"device.memory": "1000TB"})

    def use() -> None:
        asked = ask_workload(None, workload).workload
        problem = Problem(load(str(tmp_path / "s.yaml")), None, asked, cluster)
        must_be_playable(problem, evaluate(problem, parse(strategy)).strategy.steps(problem))

    obeys("", use)


N, E = 12, 40
_rng = np.random.default_rng(0)
ARRAYS = {"src": _rng.integers(0, N, E), "dst": _rng.integers(0, N, E)}
ARRAYS |= {"x": _rng.random((N, 3), np.float32), "y": np.arange(N) % 3}
ARRAYS |= {"train_mask": np.arange(N) < 6, "val_mask": np.arange(N) == 7}
ARRAYS |= {"meta": np.array('{"classes": 3}')}
SPARSE = {"x_indptr": np.arange(N + 1), "x_indices": np.arange(N) % 3, "x_shape": np.array([N, 3])}
SPARSE |= {"x_data": np.ones(N)}


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def lying(
    descr: str, shape: str, payload: bytes = b"", fortran: str = "False", version: int = 1
) -> bytes:
    """An npy file with this header."""
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n".encode()
    size = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + payload


def files_of(arrays: dict[str, np.ndarray]) -> list[tuple[str, bytes]]:
    return [(f"{name}.npy", npy(array)) for name, array in arrays.items()]


def zipped(path: Path, files: list[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, raw in files:
            archive.writestr(name, raw)


def in_a_folder(path: Path, files: list[tuple[str, bytes]]) -> None:
    path.mkdir()
    for name, raw in files:
        (path / name).write_bytes(raw)


SHAPES = f"() (0,) (12,) (40,) (12,3) (12,0) (0,12) (2**40,) ({2**62},0) ({10**30},)"
SHAPES += f" ({2**32},{2**32}) (-1,) (-4,-10) (True,) (1.5,) 12 [12] ('a',) (12,2000000)"
DTYPES = "<i8 <u8 |b1 <f4 <f8 <f2 <c16 |O <U0 |V0 |V1000000000 <U500000000 <M8[s] x >i8"
OTHER_DTYPES = ["[('a', '<i8')]", "[('a', '|O')]", "('<i4', (1000,))", "None", "{}"]
OTHER_DTYPES += ["'<i8'" + " " * 50]
shapes = st.sampled_from(SHAPES.split())
dtypes = st.sampled_from([*(f"'{name}'" for name in DTYPES.split()), *OTHER_DTYPES])
of_arrays = dtypes, shapes, st.binary(max_size=50), st.sampled_from(["False", "True", "None"])
lies = st.builds(lying, *of_arrays, st.sampled_from([1, 2, 3, 9]))
KINDS = "int8 int32 int64 uint64 float16 float32 float64 bool complex64 object"


@st.composite
def others(draw: st.DrawFn) -> bytes:
    """An honest array of another shape, type or content."""
    shapes = [(), (0,), (1,), (N,), (N + 1,), (E,), (N, 3), (N, 1), (3, N), (1, 1, 1), (2,)]
    fills = [0, 1, -1, 2, 5, N, 127, 10**9, 2**31, 2**63 - 1, 2**64 - 1, *(1e300, 0.5)]
    shape = draw(st.sampled_from(shapes))
    fill = draw(st.sampled_from([*fills, float("nan"), float("inf")]))
    with np.errstate(all="ignore"):
        try:
            return npy(np.full(shape, fill).astype(draw(st.sampled_from(KINDS.split()))))
        except (OverflowError, ValueError):
            return npy(np.zeros(shape))


@st.composite
def arrays(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """The files of a graph, some of them changed."""
    kept = {name: array for name, array in ARRAYS.items() if name != "x"} | SPARSE
    files = dict(files_of(kept if draw(st.booleans()) else ARRAYS))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*graphs.ARRAYS, "meta"])) + ".npy"
        how = draw(st.sampled_from(["drop", "lie", "other", "damage", "text"]))
        if how == "drop":
            files.pop(name, None)
        elif how == "text":
            of_meta = [f'{{"classes": {10**30}}}', '{"vertices": 1e999}', '{"vertices": 99999999}']
            texts = [*of_meta, "[" * 50_000, "{}", "[]", "\0", "9" * 5000]
            files[name] = npy(np.array(draw(st.sampled_from(texts))))
        else:
            raw = damaged(files.get(name, npy(np.zeros(N))))
            files[name] = draw({"lie": lies, "other": others(), "damage": raw}[how])
    return list(files.items())


@pytest.fixture
def little_memory(monkeypatch):
    """A machine of 64 MB: what would not fit is refused before it is allocated."""
    monkeypatch.setattr(graph_module, "LARGEST_ARRAY", 64 << 20)


@settings(shared, max_examples=examples(200))
@given(files=arrays())
def test_graphs_with_wrong_arrays(tmp_path, little_memory, files):
    with TemporaryDirectory(dir=tmp_path) as folder:
        zipped(Path(folder, "g.npz"), files)
        in_a_folder(Path(folder, "g"), files)
        for name in ("g.npz", "g"):
            obeys(name, lambda name=name: must_be_a_graph(load(f"{folder}/{name}")))


def must_be_a_graph(graph):
    vertices = len(graph.indptr) - 1
    assert graph.x.shape == (vertices, graph.stats.features) and len(graph.y) == vertices
    assert ((graph.indices >= 0) & (graph.indices < vertices)).all()
    assert not graph.stats.classes or (graph.train.any() and not (graph.train & graph.test).any())


@settings(shared, max_examples=examples(150))
@given(data=st.data())
def test_damaged_archives(tmp_path, little_memory, data):
    zipped(tmp_path / "good.npz", files_of(ARRAYS))
    raw = (tmp_path / "good.npz").read_bytes()
    spoilt = damaged(raw, (b"PK\x01\x02", b"PK\x05\x06", b"\xff" * 8))
    (tmp_path / "bad.npz").write_bytes(data.draw(spoilt))
    obeys("bad.npz", lambda: load(str(tmp_path / "bad.npz")))


class Bomb:
    """What a pickle may hold: a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["GNNPLAN_TEST_BOMB"],)


def with_pickles() -> dict[str, bytes]:
    """Ways to put a call into a graph, by the array that holds it."""
    raw = pickle.dumps(np.array([Bomb()] * N, dtype=object), protocol=4)
    return {
        "honest": npy(np.array([Bomb()] * N, dtype=object)),
        "header": lying("'|O'", "(12,)", raw),
        "nested": lying("[('a', '|O')]", "(12,)", raw),
        "version 2": lying("'|O'", "(12,)", raw, version=2),
        "version 3": lying("'|O'", "(12,)", raw, version=3),
        "bare": raw,
        "called": lying("__import__('os').mkdir('bomb')", "(12,)", raw),
    }


@pytest.mark.parametrize(
    "how", ["honest", "header", "nested", "version 2", "version 3", "bare", "called"]
)
@pytest.mark.parametrize("name", ["src", "x", "y", "meta", "other"])
def test_no_pickle_is_opened(tmp_path, monkeypatch, how, name):
    bomb = tmp_path / "bomb"
    monkeypatch.setenv("GNNPLAN_TEST_BOMB", str(bomb))
    monkeypatch.chdir(tmp_path)
    files = [*files_of({n: a for n, a in ARRAYS.items() if n != name})]
    files.append((f"{name}.npy", with_pickles()[how]))
    zipped(tmp_path / "g.npz", files)
    in_a_folder(tmp_path / "g", files)
    for path in ("g.npz", "g"):
        said = obeys(path, lambda path=path: load(str(tmp_path / path)))
        assert (said is None) == (name == "other")  # arrays that are not ours are not opened
    assert not bomb.exists()
    pickle.loads(with_pickles()["bare"])  # it would have gone off
    assert bomb.exists()


@pytest.mark.slow
def test_archives_that_grow_are_refused(tmp_path, little_memory):
    """Before they have grown: 40 MB of zeros are 40 kB in an archive, and names may come again."""
    large = lying("'<f4'", "(10000000,)", bytes(40_000_000))
    good = files_of(ARRAYS)
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(tmp_path / "again.npz", [*good, *good])
    zipped(tmp_path / "sum.npz", [("src.npy", large), ("dst.npy", large)])
    zipped(tmp_path / "one.npz", [("src.npy", lying("'<f8'", "(10000000,)", bytes(80_000_000)))])
    zipped(tmp_path / "alias.npz", [*good, ("src", npy(ARRAYS["src"]))])
    size = 200_000_000
    header = b"\x93NUMPY\2\0" + size.to_bytes(4, "little") + bytes(size)
    zipped(tmp_path / "header.npz", [("src.npy", header)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, words in (
        ("again", "src: is there twice"),
        ("alias", "src: is there twice"),
        ("sum", "what it holds would take 80.00 MB"),
        ("one", "src of shape .* would take 80.00 MB"),
        ("header", "cannot be read"),
    ):
        with pytest.raises(SpecError, match=f"{name}.npz: {words}"):
            load(str(tmp_path / f"{name}.npz"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120_000  # [kB]


def test_a_folder_that_is_more_than_fits_is_refused(tmp_path, little_memory):
    in_a_folder(tmp_path / "g", [])
    header = lying("'<i8'", "(5000000,)")
    for path in (tmp_path / "g" / "src.npy", tmp_path / "g" / "dst.npy"):
        path.write_bytes(header)
        os.truncate(path, len(header) + 40_000_000)  # sparse: takes no room
    with pytest.raises(SpecError, match=r"what it holds would take 80\.00 MB"):
        load(str(tmp_path / "g"))


def test_names_in_a_file_do_not_reach_the_terminal_as_they_are(tmp_path):
    files = files_of(ARRAYS) + [(f"\x1b[2Jevil{i}", b"") for i in range(100)]
    zipped(tmp_path / "g.npz", files)
    (note,) = load(str(tmp_path / "g.npz")).stats.notes[:1]
    assert note.startswith("ignored: \\x1b[2Jevil0, ") and note.endswith("and 92 others")


PLACES = "? / // . .. ~ /dev/zero /dev/null /dev/zero?seed=1 /proc/self/mem /etc/passwd"
PLACES += " ../../../etc/passwd reddit?x reddit/ http://127.0.0.1/x.npz file:///etc/passwd"
DRAWN = """? ?vertices=nan ?vertices=10&edges=5&mixing=nan ?vertices=10&edges=5&skew=inf
    ?vertices=2&edges=3 ?vertices=-5 ?vertices=1e9 ?vertices=2&vertices=3
    ?vertices=99999999&edges=1999999999&features=100000"""
LONG = ["?vertices=" + "9" * 5000, "?" + "&".join(["seed=1"] * 10_000)]
QUERIES = ["features=0", "features=" + "9" * 400, "seed=0x10", "seed=%00"]
ODD = ["", "\0.npz", "a\0b.yaml", "\ud800.npz", "\ud800.yaml", "x" * 5000, "x" * 5000 + ".npz"]
SOURCES = [*PLACES.split(), *ODD, "x/" * 3000, "synthetic:", "synthetic:x"]
SOURCES += [f"synthetic:community{query}" for query in (*DRAWN.split(), *LONG)]
SOURCES += [f"x.npz?{query}" for query in QUERIES]


@pytest.mark.parametrize("source", SOURCES, ids=range(len(SOURCES)))
def test_names_of_graphs(tmp_path, monkeypatch, little_memory, source):
    monkeypatch.chdir(tmp_path)
    said = obeys(source[:50].rstrip("?"), lambda: load(source))
    assert said is not None and "root:" not in said


def readings(path: Path) -> dict[str, Callable[[], Any]]:
    """Everything that reads `path`, which bears the right name for it."""
    folder = path.parent
    return {
        "cluster.yaml": lambda: read_cluster(str(path)),
        "workload.yaml": lambda: ask_workload(str(path)).workload,
        "graph.yaml": lambda: load(str(path)),
        "graph.npz": lambda: load(str(path)),
        "plan.json": lambda: plans.read(path),
        "options.json": lambda: Options.of(folder, {}, True),
        "metrics.jsonl": lambda: recorded.read_run(folder),
        "rank0.json": lambda: recorded.read_run(folder),
        "trace.rank0.json": lambda: read_traces(folder),
        "figures.csv": lambda: read_published(path),
        "src.npy": lambda: load(str(folder)),
        "x.npy": lambda: load(str(folder)),
    }


NAMES = list(readings(Path("x")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["pipe", "zero", "folder", "socket", "loop", "dangling", "empty"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name, what):
    path = tmp_path / "d" / name
    path.parent.mkdir()
    if name == "rank0.json":
        (path.parent / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0, "epoch_s": 1.0}\n')
    make = {"pipe": lambda: os.mkfifo(path), "zero": lambda: path.symlink_to("/dev/zero")}
    make |= {"folder": path.mkdir, "empty": path.touch, "loop": lambda: path.symlink_to(path)}
    make |= {"dangling": lambda: path.symlink_to(tmp_path / "nowhere")}
    # fails, rather than waits, where a named pipe is read
    waits = hung_after(5.0, signal.ITIMER_REAL, signal.SIGALRM, f"waits for {path}")
    with socket.socket(socket.AF_UNIX) as server, waits:
        if what == "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # a socket's path is short
            server.bind(name)
            os.chdir(here)
        else:
            make[what]()
        said = obeys(str(path.parent), readings(path)[name])
    assert said is not None or (name, what) in [
        ("workload.yaml", "empty"),
        ("options.json", "dangling"),
        ("options.json", "loop"),
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith(".npy")])
def test_closed_files_are_named(tmp_path, monkeypatch, name):
    """The tests may run as root, whom no file is closed to."""
    path = tmp_path / name
    path.touch()
    if name == "rank0.json":
        (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "loss": 1.0, "epoch_s": 1.0}\n')
    real = open

    def closed(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", closed)
    monkeypatch.setattr("io.open", closed)
    said = obeys(name, readings(path)[name])
    assert said and "Permission denied" in said


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """What a run of a small graph leaves behind, its measured traces those of the simulation."""
    folder = corpus.run_folder(tmp_path_factory.mktemp("run"))
    document = plans.read(folder / "plan.json")
    problem = plans.question(document)
    schedule = evaluate(problem, plans.chosen(document)).strategy.schedule(problem, 3)
    write_traces(folder, play(schedule, problem.cost).spans, range(2), 2, "measured", "gloo")
    return folder


@pytest.fixture
def run(run_folder, tmp_path):
    """A copy, to be spoilt."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def answer(folder: Path) -> None:
    """All that `validate` does, down to the JSON."""
    json.dumps(replay(folder).run.comparison, allow_nan=False)


def test_the_run_that_is_spoilt_is_a_good_one(run):
    assert obeys("", lambda: answer(run)) is None
    assert Options.of(run, {}, True).epochs == 3


def dumped(document: Any) -> str:
    """With NaN and Infinity, and whatever a key is."""
    return json.dumps(document, skipkeys=True)


BYTES = (b"[" * 5000, b"NaN", b"1e999", b"9" * 5000)
TEXTS = ("alternatives", "rejected", "explanation")  # of a plan, that nobody reads


@settings(shared, max_examples=examples(200))
@given(data=st.data())
def test_plans_with_wrong_values_and_bytes(run, data):
    raw, path = (run / "plan.json").read_text(), run / "changed.json"
    values = changed(json.loads(raw), TEXTS).map(dumped).map(str.encode)
    path.write_bytes(data.draw(st.one_of(values, values, damaged(raw.encode(), BYTES))))
    if obeys("changed.json", lambda: plans.read(path)) is None:
        document = plans.read(path)
        obeys("", lambda: evaluate(plans.question(document), plans.chosen(document)))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "rank0.json", "trace.rank1.json", "plan.json", "options.json"]
)
@settings(shared, max_examples=examples(120))
@given(data=st.data())
def test_runs_with_wrong_values_and_bytes(run_folder, run, data, name):
    raw = (run_folder / name).read_text()
    bytes_alone = data.draw(st.integers(0, 2)) == 2
    if bytes_alone:
        spoilt = data.draw(damaged(raw.encode(), (*BYTES, b"\n")))
    elif name == "metrics.jsonl":
        lines = data.draw(changed([json.loads(line) for line in raw.splitlines()]))
        lines = lines if isinstance(lines, list) else [lines]
        spoilt = "".join(dumped(line) + "\n" for line in lines).encode()
    else:
        spoilt = dumped(data.draw(changed(json.loads(raw), TEXTS))).encode()
    (run / name).write_bytes(spoilt)
    if name == "options.json":
        obeys(name, lambda: Options.of(run, {}, True))
    elif bytes_alone:
        obeys(str(run), lambda: (recorded.read_run(run), read_traces(run)))
    else:
        obeys("", lambda: answer(run))


def test_a_world_without_end(run):
    """The missing ranks of a trace are not listed one by one."""
    for rank in range(2):
        with rewritten(run / f"trace.rank{rank}.json") as trace:
            trace["distributedInfo"]["world_size"] = 10**15
    said = obeys(str(run), lambda: read_traces(run))
    assert said and "rank 2 is missing" in said


OTHERS = "/etc/passwd ../../../etc/passwd /dev/zero secret.yaml secret.npz / reddit"


@pytest.mark.parametrize("source", ["", *OTHERS.split()])
def test_a_plan_reads_its_graph_and_tells_nothing_of_other_files(run, monkeypatch, source):
    """A plan may name any path: it is read as a graph, and must be the plan's own."""
    monkeypatch.chdir(run)
    for name in ("secret.yaml", "secret.npz"):
        (run / name).write_text("password: hunter2\n")
    document = json.loads((run / "plan.json").read_text())
    document["graph"]["source"] = source
    said = obeys("", lambda: plans.question(document))
    assert said and "root:" not in said and "hunter2" not in said


@settings(shared, max_examples=examples(60))
@given(data=st.data())
def test_damaged_checkpoints_are_not_there(tmp_path, data):
    from safetensors.torch import save
    from torch import ones

    from gnnplan.executor.ranks.checkpoint import header

    about = {"question": {"seed": 0}, "epoch": 10, "notes": {}}
    strange = st.sampled_from(["", "[" * 50_000, "NaN", "{}", "3"])
    told = dumped(data.draw(changed(about))) if data.draw(st.booleans()) else data.draw(strange)
    path, raw = tmp_path / "epoch10.rank0.safetensors", save({"x": ones(3)}, {"gnnplan": told})
    path.write_bytes(data.draw(damaged(raw)) if data.draw(st.booleans()) else raw)
    with limits():
        found = header(path)
    assert found is None or all(isinstance(found[name], dict) for name in ("question", "notes"))


def test_a_pipe_is_no_checkpoint(tmp_path):
    from gnnplan.executor.ranks.checkpoint import stored

    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "checkpoints" / "epoch10.rank0.safetensors")
    assert stored(tmp_path / "checkpoints") == {}


ROW = dict.fromkeys(COLUMNS, "") | {"source": "Table 3", "unit_as_printed": "s"}
ROW |= {"strategy_params": '{"stages": 4, "chunks": 8}', "value": "1.5", "metric": "epoch_time_s"}
NAMED = "paper testbed dataset model layers hidden num_nodes gpus_per_node strategy"
VALUES = "gnnpipe gnnpipe_a5000 reddit gcnii 8 100 2 4 gnnpipe_hybrid"
ROW |= zip(NAMED.split(), VALUES.split(), strict=True)
SAMPLED = ['"a"', '{"a": 1}', "10", '[5, "x"]', "1"]  # fanouts
PARAMS = [f'{{"batch": 1000, "fanout": {fanout}}}' for fanout in SAMPLED]
PARAMS += [f'{{"chunks": {chunks}}}' for chunks in ("1e300", "[1]", "1000000000")]
PARAMS += [f'{{"stages": {stages}}}' for stages in ('"x"', "null")]
PARAMS += [f'{{"feature_dim": {width}}}' for width in ('"x"', "0")]
PARAMS += ['{"batch": "x", "fanout": 10}', '{"cache": -1, "batch": 1000, "fanout": 10}']
PARAMS += ['{"gamma": "x"}', '{"heads": []}', '{"partitioner": 3}', '{"micro_batches": 10000000}']
PARAMS += ['{"epochs": 1e12}', "null", "{", "[" * 50_000, "9" * 5000]
METRICS = "speedup_vs slowdown_fraction_vs comm_volume_bytes min_gpus peak_memory_bytes"
METRICS += " fits_in_memory"
STRATEGIES = "p3_push_pull dgl_data_parallel gsplit granndis pipegcn x"
STRANGE = {"strategy_params": PARAMS, "strategy": STRATEGIES.split(), "metric": METRICS.split()}
STRANGE |= {"dataset": ["ogbn-products", "../x", "reddit.yaml"]}
STRANGE |= {"testbed": ["local", "../x", "/dev/zero", "pcie_box"]}
NO_NUMBERS = ["0", "-1", "1", "99999", "9" * 5000, "1e-320", "nan", "\u0663", "x"]


@settings(shared, max_examples=examples(120))
@given(data=st.data())
def test_published_figures(tmp_path, data):
    row, path = dict(ROW), tmp_path / "figures.csv"
    for name in data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3)):
        row[name] = data.draw(st.one_of(st.sampled_from(STRANGE.get(name, NO_NUMBERS)), text(3)))
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([COLUMNS, [row[n] for n in COLUMNS]])
    obeys("figures.csv", lambda: json.dumps(evaluate_rows(read_published(path)), allow_nan=False))


def test_windows_files_are_read(tmp_path):
    """A byte order mark and line ends of two bytes."""
    (tmp_path / "w.yaml").write_bytes(b"\xef\xbb\xbflayers: 3\r\nhidden: 8\r\n")
    assert ask_workload(str(tmp_path / "w.yaml")).workload.hidden == 8
    (tmp_path / "w.json").write_bytes(b'{"a":\r\n 1}\r\n')
    assert read_json(tmp_path / "w.json", 100, "") == {"a": 1}


def ended(case: corpus.Case, folder: Path, gnnplan: Any) -> Answer:
    """How the call ended; one that may become a rank is a program of its own."""
    words = [word.replace("{d}", str(folder)) for word in case.arguments]
    if not case.starts:
        with limits():
            return gnnplan(*map(shlex.quote, words))
    program = [sys.executable, "-m", "gnnplan", *map(os.fsencode, words)]
    env = os.environ | case.env
    done = subprocess.run(program, env=env, capture_output=True, timeout=60, errors="replace")
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.mark.nightly  # by day test_cli.py has bad calls of all verbs, test_fuzz.py what readers are given
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in corpus.cases()))
def test_no_traceback_no_hang_no_gigabyte(kind, tmp_path, monkeypatch, gnnplan):
    cases = [case for case in corpus.cases() if case.kind == kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in cases:
        folder = tmp_path / "case"
        folder.mkdir()
        monkeypatch.chdir(folder)
        with monkeypatch.context() as patch:
            for name, value in case.env.items():
                patch.setenv(name, value)
            case.make(folder)
            code, out, err = ended(case, folder, gnnplan)
        assert code in case.codes and "Traceback (most recent" not in out + err, (case, err)
        assert not code or not any((folder / name).exists() for name in case.leaves), case
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 1_000_000, case  # [kB]
        shutil.rmtree(folder)
    assert len(cases) > 5
