"""Chunks of somebody else's data parallelism that gather parameters while the forward pass runs (Megatron-Core's DDP).

Such a chunk has a `ddp_config`, `enable_forward_pre_hook()` and `disable_forward_pre_hook(param_sync=...)`. Ours has
none of it, and nothing here is called for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from onstep.training.feature import Feature, Interruption
from onstep.training.job import Job
from onstep.training.step import Step


def should_disable_forward_pre_hook(
    use_megatron_fsdp: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> bool:
    """Whether forward pre-hooks must be off while checkpoints are saved, evaluations run and weights are compared.

    They are those of a distributed optimizer that gathers parameters during the forward pass.

    Args:
        use_megatron_fsdp: Megatron-FSDP does without such hooks.
        use_distributed_optimizer: the optimizer's state is split over the ranks.
        overlap_param_gather: parameters are gathered while the forward pass runs.
    """
    return not use_megatron_fsdp and use_distributed_optimizer and overlap_param_gather


def enable_forward_pre_hook(model: Sequence[Any]) -> None:
    """Switch the forward pre-hooks of all chunks on.

    Args:
        model: list of model chunks, in the wrapper that has the hooks.

    Raises:
        TypeError: for a chunk that has none.
    """
    for chunk in model:
        _method(chunk, "enable_forward_pre_hook")()


def disable_forward_pre_hook(model: Sequence[Any], param_sync: bool = True, optimizer: Any = None) -> None:
    """Switch the forward pre-hooks of all chunks off.

    Args:
        model: list of model chunks.
        param_sync: gather the parameters now, so that every rank has the current ones. Collective.
        optimizer: prepares its main parameters for that first, where it can (`prepare_model_params_for_param_sync`).

    Raises:
        TypeError: for a chunk that has none.
    """
    prepare = getattr(optimizer, "prepare_model_params_for_param_sync", None)
    if param_sync and prepare is not None:
        prepare()
    for chunk in model:
        _method(chunk, "disable_forward_pre_hook")(param_sync=param_sync)


def _handle_mxfp8_param_buffer_copy(
    optimizer: Any,
    reuse_grad_buf_for_mxfp8_param_ag: bool,
    overlap_param_gather: bool,
    model: Sequence[Any] | None = None,
) -> None:
    """Copy main parameters into the parameter buffer where it is the gradient buffer, which was just zeroed.

    Args:
        optimizer: its `chained_optimizers`, or itself, are asked to copy where they can
            (`_copy_main_params_to_param_buffer`).
        reuse_grad_buf_for_mxfp8_param_ag: parameters and gradients share a buffer.
        overlap_param_gather: parameters are gathered during the forward pass.
        model: with it nothing is copied while the first chunk's hooks are off: nobody would clear the copy again, and
            it would be taken for gradients. None does not ask.
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
    """The forward pre-hooks of a training's chunks over time.

    Off until the first update that succeeded, so that a bad load is not spread; then on; off, with the parameters
    gathered, around evaluations, saves and comparisons, and at the end.
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
        config = host.model[0].ddp_config
        self._reuses_buffer = bool(getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False))
        self._model_config = getattr(host.model[0], "config", None)
        self._param_sync_func: Any = None
        self.is_on = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Give the schedule's own gathering back, however the training ends."""
        try:
            yield
        finally:
            self.give_back_param_sync_func()

    def begin(self) -> None:
        """Switch them off without gathering, and take the schedule's own gathering (`param_sync_func`) away.

        A run that continues in the MXFP8 format keeps them on, as its buffers are shared.
        """
        if self._progress.step > 0 and str(getattr(self._model_config, "fp8_recipe", "")).lower().endswith("mxfp8"):
            self.is_on = True
            return
        if _has_hooks(self._model[0]):
            disable_forward_pre_hook(self._model, param_sync=False)
        self._param_sync_func = getattr(self._model_config, "param_sync_func", None)
        if self._param_sync_func is not None:
            self._model_config.param_sync_func = None  # type: ignore[union-attr]

    def after_train_step(self, step: Step) -> None:
        """Switch them on after the first update that succeeded."""
        if self.is_on or not step.applied:
            return
        enable_forward_pre_hook(self._model)
        self.give_back_param_sync_func()
        self.is_on = True

    def after_zero_grad(self) -> None:
        """Fill the parameter buffer that was zeroed as the gradients' one."""
        _handle_mxfp8_param_buffer_copy(self._optimizer, self._reuses_buffer, True, self._model)

    def pause(self, work: Interruption) -> AbstractContextManager[Any]:
        """Off while weights are read."""
        return self.off() if work in ("evaluate", "save", "compare") else nullcontext()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Off, with the parameters gathered, within the block; nothing changes where they are off already."""
        was_on = self.is_on
        if was_on:
            disable_forward_pre_hook(self._model, param_sync=True, optimizer=self._optimizer)
            self.is_on = False
        try:
            yield
        finally:
            if was_on:
                enable_forward_pre_hook(self._model)
                self.is_on = True

    def end(self) -> None:
        """Off at the end of training, with the parameters gathered."""
        if self.is_on:
            disable_forward_pre_hook(self._model, param_sync=True, optimizer=self._optimizer)
            self.is_on = False
        self.give_back_param_sync_func()

    def give_back_param_sync_func(self) -> None:
        """Let the model's schedule gather by itself again, where `begin` took that away."""
        if self._param_sync_func is not None:
            self._model_config.param_sync_func = self._param_sync_func  # type: ignore[union-attr]
            self._param_sync_func = None


def _has_hooks(chunk: Any) -> bool:
    """Whether a chunk's hooks are on; one that does not tell is taken to have them on."""
    handles = getattr(chunk, "remove_forward_pre_hook_handles", None)
    return handles is None or len(handles) > 0


def _method(chunk: Any, name: str) -> Any:
    found = getattr(chunk, name, None)
    if callable(found):
        return found
    kind = type(chunk).__name__
    hint = " (a plain torch module)" if isinstance(chunk, torch.nn.Module) else ""
    raise TypeError(f"{kind}{hint} has no {name}(); give the chunks as their data-parallel wrapper has them.")
