"""The arguments of Forgather's trainers, each by its effect on a training."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, StepLR

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes
from tests.support.small_models import (
    IGNORE,
    Regression,
    TokenModel,
    arguments,
    causal_rows,
    quiet,
    qwen,
    ragged_rows,
    regression_rows,
)


def test_args_may_be_a_dictionary_and_unknown_names_are_refused(tmp_path: Path) -> None:
    options = {"output_dir": str(tmp_path), "max_steps": 2, "use_cpu": True, "report_to": []}
    trainer = Trainer(Regression(), options, train_dataset=regression_rows(), default_callbacks=False)
    assert isinstance(trainer.args, TrainingArguments)
    assert trainer.train().global_step == 2
    with pytest.raises(ConfigError, match="no argument 'max_step'"):
        Trainer(Regression(), {**options, "max_step": 2})


def test_factories_make_the_optimizer_and_its_scheduler_anew_for_each_training(tmp_path: Path) -> None:
    made: list[Any] = []
    rates: list[float] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.5))
        return made[-1]

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    trainer = quiet(
        None,
        arguments(tmp_path, max_steps=3),
        regression_rows(),
        model_init=Regression,
        callbacks=[Rates()],
        optimizer_factory=factory,
        lr_scheduler_factory=partial(StepLR, step_size=1, gamma=0.5),
    )
    trainer.train()
    trainer.train(resume_from_checkpoint=False)
    assert rates == [0.5, 0.25, 0.125] * 2
    assert len({id(one) for one in made}) == 2


def test_a_factory_of_named_parameters_gets_their_names(tmp_path: Path) -> None:
    seen: list[str] = []

    def factory(named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        seen.extend(name for name, _ in named)
        return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)

    quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows(), optimizer_factory=factory).train()
    assert seen == ["layer.weight", "layer.bias"]


def by_name(named: Any) -> list[dict[str, Any]]:
    return [{"params": [one for name, one in named if ("bias" in name) is is_bias], "lr": lr} for is_bias, lr in RATES]


RATES = ((True, 0.25), (False, 0.5))


@pytest.mark.parametrize(
    "groups",
    [{"bias": {"lr": 0.25}, "weight": {"lr": 0.5}}, [("bias", {"lr": 0.25}), ("weight$", {"lr": 0.5})], by_name],
    ids=["dict", "pairs", "function"],
)
@pytest.mark.parametrize("maker", ["factory", "class", "arguments"])
def test_optimizer_groups_give_parameters_rates_of_their_own(tmp_path: Path, groups: Any, maker: str) -> None:
    makers: dict[str, dict[str, Any]] = {
        "factory": {"optimizer_factory": partial(torch.optim.SGD, lr=9.0)},
        "class": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 9.0})},
        "arguments": {},
    }
    model = Regression()
    before = [model.layer.bias.detach().clone(), model.layer.weight.detach().clone()]
    trainer = quiet(
        model,
        arguments(tmp_path, max_steps=1, max_grad_norm=0, optim="sgd", learning_rate=9.0, weight_decay=0.0),
        regression_rows(),
        optimizer_groups=groups,
        lr_scheduler_factory=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        callbacks=[Gradients()],
        **makers[maker],
    )
    trainer.train()
    bias, weight = Gradients.seen
    torch.testing.assert_close(model.layer.bias, before[0] - 0.25 * bias)
    torch.testing.assert_close(model.layer.weight, before[1] - 0.5 * weight)
    trainer.train(resume_from_checkpoint=False)
    assert sorted(group["lr"] for group in trainer.optimizer.param_groups) == [0.25, 0.5]


class Gradients(TrainerCallback):
    """Keeps the gradients of bias and weight."""

    seen: tuple[Tensor, Tensor]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layer = kwargs["model"].layer
        Gradients.seen = layer.bias.grad.clone(), layer.weight.grad.clone()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_factory": torch.optim.SGD, "optimizers": (torch.optim.Adam, None)}, "both make"),
        ({"optimizer_factory": torch.optim.SGD, "optimizer_cls_and_kwargs": (torch.optim.Adam, {})}, "both make"),
        ({"lr_scheduler_factory": 3}, "must be a function"),
        ({"fused_loss_factory": nn.Identity, "compute_loss_func": lambda outputs, labels: outputs}, "both define"),
        ({"enable_activation_checkpoint_fn": lambda module: None}, "is called with 2"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_at_the_constructor(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(Regression(), **options)


@pytest.mark.parametrize(
    ("groups", "words"),
    [({"bias": {"learning_rate": 1.0}}, "sets learning_rate"), (["bias"], "must be"), ({"(": {}}, "regular")],
)
def test_groups_that_would_be_ignored_are_refused(tmp_path: Path, groups: Any, words: str) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows(), optimizer_groups=groups)
    with pytest.raises(ConfigError, match=words):
        trainer.train()


class FusedLoss:
    """Forgather's protocol: made of the output embeddings, called with hidden states and labels."""

    def __init__(self, output_embeddings: nn.Module) -> None:
        self.head = output_embeddings
        self.shapes: list[tuple[int, ...]] = []
        MADE.append(self)

    def __call__(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        self.shapes.append(tuple(hidden_states.shape))
        logits = hidden_states[:, :-1].flatten(0, 1) @ self.head.weight.T
        return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE)


MADE: list[FusedLoss] = []


def noted(notes: list[bool], note: bool, forward: Any, hidden: Tensor) -> Tensor:
    notes.append(note)
    logits: Tensor = forward(hidden)
    return logits


def test_the_fused_loss_trains_on_hidden_states_and_computes_no_logits(tmp_path: Path) -> None:
    """The loss is that of a training on logits, and the output embeddings compute them only for an evaluation."""
    computed: list[bool] = []
    weights = []
    for fused in (False, True):
        model = qwen()
        model.lm_head.forward = partial(noted, computed, fused, model.lm_head.forward)
        options: dict[str, Any] = {"fused_loss_factory": FusedLoss} if fused else {}
        rows = causal_rows()
        args = arguments(tmp_path / str(fused), max_steps=3, gradient_accumulation_steps=2, optim="sgd")
        trainer = quiet(model, args, rows, eval_dataset=rows[:4], compute_metrics=lambda found: {}, **options)
        trainer.train()
        assert not fused or True not in computed
        weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
        metrics = trainer.evaluate()
        assert "eval_loss" in metrics
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert True in computed  # for compute_metrics
    assert {shape[2] for shape in MADE[-1].shapes} == {16}


def test_a_model_without_output_embeddings_has_no_fused_loss(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows(), fused_loss_factory=FusedLoss)
    with pytest.raises(ConfigError, match="get_output_embeddings"):
        trainer.train()


def test_the_users_function_makes_the_model_recompute_its_activations(tmp_path: Path) -> None:
    called: list[tuple[int, nn.Module]] = []
    for is_wanted in (False, True):
        model = Regression()
        args = arguments(tmp_path / str(is_wanted), max_steps=1, gradient_checkpointing=is_wanted)
        function = lambda rank, module: called.append((rank, module))  # noqa: E731
        quiet(model, args, regression_rows(), enable_activation_checkpoint_fn=function).train()
    assert called == [(0, model)]


def test_distributed_env_says_which_rank_a_process_is(processes: Processes, tmp_path: Path) -> None:
    """Two processes without torchrun's variables train as two ranks; one of another size is refused."""
    found = processes.results("tests.support.jobs.trainer_jobs", "distributed_env", tmp_path, {}, ranks=2)
    assert [one["world"] for one in found] == [2, 2]
    assert found[0]["weights"] == found[1]["weights"]


def test_a_distributed_env_of_other_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = SimpleNamespace(rank=0, world_size=2, local_rank=0, master_addr="localhost", master_port=29501)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="world_size=2, but the environment has 4"):
        Trainer(Regression(), distributed_env=env)
    with pytest.raises(ConfigError, match="must have a rank"):
        Trainer(Regression(), distributed_env=SimpleNamespace(rank=0))


STATE_FIELDS = {
    "logging_steps": 2,
    "eval_steps": 2,
    "save_steps": 4,
    "train_batch_size": 2,
    "max_steps": 12,
    "num_train_epochs": 2,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "best_metric": None,
    "best_model_checkpoint": None,
    "is_hyper_param_search": False,
    "max_eval_steps": 1,
    "num_processes": 1,
    "epoch_train_steps": 6,
}


def test_the_state_has_all_fields_of_forgather_with_true_values(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reader(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            moving = ("global_step", "epoch", "raw_epoch", "epoch_start_step", "num_input_tokens_seen", "total_flos")
            names = [*STATE_FIELDS, *moving]
            seen.append({name: getattr(state, name) for name in names} | {"logged": len(state.log_history)})

    args = arguments(
        tmp_path, num_train_epochs=2, logging_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps"
    )
    args.save_steps, args.max_eval_steps, args.per_device_train_batch_size = 4, 1, 2
    rows = ragged_rows(12)
    quiet(TokenModel(), args, rows, eval_dataset=rows, callbacks=[Reader()]).train()
    assert {name: seen[-1][name] for name in STATE_FIELDS} == STATE_FIELDS
    assert [one["global_step"] for one in seen] == list(range(1, 13))
    assert [one["raw_epoch"] for one in seen][4:8] == [0, 0, 1, 1]
    assert [one["epoch_start_step"] for one in seen][4:8] == [0, 0, 6, 6]
    assert [round(one["epoch"], 3) for one in seen][:2] == [0.167, 0.333]
    labels = sum(int(row["labels"].ne(IGNORE).sum()) for row in rows)
    assert seen[-1]["num_input_tokens_seen"] == 2 * labels - int(
        sum(row["labels"].ne(IGNORE).sum() for row in rows[-4:])
    )
    assert seen[-1]["total_flos"] > 0
    assert seen[-1]["logged"] == 10  # those of this step follow


class GivesWeights(TrainerCallback):
    """Gives the model its weights, where checkpoints have none."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.steps: list[int] = []

    def on_load_model_weights(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        kwargs["model"].load_state_dict(self.weights)


def test_a_callback_gives_the_weights_where_checkpoints_have_none(tmp_path: Path) -> None:
    """Three steps, and three more that start from the weights of the callback with the optimizer of the checkpoint."""

    def trained(directory: Path, crash: int, callback: Any, components: list[str]) -> dict[str, Tensor]:
        args = arguments(directory, max_steps=6, save_steps=3, save_strategy="steps", lr_scheduler_type="constant")
        args.checkpoint_components = components
        trainer = quiet(Regression(), args, regression_rows(24), callbacks=[Crash(crash), callback])
        with pytest.raises(KeyError) if crash else nullcontext():
            trainer.train()
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    every = ["model", "optimizer", "scheduler", "trainer", "dataset", "rng"]
    unused = GivesWeights({})
    expected = trained(tmp_path / "whole", 0, unused, every)
    assert unused.steps == []
    start = GivesWeights(Regression().state_dict())
    middle = trained(tmp_path / "part", 3, start, every[1:])
    again = GivesWeights(middle)
    found = trained(tmp_path / "part", 0, again, every[1:])
    assert (start.steps, again.steps) == ([0], [3])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


class Crash(TrainerCallback):
    """Ends a run after its checkpoint of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyError("crash")
