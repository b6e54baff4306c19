"""Declares the arguments for how samples are read, ordered and collated."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class DataArguments:
    """How samples are read, ordered and collated."""

    train_sampling_strategy: str = argument("random", choices=("random", "sequential"))
    """random | sequential"""
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    dataloader_drop_last: bool = False
    """Drop the tail of an epoch that is shorter than one global batch."""
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
