"""What the ranks of the tests of signals and resume run, with what strikes them: `job_*(settings)`.

Strikes are dictionaries: a `signal` (also SIGKILL) that `rank` sends itself, at the `number`-th call at an `event`,
`after` some seconds, once a `file` is there, or at the `number`-th `operation` of a save. With `during_save` that call
at an event is in a save that is being written meanwhile: its second fsync waits for the signal.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import onstep.checkpoint.checkpoint_manager
import onstep.optim.optimizer
import onstep.training.rerun.machine
from onstep import Callback, CallbackManager, JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.checkpoint.storage.store import FileStore, Operation
from onstep.config import ConfigContainer, apply_overrides
from onstep.distributed.shards import held_part
from onstep.optim import DeviceFiniteGate
from onstep.training.runs import signals
from tests.support.counting import Counting
from tests.support.small_configs import small_pretrain_config
from tests.support.waiting import until

RANK = int(os.environ.get("RANK", "0"))


def small_config(settings: dict[str, Any]) -> ConfigContainer:
    """11 steps, 6 an epoch, with dropout, two micro-batches on one rank, logs and evaluations between."""
    config = small_pretrain_config(settings["corpus"] + "/colorsys.py", settings["cache"], length=64)
    config.run.name, config.run.output_dir = "run", settings.get("output_dir", "runs")
    config.dataset.num_workers = 0
    config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 2, 11
    config.model.hidden_dropout = config.model.attention_dropout = 0.1
    config.logger.log_interval = 3
    config.validation.eval_interval, config.validation.eval_iters = 4, 2
    config.checkpoint.certify, config.checkpoint.save_interval, config.checkpoint.most_recent_k = True, None, -1
    apply_overrides(config, settings.get("words", []))
    return config


class Takings:
    """Writes down what each step of this rank took and how it ended, as it happens: `taken-<rank>.jsonl`."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt

    def note(self, context: Any) -> None:
        progress = context.state.train_state
        ids = None if context.sample_ids is None else [one for row in context.sample_ids for one in row]
        loss = next(iter(context.loss_dict.values())).item()
        write_line(
            f"taken-{RANK}.jsonl",
            {"attempt": self._attempt, "step": progress.step + 1, "epoch": progress.epoch, "ids": ids, "loss": loss},
        )


def note_state(context: Any) -> None:
    """Write down what this rank holds of weights and optimizer, as a checkpoint is saved or loaded."""
    held = [held_part(parameter) for parameter in context.model[0].parameters()]
    state = context.optimizer.state_dict()["state"]
    held += [held_part(value) for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    content = b"".join(one.numpy().tobytes() for one in held)
    write_line(f"states-{RANK}.jsonl", {"step": context.checkpoint_step, "state": hashlib.sha256(content).hexdigest()})


def write_line(name: str, record: dict[str, Any]) -> None:
    with Path(name).open("ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def observed(settings: dict[str, Any]) -> tuple[CallbackManager, Counting]:
    """The callbacks of a run, with all that strikes this rank."""
    manager, counting = CallbackManager(), Counting()
    manager.add([JsonLogger(), counting])
    manager.register("on_train_step_end", Takings(settings["attempt"]).note)
    manager.register("on_run_end", lambda context: write_line(f"ends-{RANK}.jsonl", {"reason": context.reason}))
    manager.register("on_train_end", lambda context: write_line(f"ends-{RANK}.jsonl", {"reason": "train end"}))
    if settings.get("notes_states"):
        manager.register("on_checkpoint_save", note_state)
        manager.register("on_checkpoint_load", note_state)
    if "pauses" in settings:
        manager.add(Pauses(**settings["pauses"]))
    prepare_strikes(settings, manager)
    return manager, counting


class Pauses(Callback):
    """The last rank pauses the run after a step, and rank 0 lets it continue."""

    def __init__(self, after: int) -> None:
        self._after, self._is_last = after, int(os.environ["WORLD_SIZE"]) == RANK + 1

    def on_step_end(self, context: Any) -> None:
        if self._is_last and context.step == self._after:
            context.control.pause()

    def on_paused(self, context: Any) -> None:
        if RANK == 0:
            context.control.resume()


def prepare_strikes(settings: dict[str, Any], manager: CallbackManager | None) -> None:
    strikes = [one for one in settings.get("strikes", []) if one.get("rank", 0) == RANK]
    signals.REPEAT_WINDOW_SECONDS = settings.get("repeat_window", signals.REPEAT_WINDOW_SECONDS)
    for one in strikes:
        if "after" in one:
            threading.Timer(one["after"], strike, (one,)).start()
        elif "file" in one:
            threading.Thread(target=_once_there, args=(one,), daemon=True).start()
        elif "event" in one:
            assert manager is not None
            manager.register(one["event"], _at_number(one))
    operations = [one for one in strikes if "operation" in one or "during_save" in one]
    if operations or settings.get("slow_save"):
        on_operation = _slow_and_struck(settings.get("slow_save", 0.0), operations)
        onstep.checkpoint.checkpoint_manager.FileStore = functools.partial(FileStore, on_operation)


def strike(one: dict[str, Any]) -> None:
    Path(f"struck-{RANK}").touch()
    os.kill(os.getpid(), signal.Signals[one["signal"]])


def _once_there(one: dict[str, Any]) -> None:
    until(Path(one["file"]).exists)
    strike(one)


def _at_number(one: dict[str, Any]) -> Callable[[Any], None]:
    notified = itertools.count(1)

    def handler(context: Any) -> None:
        if next(notified) == one["number"]:
            strike(one)

    return handler


def _slow_and_struck(seconds: float, strikes: list[dict[str, Any]]) -> Callable[[Operation], None]:
    counts: dict[str, int] = {"fsync": 0}

    def notified(operation: Operation) -> None:
        counts[operation.kind] = counts.get(operation.kind, 0) + 1
        for one in strikes:
            if "during_save" in one:
                while (operation.kind, counts["fsync"]) == ("fsync", 2) and not Path(f"struck-{RANK}").exists():
                    time.sleep(0.01)
            elif (one["operation"], one["number"]) == (operation.kind, counts[operation.kind]):
                strike(one)
        if operation.kind == "fsync":
            time.sleep(seconds)

    return notified


def job_pretrain(settings: dict[str, Any]) -> None:
    manager, counting = observed(settings)
    state = pretrain(small_config(settings), callbacks=manager)
    report(settings, state, counting)


def report(settings: dict[str, Any], state: Any, counting: Counting, **more: Any) -> None:
    """What the process that ends the run knows."""
    progress = state.train_state
    result = {
        "step": progress.step,
        "ended": state.ending.ended,
        "told": counting.calls,
        "skip_list": progress.skip_list,
        "num_skips": progress.num_skips,
        "num_rollbacks": progress.num_rollbacks,
        "overrides": progress.overrides,
        **more,
    }
    written = Path(f".result-{RANK}.json")
    written.write_text(json.dumps(result))
    written.rename(f"result-{RANK}.json")


def job_cli(settings: dict[str, Any]) -> None:
    from onstep.cli.main import main

    if "device" in settings:  # what a restart on another machine would say
        onstep.training.rerun.machine.device_identity = lambda world: settings["device"]
    prepare_strikes(settings, None)
    raise SystemExit(main(settings["argv"]))


class Rows(Dataset[Any]):
    """Ragged rows; row `slow` takes until a strike and `seconds` more the first time, and says when it starts.

    `spoiled` ones have a factor.
    """

    def __init__(
        self, count: int = 44, slow: int | None = None, seconds: float = 0.0, spoiled: dict[str, float] | None = None
    ) -> None:
        self.count, self.slow, self.seconds, self.spoiled = count, slow, seconds, spoiled or {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.slow and not Path("was-slow").exists():
            Path("was-slow").touch()
            until(Path(f"struck-{os.environ.get('RANK', '0')}").exists)
            time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 16, (12,), generator=generator)
        labels = tokens.roll(-1).clone()
        labels[2 + index % 9 :] = -100
        return {"tokens": tokens, "labels": labels, "factor": torch.tensor(self.spoiled.get(str(index), 1.0))}


class Stream(IterableDataset[Any]):
    """The same rows in order, without a length; `stateful` ones continue without reading again."""

    def __init__(self, count: int) -> None:
        self.rows = Rows(count)

    def __iter__(self) -> Any:
        for index in range(len(self.rows)):
            write_line(f"read-{RANK}.jsonl", {"index": index})
            yield self.rows[index]


class StatefulStream(Stream):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.position = 0

    def __iter__(self) -> Any:
        start, self.position = self.position, 0
        for index in range(start, len(self.rows)):
            write_line(f"read-{RANK}.jsonl", {"index": index})
            self.position = index + 1
            yield self.rows[index]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class TinyModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.out = nn.Embedding(16, width), nn.Dropout(0.1), nn.Linear(width, 16)

    def forward(self, tokens: Any, labels: Any, factor: Any) -> dict[str, Any]:
        logits = self.out(self.drop(self.embed(tokens)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss * factor.prod(), "logits": logits}


def job_trainer(settings: dict[str, Any]) -> None:
    manager, counting = observed(settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kinds: dict[str, Callable[[], Any]] = {
        "rows": lambda: Rows(
            slow=settings.get("slow_row"), seconds=settings.get("slow_seconds", 0.0), spoiled=settings.get("spoiled")
        ),
        "stream": lambda: Stream(44),
        "stateful": lambda: StatefulStream(44),
    }
    model = TinyModel(settings.get("width", 8))
    if settings.get("learns_late"):
        onstep.optim.optimizer.finite_gate = DeviceFiniteGate
    if settings.get("without_dropout"):
        model.drop = nn.Identity()
    values: dict[str, Any] = {
        "output_dir": "runs/run",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": max(1, 4 // world),
        "max_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "use_cpu": True,
        "per_device_eval_batch_size": 3,
        "seed": 11,
        **settings.get("arguments", {}),
    }
    values["config_overrides"] = {"checkpoint.certify": True, **settings.get("overrides", {})}
    trainer = Trainer(
        model,
        TrainingArguments(**values),
        train_dataset=kinds[settings.get("data", "rows")](),
        eval_dataset=Rows(7),
        callbacks=manager,
        default_callbacks=False,
    )
    trainer.train()
    report(settings, trainer.global_state, counting, weights=digest(model))


def digest(model: nn.Module) -> str:
    """Of what this rank holds."""
    return hashlib.sha256(b"".join(held_part(p).numpy().tobytes() for p in model.parameters())).hexdigest()
