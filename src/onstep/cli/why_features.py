"""`onstep why --features`: the features of the loop in order, and what makes the host wait, for a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from onstep.analysis.text_tables import printable
from onstep.cli.device_waits import DEVICE_WAITS
from onstep.config import ConfigContainer
from onstep.trainer.feature import TrainerFeature
from onstep.trainer.loop_methods import LoopMethods
from onstep.training import GlobalState
from onstep.training.feature import HOOKS, Feature
from onstep.training.features import RUN, SECTIONS, SETUP, TRAINING
from onstep.training.lifecycle.signal_handling import SignalHandling
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.signals import DistributedSignalHandler

PARTS: dict[str, tuple[Sequence[type[Feature[Any]]], str]] = {
    "SETUP": (SETUP, "opened by pretrain() and Trainer before the process group"),
    "RUN": (RUN, "opened by pretrain() and Trainer before the model is built, else by train()"),
    "SECTIONS": (SECTIONS, "opened by pretrain() and Trainer once the checkpoints are known"),
    "TRAINER": ((TrainerFeature, LoopMethods), "opened by Trainer once it has placed the model"),
    "TRAINING": (TRAINING, "opened by train()"),
}
"""The sections of `FEATURES` and the feature of `Trainer`, in order, and when each is opened."""

_ON_OFF = {True: "on", False: "off"}


@dataclass(frozen=True)
class Row:
    """A row of the table of features, read from the feature's class."""

    name: str
    when: str
    hooks: tuple[str, ...]
    """The hooks it overrides, in the order of `HOOKS`."""
    wraps: tuple[str, ...]
    """The operations of the loop that it wraps."""
    state: str
    """`same on all ranks`, `per rank`, or empty for a feature without state in checkpoints."""
    is_collective: bool

    @classmethod
    def of(cls, kind: type[Feature[Any]]) -> Row:
        """The row of a feature class."""
        hooks = tuple(name for name in HOOKS if getattr(kind, name) is not getattr(Feature, name))
        wraps = tuple(name.removeprefix("wrap_") for name in dir(kind) if name.startswith("wrap_"))
        has_state = hasattr(kind, "state_dict") or kind.stateful is not Feature.stateful
        state = ("per rank" if kind.per_rank else "same on all ranks") if has_state else ""
        return cls(kind.name, kind.when, hooks, wraps, state, kind.collective)


def feature_lines(config: ConfigContainer | None = None) -> Iterator[str]:
    """The table of features and that of waits, two lines each; with a configuration, also which of them are on."""
    answers = {} if config is None else wishes(config)
    number = 0
    for part, (kinds, opened) in PARTS.items():
        yield f"{part}: {opened}"
        for row in map(Row.of, kinds):
            number += 1
            answer = f"{answers[row.name]:5}  " if answers else ""
            yield f"{number:4}  {answer}{row.name:18}  {row.when}"
            yield " " * (6 + len(answer)) + "  " + printable("; ".join(_deeds(row)))
    yield "WAITS: what makes the host wait for an accelerator in a step that is neither logged, evaluated nor saved"
    yield from wait_lines(config)


def wait_lines(config: ConfigContainer | None = None) -> Iterator[str]:
    """What makes the host wait, two lines each; with a configuration, also whether it does so there."""
    for one in DEVICE_WAITS:
        answer = None if config is None else one.answer(config)
        shown = "" if answer is None else f"{answer if isinstance(answer, str) else _ON_OFF[answer]:6}  "
        yield f"      {shown}{one.what}: {one.times}".replace("`", "")
        yield " " * (6 + len(shown)) + one.why.replace("`", "")


def wishes(config: ConfigContainer) -> dict[str, str]:
    """Whether a configuration enables each feature, by name: `on`, `off`, or `model` if that depends on the model.

    Callbacks can enable more: a run whose callbacks do not show progress gets Megatron Bridge's console lines.
    """
    run = GlobalState(cfg=config)
    if config.run.name is not None:
        run.run_dir = RunDir(config.run.local_output_dir / config.run.name)
    job = _JobToBe(run)
    answers = {}
    for kinds, _ in PARTS.values():
        for kind in kinds:
            job.asked_model = False
            is_wanted = kind.wanted(job if kinds is TRAINING else job.run)
            answers[kind.name] = "on" if is_wanted else "model" if job.asked_model else "off"
            if kind is SignalHandling and is_wanted:  # a later feature checks whether signals are handled
                job.run.exits.handler = DistributedSignalHandler(config.train.exit_signals)
    return answers


class _JobToBe:
    """The part of a `Job` that a feature reads before it is built; records whether it reads the model."""

    def __init__(self, run: GlobalState) -> None:
        self.run = run
        self.asked_model = False

    @property
    def model(self) -> list[nn.Module]:
        self.asked_model = True
        return [nn.Identity()]


def _deeds(row: Row) -> Iterator[str]:
    if row.hooks:
        yield ", ".join(row.hooks)
    if row.wraps:
        yield f"wraps {', '.join(row.wraps)}"
    if row.state:
        yield f"state {row.state}"
    if row.is_collective:
        yield "collective"
