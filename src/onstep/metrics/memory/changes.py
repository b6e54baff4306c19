"""Finds the changes of a configuration that would make its training fit into a device, in order of their cost."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onstep.config.sections.optimizer import OF_BITSANDBYTES, OF_PACKAGES, OF_TORCHAO
from onstep.metrics.memory.estimate import MemoryEstimate, estimate_training_memory

Values = Mapping[str, Any]
Estimator = Callable[[Any], MemoryEstimate | None]
"""Estimates the memory of a configuration."""
Lever = Sequence[Values]
"""What may be changed in one respect, from the mildest to the strongest."""
Choice = Sequence[Values]
"""The values of each lever, by its index; none where it is not used."""


@dataclass(frozen=True)
class Change:
    """Values that make a training fit."""

    values: Values
    """By key."""
    total: int
    """Estimated bytes of the training with them."""

    def __str__(self) -> str:
        """The values as words of a command line, the figure, and the packages that they require."""
        words = " ".join(
            f"{key}={str(value).lower() if value is True else value}" for key, value in self.values.items()
        )
        needed = "".join(f"; requires {package}" for package in self.packages)
        return f"{words} ({self.total / 2**30:,.1f} GiB{needed})"

    @property
    def packages(self) -> list[str]:
        """The packages that the values require besides torch."""
        optimizer, is_quantized = self.values.get("optimizer.optimizer"), "peft.base_quantization" in self.values
        needs = {"bitsandbytes": is_quantized or optimizer in OF_BITSANDBYTES, "torchao": optimizer in OF_TORCHAO}
        return [package for package, is_needed in needs.items() if is_needed]


def changes_that_fit(
    cfg: Any, limit: int, *, device: str = "cuda", estimate: Estimator = estimate_training_memory, most: int = 3
) -> list[Change]:
    """At most `most` changes, from cheap to dear, each of which makes the training fit into `limit` bytes.

    Cheap is what leaves the result as it is (smaller micro-batches, a loss in chunks, then recomputation, which costs
    up to a third more time, and activations in the memory of the host); then comes what changes precision, of the
    computation, of the optimizer's state and of the weights, then what trains fewer weights, and last what shortens the
    sequences. No two changes begin with the same of these; the cheaper ones that a change requires besides follow.
    Nothing in a change can be left out or made milder.

    Args:
        device: the type of the device, cpu or cuda: activations leave a GPU only.
    """
    search, found = _Search(cfg, estimate, device), []
    for index in range(len(search.levers)):
        change = search.least_that_fits(index, limit)
        if change is not None:
            found.append(change)
            if len(found) == most:
                break
    return found


def smallest_total(cfg: Any, *, device: str = "cuda", estimate: Estimator = estimate_training_memory) -> Change | None:
    """The change with the smallest total, when none makes the training fit; None if nothing makes it smaller."""
    search = _Search(cfg, estimate, device)
    totals = [search.change(search.with_cheaper(index, lever[-1])).total for index, lever in enumerate(search.levers)]
    return search.least_that_fits(totals.index(min(totals)), min(totals)) if totals else None


class _Search:
    """Tries the levers of a configuration."""

    def __init__(self, cfg: Any, estimate: Estimator, device: str) -> None:
        self.levers = list(_levers(cfg, device))
        self._cfg, self._estimate = cfg, estimate
        self._totals: dict[tuple[tuple[str, Any], ...], int] = {}

    def least_that_fits(self, index: int, limit: int) -> Change | None:
        """The lever of this index with as little of the cheaper ones as it requires; None if it does not help."""

        def fits(choice: Choice) -> bool:
            return self.change(choice).total <= limit

        for values in self.levers[index]:
            choice = _alone(index, values)
            if not fits(choice):
                choice = self.with_cheaper(index, values)
            if not fits(choice):
                continue
            for place in range(index - 1, -1, -1):
                if choice[place]:
                    milder = [_replaced(choice, place, one) for one in ({}, *self.levers[place])]
                    choice = next(filter(fits, milder), choice)
            if not fits(_replaced(choice, index, {})):
                return self.change(choice)
        return None

    def with_cheaper(self, index: int, values: Values) -> Choice:
        """These values of the lever of this index, with all cheaper ones at their strongest that do no harm."""
        choice = _alone(index, values)
        for place in range(index):
            stronger = _replaced(choice, place, self.levers[place][-1])
            if self.change(stronger).total <= self.change(choice).total:
                choice = stronger
        return choice

    def change(self, choice: Choice) -> Change:
        """What a choice changes, the dearest first."""
        values: dict[str, Any] = {}
        for one in reversed(choice):
            values |= {key: value for key, value in one.items() if key not in values}
        values = {key: value for key, value in values.items() if value != getattr(*_place(self._cfg, key))}
        known = tuple(sorted(values.items()))
        if known not in self._totals:
            self._totals[known] = self._total(values)
        return Change(values, self._totals[known])

    def _total(self, values: Values) -> int:
        changed = copy.deepcopy(self._cfg)
        for key, value in values.items():
            setattr(*_place(changed, key), value)
        found = self._estimate(changed)
        return sys.maxsize if found is None else found.total


def _place(cfg: Any, key: str) -> tuple[Any, str]:
    """The section of a key, and its name there."""
    section, _, name = key.rpartition(".")
    return (getattr(cfg, section) if section else cfg), name


def _alone(index: int, values: Values) -> Choice:
    return [*[{}] * index, values]


def _replaced(choice: Choice, place: int, values: Values) -> Choice:
    return [*choice[:place], values, *choice[place + 1 :]]


_SHORTEST = 256
"""The least length of sequences that is recommended."""
_RECOMPUTED = (("selective", 1), ("full", 2), ("full", 1))
"""Granularity and interval of recomputation, from the least to the most."""


def _levers(cfg: Any, device: str) -> Iterator[Lever]:
    """What may be changed, from cheap to dear."""
    size = cfg.train.micro_batch_size or 1
    if size > 1:
        yield [{"train.micro_batch_size": one} for one in range(size - 1, 0, -1) if size % one == 0]
    if not (cfg.model.chunked_loss or cfg.model.fused_linear_loss):
        yield [{"model.chunked_loss": True}]
    recompute = [{"model.recompute_granularity": one, "model.recompute_interval": n} for one, n in _RECOMPUTED]
    now = cfg.model.recompute_granularity and (cfg.model.recompute_granularity, cfg.model.recompute_interval)
    stronger = recompute[_RECOMPUTED.index(now) + 1 :] if now in _RECOMPUTED else recompute[-1:] if now else recompute
    if stronger:
        yield stronger
    if device == "cuda" and not cfg.model.offload_activations:
        yield [{"model.offload_activations": True}]
    if cfg.mixed_precision is None:
        yield [{"mixed_precision": "bf16_mixed"}]
    yield from _of_weights(cfg, device)
    length = cfg.model.seq_length
    if cfg.model.position_embedding_type != "learned_absolute" and length >= 2 * _SHORTEST:
        parts = [length // 2**n for n in range(1, length.bit_length()) if length // 2**n >= _SHORTEST]
        yield [{"model.seq_length": part, "dataset.seq_length": part} for part in parts]


def _of_weights(cfg: Any, device: str) -> Iterator[Lever]:
    """What may be changed in the optimizer's state and in the weights.

    Each states all the settings that go together, so that it can replace a cheaper one of these.
    """
    optimizer, is_lora = cfg.optimizer, cfg.peft.peft_scheme is not None
    is_float32 = optimizer.params_dtype == "float32"
    smaller = _SMALLER_STATE[device] if optimizer.optimizer == "adam" else ()
    pure = {"optimizer.params_dtype": "bfloat16", "optimizer.main_params_dtype": "bfloat16"}
    nearest = pure | {"optimizer.rounding": "nearest"}
    if smaller:
        yield [{"optimizer.optimizer": name} | ({} if is_float32 else nearest) for name in smaller]
    now = {"optimizer.optimizer": optimizer.optimizer, "optimizer.rounding": optimizer.rounding}
    if not is_lora and cfg.mixed_precision != "fp16_mixed":
        own = [now | {"optimizer.params_dtype": "bfloat16"}, now | pure]
        both = [{"optimizer.optimizer": name} | nearest for name in smaller] if is_float32 else []
        yield [*own, *both] if optimizer.optimizer not in OF_PACKAGES else [nearest]
    lora = now | {"peft.peft_scheme": "lora"}
    lora |= {"optimizer.params_dtype": "float32", "optimizer.main_params_dtype": "float32"}
    quantized = {"peft.base_quantization": "nf4"}
    if is_lora and cfg.peft.base_quantization is None:
        yield [quantized]
    elif not is_lora and (cfg.checkpoint.finetune or cfg.checkpoint.pretrained_checkpoint is not None):
        yield [lora, lora | quantized]


_SMALLER_STATE = {"cuda": ("adamw_8bit", "paged_adamw_8bit"), "cpu": ("adamw_torch_8bit",)}
"""Optimizers that compute what AdamW does with less memory for their state, by device, from the most to the least."""
