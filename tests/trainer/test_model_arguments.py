"""Arguments that change how the model computes: their effect, compared with the real `transformers.Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.neftune import neftune_post_forward_hook

from onstep import Trainer, TrainingArguments
from onstep.config import args_to_config
from onstep.config.differences import ChangeClass, changes
from onstep.errors import ConfigError
from tests.support.small_models import (
    LogitsModel,
    Regression,
    TokenModel,
    arguments,
    causal_rows,
    losses_of,
    quiet,
    qwen,
    qwen_classifier,
    ragged_rows,
    recorder,
    regression_rows,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*speedups for torchdynamo.*"),
]
SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 0.01,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
}


def theirs(model: nn.Module, rows: Any, tmp_path: Path, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **{**SHARED, **options}
    )
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def ours(model: nn.Module, rows: Any, tmp_path: Path, **options: Any) -> Trainer:
    values = {**SHARED, **options}
    callbacks = values.pop("callbacks", None)
    trainer = quiet(model, arguments(tmp_path, **values), rows, eval_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


def classes(count: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(causal_rows(count))]


def test_label_smoothing_of_a_causal_model_is_that_of_transformers(tmp_path: Path) -> None:
    options = {"label_smoothing_factor": 0.2, "gradient_accumulation_steps": 2}
    expected = theirs(qwen(), causal_rows(8), tmp_path, **options)
    found = ours(qwen(), causal_rows(8), tmp_path, **options)
    plain = ours(qwen(), causal_rows(8), tmp_path / "plain", gradient_accumulation_steps=2)
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    assert losses_of(found) != pytest.approx(losses_of(plain), rel=1e-3)


def test_label_smoothing_of_a_classifier_in_training_and_evaluation(tmp_path: Path) -> None:
    expected = theirs(qwen_classifier(), classes(), tmp_path, label_smoothing_factor=0.3)
    found = ours(qwen_classifier(), classes(), tmp_path, label_smoothing_factor=0.3)
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)


def test_label_smoothing_is_the_same_for_any_split_into_micro_batches(tmp_path: Path) -> None:
    """Rows have unequal numbers of labels, and the model itself computes no loss."""
    options = {"label_smoothing_factor": 0.1, "max_steps": 3}
    whole = ours(LogitsModel(), ragged_rows(12), tmp_path / "a", per_device_train_batch_size=4, **options)
    split = ours(
        LogitsModel(),
        ragged_rows(12),
        tmp_path / "b",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        **options,
    )
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=1e-5)


@pytest.mark.parametrize("factor", [-0.1, 1.5])
def test_label_smoothing_outside_of_0_to_1_is_refused(tmp_path: Path, factor: float) -> None:
    with pytest.raises(ConfigError, match=f"label_smoothing_factor={factor} must be from 0 to 1"):
        ours(qwen_classifier(), classes(), tmp_path, label_smoothing_factor=factor)


def test_label_smoothing_requires_class_ids(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="label_smoothing_factor requires labels that are class ids"):
        ours(Regression(), regression_rows(), tmp_path, label_smoothing_factor=0.1)


def test_noise_on_embeddings_is_added_in_training_only_and_is_that_of_transformers(tmp_path: Path) -> None:
    outputs: list[tuple[bool, Tensor, Tensor]] = []
    model = qwen()

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append((module.training, inputs[0], output.detach()))

    args = arguments(tmp_path, **{**SHARED, "neftune_noise_alpha": 5.0, "max_steps": 1, "eval_strategy": "steps"})
    trainer = quiet(model, args, causal_rows(2), eval_dataset=causal_rows(2))
    embedding = model.get_input_embeddings()
    states: list[Tensor] = []
    embedding.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    trainer.add_callback(_at_begin(lambda: embedding.register_forward_hook(note)))
    before = embedding.weight.detach().clone()
    trainer.train()
    in_training = [one for one in outputs if one[0]]
    assert len(in_training) == 1
    _, ids, noisy = in_training[0]
    embedding.neftune_noise_alpha = 5.0
    torch.set_rng_state(states[0])
    expected = neftune_post_forward_hook(embedding.train(), None, nn.functional.embedding(ids, before))
    assert torch.equal(noisy, expected)
    for training, ids, clean in outputs:
        assert training or torch.equal(clean, nn.functional.embedding(ids, embedding.weight))
    assert torch.equal(embedding(ids), nn.functional.embedding(ids, embedding.weight)), "the noise ends with training"


def _at_begin(function: Callable[[], Any]) -> Any:
    class AtBegin(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            function()

    return AtBegin()


def test_noise_requires_an_embedding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neftune_noise_alpha requires a model with a method get_input_embeddings"):
        ours(Regression(), regression_rows(), tmp_path, neftune_noise_alpha=5.0)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
    ],
)
def test_activations_are_recomputed_with_the_same_losses(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return checkpoint(*args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    plain = ours(qwen(), causal_rows(4), tmp_path / "plain")
    assert not calls
    found = ours(qwen(), causal_rows(4), tmp_path / "again", **options)
    assert len(calls) == 2 * (1 if "every_n_layers" in str(options) else 2)
    assert losses_of(found) == pytest.approx(losses_of(plain), rel=1e-6)


def test_activation_checkpointing_requires_a_method_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="requires a model with a method activation_checkpointing_enable"):
        ours(Regression(), regression_rows(), tmp_path, gradient_checkpointing=True)


def test_a_model_with_the_earlier_method_alone_recomputes_too(tmp_path: Path) -> None:
    received: list[Any] = []

    class Earlier(Regression):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            received.append(gradient_checkpointing_kwargs)

    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ours(Earlier(), regression_rows(), tmp_path, **options)
    assert received == [{"use_reentrant": False}]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_the_same_and_its_weights_keep_their_names(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {
        "torch_compile_backend": backend,
        "save_strategy": "steps",
        "save_steps": 3,
        "config_overrides": {},
    }
    counts: list[int] = []
    torch._dynamo.utils.counters.clear()
    model = TokenModel()
    trainer = ours(
        model,
        ragged_rows(12),
        tmp_path,
        **options,
        callbacks=recorder(
            "on_step_end", lambda _: counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        ),
    )
    plain = ours(TokenModel(), ragged_rows(12), tmp_path / "plain")
    assert counts[0] > 0, "the model ran as compiled code"
    assert losses_of(trainer) == pytest.approx(losses_of(plain), rel=1e-6)
    names = set(TokenModel().state_dict())
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == names
    assert trainer.model is model
    assert model._compiled_call_impl is None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_run_continues_with_and_without_compiled_code(tmp_path: Path, compiled_first: bool) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options = [{**saving, "torch_compile_backend": "eager"}, saving]
    first, second = options if compiled_first else reversed(options)
    whole = ours(TokenModel(), ragged_rows(8), tmp_path, **first)
    [start] = [one.parent for one in (tmp_path / "run").rglob("manifest.json") if one.parent.name == "checkpoint-2"]
    rest = quiet(TokenModel(seed=5), arguments(tmp_path / "rest", **{**SHARED, **second}), ragged_rows(8))
    rest.train(resume_from_checkpoint=str(start))
    assert losses_of(rest)[-2:] == pytest.approx(losses_of(whole)[-2:], rel=1e-6)


def test_a_model_that_the_user_has_compiled_is_saved_under_its_own_names(tmp_path: Path) -> None:
    model: Any = torch.compile(TokenModel(), backend="eager")
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "config_overrides": {}}
    whole = ours(model, ragged_rows(8), tmp_path, torch_compile=True, torch_compile_backend="eager", **options)
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == set(TokenModel().state_dict())
    [start] = [one.parent for one in (tmp_path / "run").rglob("manifest.json") if one.parent.name == "checkpoint-2"]
    rest = quiet(TokenModel(seed=5), arguments(tmp_path / "rest", **{**SHARED, **options}), ragged_rows(8))
    rest.train(resume_from_checkpoint=str(start))
    assert losses_of(rest)[-2:] == pytest.approx(losses_of(whole)[-2:], rel=1e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's use of it
def test_a_peft_model_is_trained_smoothed_checkpointed_and_with_noise(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(qwen(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    options = {"label_smoothing_factor": 0.1, "max_steps": 3}
    expected = losses_of(theirs(adapted(), causal_rows(8), tmp_path, **options))
    found = ours(adapted(), causal_rows(8), tmp_path, **options, gradient_checkpointing=True)
    assert losses_of(found) == pytest.approx(expected, rel=1e-5)
    noisy = ours(adapted(), causal_rows(8), tmp_path / "noisy", **options, neftune_noise_alpha=50.0)
    assert losses_of(noisy) != pytest.approx(expected, rel=1e-4)


def test_an_unknown_backend_of_the_compiler_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch_compile_backend='quick' is not known; use one of"):
        ours(Regression(), regression_rows(), tmp_path, torch_compile_backend="quick")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_tf32_without_a_gpu_is_refused_as_by_transformers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tf32"):
        transformers.TrainingArguments(str(tmp_path), tf32=True, use_cpu=True)
    with pytest.raises(ConfigError, match="tf32=True requires a CUDA GPU"):
        ours(Regression(), regression_rows(), tmp_path, tf32=True)
    ours(Regression(), regression_rows(), tmp_path, tf32=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a CUDA GPU")
@pytest.mark.parametrize(("tf32", "precision"), [(True, "tf32"), (False, "ieee")])
def test_tf32_is_set_for_a_run_and_restored(tmp_path: Path, tf32: bool, precision: str) -> None:
    seen: list[str] = []
    note = recorder("on_step_end", lambda _: seen.append(torch.backends.cuda.matmul.fp32_precision))
    before = torch.backends.fp32_precision  # type: ignore[attr-defined]
    ours(Regression(), regression_rows(4), tmp_path, tf32=tf32, callbacks=note, max_steps=1)
    assert seen == [precision]
    assert torch.backends.fp32_precision == before  # type: ignore[attr-defined]


def test_full_determinism_holds_during_a_run(tmp_path: Path) -> None:
    seen: list[bool] = []
    note = recorder("on_step_end", lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
    ours(Regression(), regression_rows(4), tmp_path, full_determinism=True, callbacks=note)
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("use_cache", [False, True])
def test_use_cache_is_that_of_the_models_configuration(tmp_path: Path, use_cache: bool) -> None:
    model, other = qwen(), qwen()
    assert model.config.use_cache
    ours(model, causal_rows(2), tmp_path, use_cache=use_cache)
    theirs(other, causal_rows(2), tmp_path, use_cache=use_cache)
    assert model.config.use_cache == other.config.use_cache == use_cache


def test_liger_kernels_require_their_package_and_are_applied_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}
    with pytest.raises(ConfigError, match="requires the package liger-kernel; install it with `pip install"):
        ours(qwen(), causal_rows(2), tmp_path, **options)
    package = tmp_path / "site" / "liger_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "transformers.py").write_text(
        "applied = []\ndef _apply_liger_kernel_to_instance(model, **options):\n    applied.append((model, options))\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    model = qwen()
    with patch.dict(sys.modules):
        ours(model, causal_rows(2), tmp_path, **options)
        import liger_kernel.transformers as fake  # type: ignore[import-not-found]
    assert fake.applied == [(model, {"rope": False})]


def test_underflow_and_overflow_end_the_run_at_the_first_layer(tmp_path: Path) -> None:
    model = qwen()
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("inf")
    with pytest.raises(ValueError, match=r"inf/nan|inf.*nan"):
        ours(model, causal_rows(8), tmp_path, debug="underflow_overflow")
    with pytest.raises(ConfigError, match="debug='tpu_metrics_debug' is not supported"):
        arguments(tmp_path, debug="tpu_metrics_debug")


def test_the_unused_memory_is_released_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    trainer = quiet(
        Regression(),
        arguments(tmp_path, **{**SHARED, "torch_empty_cache_steps": 2, "gradient_accumulation_steps": 2}),
        regression_rows(20),
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(trainer.state.global_step))
    monkeypatch.setattr("onstep.training.profiling.instruments.torch.cuda.is_available", lambda: True)
    trainer.train()
    assert released == [0, 0, 2, 2, 4, 4]


class Limited(Regression):
    """Has memory for a few samples at a time."""

    def __init__(self, limit: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.limit, self.error = limit, error
        self.sizes: list[int] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x, labels)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_the_batch_shrinks_until_it_fits(tmp_path: Path, error: type[RuntimeError]) -> None:
    rows = regression_rows(24)
    options = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    expected = theirs(Limited(6, RuntimeError), rows, tmp_path, **options)
    model = Limited(6, error)
    found = ours(model, rows, tmp_path, **options)
    assert model.sizes == expected.model.sizes == [8, 7, 6, 6, 6, 6]
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)
    assert found.state.global_step == expected.state.global_step == 4
    assert found.args.per_device_train_batch_size == 8


def test_other_errors_and_a_single_sample_that_does_not_fit_end_the_search(tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 2, "auto_find_batch_size": True}
    with pytest.raises(RuntimeError, match="out of memory") as error:
        ours(Limited(0), regression_rows(4), tmp_path, **options)
    assert "every batch size down to 1" in error.value.__notes__[-1]
    model = Regression()
    model.forward = lambda **inputs: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        ours(model, regression_rows(4), tmp_path, **options)


def test_smoothing_and_noise_belong_to_what_is_learned() -> None:
    """A run that continues with another value is told so, as for any other value that changes what is learned."""
    plain = args_to_config(TrainingArguments())
    for options in ({"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}):
        [change] = changes(plain, args_to_config(TrainingArguments(**options)))
        assert change.kind is ChangeClass.TRAJECTORY, options
    for options in ({"torch_compile": True}, {"tf32": False}, {"activation_checkpointing": True}):
        found = changes(plain, args_to_config(TrainingArguments(**options)))
        assert {change.kind for change in found} == {ChangeClass.SAFE}, options
