"""The report in a real browser: what it loads, draws and shows, light, dark and on a phone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.analysis import TrainingLog, smooth_values, write_report
from onstep.analysis.logs.samples_log import TextSample, append_samples
from onstep.analysis.plots.axes import PALETTE
from tests.analysis.test_report import EVIL
from tests.support.browser import Watched
from tests.support.made_logs import log_of, points, run

pytestmark = pytest.mark.process

NewPage = Callable[..., Watched]


@pytest.fixture
def show(new_page: NewPage, tmp_path: Path) -> Callable[..., Watched]:
    """Write a report and open it."""

    def open_it(logs: Sequence[TrainingLog] | TrainingLog, **options: Any) -> Watched:
        path = write_report(logs, tmp_path / "report.html", title=options.pop("title", "Two runs"))
        watched = new_page(**options)
        watched.page.goto(path.as_uri())
        watched.until("document.querySelector('.plot .line')")
        return watched

    return open_it


def paths(watched: Watched, chart: int = 0) -> list[str]:
    drawn: list[str] = (
        watched.page.locator(".chart")
        .nth(chart)
        .locator("path.line")
        .evaluate_all("(found) => found.map((one) => one.getAttribute('d'))")
    )
    return drawn


def ticks(watched: Watched, kind: str, chart: int = 0) -> list[str]:
    found: list[str] = watched.page.locator(".chart").nth(chart).locator(f"text.{kind}:not(.name)").all_text_contents()
    return found


def test_the_page_asks_for_nothing_but_itself_and_runs_no_script_of_a_log(
    show: Callable[..., Watched], tmp_path: Path
) -> None:
    (tmp_path / EVIL.replace("/", "")).mkdir()
    place = tmp_path / EVIL.replace("/", "")
    append_samples(place / "text_samples.jsonl", [TextSample(1.0, 0, EVIL, EVIL)])
    (place / "decisions.jsonl").write_text(json.dumps({"step": 1, "flag": EVIL, "author": EVIL}) + "\n")
    records = [dict(record, **{f"<b>{EVIL}": float(index)}) for index, record in enumerate(run().records)]
    watched = show([log_of(records, EVIL, path=str(place / "log.json")), run("b")])
    watched.page.mouse.wheel(0, 20_000)
    watched.page.locator(".chart svg").first.hover()
    assert watched.page.locator(".tip:visible").count() == 1
    assert EVIL in watched.page.locator(".tip:visible").inner_text()
    assert [url.split("?")[0] for url in watched.urls] == [(tmp_path / "report.html").as_uri()]
    assert watched.page.title() == "Two runs"
    assert watched.page.locator("main img, main b:has-text('img')").count() == 0


def test_every_metric_is_drawn_with_a_line_for_each_run(show: Callable[..., Watched]) -> None:
    watched = show([run("a"), run("b", offset=1.0)], viewport={"width": 1280, "height": 4000})
    watched.until("document.querySelectorAll('.plot').length === 6")
    assert watched.page.locator(".chart").nth(1).locator("path.line").count() == 2
    assert ticks(watched, "x") == ["200", "400", "600", "800", "1,000"]


def test_the_axis_is_chosen(show: Callable[..., Watched]) -> None:
    watched = show([run("a")])
    watched.page.select_option("#axis", "tokens")
    assert ticks(watched, "x")[-1] == "100K"
    assert watched.page.locator(".chart text.name").first.text_content() == "tokens"
    watched.page.check("#logX")
    assert ticks(watched, "x")[0] == "1,000"
    watched.page.check("#logY")
    assert "NaN" not in "".join(paths(watched))


def test_two_curves_with_the_same_first_loss_start_at_the_same_place(show: Callable[..., Watched]) -> None:
    logs = [log_of(points("loss", (5.55 * np.exp(-np.arange(300) / scale)).tolist())) for scale in (8, 60)]
    faint_a, smooth_a, faint_b, smooth_b = paths(show(logs))
    assert len({one.split("L")[0] for one in (faint_a, smooth_a, faint_b, smooth_b)}) == 1


def test_a_long_curve_starts_at_its_first_value_too(show: Callable[..., Watched]) -> None:
    logs = [log_of(points("loss", (5.55 * np.exp(-np.arange(9_000) / scale)).tolist())) for scale in (80, 600)]
    watched = show(logs)
    smooth_a, smooth_b = paths(watched)
    assert smooth_a.split("L")[0] == smooth_b.split("L")[0]
    assert watched.page.locator(".chart").first.locator("path.band").count() == 2


def test_dragging_zooms_all_charts_and_a_button_resets_them(show: Callable[..., Watched]) -> None:
    watched = show([run("a")], viewport={"width": 1280, "height": 3000})
    watched.until("document.querySelectorAll('.plot').length === 6")
    whole = ticks(watched, "x")
    box = watched.page.locator(".plot").nth(1).bounding_box()
    watched.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
    watched.page.mouse.down()
    watched.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 100, steps=4)
    watched.page.mouse.up()
    zoomed = ticks(watched, "x")
    assert zoomed != whole
    assert ticks(watched, "x", 1) == zoomed
    assert all(400 <= int(one.replace(",", "")) <= 800 for one in zoomed)
    watched.page.click("#reset")
    assert ticks(watched, "x") == whole


def test_a_run_can_be_hidden(show: Callable[..., Watched]) -> None:
    watched = show([run("a"), run("b", offset=1.0)])
    before = len(paths(watched))
    watched.page.locator(".runs input").first.uncheck()
    assert len(paths(watched)) == before / 2


def ground(watched: Watched) -> str:
    found: str = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_the_theme_is_that_of_the_system_until_one_is_chosen(show: Callable[..., Watched]) -> None:
    light, dark = (show([run("a")], color_scheme=scheme) for scheme in ("light", "dark"))
    of_light, of_dark = ground(light), ground(dark)
    assert of_light != of_dark
    assert light.page.locator("#theme").text_content() == "Dark"
    light.page.click("#theme")
    assert ground(light) == of_dark
    light.page.reload()
    assert ground(light) == of_dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_curves_can_be_told_from_their_ground(show: Callable[..., Watched], scheme: str) -> None:
    watched = show([run("a")], color_scheme=scheme)
    colours = watched.page.evaluate(
        """() => ['surface', 'text', 'quiet', ...Array(10).keys()].map((name) => {
             const probe = document.body.appendChild(document.createElement('p'));
             probe.style.color = `var(--${typeof name === 'number' ? 'run-' : ''}${name})`;
             return getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
           })"""
    )
    surface, text, quiet, *curves = map(luminance, colours)
    assert min(contrast(surface, one) for one in (text, quiet)) >= 4.5
    assert min(contrast(surface, one) for one in curves) >= (2 if scheme == "light" else 4.5)
    if scheme == "light":
        assert [f"#{''.join(f'{part:02x}' for part in one)}" for one in colours[3:]] == [one.lower() for one in PALETTE]


def luminance(colour: Sequence[int]) -> float:
    parts = [part / 255 for part in colour]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_a_phone_shows_the_page_without_scrolling_sideways(show: Callable[..., Watched]) -> None:
    watched = show([run("a" * 60), run("b", offset=1.0)], viewport={"width": 360, "height": 740}, has_touch=True)
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 360
    watched.page.locator(".plot").first.scroll_into_view_if_needed()
    watched.page.locator(".plot").first.tap()
    assert watched.page.locator(".tip").first.bounding_box()["width"] <= 340


def test_charts_say_what_they_do_not_show_and_a_constant_is_not_zero(show: Callable[..., Watched]) -> None:
    values = [2 + 0.01 * (index % 5) for index in range(200)]
    values[77], values[80] = 80.0, math.nan
    watched = show(log_of(points("loss", values, learning_rate=3e-4)), viewport={"width": 1280, "height": 2000})
    watched.until("document.querySelectorAll('.plot').length === 2")
    assert watched.page.locator(".remark").all_text_contents() == ["1 not finite, up to 80 outside", ""]
    assert watched.page.locator(".gap").count() == 1
    labels = ticks(watched, "y", 1)
    assert len(labels) > 1
    assert not {"0", "1", "-1"} & set(labels), labels


def test_the_first_evaluation_is_in_view_however_far_it_is_from_the_others(show: Callable[..., Watched]) -> None:
    values = [250.0, *(10 + 0.1 * index for index in range(30))]
    watched = show(log_of(points("eval_perplexity", values)))
    assert watched.page.locator(".remark").all_text_contents() == [""]


def test_the_moving_mean_of_the_page_is_that_of_the_figures(show: Callable[..., Watched]) -> None:
    values = [math.sin(index) for index in range(97)]
    values[30] = 1e9
    given = [None if index == 50 else value for index, value in enumerate(values)]
    values[50] = math.nan
    page = show(run()).page
    with_spike, without = (
        np.array(
            page.evaluate("([values, leftOut]) => movingMean(values, 10, leftOut)", [given, left_out]), dtype=float
        )
        for left_out in ([], [30])
    )
    assert with_spike == pytest.approx(smooth_values(values, 10), nan_ok=True)
    assert without == pytest.approx(smooth_values(values, 10, np.arange(97) == 30), nan_ok=True)
    assert np.nanmax(np.abs(without)) < 1


@pytest.mark.parametrize("length", [200, 20_000])
def test_a_click_on_a_spike_gives_the_command_that_shows_its_step(
    show: Callable[..., Watched], tmp_path: Path, length: int
) -> None:
    place, spike = tmp_path / "a run", length // 2 + 3
    place.mkdir()
    (place / "run.json").write_text(json.dumps({"config": {}}))
    losses = [9.0 if step == spike else 3.0 + 0.01 * math.sin(step) for step in range(1, length + 1)]
    log = log_of(points("loss", losses), path=str(place / "trainer_logs.json"))
    watched = show([log], viewport={"width": 1280, "height": 1000})
    box = watched.page.locator(".plot").first.bounding_box()
    left, right = box["x"] + 56, box["x"] + box["width"] - 22  # the axes
    watched.page.mouse.click(left + (right - left) * (spike - 1) / (length - 1), box["y"] + 100)
    assert watched.page.locator(".tip code").inner_text() == f"onstep rewind '{place}' {spike}"
