"""Tells an iterable dataset or a ready loader which epoch begins, so that its order can be had again."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import DataLoader

from onstep.data.stream import is_stateful


class EpochSeeding:
    """Calls `set_epoch` wherever `source`, its dataset or its samplers have it.

    A plain `torch.utils.data.DataLoader` draws its shuffle from torch's global random state where it has no generator:
    replaying it would give other samples. It gets generators here, seeded from (seed, epoch, rank) at each epoch; one
    that the user gave is left alone.
    """

    def __init__(self, source: Any, seed: int, rank: int) -> None:
        self._seed = seed
        self._rank = rank
        self._told = [part for part in _parts(source) if callable(getattr(part, "set_epoch", None))]
        self._seeded = []
        if isinstance(source, DataLoader) and not is_stateful(source):
            self._seeded = [p for p in _parts(source) if hasattr(p, "generator") and p.generator is None]

    def start_epoch(self, epoch: int) -> None:
        """Call before iterating over the source."""
        for part in self._told:
            part.set_epoch(epoch)
        digest = hashlib.blake2b(f"onstep loader {self._seed} {epoch} {self._rank}".encode(), digest_size=7).digest()
        for part in self._seeded:
            part.generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _parts(source: Any) -> list[Any]:
    batch_sampler = getattr(source, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None) or getattr(source, "sampler", None)
    return [p for p in (source, getattr(source, "dataset", None), batch_sampler, sampler) if p is not None]
