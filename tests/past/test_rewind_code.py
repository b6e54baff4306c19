"""The user's own code is found again: callbacks, forward step, hooks; rollbacks and changed settings are repeated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onstep
from onstep import Callback, CallbackContext, pretrain
from onstep.errors import ConfigError
from onstep.training import forward_step
from tests.support.past_runs import content_of, run_config


class Scales(Callback):
    """Changes what is learned, by a factor that grows with each step and is saved."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on_pre_optimizer_step(self, context: CallbackContext) -> None:
        for parameter in context.unwrapped_model.parameters():
            parameter.grad.mul_(self.factor)
        self.factor *= 1.1

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.factor = state_dict["factor"]


class RollsBack(Callback):
    """Requests a rollback after step 5, once."""

    def on_step_end(self, context: CallbackContext) -> None:
        progress = context.state.train_state
        if progress.step == 5 and not progress.num_rollbacks:
            context.control.rollback("as a test")


class Demanding(Callback):
    """Cannot be made without an argument."""

    def __init__(self, needed: int) -> None:
        self.needed = needed

    def on_step_end(self, context: CallbackContext) -> None:
        """Called after each step."""


def doubled(data_iterator: Iterator[Any], model: nn.Module) -> Any:
    loss, count = forward_step(data_iterator, model)
    return loss * 2, count


def halved(model: list[nn.Module]) -> list[nn.Module]:
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(0.5)
    return model


def check_equal(run: Path, step: int, **given: Any) -> None:
    before = content_of(run)
    with onstep.rewind(run, step, **given) as past:
        assert past.comparison.deviation is None, past.comparison.summary
        past.samples()
        while past.step < 8:
            past.next()
        assert past.comparison.is_equal, past.comparison.summary
    assert content_of(run) == before


def test_a_callback_that_changes_what_is_learned_is_made_again(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path), callbacks=[Scales()])
    check_equal(tmp_path / "x", 6)
    check_equal(tmp_path / "x", 2)


def test_forward_step_and_hooks_are_found_again(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path), doubled, pre_wrap_hooks=[halved])
    check_equal(tmp_path / "x", 2)


def test_a_callback_with_arguments_is_given(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path), callbacks=[Demanding(1)])
    with pytest.raises(ConfigError, match=r"Demanding, which requires arguments .* callbacks=\[Demanding\(...\)\]"):
        check_equal(tmp_path / "x", 5)
    check_equal(tmp_path / "x", 5, callbacks=[Demanding(1)])


@pytest.mark.parametrize("step", [4, 5, 7])
def test_a_rollback_on_the_way_is_repeated(corpus: Path, token_cache: Path, tmp_path: Path, step: int) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, checkpoint__most_recent_k=-1), callbacks=[RollsBack()])
    run = tmp_path / "x"
    check_equal(run, step)


def test_a_step_after_a_rollback_to_a_lost_checkpoint_is_repeated_from_the_beginning(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, checkpoint__most_recent_k=1), callbacks=[RollsBack()])
    assert not (tmp_path / "x" / "checkpoints" / "checkpoint-3").exists()
    check_equal(tmp_path / "x", 5)


def test_steps_are_repeated_with_the_settings_that_trained_them(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, train__exit_interval=4, checkpoint__most_recent_k=-1))
    changes = {"optimizer__weight_decay": 0.5, "optimizer__clip_grad": 0.1, "checkpoint__on_config_change": "apply"}
    pretrain(run_config(corpus, token_cache, tmp_path, **changes, checkpoint__most_recent_k=-1))
    for step in (3, 4, 5, 7):
        with onstep.rewind(tmp_path / "x", step) as past:
            past.finish_step()
            assert past.comparison.is_equal, past.comparison.summary


def test_epochs_and_skipped_steps_are_repeated(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "small.txt"
    text.write_text("all work and no play. " * 30)
    changes = {"dataset__split": "1", "train__iterations_to_skip": [5], "validation__eval_iters": 0}
    pretrain(run_config(text, token_cache, tmp_path, **changes))
    check_equal(tmp_path / "x", 6)
    with onstep.rewind(tmp_path / "x", 7) as past:
        assert past.samples()[0].epoch > 0


def test_lora_is_repeated(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path / "base"))
    changes = {"checkpoint__pretrained_checkpoint": str(tmp_path / "base" / "x"), "peft__peft_scheme": "lora"}
    onstep.finetune(run_config(corpus, token_cache, tmp_path, **changes, peft__dropout=0.1))
    check_equal(tmp_path / "x", 2)
    check_equal(tmp_path / "x", 5)


def test_a_finite_gate_that_ended_a_run_is_looked_at_before_it(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(onstep.OnstepError, match="step 5"):
        pretrain(run_config(corpus, token_cache, tmp_path), infinite)
    with onstep.rewind(tmp_path / "x", 5) as past:
        assert not torch.isfinite(torch.tensor(past.loss))
        assert any("loss inf" in note for one in past.samples() for note in one.unusual)


def infinite(state: Any, data_iterator: Iterator[Any], model: nn.Module) -> Any:
    loss, count = forward_step(data_iterator, model)
    scale: Tensor | float = torch.inf if state.train_state.step == 4 else 1.0
    return loss * scale, count


def test_a_run_that_began_with_another_ones_checkpoint_is_repeated_from_there(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path / "parent"))
    parent = tmp_path / "parent" / "x" / "checkpoints" / "checkpoint-3"
    pretrain(run_config(corpus, token_cache, tmp_path, checkpoint__load=str(parent)))
    with onstep.rewind(tmp_path / "x", 5) as past:
        past.finish_step()
        assert (past.plan.num_steps, past.comparison.steps) == (2, [4, 5])
        assert past.comparison.is_equal
    with pytest.raises(ConfigError, match="began with step 3 of"), onstep.rewind(tmp_path / "x", 3):
        pass


def test_what_differs_from_the_process_of_the_run_is_named(corpus: Path, token_cache: Path, tmp_path: Path) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path))
    run = tmp_path / "x"
    content = json.loads((run / "run.json").read_text())
    content["versions"]["torch"] = "2.0.0+old"
    (run / "run.json").write_text(json.dumps(content))
    with onstep.rewind(run, 6) as past:
        assert re.search("equal to the bit: .*, although torch was 2.0.0.old and is ", past.comparison.summary)
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    for one in lines:
        if one["kind"] == "log" and one["global_step"] == 5:
            one["loss"] = 0.5
    (run / "record.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with onstep.rewind(run, 6) as past:
        assert "not to the bit from step 5 on (loss of step 5 was 0.5 and is " in past.comparison.summary
        assert "torch was 2.0.0+old" in past.comparison.summary
