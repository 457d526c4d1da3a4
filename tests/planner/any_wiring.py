"""Servers wired in any way, for laws that hold of all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gnnplan.planner.cluster.spec import Link

LINKS = st.builds(
    Link,
    bandwidth=st.sampled_from([1e7, 1e8, 7e8, 1e9, 1e10]),
    latency=st.sampled_from([0.0, 1e-6, 1e-3]),
)


def wiring(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    """Any links, and with them any lists of so many GPUs: the fields of a Cluster."""

    def parts() -> list[list[int]]:
        of = draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus))
        return [[g for g in range(gpus) if of[g] == i] for i in sorted(set(of))]

    more: dict[str, Any] = {"intra_node": draw(LINKS), "inter_node": draw(LINKS)}
    for lists, of in (("islands", "island"), ("switches", "switch"), ("nics", None)):
        if draw(st.booleans()):
            more[lists] = parts()
            if of:
                more[of] = draw(LINKS)
    return more
