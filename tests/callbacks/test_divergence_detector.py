"""When a curve counts as diverging, what follows, and that healthy curves are left alone."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import onstep.callbacks.divergence_detector as module
from onstep import CallbackManager, JsonLogger, TrainerCallback, pretrain
from onstep.callbacks.divergence_detector import DivergenceDetector
from onstep.config import ConfigContainer
from onstep.errors import AnomalyError, ConfigError
from onstep.events import Control, TrainerControl
from onstep.record import read_records


def fired_at(detector: DivergenceDetector, curve: list[float], control: Any = None) -> list[int]:
    """Positions in the curve at which the detector asks for the end."""
    found = []
    for position, value in enumerate(curve):
        control = TrainerControl()
        detector.on_log(None, None, control, logs={"loss": value})
        if control.should_training_stop:
            found.append(position)
    return found


def recorded(length: int = 100, final: float = 3.8) -> list[float]:
    """A loss that falls from 10 and has come to rest at `final`."""
    return [final + (10 - final) * math.exp(-step / 8) if step < length - 30 else final for step in range(length)]


def observe(detector: DivergenceDetector, values: list[float], step: int = 0, control: Any = None) -> Any:
    control = control or Control()
    for number, value in enumerate(values, start=1):
        state = SimpleNamespace(global_step=step + number, is_world_process_zero=True)
        detector.on_log(None, state, control, logs={"loss": value})
    return control


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(DivergenceDetector).parameters.values()
    positional = {one.name: one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == [
        ("smoothing", 0.3),
        ("threshold", 1.0),
        ("relative_threshold", None),
        ("patience", 3),
        ("warmup", 10),
        ("action", "stop"),
        ("use_eval_loss", False),
        ("metric_key", None),
    ]
    assert {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY} == {
        "mode": "min",
        "cooldown": 0,
    }
    assert module.DualTimeScaleDivergenceDetector is module.DualWindowDivergenceDetector is DivergenceDetector


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smoothing": 0.0}, r"smoothing must be in \(0, 1\], got 0.0"),
        ({"smoothing": 1.1}, "smoothing must be"),
        ({"smoothing": "a"}, r"smoothing must be in \(0, 1\], got 'a'"),
        ({"threshold": 0.0}, "threshold must be a number > 0, got 0.0"),
        ({"threshold": "1"}, "threshold must be a number > 0, got '1'"),
        ({"relative_threshold": 1.0}, "relative_threshold must be a number > 1, got 1.0"),
        ({"metric_key": 3}, "metric_key must be the name of a metric, got 3"),
        ({"metric_key": ""}, "metric_key must be the name of a metric, got ''"),
        ({"threshold": None}, "both None"),
        ({"patience": 0}, "patience must be an integer >= 1, got 0"),
        ({"warmup": -1}, "warmup must be an integer >= 0, got -1"),
        ({"cooldown": -1}, "cooldown must be"),
        ({"action": "explode"}, "action must be stop | abort | rollback, got 'explode'"),
        ({"mode": "both"}, "mode must be min | max"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        DivergenceDetector(**arguments)


def test_the_documented_divergence_fires_on_the_third_spiked_entry_and_on_every_further_one() -> None:
    curve = recorded() + [9.7] * 5
    assert fired_at(DivergenceDetector(), curve) == [102, 103, 104]


def test_the_smoothed_excess_is_the_documented_one() -> None:
    detector = DivergenceDetector(patience=100)
    fired_at(detector, [3.8] * 40)
    excess = []
    for _ in range(3):
        detector.on_log(None, None, TrainerControl(), logs={"loss": 9.7})
        state = detector.state_dict()
        excess.append(round(state["smoothed_loss"] - state["best_smoothed_loss"], 2))
    assert excess == [1.77, 3.01, 3.88]


def plain(noise: random.Random, step: int, length: int) -> float:
    return 3.0 + 7.5 * math.exp(-step / (0.06 * length))


def power_law(noise: random.Random, step: int, length: int) -> float:
    return 2.4 + 8.0 * (step + 1) ** -0.35


def plateau_then_fall(noise: random.Random, step: int, length: int) -> float:
    """An induction bump: long at one level, then a second fall."""
    return 2.8 + 3.0 * math.exp(-step / 10) + 1.6 / (1 + math.exp((step - length / 2) / 12)) + 1.5 * math.exp(-step / 4)


def warm_restarts(noise: random.Random, step: int, length: int) -> float:
    """Cosine cycles: the loss rises by up to 0.5 after each restart of the rate and falls again."""
    cycle = length // 4
    since = step % cycle
    bump = 0.5 * math.exp(-since / 12) if step >= cycle else 0.0
    return 2.9 + 6.5 * math.exp(-step / 25) + bump


def spiky(noise: random.Random, step: int, length: int) -> float:
    """Single outliers, such as a batch of source code in prose."""
    return 3.1 + 7.0 * math.exp(-step / 30) + (2.0 if noise.random() < 0.01 else 0.0)


KINDS: tuple[Callable[[random.Random, int, int], float], ...] = (
    plain,
    power_law,
    plateau_then_fall,
    warm_restarts,
    spiky,
)


def healthy_curves() -> Iterator[list[float]]:
    """20 noisy curves of 400 entries, four of each kind; the noise shrinks as the loss does."""
    for seed in range(4):
        for kind in KINDS:
            noise = random.Random(f"{kind.__name__}-{seed}")
            level = 0.05 + 0.05 * seed
            curve = [kind(noise, step, 400) for step in range(400)]
            yield [value + noise.gauss(0, level) * (value / 4) for value in curve]


def test_twenty_healthy_noisy_curves_are_left_alone() -> None:
    curves = list(healthy_curves())
    assert len(curves) == 20
    assert [fired_at(DivergenceDetector(), curve) for curve in curves] == [[]] * 20


def test_the_same_curves_would_be_caught_by_a_careless_detector_and_when_they_diverge() -> None:
    careless = [bool(fired_at(DivergenceDetector(threshold=0.1, patience=1), curve)) for curve in healthy_curves()]
    assert sum(careless) >= 15, "the curves are noisy enough to tell a good detector from a bad one"
    for curve in healthy_curves():
        diverging = [*curve[:300], *(value + 6.0 for value in curve[300:320])]
        first = fired_at(DivergenceDetector(), diverging)[0]
        assert 300 < first <= 303


def test_warm_up_counts_nothing_but_remembers_the_best() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=5, patience=1)
    assert fired_at(detector, [2.0, 9.0, 9.0, 9.0, 9.0, 9.0]) == [5]


def test_patience_wants_them_in_a_row() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=0, patience=2)
    assert fired_at(detector, [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 3.0, 3.0]) == [6, 7]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_acted_on_at_once_and_leaves_the_curve_alone(value: float) -> None:
    detector = DivergenceDetector()
    fired_at(detector, [3.0, 2.0])
    before = detector.state_dict()
    assert fired_at(detector, [value]) == [0]
    assert detector.state_dict() == before


def test_relative_threshold_alone_and_for_a_metric_that_is_not_positive() -> None:
    arguments: dict[str, Any] = {"smoothing": 1.0, "threshold": None, "relative_threshold": 1.5, "warmup": 0}
    assert fired_at(DivergenceDetector(**arguments, patience=1), [2.0, 2.9, 3.0]) == [2]
    assert fired_at(DivergenceDetector(**arguments, patience=1), [-2.0, 5.0]) == []


def test_mode_max_is_mirrored() -> None:
    falling = [0.5, 0.9, 0.88, 0.7, 0.6]
    arguments: dict[str, Any] = {"smoothing": 1.0, "warmup": 0, "patience": 1, "mode": "max"}
    assert fired_at(DivergenceDetector(threshold=0.25, **arguments), falling) == [4]
    assert fired_at(DivergenceDetector(threshold=None, relative_threshold=1.25, **arguments), falling) == [3, 4]
    assert fired_at(DivergenceDetector(threshold=0.25, **arguments), sorted(falling)) == []


def test_abort_sets_both_flags() -> None:
    control = TrainerControl()
    DivergenceDetector(action="abort").on_log(None, None, control, logs={"loss": math.nan})
    assert control.should_training_stop
    assert control.should_abort_without_save


def test_the_reason_goes_with_the_request() -> None:
    control = observe(DivergenceDetector(smoothing=1.0, warmup=0, patience=1), [1.0, 5.0])
    (request,) = control.pop_requests()
    assert request.flag == "should_training_stop"
    assert request.reason == "smoothed loss 5 is too far above its best, 1, for 1 observations in a row"


def test_which_metric_is_watched_and_what_is_ignored() -> None:
    for arguments, key in (({}, "loss"), ({"use_eval_loss": True}, "eval_loss"), ({"metric_key": "x"}, "x")):
        detector = DivergenceDetector(**arguments)
        detector.on_log(None, None, TrainerControl(), logs=None)
        detector.on_log(None, None, TrainerControl(), logs={"loss": 1.0} if key != "loss" else {"eval_loss": 1.0})
        assert detector.state_dict()["observation_count"] == 0
        detector.on_evaluate(None, None, TrainerControl(), metrics={key: 1.0})
        assert detector.state_dict()["observation_count"] == 1


@pytest.mark.parametrize(
    ("metric", "length", "nearest"), [("losss", 8, "loss"), ("eval_los", 8, "eval_loss"), ("losss", 2, "loss")]
)
def test_a_metric_that_is_never_there_is_reported_once_with_the_nearest_name(
    metric: str, length: int, nearest: str, tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = length, 0
    tiny_config.logger.log_interval = tiny_config.validation.eval_interval = 2
    pretrain(tiny_config, callbacks=[DivergenceDetector(metric_key=metric)])
    (last_logged,) = [message for message in caplog.messages if "nothing is detected" in message]
    assert f"watches {metric!r}" in last_logged
    assert f"Did you mean {nearest!r}?" in last_logged


@pytest.mark.parametrize("options", [{}, {"use_eval_loss": True}, {"metric_key": "grad_norm"}])
def test_a_metric_that_is_there_is_not_reported_as_missing(
    options: dict[str, Any], tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.logger.log_interval, tiny_config.validation.eval_interval = 1, 7
    pretrain(tiny_config, callbacks=[DivergenceDetector(**options)])
    assert "nothing is detected" not in caplog.text


def test_a_step_that_the_anomaly_gate_left_out_is_no_observation() -> None:
    control = Control()
    DivergenceDetector().on_log(None, None, control, logs={"anomaly": "non-finite loss", "loss": math.nan})
    assert not control.should_training_stop


def test_an_evaluation_that_was_logged_first_counts_once() -> None:
    detector = DivergenceDetector(use_eval_loss=True)
    state = SimpleNamespace(global_step=4, is_world_process_zero=True)
    detector.on_log(None, state, TrainerControl(), logs={"eval_loss": 2.0})
    detector.on_evaluate(None, state, TrainerControl(), metrics={"eval_loss": 2.0})
    assert detector.state_dict()["observation_count"] == 1


def test_cooldown_counts_nothing_for_a_while_and_patience_begins_anew() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=0, patience=2, cooldown=3)
    assert fired_at(detector, [1.0] + [9.0] * 12) == [2, 7, 12]


def test_only_rank_0_reports(caplog: pytest.LogCaptureFixture) -> None:
    for is_main in (True, False):
        state = SimpleNamespace(global_step=7, is_world_process_zero=is_main)
        with caplog.at_level(logging.ERROR):
            DivergenceDetector().on_log(None, state, Control(), logs={"loss": math.nan})
    assert [record.getMessage() for record in caplog.records] == ["divergence at step 7: loss is nan; action: stop"]


def test_a_new_run_begins_a_new_curve_and_one_that_continues_does_not(make_state: Any) -> None:
    detector = DivergenceDetector()
    detector.on_train_begin(None, make_state(), Control())
    observe(detector, [3.0, 2.0])
    saved = json.loads(json.dumps(detector.state_dict()))
    detector.on_train_end(None, make_state(step=2), Control())
    detector.on_train_begin(None, make_state(), Control())
    assert detector.state_dict()["observation_count"] == 0
    other = DivergenceDetector()
    other.load_state_dict(saved)
    other.on_train_begin(None, make_state(step=2), Control())
    assert other.state_dict() == saved


def test_nothing_is_acted_on_after_the_end_of_training(make_state: Any) -> None:
    detector, control = DivergenceDetector(use_eval_loss=True), Control()
    detector.on_train_begin(None, make_state(), control)
    detector.on_train_end(None, make_state(step=2), control)
    detector.on_evaluate(None, make_state(step=2), control, metrics={"eval_loss": math.nan})
    assert not control.should_training_stop


def test_state_has_the_documented_keys_and_continues_exactly() -> None:
    curve = recorded() + [9.7] * 3
    detector = DivergenceDetector()
    fired_at(detector, curve[:101])
    state = detector.state_dict()
    documented = ("smoothed_loss", "best_smoothed_loss", "observation_count", "consecutive_above")
    continued = DivergenceDetector()
    continued.load_state_dict({key: state[key] for key in documented})
    assert fired_at(continued, curve[101:]) == fired_at(detector, curve[101:]) == [1]
    for key in documented:
        with pytest.raises(KeyError):
            DivergenceDetector().load_state_dict({one: state[one] for one in documented if one != key})


def test_rollback_is_refused_where_the_control_cannot_go_back(make_state: Any) -> None:
    for event in ("on_init_end", "on_train_begin"):
        with pytest.raises(ConfigError, match=r"TrainerControl does not have"):
            getattr(DivergenceDetector(action="rollback"), event)(None, make_state(), TrainerControl())
        getattr(DivergenceDetector(), event)(None, make_state(), TrainerControl())
    with pytest.raises(ConfigError, match="Onstep's Trainer"):
        fired_at(DivergenceDetector(action="rollback"), [math.nan])


def test_rollback_asks_for_a_checkpoint_from_before_the_first_bad_observation() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=0, patience=3, action="rollback")
    control = observe(detector, [1.0, 1.0, 8.0, 8.0, 8.0, 8.0])
    (request,) = control.pop_requests()
    assert (request.flag, request.details) == ("rollback", {"bad_step": 3})


def test_what_smoothing_hides_at_first_is_not_taken_for_well() -> None:
    control = observe(DivergenceDetector(action="rollback"), [3.8] * 12 + [6.0] * 4)
    (request,) = control.pop_requests()
    assert request.details == {"bad_step": 13}, "the smoothed value crosses the threshold only at step 14"


def test_a_control_of_another_make_is_asked_with_the_reason_alone() -> None:
    reasons: list[str] = []
    observe(
        DivergenceDetector(smoothing=1.0, warmup=0, patience=1, action="rollback"),
        [1.0, 5.0],
        control=SimpleNamespace(rollback=reasons.append),
    )
    assert len(reasons) == 1
    assert reasons[0].startswith("smoothed loss 5 is too far above")


def test_a_rollback_restores_the_curve_but_not_the_cooldown() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=0, patience=2, action="rollback", cooldown=2)
    observe(detector, [1.0, 1.5])
    saved = copy.deepcopy(detector.state_dict())
    assert len(observe(detector, [8.0, 8.0], step=2).pop_requests()) == 1
    detector.load_state_dict(saved)
    detector.on_checkpoint_load(None, SimpleNamespace(global_step=2), Control())
    assert detector.state_dict() == {**saved, "cooldown_left": 2}
    again = observe(detector, [8.0, 8.0, 8.0], step=4)
    assert again.pop_requests() == [], "two are in the cooldown, one is less than patience"
    (request,) = observe(detector, [8.0], step=7).pop_requests()
    assert request.details == {"bad_step": 2}, "a checkpoint from which it was never well is not taken again"


def test_a_rollback_to_a_checkpoint_without_a_state_begins_a_new_curve() -> None:
    detector = DivergenceDetector(smoothing=1.0, warmup=0, patience=1, action="rollback")
    observe(detector, [1.0, 8.0])
    detector.on_checkpoint_load(None, SimpleNamespace(global_step=1), Control())
    assert detector.state_dict()["observation_count"] == 0
    assert observe(detector, [8.0, 8.0], step=2).pop_requests() == []


class Vandal(TrainerCallback):
    """Breaks the weights after the given steps, each once."""

    def __init__(self, *steps: int) -> None:
        self.steps = list(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.global_step == self.steps[0]:
            del self.steps[0]
            for parameter in kwargs["model"].parameters():
                parameter.data.mul_(-8.0)


def diverging(config: ConfigContainer, tmp_path: Path, *, steps: int) -> ConfigContainer:
    config.run.name, config.run.output_dir = "run", str(tmp_path)
    config.train.train_iters, config.logger.log_interval = steps, 1
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 2, -1
    config.validation.eval_interval = None
    return config


@pytest.mark.parametrize("steps", [14, 9], ids=["in-the-middle", "asked-for-at-the-last-step"])
def test_a_diverging_run_goes_back_and_trains_on(tiny_config: ConfigContainer, tmp_path: Path, steps: int) -> None:
    config = diverging(tiny_config, tmp_path, steps=steps)
    detector = DivergenceDetector(smoothing=0.6, warmup=2, patience=2, action="rollback", cooldown=2)
    manager = CallbackManager()
    manager.add([Vandal(7), detector, JsonLogger()])
    pretrain(config, callbacks=manager)
    decisions = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    (done,) = [one for one in decisions if one["flag"] == "rolled_back"]
    assert done["details"]["to_step"] == 6, "checkpoint 8 and 10 hold the broken weights"
    assert done["author"] == "DivergenceDetector"
    records = read_records(tmp_path / "run" / "trainer_logs.json")
    losses = [(record["global_step"], record["loss"]) for record in records if "loss" in record]
    assert [step for step, _ in losses] == list(range(1, steps + 1)), "each step once"
    assert max(loss for _, loss in losses) < 6.5, "the broken branch is out of the metrics log"
    assert losses[-1][1] < losses[0][1]


def test_a_run_that_diverges_again_and_again_ends(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    config = diverging(tiny_config, tmp_path, steps=60)
    config.anomaly.max_rollbacks = 2
    detector = DivergenceDetector(smoothing=0.6, warmup=2, patience=2, action="rollback")
    manager = CallbackManager()
    manager.add([Vandal(7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9, 10), detector])
    with pytest.raises(AnomalyError, match=r"3 rollbacks exceed anomaly.max_rollbacks=2"):
        pretrain(config, callbacks=manager)
