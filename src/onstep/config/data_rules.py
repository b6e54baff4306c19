"""The rules that what is read, and how text becomes tokens, keep together."""

from __future__ import annotations

import math
from pathlib import PurePath

from onstep.config.parts import ConfigContainer
from onstep.config.rules import parse_split
from onstep.config.training_config import DatasetConfig, TokenizerConfig
from onstep.errors import ConfigError

_SMALLEST_BPE = 257
_KINDS_OF: dict[str, tuple[str, ...]] = {
    "text_key": ("text", "huggingface"),
    "weights": ("megatron",),
    "hf_subset": ("huggingface", "chat"),
    "hf_split": ("huggingface", "chat"),
    "messages_key": ("chat",),
    "prompt_key": ("chat",),
    "response_key": ("chat",),
    "packing": ("chat",),
    "eod_mask_loss": ("text", "huggingface", "megatron"),
    "reset_attention_mask": ("text", "huggingface", "megatron"),
}
"""The kinds of data that a key means something for."""

_JSONL = (".jsonl", ".ndjson", ".jsonlines")
_FILES_OF_ROWS = (*_JSONL, ".json", ".parquet", ".arrow", ".csv", ".tsv")
_PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py", ".csv", ".tsv", ".json")
"""Ends of files that `text` takes as one document each; a folder or glob may hold JSONL too."""


def check_data(config: ConfigContainer) -> None:
    """Check the keys of data and tokenizer against each other.

    Raises:
        ConfigError: the first rule that is broken, with the values and what to change.
    """
    data = config.dataset
    if parse_split(data.split)[0] == 0 and not config.validation.skip_train:
        raise ConfigError(f"dataset.split={data.split!r} leaves nothing to train on.")
    _check_kind(data)
    _check_files(data)
    _check_weights(data)
    _check_tokenizer(config.tokenizer, data.kind)


def _check_kind(data: DatasetConfig) -> None:
    default = DatasetConfig()
    for name, kinds in _KINDS_OF.items():
        value = getattr(data, name)
        if value != getattr(default, name) and data.kind not in kinds:
            raise ConfigError(
                f"dataset.{name}={value!r} means nothing for dataset.kind={data.kind}; leave it out, or set kind to "
                f"{' or '.join(kinds)}."
            )
    if data.kind != "text" and not data.paths:
        what = {
            "megatron": "the prefixes of .bin and .idx files",
            "huggingface": "a folder, files, or a name on the hub",
            "chat": "JSONL files or datasets of conversations",
        }
        raise ConfigError(f"dataset.paths=[] is empty; dataset.kind={data.kind} takes {what[data.kind]}.")


def _check_files(data: DatasetConfig) -> None:
    """Keys that the named files have no use for, as far as their names tell."""
    default = DatasetConfig()
    if data.hf_subset is not None and _all_end(data.paths, _FILES_OF_ROWS):
        raise ConfigError(
            f"dataset.hf_subset={data.hf_subset!r} is a configuration of a dataset on the hub, and dataset.paths="
            f"{data.paths} are files; leave it out."
        )
    if data.kind == "text" and data.text_key != default.text_key and _all_end(data.paths, _PLAIN_TEXT):
        named = f"dataset.paths={data.paths} are files of plain text" if data.paths else "Python's own sources are not"
        raise ConfigError(
            f"dataset.text_key={data.text_key!r} is a key of JSONL records, and {named}; leave it out, or name files "
            f"that end in {', '.join(_JSONL)}."
        )


def _all_end(paths: list[str], suffixes: tuple[str, ...]) -> bool:
    return all(PurePath(path).suffix.lower() in suffixes for path in paths)


def _check_weights(data: DatasetConfig) -> None:
    if data.weights is None:
        return
    if len(data.weights) != len(data.paths):
        raise ConfigError(
            f"dataset.weights={data.weights} must have one number for each of the {len(data.paths)} dataset.paths."
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in data.weights):
        raise ConfigError(
            f"dataset.weights={data.weights} must be numbers > 0 (they are divided by their sum); leave out a path "
            "with a share of 0."
        )


def _check_tokenizer(tokenizer: TokenizerConfig, kind: str) -> None:
    how, path, size = tokenizer.tokenizer_type, tokenizer.tokenizer_model, tokenizer.vocab_size
    has_path = how not in ("bytes", "bpe")
    if has_path and path is None:
        raise ConfigError(f"tokenizer_type={how} takes the path tokenizer.tokenizer_model.")
    if not has_path and path is not None:
        raise ConfigError(
            f"tokenizer.tokenizer_model={path} means nothing for tokenizer_type={how}; leave it out, or set "
            "tokenizer_type to tokenizers (a file) or huggingface (a folder)."
        )
    if how != "bpe" and size is not None:
        raise ConfigError(
            f"tokenizer.vocab_size={size} is what tokenizer_type=bpe learns, and tokenizer_type is {how}; leave it "
            "out, or set model.vocab_size for a larger model."
        )
    if how == "bpe" and size is not None and size < _SMALLEST_BPE:
        raise ConfigError(f"tokenizer.vocab_size={size} must be >= {_SMALLEST_BPE}: all bytes and the end token.")
    if how == "bpe" and kind == "megatron":
        raise ConfigError(
            "tokenizer_type=bpe is learned from text, and dataset.kind=megatron has token ids; set the tokenizer that "
            "the files were made with."
        )
