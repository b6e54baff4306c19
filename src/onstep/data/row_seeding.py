"""Random numbers that a worker process draws for a row: a pure function of the row's place in the epoch.

A worker lives as long as one iterator and serves whichever rows fall to it, so the state that its random numbers are
drawn from tells nothing about the row. It is set from the place instead, before a row is read: then any number of
workers draws the same, and so does a run that continues in the middle of an epoch.

That holds for the global generators of torch (CPU), NumPy and Python. A generator that a dataset or a collator keeps
for itself is its own matter. Never called in the training process, whose state a checkpoint saves.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_globals(*place: int | str) -> None:
    """Set the random state of this process from a hash of `place`: of torch (CPU), NumPy and Python."""
    text = " ".join(map(str, place))
    digest = hashlib.blake2b(f"onstep row {text}".encode(), digest_size=40).digest()
    # Different words for each: NumPy and Python have the same generator, and would draw the same numbers.
    # Not torch.manual_seed: where CUDA was not used yet, it formats a stack trace for each call.
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
    random.seed(int.from_bytes(digest[8:24], "little"))
    np.random.seed(np.frombuffer(digest[24:], dtype="<u4"))


@contextmanager
def seeded_aside(*place: int | str) -> Iterator[None]:
    """`seed_globals` for a while; afterwards the numbers go on as if nothing had been drawn."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    seed_globals(*place)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
