"""The report: one small file, nothing from a network, no script but its own, all of the numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.analysis import TrainingLog, write_report
from onstep.analysis.plots.smoothing import outlier_limits
from onstep.analysis.reports.charts_data import MOST_NUMBERS, group_of, report_data
from onstep.errors import ConfigError, DataError
from tests.support.made_logs import log_of, points, run

EVIL = '</script><script>document.title="hacked"</script><img src=x onerror="document.title=\'hacked\'">'


class Page(HTMLParser):
    """The elements of a page, the text of each kind, and what stood in its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, [])
        if tag in ("script", "style", "td", "th", "title", "h1", "h2", "li", "pre", "figcaption"):
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open and self.texts.get(self._open[-1]):
            self.texts[self._open[-1]][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.texts["script"][0])


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(write_report([run("a"), run("b", offset=1.0)], tmp_path / "deep" / "report.html"))


def metrics(data: Any) -> dict[str, Any]:
    return {metric["key"]: metric for group in data["groups"] for metric in group["metrics"]}


def test_the_page_has_the_numbers_of_every_metric_and_run(page: Page) -> None:
    found = metrics(page.data)
    assert list(found) == ["loss", "eval_loss", "learning_rate", "grad_norm", "total_tokens", "total_flos"]
    assert [one["label"] for one in page.data["runs"]] == ["a", "b"]
    series = found["eval_loss"]["series"][1]
    run_b = page.data["runs"][1]
    assert run_b["steps"][series["at"]][:2] == [50, 100]
    assert series["y"][0] == pytest.approx(3.2 + 3 / 5)
    steps, tokens = run_b["axes"]["tokens"]
    assert tokens[steps.index(50)] == 5000
    assert [values[:2] for values in run_b["axes"]["time"]] == [[10, 20], [0, 0.5]]
    assert page.data["axes"] == ["step", "epoch", "time", "tokens", "flops"]


def test_the_tables_stand_in_the_page_without_any_script(page: Page) -> None:
    assert page.texts["th"][:3] == ["", "a", "b"]
    assert "best validation loss" in page.texts["td"]


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "base", "object", "embed"), tag
        assert not {"src", "href", "action"} & set(attributes), (tag, attributes)


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else(page: Page) -> None:
    policy = next(attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")) or ""
    scripts = page.texts["script"][1:]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 1
    assert "default-src 'none'" in policy
    assert re.search(r"script-src ([^;]*)", policy)[1].split() == [f"'sha256-{one}'" for one in hashes]  # type: ignore[index]


def test_text_of_logs_stays_text(tmp_path: Path) -> None:
    log = run(EVIL)
    records = [dict(record, **{f"<b>{EVIL}": float(index)}) for index, record in enumerate(log.records)]
    log = log_of(records, EVIL, path=f"{EVIL}.json")
    log.notes.append(EVIL)
    path = write_report([log, run("b")], tmp_path / "report.html", title=EVIL)
    page = Page(path)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert (page.texts["title"], page.texts["h1"]) == ([EVIL], [EVIL])
    assert page.data["runs"][0]["label"] == EVIL
    assert any(EVIL in item for item in page.texts["li"])
    outside = re.sub(r"<script>.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "<img" not in outside


def test_a_long_log_is_thinned_with_its_spikes_and_its_means() -> None:
    values = np.random.default_rng(0).normal(2, 0.1, 20_000)
    values[14_321], values[200] = 40.0, math.nan
    data = report_data([log_of(points("loss", values.tolist()))], ["a"])
    [series] = metrics(data)["loss"]["series"]
    steps = data["runs"][0]["steps"][series["at"]]
    assert series["points"] == 20_000
    assert len(steps) == len(series["low"]) == len(series["y"]) == len(series["high"]) <= 402
    assert max(series["high"]) == 40.0
    assert min(series["low"]) == pytest.approx(np.nanmin(values), rel=1e-5)
    assert (steps[0], steps[-1]) == (1, 20_000)
    assert series["y"][0] == pytest.approx(values[0], rel=1e-5)
    assert series["gaps"] == [201]
    assert np.mean(series["y"][1:200]) == pytest.approx(np.nanmean(values[1:9_950]), abs=1e-3)


def test_runs_that_log_at_the_same_steps_share_them() -> None:
    data = report_data([run(), run()], ["a", "b"])
    assert [len(one["steps"]) for one in data["runs"]] == [2, 2]  # of training records and of evaluations


def test_ten_long_runs_are_a_page_below_a_megabyte(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys = ["loss", "grad_norm", "learning_rate", *(f"metric-{index}" for index in range(17))]
    logs = []
    for name in "abcdefghij":
        noise = rng.normal(2, 0.1, (2_000, len(keys))).tolist()
        records = [
            {
                "global_step": 3 * step,
                "timestamp": 1e9 + 1.7 * step,
                "total_tokens": 6144 * step,
                **dict(zip(keys, row, strict=True)),
            }
            for step, row in enumerate(noise)
        ]
        logs.append(log_of(records, name, path=str(tmp_path / name / "trainer_logs.json")))
    path = write_report(logs, tmp_path / "report.html")
    assert path.stat().st_size < 1_000_000
    drawn = [series for metric in metrics(Page(path).data).values() for series in metric["series"]]
    assert len(drawn) == 10 * (len(keys) + 1)
    assert min(len(series["y"]) for series in drawn) > 100
    assert sum(3 * len(series["y"]) for series in drawn) < 1.05 * MOST_NUMBERS


def test_two_small_runs_are_a_small_page(tmp_path: Path) -> None:
    assert write_report([run("a"), run("b")], tmp_path / "report.html").stat().st_size < 60_000


def test_metrics_are_grouped_by_what_they_are_about() -> None:
    expected = {
        "Loss": ("loss", "eval_loss", "train_loss", "eval_wiki_loss", "eval_perplexity"),
        "Evaluation": ("eval_accuracy", "test_f1"),
        "Optimizer": (
            "learning_rate",
            "grad_norm",
            "max_grad_norm",
            "weight_norm",
            "learning_rate/group_1",
            "loss_scale",
        ),
        "Memory": ("peak_mem", "peak_mem_allocated"),
        "Speed": (
            "tok_per_sec",
            "train_samples_per_second",
            "eval_runtime",
            "mfu",
            "goodput/data",
            "throughput/device",
        ),
        "Progress": ("tokens", "total_tokens", "total_flos"),
        "Other": ("my_metric", "a/b"),
    }
    assert {name: tuple(group_of(metric) for metric in names) for name, names in expected.items()} == {
        name: (name,) * len(names) for name, names in expected.items()
    }


def test_values_logged_once_and_lists_have_no_chart() -> None:
    records = [*points("loss", [2.0, 1.0], peak=[1, 2]), {"global_step": 2, "train_runtime": 9.0}]
    assert list(metrics(report_data([log_of(records)], ["a"]))) == ["loss"]


def test_one_run_shows_its_whole_configuration(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("w") as file:
        json.dump({"config": {"optimizer": {"lr": 0.25}}}, file)
    log = TrainingLog(tmp_path / "trainer_logs.json", points("loss", [2.0, 1.0]))
    cells = Page(write_report(log, tmp_path / "report.html")).texts["td"]
    assert cells[cells.index("optimizer.lr") + 1] == "0.25"


def test_differences_of_the_configurations_are_shown(tmp_path: Path) -> None:
    logs = []
    for name, rate in (("a", 0.25), ("b", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"config": {"optimizer": {"lr": rate}, "seed": 1}}))
        logs.append(TrainingLog(tmp_path / name / "trainer_logs.json", points("loss", [2.0, 1.0])))
    cells = Page(write_report(logs, tmp_path / "report.html")).texts["td"]
    assert cells[cells.index("optimizer.lr") :] == ["optimizer.lr", "0.25", "0.5"]


def test_what_cannot_be_reported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metric with two values"):
        write_report([log_of([{"global_step": 1, "loss": 1.0}])], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="no log"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_limits_are_those_of_all_values_of_a_long_log() -> None:
    values = 2 + 0.1 * np.random.default_rng(0).normal(size=20_000)
    values[300], values[400] = 80.0, math.inf
    data = report_data([log_of(points("loss", values.tolist()))], ["a"])
    [series] = metrics(data)["loss"]["series"]
    finite = np.delete(values, [300, 400])
    assert series["bulk"] == pytest.approx(outlier_limits([values]), rel=1e-5)
    assert series["bulk"][0] < finite.min()
    assert series["range"] == pytest.approx([finite.min(), 80.0], rel=1e-5)
    assert series["missing"] == 1
    assert max(series["y"]) > 3 > max(series["calm"])


def test_spikes_of_a_short_log_are_reported_by_their_places() -> None:
    values = [2 + 0.01 * (index % 5) for index in range(200)]
    plain = report_data([log_of(points("loss", values))], ["a"])
    values[77] = 80.0
    spiky = report_data([log_of(points("loss", values))], ["a"])
    assert [metrics(data)["loss"]["series"][0].get("spikes") for data in (plain, spiky)] == [None, [77]]


def test_limits_that_no_number_can_be_are_left_out() -> None:
    data = report_data([log_of(points("loss", [-1.7e308, 1.7e308, 0.0]))], ["a"])
    [series] = metrics(data)["loss"]["series"]
    assert (series["missing"], series["range"]) == (2, [0, 0])
    json.dumps(data, allow_nan=False)
