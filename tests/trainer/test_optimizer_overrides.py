"""Subclasses that override how Hugging Face's Trainer makes its optimizer and scheduler train as under Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import Trainer, TrainerCallback
from onstep.errors import ConfigError
from tests.support.small_models import Regression, arguments, causal_rows, qwen, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

Mixin = Callable[[Any], Any]
"""Derives a class from either Trainer, as a script does whose import line changes."""


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights, without biases of keys: a softmax does not see them, so their gradients are rounding."""
    return {name: value.clone() for name, value in model.state_dict().items() if not name.endswith("k_proj.bias")}


def both(directory: Path, mixin: Mixin, **options: Any) -> tuple[Any, Any]:
    """The same subclass under Hugging Face and under Onstep, each trained on the same rows from the same weights."""
    values = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
        **options,
    }
    theirs = mixin(transformers.Trainer)(
        qwen(),
        transformers.TrainingArguments(str(directory / "theirs"), report_to="none", disable_tqdm=True, **values),
        train_dataset=causal_rows(16),
        eval_dataset=causal_rows(4),
    )
    theirs.remove_callback(transformers.PrinterCallback)
    ours = mixin(Trainer)(
        qwen(),
        arguments(directory, **values),
        train_dataset=causal_rows(16),
        eval_dataset=causal_rows(4),
        default_callbacks=False,
    )
    theirs.train()
    ours.train()
    return theirs, ours


def check_same(theirs: Any, ours: Any, steps: int = 6) -> None:
    """Losses, logged learning rates and final weights agree."""
    logs = [[record for record in one.state.log_history if "loss" in record] for one in (theirs, ours)]
    assert len(logs[0]) == len(logs[1]) == steps
    for key, tolerance in (("loss", 1e-5), ("learning_rate", 1e-9)):
        expected, found = ([record[key] for record in records] for records in logs)
        assert found == pytest.approx(expected, rel=tolerance, abs=1e-15), key
    expected, found = weights_of(theirs.model), weights_of(ours.model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def groups_by_name(base: Any) -> Any:
    class Projector(base):
        """As LLaVA's Trainer: a group with a learning rate of its own, and decay by the names of parameters."""

        def create_optimizer(self) -> Any:
            opt_model = self.model
            if self.optimizer is None:
                decayed = self.get_decay_parameter_names(opt_model)
                named = [(name, p) for name, p in opt_model.named_parameters() if p.requires_grad]
                head = [name for name, _ in named if "mlp" in name]
                groups = [
                    {
                        "params": [p for n, p in named if (n in head) is is_head and (n in decayed) is decays],
                        "weight_decay": self.args.weight_decay if decays else 0.0,
                        **({"lr": 0.1} if is_head else {}),
                    }
                    for is_head in (False, True)
                    for decays in (True, False)
                ]
                cls, keywords = base.get_optimizer_cls_and_kwargs(self.args)
                self.optimizer = cls([group for group in groups if group["params"]], **keywords)
            return self.optimizer

    return Projector


def own_schedule(base: Any) -> Any:
    class Steps(base):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            optimizer = self.optimizer if optimizer is None else optimizer
            rate = lambda step: 1 - step / (2 * num_training_steps)  # noqa: E731
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return self.lr_scheduler

    return Steps


def longer_schedule(base: Any) -> Any:
    class Longer(base):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            return super().create_scheduler(num_training_steps * 2, optimizer)

    return Longer


def refined_groups(base: Any) -> Any:
    class Refined(base):
        """Changes what Hugging Face made."""

        def create_optimizer(self, model: Any = None) -> Any:
            optimizer = super().create_optimizer(model)
            optimizer.param_groups[0]["lr"] = 0.03
            optimizer.param_groups[1]["weight_decay"] = 0.5
            return optimizer

    return Refined


def other_class(base: Any) -> Any:
    class Other(base):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.NAdam, {"lr": args.learning_rate, "momentum_decay": 0.01}

    return Other


def decay_everything(base: Any) -> Any:
    class Decays(base):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name, _ in model.named_parameters()]

    return Decays


OVERRIDES: dict[str, Mixin] = {
    "create_optimizer": groups_by_name,
    "create_optimizer, with super()": refined_groups,
    "create_scheduler": own_schedule,
    "create_scheduler, with super()": longer_schedule,
    "get_optimizer_cls_and_kwargs": other_class,
    "get_decay_parameter_names": decay_everything,
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_trains_as_under_hugging_face(tmp_path: Path, name: str) -> None:
    check_same(*both(tmp_path, OVERRIDES[name], warmup_steps=2))


def test_groups_with_a_smallest_rate_keep_their_own_share_of_it(tmp_path: Path) -> None:
    """A minimum of a tenth is a tenth of the rate of each group."""
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.001}}
    theirs, ours = both(tmp_path, groups_by_name, **schedule)
    check_same(theirs, ours)
    rates = [[group["lr"] for group in one.optimizer.param_groups] for one in (theirs, ours)]
    assert rates[1] == pytest.approx(rates[0], rel=1e-9)


def test_an_override_of_both_is_called_once_with_the_number_of_steps(tmp_path: Path) -> None:
    """Hugging Face 4.x calls it, and the documentation of 5.x recommends it, but its Trainer does not call it."""
    asked: list[int] = []

    class Both(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            asked.append(num_training_steps)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    trainer = Both(Regression(), arguments(tmp_path), train_dataset=regression_rows(12), default_callbacks=False)
    trainer.train()
    assert asked == [3]
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.get_learning_rates() == [0.1 * 0.5**3]


def test_a_method_may_be_assigned_to_the_object(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(12), default_callbacks=False)
    made: list[Any] = []

    def create() -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(trainer.model.parameters(), lr=0.1))
        return made[-1]

    trainer.create_optimizer = create  # type: ignore[method-assign, assignment]
    trainer.train()
    assert trainer.optimizer is made[0]
    assert len(made) == 1


def test_an_optimizer_made_by_hand_is_the_one_that_trains(tmp_path: Path) -> None:
    trainer = Trainer(
        Regression(), arguments(tmp_path, max_steps=2), train_dataset=regression_rows(12), default_callbacks=False
    )
    by_hand = trainer.create_optimizer()
    assert trainer.optimizer is by_hand
    assert isinstance(by_hand, torch.optim.AdamW)
    assert trainer.get_learning_rates() == [0.05, 0.05]
    by_hand.param_groups[0]["lr"] = 0.5
    seen: list[list[float]] = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append([group["lr"] for group in kwargs["optimizer"].param_groups])

    trainer.add_callback(Rates())
    trainer.train()
    assert trainer.optimizer is by_hand
    assert seen == [[0.5, 0.05], [0.25, 0.025]]


def test_both_made_by_hand(tmp_path: Path) -> None:
    trainer = Trainer(
        Regression(), arguments(tmp_path, max_steps=4), train_dataset=regression_rows(16), default_callbacks=False
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    trainer.train()
    assert trainer.get_learning_rates() == pytest.approx([0.0, 0.0])


def test_a_second_training_continues_with_the_state_of_the_first(tmp_path: Path) -> None:
    def twice(base: Any) -> Any:
        class Twice(base):
            def train(self, *args: Any, **kwargs: Any) -> Any:
                super().train(*args, **kwargs)
                return super().train(*args, **kwargs)

        return Twice

    for number, mixin in enumerate((lambda base: base, groups_by_name, refined_groups)):
        theirs, ours = both(tmp_path / str(number), lambda base, mixin=mixin: twice(mixin(base)))
        found, expected = weights_of(ours.model), weights_of(theirs.model)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=f"{number} {name}")


def test_a_model_of_model_init_gets_an_optimizer_of_its_own_each_time(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = Own(
        None,
        arguments(tmp_path, max_steps=2),
        train_dataset=regression_rows(8),
        model_init=Regression,
        default_callbacks=False,
    )
    finals = []
    for _ in range(2):
        trainer.train()
        finals.append(weights_of(trainer.model))
        assert trainer.optimizer.param_groups[0]["params"][0] is trainer.model.layer.weight
    torch.testing.assert_close(finals[0], finals[1])


def test_the_state_of_a_users_optimizer_and_schedule_is_restored(tmp_path: Path) -> None:
    class Own(groups_by_name(own_schedule(Trainer))):  # type: ignore[misc]
        pass

    def run(directory: Path, **options: Any) -> Any:
        return Own(
            qwen(),
            arguments(directory, **{"max_steps": 6, "save_steps": 3, **options}),
            train_dataset=causal_rows(24),
            default_callbacks=False,
        )

    whole = run(tmp_path / "whole")
    whole.train()

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    cut = run(tmp_path / "cut")
    cut.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = run(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.get_learning_rates() == whole.get_learning_rates()
    torch.testing.assert_close(weights_of(resumed.model), weights_of(whole.model), rtol=0, atol=0)


def test_a_method_that_makes_nothing_is_named(tmp_path: Path) -> None:
    class Forgets(Trainer):
        def create_optimizer(self) -> Any:
            torch.optim.SGD(self.model.parameters(), lr=0.1)

    trainer = Forgets(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    with pytest.raises(ConfigError, match=r"Forgets.create_optimizer returns None and sets no self.optimizer"):
        trainer.train()


def test_parameters_are_not_counted_before_there_is_a_model(tmp_path: Path) -> None:
    trainer = Trainer(args=arguments(tmp_path), model_init=Regression, default_callbacks=False)
    with pytest.raises(ConfigError, match="has no model yet: model_init runs when training starts"):
        trainer.get_num_trainable_parameters()


def test_what_the_optimizer_has_is_shown_as_by_hugging_face(tmp_path: Path) -> None:
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), default_callbacks=False)
    theirs = transformers.Trainer(
        Regression(), transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", learning_rate=0.05)
    )
    assert trainer.get_num_trainable_parameters() == theirs.get_num_trainable_parameters() == 4
    for one in (trainer, theirs):
        with pytest.raises(ValueError, match="optimizer is None"):
            one.get_learning_rates()
        one.create_optimizer()
    assert trainer.get_learning_rates() == theirs.get_learning_rates()
    weight = trainer.model.layer.weight  # type: ignore[union-attr, operator]
    assert trainer.get_optimizer_group(weight)["params"] == [weight]
    assert [[p.shape for p in group] for group in trainer.get_optimizer_group()] == [
        [p.shape for p in group] for group in theirs.get_optimizer_group()
    ]


class Zoo(torch.nn.Module):
    """Parameters of all kinds of names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(3)
        self.first_norm = torch.nn.BatchNorm1d(3)
        self.bn1 = torch.nn.BatchNorm1d(3)
        self.ln = torch.nn.LayerNorm(3)
        self.layer = torch.nn.Linear(3, 3)
        self.enormous = torch.nn.Linear(3, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.RMSNorm(3))])


def test_weight_decay_applies_to_the_parameters_of_hugging_face(tmp_path: Path) -> None:
    model = Zoo()
    theirs = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), report_to="none"))
    named = dict(model.named_parameters())
    expected = {name for name in theirs.get_decay_parameter_names(model) if name in named}
    trainer = Trainer(model, arguments(tmp_path, weight_decay=0.5), default_callbacks=False)
    assert set(trainer.get_decay_parameter_names(model)) == expected
    assert expected >= {"bn1.weight", "scale", "enormous.weight"}
    trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in named.items()}
    groups = {group["weight_decay"]: group["params"] for group in trainer.optimizer.param_groups}
    assert {names[id(parameter)] for parameter in groups[0.5]} == expected
