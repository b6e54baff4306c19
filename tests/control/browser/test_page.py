"""The page in a real browser: what it loads and shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.control.browser.conftest import Watched
from tests.control.browser.steered_job import Served, SteeredJob

pytestmark = pytest.mark.process

CHART = "document.querySelector('[data-chart=loss] .place')?.chart"
"""The drawn chart of the loss."""
HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><b>bold</b>"


def test_the_page_loads_nothing_from_elsewhere(opened: Watched) -> None:
    origins = {urlsplit(url)[:2] for url in opened.urls if not url.startswith(("data:", "blob:"))}
    assert origins == {("http", urlsplit(opened.page.url).netloc)}
    assert opened.page.locator(".card h2").text_content() == "first-run"


def test_curves_grow_while_one_looks(opened: Watched, job: SteeredJob) -> None:
    before = opened.points("loss")
    job.step(25)
    drawn = f"{CHART}.lines[0].x.length"
    opened.until(f"{drawn} >= {before + 25}")
    opened.until("document.querySelector('.progress-words').textContent.includes('Step 55 of 400')")


def test_curves_of_a_streamed_page_are_those_of_a_fresh_one(opened: Watched, job: SteeredJob) -> None:
    job.step(10)
    opened.until("document.querySelector('[data-chart=loss]').dataset.points >= 40")
    read = f"() => {CHART}.lines.map((one) => [one.x, one.y])"
    streamed = opened.page.evaluate(read)
    opened.page.reload()
    opened.until("document.querySelector('[data-chart=loss]')?.dataset.points >= 40")
    assert opened.page.evaluate(read) == streamed


def test_a_rollback_takes_the_curve_back(opened: Watched, job: SteeredJob) -> None:
    job.step_number = 20
    job.step(2)
    opened.until("document.querySelector('[data-chart=loss]').dataset.points === '22'")


def test_a_run_of_100000_points_is_drawn_with_few(
    serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    job = SteeredJob()
    for step in range(100_000):
        job.feed.history.add(step, 1e9 + step, {"loss": 5.0 if step == 77_777 else 1.0, "grad_norm": 1.0})
    job.feed.update(global_step=99_999)
    watched = new_page()
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points > 0")
    assert 100 < watched.points("loss") <= 1500
    drawn = watched.page.evaluate(f"Math.max(...{CHART}.lines[0].y)")
    assert drawn == 5.0  # the one spike is there


def test_zooming_asks_for_more_points_of_the_part_in_view(
    serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    job = SteeredJob()
    for step in range(20_000):
        job.feed.history.add(step, 1e9 + step, {"loss": 1.0 + step % 7})
    job.feed.update(global_step=19_999)
    watched = new_page()
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points > 0")
    within = f"{CHART}.lines[0].x.filter((x) => x > 10000 && x < 12000).length"
    before = watched.page.evaluate(within)
    box = watched.page.locator("[data-chart=loss] .plot").bounding_box()
    watched.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    watched.page.mouse.down()
    watched.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 55, steps=4)
    watched.page.mouse.up()
    watched.until(f"{within} > {3 * before}")
    watched.page.get_by_role("button", name="Reset zoom").click()
    watched.until(f"{CHART}.x.high > 15000")


def test_controls_change_the_charts(opened: Watched, job: SteeredJob) -> None:
    opened.page.get_by_label("Log y").check()
    opened.until(f"{CHART}.y.isLog")
    opened.page.get_by_label("Smoothing").fill("0.9")
    opened.until(f"{CHART}.lines.length === 2")
    opened.page.get_by_label("x axis").select_option("Wall time")
    opened.until(f"{CHART}.x.low > 1e12")
    opened.page.reload()
    opened.until(f"{CHART}?.y.isLog && {CHART}.lines.length === 2")


def test_runs_are_overlaid(serve: Callable[..., Served], new_page: Callable[..., Watched]) -> None:
    one, two = SteeredJob("run-a"), SteeredJob("run-b")
    one.step(10)
    two.step(20)
    watched = new_page(viewport={"width": 1280, "height": 900})
    watched.page.goto(serve(one, two).new_link())
    watched.page.get_by_role("checkbox", name="run-b").check()
    watched.until("document.querySelector('[data-chart=loss]').dataset.points === '30'")
    names, colours = (watched.page.evaluate(f"{CHART}.lines.map((one) => one.{key})") for key in ("label", "className"))
    assert names == ["run-a", "run-b"]
    assert len(set(colours)) == 2
    assert watched.page.locator(".card").count() == 2
    watched.page.reload()
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points === '30'")
    assert watched.page.evaluate(f"{CHART}.lines.map((one) => one.className)") == colours


@pytest.mark.parametrize(
    ("tokenizers", "title", "last"),
    [
        ((("bytes", 1.0), ("x", 4.0)), "Loss per byte", [4.0, 1.5]),
        ((("bytes", 1.0), ("x", None)), "Loss per token of different tokenizers: not comparable", [4.0, 6.0]),
        ((("x", 4.0), ("x", 4.1)), "Loss", [4.0, 6.0]),
        ((None, None), "Loss", [4.0, 6.0]),
    ],
)
def test_losses_of_different_tokenizers_are_drawn_per_byte_or_said_not_to_be_comparable(
    serve: Callable[..., Served], new_page: Callable[..., Watched], tokenizers: Any, title: str, last: list[float]
) -> None:
    jobs = [SteeredJob("run-a"), SteeredJob("run-b")]
    for job, tokenizer, loss in zip(jobs, tokenizers, (4.0, 6.0), strict=True):
        if tokenizer is not None:
            described = {"fingerprint": tokenizer[0], "bytes_per_token": tokenizer[1], "configured": tokenizer[0]}
            job.feed.update(tokenizer=described)
        for step in (1, 2):
            job.feed.add_record({"global_step": step, "timestamp": time.time(), "loss": loss + 2 - step})
    watched = new_page(viewport={"width": 1280, "height": 900})
    watched.page.goto(serve(*jobs).new_link())
    watched.page.get_by_role("checkbox", name="run-b").check()
    watched.until("document.querySelector('[data-chart=loss]').dataset.points === '4'")
    assert watched.page.evaluate(f"{CHART}.lines.map((one) => one.y.at(-1))") == last
    assert watched.page.locator("[data-chart=loss] h3").text_content() == title
    watched.page.get_by_role("checkbox", name="run-b").uncheck()
    watched.until("document.querySelector('[data-chart=loss]').dataset.points === '2'")
    assert watched.page.locator("[data-chart=loss] h3").text_content() == "Loss"


def test_what_a_job_sends_is_shown_as_text(serve: Callable[..., Served], new_page: Callable[..., Watched]) -> None:
    job = SteeredJob("hostile", run=HOSTILE)
    job.step(5)
    job.feed.add_record({"global_step": 5, "timestamp": time.time(), "loss": 1.0, HOSTILE: 1.0})
    job.feed.add_event("sample", {"step": 5, "prompt": HOSTILE, "text": HOSTILE})
    job.feed.add_event("decision", {"step": 5, "flag": HOSTILE, "author": HOSTILE, "reason": HOSTILE, "details": {}})
    other = SteeredJob("other")
    other.step(5)
    watched = new_page(viewport={"width": 1280, "height": 900})
    watched.page.goto(serve(job, other).new_link())
    watched.page.get_by_role("checkbox", name="other").check()
    watched.until(f"{CHART}?.lines.length === 2")
    watched.page.locator("#more summary").click()
    watched.page.locator("[data-chart=loss] .plot").hover()
    watched.page.locator("[data-chart=loss] .tip").wait_for()
    for place in (".card h2", "#runs-list .run-name", "#samples pre", "#events p", "#more h3"):
        assert HOSTILE in watched.page.locator(place).first.text_content(), place
    assert watched.page.locator("[onerror], #events b, .card b b").count() == 0
    assert "stolen" not in watched.page.title()
    assert not [url for url in watched.urls if url.endswith("/x")]


def test_events_say_what_changed_and_why(opened: Watched, job: SteeredJob) -> None:
    details = {"key": "lr_factor", "old": 1.0, "new": 0.5}
    job.feed.add_event(
        "decision", {"step": 30, "flag": "set", "author": "me", "reason": "too fast", "details": details}
    )
    row = opened.page.locator("#events li", has_text="too fast")
    row.wait_for()
    text = re.sub(r"\s+", " ", row.text_content())
    assert "step 30" in text
    assert "lr_factor 1 → 0.5: too fast" in text
    assert "by me" in text


def test_light_and_dark_follow_the_system_and_the_choice_is_remembered(opened: Watched) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    opened.page.emulate_media(color_scheme="dark")
    dark = opened.page.evaluate(ground)
    opened.page.emulate_media(color_scheme="light")
    assert opened.page.evaluate(ground) != dark
    opened.page.get_by_label("Theme").select_option("Dark")
    assert opened.page.evaluate(ground) == dark
    opened.page.reload()
    assert opened.page.evaluate(ground) == dark


def test_text_has_enough_contrast(opened: Watched, job: SteeredJob) -> None:
    job.feed.update(status="paused", paused_by="me")
    job.feed.add_event("save", {"step": 3, "path": "checkpoint-3"})
    opened.page.locator(".card .chip.is-paused").wait_for()
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        found = opened.page.evaluate(CONTRASTS)
        assert len(found) > 40
        assert [one for one in found if one[0] < 4.5] == []


CONTRASTS = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility({ opacityProperty: true }) || node.closest(":disabled, .plot, svg")) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(ground(node))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


def test_a_phone_shows_everything_without_scrolling_sideways(
    job: SteeredJob, serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    watched = new_page(viewport={"width": 360, "height": 740}, has_touch=True)
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points >= 30")
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360
    right = "(one) => one.getBoundingClientRect().right"
    edges = watched.page.evaluate(f"[...document.querySelectorAll('button, select, h2, h3')].map({right})")
    assert max(edges) <= 360


def test_a_lost_connection_is_told_and_comes_back_by_itself(
    job: SteeredJob, serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    watched = new_page()
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points >= 30")
    watched.page.context.set_offline(True)
    watched.page.get_by_text("The connection to the server is lost").wait_for()
    job.step(5)
    watched.page.context.set_offline(False)
    watched.until("document.querySelector('[data-chart=loss]').dataset.points >= 35")
    watched.page.locator("#banner").wait_for(state="hidden")
    watched.complaints[:] = [one for one in watched.complaints if "net::ERR_" not in one]


def test_a_click_on_a_spike_and_an_anomaly_give_the_command_that_shows_the_step(
    serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    job = SteeredJob()
    for step in range(1, 5_001):
        job.feed.history.add(step, 1e9 + step, {"loss": 5.0 if step == 2_345 else 1.0})
    job.feed.add_event("decision", {"step": 2_346, "flag": "skip", "details": {"bad_step": 2_345}})
    job.feed.update(global_step=5_000, rewind="onstep rewind '/runs/a b' {step} --script train.py")
    watched = new_page(viewport={"width": 1280, "height": 900})
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points > 0")
    box = watched.page.locator("[data-chart=loss] .plot").bounding_box()
    place = watched.page.evaluate(f"{CHART}.x(2345) / {CHART}.svg.viewBox.baseVal.width")
    watched.page.mouse.click(box["x"] + box["width"] * place, box["y"] + 20)
    assert (
        watched.page.locator("[data-chart=loss] .tip code").inner_text()
        == "onstep rewind '/runs/a b' 2345 --script train.py"
    )
    watched.until(
        "document.querySelector('#events code')?.textContent === \"onstep rewind '/runs/a b' 2345 --script train.py\""
    )
