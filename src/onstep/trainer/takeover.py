"""Lets a command take over a script where it would train, with the model and the data that the script has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from onstep.config import TrainingArguments


class TakenOver(SystemExit):
    """Ends a script at the place where it was taken over; nothing has failed."""


@dataclass
class TakeOver:
    """What a command wants of a script."""

    at_training: Callable[[Any], object]
    """Called with the Trainer in place of its training."""
    output_dir: Path
    """Where the script's Trainers write, in place of their `output_dir`."""
    is_done: bool = False

    def redirect(self, args: TrainingArguments) -> None:
        """Let a Trainer with these arguments write to the other directory, and report to nobody."""
        args.output_dir = str(self.output_dir)
        args.logging_dir = None
        args.report_to = []
        args.push_to_hub = False

    def train(self, trainer: object) -> NoReturn:
        """Do what the command wants, once, and end the script."""
        if not self.is_done:
            self.is_done = True
            self.at_training(trainer)
        raise TakenOver(0)


_TAKES_OVER: ContextVar[TakeOver | None] = ContextVar("takeover", default=None)


def current_takeover() -> TakeOver | None:
    """What is to take over the script that runs in this thread."""
    return _TAKES_OVER.get()


@contextmanager
def taking_over(takeover: TakeOver) -> Iterator[None]:
    """Take over whatever script runs in the block."""
    token = _TAKES_OVER.set(takeover)
    try:
        yield
    finally:
        _TAKES_OVER.reset(token)
