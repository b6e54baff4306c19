"""`log_history`: in memory for callbacks, in the metrics log for ever, and in no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.checkpoint import encode_state
from onstep.config import ConfigContainer
from onstep.events.log_history import MOST_RECORDS, LogHistory
from onstep.training import GlobalState
from onstep.training.checkpointing.run_progress import RunProgress
from tests.support.resuming import Interrupted
from tests.support.small_models import arguments, causal_rows, quiet, qwen_classifier
from tests.support.small_runs import RaggedRows, run, small_state, stack, sum_step


def size_of(state: GlobalState) -> int:
    tensors, tree = encode_state(RunProgress(state).state_dict())
    return len(json.dumps(tree)) + sum(len(name) for name in tensors)


def test_a_checkpoint_does_not_grow_with_the_log() -> None:
    sizes = []
    for steps in (10, 100):
        state = small_state(train_iters=steps)
        state.cfg.logger.log_interval = 1
        run(state)
        assert len(state.info.log_history) == steps + 1
        state.info.log_history[-1] = {"train_runtime": 1.0, "step": 10}
        state.losses.total = 1.0
        sizes.append(size_of(state))
    assert sizes[1] - sizes[0] <= 16  # the counters have a digit more


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.log_interval, tiny_config.checkpoint.save_interval = 1, 4
    return tiny_config


def interrupted(config: ConfigContainer, *callbacks: Any) -> None:
    manager = CallbackManager()

    def die(context: Any) -> None:
        if context.trainer_state.global_step == 6:
            raise Interrupted

    manager.add(list(callbacks))
    manager.register("on_step_end", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)


def losses(state: GlobalState) -> list[int]:
    return [record["step"] for record in state.info.log_history if "loss" in record]


def test_a_continued_run_has_the_history_of_its_metrics_log(config: ConfigContainer, tmp_path: Path) -> None:
    seen: list[int] = []
    whole = pretrain(config, callbacks=[JsonLogger(note="x")])
    config.run.name = "killed"
    interrupted(config, JsonLogger(note="x"))
    manager = CallbackManager()
    manager.add(JsonLogger(note="x"))
    manager.register("on_train_start", lambda context: seen.extend(losses(context.state)))
    state = pretrain(config, callbacks=manager)
    assert seen == [1, 2, 3, 4]
    wall_clock = ("runtime", "per_second")
    plain = [
        [{key: one for key, one in record.items() if not any(word in key for word in wall_clock)} for record in history]
        for history in (state.info.log_history, whole.info.log_history)
    ]
    assert plain[0] == plain[1]


def test_without_a_metrics_log_it_is_read_from_the_record(config: ConfigContainer) -> None:
    interrupted(config)
    assert losses(pretrain(config)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_record_that_begins_in_the_middle_of_a_run_does_not_hide_its_metrics_log(
    config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an earlier version, which had none, began the run."""
    of_this_version = RunProgress.state_dict
    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "state_dict", lambda one: {**of_this_version(one), "record_position": None})
        interrupted(config, JsonLogger())
    (tmp_path / "run" / "record.jsonl").unlink()
    config.checkpoint.save_interval = 1
    interrupted(config, JsonLogger())
    assert losses(pretrain(config, callbacks=[JsonLogger()])) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_without_either_it_begins_with_what_there_is(config: ConfigContainer, tmp_path: Path) -> None:
    interrupted(config)
    (tmp_path / "run" / "record.jsonl").unlink()
    assert losses(pretrain(config)) == [5, 6, 7, 8]


def test_a_run_that_was_concluded_still_has_its_final_metrics() -> None:
    state, loaded = small_state(train_iters=2), small_state(train_iters=2)
    run(state)
    RunProgress(loaded).load_state_dict(RunProgress(state).state_dict())
    assert loaded.info.log_history == [state.info.log_history[-1]]
    assert "train_runtime" in loaded.info.log_history[0]


def test_going_back_drops_what_came_after_the_checkpoint() -> None:
    state = small_state(train_iters=2)
    state.cfg.logger.log_interval = 1
    run(state)
    del state.info.log_history[-1]
    saved = RunProgress(state).state_dict()
    state.info.log_history += [{"eval_loss": 1.0, "step": 2}, {"loss": 1.0, "step": 3}]
    RunProgress(state).load_state_dict(saved)
    assert [record["step"] for record in state.info.log_history] == [1, 2]


def test_going_back_drops_later_records_also_where_the_earlier_ones_are_not_in_memory() -> None:
    """As in a continued run without a metrics log, which has fewer records than its checkpoint counts."""
    state = small_state(train_iters=2)
    state.cfg.logger.log_interval = 1
    run(state)
    del state.info.log_history[-1]
    saved = RunProgress(state).state_dict()
    state.info.log_history[:] = [{"loss": 1.0, "step": 2}, {"loss": 1.0, "step": 3}]
    RunProgress(state).load_state_dict(saved)
    assert [record["step"] for record in state.info.log_history] == [2]


def test_an_older_checkpoint_brings_its_log() -> None:
    state = small_state(train_iters=2)
    older = RunProgress(state).state_dict()
    del older["num_records"], older["final_metrics"]
    older["log_history"] = [{"loss": 1.0, "step": 0}]
    RunProgress(state).load_state_dict(older)
    assert state.info.log_history == [{"loss": 1.0, "step": 0}]


def test_steps_without_a_label_are_named(caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(train_iters=2)
    state.cfg.logger.log_interval = 1
    rows = RaggedRows(2, empty=(0, 1))
    batch = stack([rows[0], rows[1]])
    run(state, data=iter([batch] * 4))
    assert "the 1 steps up to step 2 have no label that is trained on (all are -100)" in caplog.text


def test_a_forward_step_that_counts_no_label_but_learns_is_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    def counts_none(data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator), reduction="mean"), lambda loss: (loss, torch.tensor(0), {})

    state = small_state(train_iters=1)
    state.cfg.logger.log_interval = 1
    run(state, step=counts_none)
    assert "the forward step reports 0 labels, though its loss has a gradient" in caplog.text
    assert "nothing is learned" not in caplog.text


def test_classes_that_are_all_ignored_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"input_ids": torch.tensor(row["input_ids"]), "labels": torch.tensor(-100)} for row in causal_rows(4)]
    quiet(qwen_classifier(), arguments(tmp_path, logging_steps=1, max_steps=1), rows).train()
    assert "so nothing is learned; a usual cause is labels that are all -100" in caplog.text


def test_a_report_that_clashes_with_the_log_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(train_iters=1)
    state.cfg.logger.log_interval = 1

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss_function = sum_step(data_iterator, model)
        return output, lambda loss: (*loss_function(loss)[:2], {"grad_norm": loss.detach(), "mine": loss.detach()})

    run(state, step=step)
    assert "the forward step reports 'grad_norm', which the log has itself; report it under another name" in caplog.text
    assert "'mine'" not in caplog.text


def test_a_history_is_thinned_out_where_a_run_has_logged_long() -> None:
    history = LogHistory()
    same = history.records
    for step in range(1, 3 * MOST_RECORDS):
        history.append({"step": step, "loss": 1.0})
        if step % 1000 == 0:
            history.append({"step": step, "eval_loss": 1.0})
    steps = [one["step"] for one in same if "loss" in one]
    assert history.records is same
    assert MOST_RECORDS // 2 < len(same) <= MOST_RECORDS
    assert steps == sorted(steps)
    assert steps[-1000:] == list(range(3 * MOST_RECORDS - 1000, 3 * MOST_RECORDS))
    assert [one["step"] for one in same if "eval_loss" in one] == list(range(1000, 3 * MOST_RECORDS, 1000))
    history.replace([{"step": step, "eval_loss": 1.0} for step in range(3 * MOST_RECORDS)])
    history.append({"step": 3 * MOST_RECORDS})
    assert len(history) <= MOST_RECORDS
