"""What callbacks and overrides of Hugging Face's users change in mid-training changes the same here: loss for loss."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from onstep import CallbackManager, Trainer, TrainerCallback
from tests.support.small_models import arguments, regression_rows
from tests.support.small_runs import TinyModel, run, small_state

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning", "ignore:.*lr_scheduler.step.*:UserWarning")

Callback = transformers.TrainerCallback


class Model(nn.Module):
    """Two layers, of which the second counts half in training mode: dropout without chance."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(x))
        logits = self.second(hidden * 0.5 if self.training else hidden).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@dataclass
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    methods: dict[str, Any] = field(default_factory=dict)
    """Of a subclass of the Trainer; each receives the base class first."""
    made: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the constructor."""
    rows: int = 12


def at(step: int, event: str, action: Callable[..., Any]) -> Any:
    """A callback that calls `action(args, state, control, **kwargs)` at an event after so many steps."""

    def act(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return action(args, state, control, **kwargs) if state.global_step == step else None

    return type("At", (Callback,), {event: act})()


def sets(name: str, value: Any) -> Callable[..., None]:
    def action(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        owner = control if name.startswith("should_") else state if name in ("max_steps",) else args
        setattr(owner, name, value)

    return action


def evaluates_on_the_way(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
    model.eval()


def freezes(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
    model.first.requires_grad_(False)


def thaws(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
    model.first.requires_grad_(True)


def sets_rate(args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.003


def sets_decay(args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5


def interrupts(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def sets_betas(args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["betas"] = (0.5, 0.5)


class Adds(Callback):
    """Adds a parameter to the optimizer in mid-training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            model.extra = nn.Parameter(torch.zeros(()))
            optimizer.add_param_group({"params": [model.extra], "lr": 0.01, "weight_decay": 0.0})
            scheduler = kwargs["lr_scheduler"]
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs.append(0.01)
                scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])


class ClearsAdam(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            kwargs["optimizer"].state.clear()


class ScalesGradients(Callback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].first.parameters():
            parameter.grad.mul_(0.0)


class EditsWeights(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in kwargs["model"].parameters():
                parameter.clamp_(-0.2, 0.2)


def loss_in_eval(base: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    found = base.compute_loss(self, model, inputs, *args, **kwargs)
    model.eval()
    return found


def step_in_eval(base: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    found = base.training_step(self, model, inputs, *args, **kwargs)
    model.eval()
    return found


def loss_in_inner_eval(base: Any, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    model.eval()
    return base.compute_loss(self, model, inputs, *args, **kwargs)


def evaluates_without_training(base: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = base.evaluate(self, *args, **kwargs)
    self.model.train(False)
    return found


def prediction_in_train(base: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    model.train()
    return base.prediction_step(self, model, *args, **kwargs)


def metrics_with_inputs(prediction: Any) -> dict[str, float]:
    return {"inputs": float(torch.as_tensor(prediction.inputs).double().sum())}


EVAL = {"eval_strategy": "steps", "eval_steps": 2}

CASES = {
    "plain": Case(),
    "eval in a callback": Case(callbacks=[at(2, "on_step_end", evaluates_on_the_way)]),
    "eval at the beginning": Case(callbacks=[at(0, "on_train_begin", evaluates_on_the_way)]),
    "eval at step begin": Case(callbacks=[at(2, "on_step_begin", evaluates_on_the_way)]),
    "eval in on_log": Case(callbacks=[at(2, "on_log", evaluates_on_the_way)]),
    "eval between micro-batches": Case(
        {"gradient_accumulation_steps": 2}, [at(1, "on_substep_end", evaluates_on_the_way)]
    ),
    "eval in compute_loss": Case(methods={"compute_loss": loss_in_eval}),
    "eval before compute_loss": Case(methods={"compute_loss": loss_in_inner_eval}),
    "eval in training_step": Case({"gradient_accumulation_steps": 2}, methods={"training_step": step_in_eval}),
    "train(False) in evaluate": Case(EVAL, methods={"evaluate": evaluates_without_training}),
    "train() in prediction_step": Case(EVAL, methods={"prediction_step": prediction_in_train}),
    "freezing": Case(callbacks=[at(3, "on_step_end", freezes), at(6, "on_step_end", thaws)]),
    "freezing at the start": Case(callbacks=[at(0, "on_train_begin", freezes), at(3, "on_step_end", thaws)]),
    "learning rate at step end": Case(callbacks=[at(3, "on_step_end", sets_rate)]),
    "learning rate at step begin": Case(callbacks=[at(3, "on_step_begin", sets_rate)]),
    "learning rate, constant": Case({"lr_scheduler_type": "constant"}, [at(3, "on_step_end", sets_rate)]),
    "learning rate, cosine": Case({"lr_scheduler_type": "cosine"}, [at(3, "on_step_begin", sets_rate)]),
    "weight decay": Case(callbacks=[at(3, "on_step_end", sets_decay)]),
    "betas": Case(callbacks=[at(3, "on_step_end", sets_betas)]),
    "a group more": Case(callbacks=[Adds()]),
    "cleared state": Case(callbacks=[ClearsAdam()]),
    "scaled gradients": Case(callbacks=[ScalesGradients()]),
    "edited weights": Case(callbacks=[EditsWeights()]),
    "logging_steps": Case({"logging_steps": 2}, [at(4, "on_step_end", sets("logging_steps", 3))]),
    "eval_steps": Case(EVAL, [at(4, "on_step_end", sets("eval_steps", 3))]),
    "should_log": Case({"logging_steps": 4}, [at(3, "on_step_end", sets("should_log", True))]),
    "should_not_log": Case(callbacks=[at(3, "on_step_end", sets("should_log", False))]),
    "should_evaluate": Case({"eval_strategy": "no"}, [at(3, "on_step_end", sets("should_evaluate", True))]),
    "should_not_evaluate": Case(EVAL, [at(4, "on_step_end", sets("should_evaluate", False))]),
    "should_training_stop": Case(callbacks=[at(5, "on_step_end", sets("should_training_stop", True))]),
    "stop at step begin": Case(callbacks=[at(5, "on_step_begin", sets("should_training_stop", True))]),
    "stop at log": Case(callbacks=[at(5, "on_log", sets("should_training_stop", True))]),
    "should_epoch_stop": Case(callbacks=[at(4, "on_step_end", sets("should_epoch_stop", True))]),
    "epoch stop at step begin": Case(callbacks=[at(4, "on_step_begin", sets("should_epoch_stop", True))]),
    "max_steps": Case(callbacks=[at(4, "on_step_end", sets("max_steps", 7))]),
    "max_grad_norm 0": Case({"max_grad_norm": 0.0}),
    "batch size in a callback": Case(callbacks=[at(3, "on_step_end", sets("per_device_train_batch_size", 4))]),
    "learning_rate argument in a callback": Case(callbacks=[at(3, "on_step_end", sets("learning_rate", 1.0))]),
    "weight_decay argument in a callback": Case(callbacks=[at(3, "on_step_end", sets("weight_decay", 0.9))]),
    "num_train_epochs in a callback": Case(callbacks=[at(3, "on_step_end", sets("num_train_epochs", 1))]),
    "label_names": Case({"label_names": ["labels"], **EVAL}),
    "remove_unused_columns": Case({"remove_unused_columns": False}),
    "include_for_metrics": Case(
        {**EVAL, "include_for_metrics": ["inputs"]}, made={"compute_metrics": metrics_with_inputs}
    ),
    "early stopping": Case(
        {**EVAL, "load_best_model_at_end": False, "metric_for_best_model": "loss", "learning_rate": 0.5},
        [transformers.EarlyStoppingCallback(1)],
    ),
    "no drop last": Case({"dataloader_drop_last": True}, rows=13),
    "eval_accumulation": Case({**EVAL, "eval_accumulation_steps": 1}),
}

KEYS = ("step", "epoch", "loss", "eval_loss", "eval_inputs")


def records(base: Any, case: Case, args: Any) -> list[dict[str, float]]:
    methods = {name: partialmethod(partial(function, base)) for name, function in case.methods.items()}
    cls: Any = type("Own", (base,), methods)
    rows = regression_rows(case.rows)
    options = {"default_callbacks": False} if base is Trainer else {}
    trainer = cls(
        Model(), args, train_dataset=rows, eval_dataset=rows[:6], callbacks=list(case.callbacks), **case.made, **options
    )
    trainer.train()
    found = [{key: record[key] for key in KEYS if key in record} for record in trainer.state.log_history]
    return [record for record in found if {"loss", "eval_loss"} & set(record)]


@pytest.mark.parametrize("name", CASES)
def test_a_change_by_user_code_is_that_under_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    options = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        **case.options,
    }
    expected = records(transformers.Trainer, case, transformers.TrainingArguments(str(tmp_path / "theirs"), **options))
    found = records(Trainer, case, arguments(tmp_path, **options))
    assert len(found) == len(expected), f"{found}\n{expected}"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_the_log_shows_the_rate_that_a_callback_has_set_and_a_resume_keeps_it(tmp_path: Path) -> None:
    """A decay lasts, as under transformers; a rate until the schedule writes the next one."""

    def trained(name: str, *callbacks: Any) -> Any:
        options = {"per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 4, "learning_rate": 0.05}
        args = arguments(tmp_path, output_dir=str(tmp_path / name), num_train_epochs=2, **options)
        trainer = Trainer(Model(), args, train_dataset=regression_rows(12), callbacks=list(callbacks))
        trainer.train()
        return trainer

    user = [at(4, "on_step_end", sets_rate), at(2, "on_step_end", sets_decay)]
    whole = trained("whole", *user)
    with pytest.raises(KeyboardInterrupt):
        trained("resumed", *user, at(5, "on_step_begin", interrupts))
    resumed = trained("resumed")
    rates, again = (
        [record["learning_rate"] for record in one.state.log_history if "loss" in record] for one in (whole, resumed)
    )
    assert rates[4] == 0.003
    assert rates[:4] + rates[5:] == pytest.approx([0.05 * (1 - step / 12) for step in (0, 1, 2, 3, *range(5, 12))])
    assert again == rates
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.5]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


class WithNorm(Model):
    """The same with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(self.norm(x), labels)


class LeavesEvaluationMode(TrainerCallback):
    """Keeps the norm frozen from the second epoch on; at some steps, generates without switching back."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.norm.train(state.global_step < 6)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in (2, 8):
            model.eval()


def test_a_model_left_in_evaluation_mode_keeps_its_frozen_norms_and_resumes_exactly(tmp_path: Path) -> None:
    def trained(name: str, *callbacks: Any) -> Any:
        options = {"per_device_train_batch_size": 2, "save_steps": 4, "num_train_epochs": 2}
        args = arguments(tmp_path, output_dir=str(tmp_path / name), **options)
        rows = regression_rows(12)
        Trainer(model := WithNorm(), args, train_dataset=rows, callbacks=[LeavesEvaluationMode(), *callbacks]).train()
        return model

    modes: list[tuple[bool, bool]] = []
    model = trained("whole", recorded_modes(modes))
    assert modes == [(True, True)] * 6 + [(True, False)] * 6
    with pytest.raises(KeyboardInterrupt):
        trained("resumed", at(9, "on_step_begin", interrupts))
    again = trained("resumed").state_dict()
    assert model.norm.num_batches_tracked == 6
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name]), name


def test_train_goes_on_in_training_mode_after_a_callback_has_left_it() -> None:
    modes: list[tuple[bool, bool]] = []
    manager, model = CallbackManager(), TinyModel()
    manager.register("on_train_start", lambda context: model.embed.eval())
    manager.register("on_step_begin", lambda context: model.eval() if context.state.train_state.step == 1 else None)
    manager.register("on_optimizer_step", lambda context: modes.append((model.training, model.embed.training)))
    run(small_state(train_iters=3), manager, model=model)
    assert modes == [(True, False)] * 3


def recorded_modes(modes: list[tuple[bool, bool]]) -> Any:
    def note(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        modes.append((model.training, model.norm.training))

    return type("Notes", (Callback,), {"on_pre_optimizer_step": lambda self, *a, **k: note(*a, **k)})()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_grad_norm", 0.01, "start another training with it"),
        ("gradient_accumulation_steps", 2, "start another training with it"),
        ("label_smoothing_factor", 0.1, "start another training with it"),
        ("eval_strategy", "epoch", r"set control\.should_evaluate"),
        ("learning_rate", 0.7, "set 'lr' in the optimizer's param_groups"),
    ],
)
def test_an_argument_that_is_changed_after_it_was_read_is_named(
    name: str, value: Any, remedy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under transformers, some of them have an effect."""
    args = arguments(tmp_path, per_device_train_batch_size=2, logging_steps=1)
    Trainer(Model(), args, train_dataset=regression_rows(), callbacks=[at(2, "on_step_end", sets(name, value))]).train()
    assert re.search(rf"args\.{name} was changed from .* to {value!r} during.*no effect; {remedy}", caplog.text)
