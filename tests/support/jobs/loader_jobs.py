"""What the ranks of the tests of a user's loaders run: `job_train(settings)`."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from onstep import Trainer, TrainingArguments
from onstep.config import ConfigContainer
from onstep.distributed import data_parallel, open_world
from onstep.optim import TrainingOptimizer
from onstep.trainer.loaders.torch_loaders import prepared_loader
from onstep.training import GlobalState, train
from tests.support.seen_samples import SeenSamples, die_with_all_ranks
from tests.support.small_models import Regression, regression_rows
from tests.support.small_runs import LENGTH, RaggedRows, TinyModel, sum_step

ROWS = [{**row, "input_ids": [0] * (1 + 7 * number % 5)} for number, row in enumerate(regression_rows(13))]


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([one[key] for one in samples]) for key in ("x", "labels")}


class Weighted(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return WeightedRandomSampler([1.0 + number % 5 for number in range(13)], 13)


class Prepared(Trainer):
    def get_train_dataloader(self) -> Any:
        return prepared_loader(self.args, DataLoader(ROWS, batch_size=2, shuffle=True, collate_fn=collate))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(ROWS, batch_size=3, collate_fn=collate)


class Distributed(Trainer):
    """Splits the samples itself, and needs the ranks to be connected."""

    def get_train_dataloader(self) -> Any:
        sampler: Any = DistributedSampler(ROWS, seed=3)  # type: ignore[arg-type]
        return DataLoader(ROWS, batch_size=2, sampler=sampler, collate_fn=collate)


class PreparedStream(Trainer):
    def get_train_dataloader(self) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(ROWS)

        return prepared_loader(self.args, DataLoader(Stream(), batch_size=2, collate_fn=collate))


class Uneven(Trainer):
    """Each rank reads a stream of its own: 3 micro-batches on rank 0, one more on each further one."""

    def get_train_dataloader(self) -> Any:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(ROWS[: 6 + 2 * int(os.environ["RANK"])])

        return DataLoader(Stream(), batch_size=2, collate_fn=collate)


KINDS = {one.__name__: one for one in (Trainer, Weighted, Prepared, Distributed, PreparedStream, Uneven)}


def rows_of(kind: str) -> Any:
    if kind == "rows":
        return ROWS
    import datasets
    from datasets.distributed import split_dataset_by_node

    table = {"x": [row["x"].tolist() for row in ROWS], "labels": [float(row["labels"]) for row in ROWS]}
    stream = datasets.Dataset.from_dict(table).to_iterable_dataset(num_shards=3)
    if kind == "shuffled":
        return stream.shuffle(seed=1, buffer_size=4)
    return split_dataset_by_node(stream, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def job_train(settings: dict[str, Any]) -> None:
    read = SeenSamples(settings.get("until", 0), die_with_all_ranks)
    values = {
        "output_dir": "run",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "use_cpu": True,
        **settings.get("arguments", {}),
    }
    args = TrainingArguments(**values)
    kind = KINDS[settings.get("kind", "Trainer")]
    trainer = kind(
        Regression(),
        args,
        train_dataset=rows_of(settings.get("rows", "rows")),
        eval_dataset=ROWS,
        callbacks=[read],
        default_callbacks=False,
    )
    by_hand: list[list[float]] = []
    if settings.get("by_hand"):
        by_hand = [[float(x) for x in batch["x"][:, 0]] for batch in trainer.get_train_dataloader()]
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    result = {"steps": read.steps, "losses": losses, "by_hand": by_hand, "eval": trainer.evaluate()["eval_loss"]}
    Path(f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(result))


def job_iterators(settings: dict[str, Any]) -> dict[str, Any]:
    """Train on iterators by hand, which yield as many micro-batches as `lengths` says of this rank."""
    config, rank = ConfigContainer(), int(os.environ["RANK"])
    config.train.micro_batch_size, config.train.train_iters = 2, 10
    config.train.global_batch_size = 4 * len(settings["lengths"])
    config.model.seq_length, config.dist.device = LENGTH, "cpu"
    with closing(open_world(config.dist)) as world:
        state = GlobalState(config, world)
        state.num_microbatches = 2
        model = data_parallel([TinyModel()], world, config.ddp)
        optimizer = TrainingOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
        rows = (torch.utils.data.default_collate([RaggedRows()[0]] * 2) for _ in range(settings["lengths"][rank]))
        train(sum_step, model, optimizer, None, rows, None, state)
        return {"step": state.train_state.step, "weights": float(sum(p.sum() for p in model[0].parameters()))}
