"""Defines `TrainState`, the progress of a run, which is saved with every checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any

logger: logging.Logger = logging.getLogger(__name__)

StateDict = dict[str, Any]
"""The result of a `state_dict()`: tensors, numbers, strings, and containers of these."""

_BRIDGE_KEYS = {
    "step": "int64",
    "consumed_train_samples": "int64",
    "skipped_train_samples": "int64",
    "consumed_valid_samples": "int64",
    "floating_point_operations_so_far": "float64",
    "do_train": "bool",
    "do_valid": "bool",
    "do_test": "bool",
}
"""The fields of Megatron Bridge's TrainState, stored in its checkpoints as 0-d tensors of these types."""


@dataclass
class TrainState:
    """Counters of a run. ``transformers``' ``TrainerState`` is a view of it (`onstep.events.RunState`).

    The data position is ``(epoch, samples_in_epoch)``; values changed during the run (learning-rate factor, intervals,
    limits) are in ``overrides``.
    """

    step: int = 0
    """Optimizer steps completed."""
    epoch: int = 0
    """Epochs completed."""
    samples_in_epoch: int = 0
    """Samples read in the current epoch, over all ranks."""
    steps_in_epoch: int = 0
    """Optimizer steps completed in the current epoch."""
    consumed_train_samples: int = 0
    """Samples trained on, over all ranks."""
    skipped_train_samples: int = 0
    """Samples read without training on them."""
    consumed_valid_samples: int = 0
    """Samples evaluated, over all ranks."""
    consumed_tokens: int = 0
    """Tokens with a label trained on, over all ranks; updated at every logged step."""
    floating_point_operations_so_far: float = 0.0
    """Floating-point operations of the training."""
    best_metric: float | None = None
    """Best value of `validation.metric_for_best_model` so far; `best_step` is its step."""
    best_step: int | None = None
    """The step with the best metric; None while there is none."""
    best_model_checkpoint: str | None = None
    """Directory of the checkpoint of the best step, or of the previous best while the best step has none."""
    do_train: bool = False
    """Whether there is training data."""
    do_valid: bool = False
    """Whether there is validation data."""
    do_test: bool = False
    """Whether there is test data."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values that were set during the run, by key."""
    skip_list: list[list[int]] = field(default_factory=list)
    """`[epoch, sample id]` of samples skipped because of an anomaly; they are skipped from the next epoch on."""
    num_skips: int = 0
    """Steps whose update was skipped because of an anomaly."""
    num_rollbacks: int = 0
    """Number of rollbacks to a checkpoint."""
    num_input_tokens_seen: int | None = None
    """Input tokens over all ranks, with Hugging Face's `include_num_input_tokens_seen`; None: not counted."""
    user_attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes that callbacks set on Hugging Face's view. Plain values are saved, those of rank 0."""

    def __post_init__(self) -> None:
        self._unsaved: set[str] = set()

    def state_dict(self) -> StateDict:
        """All fields; the fields of Megatron Bridge's TrainState are 0-d tensors, as there."""
        import torch  # not at the top: configuration and events use it without torch

        state = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "user_attributes"}
        if self.user_attributes:
            state["user_attributes"] = self._plain_attributes()
        for key, dtype in _BRIDGE_KEYS.items():
            state[key] = torch.tensor(state[key], dtype=getattr(torch, dtype))
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; fields that are missing in it are left unchanged.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            KeyError: if one of Megatron Bridge's fields is missing.
        """
        for key in _BRIDGE_KEYS:
            setattr(self, key, state_dict[key].item())
        for one in fields(self):
            if one.name in state_dict and one.name not in _BRIDGE_KEYS:
                setattr(self, one.name, state_dict[one.name])
        self.user_attributes = dict(state_dict.get("user_attributes", {}))

    def _plain_attributes(self) -> dict[str, Any]:
        """The user's attributes that can be saved; the others are named once."""
        plain = {name: value for name, value in self.user_attributes.items() if _is_plain(value)}
        left_out = sorted(self.user_attributes.keys() - plain.keys() - self._unsaved)
        if left_out:
            self._unsaved.update(left_out)
            logger.warning(
                "checkpoints do not include state.%s: only numbers, text, None, and lists and dictionaries of them are "
                "saved; set such a value in place of an object",
                ", state.".join(left_out),
            )
        return plain


def _is_plain(value: object) -> bool:
    """Whether a value is the same after it is written as JSON."""
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    return (
        value is None or type(value) in (bool, int, float, str) or (type(value) is list and all(map(_is_plain, value)))
    )
