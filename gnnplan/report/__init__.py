"""A plan and its runs as one HTML page that opens offline.

    facts.py       the input of all pictures: the plan, predicted and simulated again, and its runs;
                   the class of a picture, and the colours, units and sizes of all pictures
    choice.py      the parts of an epoch, memory; of runs, errors per operation, losses
    timeline.py    the operations of each rank over time, simulated and measured; bytes between
                   ranks, and the load of links

The page has a plan's summary, its pictures, and the pictures' numbers as folded tables. It includes
a compressed plotly.js, so that it opens offline and stays small."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape as _text
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from gnnplan import __version__
from gnnplan.planner.decision.plan import describe_question
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, must_be_writable, write_atomically
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_percent, show_time
from gnnplan.report.facts import Absent, Facts, gather

if TYPE_CHECKING:
    from gnnplan.report.facts import Picture

PAGE = Path(__file__).with_name("page.html")
MOST_ROWS = 400  # most rows of a table in the page
# theme -> plotly's template, and the colours of text, dim text and an empty cell of a matrix
THEMES = {
    "light": ("plotly_white", "#1c2024", "#5a6370", "#f3f6fa"),
    "dark": ("plotly_dark", "#e8eaed", "#a3abb6", "#1c2228"),
}


def report(
    plan: Json | str | Path, runs: Sequence[str | Path] = (), output: str | Path = "report.html"
) -> Path:
    """Write the page of a plan (document or file) and of its finished runs; return the page's path.

    Raises SpecError if the plan or a run cannot be read, or plotly is not installed; then no file
    is written.
    """
    output = Path(output)
    must_be_writable(output)
    must_have_plotly()
    facts = gather(plan, runs)
    pictures, absent = draw(facts)
    notify("writing the page")
    write_atomically(output, page(facts, pictures, absent))
    return output


def must_have_plotly() -> None:
    """Raise SpecError if plotly is not installed."""
    if find_spec("plotly") is None:
        raise SpecError("a report needs plotly, which is absent: pip install 'gnnplan[report]'")


def draw(facts: Facts) -> tuple[list[Picture], dict[str, str]]:
    """Return the pictures, and for each picture that cannot be drawn title -> reason."""
    from gnnplan.report import choice, timeline

    makers: list[tuple[str, Callable[[Facts], Picture]]] = [
        ("What an epoch is made of", choice.epochs),
        ("Who does what when", timeline.timeline),
        ("What memory holds", choice.memory),
        ("Who sends whom", timeline.matrix),
        ("Which links are busy", timeline.links),
        ("Where the prediction was off", choice.errors),
        ("What training achieved", choice.losses),
    ]
    pictures, absent = [], {}
    for title, maker in makers:
        notify("drawing", title)
        try:
            pictures.append(replace(maker(facts), title=title))
        except Absent as reason:
            absent[title] = f"Not drawn: {reason}."
    return pictures, absent


def page(facts: Facts, pictures: Sequence[Picture], absent: dict[str, str]) -> str:
    """Return the HTML of the page."""
    from plotly.offline import get_plotlyjs

    templates = {name: _template(*theme) for name, theme in THEMES.items()}
    figures = {picture.key: json.loads(picture.figure.to_json()) for picture in pictures}
    missing = [
        f'<section class="absent"><h2>{_text(title)}</h2><p>{_prose(reason)}</p></section>'
        for title, reason in absent.items()
    ]
    problem = facts.problem
    question = describe_question(facts.document["graph"], problem.workload, problem.cluster)
    packed = gzip.compress(get_plotlyjs().encode(), mtime=0)
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=_text(f"{question}: report"),
        heading=_text(question),
        summary="\n".join(
            f"<dt>{_text(name)}</dt><dd>{_prose(line)}</dd>"
            for name, line in summary(facts).items()
        ),
        sections="\n".join([*map(_section, pictures), *missing]),
        tables="\n".join(map(_table, pictures)),
        footer=_text(f"gnnplan {__version__}; everything is in this file, nothing is fetched."),
        pictures=_json(figures),
        templates=_json(templates),
        plotly=base64.b64encode(packed).decode(),
    )


def summary(facts: Facts) -> dict[str, str]:
    """Return the lines of the plan's summary, and a line on its runs."""
    from gnnplan.report.choice import named_runs

    lines: dict[str, str] = dict(facts.document["summary"])
    if facts.runs:
        lines["ran"] = "; ".join(
            f"{name} took {show_time(one.run.measured_s)} per epoch (its prediction was off by"
            f" {show_percent(one.run.comparison['step']['predicted_error'], sign=True)})"
            for name, one in named_runs(facts)
        )
    return lines


def _template(source: str, text: str, dim: str, nothing: str) -> dict[str, Any]:
    """Return a plotly template with a transparent background and the page's colours."""
    import plotly.io as pio

    from gnnplan.report.facts import COMPUTATION

    clear = "rgba(0,0,0,0)"
    template: dict[str, Any] = pio.templates[source].to_plotly_json()
    buttons = {"bgcolor": clear, "color": dim, "activecolor": text}
    template["layout"] |= {"paper_bgcolor": clear, "plot_bgcolor": clear, "modebar": buttons}
    # opaque, since plotly picks the colour of a cell's text as if the cell lay on white
    template["data"]["heatmap"][0]["colorscale"] = [[0, nothing], [1, COMPUTATION]]
    template["data"]["bar"][0]["error_x"] = {"color": text}
    return template


def _section(picture: Picture) -> str:
    return (
        f"<section><h2>{_text(picture.title)}</h2><p>{_prose(picture.see)}</p>"
        f'<div class="plot" id="{picture.key}" role="img" aria-label="{_text(picture.alt)}"></div>'
        "</section>"
    )


def _table(picture: Picture) -> str:
    """Return the numbers of a picture as a folded table."""
    rows = picture.numbers.rows
    shown, left_out = replace(picture.numbers, rows=rows[:MOST_ROWS]), len(rows[MOST_ROWS:])
    return (
        f"<details><summary>Numbers: {_text(picture.title)}</summary>"
        f"<div class='wide'>{shown.html()}</div>"
        + (f"<p>{left_out:,} more rows are left out.</p>" if left_out else "")
        + "</details>"
    )


def _prose(words: str) -> str:
    """Return text as HTML: `commands` as code, and no line break between a number and its unit."""
    joined = re.sub(r"(?<=\d) (?=(?:%|[mu]?s|[kMGT]?B)(?!\w))", "\u00a0", _text(words))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", joined)


def _json(value: Any) -> str:
    """Return JSON for a script element; '</', which would end the element, is escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
