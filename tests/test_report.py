"""The report: one file that opens offline, whose pictures add up to the plan's numbers."""

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from calls import planned

from gnnplan import report as page
from gnnplan.planner.decision import plan as plans
from gnnplan.planner.vocabulary.trace import Span
from gnnplan.report import choice, report
from gnnplan.report import timeline as an_epoch
from gnnplan.report.facts import gather
from gnnplan.report.timeline import MOST_MARKS, marks, steady, thinned, timeline

GRAPH = "synthetic:community?vertices=400&edges=4000&features=8&classes=3&seed=0"
CLUSTER = """name: two
servers: 2
gpus_per_server: 2
device: {kind: cpu, memory: 600MB, gemm: 50GFLOP/s, memory_bandwidth: 5GB/s}
intra_node: {bandwidth: 1GB/s, latency: 50us}
inter_node: {bandwidth: 100MB/s, latency: 90us}
"""
MOST_BYTES = 5e6  # of a page


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "cluster.yaml").write_text(CLUSTER)
    how = f"--cluster {folder}/cluster.yaml --layers 2 --hidden 16 --per epoch"
    return planned(folder / "plan.json", "--graph", GRAPH, how)


@pytest.fixture(scope="module")
def facts(plan):
    return gather(plan, [])


class Outside(HTMLParser):
    """Addresses that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href")]


@pytest.mark.slow
def test_the_page_is_one_small_file_that_fetches_nothing(plan, tmp_path):
    output = report(plan, output=tmp_path / "report.html")
    text = output.read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(text)
    assert outside.found == []
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    assert 1e6 < output.stat().st_size <= MOST_BYTES
    for line in plans.read(plan)["summary"].values():
        assert page._prose(line) in text
    assert "showSendToCloud: false" in text  # or plotly offers to upload pictures
    pictures = json.loads(re.search(r'id="pictures">(.*?)</script>', text, re.S)[1])
    for key in pictures:
        assert re.search(rf'id="{key}" role="img" aria-label="[^"]{{40,}}"', text), key
    assert set(pictures) == {"epochs", "timeline", "memory", "matrix", "links"}
    assert text.count("gnnplan run plan.json --out run") == 2  # how to get the other two


def test_bars_add_up_to_epochs(facts):
    drawn = choice.epochs(facts).figure
    bars = [trace for trace in drawn.data if trace.type == "bar"]
    unit = {"ms of an epoch": 1e3, "s of an epoch": 1.0, "µs of an epoch": 1e6}
    scale = unit[drawn.layout.xaxis.title.text]
    answers = [facts.document["best"], *facts.document["alternatives"]]
    for place, answer in enumerate(answers[: choice.MOST_BARS]):
        together = sum(bar.x[place] for bar in bars) / scale
        assert together == pytest.approx(answer["predicted"]["epoch_s"], rel=1e-9)


def test_memory_adds_up_to_what_the_plan_says(facts):
    drawn = choice.memory(facts).figure
    scale = {"MB": 1e6, "GB": 1e9}[drawn.layout.yaxis.title.text]
    fullest = max(sum(bar.y[rank] for bar in drawn.data) for rank in range(facts.problem.ranks))
    said = facts.document["best"]["predicted"]["memory_bytes"]
    assert fullest * scale == pytest.approx(said, rel=1e-3)


def test_the_matrix_adds_up_to_the_bytes_and_links_carry_them(facts):
    said = facts.document["best"]["predicted"]
    sent = an_epoch.sent_between(facts.candidate, facts.epoch)
    assert sent.sum() == pytest.approx(said["bytes_total"], rel=1e-12)
    [field] = an_epoch.matrix(facts).figure.data
    scale = {"kB": 1e3, "MB": 1e6}[field.colorbar.title.text]
    assert np.sum(field.z) * scale == pytest.approx(said["bytes_total"], rel=1e-4)
    servers = np.array(facts.problem.servers)
    between = sent[servers[:, None] != servers].sum()
    assert between == pytest.approx(said["bytes_by_link"]["inter_node"], rel=1e-9)
    loads = an_epoch.loads(facts.candidate, sent)
    assert sum(one.nbytes for one in loads if one.port[0] == "nic_out") == pytest.approx(between)
    [bars] = an_epoch.links(facts).figure.data
    assert list(bars.x) == sorted(bars.x, reverse=True)
    assert {"NIC 0 -> network 0", "network 0 -> NIC 1"} <= set(bars.y)


def test_the_timeline_shows_one_epoch_of_every_rank_and_lane(facts):
    window = steady("simulated", facts.simulated, 1)
    assert window.seconds == pytest.approx(facts.document["best"]["predicted"]["epoch_s"], rel=0.3)
    drawn = {(mark.rank, mark.lane) for mark in marks(window)}
    assert drawn == {(span.rank, span.lane) for span in facts.simulated}
    assert all(0 <= mark.start <= mark.end <= window.seconds for mark in marks(window))
    ranks = {label.split()[1] for label in timeline(facts).figure.layout.yaxis.ticktext}
    assert ranks == {str(rank) for rank in range(facts.problem.ranks)}


def test_the_window_is_the_median_step_after_the_first_ones():
    """The first steps warm up; one of the others may be a straggler."""
    ends = [0.0, 9.0, 16.0, 18.0, 24.0, 27.0]  # steps of 9, 7, 2, 6 and 3 s
    spans = [
        Span(f"forward:s{step}", "forward", 0, "compute", begin, end, 0, step)
        for step, (begin, end) in enumerate(pairwise(ends))
    ]
    window = steady("run", spans, 1)
    assert window is not None and window.seconds == 3.0
    assert [(span.start, span.end, span.step) for span in window.spans] == [(0.0, 3.0, 4)]


def test_a_run_that_has_recorded_no_step_is_not_drawn():
    """It was an IndexError."""
    at_setup = Span("rows:s-1", "rows", 0, "comm", 0.0, 1.0, 8, -1)
    assert steady("run", [], 1) is steady("run", [at_setup], 1) is None


def test_what_no_screen_shows_is_joined_and_nothing_else():
    spans = [Span(f"forward:c{i}:s0", "forward", 0, "compute", i, i + 0.5) for i in range(4)]
    assert [mark.label for mark in thinned(spans, 0.1)] == [f"forward:c{i}" for i in range(4)]
    [first, last] = thinned(spans, 1.6)
    assert (first.start, first.end, first.label) == (0, 1.5, "2 operations")
    assert (last.start, last.end) == (2, 3.5)
    short = Span("loss:s0", "loss", 0, "compute", 0, 0.1)
    long = Span("forward:l1:s0", "forward", 0, "compute", 0.1, 9)
    assert [mark.label for mark in thinned([short, long], 0.5)] == ["loss", "forward:l1"]
    many = [
        Span(f"forward:c{i}:s0", "forward", rank, "compute", i, i + 0.5)
        for rank in range(8)
        for i in range(3_000)
    ]
    assert len(marks(steady("long", many, 1))) <= MOST_MARKS


def test_without_plotly_the_error_says_what_to_install(plan, tmp_path, monkeypatch, gnnplan):
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    code, _, err = gnnplan("report", plan, "-o", tmp_path / "report.html")
    assert code == 2 and "plotly" in err and "pip install 'gnnplan[report]'" in err
    assert list(tmp_path.iterdir()) == []


ALONE, NAMELESS = {"strategy": {"name": "gnnpipe"}}, {"strategy": {"a": "b"}}


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda plan: {"graph": 1}, "not a plan"),
        (lambda plan: "plan", "not JSON"),
        (lambda plan: plan | {"alternatives": [ALONE]}, r"ves.0.(exact|predicted)\S* must"),
        (
            lambda plan: plan | {"alternatives": [plan["alternatives"][0] | NAMELESS]},
            "bad.json: alternatives.0.strategy.name must be given",
        ),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(spoilt, said, plan, tmp_path, gnnplan):
    bad = spoilt(plans.read(plan))
    (tmp_path / "bad.json").write_text(bad if bad == "plan" else json.dumps(bad))
    output = tmp_path / "out" / "report.html"
    output.parent.mkdir()
    answer = gnnplan("report", tmp_path / "bad.json", "-o", output)
    assert answer.code == 2 and re.search(said, answer.err)
    assert list(output.parent.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_draws_every_picture(width, scheme, plan, tmp_path):
    """Chromium, offline: no error on its console, every picture drawn, nothing to scroll sideways."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("needs chromium and chromedriver")
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    output = report(plan, output=tmp_path / "report.html")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    try:
        rates = {"downloadThroughput": 0, "uploadThroughput": 0}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        for command, how in {
            "Network.enable": {},
            "Network.emulateNetworkConditions": {"offline": True, "latency": 0, **rates},
            "Emulation.setDeviceMetricsOverride": size,
            "Emulation.setEmulatedMedia": {
                "features": [{"name": "prefers-color-scheme", "value": scheme}]
            },
        }.items():
            browser.execute_cdp_cmd(command, how)
        browser.get(output.as_uri())

        def ask(words: str) -> object:
            return browser.execute_script(f"return {words}")

        plots = "document.querySelectorAll('.plot{}').length"
        WebDriverWait(browser, 60).until(lambda _: ask(plots.format("[data-drawn]")) == 5)
        assert ask(plots.format("")) == 5
        drawn = "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.trace, .hm'))"
        assert ask(drawn)
        assert browser.get_log("browser") == []
        buttons = ask("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
        assert buttons and not any("Share" in title for title in buttons)
        page_width = "document.documentElement.{}Width"
        assert ask(page_width.format("scroll")) <= ask(page_width.format("client")) <= width
        background = ask("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
        templates = "document.querySelector('.plot').layout.template.layout.font.color"
        assert ask(templates) == {"light": "#2a3f5f", "dark": "#f2f5fa"}[scheme]
    finally:
        browser.quit()
