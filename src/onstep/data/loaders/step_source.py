"""Adapts a user's training data, an iterator or an object with a `read` method, to a `StepSource`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any

from onstep.data.loaders.end_of_data import check_end, items_of
from onstep.data.loaders.iterable_loader import count_samples, is_stateful
from onstep.data.loaders.step_batches import Batch, Compared, StepBatches, StepSource
from onstep.errors import DataError
from onstep.processes.heartbeat import HEARTBEAT

_LOGGER = logging.getLogger(__name__)


class IteratorReader:
    """Reads the steps of an iterator whose items are this rank's micro-batches. It has a single epoch, 0.

    Each rank reads an iterator of its own, which may end before those of others (`compared_by`).

    Without an iterator it never ends, for a forward step that needs no data.

    Samples are counted by the first dimension of a batch's first tensor, assumed equal on every rank. The position is
    the state of an iterator with `state_dict` and `load_state_dict`; for a plain iterator, the number of items
    consumed, which are consumed again from the new iterator on resume.

    Args:
        iterator: the iterator over batches, which cannot be rewound.
        world_size: the number of data-parallel ranks.
    """

    epoch = 0
    num_samples = None
    has_epochs = False
    position_is_shared = False

    def __init__(self, iterator: Iterator[Any] | None, *, world_size: int = 1) -> None:
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise DataError(
                f"expected an iterator of micro-batches, got {type(iterator).__name__}; pass iter(...) instead"
            )
        self._has_data = iterator is not None
        self.compared_by: Compared = "micro-batches" if self._has_data else None
        self._iterator: Any = repeat(None) if iterator is None else iterator
        self._world_size = world_size
        self._items_taken = 0
        self.samples_in_epoch = 0
        """Samples handed out over all ranks, as far as batch sizes are known."""

    def read(self, num_microbatches: int) -> StepBatches | None:
        """The next step; it has fewer micro-batches if the iterator ends within it; None at the end of the iterator.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """
        batches: list[Batch] = []
        counts: list[int] = []
        while len(batches) < num_microbatches:
            try:
                batch = next(self._iterator)
            except StopIteration as stop:
                check_end(stop, self._iterator)
                break
            HEARTBEAT.beats += 1
            batches.append(batch)
            count = count_samples(batch)
            if count is not None:
                counts.append(count)
        if not batches:
            return None
        num_batches, num_samples = len(batches), sum(counts) * self._world_size
        self._items_taken += num_batches
        self.samples_in_epoch += num_samples
        if len(counts) < num_batches:
            return StepBatches(batches, None, None, [False] * num_batches, has_data=self._has_data)
        return StepBatches(batches, None, num_samples, [False] * num_batches, counts)

    def has_next(self, num_microbatches: int) -> bool:
        """Always True: only reading reveals where the data ends.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """
        return True

    def leave_out(self, entries: Iterable[Sequence[int]]) -> None:
        """Do nothing: micro-batches have no index.

        Args:
            entries: (epoch, sample id) of each; it is left out of the epochs after that one.
        """

    def steps_per_epoch(self, num_microbatches: int) -> None:
        """Unknown.

        Args:
            num_microbatches: micro-batches of the step on this rank.
        """

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Accept only the current position: an iterator counts items, not samples; use `load_state_dict` instead.

        Args:
            epoch: the number of the epoch, from 0.
            samples_in_epoch: samples of the epoch that have been read, over all ranks.

        Raises:
            DataError: for any other position.
        """
        if (epoch, samples_in_epoch) != (0, self.samples_in_epoch):
            raise DataError(
                f"an iterator at sample {self.samples_in_epoch} cannot seek to epoch {epoch}, sample "
                f"{samples_in_epoch}; use load_state_dict, or a dataset instead of an iterator"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps handed out so far."""
        state = {"epoch": 0, "samples_in_epoch": self.samples_in_epoch, "items_taken": self._items_taken}
        return {**state, "stream": self._iterator.state_dict()} if is_stateful(self._iterator) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a new iterator from a position returned by `state_dict`.

        Args:
            state: what `state_dict()` returned.

        Raises:
            DataError: if a plain iterator ends before the position.
        """
        if "stream" in state and is_stateful(self._iterator):
            self._iterator.load_state_dict(state["stream"])
        else:
            self._skip_items(state["items_taken"] - self._items_taken)
        self._items_taken = state["items_taken"]
        self.samples_in_epoch = state["samples_in_epoch"]

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def _skip_items(self, num_items: int) -> None:
        if num_items < 0:
            raise DataError(f"the iterator is {-num_items} micro-batches past the position; pass a new iterator")
        if num_items == 0:
            return
        _LOGGER.warning(
            "reading %d micro-batches from the iterator again to reach the position; "
            "an iterator with state_dict and load_state_dict resumes without this",
            num_items,
        )
        num_read = sum(1 for _ in islice(items_of(self._iterator), num_items))
        if num_read < num_items:
            raise DataError(
                f"the iterator ended after {num_read} micro-batches while replaying {num_items}; "
                "resume with the data that the position was saved with"
            )


def as_step_source(data: Any, world_size: int = 1) -> StepSource:
    """`data` itself if it is a `StepSource`, else an adapter for an object with `read` or an iterator of micro-batches.

    Args:
        data: an Onstep loader, an object with `read(num_microbatches)`, an iterator, a list of one iterator, or None
            for a forward step that needs no data.
        world_size: number of ranks that read from iterators like this one.

    Raises:
        DataError: for anything else.
    """
    if isinstance(data, StepSource):
        return data
    if hasattr(data, "read"):
        return ForeignReader(data)
    return IteratorReader(only_iterator(data), world_size=world_size)


def only_iterator(data: Any) -> Any:
    """The iterator in a list of one; anything but a list as it is.

    Raises:
        DataError: for a list of any other length.
    """
    if not isinstance(data, list):
        return data
    if len(data) != 1:
        raise DataError(
            f"the data is a list of {len(data)} iterators, and only a list of 1 can be read: several belong to the "
            "stages of a pipeline, which Onstep does not have; pass one iterator"
        )
    return data[0]


class ForeignReader:
    """A user's object with `read`, with defaults for the other methods of `StepSource`.

    Without `has_next` and `steps_per_epoch`, the data has unknown length; without `leave_out`, its samples have no ids;
    without `position_is_shared`, each rank has a position of its own.
    If `seek`, `state_dict` or `load_state_dict` is missing, calling it raises a DataError.

    Args:
        source: the user's loader, which yields batches.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.compared_by: Compared = getattr(source, "compared_by", "micro-batches")
        self.has_epochs = bool(getattr(source, "has_epochs", True))
        self.position_is_shared = bool(getattr(source, "position_is_shared", False))
        self.to_come: Callable[[list[int]], list[bool] | None] = getattr(source, "to_come", _nothing)
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
        """The source's value, else 0."""
        return int(getattr(self._source, "epoch", 0))

    @property
    def samples_in_epoch(self) -> int:
        """The source's value, else 0."""
        return int(getattr(self._source, "samples_in_epoch", 0))

    @property
    def num_samples(self) -> int | None:
        """The source's value."""
        num_samples: int | None = getattr(self._source, "num_samples", None)
        return num_samples

    def _needed(self, name: str) -> Callable[..., Any]:
        """The source's method, or a stand-in that raises when called, since only some runs need it."""

        def refuse(*_: Any) -> None:
            raise DataError(
                f"the training data {type(self._source).__name__} has no {name}; implement the methods of "
                "onstep.data.StepSource to end epochs, to save checkpoints and to resume from them"
            )

        found: Callable[..., Any] = getattr(self._source, name, refuse)
        return found


def _nothing(*_: Any) -> None:
    """Stand-in for optional methods: returns None."""
