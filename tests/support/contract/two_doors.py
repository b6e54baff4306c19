"""One configuration through both doors: what each run did, and which keys its code read."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import onstep
from onstep import CallbackManager, Trainer, pretrain
from onstep.callbacks import JsonLogger
from onstep.config import ConfigContainer, ConfigSection, config_to_args, merge, resolve
from onstep.data import build_datasets
from onstep.data.corpus.tokenizers import build_tokenizer
from onstep.events import VALID_EVENTS, Callback
from onstep.models import build_transformer
from onstep.trainer.feature import TrainerFeature
from onstep.training.runs.identity import IDENTITY_FILE
from onstep.training.runs.run_dir import RunDir
from tests.support.tracker_files import scalars

SOURCE = Path(onstep.__file__).parent
CONTAINER = ConfigContainer()
SECTIONS: dict[type[ConfigSection], str] = {ConfigContainer: ""} | {
    type(part): f"{name}."
    for name in CONTAINER.field_names()
    if isinstance(part := getattr(CONTAINER, name), ConfigSection)
}
"""What the keys of each part start with."""

WHOLE = (
    "metrics/memory/",
    *(
        f"config/{name}.py"
        for name in (
            "checks/idle",
            "checks/validation",
            "derived",
            "differences",
            "hf/conversion",
            "hf/schedules",
            "keys",
            "load",
        )
    ),
)
"""What goes over whole configurations: a value that it reads has no effect by that."""

PRETRAIN_DOOR = (
    "training/pretrain.py", "training/setup/setup.py:set_up", "training/setup/setup.py:resolve_vocabulary",
    "training/setup/model_and_data.py", "training/setup/pretrained.py", "training/setup/final_weights.py:_",
    "training/setup/memory.py", "metrics/memory/",
)  # fmt: skip
"""Code that runs for `pretrain()` alone; that of `trainer/` runs for `Trainer` alone."""

TIMES = ("runtime", "per_second", "time", "speed", "flops", "memory", "energy")
"""Parts of the names of metrics that differ from run to run."""

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")

BASE: dict[str, Any] = {
    "train.train_iters": 4,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "model.num_attention_heads": 2,
    "model.seq_length": 16,
    "model.vocab_size": 272,
    "dataset.seq_length": 16,
    "dataset.split": "1,2,97",
    "dataset.num_workers": 0,
    "optimizer.lr": 0.01,
    "scheduler.lr_decay_style": "constant",
    "logger.log_interval": 2,
    "validation.eval_iters": 1,
    "validation.eval_interval": 2,
    "validation.eval_after_training": False,
    "checkpoint.save_at_end": False,
    "dist.device": "cpu",
    "run.name": "run",
}
"""A run of 4 steps over epochs of 3, without checkpoints."""


@dataclass
class Outcome:
    """What can be seen of a run."""

    ended: str = ""
    features: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    surroundings: dict[str, Any] = field(default_factory=dict)
    """Of the process, within the first step."""
    printed: list[str] = field(default_factory=list)
    """The first words of printed lines."""
    tags: dict[str, list[int]] = field(default_factory=dict)
    """The steps of each tag in TensorBoard."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Those that the run leaves."""
    reads: dict[str, set[str]] = field(default_factory=dict)
    """By key: the functions of a run that read it."""


OBSERVED = ("ended", "features", "events", "counters", "logs", "files", "decisions", "surroundings", "printed", "tags")


OF_ONE_DOOR = (
    IDENTITY_FILE,
    "README.md",
    "latest",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
    "training_args.json",
)
"""Files of `pretrain` or of Trainer alone."""


class Witness(Callback):
    """Notes what surrounds the run; it counts as a report of progress, so that no door prints console lines."""

    shows_progress = True

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rates: list[list[float]] = []

    def on_train_step_start(self, context: Any) -> None:
        self._outcome.surroundings |= {
            "level": logging.getLogger("onstep").level,
            "variable": os.environ.get("ONSTEP_TWO_DOORS"),
            "collects": gc.isenabled(),
            "signals": [name for name in SIGNALS if _is_ours(signal.getsignal(getattr(signal, name)))],
            "logging_dir": Path(context.state.cfg.logger.logging_dir or "").name,
        }
        self._rates.append([float(group["lr"]) for group in context.optimizer.param_groups])
        built = context.state.features.built
        self._outcome.features = [one.name for one in built if not isinstance(one, TrainerFeature)]
        self._outcome.counters["row"] = context.state.num_microbatches, context.state.num_eval_microbatches

    def on_train_end(self, context: Any) -> None:
        state = context.state
        counters = {name: value for name, value in vars(state.train_state).items() if name != "do_test"}
        self._outcome.logs = [*logs_of(state.info), {"rates": self._rates}]
        self._outcome.counters |= {name: value for name, value in counters.items() if isinstance(value, int | float)}


class ByTokens(Trainer):
    """Trains Onstep's own model on the samples that `pretrain()` reads, by the same loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        count = inputs["labels"].numel() if num_items_in_batch is None else num_items_in_batch
        return model(inputs["tokens"], inputs["labels"], reduction="sum") / count


def configuration(directory: Path, corpus: Path, cache: Path, values: dict[str, Any]) -> ConfigContainer:
    """A configuration of small runs; {directory} in a value is the run's own."""
    config = ConfigContainer()
    own = {key: value.format(directory=directory) if isinstance(value, str) else value for key, value in values.items()}
    merge(config, {**BASE, "dataset.paths": [str(corpus)], "dataset.cache_dir": str(cache), **own})
    merge(config, {"run.output_dir": str(directory)})
    return config


def through_pretrain(config: ConfigContainer) -> Outcome:
    """The outcome of `pretrain()`."""
    return _witnessed(config, lambda callbacks: pretrain(config, callbacks=callbacks))


def through_trainer(config: ConfigContainer) -> Outcome:
    """The outcome of `Trainer`, with the same data, model and configuration."""
    model = resolve(config).model
    train, valid, _ = build_datasets(config.dataset, build_tokenizer(config.tokenizer), show_progress=False)

    def start(callbacks: CallbackManager) -> None:
        trainer = ByTokens(
            args=config_to_args(config),
            model_init=lambda: build_transformer(model, seed=config.rng.seed),
            train_dataset=train,
            eval_dataset=valid,
            callbacks=callbacks,
            default_callbacks=False,
        )
        trainer.train()

    return _witnessed(config, start)


def _witnessed(config: ConfigContainer, start: Callable[[CallbackManager], Any]) -> Outcome:
    outcome, printed = Outcome(ended="completed"), io.StringIO()
    manager = CallbackManager()
    manager.add([Witness(outcome), JsonLogger()])
    for event in sorted(VALID_EVENTS):
        manager.register(event, lambda context, event=event: outcome.events.append(event))
    level = logging.getLogger("onstep").level
    try:
        with recorded() as outcome.reads, redirect_stdout(printed):
            start(manager)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - how it ended is what is compared
        outcome.ended = type(error).__name__
    finally:
        logging.getLogger("onstep").setLevel(level)
        os.environ.pop("ONSTEP_TWO_DOORS", None)
    if config.checkpoint.async_save:  # they are fired once the write is done, whenever that is
        outcome.events.sort(key=("on_checkpoint_save", "on_decision").__contains__)
    directory = Path(config.run.output_dir)
    outcome.printed = [" ".join(line.split()[:2]) for line in printed.getvalue().splitlines() if line.strip()]
    files = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    run = directory / str(config.run.name)
    layouts = {path.parts[0]: RunDir(directory / path.parts[0]).layout for path in files}
    shared = {name for name, layout in layouts.items() if layout == "hugging_face"}
    outcome.files = sorted({_stable(_as_in_pretrain(path, shared)) for path in files if path.name not in OF_ONE_DOOR})
    if (run / "run.json").is_file():
        outcome.ended += f", {json.loads((run / 'run.json').read_text())['status']}"
    if (run / "decisions.jsonl").is_file():
        text = (run / "decisions.jsonl").read_text().replace(str(directory), "").replace("/checkpoints/", "/")
        text = re.sub(r"after [\d.]+ minutes", "after some minutes", text)
        outcome.decisions = [json.loads(line) for line in text.splitlines()]
        for one in outcome.decisions:
            one["details"].pop("position", None)  # in the file: it depends on the length of the paths before it
            one.pop("digest")  # of the file, with its times and paths
            if config.checkpoint.async_save and one["flag"] == "saved":
                one.pop("step")  # at which the write was done
    if (RunDir(run).model / "model.safetensors").is_file():
        outcome.weights = load_file(RunDir(run).model / "model.safetensors")
    for board in {path.parent for path in directory.rglob("*tfevents*")}:
        outcome.tags |= {f"{board.name}/{tag}": [step for step, _ in points] for tag, points in scalars(board).items()}
    return outcome


def logs_of(state: Any) -> list[dict[str, Any]]:
    """The records of a run's log; of values that are times only the names, and of the rate, whose step differs: the
    Trainer's is the one that was taken, as Hugging Face's, and the other the next, as Megatron Bridge's.
    """
    unequal = (*TIMES, "learning_rate")
    return [
        {name: None if any(part in name for part in unequal) else value for name, value in record.items()}
        for record in state.log_history
    ]


def differing(one: Outcome, other: Outcome) -> list[str]:
    """What differs between two outcomes, by the names of the fields; sums may round differently."""
    found = [name for name in OBSERVED if not _is_close(getattr(one, name), getattr(other, name))]
    same_weights = one.weights.keys() == other.weights.keys() and all(
        torch.allclose(tensor, other.weights[name], rtol=1e-4, atol=1e-6, equal_nan=True)
        for name, tensor in one.weights.items()
    )
    return found if same_weights else [*found, "weights"]


def shared_readers(reads: set[str]) -> set[str]:
    """Those of the functions that run whichever door opened the run."""
    return {one for one in reads if not one.startswith(("trainer/", *PRETRAIN_DOOR))}


@contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Note who reads each key of any configuration: the innermost function of `onstep` outside `onstep.config`."""
    reads: dict[str, set[str]] = {}

    def read(part: ConfigSection, name: str) -> Any:
        value = object.__getattribute__(part, name)
        if name in KEYS.get(type(part), ()):
            reader = _reader()
            if reader is not None:
                reads.setdefault(SECTIONS[type(part)] + name, set()).add(reader)
        return value

    ConfigSection.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield reads
    finally:
        del ConfigSection.__getattribute__


KEYS = {
    kind: {
        name
        for name in kind.__dataclass_fields__
        if kind is not ConfigContainer or not isinstance(getattr(CONTAINER, name), ConfigSection)
    }
    for kind in SECTIONS
}


def _reader() -> str | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        place = _place(frame.f_code.co_filename, frame.f_code.co_name)
        if place != "config":
            return place
        frame = frame.f_back
    return None


@cache
def _place(file: str, function: str) -> str | None:
    """`module:function` of a function of ours; "config" for the code of configurations; None where none reads."""
    if not file.startswith(str(SOURCE)):
        return None
    module = Path(file).relative_to(SOURCE).as_posix()
    if module.startswith(WHOLE):
        return None
    return "config" if module.startswith("config/") else f"{module}:{function}"


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)
    return bool(one == other)


def _is_ours(handler: Any) -> bool:
    return getattr(handler, "__module__", "").startswith("onstep") or "onstep" in repr(handler)


def _as_in_pretrain(path: Path, shared: set[str]) -> Path:
    """Where `pretrain` puts a file of a run whose directory is `shared`: one of a Trainer, which has no rooms."""
    if path.name == "model.safetensors" and re.fullmatch(r"checkpoint-\d+", path.parent.name):
        path = path.parent / "model" / path.name
    if path.parts[0] not in shared:
        return path
    if re.fullmatch(r"checkpoint-\d+|aside|ft_state.json|progress.txt", path.parts[1]):
        return Path(path.parts[0], "checkpoints", *path.parts[1:])
    return Path(path.parts[0], "model", path.name) if path.name in ("config.json", "model.safetensors") else path


def _stable(path: Path) -> str:
    """A path without what is random in it: the names of event files, the ids of runs."""
    return re.sub(r"tfevents.*|pid_\d+", "", path.as_posix())
