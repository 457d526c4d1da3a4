"""What modules read of a graph's fields: by which names, with which notes and refusals (what they
train is in the zoo)."""

import importlib
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_module_cases import written
from written import quiet
from zoo_table import HERE

import gnnplan
from gnnplan.api.arguments import ask
from gnnplan.executor.minibatch.sampler import Sampler
from gnnplan.executor.minibatch.share_queue import ShareQueue
from gnnplan.executor.modules.bind import GraphFields, bound
from gnnplan.executor.modules.read import with_user_model
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.ranks import Case

N = 40
WEIGHTED = {
    "given": "x, edge_index, edge_weight, pos",
    "made": "self.one, self.two = GCNConv(in_channels + 2, 8), GCNConv(8, out_channels)",
    "body": "h = self.one(torch.cat([x, pos], 1), edge_index, edge_weight).relu()\n"
    "return self.two(h, edge_index, edge_weight)",
}
KINDS = {
    "given": "x, edge_index, kind",
    "made": "self.of, self.one = nn.Embedding(6, 4), GCNConv(in_channels + 4, out_channels)",
    "body": "return self.one(torch.cat([x, self.of(kind)], 1), edge_index)",
}
FAR = KINDS | {"body": KINDS["body"].replace("kind", "kind % 6")}


def data_of() -> Any:
    """Edges both ways, in random order; every direction has rows of its own."""
    quiet("torch_geometric")
    draw = np.random.default_rng(3)
    pairs = np.unique(draw.integers(0, N, (90, 2)), axis=0)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    edges = draw.permutation(np.concatenate([pairs, pairs[:, ::-1]]))
    part, count = draw.permutation(N) % 3, len(edges)
    arrays = {
        "x": draw.standard_normal((N, 5)),
        "y": draw.permutation(N) % 4,
        "pos": draw.standard_normal((N, 2)),
        "kind": draw.integers(0, 6, N),
        "edge_index": edges.T.copy(),
        "edge_weight": draw.random(count) + 0.5,
        "edge_attr": draw.standard_normal((count, 3)),
        "edge_type": draw.integers(0, 3, count),
        **{f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))},
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return importlib.import_module("torch_geometric.data").Data(**tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fields")
    torch.save(data_of(), path / "data.pt")
    written(path, **WEIGHTED)
    return path


def test_a_batch_does_not_carry_the_whole_graph(folder):
    mini = {"dtype": "float64", "mode": "mini", "fanout": "full", "batch": 14}
    asked = Case("data_parallel", str(folder / "data.pt"), mini)
    problem, _ = with_user_model(asked.problem(2), f"{folder / 'model.py'}:Net")
    case = replace(asked, workload=problem.workload.model_dump())
    problem = case.problem(2)
    batches = case.settled(problem).batches(problem)
    sampler = Sampler(batches, 0, ["one"] * 2)
    assert not any(hasattr(part.block, "graph_edges") for part in sampler[0].share.parts)
    weights = problem.graph.edge_fields["edge_weight"].tobytes()
    assert weights not in pickle.dumps(sampler[0])
    share = ShareQueue(Rank(0, 1, torch.device("cpu"), "gloo"), sampler, 0).next(0).share
    assert all(part.block.graph_edges is problem.graph.csr_edges for part in share.parts)


def test_what_is_not_read_is_said_once(folder):
    data = str(folder / "data.pt")
    unread = {
        "gcn": "gcn does not read kind, pos, edge_attr, edge_type, edge_weight of data",
        f"{folder / 'model.py'}:Net": "Net does not read kind, edge_attr, edge_type of data",
    }
    for model, note in unread.items():
        question = ask(data, "local", None, model=model)
        assert [said for said in question.notes if "does not read" in said] == [note]


def test_a_field_that_the_graph_lacks_is_named(folder, tmp_path):
    model = written(
        tmp_path, **{name: s.replace("pos", "position") for name, s in WEIGHTED.items()}
    )
    with pytest.raises(SpecError, match=r"asks for position, and the graph has x, edge_index, k"):
        gnnplan.plan(str(folder / "data.pt"), model=model, ranks=2, mode="full")


HOLD = "kind: rows in {} hold whole numbers up to {}, found"


@pytest.mark.parametrize(
    ("model", "dtype", "highest", "said"),
    [
        (KINDS, "float32", 6, "IndexError: index out of range"),  # beyond an embedding
        # in float32 16,777,217 is 16,777,216
        (FAR, "float32", 2**24 + 1, HOLD.format("float32", "16,777,216")),
        (FAR, "float64", 2**53 + 1, HOLD.format("float64", "9,007,199,254,740,992")),
    ],
)
def test_whole_numbers_that_are_too_high_are_refused(tmp_path, model, dtype, highest, said):
    data, model = data_of(), written(tmp_path, **model)
    data.kind[7] = highest
    torch.save(data, tmp_path / "data.pt")
    with pytest.raises(SpecError) as refused:
        gnnplan.plan(str(tmp_path / "data.pt"), model=model, ranks=2, dtype=dtype, mode="full")
    assert said in str(refused.value)


def test_a_parameter_may_name_a_field_of_dgl():
    """Edges' weight is given as edge_weight, and edges' feat is not taken for vertices'."""

    class Module(torch.nn.Module):
        def forward(self, feat: Any, edge_index: Any, edge_weight: Any, edge_feat: Any) -> None: ...

    on_edges = dict.fromkeys(["weight", "feat"], ((), "<f8", 0))
    found = bound(Module(), GraphFields(1, 1, edge=on_edges))
    takes = {"feat": "vertex x", "edge_index": "edge_index"}
    assert dict(found.takes) == takes | {f"edge_{of}": f"edge {of}" for of in ("weight", "feat")}


@pytest.mark.nightly
def test_coras_gat_trains_on_coras_words(tmp_path, run_ranks):
    """1,433 columns, nearly all 0: the layer could not be counted, and the remedy did not help."""
    quiet("dgl")
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 80, (2, 400))
    x = (rng.random((80, 1433)) < 0.01).astype(np.float32)
    np.savez(tmp_path / "words.npz", src=src, dst=dst, x=x, y=np.arange(80) % 3)
    case = Case("graph_parallel", str(tmp_path / "words.npz"), {"layers": 2, "dtype": "float64"})
    plain = case.problem(2)
    assert plain.stats.nonzeros
    problem, notes = with_user_model(plain, f"{HERE / 'zoo_dgl.py'}:DroppingGAT")
    assert problem.stats.nonzeros == 0 and "are made dense" in " ".join(notes)
    case = replace(case, workload=problem.workload.model_dump())
    (two,) = run_ranks(2, [case])
    assert two.losses == pytest.approx(run_ranks.alone(case).losses, rel=1e-9)
