"""What a run of a step moves, remembered so that the step can run again from the same place."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import torch

from onstep.checkpoint import RngState
from onstep.errors import ConfigError


class StepSnapshot:
    """The random generators, the data iterators, and whatever else the caller saves and restores.

    Args:
        device: whose generator belongs to it, besides Python's, NumPy's and torch's.
        save: gives what else a forward pass changes, as copies; None is nothing.
        restore: takes that back, more than once.
    """

    def __init__(
        self, device: torch.device, save: Callable[[], Any] | None, restore: Callable[[Any], None] | None
    ) -> None:
        if (save is None) != (restore is None):
            raise ConfigError("state_save_func and state_restore_func go together; pass both or neither.")
        self._rng = RngState(device)
        self._save, self._restore = save, restore
        self._generators: dict[str, Any] | None = None
        self._extra: Any = None
        self._iterators: list[Any] = []

    def take(self, iterators: list[Any]) -> None:
        """Remember where everything stands; the iterators keep what they give from here on."""
        self._iterators = iterators
        for one in iterators:
            one.advance()
        self._generators = self._rng.state_dict()
        self._extra = None if self._save is None else self._save()

    def go_back(self) -> None:
        """Put everything where it stood."""
        if self._generators is None:
            return
        self._rng.load_state_dict(self._generators)
        if self._restore is not None:
            self._restore(self._extra)
        for one in self._iterators:
            one.rewind()

    def iterator_states(self) -> list[dict[str, Any]]:
        """What each iterator has kept."""
        return [one.state_dict() for one in self._iterators]


def rewindable(data_iterator: Any) -> list[Any]:
    """The iterators to rewind for a rerun.

    Raises:
        TypeError: for one that cannot.
    """
    if data_iterator is None:
        return []
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for one in iterators:
        if not (hasattr(one, "rewind") and hasattr(one, "advance")):
            raise TypeError(
                f"a step that may be rerun needs its data again, and {type(one).__name__} cannot rewind; pass "
                f"RerunDataIterator(...) of it, or rerun_state_machine.rerun_mode=disabled"
            )
    return iterators


EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
"""Start the same command again, on another device: it computes the step once more."""
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
"""A result was wrong, and where the fault lies is known as far as it can be."""


class RerunMode(StrEnum):
    """What the machine does."""

    DISABLED = "disabled"
    """Nothing is rerun: a rejected result raises at once, if fatal, and is warned of otherwise."""
    VALIDATE_RESULTS = "validate_results"
    """A step with a rejected result is rerun."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """Every step runs twice, and the differences are counted."""


class RerunState(Enum):
    """Where the machine stands."""

    NOT_RUNNING_YET = "not_running_yet"
    INITIAL_RUN = "initial_run"
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """Also after it, where the second result was another one."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """After a restart on another device."""
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """After a restart on the same device, which cannot tell anything new."""
