"""Evaluations of both doors read as trainings do: in workers that are kept, into pinned memory for a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.trainer.dataloaders import eval_loader as eval_loader_of_trainer
from onstep.training.setup.model_and_data import eval_loader as eval_loader_of_pretrain
from tests.support.small_configs import small_pretrain_config
from tests.support.small_models import Regression, arguments, quiet, regression_rows


class Workers(Callback):
    """The worker processes that are alive at the end of each evaluation."""

    def __init__(self) -> None:
        self.seen: list[set[int | None]] = []

    def on_eval_end(self, context: Any) -> None:
        self.seen.append({child.pid for child in multiprocessing.active_children()})


def config_of(directory: Path) -> ConfigContainer:
    (directory / "corpus").mkdir()
    (directory / "corpus" / "text.txt").write_text("some text of the corpus. " * 400)
    config = small_pretrain_config(directory / "corpus", directory / "cache")
    config.train.global_batch_size, config.train.train_iters, config.scheduler.lr_warmup_iters = 4, 4, 0
    config.validation.eval_interval, config.validation.eval_iters, config.checkpoint.save_interval = 2, 1, None
    return config


@pytest.mark.parametrize("persistent", [True, False])
def test_pretrain_keeps_the_workers_of_its_evaluations(tmp_path: Path, persistent: bool) -> None:
    config, workers, manager = config_of(tmp_path), Workers(), CallbackManager()
    config.dataset.num_workers, config.dataset.persistent_workers = 1, persistent
    manager.register("on_eval_end", workers.on_eval_end)

    pretrain(config, callbacks=manager)

    assert len(workers.seen) >= 2
    assert all(pids == workers.seen[0] for pids in workers.seen)
    assert len(workers.seen[0]) == (2 if persistent else 1)  # that of the training is alive, too
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("persistent", [True, False])
def test_a_trainer_keeps_the_workers_of_its_evaluations(tmp_path: Path, persistent: bool) -> None:
    workers = Workers()
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": persistent, "eval_strategy": "steps"}
    trainer = quiet(
        Regression(),
        arguments(tmp_path, **options, eval_steps=1, max_steps=3),
        regression_rows(12),
        eval_dataset={"one": regression_rows(4), "two": regression_rows(6)},
        callbacks=[workers],
    )

    trainer.train()

    kept = workers.seen[1:]  # the second set is read for the first time then
    assert len(kept) == 5
    assert all(pids == kept[0] for pids in kept)
    assert len(kept[0]) == (3 if persistent else 1)  # that of the training is alive, too
    assert multiprocessing.active_children() == []


class Pinned:
    """A micro-batch that counts how often it is pinned."""

    count = 0

    def pin_memory(self) -> Pinned:
        Pinned.count += 1
        return self


class Rows:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def get_batch(self, ids: list[int]) -> Pinned:
        return Pinned()


@pytest.mark.parametrize(
    "make", [eval_loader_of_pretrain, lambda config, world, rows: eval_loader_of_trainer(rows, None, config, world)]
)
@pytest.mark.parametrize("pins", [True, False])
def test_batches_of_an_evaluation_are_pinned_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], pins: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Pinned, "count", 0)
    config = config_of(tmp_path)
    config.dataset.num_workers, config.dataset.pin_memory = 0, pins
    config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size = 1, 1

    for kind in ("cuda", "cpu"):
        loader = make(config, World(device=torch.device(kind)), Rows())
        assert len(list(loader.batches())) == 4
        assert Pinned.count == (4 if pins else 0)
