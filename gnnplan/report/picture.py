"""What a picture of the report is, and what all pictures share: colours, units, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

COMPUTATION, COMMUNICATION, WAITING = "#4c78a8", "#f58518", "#9d9d9d"
MEASURED, DOUBT = "#e45756", "#8250df"
# Categories in their order: plotly's T10, readable on white and on black.
COLOURS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#72b7b2",
    "#e45756",
    "#eeca3b",
    "#9d755d",
    "#ff9da6",
    "#bab0ac",
)
# From nothing to the most; transparent, so that it suits a light and a dark page.
SHADES = [[0, "rgba(76,120,168,0.06)"], [1, "rgba(76,120,168,1)"]]


@dataclass(frozen=True)
class Picture:
    """A figure with its words; `columns` and `rows` are its numbers as a table."""

    key: str  # its id in the page
    title: str
    see: str  # what to see, in a sentence or two
    alt: str  # what it shows, for those who do not see it
    figure: Any
    columns: list[str]
    rows: list[list[str]]


def figure(traces: list[Any], height: int, **layout: Any) -> go.Figure:
    """A figure as wide as the page, without a template: page.html sets the light or dark one."""
    out = go.Figure(traces)
    common = {
        "template": None,
        "height": height,
        "autosize": True,
        "margin": {"l": 8, "r": 8, "t": 36, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"},
        "font": {"size": 12},
        "dragmode": False,
    }
    out.update_layout(**common)
    out.update_layout(**layout)
    out.update_xaxes(automargin=True)
    out.update_yaxes(automargin=True)
    return out


def time_unit(most: float) -> tuple[str, float]:
    """The unit for seconds up to `most`, and how many of it a second has.

    >>> time_unit(0.3), time_unit(12.0)
    (('ms', 1000.0), ('s', 1.0))
    """
    if most >= 1:
        return "s", 1.0
    return ("ms", 1e3) if most >= 1e-3 else ("µs", 1e6)


def byte_unit(most: float) -> tuple[str, float]:
    """The unit for bytes up to `most`, and how much of it a byte is.

    >>> byte_unit(3e9)
    ('GB', 1e-09)
    """
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most >= scale:
            return unit, 1 / scale
    return "B", 1.0
