"""The breakdown of the wall time, on a clock that only the parts of a run move, and the rates."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import Callback, CallbackManager, pretrain
from onstep.callbacks.throughput_monitor import ThroughputMonitor
from onstep.config import ConfigContainer
from onstep.data import EvalLoader, TrainLoader
from onstep.errors import ConfigError
from onstep.optim import TrainingOptimizer
from onstep.record import without_wall_clock
from onstep.training import GlobalState, train
from onstep.training.runs.exit_watch import ExitWatch

ROW, FORWARD, UPDATE, EVALUATION, CALLBACK, SAVE = 1, 10, 100, 1_000, 10_000, 100_000
"""Seconds that one of each takes; the digits of a sum tell what it is made of."""
AGREEMENT = 1_000_000
LABELS = 8


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, clock: Clock, size: int, seconds: int) -> None:
        self.clock, self.size, self.seconds = clock, size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.clock.now += self.seconds
        return {"tokens": torch.arange(LABELS) + index % 3, "labels": torch.arange(LABELS)}


class SlowSGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.now += UPDATE
        return super().step(closure)


class SlowCallback(Callback):
    """Takes time at every step, and more of it where its state is saved."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, context: Any) -> None:
        self.clock.now += CALLBACK

    def state_dict(self) -> dict[str, Any]:
        self.clock.now += SAVE
        return {}

    def load_state_dict(self, state_dict: Any) -> None: ...


@dataclass
class SlowAgreement(ExitWatch):
    """An agreement after every step, log, evaluation and save takes time."""

    clock: Clock = field(default_factory=Clock)
    deadline: float | None = math.inf
    """Somebody has to ask for the votes of a single process."""

    def votes(self, is_main: bool) -> list[int]:
        self.clock.now += AGREEMENT
        return super().votes(is_main)


class Recorder(Callback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, context: Any) -> None:
        self.logs.append(dict(context.logs))


class Run:
    """Trains a small model with all parts on one clock."""

    def __init__(self, directory: Path | None = None, *, steps: int = 4, log: int = 2, save: int | None = None) -> None:
        self.clock, self.recorder = Clock(), Recorder()
        self.monitor = ThroughputMonitor()
        self.monitor.clock = self.clock
        config = ConfigContainer()
        config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 2, 4, steps
        config.logger.log_interval, config.validation.eval_iters = log, None
        config.checkpoint.save, config.checkpoint.save_interval = None if directory is None else str(directory), save
        self.config = config
        self.extra: list[Any] = []
        self.exits = ExitWatch()

    def step(self, data_iterator: Any, model: nn.Module) -> Any:
        batch = next(data_iterator)
        self.clock.now += FORWARD if model.training else EVALUATION
        loss = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
        return loss * batch["labels"].numel(), lambda sum_: (sum_, batch["labels"].numel(), {})

    def go(self) -> GlobalState:
        state = GlobalState(self.config, num_microbatches=2, exits=self.exits)
        state.flops_per_token = 50.0
        torch.manual_seed(0)
        model = nn.Embedding(16, 16)
        sgd = SlowSGD(model.parameters(), lr=0.1)
        sgd.clock = self.clock
        manager = CallbackManager()
        manager.add([SlowCallback(self.clock), self.monitor, self.recorder, *self.extra])
        rows = TrainLoader(Rows(self.clock, 40, ROW), micro_batch_size=2, global_batch_size=4)
        valid = EvalLoader(Rows(self.clock, 4, 0), micro_batch_size=2)
        train(self.step, [model], TrainingOptimizer(sgd), None, rows, valid, state, callback_manager=manager)
        return state

    def seconds(self, logs: dict[str, Any]) -> dict[str, float]:
        return {key.removeprefix("seconds_"): value for key, value in logs.items() if key.startswith("seconds_")}


STEP = {"data": 4 * ROW, "forward_backward": 2 * FORWARD, "optimizer": UPDATE, "callbacks": CALLBACK}
NO_OP = {"device_wait": 0, "save": 0, "eval": 0, "other": 0}


def test_every_second_of_an_interval_is_charged_to_what_took_it() -> None:
    run = Run()
    run.go()
    first, second, final = run.recorder.logs
    assert run.seconds(first) == run.seconds(second) == NO_OP | {key: 2 * value for key, value in STEP.items()}
    assert run.seconds(final) == NO_OP | {key: 4 * value for key, value in STEP.items()}


def test_evaluations_and_saves_have_their_own_accounts(tmp_path: Path) -> None:
    run = Run(tmp_path, save=2)
    run.config.validation.eval_interval = 4
    run.config.checkpoint.save_at_end = False
    run.go()
    first, second, final = map(run.seconds, run.recorder.logs)
    assert (first["save"], first["eval"]) == (0, 0)
    assert (second["save"], second["eval"]) == (SAVE, 0)
    assert (final["save"], final["eval"]) == (2 * SAVE, 2 * EVALUATION)
    assert final["other"] == 0


def test_what_the_host_waits_for_before_a_log_is_waiting_for_the_device_and_after_a_save_is_not_saving(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, save=2)
    run.exits = SlowAgreement(clock=run.clock)
    run.go()
    second = run.seconds(run.recorder.logs[1])
    assert (second["device_wait"], second["save"]) == (AGREEMENT, SAVE)
    assert second["other"] == 3 * AGREEMENT  # after the first log, after its save, and at the step between
    assert run.recorder.logs[1]["goodput"] * sum(second.values()) == pytest.approx(
        2 * (2 * FORWARD + UPDATE) + AGREEMENT
    )


def test_an_asynchronous_save_is_charged_until_the_loop_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, save=2)
    run.config.checkpoint.async_save = True
    run.go()
    assert run.seconds(run.recorder.logs[1]) == {
        **NO_OP,
        **{key: 2 * value for key, value in STEP.items()},
        "save": SAVE,
    }


def test_the_accounts_sum_to_the_wall_time_also_on_a_real_clock(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=6, save=3)
    run.config.validation.eval_interval = 2
    looks: list[float] = []

    def look() -> float:
        looks.append(time.perf_counter())
        return looks[-1]

    run.monitor.clock = look
    run.go()
    total = sum(run.monitor.totals.values())
    assert min(abs(total - (look - looks[0])) for look in looks) < 1e-9
    assert total > 0.99 * (looks[-3] - looks[0])
    assert all(value > -1e-9 for value in run.monitor.totals.values())


def test_rates_leave_evaluations_and_saves_out(tmp_path: Path) -> None:
    run = Run(tmp_path, save=2)
    run.config.validation.eval_interval = 2
    run.monitor.peak_flops_per_device = 0.25
    run.go()
    seconds = 2 * sum(STEP.values())
    second = run.recorder.logs[1]
    assert sum(run.seconds(second).values()) == seconds + SAVE + 2 * EVALUATION
    assert second["samples_per_second"] == 8 / seconds
    assert second["tokens_per_second_per_device"] == 8 * LABELS / seconds
    assert second["mfu"] == pytest.approx(8 * LABELS * 50 / seconds / 0.25)
    assert second["goodput"] == 2 * (2 * FORWARD + UPDATE) / (seconds + SAVE + 2 * EVALUATION)


def test_the_final_metrics_have_the_rates_of_the_whole_training() -> None:
    run = Run(steps=5, log=2)
    run.monitor.peak_flops_per_device = 0.25
    run.go()
    final, seconds = run.recorder.logs[-1], 5 * sum(STEP.values())
    assert "train_runtime" in final
    assert final["tokens_per_second_per_device"] == 20 * LABELS / seconds
    assert final["mfu"] == pytest.approx(20 * LABELS * 50 / seconds / 0.25)
    assert final["goodput"] == 5 * (2 * FORWARD + UPDATE) / seconds


def test_a_resumed_run_counts_its_own_tokens_only(tmp_path: Path) -> None:
    first = Run(tmp_path, steps=8, log=4)
    first.config.train.exit_interval = 3
    first.go()
    second = Run(tmp_path, steps=8, log=4)
    second.go()
    assert second.recorder.logs[0]["total_tokens"] == 4 * 4 * LABELS
    one = sum(STEP.values())
    rates = [logs["tokens_per_second_per_device"] for logs in second.recorder.logs]
    assert rates == [pytest.approx(4 * LABELS / one)] * 3
    assert [logs["samples_per_second"] for logs in second.recorder.logs[:-1]] == [pytest.approx(4 / one)] * 2


def test_a_step_that_is_skipped_and_steps_that_are_undone_do_not_count(tmp_path: Path) -> None:
    class Trouble(Callback):
        def on_pre_optimizer_step(self, context: Any) -> None:
            if context.state.train_state.step == 0:
                context.control.skip("bad")

        def on_step_end(self, context: Any) -> None:
            if context.state.train_state.step == 4 and context.user_state.setdefault("first", True):
                context.user_state["first"] = False
                context.control.rollback("worse")

    run = Run(tmp_path, steps=6, log=6, save=2)
    run.config.checkpoint.save_at_end = False
    run.extra = [Trouble()]
    state = run.go()
    assert state.train_state.num_rollbacks == 1
    step = 2 * FORWARD + UPDATE
    final = run.recorder.logs[-1]
    steps_that_ran = run.seconds(final)["forward_backward"] // (2 * FORWARD)
    assert steps_that_ran == 8  # 1 to 4, then 3 to 6
    assert final["goodput"] * sum(run.seconds(final).values()) == pytest.approx(5 * step)


def test_mfu_is_absent_where_the_peak_is_unknown_and_defined_where_it_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    with caplog.at_level(logging.INFO):
        run.go()
    assert "mfu" not in run.recorder.logs[0]
    assert "the peak of 'cpu' is unknown" in caplog.text
    caplog.clear()
    run = Run()
    run.monitor.peak_flops_per_device = 1e12
    with caplog.at_level(logging.INFO):
        run.go()
    calls = [message for message in caplog.messages if message.startswith("mfu:")]
    assert len(calls) == 1
    assert "1e+12 FLOP/s (peak_flops_per_device)" in calls[0]
    assert "without padding; 50 FLOPs per token" in calls[0]


def test_the_end_of_the_run_says_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.INFO):
        run.go()
    report = next(message for message in caplog.messages if message.startswith("where the time went"))
    assert f"{4 * sum(STEP.values()):.1f} s, of which {4 * (2 * FORWARD + UPDATE):.1f} s in productive steps" in report
    assert f"SlowCallback             {4 * CALLBACK:10.3f} s" in report


def test_what_it_adds_is_known_to_differ_in_a_resumed_run() -> None:
    run = Run()
    run.monitor.peak_flops_per_device = 1e12
    run.go()
    for logs in run.recorder.logs:
        plain = {"epoch", "loss", "tokens", "total_tokens", "total_flos", "learning_rate", "grad_norm", "max_grad_norm"}
        plain |= {
            "train_samples",
            "step",
            "effective_batch_size",
            "total_flops",
            "train_loss",
            "first_loss",
            "last_loss",
        }
        assert set(without_wall_clock(logs)) <= plain


def test_an_evaluation_outside_of_training_is_not_measured(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.skip_train = True
    monitor = ThroughputMonitor()
    pretrain(tiny_config, callbacks=[monitor])
    assert monitor.totals == {}


def test_without_the_breakdown_only_rates_are_added() -> None:
    run = Run()
    run.monitor.breakdown = False
    run.go()
    assert run.seconds(run.recorder.logs[0]) == {}
    assert "goodput" in run.recorder.logs[0]


def test_it_measures_a_second_run_anew_and_leaves_no_clock_running() -> None:
    first, second = Run(), Run()
    first.go()
    second.monitor, first.monitor.clock = first.monitor, second.clock
    seen: list[bool] = []

    class Look(Callback):
        def on_run_end(self, context: Any) -> None:
            seen.append(context.callback_timer.is_running)

    second.extra = [Look()]
    second.go()
    assert second.recorder.logs[:2] == first.recorder.logs[:2]
    assert second.seconds(second.recorder.logs[-1]) == first.seconds(first.recorder.logs[-1])
    assert seen == [False]
    second.monitor.on_run_end(None)  # type: ignore[arg-type]  # closed twice


def test_a_run_that_fails_stops_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    class Fail(Callback):
        def on_step_end(self, context: Any) -> None:
            raise KeyError("no")

    run = Run()
    run.extra = [Fail()]
    with caplog.at_level(logging.INFO), pytest.raises(KeyError):
        run.go()
    assert "where the time went" in caplog.text
    assert run.monitor._callback_timer is None


@pytest.mark.parametrize("peak", [-1, 0, float("nan"), "a", True])
def test_a_peak_that_is_no_positive_number_is_refused(peak: Any) -> None:
    with pytest.raises(ConfigError, match=f"peak_flops_per_device must be a number > 0, got {peak!r}"):
        ThroughputMonitor(peak)


def test_pretrain_with_it_has_the_same_losses_and_evaluates_on_its_account(tiny_config: ConfigContainer) -> None:
    plain, watched = Recorder(), Recorder()
    pretrain(tiny_config, callbacks=[plain])
    monitor = ThroughputMonitor()
    pretrain(tiny_config, callbacks=[monitor, watched])
    assert [logs.get("loss") for logs in watched.logs] == [logs.get("loss") for logs in plain.logs]
    assert monitor.totals["eval"] > watched.logs[-1]["seconds_eval"] > 0
