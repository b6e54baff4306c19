"""Fetches rows of a map-style dataset, in this process or ahead of time in deterministically seeded workers."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from onstep.data.loaders.collate import Collate, as_it_is, fetch_function, pin, should_pin
from onstep.data.loaders.dead_workers import check_alive
from onstep.data.loaders.end_of_data import call, escaped_stop, started
from onstep.data.loaders.sample_order import GlobalMicroBatch
from onstep.data.loaders.step_batches import StepBatches
from onstep.errors import DataError
from onstep.processes.heartbeat import HEARTBEAT

PARENT_SECONDS = 5.0
"""Between two looks of a worker at its parent, as in torch."""


def batches_from_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """One pass over `loader`; non-persistent workers are stopped at its end, also after an error."""
    iterator = started(loader)
    try:
        for batch in iterator:
            HEARTBEAT.beats += 1
            yield batch
    except (OSError, EOFError, RuntimeError) as error:
        check_alive(iterator._workers, error)  # type: ignore[attr-defined]
        raise
    finally:
        if not loader.persistent_workers:
            end_workers(iterator)


def end_workers(iterator: Any) -> None:
    """Stop the worker processes of a DataLoader iterator.

    Torch has no public method for this. Otherwise workers stop when the iterator is garbage-collected, which after an
    error happens late and blocks for five seconds; remove this once torch has a public `close`.
    """
    iterator._shutdown_workers()


def outlive_the_group(worker_id: int) -> None:
    """`worker_init_fn` that makes a worker exit on SIGTERM only if its own parent sent it, and when that has died.

    A scheduler that stops a job signals the whole process group. The main process then finishes its step and saves, for
    which it may need the batches that its workers are still reading. Torch's own look at the parent misses one that was
    killed before it: such a worker would live for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def end_with_parent() -> None:
        while parent.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, PARENT_SECONDS)
            if received is not None and received.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()


class MicroBatchReader:
    """Reads the micro-batches of given rows.

    Workers receive the samples to read row by row, so they can start at any position without skipping. They do not use
    the random state of this process: what a worker draws for a row depends only on `seed`, the epoch and the row's
    position. Without workers, a dataset draws from this process's random state.

    Args:
        options: further options of torch's DataLoader for the workers, such as `prefetch_factor`.

    Raises:
        DataError: for a negative `num_workers`.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if num_workers < 0:
            raise DataError(f"num_workers must be >= 0, got {num_workers}; 0 reads in this process")
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._has_workers = num_workers > 0
        self._pins_memory = should_pin(pin_memory)
        self._feed = _MicroBatchIterator()
        self._make_loader = partial(
            DataLoader,
            _FetchedBatches(dataset, collate_fn, seed),
            batch_sampler=self._feed,
            collate_fn=as_it_is,
            num_workers=num_workers,
            pin_memory=self._pins_memory,
            persistent_workers=persistent_workers,
            generator=torch.Generator().manual_seed(seed % 2**63),
            **{"worker_init_fn": outlive_the_group, **options},
        )
        self._loader: DataLoader[Any] | None = None

    def open(self, rows: Iterator[GlobalMicroBatch], epoch: int) -> Iterator[StepBatches]:
        """The micro-batches of `rows` of `epoch`, in order. Iterators opened earlier must no longer be used."""
        return self._read_in_workers(rows, epoch) if self._has_workers else self._read_here(rows)

    def read_aside(self, rows: Iterator[GlobalMicroBatch]) -> Iterator[StepBatches]:
        """The micro-batches of `rows`, read in this process; iterators opened earlier can still be used."""
        return self._read_here(rows)

    def close(self) -> None:
        """Stop persistent workers; those of a single epoch stop with its iterator."""
        loader, self._loader = self._loader, None
        if loader is not None and loader._iterator is not None:
            end_workers(loader._iterator)

    def _read_here(self, rows: Iterator[GlobalMicroBatch]) -> Iterator[StepBatches]:
        fetch, pins_memory = fetch_function(self._dataset, self._collate_fn), self._pins_memory
        for ids, is_filler, num_samples, _ in rows:
            try:
                batch = fetch(ids)
            except StopIteration as stop:
                raise escaped_stop() from stop
            HEARTBEAT.beats += 1
            if pins_memory:
                batch = pin(batch)
            own = [] if is_filler else ids
            yield StepBatches([batch], [own], num_samples, [is_filler], [len(own)])

    def _read_in_workers(self, rows: Iterator[GlobalMicroBatch], epoch: int) -> Iterator[StepBatches]:
        handed_out = self._feed.start(rows, epoch)
        if self._loader is None:
            self._loader = self._make_loader()
        for batch in batches_from_workers(self._loader):
            ids, is_filler, num_samples, _ = handed_out.popleft()
            own = [] if is_filler else ids
            yield StepBatches([batch], [own], num_samples, [is_filler], [len(own)])


_Task: TypeAlias = tuple[int, int, list[int]]
"""What a worker needs to read a row: epoch, position, ids."""


class _MicroBatchIterator:
    """The batch sampler of the workers. Records the rows it handed out, because batches come back in that order."""

    def __init__(self) -> None:
        self._rows: Iterator[GlobalMicroBatch] = iter(())
        self._epoch = 0
        self._handed_out: deque[GlobalMicroBatch] = deque()

    def start(self, rows: Iterator[GlobalMicroBatch], epoch: int) -> deque[GlobalMicroBatch]:
        """Feed `rows` of `epoch` from the next iteration on; returns the queue of the rows handed out."""
        self._rows, self._epoch, self._handed_out = rows, epoch, deque()
        return self._handed_out

    def __iter__(self) -> Iterator[list[_Task]]:
        epoch, handed_out = self._epoch, self._handed_out
        for row in self._rows:
            handed_out.append(row)
            ids, _, _, position = row
            yield [(epoch, position, ids)]  # to torch, a batch with a single index


class _FetchedBatches(Dataset[Any]):
    """Reads whole micro-batches in a worker, exactly as in the main process except for the random numbers."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, seed: int) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed

    def __getitems__(self, tasks: list[_Task]) -> Any:
        ((epoch, position, ids),) = tasks
        seed_globals(self._seed, epoch, position)
        return call(fetch_function(self._dataset, self._collate_fn), ids)


def seed_globals(*place: int | str) -> None:
    """Set the random states of torch (CPU), NumPy and Python in this process from a hash of `place`.

    What a worker draws for a row is then a pure function of the row's place in the epoch: it is the same for any number
    of workers, and in a run that resumes in the middle of an epoch. Private generators of a dataset or collator are not
    covered. Never called in the training process, whose random state is saved in checkpoints.
    """
    text = " ".join(map(str, place))
    digest = hashlib.blake2b(f"onstep row {text}".encode(), digest_size=40).digest()
    # Different words for each: NumPy and Python use the same generator and would otherwise draw the same numbers.
    # Not torch.manual_seed: until CUDA is initialized, it formats a stack trace on each call.
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:24], "little"))
    np.random.seed(np.frombuffer(digest[24:], dtype="<u4"))


@contextmanager
def seeded_aside(*place: int | str) -> Iterator[None]:
    """Apply `seed_globals` within the context, then restore the previous random states."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    seed_globals(*place)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
