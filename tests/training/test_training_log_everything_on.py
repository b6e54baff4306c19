"""A run of 20 steps with everything on that Megatron Bridge's log knows, against files and a table made by hand.

One weight of 20 is multiplied with ones: its gradient is 1 at each step, and SGD with a rate of 0.5 takes 0.5 off it.
Three idle weights have gradients of exactly 0 and a rate of their own. The clock moves only where work is done: per
micro-batch 1/8 s forward and 1/4 s backward, per step 1/4 s in the update and 1 s between the steps, 2 s in all; a row
takes 1/16 s. A meter shows 150 W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import CallbackManager
from onstep.data import TrainLoader
from onstep.optim import TrainingOptimizer
from onstep.training import Clock, EnergyMonitor, GlobalState, train
from tests.support.golden_runs import START, OneWeight, Rows, golden_lines
from tests.support.recording_loggers import record_all
from tests.support.small_runs import LENGTH, small_state

LOG = "training_log_with_everything_on.txt"
TAGS = "training_tags_with_everything_on.txt"
SECONDS = {"forward": 1 / 8, "backward": 1 / 4, "update": 1 / 4, "row": 1 / 16, "rest": 3 / 4}


class Now:
    """The clock, moved by work."""

    seconds = 0.0

    def spend(self, what: str) -> None:
        self.seconds += SECONDS[what]


class TimedRows(Rows):
    def __init__(self, now: Now) -> None:
        self.now = now

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.now.spend("row")
        return super().__getitem__(index)


class Model(OneWeight):
    """`OneWeight` with three idle weights, whose passes take their time."""

    def __init__(self, now: Now) -> None:
        super().__init__()
        self.now = now
        self.idle = nn.Parameter(torch.zeros(3))
        self.max_attention_logit = torch.tensor(3.25)

    def forward(self, x: Tensor) -> Tensor:
        self.now.spend("forward")
        loss = super().forward(x) + (0 * self.idle).sum()
        loss.register_hook(lambda gradient: self.now.spend("backward"))
        return loss


class TimedSGD(torch.optim.SGD):
    now: Now

    def step(self, closure: Any = None) -> Any:
        self.now.spend("update")
        return super().step(closure)


def forward_step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    return model(batch["x"]), lambda loss: (loss, batch["labels"].numel(), {})


def everything_on(now: Now) -> GlobalState:
    state = small_state(train_iters=20)
    options = state.cfg.logger
    options.log_interval, options.tensorboard_log_interval, options.throughput_window_size = 10, 5, 5
    options.log_throughput = options.log_throughput_to_tensorboard = options.log_params_norm = True
    options.log_runtime_to_tensorboard = options.log_world_size_to_tensorboard = True
    options.log_timers_to_tensorboard = options.log_l2_norm_grad_to_tensorboard = True
    options.log_memory_to_tensorboard, options.runtime_time_unit = True, "seconds"
    options.timing_log_level, options.log_energy = 2, True
    state.cfg.optimizer.log_num_zeros_in_grad = state.cfg.model.log_max_attention_logit = True
    state.cfg.dataset.seq_length, state.cfg.model.vocab_size = LENGTH, 128
    state.cfg.logger.console = "bridge"
    state.train_state.skipped_train_samples = 4
    state.clock = Clock(wall=lambda: START + now.seconds, elapsed=lambda: now.seconds)
    state.energy_monitor = EnergyMonitor(state.world, lambda: 150.0 * now.seconds)
    return state


def run_it(state: GlobalState, now: Now) -> None:
    model = Model(now)
    groups = [{"params": [model.weight]}, {"params": [model.idle], "lr": 0.125, "is_decoupled_lr": True}]
    inner = TimedSGD(groups, lr=0.5)
    inner.now = now
    optimizer = TrainingOptimizer(inner, clip_grad=None, log_num_zeros_in_grad=True)
    data = TrainLoader(TimedRows(now), micro_batch_size=2, global_batch_size=4)
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda: now.spend("rest"))
    train(forward_step, [model], optimizer, None, data, None, state, callback_manager=manager)


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.mark.usefixtures("utc")
def test_console_lines_are_the_golden_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, now: Now
) -> None:
    statistics = {"allocated_bytes.all.peak": 3_000_000_000, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: statistics)
    run_it(everything_on(now), now)
    assert capsys.readouterr().out.splitlines() == golden_lines(LOG)


def found_tags(monkeypatch: pytest.MonkeyPatch, now: Now, state: GlobalState) -> list[str]:
    statistics = {"allocated_bytes.all.peak": 3_000_000_000, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: statistics)
    loggers = record_all(state)
    run_it(state, now)
    return [
        f"{name} | {tag} | " + " ".join(f"{x}:{value:g}" for x, value in logger.curve(tag).items())
        for name, logger in loggers.items()
        for tag in logger.tags
    ]


def test_tags_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch, now: Now) -> None:
    assert sorted(found_tags(monkeypatch, now, everything_on(now))) == sorted(golden_lines(TAGS))


@dataclass(frozen=True)
class Tag:
    """A row of Megatron Bridge's tag matrix."""

    name: str
    trackers: str = "TWMC"
    """T TensorBoard, W W&B, M MLflow, C Comet."""
    over_samples: bool = False
    at_logged_steps: bool = False
    condition: str | None = None
    """The option without which it is not there; None for those that are always there or depend on a value."""
    mlflow: str | None = None
    """MLflow's name, where it is another."""


THROUGHPUT, TIME, TIMERS = "log_throughput_to_tensorboard", "log_runtime_to_tensorboard", "log_timers_to_tensorboard"
MATRIX = [
    *(Tag(f"throughput/{name}_per_sec", condition=THROUGHPUT) for name in ("batches", "samples", "tokens")),
    *(
        Tag(f"throughput/device/{name}_per_sec", condition=THROUGHPUT, mlflow=f"throughput/device_{name}_per_sec")
        for name in ("batches", "samples", "tokens")
    ),
    Tag("throughput/micro_batch_size", condition=THROUGHPUT),
    Tag("throughput/global_batch_size", condition=THROUGHPUT),
    Tag("memory/mem-max-allocated-gigabytes", condition="log_memory_to_tensorboard"),
    Tag("memory/mem-alloc-retires", condition="log_memory_to_tensorboard"),
    *(Tag(f"time/{name}", condition=TIME) for name in ("remaining_estimate", "tokens", "samples", "batches", "total")),
    *(
        Tag(f"l2_norm/grad/{name}", condition="log_l2_norm_grad_to_tensorboard", mlflow=f"l2_norm/grad_{name}")
        for name in ("weight", "idle", "global")
    ),
    Tag("samples vs steps", "WM"),
    Tag("learning-rate", over_samples=True),
    Tag("decoupled-learning-rate", "T"),
    Tag("skipped-train-samples"),
    Tag("batch-size", over_samples=True),
    Tag("lm loss", over_samples=True),
    Tag("loss-scale", over_samples=True, condition="log_loss_scale_to_tensorboard"),
    Tag("world-size", over_samples=True, condition="log_world_size_to_tensorboard"),
    Tag("grad-norm", over_samples=True),
    Tag("num-zeros", over_samples=True),
    Tag("params-norm", over_samples=True, condition="log_params_norm"),
    Tag("max-attention-logit", over_samples=True),
    *(
        Tag(f"{name}-time", condition=TIMERS)
        for name in ("forward-backward", "optimizer", "batch-generator", "forward-compute", "backward-compute")
    ),
    Tag(
        "throughput/tflops/device",
        at_logged_steps=True,
        condition=THROUGHPUT,
        mlflow="throughput/tflops_per_device",
    ),
    Tag("throughput/tflops", at_logged_steps=True, condition=THROUGHPUT),
    Tag("iteration-time", at_logged_steps=True, condition=TIMERS),
    Tag("iter-energy/gpu", at_logged_steps=True, condition="log_energy"),
    Tag("power/gpu", at_logged_steps=True, condition="log_energy"),
]
"""Megatron Bridge's matrix, without experts: which tag goes where, and when."""


def places(tags: list[Tag]) -> set[tuple[str, str, tuple[int, ...]]]:
    """(tracker, its name for the curve, where the points are)."""
    found = set()
    for tag in tags:
        steps = (10, 20) if tag.at_logged_steps else (5, 10, 15, 20)
        for letter, tracker in zip("TWMC", ("tensorboard", "wandb", "mlflow", "comet"), strict=True):
            if letter in tag.trackers:
                name = tag.mlflow if tracker == "mlflow" and tag.mlflow is not None else tag.name
                found.add((tracker, name, steps))
        if tag.over_samples:
            found.add(("tensorboard", f"{tag.name} vs samples", tuple(4 * step for step in steps)))
    return found


def places_of_lines(lines: list[str]) -> set[tuple[str, str, tuple[int, ...]]]:
    found = set()
    for line in lines:
        tracker, name, points = line.split(" | ")
        found.add((tracker, name, tuple(int(point.split(":")[0]) for point in points.split())))
    return found


def test_the_golden_file_has_every_tag_of_the_matrix_and_no_other() -> None:
    assert places_of_lines(golden_lines(TAGS)) == places(MATRIX)


@pytest.mark.parametrize("option", sorted({tag.condition for tag in MATRIX if tag.condition is not None}))
def test_each_option_takes_exactly_its_tags_away(monkeypatch: pytest.MonkeyPatch, now: Now, option: str) -> None:
    state = everything_on(now)
    setattr(state.cfg.logger, option, False)
    if option == "log_energy":
        state.energy_monitor = None
    expected = places([tag for tag in MATRIX if tag.condition != option])
    assert places_of_lines(found_tags(monkeypatch, now, state)) == expected


@pytest.mark.parametrize(("level", "names"), [(-1, 0), (0, 0), (1, 2), (2, 5)])
def test_the_level_says_which_timers_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], now: Now, level: int, names: int
) -> None:
    """At -1 nothing is measured, and the line has its seconds all the same."""
    state = everything_on(now)
    state.cfg.logger.timing_log_level = level
    found = {line.split(" | ")[1] for line in found_tags(monkeypatch, now, state)}
    assert len([tag for tag in found if tag.endswith("-time") and tag != "iteration-time"]) == names
    out = capsys.readouterr().out
    assert out.count(" elapsed time per iteration (ms): 2000.0 |") == 2
    assert out.count("time across ranks") == (2 if names else 0)


def test_the_count_of_zeros_stays_a_whole_number(monkeypatch: pytest.MonkeyPatch, now: Now) -> None:
    state = everything_on(now)
    loggers = record_all(state)
    run_it(state, now)
    for logger in loggers.values():
        values = [value for tag, value, _ in logger.points if tag == "num-zeros"]
        assert values
        for value in values:
            assert value.dtype == torch.int64 if isinstance(value, Tensor) else type(value) is int
