"""Which callbacks a Trainer has, and how they come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import CallbackManager, DefaultMetrics, InfoCallback, ProgressCallback, Trainer, TrainerCallback
from tests.support.small_models import Regression, arguments, regression_rows


class Counts(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1


class Special(Counts):
    pass


def make(tmp_path: Path, **options: Any) -> Trainer:
    return Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(), **options)


def kinds(trainer: Trainer) -> list[type]:
    return [type(callback) for callback in trainer.callback_manager.callbacks]


def test_the_defaults_come_first_and_a_list_adds_to_them(tmp_path: Path) -> None:
    defaults = [DefaultMetrics, ProgressCallback, InfoCallback]
    assert kinds(make(tmp_path)) == defaults
    assert kinds(make(tmp_path, callbacks=[Counts(), Special])) == [*defaults, Counts, Special]


def test_an_instance_of_a_defaults_class_takes_its_place(tmp_path: Path) -> None:
    mine = InfoCallback(verbose=True)
    trainer = make(tmp_path, callbacks=[Counts(), mine])
    assert kinds(trainer) == [DefaultMetrics, ProgressCallback, Counts, InfoCallback]
    assert trainer.callback_manager.callbacks[-1] is mine


def test_the_defaults_can_be_left_out(tmp_path: Path) -> None:
    assert kinds(make(tmp_path, default_callbacks=False)) == []
    assert kinds(make(tmp_path, callbacks=[Counts], default_callbacks=False)) == [Counts]


def test_a_manager_is_completed_and_what_is_registered_later_counts(tmp_path: Path) -> None:
    manager, seen = CallbackManager(), []
    manager.add(Counts())
    trainer = make(tmp_path, callbacks=manager)
    assert trainer.callback_manager is manager
    assert kinds(trainer) == [DefaultMetrics, ProgressCallback, InfoCallback, Counts]
    manager.register("on_step_end", lambda context: seen.append(context.state.train_state.step))
    trainer.train()
    assert seen == [1, 2, 3]


def test_disable_tqdm_prints_rows(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path, disable_tqdm=True))
    (progress,) = [c for c in trainer.callback_manager.callbacks if isinstance(c, ProgressCallback)]
    assert progress.use_tqdm is False


def test_callbacks_are_added_as_classes_or_instances(tmp_path: Path) -> None:
    trainer = make(tmp_path, default_callbacks=False)
    mine = Counts()
    trainer.add_callback(mine)
    trainer.add_callback(Special)
    trainer.train()
    assert kinds(trainer) == [Counts, Special]
    assert [callback.steps for callback in trainer.callback_manager.callbacks] == [3, 3]


def test_pop_takes_the_first_of_a_class_or_that_very_instance_as_in_transformers(tmp_path: Path) -> None:
    """An instance of a derived class is one of the class too."""
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", use_cpu=True)
    for trainer in (transformers.Trainer(Regression(), args), make(tmp_path)):
        callbacks = [Special(), Counts(), Counts()]
        for callback in callbacks:
            trainer.add_callback(callback)
        assert trainer.pop_callback(Counts) is callbacks[0]
        assert trainer.pop_callback(callbacks[2]) is callbacks[2]
        assert trainer.pop_callback(callbacks[2]) is None
        assert trainer.pop_callback(Special) is None
        trainer.remove_callback(Counts)
        assert trainer.pop_callback(Counts) is None


def test_an_instance_that_is_not_there_cannot_be_removed_as_in_transformers(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", use_cpu=True)
    for trainer in (transformers.Trainer(Regression(), args), make(tmp_path, callbacks=[Counts()])):
        trainer.remove_callback(int)
        with pytest.raises(ValueError, match=r"not in list|is not among the callbacks: DefaultMetrics, .*Counts"):
            trainer.remove_callback(Counts())


def test_a_removed_callback_is_not_called_again(tmp_path: Path) -> None:
    mine = Counts()
    trainer = make(tmp_path, callbacks=[mine], default_callbacks=False)
    trainer.train()
    trainer.remove_callback(Counts)
    trainer.remove_callback(Counts)
    trainer.train()
    assert mine.steps == 3


def test_callbacks_get_the_keywords_of_hugging_face_and_the_users_module(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Keywords(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs)

    trainer = make(tmp_path, callbacks=[Keywords()], processing_class="tokens", default_callbacks=False)
    trainer.train()
    keywords = seen[0]
    assert keywords["model"] is trainer.model
    assert keywords["processing_class"] == "tokens"
    assert keywords["trainer"] is trainer
    assert keywords["optimizer"].param_groups
    assert keywords["lr_scheduler"] is not None
    assert keywords["train_dataloader"].num_samples == 12
    assert "eval_dataloader" in keywords


def test_evaluation_events_have_their_loader(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Loader(transformers.TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any) -> None:
            seen.append(len(eval_dataloader))

    make(tmp_path, callbacks=[Loader()], default_callbacks=False).evaluate(regression_rows(6))
    assert seen == [2, 2]


def test_a_scheduler_that_is_a_callback_is_registered_once(tmp_path: Path) -> None:
    class Scheduler(torch.optim.lr_scheduler.ConstantLR, TrainerCallback):
        calls = 0

        def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.calls += 1

    optimizer = torch.optim.SGD((model := Regression()).parameters(), lr=0.1)
    scheduler = Scheduler(optimizer)
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=regression_rows(),
        optimizers=(optimizer, scheduler),
        default_callbacks=False,
    )
    trainer.train()
    trainer.train()
    assert scheduler.calls == 6


@pytest.mark.parametrize("base", [TrainerCallback, transformers.TrainerCallback])
def test_a_control_that_is_returned_is_taken_over(tmp_path: Path, base: type) -> None:
    class Stops(base):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            returned = transformers.TrainerControl()
            returned.should_training_stop = state.global_step == 2
            return returned

    assert make(tmp_path, callbacks=[Stops()], default_callbacks=False).train().global_step == 2
