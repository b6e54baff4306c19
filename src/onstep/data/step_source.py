"""Whatever a user trains on, as a `StepSource`: the one place where what an object offers is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from onstep.data.iterator_reader import IteratorReader
from onstep.data.step_batches import StepBatches, StepSource
from onstep.errors import DataError


def as_step_source(data: Any, world_size: int = 1) -> StepSource:
    """`data` itself where it is a `StepSource`; an object with `read`, or an iterator of micro-batches, in an adapter.

    Args:
        data: a loader of ours, a user's object with `read(num_microbatches)`, an iterator, or a list of one iterator.
        world_size: ranks that read from iterators like this one.

    Raises:
        DataError: for anything else.
    """
    if isinstance(data, StepSource):
        return data
    if hasattr(data, "read"):
        return ForeignReader(data)
    return IteratorReader(data[0] if isinstance(data, list) else data, world_size=world_size)


class ForeignReader:
    """A user's object with `read`, and stand-ins for what it lacks of `StepSource`.

    Without `has_next` and `steps_per_epoch` it is data of unknown length, without `leave_out` its samples have no ids.
    What needs its position (`seek`, `state_dict`, `load_state_dict`) raises a DataError where it has no such method.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.has_epochs = bool(getattr(source, "has_epochs", True))
        self.read: Callable[[int], StepBatches | None] = source.read
        self.has_next: Callable[[int], bool] = getattr(source, "has_next", lambda num_microbatches: True)
        self.steps_per_epoch: Callable[[int], int | None] = getattr(source, "steps_per_epoch", _nothing)
        self.leave_out: Callable[[Iterable[Sequence[int]]], None] = getattr(source, "leave_out", _nothing)
        self.close: Callable[[], None] = getattr(source, "close", _nothing)
        self.seek: Callable[[int, int], None] = self._needed("seek")
        self.state_dict: Callable[[], dict[str, Any]] = self._needed("state_dict")
        self.load_state_dict: Callable[[dict[str, Any]], None] = self._needed("load_state_dict")

    @property
    def epoch(self) -> int:
        """What the source tells, else 0."""
        return int(getattr(self._source, "epoch", 0))

    @property
    def samples_in_epoch(self) -> int:
        """What the source tells, else 0."""
        return int(getattr(self._source, "samples_in_epoch", 0))

    @property
    def num_samples(self) -> int | None:
        """What the source tells."""
        num_samples: int | None = getattr(self._source, "num_samples", None)
        return num_samples

    def _needed(self, name: str) -> Callable[..., Any]:
        """The source's method, or one that raises when it is called: only some runs need it."""

        def refuse(*_: Any) -> None:
            raise DataError(
                f"the training data {type(self._source).__name__} has no {name}; give it the methods of "
                "onstep.data.StepSource to end epochs, to save checkpoints and to continue from them"
            )

        found: Callable[..., Any] = getattr(self._source, name, refuse)
        return found


def _nothing(*_: Any) -> None:
    """No length, and nothing to do."""
