"""Epochs: what is counted, what happens to the tail, and how data ends."""

from __future__ import annotations

from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.data import IterableLoader
from onstep.errors import DataError
from tests.support.small_runs import RaggedRows, loader, run, small_state, stack


def epochs_of(data: Any, steps: int, **fields: Any) -> tuple[list[str], list[int], Any]:
    """The epoch events with their steps, the samples of each step, and the state after `steps` steps."""
    manager, state = CallbackManager(), small_state(train_iters=steps, **fields)
    calls: list[str] = []
    samples: list[int] = []
    for event in ("on_epoch_start", "on_epoch_end"):
        manager.register(event, lambda context: calls.append(f"{context.event} {context.state.train_state.step}"))
    manager.register("on_train_step_start", lambda context: samples.append(sum(map(len, context.sample_ids or []))))
    run(state, manager, data=data)
    return calls, samples, state


def test_a_tail_shorter_than_a_batch_is_dropped() -> None:
    calls, samples, state = epochs_of(loader(10), 4)
    assert calls == ["on_epoch_start 0", "on_epoch_end 2", "on_epoch_start 2", "on_epoch_end 4"]
    assert samples == [4] * 4
    assert (state.train_state.epoch, state.train_state.consumed_train_samples) == (2, 16)


def test_a_tail_is_trained_on_as_a_smaller_step_where_that_is_asked_for() -> None:
    calls, samples, state = epochs_of(loader(10, drop_last=False), 6, drop_last=False)
    assert calls == ["on_epoch_start 0", "on_epoch_end 3", "on_epoch_start 3", "on_epoch_end 6"]
    assert samples == [4, 4, 2] * 2
    assert (state.train_state.epoch, state.train_state.consumed_train_samples) == (2, 20)


def test_the_position_within_an_epoch_is_counted_in_steps_and_samples() -> None:
    _, _, state = epochs_of(loader(12), 5)
    progress = state.train_state
    assert (progress.epoch, progress.steps_in_epoch, progress.samples_in_epoch) == (1, 2, 8)
    assert (progress.step, progress.consumed_train_samples) == (5, 20)


def test_every_sample_comes_once_an_epoch_in_another_order() -> None:
    manager, ids = CallbackManager(), []
    manager.register("on_train_step_start", lambda context: [ids.extend(row) for row in context.sample_ids])
    run(small_state(train_iters=6), manager)
    assert sorted(ids[:12]) == sorted(ids[12:]) == list(range(12))
    assert ids[:12] != ids[12:]


def micro_batches(count: int) -> Any:
    rows = RaggedRows(2 * count)
    return iter([stack([rows[2 * i], rows[2 * i + 1]]) for i in range(count)])


def test_a_raw_iterator_that_ends_is_one_epoch_and_ends_training_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls, _, state = epochs_of(micro_batches(5), 10)
    assert calls == ["on_epoch_start 0", "on_epoch_end 3"]
    assert (state.train_state.step, state.train_state.consumed_train_samples) == (3, 10)
    assert any("exhausted at step 3" in message for message in caplog.messages)
    assert not state.ending.was_stopped


def test_training_goes_on_with_a_new_iterator() -> None:
    _, _, state = epochs_of(micro_batches(2), 4)
    assert state.train_state.step == 1
    run(state, data=micro_batches(20))
    assert state.train_state.step == 4


def test_an_iterable_starts_again_for_each_epoch() -> None:
    class Rows:
        def __iter__(self) -> Any:
            return iter([RaggedRows()[index] for index in range(9)])

    data = IterableLoader(Rows(), micro_batch_size=2, global_batch_size=4)
    calls, _, state = epochs_of(data, 4)
    assert calls == ["on_epoch_start 0", "on_epoch_end 2", "on_epoch_start 2", "on_epoch_end 4"]
    assert state.train_state.consumed_train_samples == 16


def test_data_without_a_single_step_is_an_error() -> None:
    with pytest.raises(DataError, match="ended before its first step"):
        epochs_of(iter([]), 4)


@pytest.mark.parametrize(("num_epochs", "ends"), [(2.0, 2), (1.5, 2), (0.1, 1)])
def test_a_run_may_be_as_long_as_a_fraction_of_epochs(
    tiny_config: ConfigContainer, num_epochs: float, ends: int
) -> None:
    tiny_config.train.train_iters, tiny_config.train.num_epochs = None, num_epochs
    tiny_config.train.global_batch_size = tiny_config.train.micro_batch_size = 256
    tiny_config.dataset.seq_length = tiny_config.model.seq_length = 16
    tiny_config.scheduler.lr_warmup_iters = 0
    tiny_config.validation.eval_iters = 0
    manager, calls = CallbackManager(), []
    manager.register("on_epoch_end", lambda context: calls.append(context.trainer_state.epoch))
    state = pretrain(tiny_config, callbacks=manager)
    steps = state.trainer_state.epoch_train_steps
    assert steps is not None
    assert steps > 4
    assert state.train_state.step == -(-num_epochs * steps // 1)
    assert len(calls) == ends
    assert calls[-1] == pytest.approx(num_epochs, abs=1 / steps)
    assert state.trainer_state.max_steps == state.train_state.step


@pytest.mark.parametrize(("batch", "is_named"), [(4, False), (64, True)])
def test_a_tail_that_is_noticeable_is_named(
    tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture, batch: int, is_named: bool
) -> None:
    tiny_config.train.train_iters, tiny_config.train.num_epochs = None, 1.0
    tiny_config.train.global_batch_size, tiny_config.dataset.seq_length = batch, 256
    tiny_config.model.seq_length, tiny_config.validation.eval_iters = 256, 0
    tiny_config.scheduler.lr_warmup_iters = 0
    state = pretrain(tiny_config)
    num_samples = state.info.num_examples
    line = f"the last {num_samples % batch} of {num_samples} samples of each epoch are less than a global batch of"
    assert (line in caplog.text) is is_named


def test_a_tail_that_the_run_does_not_reach_is_not_named(
    tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.train.global_batch_size, tiny_config.train.train_iters = 1024, 1
    tiny_config.validation.eval_iters, tiny_config.scheduler.lr_warmup_iters = 0, 0
    tiny_config.dataset.seq_length = tiny_config.model.seq_length = 16
    pretrain(tiny_config)
    assert "of each epoch" not in caplog.text
