"""The functional door for continuing from trained weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.keys import typed_copy
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.models import ModelHook
from onstep.training.bridge.global_state import GlobalState
from onstep.training.forward_step import forward_step
from onstep.training.pretrain import pretrain


def finetune(
    config: ConfigContainer,
    forward_step_func: Callable[..., Any] = forward_step,
    callbacks: list[Any] | CallbackManager | None = None,
    *,
    pre_wrap_hooks: Sequence[ModelHook] = (),
) -> GlobalState:
    """Train trained weights further, from `checkpoint.pretrained_checkpoint` or `checkpoint.load`. Collective.

    These name a Hugging Face folder with safetensors, a run, or a checkpoint of Onstep. Only its weights are taken:
    steps, optimizer, data position and random state start anew. A run that has checkpoints of its own continues from
    them instead. The model section is filled from the weights, or must agree with them. With `peft.peft_scheme` lora a
    few added weights are trained; the run then leaves them in `adapter/`, beside the merged weights in `model/`.

    Args:
        config: the run's configuration, for example of a recipe's `finetune` form.
        forward_step_func: as `pretrain` takes it.
        callbacks: as `pretrain` takes them.
        pre_wrap_hooks: as `pretrain` takes them; they see the trained weights.

    Returns:
        The state of the run, with its progress and `log_history`.

    Raises:
        ConfigError: when neither of the two is set, or the model is another one than the weights'.
        MissingWeightsError: when nothing that could be loaded is there; also a FileNotFoundError.
    """
    if config.checkpoint.pretrained_checkpoint is None and config.checkpoint.load is None:
        raise ConfigError(
            "finetune takes weights to start from; set checkpoint.pretrained_checkpoint (a Hugging Face folder, a run "
            "or a checkpoint) or checkpoint.load."
        )
    config = typed_copy(config)
    config.checkpoint.finetune = True
    return pretrain(config, forward_step_func, callbacks, pre_wrap_hooks=pre_wrap_hooks)
