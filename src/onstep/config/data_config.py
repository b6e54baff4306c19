"""The parts of a configuration that say what is read, and how text becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.part import ConfigPart


@dataclass
class DatasetConfig(ConfigPart):
    """The corpus and how its samples are read."""

    paths: list[str] = field(default_factory=list)
    """Text files, folders, globs or JSONL files; empty is the source of Python's own standard library."""
    text_key: str = "text"
    """The key of a JSONL record that holds the text."""
    split: str = "90,5,5"
    """Shares of train, validation and test."""
    seq_length: int = 256
    cache_dir: str | None = None
    """Where token files are kept; None is `$ONSTEP_CACHE` or the user's cache folder."""
    shuffle: bool = True
    """Shuffle each epoch, by a pure function of seed and epoch."""
    num_workers: int = 2
    """Loader processes; 0 reads in the training process."""
    pin_memory: bool = True
    """Read into pinned memory where there is a GPU."""
    persistent_workers: bool = True
    """Keep loader processes from epoch to epoch."""


@dataclass
class TokenizerConfig(ConfigPart):
    """How text becomes tokens."""

    tokenizer_type: str = "bytes"
    """bytes | tokenizers (a `tokenizer.json`) | huggingface (a local `transformers` tokenizer folder)"""
    tokenizer_model: str | None = None
    """Path of the tokenizer's file or folder."""
