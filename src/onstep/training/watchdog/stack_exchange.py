"""Collects the Python stacks of all ranks outside of the training, which may hang."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from onstep.training.watchdog.stacks import stacks_of_threads

_PREFIX = "onstep_stacks"
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


class StackExchange:
    """Answers requests for the stacks of this rank, through a connection of its own to the process group's store.

    Every rank creates one, in the same order. Rank 0 asks; on the other ranks a daemon thread looks twice a second.

    Args:
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._asked = rank, size, 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._store: Any = None
        if size == 1:
            return
        shared: Any = dist.distributed_c10d._get_default_store()
        self._store = shared.clone()
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        session = int(self._store.add(f"{_PREFIX}/sessions/{rank}", 1))
        self._prefix = f"{_PREFIX}/{session}"
        if rank != 0:
            threading.Thread(target=self._answer, name="onstep-stacks", daemon=True).start()

    def collect(self, timeout_seconds: float = 4.0) -> dict[int, str]:
        """The stacks of all threads of each rank, on rank 0; a rank that does not answer in time says so."""
        found = {0: stacks_of_threads({threading.get_ident()})}
        if self._size == 1:
            return found
        with self._lock:
            self._asked += 1
            deadline = time.monotonic() + timeout_seconds
            try:
                self._store.set(f"{self._prefix}/ask/{self._asked}", "1")
                while len(found) < self._size and time.monotonic() < deadline:
                    self._read_answers(found)
                    time.sleep(0.05)
            except (RuntimeError, ValueError) as error:  # torch's network errors
                missing = f"unknown: the store of the process group does not respond ({type(error).__name__})"
            else:
                missing = f"no answer within {timeout_seconds:g} s: stopped, gone, or held by native code"
        return {rank: found.get(rank, missing) for rank in range(self._size)}

    def close(self) -> None:
        """Stop answering."""
        self._closing.set()

    def _read_answers(self, found: dict[int, str]) -> None:
        for rank in range(1, self._size):
            key = f"{self._prefix}/answer/{self._asked}/{rank}"
            if rank not in found and self._store.check([key]):
                found[rank] = self._store.get(key).decode()

    def _answer(self) -> None:
        asked = 1
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                if self._store.check([f"{self._prefix}/ask/{asked}"]):
                    stacks = stacks_of_threads({threading.get_ident()})
                    self._store.set(f"{self._prefix}/answer/{asked}/{self._rank}", stacks)
                    asked += 1
            except (RuntimeError, ValueError):  # the store is gone, and so is the run
                return
