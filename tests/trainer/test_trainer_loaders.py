"""Loaders and samplers of a user's subclass: what they give is what is trained on, in their order, also on resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from onstep import Callback, Trainer, TrainingArguments
from tests.support.small_models import Regression, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 0.05,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "max_grad_norm": 1.0,
    "use_cpu": True,
}
WEIGHTS = [float(1 + number % 5) for number in range(13)]
LENGTHS = [1 + (7 * number) % 11 for number in range(13)]
ROWS = regression_rows(13)


def theirs(kind: type, directory: Path, model: Any = None, **options: Any) -> list[float]:
    """The losses of a subclass of the real Trainer with the methods of `kind`."""
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **{**OPTIONS, **options}
    )
    trainer = type("Theirs", (kind, transformers.Trainer), {})(model or Regression(), args, train_dataset=ROWS)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def made(kind: type, directory: Path, rows: Any = ROWS, model: Any = None, **options: Any) -> Any:
    """A subclass of ours with the methods of `kind`."""
    further = {key: options.pop(key) for key in ("callbacks", "eval_dataset", "data_collator") if key in options}
    args = TrainingArguments(
        str(directory / "run"),
        config_overrides={"run.save_weights": False},
        **{"save_strategy": "no", **OPTIONS, **options},
    )
    ours = type("Ours", (kind, Trainer), {})
    return ours(model or Regression(), args, train_dataset=rows, default_callbacks=False, **further)


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


class Weighted:
    """As for imbalanced classes, from torch's global random state."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler(WEIGHTS, len(WEIGHTS))


class WeightedWithGenerator:
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler(WEIGHTS, len(WEIGHTS), generator=torch.Generator().manual_seed(5))


class GroupedByLength:
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        generator = torch.Generator().manual_seed(3)
        return LengthGroupedSampler(4, lengths=LENGTHS, generator=generator)


class TorchShuffle:
    """Accelerate seeds this sampler anew for each epoch."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return RandomSampler(self.train_dataset)  # type: ignore[attr-defined]


class NoSampler:
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return None


def squared(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([one["x"] for one in samples]) ** 2, "labels": torch.stack([s["labels"] for s in samples])}


class OwnLoader:
    """Another collator, another batch size and torch's own shuffling."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=3, shuffle=True, collate_fn=squared)  # type: ignore[attr-defined]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


class StreamLoader:
    def get_train_dataloader(self) -> Any:
        return DataLoader(Stream(), batch_size=2)


class BatchesOfUnequalSize:
    def get_train_dataloader(self) -> Any:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
        return DataLoader(self.train_dataset, batch_sampler=batches)  # type: ignore[attr-defined]


class AsInTransformers4:
    """The body of transformers 4's method, which subclasses copy."""

    def get_train_dataloader(self) -> Any:
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")  # type: ignore[attr-defined]
        options = {
            "batch_size": self._train_batch_size,  # type: ignore[attr-defined]
            "collate_fn": collate,
            "num_workers": self.args.dataloader_num_workers,  # type: ignore[attr-defined]
            "pin_memory": self.args.dataloader_pin_memory,  # type: ignore[attr-defined]
            "sampler": self._get_train_sampler(),  # type: ignore[attr-defined]
            "drop_last": self.args.dataloader_drop_last,  # type: ignore[attr-defined]
        }
        return DataLoader(self.train_dataset, **options)  # type: ignore[attr-defined]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler(WEIGHTS, len(WEIGHTS))


KINDS = (
    Weighted,
    WeightedWithGenerator,
    GroupedByLength,
    TorchShuffle,
    NoSampler,
    OwnLoader,
    StreamLoader,
    BatchesOfUnequalSize,
    AsInTransformers4,
)


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    # where the micro-batches of a step differ in size we weight their means by samples, Hugging Face does not
    [(kind, number) for kind in KINDS for number in (1, 2) if (kind, number) != (BatchesOfUnequalSize, 2)],
)
def test_losses_with_a_users_loader_or_sampler_are_those_of_transformers(
    tmp_path: Path, kind: type, accumulation: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    expected = theirs(kind, tmp_path, **options)
    found = losses_of(made(kind, tmp_path, **options))
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=1e-5)


class Killed(RuntimeError):
    """Stands for the end of the process."""


class Seen(Callback):
    """Notes the inputs of every step, and ends the process after step `until`."""

    def __init__(self, until: int = 0) -> None:
        self.steps: list[list[float]] = []
        self._until = until

    def on_train_step_start(self, context: Any) -> None:
        self.steps.append([float(x) for batch in context.micro_batches for x in batch["x"][:, 0]])

    def on_step_end(self, context: Any) -> None:
        if context.state.train_state.step == self._until:
            raise Killed


def steps_of(kind: type, directory: Path, until: int = 0, resume: Any = None, **options: Any) -> list[list[float]]:
    seen = Seen(until)
    trainer = made(kind, directory, save_strategy="steps", save_steps=1, callbacks=[seen], **options)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Killed:
        assert until
    return seen.steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(tmp_path: Path, kind: type) -> None:
    """Killed in the second epoch, whose order follows from the first one's where a generator advances."""
    whole = steps_of(kind, tmp_path / "whole")
    killed_at = len(whole) // 2 + 1
    torch.rand(7)  # what else is drawn from the global random state does not matter
    first = steps_of(kind, tmp_path / "killed", until=killed_at)
    torch.rand(3)
    rest = steps_of(kind, tmp_path / "killed", resume=True)
    assert first == whole[:killed_at]
    assert rest == whole[killed_at - 1 :]  # the step that was not saved, again
