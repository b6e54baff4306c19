"""Supports models with external parallelism (Megatron-Core): agreement between their ranks, and parameter gathering.

A chunk that gathers parameters during the forward pass has a `ddp_config`, `enable_forward_pre_hook()` and
`disable_forward_pre_hook(param_sync=...)`. Onstep's own have none of these, and nothing here is called for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from onstep.distributed import World, groups_within_models
from onstep.distributed.shard_sums import has_others
from onstep.events.context import unwrap
from onstep.metrics.reductions import (
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
)
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.stages.job import Job


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """Whether forward pre-hooks must be off while checkpoints are saved, evaluations run and weights are compared.

    The hooks belong to a distributed optimizer that gathers parameters during the forward pass.

    Args:
        use_megatron_fsdp: Megatron-FSDP does not use such hooks.
        use_distributed_optimizer: the optimizer's state is sharded over the ranks.
        overlap_param_gather: parameters are gathered during the forward pass.
    """
    return not use_megatron_fsdp and use_distributed_optimizer and overlap_param_gather


def enable_forward_pre_hook(model: Sequence[object]) -> None:
    """Turn on the forward pre-hooks of all chunks.

    Args:
        model: list of model chunks, in the wrapper that has the hooks.

    Raises:
        TypeError: for a chunk without them.
    """
    for chunk in model:
        _method(chunk, "enable_forward_pre_hook")()


def disable_forward_pre_hook(model: Sequence[object], param_sync: bool = True, optimizer: object = None) -> None:
    """Turn off the forward pre-hooks of all chunks.

    Args:
        model: list of model chunks.
        param_sync: gather the parameters now, so that every rank has the current ones. Collective.
        optimizer: prepares its main parameters first, if it supports that (`prepare_model_params_for_param_sync`).

    Raises:
        TypeError: for a chunk without them.
    """
    prepare = getattr(optimizer, "prepare_model_params_for_param_sync", None)
    if param_sync and prepare is not None:
        prepare()
    for chunk in model:
        _method(chunk, "disable_forward_pre_hook")(param_sync=param_sync)


def _handle_mxfp8_param_buffer_copy(
    optimizer: object,
    reuse_grad_buf_for_mxfp8_param_ag: bool,
    overlap_param_gather: bool,
    model: Sequence[object] | None = None,
) -> None:
    """Copy main parameters into the parameter buffer if it is the gradient buffer, which was just zeroed.

    Args:
        optimizer: its `chained_optimizers`, or itself, are asked to copy if they support it
            (`_copy_main_params_to_param_buffer`).
        reuse_grad_buf_for_mxfp8_param_ag: parameters and gradients share a buffer.
        overlap_param_gather: parameters are gathered during the forward pass.
        model: if given, nothing is copied while the first chunk's hooks are off: nothing would clear the copy, and it
            would be mistaken for gradients. None skips this check.
    """
    if not (reuse_grad_buf_for_mxfp8_param_ag and overlap_param_gather):
        return
    if model is not None and not _has_hooks(model[0]):
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        copy = getattr(one, "_copy_main_params_to_param_buffer", None)
        if copy is not None:
            copy()


class ForwardPreHooks(Feature[Job]):
    """Manages the forward pre-hooks of a training's chunks.

    They are off until the first successful update, so that a bad load does not spread; then on; and off, with the
    parameters gathered, during evaluations, saves and comparisons, and at the end.
    """

    name = "forward_pre_hooks"
    when = "a chunk's `ddp_config` overlaps the gathering of parameters with the forward pass"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether chunks gather parameters during the forward pass."""
        config = getattr(host.model[0], "ddp_config", None) if host.model else None
        return config is not None and should_disable_forward_pre_hook(
            bool(getattr(config, "use_megatron_fsdp", False)),
            bool(getattr(config, "use_distributed_optimizer", False)),
            bool(getattr(config, "overlap_param_gather", False)),
        )

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._model, self._optimizer = host.model, host.raw_optimizer
        self._progress = host.run.train_state
        config: object = host.model[0].ddp_config
        self._reuses_buffer = bool(getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False))
        self._model_config: Any = getattr(host.model[0], "config", None)
        self._param_sync_func: object = None
        """The functions that `begin` removed from the model's configuration."""
        self.is_on = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Restore the schedule's own gathering, however the training ends."""
        try:
            yield
        finally:
            self._give_back_param_sync_func()

    def begin(self) -> None:
        """Turn the hooks off without gathering, and remove the schedule's own gathering (`param_sync_func`).

        A resumed run in the MXFP8 format keeps them on, because its buffers are shared.
        """
        if self._progress.step > 0 and str(getattr(self._model_config, "fp8_recipe", "")).lower().endswith("mxfp8"):
            self.is_on = True
            return
        if _has_hooks(self._model[0]):
            disable_forward_pre_hook(self._model, param_sync=False)
        self._param_sync_func = getattr(self._model_config, "param_sync_func", None)
        if self._model_config is not None and self._param_sync_func is not None:
            self._model_config.param_sync_func = None

    def after_train_step(self, step: Step) -> None:
        """Turn the hooks on after the first successful update."""
        if self.is_on or not step.applied:
            return
        enable_forward_pre_hook(self._model)
        self._give_back_param_sync_func()
        self.is_on = True

    def after_zero_grad(self) -> None:
        """Fill the parameter buffer, which was zeroed as the gradient buffer."""
        _handle_mxfp8_param_buffer_copy(self._optimizer, self._reuses_buffer, True, self._model)

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """Keep the hooks off while weights are read; change nothing if they are already off."""
        return self._off() if self.is_on and work in ("evaluate", "save", "compare") else nullcontext()

    @contextmanager
    def _off(self) -> Iterator[None]:
        self._switch_off()
        try:
            yield
        finally:
            enable_forward_pre_hook(self._model)
            self.is_on = True

    def end(self) -> None:
        """Turn the hooks off at the end of training, with the parameters gathered."""
        if self.is_on:
            self._switch_off()
        self._give_back_param_sync_func()

    def _switch_off(self) -> None:
        disable_forward_pre_hook(self._model, param_sync=True, optimizer=self._optimizer)
        self.is_on = False

    def _give_back_param_sync_func(self) -> None:
        """Let the model's schedule gather parameters itself again."""
        if self._model_config is not None and self._param_sync_func is not None:
            self._model_config.param_sync_func, self._param_sync_func = self._param_sync_func, None


def _has_hooks(chunk: object) -> bool:
    """Whether a chunk's hooks are on; assumed if it does not say."""
    handles = getattr(chunk, "remove_forward_pre_hook_handles", None)
    return handles is None or len(handles) > 0


def _method(chunk: object, name: str) -> Callable[..., object]:
    found: Callable[..., object] | None = getattr(chunk, name, None)
    if callable(found):
        return found
    hint = " (a plain torch module)" if isinstance(chunk, torch.nn.Module) else ""
    raise TypeError(f"{type(chunk).__name__}{hint} has no {name}(); pass the chunks in their data-parallel wrapper.")


def model_parallel_group(model: list[nn.Module], world: World) -> ProcessGroup | None:
    """The group of the ranks that share this model: Megatron's `mp`, from the `pg_collection` of its first chunk, or
    that of the run for a model that has none.

    None if one rank holds all of it.
    """
    groups = getattr(unwrap(model[0]), "pg_collection", None) or groups_within_models(world)
    group: ProcessGroup | None = getattr(groups, "mp", None)
    return group if has_others(group) else None


class ModelParallelAgreement(Feature[Job]):
    """Makes all ranks that hold parts of one model agree on each update."""

    name = "model_parallel"
    needs_grad_norm = True
    when = "the `pg_collection.mp` of the model or the run has other ranks"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether other ranks hold parts of this model."""
        return model_parallel_group(host.model, host.run.world) is not None

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._group, self._options = model_parallel_group(host.model, host.run.world), host.run.cfg.train

    def wrap_update(self, update: Callable[[Step], None]) -> Callable[[Step], None]:
        """Agree on the outcome of the update. Collective over the group; reads norm and zeros.

        The update succeeded if it did on all ranks (`train.check_optimizer_step_success`); its norm is the largest
        (unless `train.skip_sync_grad_norm_across_mp`), and so is the number of zeros.
        """
        group, options = self._group, self._options

        def agreed(step: Step) -> None:
            update(step)
            if options.check_optimizer_step_success:
                step.applied = logical_and_across_model_parallel_group(step.applied, group)
            if not options.skip_sync_grad_norm_across_mp:
                norm = step.grad_norm
                step.grad_norm = reduce_max_stat_across_model_parallel_group(norm, group)  # type: ignore[arg-type]  # a tensor is read
            most = reduce_max_stat_across_model_parallel_group(step.num_zeros, group)  # type: ignore[arg-type]
            step.num_zeros = None if most is None else int(most)

        return agreed
