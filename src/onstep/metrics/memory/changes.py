"""Finds the changes of a configuration that would make its training fit into a device, in order of their cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onstep.metrics.memory.estimate import MemoryEstimate, estimate_training_memory

Values = dict[str, Any]
Estimator = Callable[[Any], MemoryEstimate | None]
"""Estimates the memory of a configuration."""


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


def changes_that_fit(
    cfg: Any, limit: int, *, estimate: Estimator = estimate_training_memory, most: int = 3
) -> list[Change]:
    """At most `most` changes, from cheap to dear, each of which makes the training fit into `limit` bytes.

    Cheap is what leaves the result as it is (smaller micro-batches, then recomputation, which costs a third more time);
    then comes what changes precision, then what trains fewer weights, and last what shortens the sequences. A change
    that is not enough alone includes the cheaper ones that it requires.
    """
    found: list[Change] = []
    cheaper: list[Values] = []
    for step in _steps(cfg):
        change = _smallest(cfg, cheaper, step, limit, estimate)
        if change is not None:
            found.append(change)
            if len(found) == most:
                break
        cheaper = [one for one in cheaper if not (one.keys() & step.keys())] + [step]
    return found


def smallest_total(cfg: Any, *, estimate: Estimator = estimate_training_memory) -> Change | None:
    """All changes together, when none makes the training fit; None if there is nothing to change."""
    values: Values = {}
    for step in _steps(cfg):
        values |= step
    total = _total(cfg, values, estimate)
    return Change(values, total) if values and total is not None else None


def _smallest(cfg: Any, cheaper: list[Values], step: Values, limit: int, estimate: Estimator) -> Change | None:
    """`step` with as few of the cheaper changes as it requires; None if it does not fit with all of them."""
    for count in range(len(cheaper) + 1):
        values: Values = {}
        for one in [*cheaper[:count], step]:
            values |= one
        total = _total(cfg, values, estimate)
        if total is not None and total <= limit:
            return Change(values, total)
    return None


def _total(cfg: Any, values: Values, estimate: Estimator) -> int | None:
    changed = copy.deepcopy(cfg)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(getattr(changed, section) if section else changed, name, value)
    found = estimate(changed)
    return None if found is None else found.total


def _steps(cfg: Any) -> Iterator[Values]:
    """What may be changed, from cheap to dear."""
    if (cfg.train.micro_batch_size or 1) > 1:
        yield {"train.micro_batch_size": 1}
    if cfg.model.recompute_granularity != "full":
        yield {"model.recompute_granularity": "full"}
    if cfg.mixed_precision is None:
        yield {"mixed_precision": "bf16_mixed"}
    optimizer, is_lora = cfg.optimizer, cfg.peft.peft_scheme is not None
    if not is_lora and optimizer.params_dtype == "float32":
        yield {"optimizer.params_dtype": "bfloat16"}
    if not is_lora and optimizer.main_params_dtype == "float32":
        yield {"optimizer.params_dtype": "bfloat16", "optimizer.main_params_dtype": "bfloat16"}
    if is_lora or cfg.checkpoint.finetune or cfg.checkpoint.pretrained_checkpoint is not None:
        float32 = {"optimizer.params_dtype": "float32", "optimizer.main_params_dtype": "float32"}
        lora = {"peft.peft_scheme": "lora"}
        changed = {key: value for key, value in float32.items() if getattr(optimizer, key[10:]) != value}
        if not is_lora:
            yield lora | changed
        if cfg.peft.base_quantization is None:
            yield ({} if is_lora else lora | changed) | {"peft.base_quantization": "nf4"}
    length = cfg.model.seq_length
    if cfg.model.position_embedding_type != "learned_absolute" and length >= 512:
        yield {"model.seq_length": length // 2, "dataset.seq_length": length // 2}
