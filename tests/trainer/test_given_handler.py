"""A `CallbackHandler` that is assigned to a Trainer, compared with the real `transformers.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from onstep import CallbackHandler, Trainer, TrainerCallback
from onstep.errors import ConfigError
from tests.support.small_models import Regression, arguments, quiet, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def theirs(directory: Path, **options: Any) -> transformers.TrainingArguments:
    values: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "learning_rate": 0.05,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
    }
    return transformers.TrainingArguments(str(directory), **{**values, **options})


def with_a_reference(trainer: type[Any], handler: type[Any], seen: list[Any], *, by_event: bool) -> type[Any]:
    """A Trainer whose handler passes another model to the callbacks, as TRL's of BEMA does."""

    class WithReference(handler):
        def __init__(self, callbacks: Any, model: Any, reference: Any, *others: Any) -> None:
            super().__init__(callbacks, model, *others)
            self.reference = reference

        def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if by_event:
                return super().call_event(event, args, state, control, **kwargs)
            for one in self.callbacks:
                given = {"model": self.model, "optimizer": self.optimizer, "reference": self.reference, **kwargs}
                control = getattr(one, event)(args, state, control, **given) or control
            return control

        def on_step_end(self, args: Any, state: Any, control: Any) -> Any:
            if by_event:
                seen.append(("handler", state.global_step))
            return super().on_step_end(args, state, control)

    class Mine(trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            old = self.callback_handler
            self.callback_handler = WithReference(
                old.callbacks, self.model, "reference", self.processing_class, self.optimizer, self.lr_scheduler
            )
            assert type(self.callback_handler) is WithReference

    return Mine


@pytest.mark.parametrize("by_event", [False, True])
def test_a_handler_that_is_assigned_is_what_the_run_calls(tmp_path: Path, by_event: bool) -> None:
    seen: list[Any] = []

    def notes(base: type[Any]) -> type[Any]:
        class Notes(base):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                here = kwargs["model"] is not None, kwargs["optimizer"] is not None, kwargs.get("reference")
                seen.append(("step", state.global_step, *here))
                control.should_training_stop = state.global_step == 3

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append(("end", state.global_step))

        return Notes

    def trained(base: type[Any], callback: type[Any], handler: type[Any], args: Any) -> list[Any]:
        subclass = with_a_reference(base, handler, seen, by_event=by_event)
        trainer = subclass(Regression(), args, train_dataset=regression_rows())
        trainer.add_callback(notes(callback))
        seen.clear()
        trainer.train()
        return list(seen)

    ours = trained(Trainer, TrainerCallback, CallbackHandler, arguments(tmp_path / "a", max_steps=9))
    there = transformers.trainer_callback.CallbackHandler
    reference = trained(transformers.Trainer, transformers.TrainerCallback, there, theirs(tmp_path / "b", max_steps=9))
    assert ours == reference
    assert len(ours) == (7 if by_event else 4)


def test_only_a_callback_handler_can_be_the_handler(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows())
    own = trainer.callback_handler
    with pytest.raises(ConfigError, match=r"callback_handler must be a CallbackHandler, got a list; derive it from"):
        trainer.callback_handler = []  # type: ignore[assignment]
    trainer.callback_handler = CallbackHandler(own.callbacks, Regression(), None, None, None)
    assert trainer.callback_handler is not own
    assert trainer.callback_handler.model is trainer.model
    trainer.callback_handler = own
    assert trainer.callback_handler is own
