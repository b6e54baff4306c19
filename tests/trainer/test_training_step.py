"""Hugging Face's methods of a micro-batch, overridden or assigned, compared with the real `transformers.Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from onstep import CallbackManager, Trainer
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes
from tests.support.jobs.step_jobs import SHARED, adversarial, by_hand, losses_of_transformers, trained, unchanged
from tests.support.small_models import (
    CountingTokenModel,
    Regression,
    TokenModel,
    arguments,
    causal_rows,
    losses_of,
    quiet,
    qwen,
    ragged_rows,
    regression_rows,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def both(
    tmp_path: Path, subclass_of: Callable[[Any], Any], model: Callable[[], nn.Module], rows: Any, **options: Any
) -> tuple[list[float], list[float]]:
    """The logged losses of transformers' Trainer and of ours, each with the same methods overridden."""
    theirs = losses_of_transformers(subclass_of, model(), rows, tmp_path, **options)
    return theirs, losses_of(trained(subclass_of, model(), rows, tmp_path, **options))


@pytest.mark.parametrize("subclass", [adversarial, by_hand])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_overridden_training_step_trains_as_under_transformers(
    tmp_path: Path, subclass: Any, accumulation: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 3}
    theirs, ours = both(tmp_path, subclass, qwen, causal_rows(8), **options)
    assert len(ours) == len(theirs) == 12 / accumulation
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0], "the run must learn, or equality says little"


@pytest.mark.parametrize(
    ("model", "rows"),
    [(CountingTokenModel, ragged_rows(12)), (TokenModel, ragged_rows(12)), (Regression, regression_rows())],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_training_step_that_only_calls_super_changes_nothing(
    tmp_path: Path, model: Any, rows: Any, accumulation: int
) -> None:
    """To the bit for shares, and for means where a step is one micro-batch; else the order of two factors differs."""
    options = {**SHARED, "gradient_accumulation_steps": accumulation}
    native, stepped = model(), model()
    first = quiet(native, arguments(tmp_path / "a", **options), rows)
    first.train()
    second = unchanged(Trainer)(
        stepped, arguments(tmp_path / "b", **options), train_dataset=rows, default_callbacks=False
    )
    second.train()
    if model is CountingTokenModel or accumulation == 1:
        assert losses_of(second) == losses_of(first)
        assert all(torch.equal(a, b) for a, b in zip(native.parameters(), stepped.parameters(), strict=True))
    else:
        assert losses_of(second) == pytest.approx(losses_of(first), rel=1e-5)


def test_a_training_step_assigned_to_the_trainer_is_called_and_every_event_fires(tmp_path: Path) -> None:
    seen: list[str] = []
    manager = CallbackManager()
    for event in ("on_forward_backward_start", "on_forward_backward_end", "on_substep_end", "on_pre_optimizer_step"):
        manager.register(event, lambda context, event=event: seen.append(event))
    args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2)
    trainer = quiet(Regression(), args, regression_rows(8), callbacks=manager)

    def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        assert trainer.current_gradient_accumulation_steps == 2
        assert trainer.is_in_train
        seen.append("step, last" if trainer.accelerator.sync_gradients else "step")
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()

    trainer.training_step = training_step  # type: ignore[method-assign]
    trainer.train()
    start, end = "on_forward_backward_start", "on_forward_backward_end"
    assert seen == [start, "step", end, "on_substep_end", start, "step, last", end, "on_pre_optimizer_step"]


def test_a_training_step_of_earlier_versions_has_two_parameters(tmp_path: Path) -> None:
    class Earlier(Trainer):
        def training_step(self, model: nn.Module, inputs: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(model, inputs)

    trainer = Earlier(Regression(), arguments(tmp_path), train_dataset=regression_rows(), default_callbacks=False)
    expected = quiet(Regression(), arguments(tmp_path / "plain"), regression_rows())
    assert trainer.train().training_loss == expected.train().training_loss


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_its_samples_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients of the micro-batches are computed again to find the one at fault."""

    class Cliff(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found = super().forward(x, labels)
            if bool((x == rows[5]["x"]).all(-1).any()):
                found["loss"] = found["loss"] + (0 * self.layer.weight.sum()).sqrt()
            return found

    rows = regression_rows(12)
    overrides = {"train.on_nonfinite": "skip", "run.save_weights": False}
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, config_overrides=overrides)
    unchanged(Trainer)(Cliff(), args, train_dataset=rows, default_callbacks=False).train()
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "sample ids [4, 5]" in said
    assert "could not be recomputed" not in said


def test_a_training_step_that_returns_no_loss_is_refused(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, max_steps=1), regression_rows(8))
    trainer.training_step = lambda *args: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="training_step must return the loss of the micro-batch"):
        trainer.train()


def test_float16_scales_the_loss_of_accelerator_backward(tmp_path: Path) -> None:
    """With a scale of 2**10 the run is the same; the scale is visible in the gradients until they are prepared."""
    scales: list[Any] = []

    def subclass(base: Any) -> Any:
        class Scaled(base):  # type: ignore[misc]
            def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
                self.accelerator.backward(loss)
                norm = self.accelerator.clip_grad_norm_(model.parameters(), 1e6)
                raw = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
                scales.append((self.accelerator.scaler.get_scale(), float(raw / norm)))
                return loss.detach()

        return Scaled

    scale = {"optimizer.loss_scale": 1024.0, "run.save_weights": False}
    options = {**SHARED, "fp16": True, "max_steps": 3, "config_overrides": scale}
    plain = quiet(Regression(), arguments(tmp_path / "a", **options), regression_rows())
    plain.train()
    args = arguments(tmp_path / "b", **options)
    trainer = subclass(Trainer)(Regression(), args, train_dataset=regression_rows(), default_callbacks=False)
    trainer.train()
    assert scales == [(1024.0, 1024.0)] * 3
    assert losses_of(trainer) == losses_of(plain)


def test_prepared_inputs_are_what_is_trained_on_and_evaluated(tmp_path: Path) -> None:
    def subclass(base: Any) -> Any:
        class Doubles(base):  # type: ignore[misc]
            def _prepare_inputs(self, inputs: Any) -> Any:
                inputs = super()._prepare_inputs(inputs)
                return {**inputs, "x": 2 * inputs["x"]}

        return Doubles

    rows = regression_rows()
    theirs, ours = both(tmp_path, subclass, Regression, rows)
    assert ours == pytest.approx(theirs, rel=1e-5)
    doubled = [{**row, "x": 2 * row["x"]} for row in rows]
    trainer = subclass(Trainer)(Regression(), arguments(tmp_path / "e"), eval_dataset=rows, default_callbacks=False)
    expected = quiet(Regression(), arguments(tmp_path / "f"), eval_dataset=doubled).evaluate()
    assert trainer.evaluate()["eval_loss"] == expected["eval_loss"]


def test_prepare_input_is_called_for_each_tensor(tmp_path: Path) -> None:
    def subclass(base: Any) -> Any:
        class Rounds(base):  # type: ignore[misc]
            def _prepare_input(self, data: Any) -> Any:
                data = super()._prepare_input(data)
                return data.round() if isinstance(data, Tensor) else data

        return Rounds

    theirs, ours = both(tmp_path, subclass, Regression, regression_rows())
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_context_of_the_loss_is_entered_around_compute_loss(tmp_path: Path) -> None:
    def subclass(base: Any) -> Any:
        class Halved(base):  # type: ignore[misc]
            factor = 1.0

            @contextmanager
            def compute_loss_context_manager(self) -> Any:
                with super().compute_loss_context_manager():
                    self.factor = 0.5
                    yield
                    self.factor = 1.0

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return self.factor * super().compute_loss(model, inputs, *args, **kwargs)

        return Halved

    theirs, ours = both(tmp_path, subclass, Regression, regression_rows())
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_context_of_autocast_decides_the_precision(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Reads(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return super().forward(x, labels)

    class Mine(Trainer):
        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=bool(cache_enabled))

    Mine(Reads(), arguments(tmp_path, max_steps=2), train_dataset=regression_rows(), default_callbacks=False).train()
    assert seen == [torch.bfloat16] * 2


def test_the_number_of_items_is_what_the_override_says(tmp_path: Path) -> None:
    def subclass(base: Any) -> Any:
        class Twice(base):  # type: ignore[misc]
            def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
                assert len(batch_samples) == 2
                return 2 * super()._get_num_items_in_batch(batch_samples, device)

        return Twice

    rows = causal_rows(16)
    theirs, ours = both(tmp_path, subclass, qwen, rows, gradient_accumulation_steps=2)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_model_comes_from_call_model_init_and_is_moved_and_wrapped_by_the_overrides(tmp_path: Path) -> None:
    called: list[str] = []

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: Any) -> Any:
            called.append("wrapped")
            return self.inner(**inputs)

    class Mine(Trainer):
        def call_model_init(self, trial: Any = None) -> nn.Module:
            called.append("init")
            return super().call_model_init(trial)

        def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
            called.append(f"to {device}")
            super()._move_model_to_device(model, device)

        def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
            return Wrapper(super()._wrap_model(model, training, dataloader))

    args = arguments(tmp_path, max_steps=1)
    trainer = Mine(args=args, model_init=Regression, train_dataset=regression_rows(), default_callbacks=False)
    trainer.train()
    assert called == ["init", "to cpu", "wrapped"]
    assert isinstance(trainer.model, Regression)


def test_model_accepts_loss_kwargs_states_what_the_model_returns(tmp_path: Path) -> None:
    """As TRL's trainers state it: the model then receives no number, and returns a mean."""
    received: list[Any] = []

    class Model(CountingTokenModel):
        def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
            received.append(num_items_in_batch)
            return super().forward(input_ids, labels, num_items_in_batch)

    trainer = quiet(Model(), arguments(tmp_path, max_steps=1), ragged_rows(8))
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert received == [None]


def test_the_attributes_that_subclasses_read_are_there(tmp_path: Path) -> None:
    trainer = quiet(qwen(), arguments(tmp_path, max_steps=1), causal_rows(4))
    theirs = transformers.Trainer(qwen(), transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    for name in (
        "is_deepspeed_enabled",
        "is_fsdp_enabled",
        "is_model_parallel",
        "place_model_on_device",
        "label_names",
        "can_return_loss",
        "model_accepts_loss_kwargs",
        "is_in_train",
        "hp_name",
        "hp_search_backend",
        "neftune_noise_alpha",
        "label_smoother",
    ):
        assert getattr(trainer, name) == getattr(theirs, name), name
    assert [trainer.get_sp_size(), trainer.get_cp_size(), trainer.get_tp_size()] == [1, 1, 1]
    assert trainer.model_wrapped is trainer.model
    theirs._set_signature_columns_if_needed()
    trainer._set_signature_columns_if_needed()
    assert set(theirs._signature_columns) - {"kwargs"} == set(trainer._signature_columns or ())  # **kwargs is no column


JOBS = "tests.support.jobs.step_jobs"


def test_an_own_step_on_two_ranks_trains_as_under_transformers(processes: Processes, tmp_path: Path) -> None:
    for found in processes.results(JOBS, "compared", tmp_path):
        for ours, theirs in found.values():
            assert len(ours) == 4
            assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_rank_without_a_sample_adds_nothing_in_an_own_step(processes: Processes, tmp_path: Path) -> None:
    for found in processes.results(JOBS, "with_fillers", tmp_path):
        for native, stepped in found.values():
            assert len(native[0]) == 3
            assert stepped[0] == pytest.approx(native[0], rel=1e-5)
            assert stepped[1] == pytest.approx(native[1], rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_a_static_graph_and_compiled_code_on_two_ranks_change_no_loss(processes: Processes, tmp_path: Path) -> None:
    for found in processes.results(JOBS, "with_options", tmp_path):
        plain, *others = found.values()
        assert [one[1] for one in found.values()] == [False, True, False]
        for losses, _, has_plain_names in others:
            assert losses == pytest.approx(plain[0], rel=1e-6)
            assert has_plain_names


def assigning(name: str, change: Callable[..., Any]) -> Callable[[Any], Any]:
    """A subclass of any Trainer that replaces a method of its accelerator, as some libraries do."""

    def subclass_of(base: Any) -> Any:
        class Assigning(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                original = getattr(self.accelerator, name)
                setattr(self.accelerator, name, lambda *given, **more: change(original, *given, **more))

        return Assigning

    return subclass_of


def backward_twice(original: Any, loss: Tensor, **more: Any) -> None:
    original(loss, retain_graph=True, **more)
    original(loss, **more)


def clip_to_a_tenth(original: Any, parameters: Any, max_norm: float, **more: Any) -> Any:
    return original(parameters, max_norm / 10, **more)


@pytest.mark.parametrize(
    ("name", "change", "max_norm"), [("backward", backward_twice, 100.0), ("clip_grad_norm_", clip_to_a_tenth, 0.2)]
)
def test_a_method_assigned_to_the_accelerator_is_called_as_under_transformers(
    tmp_path: Path, name: str, change: Any, max_norm: float
) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "optim": "sgd"}
    options |= {"learning_rate": 0.5, "max_grad_norm": max_norm}
    theirs, ours = both(tmp_path, assigning(name, change), qwen, causal_rows(8), **options)
    assert ours == pytest.approx(theirs, rel=1e-5)
    plain = losses_of(trained(unchanged, qwen(), causal_rows(8), tmp_path / "plain", **options))
    assert ours != pytest.approx(plain, rel=1e-5)
