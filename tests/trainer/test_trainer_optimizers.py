"""The user's own optimizers and schedulers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from onstep import CallbackManager, TrainerCallback
from onstep.errors import ConfigError
from onstep.optim import OptimizerParamScheduler
from tests.support.small_models import Regression, arguments, quiet, regression_rows


def watched(note: Any) -> CallbackManager:
    """Calls `note(param_groups)` before each update."""
    manager = CallbackManager()
    manager.register("on_pre_optimizer_step", lambda context: note(context.optimizer.param_groups))
    return manager


def rates(directory: Path, model: Any, optimizers: Any, **options: Any) -> list[list[float]]:
    """The learning rates of the groups at each of six steps, linear decay without warm-up."""
    seen: list[list[float]] = []
    trainer = quiet(
        model,
        arguments(directory, num_train_epochs=2, weight_decay=0.5, **options),
        regression_rows(12),
        optimizers=optimizers,
        callbacks=watched(lambda groups: seen.append([group["lr"] for group in groups])),
    )
    trainer.train()
    return seen


def test_our_schedule_scales_the_users_own_rates_and_leaves_the_weight_decay_alone(tmp_path: Path) -> None:
    model = Regression()
    groups = [
        {"params": [model.layer.weight], "lr": 0.6, "weight_decay": 0.25},
        {"params": [model.layer.bias], "lr": 0.06, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    seen = rates(tmp_path, model, (optimizer, None))
    assert [pair[0] for pair in seen] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    assert [pair[1] for pair in seen] == pytest.approx([0.06, 0.05, 0.04, 0.03, 0.02, 0.01])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]


def test_the_schedule_starts_again_with_the_users_rate_in_the_next_training(tmp_path: Path) -> None:
    model = Regression()
    seen: list[float] = []
    trainer = quiet(
        model,
        arguments(tmp_path),
        regression_rows(12),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.3), None),
        callbacks=watched(lambda groups: seen.append(groups[0]["lr"])),
    )
    trainer.train()
    trainer.train()
    assert seen == pytest.approx([0.3, 0.2, 0.1, 0.3, 0.2, 0.1])


def test_a_users_scheduler_is_stepped_once_a_step(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen = rates(tmp_path, model, (optimizer, scheduler), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [rate for (rate,) in seen] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])
    assert scheduler.last_epoch == 6


def test_factories_get_the_trainable_parameters_and_the_torch_optimizer(tmp_path: Path) -> None:
    model = Regression()
    model.layer.bias.requires_grad_(False)
    given: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        given.append(parameters)
        return torch.optim.SGD(parameters, lr=0.5)

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    seen = rates(tmp_path, model, (make, halve))
    assert given == [[model.layer.weight]]
    assert [rate for (rate,) in seen] == pytest.approx([0.5 ** (n + 1) for n in range(6)])


def test_a_scheduler_of_ours_is_stepped_by_samples(tmp_path: Path) -> None:
    def ours(optimizer: Any) -> OptimizerParamScheduler:
        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1.0,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=40,
            lr_decay_style="linear",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=40,
            wd_incr_style="constant",
        )

    seen = rates(tmp_path, Regression(), (lambda parameters: torch.optim.SGD(parameters), ours))
    assert [rate for (rate,) in seen] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def groups_of(directory: Path, **optimizer: Any) -> list[tuple[int, float]]:
    seen: list[Any] = []
    quiet(
        Regression(),
        arguments(directory, max_steps=1, weight_decay=0.5, learning_rate=0.3),
        regression_rows(4),
        **optimizer,
        callbacks=watched(
            lambda groups: seen.extend((g["params"][0].ndim, g["weight_decay"], g["lr"]) for g in groups)
        ),
    ).train()
    return seen


def test_a_class_with_keywords_decays_matrices_as_the_arguments_say_unless_it_says_itself(tmp_path: Path) -> None:
    adamw, ours, own = torch.optim.AdamW, {"lr": 0.2}, {"lr": 0.2, "weight_decay": 0.1}
    assert groups_of(tmp_path / "a", optimizer_cls_and_kwargs=(adamw, ours)) == [(2, 0.5, 0.2), (1, 0.0, 0.2)]
    assert groups_of(tmp_path / "b", optimizer_cls_and_kwargs=(adamw, own)) == [(2, 0.1, 0.2)]
    assert groups_of(tmp_path / "c", optimizers=(adamw, None)) == [(2, 0.5, 0.3), (1, 0.0, 0.3)]


def test_without_an_optimizer_the_arguments_say_which(tmp_path: Path) -> None:
    seen: list[Any] = []
    quiet(
        Regression(),
        arguments(tmp_path, max_steps=1, optim="sgd", learning_rate=0.25),
        regression_rows(4),
        callbacks=watched(lambda groups: seen.append((groups[0]["lr"], "momentum" in groups[0]))),
    ).train()
    assert seen == [(0.25, True)]


def test_gradients_are_clipped_for_a_users_optimizer_too(tmp_path: Path) -> None:
    norms: list[float] = []
    model = Regression()
    manager = CallbackManager()

    def note(context: Any) -> None:
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())

    manager.register("on_pre_optimizer_step", note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    args = arguments(tmp_path, max_grad_norm=0.125)
    quiet(model, args, regression_rows(12), optimizers=(optimizer, None), callbacks=manager).train()
    assert norms == pytest.approx([0.125] * 3, rel=1e-4)


def test_the_decay_ends_with_the_run_also_where_epochs_have_a_shorter_last_step(tmp_path: Path) -> None:
    seen: list[float] = []
    quiet(
        Regression(),
        arguments(tmp_path, num_train_epochs=2, learning_rate=0.6),
        regression_rows(9),
        callbacks=watched(lambda groups: seen.append(groups[0]["lr"])),
    ).train()
    assert seen == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_biases_of_stacked_experts_do_not_decay(tmp_path: Path) -> None:
    model = Regression()
    model.layer.register_parameter("expert_bias", torch.nn.Parameter(torch.zeros(2, 3)))
    optimizers: list[Any] = []
    trainer = quiet(
        model,
        arguments(tmp_path, max_steps=1, weight_decay=0.5),
        regression_rows(4),
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.2}),
        callbacks=watched(lambda groups: optimizers.extend((len(g["params"]), g["weight_decay"]) for g in groups)),
    )
    trainer.train()
    assert optimizers == [(1, 0.5), (2, 0.0)]


def test_what_the_configuration_made_is_shown_and_made_anew_by_the_next_training(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, max_steps=2), regression_rows(8))
    assert trainer.optimizer is trainer.lr_scheduler is None
    trainer.train()
    first, schedule = trainer.optimizer, trainer.lr_scheduler
    assert isinstance(schedule, OptimizerParamScheduler)
    assert schedule.optimizer is first
    assert [*first.param_groups[0]["params"]] == [trainer.model.layer.weight]
    trainer.train()
    assert trainer.optimizer is not first
    assert trainer.lr_scheduler is not schedule


def test_an_optimizer_of_the_user_stays_the_users(tmp_path: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = quiet(model, arguments(tmp_path, max_steps=2), regression_rows(8), optimizers=(optimizer, None))
    for _ in range(2):
        trainer.train()
        assert trainer.optimizer is optimizer
        assert isinstance(trainer.lr_scheduler, OptimizerParamScheduler)


def test_an_optimizer_and_a_scheduler_put_in_between_two_trainings_drive_the_next_one(tmp_path: Path) -> None:
    model = Regression()
    seen: list[float] = []
    trainer = quiet(
        model,
        arguments(tmp_path, max_steps=4),
        regression_rows(8),
        callbacks=watched(lambda groups: seen.append(groups[0]["lr"])),
    )
    trainer.train()
    seen.clear()
    trainer.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trainer.lr_scheduler = scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer.train()
    assert (trainer.optimizer, trainer.lr_scheduler) == (optimizer, scheduler)
    assert seen == [0.5, 0.25, 0.125, 0.0625]
    assert "momentum_buffer" in optimizer.state[model.layer.weight]


def test_parameters_that_an_optimizer_lacks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Regression()
    optimizer = torch.optim.SGD([model.layer.weight], lr=0.1)
    quiet(model, arguments(tmp_path), regression_rows(), optimizers=(optimizer, None)).train()
    assert "1 trainable parameters are not in the optimizer and are not trained: layer.bias" in caplog.text


def test_frozen_parameters_are_not_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Regression()
    model.layer.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.layer.weight], lr=0.1)
    quiet(model, arguments(tmp_path), regression_rows(), optimizers=(optimizer, None)).train()
    assert "not in the optimizer" not in caplog.text


def unfreeze(model: Regression) -> None:
    model.layer.bias.requires_grad_(True)


def replace_layer(model: Regression) -> None:
    model.layer = torch.nn.Linear(3, 1)


def replace_weight(model: Regression) -> None:
    model.layer.weight = torch.nn.Parameter(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (unfreeze, "1 trainable parameters are not in the optimizer and are not trained: layer.bias;"),
        (replace_layer, "2 trainable parameters are not in the optimizer and are not trained: layer.weight, layer."),
        (replace_weight, "1 trainable parameters are not in the optimizer and are not trained: layer.weight;"),
    ],
)
def test_parameters_that_the_optimizer_lacks_from_mid_training_on_are_named_once(
    change: Any, names: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                change(model)

    model = Regression()
    model.layer.bias.requires_grad_(change is not unfreeze)
    quiet(model, arguments(tmp_path, logging_steps=1), regression_rows(), callbacks=[Changes()]).train()
    named = [record.message for record in caplog.records if "not in the optimizer" in record.message]
    assert len(named) == 1
    assert names in named[0]
    assert "freeze it in on_train_begin" in named[0]


def test_parameters_that_a_callback_adds_to_the_optimizer_are_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unfreezes(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                unfreeze(model)
                optimizer.add_param_group({"params": [model.layer.bias]})

    model = Regression()
    optimizer = torch.optim.SGD([model.layer.weight], lr=0.1)
    model.layer.bias.requires_grad_(False)
    rows, schedule = regression_rows(), torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = {"optimizers": (optimizer, schedule), "callbacks": [Unfreezes()]}
    quiet(model, arguments(tmp_path, logging_steps=1), rows, **given).train()
    assert model.layer.bias.grad is not None
    assert "not in the optimizer" not in caplog.text


class Spare(Regression):
    """Has a layer that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


def test_parameters_without_a_gradient_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quiet(Spare(), arguments(tmp_path, logging_steps=1), regression_rows()).train()
    named = [record.message for record in caplog.records if "no gradient" in record.message]
    assert named == [
        "2 trainable parameters have no gradient after step 1, so they are not trained: spare.weight, spare.bias; use "
        "them in forward, or set requires_grad=False"
    ]


FACTORY = r"the scheduler in optimizers is a factory, {}, which is called with the optimizer and returns its scheduler"


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (None, lambda other: StepLR(other, 1), "StepLR changes the rates of another optimizer"),
        (None, lambda other: lambda _: StepLR(other, 1), "StepLR changes the rates of another optimizer"),
        (
            None,
            lambda _: lambda step: 0.9**step,
            FACTORY.format("<lambda>") + ".* raised TypeError: unsupported",
        ),
        (None, lambda _: lambda _: 0.5, FACTORY.format("<lambda>") + ".* returned 0.5"),
        (torch.optim.SGD, lambda _: StepLR, FACTORY.format("StepLR") + ".* raised TypeError: .*'step_size'"),
        (
            None,
            lambda _: partial(OneCycleLR, max_lr=0.1, total_steps=1),
            "ends after 1 steps .* at step 0 of 2",
        ),
    ],
)
def test_a_scheduler_that_is_none_of_the_optimizer_is_refused(
    tmp_path: Path, optimizer: Any, scheduler: Any, message: str
) -> None:
    model = Regression()
    used, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    given = (optimizer or used, scheduler(other))
    with pytest.raises(ConfigError, match=message):
        quiet(model, arguments(tmp_path, max_steps=2), regression_rows(), optimizers=given).train()


def test_a_schedule_that_was_saved_too_short_for_more_steps_is_refused_before_training(tmp_path: Path) -> None:
    def trained(steps: int, resume: bool | None = None) -> None:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        factory = partial(OneCycleLR, max_lr=0.1, total_steps=steps)
        quiet(Regression(), args, regression_rows(8), optimizers=(torch.optim.SGD, factory)).train(resume)

    trained(2)
    with pytest.raises(ConfigError, match=r"ends after 2 steps .* at step 2, but the run is at step 2 of 4: .* saved"):
        trained(4, resume=True)


class TestASchedulerSteppedByHand:
    def test_a_torch_scheduler_is_stepped_and_named_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)

        class Steps(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                schedule.step()

        args = arguments(tmp_path, max_steps=4)
        quiet(model, args, regression_rows(8), optimizers=(optimizer, schedule), callbacks=[Steps()]).train()
        said = [record.getMessage() for record in caplog.records if "LambdaLR was stepped by other" in record.message]
        assert len(said) == 1
        assert "last_epoch was 1 and is 2, so the schedule runs ahead; remove scheduler.step()" in said[0]

    def test_one_that_only_the_loop_steps_is_not_named_after_a_resume_either(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for steps in (2, 4):
            model = Regression()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
            args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
            quiet(model, args, regression_rows(8), optimizers=(optimizer, schedule)).train()
        assert schedule.last_epoch == 4
        assert "was stepped by other code" not in caplog.text

    def test_that_of_the_configuration_refuses_it(self, tmp_path: Path) -> None:
        class Steps(TrainerCallback):
            def on_step_end(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
                lr_scheduler.step()

        with pytest.raises(ConfigError, match="the training loop steps the scheduler itself after each update"):
            quiet(Regression(), arguments(tmp_path), regression_rows(8), callbacks=[Steps()]).train()
