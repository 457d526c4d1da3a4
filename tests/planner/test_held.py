"""Memory is read from a program: by hand, and as nobody's work until it is asked for."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.decision.search import families
from gnnplan.planner.gnn.model import OpMemory, in_turn, keeps
from gnnplan.planner.strategies import GraphParallel, Strategy, parse
from gnnplan.planner.strategies import gnnpipe as of_stages
from gnnplan.planner.strategies.layerwise import offload as of_chunks
from gnnplan.planner.strategies.layerwise import step as of_layers
from gnnplan.planner.strategies.layerwise import tensor3d as of_tiles
from gnnplan.planner.strategies.minibatch import p3 as of_columns
from gnnplan.planner.strategies.minibatch.p3 import Pipelined
from gnnplan.planner.strategies.program.account import fullest
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.schedule import Compute
from gnnplan.testing.laws import GRAPHS, cluster, problem_of

TWO = problem_of(GRAPHS[1], cluster(1, 2))
MINI = problem_of(GRAPHS[1], cluster(2, 1), mode="mini", batch=20, fanout=(3, 3), layers=2)


def test_each_rank_is_fullest_at_a_moment_of_its_own():
    first, second = np.array([3.0, 1.0]), np.array([4.0, 0.0])
    moments = [keeps(first), OpMemory(np.array([1.0, 10.0]), 0.0), keeps(second)]
    moments += [OpMemory(0.0, -first)]
    most, left = in_turn(moments)
    assert np.array([most, left]).tolist() == [[7, 11], [4, 0]]
    steps = [Op("forward", work=Compute(), holds=lambda: keeps(first))], []
    program = replace(Program.of([]), known=lambda: [0, 1, 0], ops=steps.__getitem__)
    assert fullest(TWO, program).tolist() == [3, 1]  # a step begins with nothing
    # each stage of a pipeline has operations of its own
    held = [
        (rank, lambda size=size: keeps(np.array([size])))
        for rank, size in zip((0, 1, 0), (2.0, 5.0, 1.0), strict=True)
    ]
    of_stages = [Op("forward", work=Compute(), ranks=(rank,), holds=of) for rank, of in held]
    assert fullest(TWO, Program.of(of_stages)).tolist() == [3, 5]


def test_steps_under_way_together_are_held_together():
    """Every batch keeps 1 byte from its front to its tail, two periods later."""
    step = [
        Op("forward", work=Compute(), phase="front", holds=lambda: keeps(1.0)),
        Op("loss", work=Compute(), phase="body"),
        Op("backward", work=Compute(), phase="tail", holds=lambda: OpMemory(0.0, -1.0)),
    ]
    program = Program.of(step, order=Pipelined(0), in_flight=3)
    program = replace(program, known=lambda: [0] * 5, steps=5)
    assert fullest(TWO, program).tolist() == [3, 3]
    plain = replace(program, order=None, in_flight=1)
    assert fullest(TWO, plain).tolist() == [1, 1]


@pytest.mark.parametrize("problem", [TWO, MINI], ids=["full", "mini"])
def test_nothing_of_memory_is_computed_until_it_is_asked(problem, monkeypatch):
    def computed(*_: object, **__: object) -> None:
        raise AssertionError

    for room in (of_layers, of_chunks, of_stages, of_columns):
        monkeypatch.setattr(room, "layer_memory", computed)
    monkeypatch.setattr(of_tiles, "keeps", computed)
    for example in (example for family in families(problem) for example in family.examples):
        strategy = parse(example.strategy).settle(problem)
        strategy.predict(problem)
        with pytest.raises(AssertionError):
            strategy.memory(problem)


@pytest.mark.parametrize("chunks", [4, 8])
def test_a_pipeline_has_code_for_the_sizes_that_chunks_have(chunks):
    """Squirrel's 16 chunks have five sizes; a share of them was counted, a fifth too much."""

    def code(chunks: int, method: str) -> list[float]:
        plain, compiled = (
            problem_of(GRAPHS[0], cluster(1, 2, product_code=size), method, layers=2)
            for size in (0.0, 1e6)
        )
        pipe = parse(f"gnnpipe(chunks={chunks},layers_per_stage=(1,1))").settle(plain)
        buffers = [pipe.memory(problem)["buffers"] for problem in (compiled, plain)]
        return (buffers[0] - buffers[1]).tolist()

    assert code(chunks, "random") == pytest.approx(code(1, "random"))
    sizes = np.unique(problem_of(GRAPHS[0], cluster(1, 2)).chunks(chunks).rows).size
    assert code(chunks, "metis") == pytest.approx(np.multiply(sizes, code(1, "random")))


def test_a_program_is_built_once_for_its_readers(monkeypatch):
    built: list[Strategy] = []
    program = GraphParallel.program

    def counted(strategy: GraphParallel, problem: object) -> Program:
        built.append(strategy)
        return program(strategy, problem)

    monkeypatch.setattr(GraphParallel, "program", counted)
    one, other = GraphParallel(), GraphParallel(narrow=True)
    problem = replace(TWO)
    one.traffic(problem), one.predict(problem), one.memory(problem)
    assert built == [one]
    other.predict(problem), one.memory(problem), one.memory(replace(problem))
    assert built == [one, other, one, one]
