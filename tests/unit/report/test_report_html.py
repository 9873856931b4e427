"""`report.html`: one file that loads nothing, whose figures are the prediction's, the simulation's and those handed in."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moe_overlap.api import predict, read_job, simulated
from moe_overlap.describe.cluster import GIB, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Plan
from moe_overlap.report.answer import Answer, answer_lines
from moe_overlap.report.drawings import Point, chart, stages_and_devices
from moe_overlap.report.html import CandidateRow, Report, Sensitivity, report_html, write_report
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import needed_bytes
from moe_overlap.tuner.cost.simulate.step import SimulatedStep
from tests.spawn import HANGS_SECONDS
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[3]
WORDS = (f"@{ROOT / 'examples/mixtral-8x7b.args'}", "--num-layers", "8", "--global-batch-size", "32")
CLUSTER = shipped_cluster("H100", 64)
ALONE = {"br", "hr", "meta", "input", "img", "link"}
"""Tags without an end."""
LOADING = {"src", "href", "srcset", "data", "poster", "action", "formaction", "xlink:href", "background"}
"""Attributes by which a page loads something, or leads away."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Tags, tables and what a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[tuple[str, str | None]] = []
        self.tables: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.sections: list[str] = []
        self.words: list[str] = []
        self._table, self._value = "", None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.loads += [(name, value) for name, value in attrs if name in LOADING]
        self.loads += [(name, value) for name, value in attrs if name == "style" and "url" in (value or "")]
        if tag not in ALONE:
            self.open.append(tag)
        if tag == "section":
            self.sections.append(str(given["id"]))
        if tag == "table":
            self._table = str(given["id"])
            self.tables[self._table] = []
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            value = given.get("data-value")
            self.tables[self._table][-1].append(("", None if value is None else float(value)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [(name, value) for name, value in attrs if name in LOADING]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            row = self.tables[self._table][-1]
            row[-1] = (data, row[-1][1])


@pytest.fixture(scope="module")
def predicted_and_simulated() -> tuple[Prediction, SimulatedStep]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_overlap.api.cached_graphs", by_hand)
        return predict(WORDS, CLUSTER), simulated(WORDS, CLUSTER)


def report(predicted_and_simulated: tuple[Prediction, SimulatedStep]) -> Report:
    prediction, step = predicted_and_simulated
    answer = Answer(plan=read_job(WORDS, 64).plan, prediction=prediction, cluster=CLUSTER)
    fullest = max(map(needed_bytes, prediction.predicted.stages))
    chosen = CandidateRow(
        name="TP 2 & PP 4", seconds=prediction.predicted.step_seconds, needed_bytes=fullest, is_chosen=True
    )
    others = [
        CandidateRow(name="TP <4>", seconds=9.125, needed_bytes=20 * GIB, note="bubble +1 s"),
        CandidateRow(name="PP 16", seconds=None, needed_bytes=None, note="a stage holds no layer"),
    ]
    network = Sensitivity(
        name="network bandwidth",
        unit="GB/s",
        points=((25.0, 5.5, ""), (50.0, 4.25, "EP 4"), (100.0, 4.0, "")),
        actual=50.0,
    )
    return Report(
        answer=answer, title="mixtral & friends", step=step, candidates=[chosen, *others], sensitivities=[network]
    )


@pytest.fixture(scope="module")
def page(predicted_and_simulated: tuple[Prediction, SimulatedStep]) -> Page:
    return Page(report_html(report(predicted_and_simulated)))


def values(page: Page, table: str) -> list[list[float | None]]:
    return [[value for _, value in row] for row in page.tables[table][1:]]


def test_every_tag_is_closed_and_every_section_is_there(page: Page) -> None:
    assert page.open == []
    assert page.sections == ["plan", "memory", "step", "timeline", "candidates", "sensitivity", "details"]
    assert page.tags.count("svg") == 6


def test_the_page_loads_nothing(predicted_and_simulated: tuple[Prediction, SimulatedStep], page: Page) -> None:
    assert page.loads == []
    assert not {"script", "link", "iframe", "img", "object", "embed", "use", "image"} & set(page.tags)
    text = report_html(report(predicted_and_simulated))
    assert "@import" not in text and "url(" not in text
    # The name of SVG's vocabulary is no address that is visited.
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {"http://www.w3.org/2000/svg"}
    inside = Page('<a href="x"></a><img src="y">')
    assert inside.loads == [("href", "x"), ("src", "y")]


def test_the_figures_are_those_of_the_prediction(
    predicted_and_simulated: tuple[Prediction, SimulatedStep], page: Page
) -> None:
    prediction = predicted_and_simulated[0]
    for row, stage in zip(values(page, "memory-table"), prediction.predicted.stages, strict=True):
        peaks = stage.peak_bytes_by_category
        sizes = [getattr(peaks, name) for name in peaks.__dataclass_fields__]
        assert row[1:] == pytest.approx([size / GIB for size in (*sizes, stage.peak_bytes, needed_bytes(stage))])
    steps = values(page, "step-table")
    assert [row[1] for row in steps] == [*prediction.breakdown.values(), prediction.predicted.step_seconds]
    assert sum(row[1] or 0.0 for row in steps[:-1]) == pytest.approx(steps[-1][1])
    assert [row[2] for row in values(page, "stage-table")] == [s.stable_seconds for s in prediction.predicted.stages]
    # What is shown is the value, rounded.
    for table in ("memory-table", "step-table", "stage-table", "timeline-table"):
        for cells in page.tables[table][1:]:
            for shown, value in cells:
                if value is not None:
                    scale = 100 if "%" in shown else 1
                    assert float(shown.removesuffix(" %")) == pytest.approx(scale * value, abs=0.0501)


def test_the_figures_are_those_of_the_simulation(
    predicted_and_simulated: tuple[Prediction, SimulatedStep], page: Page
) -> None:
    simulation, ranks = predicted_and_simulated[1].simulation, list(predicted_and_simulated[1].prices)
    assert len(ranks) == 4
    for row, rank in zip(values(page, "timeline-table"), ranks, strict=True):
        assert row[1:] == [max(span.end for span in simulation.spans(rank)), simulation.exposed_seconds(rank)]


def test_rows_that_are_handed_in_are_shown(
    predicted_and_simulated: tuple[Prediction, SimulatedStep], page: Page
) -> None:
    rows = page.tables["candidate-table"][1:]
    assert [row[0][0] for row in rows] == ["TP 2 & PP 4", "TP <4>", "PP 16"]
    assert [row[1][1] for row in rows] == [predicted_and_simulated[0].predicted.step_seconds, 9.125, None]
    assert [row[3][0] for row in rows] == ["chosen", "bubble +1 s", "a stage holds no layer"]
    assert values(page, "sensitivity-table-0") == [[25.0, 5.5, None], [50.0, 4.25, None], [100.0, 4.0, None]]


def test_the_answer_stands_at_the_top(predicted_and_simulated: tuple[Prediction, SimulatedStep], page: Page) -> None:
    text = "".join(page.words)
    assert "mixtral & friends" in text
    assert "\n".join(answer_lines(report(predicted_and_simulated).answer)) in text


def test_sections_without_data_are_left_out(predicted_and_simulated: tuple[Prediction, SimulatedStep]) -> None:
    full = report(predicted_and_simulated)
    bare = Page(report_html(Report(answer=full.answer, title="bare")))
    assert bare.sections == ["plan", "memory", "step", "details"] and bare.open == []


def test_a_page_that_cannot_be_written_is_one_line(
    predicted_and_simulated: tuple[Prediction, SimulatedStep], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"none/report.html: cannot be written"):
        write_report(tmp_path / "none" / "report.html", report(predicted_and_simulated))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_a_browser_renders_it(predicted_and_simulated: tuple[Prediction, SimulatedStep], tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", report(predicted_and_simulated))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={tmp_path / 'page.png'}"]
    subprocess.run([str(CHROMIUM), *options, str(tmp_path / "report.html")], check=True, timeout=HANGS_SECONDS)
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_an_interleaved_stage_is_not_drawn_as_if_it_had_all_layers_between() -> None:
    plan = read_job(list(WORDS), 64).plan
    first, last = stages_of(plan, ((0, 1), (4, 5))), stages_of(plan, ((0, 4),))
    assert "stage 0: L0, …" in stages_and_devices(first) and "L4" not in stages_and_devices(first)
    assert "stage 0: L0–L3<" in stages_and_devices(last)


def stages_of(plan: Plan, chunks: tuple[tuple[int, int], ...]) -> Plan:
    """The plan with a first stage of these chunks alone."""
    return dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], chunks=chunks),))


def test_points_have_their_names_beside_them_where_there_is_room() -> None:
    """The marked point first; a name that would cover another one or leave the drawing is in the tooltip alone."""
    apart = [
        Point(x=10, y=1, label="TP8"),
        Point(x=70, y=2, label="EP8 & more", is_marked=True),
        Point(x=79, y=3, label="x" * 50),
    ]
    drawing = chart(apart, ("GiB needed", "seconds a step"), joined=False, limit=80)
    for name in (">TP8<", ">EP8 &amp; more<", f">{'x' * 33}…<", ">capacity<"):
        assert f"{name}/text>" in drawing
    assert drawing.index(">EP8 &amp; more</text>") < drawing.index(">TP8</text>")
    crowd = [Point(x=40, y=1, label=f"plan {number}", is_marked=number == 7) for number in range(20)]
    drawing = chart(crowd, ("GiB needed", "seconds a step"), joined=False)
    shown = re.findall(r">(plan \d+)</text>", drawing)
    assert shown[0] == "plan 7" and 1 <= len(shown) <= 4 and drawing.count("<title>plan") == 20
    assert "</text>" in chart(apart, ("a", "b"), joined=True) and "TP8</text>" not in chart(
        apart, ("a", "b"), joined=True
    )
