"""The context that a callback is called with."""

from __future__ import annotations

import pytest
from torch import nn

from onstep.events import CallbackContext, Control


class DistributedDataParallel(nn.Module):
    """Wraps as torch's class of this name does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class OptimizedModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_only_state_and_model_are_required_and_the_rest_has_no_meaning_yet():
    context = CallbackContext("state", ["model"])

    assert (context.state, context.model) == ("state", ["model"])
    assert context.user_state == {}
    for name in ("optimizer", "scheduler", "loss_dict", "grad_norm", "skipped_iter", "total_loss_dict", "logs"):
        assert getattr(context, name) is None


def test_contexts_share_neither_user_state_nor_control_by_default():
    one, other = CallbackContext(None, []), CallbackContext(None, [])

    one.user_state["seen"] = 1
    one.control.stop()

    assert other.user_state == {}
    assert other.control.should_training_stop is False


def test_positional_order_is_that_of_the_documented_fields():
    context = CallbackContext(*range(9))

    assert [context.optimizer, context.scheduler, context.loss_dict, context.grad_norm] == [3, 4, 5, 6]
    assert [context.skipped_iter, context.total_loss_dict] == [7, 8]


def test_args_and_trainer_state_are_read_only_views_of_the_state(run):
    run.args, run.train_state.step = "arguments", 7
    context = CallbackContext(run, [])

    assert context.args == "arguments"
    assert context.trainer_state.global_step == 7
    with pytest.raises(AttributeError):
        context.args = "others"
    with pytest.raises(AttributeError):
        context.trainer_state = None


def test_a_state_without_views_gives_none():
    context = CallbackContext(object(), [])

    assert context.args is None
    assert context.trainer_state is None


def test_unwrapped_model_is_the_users_module_inside_every_wrapper():
    module = nn.Linear(1, 1)

    assert CallbackContext(None, [module]).unwrapped_model is module
    assert CallbackContext(None, module).unwrapped_model is module
    assert CallbackContext(None, [OptimizedModule(DistributedDataParallel(module))]).unwrapped_model is module


def test_unwrapped_model_of_several_chunks_is_the_list_of_them():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)

    context = CallbackContext(None, [DistributedDataParallel(first), second])

    assert context.unwrapped_model == [first, second]
    assert CallbackContext(None, []).unwrapped_model == []


def test_hf_keywords_are_the_documented_ones(run):
    control = Control()
    context = CallbackContext(run, ["chunk"], optimizer="opt", scheduler="sched", control=control, trainer="trainer")

    keywords = context.hf_keywords()

    assert set(keywords) == {
        *("args", "state", "control", "model", "processing_class", "tokenizer"),
        *("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "trainer"),
    }
    assert keywords["control"] is control
    assert (keywords["model"], keywords["optimizer"], keywords["lr_scheduler"]) == ("chunk", "opt", "sched")
