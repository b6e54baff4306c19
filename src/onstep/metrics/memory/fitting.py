"""Compares a training's estimated memory with that of its device, and refuses what cannot fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment
from onstep.metrics.memory.changes import Estimator, changes_that_fit, smallest_total
from onstep.metrics.memory.estimate import MemoryEstimate, estimate_training_memory
from onstep.metrics.memory.machine import MachineMemory, machine_memory

KEY = "run.check_memory=false"
"""What lets a run start that is estimated not to fit."""
UNSURE = 1.05
"""How far a total may exceed a GPU's memory before the run is refused: the estimate may be that wrong."""
_ROUGHLY = 1.5
"""The same for a machine's memory and swap space: pages that are not used, or the same, need no memory of their own."""
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "vocab_size")
"""What the number of parameters follows from."""


def check_memory(cfg: Any) -> None:
    """Refuse a model whose weights, or on a CPU whose training, cannot fit into the memory of this machine.

    Raises:
        ConfigError: naming the sizes, the memory needed and the memory there is.
    """
    given, model = cfg.model, copy.copy(cfg.model)
    model.vocab_size = model.vocab_size or cfg.tokenizer.vocab_size or 1
    cfg = replace(cfg, model=model)
    ranks = integer_from_environment("WORLD_SIZE", 1)
    estimate, there = estimate_training_memory(cfg, ranks=ranks), machine_memory()
    if estimate is None or there is None:
        return
    sizes = ", ".join(f"model.{name}={getattr(given, name)}" for name in _SIZES if getattr(given, name))
    has = f"this machine has {there.limit / 2**30:,.0f} GiB of memory"
    if estimate.weights > there.limit:
        raise ConfigError(
            f"{sizes} make a model of {estimate.num_parameters:,} parameters, whose weights are "
            f"{estimate.weights / 2**30:,.0f} GiB; {has}. Lower the sizes, or set {KEY}."
        )
    if cfg.dist.device == "cpu":
        check_machine(cfg, estimate, there, f"{sizes}: ")


def check_machine(
    cfg: Any,
    estimate: MemoryEstimate,
    there: MachineMemory,
    sizes: str = "",
    *,
    estimator: Estimator = estimate_training_memory,
) -> None:
    """Refuse a training on the CPU that requires far more than the machine's memory and swap space.

    Raises:
        ConfigError: with changes that would make it fit.
    """
    if estimate.total > _ROUGHLY * there.limit:
        raise ConfigError(sizes + _refusal(cfg, estimate, there.limit, "this machine has", estimator, "cpu"))


def check_gpu(
    cfg: Any, estimate: MemoryEstimate, there: int, name: str, *, estimator: Estimator = estimate_training_memory
) -> None:
    """Refuse a training that requires more than all the memory of a GPU.

    Args:
        there: bytes of the GPU, free or not.
        name: of the GPU.
        estimator: estimates what changes would do.

    Raises:
        ConfigError: with changes that would make it fit.
    """
    if estimate.total > UNSURE * there:
        raise ConfigError(_refusal(cfg, estimate, there, f"{name} has", estimator, "cuda"))


def summary(estimate: MemoryEstimate, has: str) -> str:
    """One line on what a training is estimated to require, by kind, beside what there is."""
    kinds = [f"{name} {shown(size)}" for name, size in estimate.kinds.items() if size >= estimate.total / 100]
    beside = f", and at least {shown(estimate.on_host)} on the host" if estimate.on_host else ""
    return f"memory: about {shown(estimate.total)} ({'; '.join(kinds)}){beside}; {has}"


def shown(size: int) -> str:
    """Bytes as a person reads them."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:,.1f} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"


def _refusal(cfg: Any, estimate: MemoryEstimate, limit: int, has: str, estimator: Estimator, device: str) -> str:
    changes = changes_that_fit(cfg, limit, device=device, estimate=estimator)
    if changes:
        remedy = "Any of these makes it fit: " + "; ".join(map(str, changes))
    else:
        least = smallest_total(cfg, device=device, estimate=estimator)
        remedy = "A smaller model is required" if least is None else f"Even {least} is too much: use a smaller model"
    return (
        f"the training requires about {shown(estimate.total)} with train.micro_batch_size="
        f"{cfg.train.micro_batch_size} and model.seq_length={cfg.model.seq_length}, and {has} {shown(limit)}. "
        f"{remedy}. {KEY} starts it all the same."
    )
