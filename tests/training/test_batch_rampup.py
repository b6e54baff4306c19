"""Batches that grow during a run: sizes, losses, epochs, checkpoints, and runs that are continued meanwhile."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer, apply_overrides
from onstep.data import TrainLoader
from onstep.optim import OptimizerParamScheduler, TrainingOptimizer
from onstep.training import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_micro_batch_size,
    get_num_microbatches,
)
from tests.support.resuming import compare
from tests.support.small_runs import RaggedRows, TinyModel, loader, mean_step, run, small_state, stack, sum_step

Make = Callable[..., ConfigContainer]
RAMP = [2, 2, 12]
SIZES = [2, 2, 4, 6, 8, 8, 8]
"""Of the first steps: 12 samples in 3 increments to 8."""


def growing(steps: int, micro: int = 2, **fields: Any) -> Any:
    fields = {"rampup_batch_size": RAMP, **fields}
    return small_state(micro, 8, train_iters=steps, **fields)


def data(size: int = 48, micro: int = 2) -> TrainLoader:
    return TrainLoader(RaggedRows(size), micro_batch_size=micro, global_batch_size=8, shuffle=False)


def notified_sizes(manager: CallbackManager) -> list[int]:
    sizes: list[int] = []
    manager.register(
        "on_train_step_end", lambda context: sizes.append(sum(len(ids) for ids in context.sample_ids or []))
    )
    return sizes


def test_steps_take_the_samples_of_the_ramp() -> None:
    manager = CallbackManager()
    sizes = notified_sizes(manager)
    state = growing(7)
    run(state, manager, data=data())
    assert sizes == SIZES
    assert state.train_state.consumed_train_samples == sum(SIZES)
    assert state.train_state.skipped_train_samples == 0


def test_the_weights_are_those_of_a_plain_loop_over_the_same_batches() -> None:
    model, reference = TinyModel(), TinyModel()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    rows, first = RaggedRows(48), 0
    for size in SIZES:
        batch = stack([rows[index] for index in range(first, first + size)])
        plain.zero_grad()
        loss = reference(**batch) / batch["labels"].ne(-100).sum()
        loss.backward()
        plain.step()
        first += size
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=None)
    run(growing(7), data=data(), model=model, optimizer=optimizer)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", [sum_step, mean_step])
def test_any_micro_batch_size_gives_the_same_losses(step: Any) -> None:
    losses = []
    for micro in (1, 2):
        one: list[float] = []
        manager = CallbackManager()
        manager.register("on_train_step_end", lambda context, one=one: one.append(context.loss_dict["lm loss"].item()))
        run(growing(7, micro), manager, data=data(micro=micro), step=step)
        losses.append(one)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_megatrons_functions_tell_the_size_of_the_current_step() -> None:
    seen: list[tuple[int, ...]] = []
    manager = CallbackManager()
    manager.register(
        "on_train_step_end",
        lambda _: seen.append(
            (
                get_num_microbatches(),
                get_current_global_batch_size(),
                get_current_running_global_batch_size(),
                get_micro_batch_size(),
            )
        ),
    )
    run(growing(7), manager, data=data())
    assert seen == [(size // 2, size, size, 2) for size in SIZES]


def test_the_schedule_moves_by_the_samples_of_each_step() -> None:
    model = TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    rates: list[float] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda _: rates.append(optimizer.param_groups[0]["lr"]))
    run(growing(7), manager, data=data(), model=model, optimizer=optimizer, scheduler=scheduler)
    assert rates == pytest.approx([1 - sum(SIZES[: step + 1]) / 100 for step in range(7)])


def test_an_epoch_ends_where_the_next_size_does_not_fit() -> None:
    """Of 16 samples 2 + 2 + 4 + 6 are taken, then 8 do not fit into 2; the next epoch goes on with 8."""
    manager = CallbackManager()
    sizes = notified_sizes(manager)
    ends: list[int] = []
    manager.register("on_epoch_end", lambda context: ends.append(context.state.train_state.step))
    run(growing(8), manager, data=data(16))
    assert sizes == [2, 2, 4, 6, 8, 8, 8, 8]
    assert ends == [4, 6, 8]


def test_a_tail_that_is_trained_on_counts_its_own_samples() -> None:
    manager = CallbackManager()
    sizes = notified_sizes(manager)
    state = growing(8, drop_last=False)
    loading = TrainLoader(RaggedRows(13), micro_batch_size=2, global_batch_size=8, shuffle=False, drop_last=False)
    run(state, manager, data=loading)
    assert sizes == [2, 2, 4, 5, 8, 5, 8, 5]
    assert state.train_state.consumed_train_samples == sum(sizes)


def test_a_size_that_is_rounded_down_counts_the_difference_as_skipped() -> None:
    state = small_state(2, 7, train_iters=3, decrease_batch_size_if_needed=True)
    state.num_microbatches = 3
    run(state, data=TrainLoader(RaggedRows(48), micro_batch_size=2, global_batch_size=6))
    assert state.train_state.consumed_train_samples == 18
    assert state.train_state.skipped_train_samples == 3
    assert state.current_global_batch_size == 7


def test_a_ramp_whose_sizes_are_rounded_down_still_ramps() -> None:
    """3, 5, 7 and 9 samples are run as 2, 4, 6 and 8."""
    manager = CallbackManager()
    sizes = notified_sizes(manager)
    state = small_state(2, 9, train_iters=6, rampup_batch_size=[3, 2, 12], decrease_batch_size_if_needed=True)
    run(state, manager, data=data())
    assert sizes == [2, 2, 4, 6, 8, 8]
    assert state.train_state.skipped_train_samples == 6


def test_each_size_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onstep"):
        run(growing(7), data=data())
    captured = [record.message for record in caplog.records if "batch size" in record.message]
    assert captured == [
        "setting initial batch size to 2",
        "ramping up batch size from 2 to 4",
        "ramping up batch size from 4 to 6",
        "ramping up batch size from 6 to 8",
    ]


def test_the_scale_of_summed_losses_follows_the_size() -> None:
    state = growing(7)
    state.cfg.model.seq_length = 16
    sizes = state.batch_sizes
    assert sizes is not None
    scales = []
    for consumed in (0, 4, 12):
        sizes.update(consumed)
        scales.append(state.nominal_step_size)
    assert scales == [32.0, 64.0, 128.0]


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Make:
    """Runs of 10 steps with dropout whose batch grows from 2 to 8 within 16 samples."""

    def made(name: str, *words: str) -> ConfigContainer:
        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 2, 10
        config.train.rampup_batch_size = [2, 2, 16]
        config.model.num_layers, config.model.hidden_size = 1, 16
        config.model.hidden_dropout = 0.1
        config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 3, 4, 1
        config.checkpoint.certify, config.checkpoint.most_recent_k = True, -1
        apply_overrides(config, list(words))
        return config

    return made


def test_a_run_that_dies_anywhere_in_the_ramp_ends_as_the_one_that_nobody_touched(make: Make) -> None:
    """It dies after the steps 2, 4, 5, 7 and 9 and before step 8, and continues from 0, 3 and 6."""
    deaths = [("on_step_end", number) for number in (2, 4, 2, 4, 3)]
    compare(make, [*deaths, ("on_train_step_start", 2)])


def test_it_saves_where_the_batch_grows(make: Make) -> None:
    """Sizes 2, 2, 2, 4, 4, 6, 8: they grow after steps 3, 5 and 6; the last save is the end's."""
    config = make("grows", "checkpoint.save_interval=null")
    pretrain(config)
    steps = sorted(info.step for info in checkpoints(Path(config.run.output_dir) / "grows" / "checkpoints"))
    assert steps == [3, 5, 6, 10]


def test_the_schedule_of_iterations_ends_with_the_run(make: Make) -> None:
    """Of 10 steps the warm-up takes 4 and the decay is linear over the samples of the rest."""
    words = ("scheduler.lr_warmup_iters=4", "scheduler.lr_decay_style=linear", "optimizer.min_lr=0", "optimizer.lr=1")
    rates: list[float] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: rates.append(context.optimizer.param_groups[0]["lr"]))
    pretrain(make("schedule", *words), callbacks=manager)
    assert rates[3] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert rates[:3] == pytest.approx([2 / 10, 4 / 10, 6 / 10])


TAILS = (
    "train.drop_last=false",
    "train.rampup_batch_size=[2,6,120]",
    "train.train_iters=70",
    "validation.eval_interval=null",
    "scheduler.lr_warmup_iters=4",
    "scheduler.lr_decay_style=linear",
    "optimizer.min_lr=0",
    "optimizer.lr=1",
)
"""Changes to a run whose epochs end in tails while the batch grows."""


def test_the_schedule_ends_with_a_run_whose_epochs_end_in_tails(make: Make) -> None:
    rates: list[float] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: rates.append(context.optimizer.param_groups[0]["lr"]))
    state = pretrain(make("tails", *TAILS), callbacks=manager)
    assert state.entry_point.train_dataloader.num_samples % 2, "an epoch ends in a tail"
    assert state.train_state.epoch == 1
    assert rates[3] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert rates[-2] > 0.01
    assert state.trainer_state.num_train_epochs == math.ceil(state.trainer_state.epoch)
    assert state.trainer_state.num_train_samples == state.train_state.consumed_train_samples
    assert state.trainer_state.num_examples == state.entry_point.train_dataloader.num_samples


def test_such_a_run_that_dies_ends_as_the_one_that_nobody_touched(make: Make) -> None:
    compare(lambda name: make(name, *TAILS, "checkpoint.save_interval=5"), [("on_step_end", 53), ("on_step_end", 12)])


def test_its_schedule_goes_on_where_the_progress_is_without_the_optimizers_state(make: Make) -> None:
    """From the checkpoint at step 65 on, with a tail behind it, the learning rates are those of the first run."""
    first = make("first", *TAILS, "checkpoint.save_interval=65")
    source = Path(first.run.output_dir) / "first" / "checkpoints" / "checkpoint-65"
    placed = make("placed", *TAILS, f"checkpoint.load={source}", "checkpoint.load_optim=false")
    whole: list[float] = []
    rest: list[float] = []
    for config, rates in ((first, whole), (placed, rest)):
        manager = CallbackManager()
        manager.register(
            "on_step_end", lambda context, rates=rates: rates.append(context.optimizer.param_groups[0]["lr"])
        )
        pretrain(config, callbacks=manager)
    assert len(rest) == 5
    assert rest == pytest.approx(whole[65:])


def test_the_trainers_schedule_ends_with_its_run(tmp_path: Path) -> None:
    rows = [RaggedRows()[index] for index in range(9)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModel()

        def forward(self, tokens: Any, labels: Any) -> Any:
            return {"loss": self.inner(tokens, labels, reduction="mean")}

    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=30,
        lr_scheduler_type="linear",
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
        config_overrides={"train.rampup_batch_size": [2, 2, 60]},
    )
    trainer = Trainer(Model(), args, train_dataset=rows, default_callbacks=False)
    rates: list[float] = []
    trainer.callback_manager.register(
        "on_step_end", lambda context: rates.append(context.optimizer.param_groups[0]["lr"])
    )
    trainer.train()
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert rates[-2] > 1e-5
    assert trainer.state.num_train_epochs == pytest.approx(trainer.state.epoch)
    assert trainer.state.num_examples == 9


def test_the_console_line_shows_the_size_of_its_step(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(make("console", "logger.console=bridge", "logger.log_interval=1", "validation.eval_interval=null"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "consumed samples" in line]
    sizes = [int(line.split("global batch size:")[1].split("|")[0]) for line in lines]
    assert sizes == [2, 2, 2, 4, 4, 6, 8, 8, 8, 8]


def test_a_run_by_epochs_has_the_steps_that_fit_at_its_place_in_the_ramp(make: Make) -> None:
    config = make("epochs", "train.train_iters=null", "train.num_epochs=2", "scheduler.lr_warmup_iters=0")
    ends: list[tuple[int, float]] = []
    manager = CallbackManager()
    manager.register(
        "on_epoch_end", lambda context: ends.append((context.state.train_state.step, context.state.trainer_state.epoch))
    )
    shares: list[tuple[float, int]] = []

    def note_share(context: Any) -> None:
        progress = context.state.train_state
        shares.append((context.state.trainer_state.epoch - progress.epoch, progress.samples_in_epoch))

    manager.register("on_step_end", note_share)
    state = pretrain(config, callbacks=manager)
    samples = state.entry_point.train_dataloader.num_samples
    assert [share for share, _ in shares] == pytest.approx([taken / samples for _, taken in shares])
    assert len(ends) == 2
    assert [epoch for _, epoch in ends] == [1.0, 2.0]
    assert state.trainer_state.max_steps == state.train_state.step == ends[-1][0]


def test_it_works_through_the_trainer(tmp_path: Path) -> None:
    rows = [RaggedRows()[index] | {"input_ids": torch.tensor([index])} for index in range(12)] * 4

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TinyModel()

        def forward(self, tokens: Any, labels: Any) -> Any:
            return {"loss": self.inner(tokens, labels, reduction="mean")}

    sizes: list[int] = []
    manager_callback = lambda context: sizes.append(sum(map(len, context.sample_ids)))  # noqa: E731
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=7,
        use_cpu=True,
        save_strategy="no",
        config_overrides={"train.rampup_batch_size": RAMP},
    )
    trainer = Trainer(Model(), args, train_dataset=rows, default_callbacks=False)
    trainer.callback_manager.register("on_train_step_end", manager_callback)
    trainer.train()
    assert sizes == SIZES
    assert not list((tmp_path / "run").rglob("checkpoint-*")), "save_strategy is no"


def test_a_constant_batch_is_not_looked_at() -> None:
    """A state made by hand may have another number of micro-batches than its configuration says."""
    state = small_state(2, 4, train_iters=2)
    state.num_microbatches = 3
    manager = CallbackManager()
    sizes = notified_sizes(manager)
    run(state, manager, data=loader(24))
    assert sizes == [6, 6]
