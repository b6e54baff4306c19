"""Gathers the parameters of models in the forward pass: those of Megatron-Core, and those whose updates ranks divide.

A chunk that gathers parameters during the forward pass has a `ddp_config`, `enable_forward_pre_hook()` and
`disable_forward_pre_hook(param_sync=...)`. One whose updates start all gathers also has `finish_param_sync()`, which
waits for those in flight and starts none, so that one rank may call it alone; while its hooks are on, so does its
`state_dict()`. For other chunks nothing here is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from onstep.config.suggestions import listed
from onstep.errors import text_of
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.model_parallel.early_use import watched
from onstep.training.stages.job import Job

logger: logging.Logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_NAMES_SHOWN = 4


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


_READING: frozenset[Interruption] = frozenset(
    {"evaluate", "score", "save", "compare", "generate", "export", "rollback"}
)
"""Work that reads all weights, or replaces them."""


class ForwardPreHooks(Feature[Job]):
    """Manages the forward pre-hooks of a training's chunks.

    They are off until the first successful update, so that a bad load does not spread; then on; and off, with the
    parameters gathered, during evaluations, saves, comparisons, generations, exports and rollbacks, and at the end.
    After an error they are as they were before the training.

    While they are on, gathers are in flight after each update. They end before a listener that may read weights is
    called (`Callback.reads_weights`), before a module's `state_dict()`, before a step is logged, and before a feature
    with `reads_weights`.
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
        self._waits = [one for one in (getattr(chunk, "finish_param_sync", None) for chunk in self._model) if one]
        self._used_early: list[str] | None = None
        """The parameters that a forward pass uses before they are awaited; None before the first pass."""
        self._were_on = False
        self.is_on = False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Let readers of weights wait for gathers; however the training ends, restore the schedule's own gathering."""
        manager = self.host.notify.manager
        if manager is not None and self._waits:
            manager.gathers = self.wait_for_gathers
        try:
            yield
        except BaseException:
            self._restore()
            raise
        finally:
            if manager is not None:
                manager.gathers = None
            self._give_back_param_sync_func()

    def begin(self) -> None:
        """Turn the hooks off without gathering, and remove the schedule's own gathering (`param_sync_func`).

        A resumed run in the MXFP8 format keeps them on, because its buffers are shared.
        """
        if self._progress.step > 0 and str(getattr(self._model_config, "fp8_recipe", "")).lower().endswith("mxfp8"):
            self.is_on = True
            return
        self._were_on = _has_hooks(self._model[0])
        if self._were_on:
            disable_forward_pre_hook(self._model, param_sync=False)
        self._param_sync_func = getattr(self._model_config, "param_sync_func", None)
        if self._model_config is not None and self._param_sync_func is not None:
            self._model_config.param_sync_func = None

    def wrap_forward(self, forward: Callable[P, T]) -> Callable[P, T]:
        """Wait before each forward pass if the first has used a parameter before what waits for it was called."""
        if not self._waits:
            return forward

        def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
            if self._used_early:
                self.wait_for_gathers()
            if self._used_early is not None:
                return forward(*args, **kwargs)
            found: list[str] = []
            with watched(self._model[0], found):
                result = forward(*args, **kwargs)
            self._used_early = found
            if found and self.host.run.world.is_main:
                names = listed([one.removeprefix("module.") for one in found], _NAMES_SHOWN)
                logger.warning(
                    "the forward step uses %s before the modules that wait for their gathers are called, so it "
                    "waits for all of them first; use them after the model is called, or set "
                    "ddp.overlap_param_gather=false",
                    names,
                )
            return result

        return awaited

    def after_update(self, step: Step) -> None:
        """Wait for the gathers of the update if features read the weights of each step."""
        if self.host.run.features.reads_weights:
            self.wait_for_gathers()

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

    def settle(self) -> None:
        """Wait for the gathers: a log, which may have norms of parameters, is about to be written."""
        self.wait_for_gathers()

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """Keep the hooks off while weights are read; change nothing if they are already off.

        To generate and export, which one rank may do alone, chunks that can only wait.
        """
        if not self.is_on or work not in _READING:
            return nullcontext()
        if work in ("generate", "export") and len(self._waits) == len(self._model):
            self.wait_for_gathers()
            return nullcontext()
        return self._off()

    def wait_for_gathers(self) -> None:
        """Wait until the parameters hold the last update. Not collective."""
        for wait in self._waits:
            wait()

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

    def _restore(self) -> None:
        """After an error, wait for the gathers that are in flight, and turn on the hooks that were on at first."""
        try:
            self.wait_for_gathers()
        except RuntimeError as error:  # a rank that has failed does not send its part
            logger.warning("the weights of this rank may be older than its last update: %s", text_of(error))
        if self._were_on and not _has_hooks(self._model[0]):
            enable_forward_pre_hook(self._model)

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
