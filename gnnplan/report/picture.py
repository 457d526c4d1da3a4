"""A picture of the report, and the colours, units and sizes that all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from gnnplan.planner.vocabulary.table import Table

COMPUTATION, COMMUNICATION, WAITING = "#4c78a8", "#f58518", "#9d9d9d"
MEASURED = "#e45756"
# plotly's T10: readable on white and on black
COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2"),
    *("#e45756", "#eeca3b", "#9d755d", "#ff9da6", "#bab0ac"),
)
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
MOST_READ = 3  # rows of the table in the text for screen readers


@dataclass(frozen=True)
class Picture:
    """A figure with a caption, and the figure's numbers as a table."""

    key: str  # id of the figure's element in the page
    title: str
    see: str  # caption: sentences that say what the figure shows
    figure: go.Figure
    numbers: Table

    @property
    def alt(self) -> str:
        """The text for screen readers: the first numbers, and where to find all numbers."""
        read = "; ".join(
            ", ".join(map(" ".join, zip(self.numbers.columns, row, strict=True)))
            for row in self.numbers.rows[:MOST_READ]
        )
        return f"{self.title}: {read}. All numbers are in the table below."


def figure(traces: Any, height: int, **layout: Any) -> go.Figure:
    """Return a figure as wide as the page, without zoom, from plotly traces or a plotly figure.

    The figure has no template: page.html sets the light or the dark template.
    """
    out = go.Figure(traces)
    out.update_layout(
        template=None,
        height=height,
        autosize=True,
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        font_size=12,
        dragmode=False,
    )
    out.update_xaxes(automargin=True, fixedrange=True)
    out.update_yaxes(automargin=True, fixedrange=True)
    return out.update_layout(**layout)


def unit_of(most: float, units: Sequence[tuple[float, str]]) -> tuple[str, float]:
    """Return the unit for numbers up to `most`, and the factor from seconds or bytes to that unit.

    >>> unit_of(0.3, TIMES), unit_of(3e9, SIZES)
    (('ms', 1000.0), ('GB', 1e-09))
    """
    size, unit = next((pair for pair in units if most >= pair[0]), units[-1])
    return unit, 1 / size
