"""After a rollback the record, the table, TensorBoard, a service and the live page show one curve, whoever asked."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from onstep import Callback, JsonLogger, pretrain
from onstep.callbacks import ResumableSummaryWriter, TBLogger, TrackersCallback, TrainerControlCallback
from onstep.config import ConfigContainer
from onstep.control.registry import read_info, read_token
from onstep.record import read_records
from tests.support.hostile_trackers import Remembering
from tests.support.resuming import Interrupted
from tests.support.tracker_files import age, metrics_log_values, scalars, table
from tests.support.waiting import PATIENCE

JOB = "rolled-back"
Points = list[tuple[int, float]]


class Service(Remembering):
    """Has what it is sent at once, and cannot take it back."""

    name = "service"
    settling_seconds = 0.0

    def points(self, name: str) -> Points:
        logged = [call for call in self.calls if call[0] == "log"]
        return [(step, metrics[name]) for _, metrics, step, _ in logged if name in metrics]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="onstep-") as directory:  # a short path, for Unix sockets
        monkeypatch.setenv("ONSTEP_REGISTRY", f"{directory}/registry")
        yield


def client() -> httpx.Client:
    info = read_info(JOB)
    assert info is not None
    headers = {"Authorization": f"Bearer {read_token(JOB)}"}
    return httpx.Client(base_url=info.endpoint_url, headers=headers, timeout=PATIENCE, trust_env=False)


def by_command(context: Any) -> None:
    context.control.rollback("as a test", to_step=4)


def by_anomaly(context: Any) -> None:
    with torch.no_grad():
        next(iter(context.model[0].parameters())).fill_(math.nan)


def by_client(context: Any) -> None:
    with client() as page:
        answer = page.post(f"/jobs/{JOB}/control", json={"command": "rollback", "data": {"step": 4}})
    assert answer.is_success, answer.text


class RollsBack(Callback):
    """Asks for a rollback in step 7, once, and looks at the page at the end."""

    def __init__(self, ask: Callable[[Any], None]) -> None:
        self._asks = [ask]
        self.page: Mapping[str, Any] = {}

    def on_step_end(self, context: Any) -> None:
        if context.step == 7 and self._asks:
            self._asks.pop()(context)

    def on_train_end(self, context: Any) -> None:
        with client() as page:
            self.page = page.get(f"/jobs/{JOB}/metrics", params={"names": "loss,eval_loss"}).json()["series"]


@pytest.mark.parametrize("ask", [by_command, by_anomaly, by_client])
def test_a_rollback_leaves_one_curve_everywhere(
    ask: Callable[[Any], None], tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    config = tiny_config
    config.run.name, config.run.output_dir, config.run.save_weights = "run", str(tmp_path), False
    config.train.train_iters, config.logger.log_interval = 11, 1
    config.validation.eval_interval, config.checkpoint.save_interval = 2, 4
    config.train.on_nonfinite = "rollback"
    service, rolls_back, names = Service(), RollsBack(ask), {"csv": ["hf"], "service": ["hf"]}
    trackers = TrackersCallback(["csv", "tensorboard", service], names={**names, "tensorboard": ["hf", "bridge"]})
    pretrain(config, callbacks=[JsonLogger(), trackers, TrainerControlCallback(JOB, port=0), rolls_back])
    run = tmp_path / "run"
    abandoned = dict(metrics_log_values(run / "record.branch-1.jsonl", "loss"))
    assert [line["flag"] for line in read_records(run / "record.jsonl") if line["kind"] == "decision"][-1:] == [
        "rolled_back"
    ]
    curves = {name: dict(metrics_log_values(run / "record.jsonl", name)) for name in ("loss", "eval_loss")}
    assert list(curves["loss"]) == list(range(1, 12))
    assert list(curves["eval_loss"]) == [2, 4, 6, 8, 10, 11]
    check_metrics_log(run, curves)
    check_files(run, curves)
    for name, tag in (("loss", "train/loss"), ("eval_loss", "eval/loss")):
        points = service.points(tag)
        assert [step for step, _ in points] == list(curves[name]), "each step once"
        assert {step: value for step, value in points if step not in abandoned}.items() <= curves[name].items()
        series = rolls_back.page[name]
        found = dict(zip(series["step"], series["value"], strict=True))
        assert len(found) == len(series["step"])
        assert found.items() <= curves[name].items()
        assert max(found) >= 10


class Dies(Callback):
    """Ends the run like a kill, in the test that follows its last checkpoint."""

    def on_test_start(self, context: Any) -> None:
        raise Interrupted


def test_a_run_that_is_killed_after_its_last_checkpoint_shows_its_last_evaluation_once(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    config = tiny_config
    config.run.name, config.run.output_dir, config.run.save_weights = "run", str(tmp_path), False
    config.logger.log_interval, config.validation.eval_interval, config.checkpoint.save_interval = 1, 4, 4

    def callbacks(*more: Callback) -> list[Any]:
        writer = ResumableSummaryWriter(tmp_path / "tb")
        trackers = TrackersCallback(["csv", "tensorboard"], names={"csv": ["hf"], "tensorboard": ["hf", "bridge"]})
        return [JsonLogger(), writer, TBLogger(writer), trackers, *more]

    with pytest.raises(Interrupted):
        pretrain(config, callbacks=callbacks(Dies()))
    age(tmp_path / "tb")
    pretrain(config, callbacks=callbacks())
    for directory in (tmp_path / "run" / "tensorboard", tmp_path / "tb"):
        shown = scalars(directory)
        assert {tag: len(points) for tag, points in shown.items()} == {
            tag: len(dict(points)) for tag, points in shown.items()
        }
        tag = "eval-loss" if directory.name == "tb" else "lm loss validation"
        assert [step for step, _ in shown[tag]] == [4, 8]


class DiesAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, context: Any) -> None:
        if context.step == self._step:
            raise Interrupted


def test_a_lost_tail_of_the_record_is_named_and_shown_alike(
    tiny_config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, service = tiny_config, Service()
    config.run.name, config.run.output_dir, config.run.save_weights = "run", str(tmp_path), False
    config.logger.log_interval, config.checkpoint.save_interval = 1, 4
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=[TrackersCallback(["csv", "tensorboard", service]), DiesAt(6)])
    record = tmp_path / "run" / "record.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:3]))  # the start, steps 1 and 2
    with caplog.at_level("WARNING"):
        pretrain(config, callbacks=[TrackersCallback(["csv", "tensorboard", service])])
    assert "records after step 2, up to step 4 are missing" in caplog.text
    curve = dict(metrics_log_values(record, "loss"))
    assert list(curve) == [1, 2, 5, 6, 7, 8]
    rows = table(record.with_name("metrics.csv"))
    rows = rows[(rows.kind == "train") & rows["loss"].notna()]
    assert dict(zip(rows.step, rows["loss"], strict=True)) == curve
    assert [step for step, _ in scalars(record.with_name("tensorboard"))["train/loss"]] == list(curve)
    assert [step for step, _ in service.points("train/loss")] == list(range(1, 9)), "it cannot lose what it has"


def check_metrics_log(run: Path, curves: dict[str, dict[int, float]]) -> None:
    for name, curve in curves.items():
        assert dict(metrics_log_values(run / "trainer_logs.json", name)) == curve


def check_files(run: Path, curves: dict[str, dict[int, float]]) -> None:
    """The table and TensorBoard, in which Megatron Bridge's tags are other names of the same curves."""
    rows = table(run / "metrics.csv")
    assert not rows.duplicated(["step", "kind"]).any()
    shown = scalars(run / "tensorboard")
    for tag, points in shown.items():
        assert len(dict(points)) == len(points), tag
    tags = {"loss": ("train/loss", "lm loss"), "eval_loss": ("eval/loss", "lm loss validation")}
    for (name, curve), kind in zip(curves.items(), ("train", "eval"), strict=True):
        found = rows[(rows.kind == kind) & rows[name].notna()]
        assert dict(zip(found.step, found[name], strict=True)) == curve
        for tag in tags[name]:
            assert dict(shown[tag]) == pytest.approx(curve, rel=1e-6), tag
