"""Loaders and samplers of a user's subclass: what they give is what is trained on, in their order, also on resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from onstep import Callback, Trainer, TrainingArguments
from onstep.config import args_to_config
from onstep.config.differences import classify
from onstep.config.section import ChangeClass
from onstep.errors import ConfigError, DataError
from tests.support.seen_samples import SeenSamples
from tests.support.small_models import Regression, regression_rows
from tests.support.started_rows import Started
from tests.support.waiting import until

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


class Plain:
    """Overrides nothing."""


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


def steps_of(kind: type, directory: Path, until: int = 0, resume: Any = None, **options: Any) -> list[list[float]]:
    def die(steps: list[list[float]]) -> None:
        raise Killed

    seen = SeenSamples(until, die)
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


class Curriculum:
    """Its order depends on how often it was asked, across runs."""

    asked = 0

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        Curriculum.asked += 1
        return WeightedRandomSampler(WEIGHTS, 13, generator=torch.Generator().manual_seed(Curriculum.asked))


def test_an_order_that_cannot_be_repeated_is_noticed_on_resume(tmp_path: Path) -> None:
    steps_of(Curriculum, tmp_path, until=3)
    with pytest.raises(DataError, match=r"the sampler gives epoch 0 another order.*seed its generator"):
        steps_of(Curriculum, tmp_path, resume=True)


class Endless(Sampler[int]):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(13)


def test_a_sampler_without_an_end_is_read_as_far_as_the_run_goes(tmp_path: Path) -> None:
    sampler = Endless()
    kind = type("EndlessTrainer", (), {"_get_train_sampler": lambda self, rows: sampler})
    assert len(steps_of(kind, tmp_path / "steps", max_steps=9)) == 9
    assert sampler.epochs[0] == 0
    with pytest.raises(ConfigError, match="Endless has no length, so num_train_epochs cannot end the run"):
        made(kind, tmp_path).train()


def test_a_sampler_is_told_each_epoch(tmp_path: Path) -> None:
    class Told(Sampler[int]):
        epoch = 7

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 4)

    kind = type("ToldTrainer", (), {"_get_train_sampler": lambda self, rows: Told()})
    first, second = steps_of(kind, tmp_path)
    assert first == [float(ROWS[0]["x"][0])] * 4
    assert second == [float(ROWS[1]["x"][0])] * 4


def test_a_method_assigned_to_the_object_counts_too(tmp_path: Path) -> None:
    seen = SeenSamples()
    trainer = made(Plain, tmp_path, callbacks=[seen])
    trainer._get_train_sampler = lambda dataset=None: [5] * 4
    trainer.train()
    assert seen.steps == [[float(ROWS[5]["x"][0])] * 4] * 2


def test_super_gives_the_loader_that_would_be_read_without_the_override(tmp_path: Path) -> None:
    class Same:
        calls = 0

        def get_train_dataloader(self) -> Any:
            Same.calls += 1
            return super().get_train_dataloader()  # type: ignore[misc]

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]

    assert steps_of(Same, tmp_path / "same") == steps_of(Plain, tmp_path / "plain")
    assert Same.calls == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Plain, {}),
        (Plain, {"train_sampling_strategy": "sequential"}),
        (Plain, {"train_sampling_strategy": "batch_rebalance"}),
        (Plain, {"dataloader_drop_last": True}),
        (Plain, {"data_seed": 4}),
        (Weighted, {}),
        (Weighted, {"dataloader_drop_last": True}),
        (OwnLoader, {}),
    ],
)
def test_a_loader_made_by_hand_has_the_batches_of_the_training(
    tmp_path: Path, kind: type, options: dict[str, Any]
) -> None:
    rows = [{**row, "input_ids": [0] * length} for row, length in zip(ROWS, LENGTHS, strict=True)]
    steps = steps_of(kind, tmp_path, rows=rows, **options)
    loader = made(kind, tmp_path / "by hand", rows=rows, **options).get_train_dataloader()
    batches = [[float(x) for x in batch["x"][:, 0]] for batch in loader]
    if kind is OwnLoader:  # torch's own shuffling draws from the global random state
        assert sorted(map(len, batches)) == [1, 3, 3, 3, 3]
        return
    epoch = steps[: len(steps) // 2]
    assert list(chain.from_iterable(epoch)) == list(chain.from_iterable(batches))
    assert len(loader) == len(batches)
    assert loader.dataset is rows
    assert callable(loader.collate_fn)
    assert loader.batch_size == (None if options.get("train_sampling_strategy") == "batch_rebalance" else 2)


def test_another_epoch_can_be_looked_at_by_hand(tmp_path: Path) -> None:
    steps = steps_of(Plain, tmp_path)
    loader = made(Plain, tmp_path / "by hand").get_train_dataloader()
    loader.sampler.set_epoch(1)
    second = [float(x) for batch in loader for x in batch["x"][:, 0]]
    assert second == list(chain.from_iterable(steps[len(steps) // 2 :]))


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_grouped_losses_are_those_of_transformers(tmp_path: Path, strategy: str, drop_last: bool) -> None:
    """With one sample in each micro-batch, since batch_rebalance makes them unequal.

    Hugging Face's removes the column of the lengths before it looks for it, unless all columns are kept.
    """

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        return {key: torch.tensor([one[key] for one in samples]) for key in ("x", "labels")}

    rows = datasets.Dataset.from_dict(
        {"x": [r["x"].tolist() for r in ROWS], "labels": [float(r["labels"]) for r in ROWS], "size": LENGTHS}
    )
    options = {
        **OPTIONS,
        "train_sampling_strategy": strategy,
        "length_column_name": "size",
        "dataloader_drop_last": drop_last,
        "per_device_train_batch_size": 1,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **options
    )
    trainer = transformers.Trainer(Regression(), args, collate, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    expected = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    found = losses_of(made(Plain, tmp_path, rows=rows, data_collator=collate, **options))
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_name_of_transformers_4_groups_too_and_measures_what_has_no_column(tmp_path: Path) -> None:
    rows = [{**row, "input_ids": [0] * length} for row, length in zip(ROWS, LENGTHS, strict=True)]
    new = steps_of(Plain, tmp_path / "new", rows=rows, train_sampling_strategy="group_by_length")
    old = steps_of(Plain, tmp_path / "old", rows=rows, group_by_length=True)
    longest = rows[LENGTHS.index(max(LENGTHS))]
    assert new == old
    assert new[0][0] == float(longest["x"][0])
    with pytest.raises(ConfigError, match=r"requires the length of each sample.*'input_ids'.*column 'length'"):
        steps_of(Plain, tmp_path / "none", group_by_length=True)
    with pytest.raises(ConfigError, match="group_by_length' requires a train_dataset with a length"):
        steps_of(Plain, tmp_path / "stream", rows=Stream(), group_by_length=True)
    with pytest.raises(ConfigError, match="group_by_length=True contradicts train_sampling_strategy='sequential'"):
        TrainingArguments(group_by_length=True, train_sampling_strategy="sequential")


def test_another_strategy_changes_what_a_run_learns() -> None:
    for name in ("train_sampling_strategy", "length_column_name", "accelerator_config"):
        assert classify(f"trainer.{name}") is ChangeClass.TRAJECTORY
    options = {"group_by_length": True, "length_column_name": "size"}
    changed = args_to_config(TrainingArguments(**options)).trainer
    assert changed == {**options, "train_sampling_strategy": "group_by_length"}


def test_use_seedable_sampler_false_shuffles_as_torch_does(tmp_path: Path) -> None:
    options = {"accelerator_config": {"use_seedable_sampler": False}, "train_sampling_strategy": "random"}
    assert losses_of(made(Plain, tmp_path, **options)) == pytest.approx(theirs(Plain, tmp_path, **options), rel=1e-5)


class Columns:
    """As the trainers of TRL choose theirs."""

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["x", "labels", "weight"]


@pytest.mark.parametrize("is_table", [True, False])
def test_signature_columns_reach_the_collator(tmp_path: Path, is_table: bool) -> None:
    given: list[list[str]] = []

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        given.append(sorted(samples[0]))
        return {key: torch.tensor(np.array([one[key] for one in samples])).float() for key in ("x", "labels")}

    values = {"x": [[1.0, 2.0, 3.0]] * 4, "labels": [1.0] * 4, "weight": [2.0] * 4, "text": ["a"] * 4}
    table = datasets.Dataset.from_dict(values)
    rows = table if is_table else list(table)
    made(Columns, tmp_path, rows=rows, data_collator=collate, max_steps=1).train()
    assert given[0] == ["labels", "weight", "x"]


def test_overridden_column_methods_are_called(tmp_path: Path) -> None:
    calls: list[str] = []

    class Removes:
        def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
            calls.append(f"columns of {description}")
            return super()._remove_unused_columns(dataset, description)  # type: ignore[misc]

        def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
            calls.append(f"collator of {description}")
            return super()._get_collator_with_removed_columns(data_collator, description)  # type: ignore[misc]

    table = datasets.Dataset.from_dict({"x": [[1.0, 2.0, 3.0]] * 4, "labels": [1.0] * 4, "text": ["a"] * 4})
    made(Removes, tmp_path / "table", rows=table, max_steps=1).train()
    made(Removes, tmp_path / "rows", rows=[{**row, "text": "a"} for row in ROWS], max_steps=1).train()
    assert {"columns of Training", "collator of Training"} <= set(calls)


def test_examples_are_shown_as_the_subclass_counts_them(tmp_path: Path) -> None:
    class Counts:
        def num_examples(self, dataloader: Any) -> int:
            return 1000

    trainer = made(Counts, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.global_state.info.num_examples == 1000
    plain = made(Plain, tmp_path / "plain")
    assert plain.get_total_train_batch_size(plain.args) == 4
    assert plain.num_examples(plain.get_train_dataloader()) == 13


class EvaluatesOwn:
    """Another batch size and collator, and a hook for the dataset."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        return DataLoader(rows, batch_size=1, collate_fn=squared)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return DataLoader(test_dataset, batch_size=5, collate_fn=squared, sampler=[3, 1, 2])


def test_overridden_loaders_of_evaluations_are_read(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", use_cpu=True, disable_tqdm=True)
    real = type("Theirs", (EvaluatesOwn, transformers.Trainer), {})(Regression(), args, eval_dataset=ROWS)
    trainer = made(EvaluatesOwn, tmp_path, eval_dataset=ROWS)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(real.evaluate()["eval_loss"], rel=1e-5)
    found, expected = trainer.predict(ROWS), real.predict(ROWS)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-5)
    np.testing.assert_allclose(found.label_ids, [float(ROWS[index]["labels"]) for index in (3, 1, 2)], rtol=1e-6)


def test_an_eval_sampler_gives_the_order_of_predictions(tmp_path: Path) -> None:
    kind = type("Backwards", (), {"_get_eval_sampler": lambda self, rows: list(range(len(rows)))[::-1]})
    found = made(kind, tmp_path).predict(ROWS)
    np.testing.assert_allclose(found.label_ids, [float(row["labels"]) for row in ROWS[::-1]], rtol=1e-6)


def test_loaders_of_evaluations_made_by_hand(tmp_path: Path) -> None:
    trainer = made(Plain, tmp_path, eval_dataset={"all": ROWS}, per_device_eval_batch_size=4)
    loader = trainer.get_eval_dataloader("all")
    assert [len(batch["x"]) for batch in loader] == [4, 4, 4, 1]
    assert (loader.dataset is ROWS, loader.batch_size, len(loader)) == (True, 4, 4)
    assert len(trainer.get_test_dataloader(ROWS[:5])) == 2
    with pytest.raises(ConfigError, match="requires an eval_dataset"):
        trainer.get_eval_dataloader("other")


def test_datasets_assigned_after_construction_are_used(tmp_path: Path) -> None:
    seen = SeenSamples()
    trainer = made(Plain, tmp_path, rows=None, callbacks=[seen], train_sampling_strategy="sequential", max_steps=1)
    trainer.train_dataset = ROWS[8:]
    trainer.eval_dataset = ROWS[:2]
    trainer.train()
    assert seen.steps[0] == [float(row["x"][0]) for row in ROWS[8:12]]
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_loader_that_needs_no_training_set(tmp_path: Path) -> None:
    kind = type("Own", (), {"get_train_dataloader": lambda self: DataLoader(ROWS, batch_size=2)})
    assert len(steps_of(kind, tmp_path, rows=None)) == 8


def test_workers_of_a_users_loader_are_used_as_it_configures_them(tmp_path: Path) -> None:
    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            worker = torch.utils.data.get_worker_info()
            return {
                "x": torch.full((3,), float(-1 if worker is None else worker.num_workers)),
                "labels": torch.ones(()),
            }

    kind = type("Own", (), {"get_train_dataloader": lambda self: DataLoader(Rows(), batch_size=2, num_workers=2)})
    assert steps_of(kind, tmp_path, max_steps=1) == [[2.0] * 4]


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_dropped_tail_of_a_sampler_is_that_of_transformers(tmp_path: Path, accumulation: int) -> None:
    """13 samples are 6 micro-batches of 2: with 4 of them in a step, the last step of an epoch has 2."""
    options = {"dataloader_drop_last": True, "gradient_accumulation_steps": accumulation}
    expected = theirs(NoSampler, tmp_path, **options)
    found = losses_of(made(NoSampler, tmp_path, **options))
    assert len(found) == len(expected) == 2 * -(-6 // accumulation)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True},
        {"dispatch_batches": False, "even_batches": False, "non_blocking": True, "use_configured_state": False},
        {"gradient_accumulation_kwargs": {"sync_each_batch": False}},
        transformers.TrainingArguments(use_cpu=True, output_dir="x").accelerator_config,
    ],
)
def test_keys_of_accelerator_config_that_change_nothing_are_accepted(config: Any) -> None:
    assert args_to_config(TrainingArguments(accelerator_config=config)) == args_to_config(TrainingArguments())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split_batches": True}, r"\['split_batches'\]=True is not supported: a micro-batch has per_device"),
        ({"dispatch_batches": True}, "every rank reads its own micro-batches"),
        ({"even_batches": 1.5}, "use True or False"),
        ({"split_batch": True}, "has no key 'split_batch'. Did you mean 'split_batches'"),
        ({"gradient_accumulation_kwargs": {"sync_each_batch": True}}, "gradients are reduced once a step"),
        ({"gradient_accumulation_kwargs": {"steps": 2}}, "has no key 'steps'"),
        ("missing.json", "must be a dictionary or the path of a JSON file"),
        (7, "must be a dictionary or the path of a JSON file with one, got 7"),
    ],
)
def test_other_keys_of_accelerator_config_are_refused_with_what_to_do(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(accelerator_config=config)


def test_accelerator_config_may_set_the_accumulation_and_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    path.write_text('{"gradient_accumulation_kwargs": {"num_steps": 4}, "use_seedable_sampler": false}')
    args = TrainingArguments(accelerator_config=str(path))
    assert (args.gradient_accumulation_steps, args.accelerator_config.use_seedable_sampler) == (4, False)
    with pytest.raises(ConfigError, match="contradicts gradient_accumulation_steps=2"):
        TrainingArguments(accelerator_config=str(path), gradient_accumulation_steps=2)


@pytest.mark.parametrize("kind", [Plain, NoSampler])
@pytest.mark.parametrize("factor", [1, 4])
def test_workers_read_as_far_ahead_as_the_factor_says(tmp_path: Path, kind: type, factor: int) -> None:
    reads = torch.multiprocessing.get_context("fork").Value("i", 0)
    options = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": factor, "gradient_accumulation_steps": 1}
    ahead: list[int] = []

    class Looks(Callback):
        def on_train_step_start(self, context: Any) -> None:
            if not ahead:
                until(lambda: reads.value >= 2 * (1 + factor))
                ahead.append(reads.value // 2 - 1)

    made(kind, tmp_path, rows=Started(reads), callbacks=[Looks()], max_steps=2, **options).train()
    assert ahead == [factor]


def test_workers_are_started_as_the_context_says(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn", "max_steps": 1}
    reads = torch.multiprocessing.get_context("spawn").Value("i", 0)
    assert steps_of(Plain, tmp_path, rows=Started(reads), **options)[0][0] == 1.0


def test_reading_out_of_order_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"dataloader_in_order=False is not supported yet .batches are always trained"
    ):
        TrainingArguments(dataloader_in_order=False)


def test_a_loader_with_its_own_collator_may_have_columns_that_the_model_does_not(tmp_path: Path) -> None:
    """As one that tokenizes in its collator."""

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {
            "x": torch.tensor([[float(len(one["text"]))] * 3 for one in samples]),
            "labels": torch.ones(len(samples)),
        }

    class Texts:
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=collate)  # type: ignore[attr-defined]

    rows = datasets.Dataset.from_dict({"text": ["a", "bb", "ccc", "dddd"]})
    assert steps_of(Texts, tmp_path, rows=rows, max_steps=1) == [[1.0, 2.0, 3.0, 4.0]]


def test_a_loader_that_is_kept_serves_several_trainings(tmp_path: Path) -> None:
    class Keeps:
        kept: Any = None

        def get_train_dataloader(self) -> Any:
            self.kept = self.kept or super().get_train_dataloader()  # type: ignore[misc]
            return self.kept

    seen = SeenSamples()
    trainer = made(Keeps, tmp_path, callbacks=[seen])
    trainer.train()
    trainer.train()
    assert seen.steps[: len(seen.steps) // 2] == seen.steps[len(seen.steps) // 2 :]


def test_a_prepared_loader_shuffles_as_accelerate_does(tmp_path: Path) -> None:
    class Prepares:
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(ROWS, batch_size=2, shuffle=True))  # type: ignore[attr-defined]

    for seed in (None, 5):
        expected = theirs(Prepares, tmp_path, data_seed=seed)
        assert losses_of(made(Prepares, tmp_path / str(seed), data_seed=seed)) == pytest.approx(expected, rel=1e-5)


def test_a_key_without_effect_on_a_users_loader_is_refused(tmp_path: Path) -> None:
    trainer = made(Weighted, tmp_path)
    trainer.args.config_overrides = {**(trainer.args.config_overrides or {}), "rng.data_seed": 5}
    with pytest.raises(ConfigError, match=r"config_overrides\['rng.data_seed'\]=5 has no effect .*data_seed"):
        trainer.train()


class LongerThanItSays(torch.utils.data.BatchSampler):
    """A batch sampler that yields a batch more than its length, as one without duplicates in a batch may."""

    def __init__(self) -> None:
        super().__init__(range(6), batch_size=2, drop_last=False)

    def __len__(self) -> int:
        return 2


def test_an_epoch_ends_where_the_length_of_its_sampler_says(tmp_path: Path) -> None:
    """As in transformers; an evaluation reads all."""

    class Loading(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=LongerThanItSays())

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return torch.utils.data.DataLoader(self.eval_dataset, batch_sampler=LongerThanItSays())

    rows = regression_rows(6)
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    args = TrainingArguments(str(tmp_path), num_train_epochs=2, use_cpu=True, disable_tqdm=True, **sizes)
    trainer = Loading(Regression(), args, train_dataset=rows, eval_dataset=rows, default_callbacks=False)
    assert trainer.train().global_step == 4
    assert trainer.state.epoch == 2.0
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").num_samples == 6


def test_several_datasets_are_trained_on_where_the_user_joins_them(tmp_path: Path) -> None:
    class Joining(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(torch.utils.data.ConcatDataset(list(self.train_dataset.values())), batch_size=2)

    args = TrainingArguments(str(tmp_path), num_train_epochs=1, use_cpu=True, disable_tqdm=True)
    several = {"one": regression_rows(4), "two": regression_rows(2)}
    assert Joining(Regression(), args, train_dataset=several, default_callbacks=False).train().global_step == 3
    with pytest.raises(DataError, match="must be a dataset of samples"):
        Trainer(Regression(), args, train_dataset=several).train()
