"""A subclass's methods are called in the order, and with the arguments, of Hugging Face's Trainer."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from onstep import Trainer
from tests.support.small_models import arguments, regression_rows
from tests.trainer.test_user_code_matches_transformers import Model

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:.*lr_scheduler.step.*:UserWarning")

NAMES = (
    "_hp_search_setup",
    "_load_from_checkpoint",
    "_issue_warnings_after_load",
    "_inner_training_loop",
    "_load_callback_state",
    "create_optimizer",
    "create_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "get_batch_samples",
    "_track_num_input_tokens",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_learning_rate",
    "_maybe_log_save_evaluate",
    "_evaluate",
    "_report_to_hp_search",
    "_determine_best_metric",
    "_save_checkpoint",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_finalize_training",
    "_load_best_model",
    "_finish_current_push",
)


def shown(value: object) -> object:
    """What two libraries have in common of an argument."""
    if isinstance(value, (str, os.PathLike)):
        return os.path.basename(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Number) or (isinstance(value, Tensor) and value.ndim == 0):
        return "number"
    if isinstance(value, dict):
        return sorted(key for key in value if key in ("eval_loss", "eval_runtime"))
    return "model" if isinstance(value, nn.Module) else "object"


def recording(base: type, calls: list[Any], names: tuple[str, ...] = NAMES) -> Any:
    """A subclass that notes each call of these methods."""

    def method(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_final = name == "_save" and not os.path.basename(str(args[0])).startswith("checkpoint-")
            if not is_final:  # Onstep writes the final weights too
                calls.append((name, *map(shown, args), {key: shown(value) for key, value in kwargs.items()}))
            return getattr(super(cls, self), name)(*args, **kwargs)

        return call

    cls = type("Mine", (base,), {name: method(name) for name in names})
    return cls


OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "include_num_input_tokens_seen": "all",
    "report_to": "none",
    "disable_tqdm": True,
}


def sequences(base: type, directory: Path) -> tuple[list[Any], list[Any], list[float]]:
    """The calls of a training over two epochs, and of one that continues from step 2; the losses of the second."""
    first: list[Any] = []
    second: list[Any] = []
    args = arguments(directory, **OPTIONS, num_train_epochs=2)
    if base is transformers.Trainer:
        args = transformers.TrainingArguments(
            str(directory / "run"),
            **OPTIONS,
            num_train_epochs=2,
            use_cpu=True,
            per_device_eval_batch_size=4,
            learning_rate=0.05,
            train_sampling_strategy="sequential",
        )
    for calls in (first, second):
        rows = regression_rows(6)
        trainer = recording(base, calls)(Model(), args, train_dataset=rows, eval_dataset=rows)
        trainer.train(None if calls is first else str(directory / "run" / "checkpoint-2"))
    return first, second, [record["loss"] for record in trainer.state.log_history if "loss" in record]


def in_common_order(calls: list[Any]) -> list[Any]:
    """The calls without those that Onstep makes at another time.

    Callbacks are restored after the optimizer is made; the generators before the first step, in place of after its
    batches are read; and the last step is saved after the end of its epoch.
    """
    last = max(index for index, one in enumerate(calls) if one[0] == "_determine_best_metric")
    return [one for one in calls[: last + 1] if one[0] not in ("_load_callback_state", "_load_rng_state")]


def test_methods_are_called_in_the_order_and_with_the_arguments_of_transformers(tmp_path: Path) -> None:
    first, second, losses = sequences(Trainer, tmp_path / "ours")
    their_first, their_second, their_losses = sequences(transformers.Trainer, tmp_path / "theirs")
    for calls, theirs in ((first, their_first), (second, their_second)):
        assert sorted(calls, key=repr) == sorted(theirs, key=repr)
        assert in_common_order(calls) == in_common_order(theirs)
    assert [one[0] for one in second][:3] == ["_hp_search_setup", "_load_from_checkpoint", "_issue_warnings_after_load"]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(their_losses))
