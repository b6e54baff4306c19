"""Every optimizer and schedule that transformers names trains as there, or is refused with what to install or use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.config import OptimizerConfig, args_to_config, config_to_args
from onstep.config.hf.argument import SCHEDULES
from onstep.config.hf.optimizers import OPTIMIZERS
from onstep.errors import ConfigError, OnstepError
from onstep.optim import MuonWithAdamW, build_optimizer
from tests.support.small_models import Regression, TokenModel, arguments, quiet, ragged_rows, regression_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps:UserWarning"),
]

STEPS = 6


def shared(**options: Any) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
        **options,
    }


Trained = tuple[torch.Tensor, list[float], list[list[float]]]
"""The weight, the logged learning rates, and those that the scheduler shows at the end of each step."""


class Rates(transformers.TrainerCallback):
    """Collects `get_last_lr`, as scripts do."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self.rates.append([float(rate) for rate in lr_scheduler.get_last_lr()])


def result(trainer: Any, rates: Rates) -> Trained:
    trainer.train()
    logged = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
    return trainer.model.layer.weight.detach(), logged, rates.rates


def theirs(directory: Path, *, optimizers: Any = (None, None), **options: Any) -> Trained:
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", disable_tqdm=True, **shared(**options)
    )
    model, rates = Regression(), Rates()
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=regression_rows(12),
        eval_dataset=regression_rows(4),
        optimizers=optimizers(model) if callable(optimizers) else optimizers,
        callbacks=[rates],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return result(trainer, rates)


def ours(directory: Path, *, optimizers: Any = (None, None), **options: Any) -> Trained:
    model, rates = Regression(), Rates()
    trainer = quiet(
        model,
        arguments(directory, **shared(**options)),
        regression_rows(12),
        eval_dataset=regression_rows(4),
        optimizers=optimizers(model) if callable(optimizers) else optimizers,
        callbacks=[rates],
    )
    return result(trainer, rates)


def check_same(directory: Path, **options: Any) -> Trained:
    expected, found = theirs(directory, **options), ours(directory, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-7)
    assert len(found[1]) == len(expected[1]) == STEPS
    assert found[1] == pytest.approx(expected[1], rel=1e-6, abs=1e-15)
    for at_step, expected_at_step in zip(found[2], expected[2], strict=True):
        assert at_step == pytest.approx(expected_at_step, rel=1e-6, abs=1e-15)
    assert not torch.equal(found[0], Regression().layer.weight), "the run must train, or equality says little"
    return found


BUILT_HERE = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"}


@pytest.mark.parametrize("name", [member.value for member in OptimizerNames])
def test_each_named_optimizer_trains_as_there_or_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    if name in BUILT_HERE:
        check_same(tmp_path, optim=name)
        return
    targets = "all-linear" if OPTIMIZERS[name].has_targets else None
    with pytest.raises(ConfigError, match=rf"optim='{name}' ") as error:
        ours(tmp_path, optim=name, optim_target_modules=targets)
    named = OPTIMIZERS[name]
    remedy = named.refusal or f"requires the package {named.module}, which is not installed: {named.install}"
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=True"},
        {"optim": "sgd", "optim_args": "momentum=0.9,dampening=0.5"},
        {"optim": "adagrad", "optim_args": "lr_decay=0.1,eps=1e-6"},
        {"optim": "rmsprop", "optim_args": "momentum=0.5,alpha=0.9,eps=1e-6,centered=true"},
        {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    ],
    ids=str,
)
def test_the_options_of_an_optimizer_have_their_effect(tmp_path: Path, options: dict[str, Any]) -> None:
    found = check_same(tmp_path, **options)
    plain = ours(tmp_path / "plain", optim=options["optim"])
    assert not torch.allclose(found[0], plain[0])


def test_the_optimizer_and_its_options_are_part_of_the_run(tmp_path: Path) -> None:
    """They have no key in the configuration, so `trainer` has them: a run that continues compares them."""
    args = TrainingArguments(str(tmp_path), optim="rmsprop", optim_args="alpha=0.9", max_steps=2)
    config = args_to_config(args)
    assert config.trainer["optim"] == "rmsprop"
    assert config.trainer["optim_args"] == "alpha=0.9"
    assert config_to_args(config) == args


class DeepTokenModel(TokenModel):
    """Has a matrix between embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(input_ids))))


def test_muon_trains_as_in_the_functional_door(tmp_path: Path) -> None:
    """Muon for the matrix between embedding and output, AdamW for the rest, bit for bit."""
    rows, model = ragged_rows(12), DeepTokenModel()
    options = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "num_train_epochs": 1}
    args = arguments(tmp_path, **shared(optim="muon", **options))
    trainer = quiet(DeepTokenModel(), args, rows)
    trainer.train()

    optimizer = build_optimizer([model], OptimizerConfig(optimizer="muon", lr=0.01, weight_decay=0.1, clip_grad=1.0))
    for start in range(0, 12, 4):
        optimizer.zero_grad()
        model(**{key: torch.stack([row[key] for row in rows[start : start + 4]]) for key in rows[0]})["loss"].backward()
        optimizer.step()
    torch.testing.assert_close(trainer.model.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert [type(trainer.optimizer), trainer.optimizer.param_groups[0]["params"]] == [
        MuonWithAdamW,
        [trainer.model.inner.weight],
    ]
    assert config_to_args(args_to_config(args)) == args


def test_the_settings_of_muon_are_overrides(tmp_path: Path) -> None:
    overrides = {"run.save_weights": False, "optimizer": {"muon_momentum": 0.5}}
    args = arguments(tmp_path, **shared(optim="muon", config_overrides=overrides, num_train_epochs=1))
    trainer = quiet(DeepTokenModel(), args, ragged_rows(4))
    trainer.train()
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.5
    args = arguments(tmp_path, **shared(optim="muon", optim_args="momentum=0.5"))
    with pytest.raises(
        ConfigError, match=r"has 'momentum', which optim='muon' does not read.*optimizer\.muon_momentum"
    ):
        quiet(DeepTokenModel(), args, ragged_rows(4)).train()


SCHEDULE_KWARGS: list[tuple[str, dict[str, Any] | None, float]] = [
    ("linear", None, 0),
    ("linear", None, 0.3),
    ("linear", None, 9),  # never reaches the peak
    ("cosine", None, 2),
    ("cosine", {"num_cycles": 1.5}, 2),
    ("cosine_with_restarts", {"num_cycles": 2}, 1),
    ("cosine_with_restarts", None, 1),
    ("polynomial", {"power": 2.0, "lr_end": 0.001}, 2),
    ("constant", None, 0),
    ("constant_with_warmup", None, 3),
    ("constant_with_warmup", None, 10),
    ("inverse_sqrt", None, 0),
    ("inverse_sqrt", None, 2),
    ("inverse_sqrt", {"timescale": 5}, 2),
    ("cosine_with_min_lr", {"min_lr": 0.001}, 2),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.0}, 2),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, 2),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.001, "warmup_lr_rate": 0.2}, 3),
    ("warmup_stable_decay", {"num_decay_steps": 2}, 2),
    ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}, 2),
    ("warmup_stable_decay", {"num_decay_steps": 2, "warmup_type": "cosine", "decay_type": "linear"}, 3),
    ("warmup_stable_decay", {"num_decay_steps": 2, "num_stable_steps": 1, "num_cycles": 0.25}, 2),
    ("warmup_stable_decay", {"num_decay_steps": 5}, 3),  # more than there is room for
    ("reduce_lr_on_plateau", {"factor": 0.5, "patience": 0, "mode": "max"}, 0),
    ("reduce_lr_on_plateau", None, 0),
    ("greedy", {"factor": 0.5, "patience": 0, "min_lr": 1e-4, "smooth": True, "window_size": 2}, 0),
]
FIRST_OF_EACH = {row[0]: row for row in reversed(SCHEDULE_KWARGS)}
SCALED: list[tuple[str, dict[str, Any] | None, float]] = [
    *FIRST_OF_EACH.values(),
    ("inverse_sqrt", None, 2),
    ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}, 2),
]
"""One of each name, and those that a group with a rate of its own takes another way."""


def check_schedule(
    directory: Path, name: str, kwargs: dict[str, Any] | None, warmup: float, optimizers: Any = (None, None)
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 1} if name in ("reduce_lr_on_plateau", "greedy") else {}
    options = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup, **evaluated}
    found = check_same(directory, optimizers=optimizers, **options)
    if kwargs is not None and evaluated:
        assert len(set(found[1])) > 2, "the metric must have changed the rate"


@pytest.mark.parametrize(("name", "kwargs", "warmup"), SCHEDULE_KWARGS, ids=str)
def test_a_schedule_has_the_rates_of_transformers(
    tmp_path: Path, name: str, kwargs: dict[str, Any] | None, warmup: float
) -> None:
    check_schedule(tmp_path, name, kwargs, warmup)


def test_all_schedules_of_transformers_are_covered() -> None:
    names = {member.value for member in SchedulerType}
    assert names == {name for name, _, _ in SCHEDULE_KWARGS} == set(SCHEDULES)


def groups(model: Any) -> Any:
    groups = [{"params": [model.layer.weight], "lr": 0.03}, {"params": [model.layer.bias], "lr": 0.001}]
    return torch.optim.SGD(groups, lr=0.01), None


@pytest.mark.parametrize(("name", "kwargs", "warmup"), SCALED, ids=str)
def test_a_schedule_scales_the_rate_of_each_group_as_transformers(
    tmp_path: Path, name: str, kwargs: dict[str, Any] | None, warmup: float
) -> None:
    check_schedule(tmp_path, name, kwargs, warmup, groups)


def plateau(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)


def test_a_scheduler_object_that_follows_a_metric_is_stepped_after_evaluations(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "eval_on_start": True}
    found = check_same(tmp_path, optimizers=plateau, **options)
    assert found[1] == pytest.approx([0.01] * 4 + [0.005] * 2)


def test_a_factory_of_a_scheduler_that_follows_a_metric(tmp_path: Path) -> None:
    def factory(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)

    _, logged, _ = ours(tmp_path, optimizers=(None, factory), eval_strategy="epoch")
    assert logged == pytest.approx([0.01] * 6)
    _, logged, _ = ours(tmp_path / "b", optimizers=(None, factory), eval_strategy="steps", eval_steps=1)
    assert logged == pytest.approx([0.01, 0.01, 0.005, 0.0025, 0.00125, 0.000625])


@pytest.mark.parametrize("make", [plateau, lambda model: (None, torch.optim.lr_scheduler.ReduceLROnPlateau)])
def test_a_scheduler_that_follows_a_metric_requires_evaluations(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau requires a metric.*set eval_strategy"):
        ours(tmp_path, optimizers=make)


def test_a_metric_that_no_evaluation_has_is_named(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "f1", "eval_strategy": "epoch"}
    with pytest.raises(ConfigError, match=r"follows metric_for_best_model='f1', but .* has no eval_f1; it has .*loss"):
        ours(tmp_path, **options)


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options",
    [
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "warmup_steps": 1},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "mode": "max"},
        },
        {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"factor": 0.5, "patience": 0, "smooth": True}},
        {"optim": "adafactor"},
        {"optim": "rmsprop", "optim_args": "momentum=0.5"},
    ],
    ids=str,
)
def test_a_resumed_run_has_the_same_rates_and_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    def trainer(name: str) -> Trainer:
        values = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1, **options}
        args = arguments(tmp_path / name, **shared(**values))
        return quiet(Regression(), args, regression_rows(12), eval_dataset=regression_rows(4))

    whole, cut = trainer("whole"), trainer("cut")
    whole.train()
    cut.add_callback(StopsAt(5))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    logs = [
        [record["learning_rate"] for record in one.state.log_history if "loss" in record] for one in (whole, resumed)
    ]
    assert logs[1][-2:] == logs[0][-2:]
    assert resumed.get_learning_rates() == whole.get_learning_rates()
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_args": "momentum=0.9"}, r"optim_args has 'momentum', which optim='adamw_torch_fused' does not read"),
        ({"optim": "sgd", "optim_args": "momentun=0.9"}, r"has 'momentun'.*Did you mean 'momentum'"),
        ({"optim": "sgd", "optim_target_modules": "all-linear"}, r"optim_target_modules='all-linear' has no effect"),
        ({"optim": "galore_adamw"}, r"optim='galore_adamw' requires optim_target_modules"),
        ({"lr_scheduler_type": "greedy"}, r"'greedy' follows the metric of the evaluations; set eval_strategy"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(tmp_path, **options)


class TwoModes(torch.optim.SGD):
    """Keeps other weights for evaluation, as schedule-free optimizers do, and refuses to step with those."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trains = False

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def _switch(self, trains: bool) -> None:
        if trains is not self.trains and self.state:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.5 if trains else 2.0)
        self.trains = trains

    def step(self, closure: Any = None) -> Any:
        assert self.trains
        return super().step(closure)


def test_an_optimizer_with_modes_is_switched_for_evaluations(tmp_path: Path) -> None:
    def two_modes(model: Any) -> Any:
        return TwoModes(model.parameters(), lr=0.01, momentum=0.9), None

    check_same(tmp_path, optimizers=two_modes, eval_strategy="steps", eval_steps=2)
    options = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    check_same(tmp_path / "metric", optimizers=two_modes, lr_scheduler_kwargs={"patience": 0}, **options)


def test_settings_of_onsteps_schedule_contradict_one_of_transformers(tmp_path: Path) -> None:
    overrides = {"run.save_weights": False, "scheduler.lr_decay_iters": 9}
    with pytest.raises(ConfigError, match=r"scheduler.lr_decay_iters of Onstep's own schedule.*'polynomial'"):
        ours(tmp_path, lr_scheduler_type="polynomial", config_overrides=overrides)


def test_settings_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    overrides = {"run.save_weights": False, "optimizer": {"sgd_momentum": 0.5}}
    with pytest.raises(
        ConfigError, match=r"optimizer.sgd_momentum, which optim='sgd' with optim_args='nesterov=False'"
    ):
        ours(tmp_path, optim="sgd", optim_args="nesterov=False", config_overrides=overrides)


def test_keywords_that_transformers_rejects_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler_type='polynomial' with .*lr_end \(1.0\) must be smaller"):
        ours(tmp_path, lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0})


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"optim": "rmsprop"}, {"optim": "adagrad"}, "optim was 'rmsprop' and is 'adagrad'"),
        ({"optim": "sgd"}, {"optim": "sgd", "optim_args": "momentum=0.9"}, "optim_args was .absent. and is"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}},
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0}},
            None,  # asked to continue, a run follows its present schedule
        ),
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}, None),
    ],
    ids=str,
)
def test_a_run_does_not_continue_with_another_optimizer_or_schedule(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], message: str | None
) -> None:
    def trainer(options: dict[str, Any]) -> Trainer:
        args = arguments(tmp_path, **shared(**{"save_strategy": "steps", "save_steps": 2, **options}))
        return quiet(Regression(), args, regression_rows(12))

    cut = trainer(first)
    cut.add_callback(StopsAt(3))
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = trainer(then)
    if message is None:
        resumed.train(resume_from_checkpoint=True)
        return
    with pytest.raises(OnstepError, match=message):
        resumed.train(resume_from_checkpoint=True)
