"""Foreign chunks that gather parameters during the forward pass: when their hooks are on, over a whole run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager
from onstep.errors import ReplicaMismatchError
from onstep.optim import TrainingOptimizer
from onstep.training import (
    _handle_mxfp8_param_buffer_copy,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    maybe_check_weight_hash_across_dp_replicas,
    should_disable_forward_pre_hook,
)
from onstep.training.feature import Interruption
from onstep.training.verification import weight_hash
from tests.support.small_runs import TinyModel, eval_loader, run, small_state


class GatheringChunk(nn.Module):
    """A chunk with Megatron-Core's methods, as strict about order as the original; `log` has what was called."""

    def __init__(self, overlap: bool = True) -> None:
        super().__init__()
        self.module = TinyModel()
        self.ddp_config = SimpleNamespace(
            use_distributed_optimizer=True, overlap_param_gather=overlap, reuse_grad_buf_for_mxfp8_param_ag=True
        )
        self.config = SimpleNamespace(param_sync_func="sync", fp8_recipe="delayed")
        self.remove_forward_pre_hook_handles: dict[str, str] = {"embed": "handle"} if overlap else {}
        self.log: list[str] = []

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        self.remove_forward_pre_hook_handles["embed"] = "handle"
        self.log.append("on")

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        assert self.remove_forward_pre_hook_handles, "disabling twice raises in Megatron-Core"
        self.remove_forward_pre_hook_handles.clear()
        self.log.append("off, gathered" if param_sync else "off")

    def zero_grad_buffer(self) -> None:
        self.log.append("zero")

    @property
    def is_on(self) -> bool:
        return bool(self.remove_forward_pre_hook_handles)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Part:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def _copy_main_params_to_param_buffer(self) -> None:
        self._log.append("copy")


class Chained(TrainingOptimizer):
    """An optimizer of two parts, of which one has main parameters to copy."""

    def __init__(self, chunk: GatheringChunk) -> None:
        super().__init__(torch.optim.SGD(chunk.parameters(), lr=0.1))
        self.chained_optimizers = [Part(chunk.log), object()]
        self._log = chunk.log

    def prepare_model_params_for_param_sync(self) -> None:
        self._log.append("prepare")


def trained(chunk: GatheringChunk, events: tuple[str, ...] = (), **fields: Any) -> dict[str, list[bool]]:
    """Train the chunk for three steps with an evaluation after the second; whether hooks were on at some events."""
    seen: dict[str, list[bool]] = {event: [] for event in events}
    manager = CallbackManager()
    for event in events:
        manager.register(event, lambda _, event=event: seen[event].append(chunk.is_on))
    state = small_state(train_iters=3, **fields)
    state.cfg.validation.eval_interval = 2
    run(state, manager, valid=eval_loader(), model=chunk, optimizer=Chained(chunk))
    return seen


@pytest.mark.parametrize(
    ("fsdp", "distributed", "overlap", "expected"),
    [
        (False, True, True, True),
        (True, True, True, False),
        (False, False, True, False),
        (False, True, False, False),
    ],
)
def test_hooks_are_toggled_for_an_overlapping_distributed_optimizer_only(
    fsdp: bool, distributed: bool, overlap: bool, expected: bool
) -> None:
    assert should_disable_forward_pre_hook(fsdp, distributed, overlap) is expected


def test_hooks_are_off_until_the_first_update_and_around_evaluations_and_at_the_end() -> None:
    chunk = GatheringChunk()
    events = ("on_forward_backward_start", "on_train_step_end", "on_eval_start", "on_step_begin", "on_train_end")
    seen = trained(chunk, events)
    assert seen["on_forward_backward_start"][:1] == [False]
    assert all(seen["on_forward_backward_start"][2:]), "two micro-batches a step"
    assert seen["on_step_begin"] == [False, True, True]
    assert seen["on_eval_start"] == [False]
    assert seen["on_train_end"] == [False]
    toggled = [one for one in chunk.log if one not in ("zero", "copy")]
    assert toggled == ["off", "on", "prepare", "off, gathered", "on", "prepare", "off, gathered"]


def test_the_gradient_buffer_is_cleared_before_main_parameters_are_copied_into_it() -> None:
    chunk = GatheringChunk()
    trained(chunk)
    cleared = [one for one in chunk.log if one in ("zero", "copy")]
    assert cleared == ["zero", "zero", "copy", "zero", "copy"], "nothing is copied while the hooks are off"


def test_the_schedules_own_gathering_is_away_until_the_first_update() -> None:
    chunk, seen = GatheringChunk(), []
    manager = CallbackManager()
    manager.register("on_train_step_start", lambda _: seen.append(chunk.config.param_sync_func))
    run(small_state(train_iters=2), manager, model=chunk, optimizer=Chained(chunk))
    assert seen == [None, "sync"]
    assert chunk.config.param_sync_func == "sync"


def test_an_update_that_was_skipped_is_not_the_first() -> None:
    chunk, seen = GatheringChunk(), []
    manager = CallbackManager()

    def poison(context: Any) -> None:
        if context.state.train_state.step == 0:
            gradient = next(chunk.parameters()).grad
            assert gradient is not None
            gradient.fill_(float("nan"))

    manager.register("on_forward_backward_end", poison)
    manager.register("on_step_begin", lambda _: seen.append(chunk.is_on))
    run(small_state(train_iters=3, on_nonfinite="skip"), manager, model=chunk, optimizer=Chained(chunk))
    assert seen == [False, False, True]


def test_weights_are_compared_with_the_hooks_off() -> None:
    chunk = GatheringChunk()
    trained(chunk, check_weight_hash_across_dp_replicas_interval=3)
    toggled = [one for one in chunk.log if "off" in one or one == "on"]
    assert toggled == ["off", "on", "off, gathered", "on", "off, gathered", "on", "off, gathered"]


def test_parameters_are_prepared_before_weights_are_compared() -> None:
    chunk = GatheringChunk()
    trained(chunk, check_weight_hash_across_dp_replicas_interval=3)
    assert chunk.log.count("off, gathered") == 3
    assert all(chunk.log[at - 1] == "prepare" for at, one in enumerate(chunk.log) if one == "off, gathered")


def test_weights_that_differ_leave_hooks_and_the_schedule_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = GatheringChunk()

    def differs_after_two_steps(_: Any, __: Any, iteration: int) -> None:
        if iteration == 2:
            raise ReplicaMismatchError("rank 1 differs")

    monkeypatch.setattr(weight_hash, "check_param_hashes_across_dp_replicas", differs_after_two_steps)
    with pytest.raises(ReplicaMismatchError):
        trained(chunk, check_weight_hash_across_dp_replicas_interval=2)
    assert chunk.is_on
    assert chunk.log[-3:] == ["prepare", "off, gathered", "on"]
    with pytest.raises(ReplicaMismatchError):
        maybe_check_weight_hash_across_dp_replicas([chunk], None, 2, 2, True)
    assert chunk.is_on


def test_a_run_that_fails_before_its_first_update_gives_the_schedules_gathering_back() -> None:
    chunk, manager = GatheringChunk(), CallbackManager()

    def fail(_: Any) -> None:
        assert chunk.config.param_sync_func is None
        raise OSError("broken")

    manager.register("on_train_step_start", fail)
    with pytest.raises(OSError, match="broken"):
        run(small_state(train_iters=2), manager, model=chunk, optimizer=Chained(chunk))
    assert chunk.config.param_sync_func == "sync"


def test_a_second_training_finds_them_off() -> None:
    chunk = GatheringChunk()
    trained(chunk)
    chunk.log.clear()
    trained(chunk)
    assert [one for one in chunk.log if "off" in one or one == "on"][:1] == ["on"]


def test_chunks_that_do_not_overlap_are_left_alone() -> None:
    chunk = GatheringChunk(overlap=False)
    trained(chunk)
    assert set(chunk.log) == {"zero"}


def test_the_functions_say_which_chunk_has_no_hooks() -> None:
    with pytest.raises(TypeError, match=r"Linear .* has no enable_forward_pre_hook"):
        enable_forward_pre_hook([nn.Linear(1, 1)])
    with pytest.raises(TypeError, match="has no disable_forward_pre_hook"):
        disable_forward_pre_hook([nn.Linear(1, 1)])


def test_parameters_are_gathered_after_the_optimizer_prepared_them() -> None:
    chunk = GatheringChunk()
    disable_forward_pre_hook([chunk], param_sync=True, optimizer=Chained(chunk))
    assert chunk.log == ["prepare", "off, gathered"]
    enable_forward_pre_hook([chunk])
    disable_forward_pre_hook([chunk], False, Chained(chunk))
    assert chunk.log[2:] == ["on", "off"]


@pytest.mark.parametrize(("reuse", "overlap", "copied"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_main_parameters_are_copied_only_where_buffers_are_shared(reuse: bool, overlap: bool, copied: int) -> None:
    chunk = GatheringChunk()
    optimizer = Chained(chunk)
    _handle_mxfp8_param_buffer_copy(optimizer, reuse, overlap)
    assert chunk.log.count("copy") == copied
    chunk.disable_forward_pre_hook(param_sync=False)
    _handle_mxfp8_param_buffer_copy(
        optimizer=optimizer, model=[chunk], reuse_grad_buf_for_mxfp8_param_ag=reuse, overlap_param_gather=overlap
    )
    assert chunk.log.count("copy") == copied, "the hooks are off"


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_checkpoint_is_taken_with_the_hooks_off(tmp_path: Path, is_async: bool) -> None:
    chunk = GatheringChunk()
    state = small_state(train_iters=3)
    state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(tmp_path), 2
    state.cfg.checkpoint.async_save = is_async
    manager, seen = CallbackManager(), []
    manager.register("on_checkpoint_save_start", lambda _: seen.append(chunk.is_on))
    run(state, manager, model=chunk, optimizer=Chained(chunk))
    assert seen == [False, False]
    assert _toggled(chunk) == ["off", "on", *_PAUSED, *_PAUSED, "prepare", "off, gathered"], "two saves, and the end"


def _toggled(chunk: GatheringChunk) -> list[str]:
    return [one for one in chunk.log if one not in ("zero", "copy")]


_PAUSED = ("prepare", "off, gathered", "on")


@pytest.mark.parametrize("work", ["generate", "export"])
def test_hooks_are_off_while_text_is_generated_and_the_model_exported(work: Interruption) -> None:
    chunk, seen, manager = GatheringChunk(), [], CallbackManager()
    state = small_state(train_iters=3)

    def read(context: Any) -> None:
        with state.features.pause(work):
            seen.append(chunk.is_on)

    manager.register("on_train_step_start", read)
    run(state, manager, model=chunk, optimizer=Chained(chunk))
    assert seen == [False] * 3
    assert _toggled(chunk) == ["off", "on", *_PAUSED, *_PAUSED, "prepare", "off, gathered"]


def test_hooks_are_off_while_a_command_is_carried_out_and_a_checkpoint_loaded(tmp_path: Path) -> None:
    chunk, seen, manager = GatheringChunk(), [], CallbackManager()
    state = small_state(train_iters=4)
    state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(tmp_path), 1
    state.cfg.checkpoint.save_at_end = False

    def ask(context: Any) -> None:
        if context.state.train_state.step == 3 and not seen:
            context.control.command("look")
            context.control.rollback("a test", to_step=1)

    manager.register("on_step_end", ask)
    for event in ("on_command", "on_checkpoint_load"):
        manager.register(event, lambda _, event=event: seen.append((event, chunk.is_on)))
    run(state, manager, model=chunk, optimizer=Chained(chunk))
    assert seen == [("on_command", False), ("on_checkpoint_load", False)]
    saves = 2 + 3  # of steps 1 and 2; after the rollback, of 2, 3 and 4
    assert _toggled(chunk) == ["off", "on", *_PAUSED * (saves + 2), "prepare", "off, gathered"]


@pytest.mark.parametrize("step", [1, 3])
def test_after_an_error_hooks_are_on_if_they_were(step: int) -> None:
    """Before the first update and in an evaluation, where they are off, as well as between steps."""
    chunk, manager = GatheringChunk(), CallbackManager()

    def fail(context: Any) -> None:
        if context.state.train_state.step == step - 1:
            raise OSError("broken")

    manager.register("on_pre_optimizer_step", fail)
    with pytest.raises(OSError, match="broken"):
        run(small_state(train_iters=4), manager, model=chunk, optimizer=Chained(chunk))
    assert chunk.is_on
    assert chunk.config.param_sync_func == "sync"
    assert _toggled(chunk) == ["off", "on"]


def test_an_error_in_an_evaluation_leaves_the_hooks_on() -> None:
    chunk, manager = GatheringChunk(), CallbackManager()

    def fail(_: Any) -> None:
        assert not chunk.is_on
        raise OSError("broken")

    manager.register("on_eval_step_end", fail)
    state = small_state(train_iters=3)
    state.cfg.validation.eval_interval = 2
    with pytest.raises(OSError, match="broken"):
        run(state, manager, valid=eval_loader(), model=chunk, optimizer=Chained(chunk))
    assert _toggled(chunk) == ["off", "on", *_PAUSED]
