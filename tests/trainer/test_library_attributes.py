"""Attributes of a Trainer that libraries on top of `transformers.Trainer` read and assign."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from onstep import Trainer, TrainerCallback
from tests.support.small_models import Regression, arguments, quiet, regression_rows


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


class PairModel(nn.Module):
    """Scores two inputs, as a reward model does; its samples have no labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        return {"gap": self.line(chosen) - self.line(rejected)}


def pairs(number: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"chosen": torch.randn(3), "rejected": torch.randn(3)} for _ in range(number)]


def reward_trainer(base: type[Any]) -> type[Any]:
    class RewardTrainer(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.can_return_loss = True
            self.label_names: list[str] = []

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            loss = -nn.functional.logsigmoid(outputs["gap"]).mean()
            return (loss, outputs) if return_outputs else loss

    return RewardTrainer


def test_a_model_without_labels_has_the_losses_of_transformers_where_that_is_stated(tmp_path: Path) -> None:
    found = []
    for base, args in ((Trainer, arguments(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        trainer = reward_trainer(base)(PairModel(), args, eval_dataset=pairs(6))
        predicted = trainer.predict(pairs(5))
        found.append((trainer.evaluate()["eval_loss"], predicted.metrics["test_loss"], predicted.predictions.tolist()))
        assert (trainer.can_return_loss, trainer.label_names, trainer.hub_model_id) == (True, [], None)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    for ours, reference in zip(found[0][2], found[1][2], strict=True):
        assert ours == pytest.approx(reference, rel=1e-6)


def test_assigned_label_names_are_those_of_evaluations(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.line(x)[..., 0] - target).pow(2).mean(), "scores": self.line(x)}

    rows = [{"x": row["x"], "target": row["labels"]} for row in regression_rows(4)]
    seen = []
    for base, args in ((Trainer, arguments(tmp_path / "a")), (transformers.Trainer, theirs(tmp_path / "b"))):
        trainer = base(Named(), args, eval_dataset=rows)
        trainer.label_names = ["target"]
        seen.append(trainer.predict(rows).label_ids.tolist())
    assert seen[0] == seen[1] == [float(row["target"]) for row in rows]


@pytest.mark.parametrize("key", ["params", "model", "optimizer_dict"])
def test_what_an_optimizer_gets_in_place_of_groups_is_in_its_keywords(tmp_path: Path, key: str) -> None:
    def trainer_on(base: type[Any]) -> type[Any]:
        class Grouped(base):
            @staticmethod
            def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
                groups = [{"params": [parameter], "lr": 0.1 * number} for number, parameter in parts(model)]
                return torch.optim.SGD, {"lr": 0.5, key: groups}

        return Grouped

    def parts(model: Any) -> list[tuple[int, Tensor]]:
        return list(enumerate(model.parameters(), start=1))

    weights = []
    for base, args in (
        (Trainer, arguments(tmp_path / "a", max_steps=3, max_grad_norm=0.0, train_sampling_strategy="sequential")),
        (
            transformers.Trainer,
            theirs(tmp_path / "b", max_steps=3, max_grad_norm=0.0, train_sampling_strategy="sequential"),
        ),
    ):
        torch.manual_seed(0)
        model = Regression()
        trainer_on(base)(model, args, train_dataset=regression_rows(24)).train()
        weights.append([value.flatten().tolist() for value in model.parameters()])
    for ours, reference in zip(*weights, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5)


def test_accelerates_state_has_the_precision_of_the_trainer(tmp_path: Path) -> None:
    state = pytest.importorskip("accelerate.state")
    for precision in ("bf16", "no"):
        quiet(Regression(), arguments(tmp_path, bf16=precision == "bf16"), regression_rows())
        assert state.AcceleratorState().mixed_precision == precision
        assert state.AcceleratorState().deepspeed_plugin is None
        assert state.PartialState().is_main_process


class Workers(Dataset[dict[str, Tensor]]):
    """Samples that say which process has read them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(3), "labels": torch.tensor(float(os.getpid()))}


class OwnLoader(Trainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return super().get_eval_dataloader(eval_dataset)


class OwnLoop(Trainer):
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluation_loop(*args, **kwargs)


@pytest.mark.parametrize("kind", [Trainer, OwnLoader, OwnLoop])
@pytest.mark.parametrize("keeps", [True, False])
def test_persistent_workers_read_every_evaluation(tmp_path: Path, kind: type[Trainer], keeps: bool) -> None:
    readers: list[set[float]] = []

    def note(prediction: Any) -> dict[str, float]:
        readers.append(set(prediction.label_ids.tolist()))
        return {}

    args = arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=keeps)
    trainer = kind(Regression(), args, eval_dataset=Workers(), compute_metrics=note, default_callbacks=False)
    for _ in range(3):
        trainer.evaluate()
    assert (readers[0] == readers[1] == readers[2]) is keeps
    trainer.eval_loaders.close()


def test_on_init_end_is_fired_by_the_constructor_alone(tmp_path: Path) -> None:
    def recorder(base: type[Any]) -> type[Any]:
        class Notes(base):
            def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                fired.append((state.global_step, type(kwargs["model"]).__name__, args.max_steps))

        return Notes

    fired: list[Any] = []
    args = arguments(tmp_path / "a", max_steps=2)
    ours = quiet(
        Regression(), args, regression_rows(), eval_dataset=regression_rows(4), callbacks=[recorder(TrainerCallback)]
    )
    transformers.Trainer(
        Regression(), theirs(tmp_path / "b", max_steps=2), callbacks=[recorder(transformers.TrainerCallback)]
    )
    assert fired == [(0, "Regression", 2)] * 2
    ours.add_callback(recorder(TrainerCallback)())
    ours.train()
    ours.evaluate()
    assert len(fired) == 2


def test_the_accelerator_answers_as_accelerates_does(tmp_path: Path) -> None:
    ours = quiet(Regression(), arguments(tmp_path / "a"), regression_rows()).accelerator
    reference = transformers.Trainer(Regression(), theirs(tmp_path / "b")).accelerator
    state = [*("deepspeed_plugins", "device_mesh", "fork_launched", "debug", "initialized"), "backend", "is_fsdp2"]
    names = [
        *("scaler_handler", "init_handler", "profile_handler", "autocast_handler", "fp8_backend", "fp8_recipe_handler"),
        *("is_fsdp2", "is_composable_parallelism_enabled", "fp8_enabled", "has_lomo_optimizer", "split_batches"),
        *("dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_stateful_dataloader"),
        *("device_placement", "should_save_model", "native_amp", "multi_device", "project_dir", "logging_dir"),
        *("save_iteration", "delayed_fp8_autocast"),
    ]
    for name in names:
        assert getattr(ours, name) == getattr(reference, name), name
    for name in state:
        assert getattr(ours.state, name) == getattr(reference.state, name), name

    ours.even_batches = False
    ours.set_trigger()
    called = []
    for decorate in (ours.on_local_main_process, ours.on_last_process, ours.on_process(process_index=0)):
        decorate(called.append)(1)
    ours.on_local_process(called.append, local_process_index=1)(2)
    with ours.split_between_processes([1, 2, 3]) as share, ours.join_uneven_inputs([]):
        assert share == [1, 2, 3]
    assert (called, ours.check_trigger(), ours.check_trigger(), ours.even_batches) == ([1, 1, 1], True, False, False)
    ours.unscale_gradients()
    ours.end_training()


def test_a_call_event_that_is_assigned_is_what_the_run_calls(tmp_path: Path) -> None:
    """As SetFit does, to give its callbacks a model and arguments of its own; events and records are transformers'."""

    def notes(base: type[Any]) -> type[Any]:
        class Notes(base):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append(("step", args, kwargs["model"], state.global_step))

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                logs["mine"] = 1.0
                seen.append(("log", args, kwargs["model"], state.global_step))

        return Notes

    seen: list[Any] = []

    def trained(base: type[Any], callback: type[Any], args: Any) -> list[Any]:
        trainer = base(Regression(), args, train_dataset=regression_rows(), callbacks=[notes(callback)])
        handler = trainer.callback_handler

        def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            for one in handler.callbacks:
                shown = "mine" if type(one).__name__ == "Notes" else args
                control = getattr(one, event)(shown, state, control, model="whole", **kwargs) or control
            return control

        handler.call_event = call_event
        seen.clear()
        trainer.train()
        return list(seen)

    options = {"max_steps": 3, "logging_steps": 1}
    ours = trained(Trainer, TrainerCallback, arguments(tmp_path / "a", **options))
    reference = trained(transformers.Trainer, transformers.TrainerCallback, theirs(tmp_path / "b", **options))
    assert ours == reference
    assert {entry[1:3] for entry in ours} == {("mine", "whole")}
    assert len(ours) == 7


def test_the_method_itself_may_be_assigned_again(tmp_path: Path) -> None:
    seen: list[str] = []

    class Notes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append("called")

    trainer = quiet(Regression(), arguments(tmp_path, max_steps=2), regression_rows(), callbacks=[Notes])
    original = trainer.callback_handler.call_event
    trainer.callback_handler.call_event = lambda *args, **kwargs: None
    trainer.train()
    assert seen == []
    trainer.callback_handler.call_event = lambda *args, **kwargs: original(*args, **kwargs)
    trainer.train(resume_from_checkpoint=False)
    assert seen == ["called", "called"]
    seen.clear()
    trainer.callback_handler.call_event = original
    trainer.train(resume_from_checkpoint=False)
    assert seen == ["called", "called"]


def test_a_training_step_of_transformers_4_finds_its_switches(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path), regression_rows())
    names = ("use_apex", "do_grad_scaling", "use_cuda_amp", "use_cpu_amp")
    assert [getattr(trainer, name) for name in names] == [False] * 4
