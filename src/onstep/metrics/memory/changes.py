"""Finds the changes of a configuration that would make its training fit into a device, in order of their cost."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onstep.metrics.memory.estimate import estimate_training_memory

Values = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Values that make a training fit."""

    values: Values
    """By key."""
    total: int
    """Estimated bytes of the training with them."""

    def __str__(self) -> str:
        """The values as words of a command line, and the figure."""
        words = " ".join(
            f"{key}={str(value).lower() if value is True else value}" for key, value in self.values.items()
        )
        return f"{words} ({self.total / 2**30:,.1f} GiB)"


def changes_that_fit(cfg: Any, limit: int, *, ranks: int = 1, most: int = 3) -> list[Change]:
    """At most `most` changes, from cheap to dear, each of which makes the training fit into `limit` bytes.

    Cheap is what leaves the result as it is (smaller micro-batches, then recomputation, which costs a third more time);
    then comes what changes precision, then what trains fewer weights, and last what shortens the sequences. A change
    that is not enough alone includes the cheaper ones that it requires.
    """
    found: list[Change] = []
    cheaper: list[Values] = []
    for step in _steps(cfg):
        change = _smallest(cfg, cheaper, step, limit, ranks)
        if change is not None:
            found.append(change)
            if len(found) == most:
                break
        cheaper = [one for one in cheaper if not (one.keys() & step.keys())] + [step]
    return found


def smallest_total(cfg: Any, *, ranks: int = 1) -> Change | None:
    """All changes together, when none makes the training fit; None if there is nothing to change."""
    values: Values = {}
    for step in _steps(cfg):
        values |= step
    total = _total(cfg, values, ranks)
    return Change(values, total) if values and total is not None else None


def _smallest(cfg: Any, cheaper: list[Values], step: Values, limit: int, ranks: int) -> Change | None:
    """`step` with as few of the cheaper changes as it requires; None if it does not fit with all of them."""
    for count in range(len(cheaper) + 1):
        values: Values = {}
        for one in [*cheaper[:count], step]:
            values |= one
        total = _total(cfg, values, ranks)
        if total is not None and total <= limit:
            return Change(values, total)
    return None


def _total(cfg: Any, values: Values, ranks: int) -> int | None:
    changed = copy.deepcopy(cfg)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(getattr(changed, section) if section else changed, name, value)
    estimate = estimate_training_memory(changed, ranks=ranks)
    return None if estimate is None else estimate.total


def _steps(cfg: Any) -> Iterator[Values]:
    """What may be changed, from cheap to dear."""
    if (cfg.train.micro_batch_size or 1) > 1:
        yield {"train.micro_batch_size": 1}
    if cfg.model.recompute_granularity != "full":
        yield {"model.recompute_granularity": "full"}
    is_lora = cfg.peft.peft_scheme is not None
    if cfg.mixed_precision is None:
        yield {"mixed_precision": "bf16_mixed"}
    if not is_lora and (cfg.checkpoint.finetune or cfg.checkpoint.pretrained_checkpoint is not None):
        yield {"peft.peft_scheme": "lora"}
    length = cfg.model.seq_length
    if cfg.model.position_embedding_type != "learned_absolute" and length >= 512:
        yield {"model.seq_length": length // 2, "dataset.seq_length": length // 2}
