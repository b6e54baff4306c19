"""Skipped steps: their samples are consumed, nothing else happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer, apply_overrides
from onstep.data import TrainLoader
from onstep.events import VALID_EVENTS
from tests.support.resuming import compare
from tests.support.small_runs import RaggedRows, TinyModel, eval_loader, run, small_state

Make = Callable[..., ConfigContainer]


def data(size: int = 24) -> TrainLoader:
    return TrainLoader(RaggedRows(size), micro_batch_size=2, global_batch_size=4, shuffle=False)


def trained_samples(manager: CallbackManager) -> dict[int, list[int]]:
    taken: dict[int, list[int]] = {}
    manager.register(
        "on_train_step_end",
        lambda context: taken.update({context.state.train_state.step + 1: list(chain(*context.sample_ids))}),
    )
    return taken


def test_the_samples_of_skipped_steps_are_not_trained_on_and_counted_twice() -> None:
    manager = CallbackManager()
    taken = trained_samples(manager)
    state = small_state(train_iters=6, iterations_to_skip=[2, 5])
    run(state, manager, data=data())
    assert taken == {step: list(range(4 * step - 4, 4 * step)) for step in (1, 3, 4, 6)}
    progress = state.train_state
    assert (progress.step, progress.consumed_train_samples, progress.skipped_train_samples) == (6, 24, 8)


def test_the_weights_are_those_of_training_on_the_other_samples_only() -> None:
    class Without(RaggedRows):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index if index < 4 else index + 4)

    skipping, plain = TinyModel(), TinyModel()
    run(small_state(train_iters=3, iterations_to_skip=[2]), data=data(12), model=skipping)
    loader = TrainLoader(Without(8), micro_batch_size=2, global_batch_size=4, shuffle=False)
    run(small_state(train_iters=2), data=loader, model=plain)
    for ours, theirs in zip(skipping.parameters(), plain.parameters(), strict=True):
        assert ours.equal(theirs)


def test_no_callback_is_called_for_a_skipped_step_and_nothing_is_due_at_it() -> None:
    manager = CallbackManager()
    calls: list[tuple[str, int]] = []
    for event in sorted(VALID_EVENTS):
        manager.register(event, lambda context, event=event: calls.append((event, context.state.train_state.step)))
    state = small_state(train_iters=4, iterations_to_skip=[2])
    state.cfg.logger.log_interval = state.cfg.validation.eval_interval = 2
    run(state, manager, data=data(), valid=eval_loader())
    assert [step for event, step in calls if event == "on_step_begin"] == [0, 2, 3]
    assert [step for event, step in calls if event == "on_step_end"] == [1, 3, 4]
    assert {step for event, step in calls if event in ("on_log_step", "on_eval_start")} == {4}


def test_an_epoch_ends_at_its_place_also_where_its_last_or_first_step_is_skipped() -> None:
    manager = CallbackManager()
    ends: list[tuple[int, int]] = []
    manager.register(
        "on_epoch_end",
        lambda context: ends.append((context.state.train_state.step, context.state.train_state.epoch)),
    )
    run(small_state(train_iters=6, iterations_to_skip=[2, 3, 4, 6]), manager, data=data(8))
    assert ends == [(2, 1), (4, 2), (6, 3)]


def test_skipping_every_step_trains_nothing_and_ends() -> None:
    model, untouched = TinyModel(), TinyModel()
    state = small_state(train_iters=3, iterations_to_skip=[1, 2, 3])
    run(state, data=data(), model=model)
    assert state.train_state.step == 3
    assert all(ours.equal(theirs) for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True))


def test_batches_grow_over_skipped_steps_too() -> None:
    manager = CallbackManager()
    taken = trained_samples(manager)
    state = small_state(2, 6, train_iters=5, step_batch_size_schedule="0:2 4:4 8:6", iterations_to_skip=[2, 3])
    run(state, manager, data=TrainLoader(RaggedRows(24), micro_batch_size=2, global_batch_size=6, shuffle=False))
    assert {step: len(ids) for step, ids in taken.items()} == {1: 2, 4: 6, 5: 6}
    assert state.train_state.skipped_train_samples == 2 + 4


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Make:
    """Runs of 9 steps with dropout that skip steps 3, 4 and 7."""

    def made(name: str, *words: str) -> ConfigContainer:
        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.train.train_iters, config.train.iterations_to_skip = 9, [3, 4, 7]
        config.model.num_layers, config.model.hidden_size = 1, 16
        config.model.hidden_dropout = 0.1
        config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 2, 4, 1
        config.checkpoint.certify, config.checkpoint.most_recent_k, config.checkpoint.save_interval = True, -1, 2
        apply_overrides(config, list(words))
        return config

    return made


def test_a_run_that_dies_beside_skipped_steps_ends_as_the_one_that_nobody_touched(make: Make) -> None:
    """It dies after the steps 2, 5, 8 and 9, and continues from 0, 2 and 6."""
    compare(make, [("on_step_end", number) for number in (2, 3, 3, 2)])


def test_the_learning_rate_stands_still_at_skipped_steps(make: Make) -> None:
    counts: list[int] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: counts.append(context.scheduler.num_steps))
    pretrain(make("rate"), callbacks=manager)
    assert counts == [4 * step for step in range(1, 7)]


def test_a_skipped_step_is_not_saved(make: Make) -> None:
    config = make("saves")
    pretrain(config)
    saved = sorted(info.step for info in checkpoints(Path(config.run.output_dir) / "saves" / "checkpoints"))
    assert saved == [2, 6, 8, 9]
