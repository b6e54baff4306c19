"""Trainers with a step of their own, and what the ranks of their tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from onstep import Trainer
from tests.support.small_models import (
    TokenModel,
    arguments,
    causal_rows,
    losses_of,
    quiet,
    qwen,
    ragged_rows,
    recorder,
)

SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 0.01,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
}


def adversarial(base: Any) -> Any:
    """Two backward passes: of the batch, and of the batch with embeddings moved along their gradient."""

    class Adversarial(base):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            weight = self.accelerator.unwrap_model(model).get_input_embeddings().weight
            moved = 0.1 * torch.ones_like(weight) / weight.numel() ** 0.5
            weight.data.add_(moved)
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                again = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(again)
            weight.data.sub_(moved)
            return loss

    return Adversarial


def by_hand(base: Any) -> Any:
    """A step as written for transformers 4: everything by hand."""

    class ByHand(base):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            loss = loss / self.args.gradient_accumulation_steps
            loss.backward()
            return loss.detach()

    return ByHand


def unchanged(base: Any) -> Any:
    """A step that only calls the base class's."""

    class Unchanged(base):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            return loss

    return Unchanged


def multiplied(base: Any) -> Any:
    """A loss as transformers' own and TRL's trainers compute it, for gradients that are averaged over ranks."""

    class Multiplied(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**{key: value for key, value in inputs.items() if key != "labels"})
            labels, logits = inputs["labels"][:, 1:].flatten(), outputs.logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
            loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    return Multiplied


def left_in_evaluation(base: Any) -> Any:
    """A loss that sets the module inside the wrapper to evaluation mode, in which it would count double."""

    class LeftInEvaluation(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inner = self.accelerator.unwrap_model(model)
            factor = 1.0 if inner.training else 2.0
            found = super().compute_loss(model, inputs, *args, **kwargs)
            inner.eval()
            return found * factor

    return LeftInEvaluation


def losses_of_transformers(subclass: Any, model: nn.Module, rows: Any, directory: Path, **options: Any) -> list[float]:
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **{**SHARED, **options}
    )
    trainer = subclass(transformers.Trainer)(model, args, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return losses_of(trainer)


def trained(subclass: Any, model: nn.Module, rows: Any, directory: Path, **options: Any) -> Any:
    args = arguments(directory, **{**SHARED, **options})
    trainer = subclass(Trainer)(model, args, train_dataset=rows, default_callbacks=False)
    trainer.train()
    return trainer


def job_compared(settings: dict[str, Any]) -> dict[str, Any]:
    """The losses under Onstep and under transformers, of two ranks."""
    found: dict[str, Any] = {}
    for subclass in (adversarial, by_hand, multiplied, left_in_evaluation):
        name = subclass.__name__
        options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
        ours = trained(subclass, qwen(), causal_rows(16), Path(name), **options)
        theirs = losses_of_transformers(subclass, qwen(), causal_rows(16), Path(name), **options)
        found[name] = [losses_of(ours), theirs]
    return found


def job_with_fillers(settings: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of rows that leave the second rank without a sample in the last step."""
    found: dict[str, Any] = {}
    for name, model in {"share": qwen, "mean": TokenModel}.items():
        rows: Any = causal_rows(10) if name == "share" else ragged_rows(10)
        runs = []
        for kind in (lambda base: base, unchanged):
            trainer = trained(kind, model(), rows, Path(f"{name}-{len(runs)}"))
            runs.append((losses_of(trainer), [float(one.sum()) for one in trainer.model.parameters()]))
        found[name] = runs
    return found


def job_with_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The losses of two ranks with the arguments that wrap a model, and whether the wrapper has them."""
    wrappers: list[Any] = []
    found: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        "static": {"ddp_static_graph": True},
        "compiled": {"torch_compile_backend": "eager", "config_overrides": {}},
    }.items():
        callbacks = recorder("on_step_begin", lambda context: wrappers.append(context.model[0]))
        values: dict[str, Any] = {**SHARED, "gradient_accumulation_steps": 2, **options}
        trainer = quiet(qwen(), arguments(Path(name), **values), causal_rows(16), callbacks=callbacks)
        trainer.train()
        wrapper = wrappers[-1]
        found[name] = [
            losses_of(trainer),
            wrapper.static_graph,
            sorted(trainer.model.state_dict()) == sorted(qwen().state_dict()),
        ]
    return found


def job_gathered(settings: dict[str, Any]) -> dict[str, Any]:
    """The numbers of rows that a `compute_loss` gathers in training and in evaluation."""
    counts: dict[str, list[int]] = {"train": [], "eval": []}

    class Gathers(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = self.accelerator.gather_for_metrics(inputs["input_ids"])
            counts["train" if model.training else "eval"].append(len(rows))
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = arguments(Path("gathered"), **{**SHARED, "per_device_eval_batch_size": 2})
    trainer = Gathers(
        TokenModel(), args, train_dataset=ragged_rows(9), eval_dataset=ragged_rows(5), default_callbacks=False
    )
    trainer.train()
    trainer.evaluate()
    return counts
