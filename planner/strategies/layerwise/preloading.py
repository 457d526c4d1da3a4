"""Notes for the user on GraNNDis: the memory that preloading costs, and the bytes that it saves.

A server that preloads holds its own part and the rows around it; the notes say how many times its
own part that is, as a mean over servers. In return servers send each other fewer bytes. The paper's
own conditions (Eq. 3-9) are not used: they ignore the links inside servers and do not describe the
time of a whole epoch.
"""

from __future__ import annotations

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel
from gnnplan.planner.vocabulary.units import show_bytes


def sentences(problem: Problem, whole: Strategy, sampled: Strategy) -> list[str]:
    """Return the notes. `whole` preloads all rows around a server, `sampled` a sample of them."""
    if problem.cluster.servers == 1:
        islands = (
            " Islands of GPUs may preload too, with group='island'."
            if len(problem.cluster.islands) > 1
            else ""
        )
        return [
            "One server: nothing crosses servers, so preloading a server's surroundings would be"
            f" plain graph parallel.{islands}"
        ]
    source = "estimated" if problem.graph is None else "counted"
    plain = GraphParallel()
    return [
        f"A server that preloads the {problem.workload.layers} hops around its part ({whole}) holds"
        f" {_growth(problem, whole):.2f} times the rows of its part ({source}); with rows drawn"
        f" ({sampled}) {_growth(problem, sampled):.2f} times",
        f"Between servers an epoch of {plain} on all GPUs would send"
        f" {_between_servers(problem, plain)}, of {whole} {_between_servers(problem, whole)}",
    ]


def _growth(problem: Problem, strategy: Strategy) -> float:
    """Return the rows that a server holds divided by the rows of its part, a mean over servers."""
    layout, servers = strategy.layout(problem), problem.cluster.servers
    assert layout is not None
    own, held = problem.stats.vertices / servers, float(layout.row_counts(0).sum()) / servers
    return 1 + max(held - own, 0.0) / own


def _between_servers(problem: Problem, strategy: Strategy) -> str:
    """Return the bytes that servers send each other in an epoch, in words."""
    return show_bytes(strategy.predict(problem).bytes_by_link.get("inter_node", 0))
