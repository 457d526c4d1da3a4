"""The drawing on a strategy's page is its program, on two or three ranks of a small graph."""

from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.strategies import FAMILIES, parse
from gnnplan.testing.laws import drawing_of

PAGES = Path(__file__).resolve().parents[1] / "docs" / "strategies"
# page, and which of its drawings -> strategy, ranks (each on a server of its own), layers, steps, what is drawn
DRAWN: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "graph_parallel": ("graph_parallel", 2, 2, 1, {}),
    "graph_parallel, buckets": ("graph_parallel(buckets=2)", 2, 2, 1, {}),
    "graph_parallel, bits": ("graph_parallel(bits=2)", 2, 2, 1, {}),
    "pipegcn": ("pipegcn", 2, 2, 2, {}),
    "bns": ("bns", 2, 2, 1, {}),
    "feature_parallel": ("feature_parallel", 2, 2, 1, {}),
    "tensor3d": ("tensor3d(x=1,y=2,z=2)", 4, 2, 1, {"ranks": (0,)}),
    "offload": ("offload(chunks=2)", 1, 2, 1, {}),
    "granndis": ("granndis(depth=2)", 2, 3, 1, {}),
    "gnnpipe": (
        "gnnpipe(stages=3,chunks=4,shuffle=False)",
        *(3, 3, 1),
        {"ranks": (0, 1, 2), "lanes": ("compute",)},
    ),
    "data_parallel": ("data_parallel", 2, 2, 1, {}),
    "gsplit": ("gsplit(group='all')", 2, 2, 1, {}),
    "dnp": ("dnp(group='all')", 2, 2, 1, {}),
    "snp": ("snp(group='all')", 2, 2, 1, {}),
    "p3": ("p3", 2, 2, 1, {}),
}


@pytest.mark.parametrize("page", DRAWN)
def test_a_page_has_the_drawing_of_its_program(page):
    name, ranks, layers, steps, what = DRAWN[page]
    drawing = drawing_of(parse(name), ranks, layers, steps, **what)
    text = (PAGES / f"{page.split(',')[0]}.md").read_text(encoding="utf-8")
    assert f"```\n{drawing}\n```" in text, f"{page}.md should have\n{drawing}"


def test_every_family_is_drawn():
    assert {family.family for family in FAMILIES} <= set(DRAWN)
