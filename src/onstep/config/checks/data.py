"""The rules of data and tokenizer against each other."""

from __future__ import annotations

import math
from pathlib import PurePath

from onstep.config.container import ConfigContainer
from onstep.config.sections.data import DatasetConfig, TokenizerConfig
from onstep.config.suggestions import shown
from onstep.errors import ConfigError, without_credentials
from onstep.stores.urls import check_url, is_url, without_secrets

_SMALLEST_BPE = 257
_JSONL = (".jsonl", ".ndjson", ".jsonlines")
_FILES_OF_ROWS = (*_JSONL, ".json", ".parquet", ".arrow", ".csv", ".tsv")
_PLAIN_TEXT = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".py", ".csv", ".tsv", ".json")
"""Suffixes of files that `text` reads as one document each; a directory or glob may hold JSONL too."""


def check_data(config: ConfigContainer) -> None:
    """Check the keys of data and tokenizer against each other."""
    data = config.dataset
    if parse_split(data.split)[0] == 0 and not config.validation.skip_train:
        raise ConfigError(f"dataset.split={shown(data.split)} leaves nothing to train on.")
    _check_paths(data)
    _check_urls(data)
    _check_files(data)
    _check_weights(data)
    _check_stream(config)
    _check_tokenizer(config.tokenizer, data.kind)


def parse_split(text: str) -> tuple[float, float, float]:
    """The shares of train, validation and test as fractions of 1, from text such as '90,5,5'.

    Missing shares are 0, so '100' trains on everything.

    Args:
        text: three shares, as `8,1,1` or `0.8,0.1,0.1`.

    Raises:
        ConfigError: not one to three numbers >= 0 with a sum above 0.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(
            f"dataset.split={shown(text)} must be the shares of train, validation and test, such as '90,5,5'."
        )
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def _check_paths(data: DatasetConfig) -> None:
    if data.kind != "text" and not data.paths:
        what = {
            "megatron": "the prefixes of .bin and .idx files",
            "huggingface": "a directory, files, or a name on the hub",
            "chat": "JSONL files or datasets of conversations",
            "stream": "parquet or JSON-lines files, URLs of them, or a name on the hub",
        }
        raise ConfigError(f"dataset.paths=[] is empty; dataset.kind={data.kind} requires {what[data.kind]}.")


def _check_urls(data: DatasetConfig) -> None:
    """Refuse credentials in URLs, and what is neither a local path nor the URL of an object store."""
    urls = [path for path in data.paths if is_url(path)]
    for url in urls:
        check_url("dataset.paths", url)
    others = [path for path in data.paths if not is_url(path)]
    if data.kind == "stream":
        signed = [path for path in others if without_credentials(path) != path]
        if signed:
            raise ConfigError(
                f"dataset.paths={without_secrets(signed[0])} must be without credentials and signatures, which would "
                f"be recorded with the run; pass credentials by the environment or the library's own files."
            )
        return
    foreign = [path for path in others if "://" in path]
    if foreign:
        raise ConfigError(
            f"dataset.paths={without_secrets(foreign[0])} is not the URL of an object store (s3://, gs://, az://, "
            f"file://), from which dataset.kind={data.kind} reads; download it, or use dataset.kind=stream."
        )
    if urls and others:
        raise ConfigError(
            f"dataset.paths has the URL {urls[0]} and {others[0]}, which is not one; the order of "
            f"their files would depend on the machine: name all by URLs of object stores (file:///... for local files)."
        )


def _check_files(data: DatasetConfig) -> None:
    """Refuse keys that do not apply to the given files, as far as their suffixes show."""
    if data.hf_subset is not None and _all_end(data.paths, _FILES_OF_ROWS):
        raise ConfigError(
            f"dataset.hf_subset={shown(data.hf_subset)} is a configuration of a dataset on the hub, and dataset.paths="
            f"{data.paths} are files; drop it."
        )
    if data.kind == "text" and "text_key" in data.changed() and _all_end(data.paths, _PLAIN_TEXT):
        named = f"dataset.paths={data.paths} are files of plain text" if data.paths else "Python's own sources are not"
        raise ConfigError(
            f"dataset.text_key={shown(data.text_key)} is a key of JSONL records, and {named}; drop it, or name files "
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


def _check_stream(config: ConfigContainer) -> None:
    """Refuse a length in epochs of unknown length, and keys of records that the stream does not have."""
    data, epochs = config.dataset, config.train.num_epochs
    if data.kind != "stream":
        return
    if epochs is not None and data.stream_epoch_tokens is None:
        raise ConfigError(
            f"train.num_epochs={epochs} cannot be the length of a run on a stream, whose own length is unknown until "
            "it ends; set train.train_iters instead, or dataset.stream_epoch_tokens, the tokens of an epoch."
        )
    of_others = {
        "text": ("messages_key", "prompt_key", "response_key", "packing"),
        "chat": ("text_key", "eod_mask_loss", "reset_attention_mask"),
    }
    for name in of_others.get(data.stream_of, ()):
        if name in data.changed():
            other = "chat" if data.stream_of == "text" else "text"
            raise ConfigError(
                f"dataset.{name}={shown(getattr(data, name))} is of streams of {other}, and dataset.stream_of="
                f"{data.stream_of}; drop it, or set dataset.stream_of={other}."
            )


def _check_tokenizer(tokenizer: TokenizerConfig, kind: str) -> None:
    how, path, size = tokenizer.tokenizer_type, tokenizer.tokenizer_model, tokenizer.vocab_size
    has_path = how not in ("bytes", "bpe")
    if has_path and path is None:
        raise ConfigError(f"tokenizer_type={how} requires tokenizer.tokenizer_model, the path of the tokenizer.")
    if is_url(path or ""):
        raise ConfigError(
            f"tokenizer.tokenizer_model={without_secrets(str(path))} must be a local path; copy the tokenizer to "
            f"a directory, and name that."
        )
    if not has_path and path is not None:
        raise ConfigError(
            f"tokenizer.tokenizer_model={shown(path)} has no effect with tokenizer_type={how}; drop it, or set "
            "tokenizer_type to tokenizers (a file) or huggingface (a directory)."
        )
    if how != "bpe" and size is not None:
        raise ConfigError(
            f"tokenizer.vocab_size={size} is what tokenizer_type=bpe learns, and tokenizer_type is {how}; leave it "
            "out, or set model.vocab_size for a larger model."
        )
    if how == "bpe" and size is not None and size < _SMALLEST_BPE:
        raise ConfigError(f"tokenizer.vocab_size={size} must be >= {_SMALLEST_BPE}: all bytes and the end token.")
    if how == "bpe" and kind == "stream":
        raise ConfigError(
            "tokenizer_type=bpe is learned from all of a corpus, and dataset.kind=stream is read only once; learn it "
            "in a run on a part of the files (kind=text), and set tokenizer_type=tokenizers and tokenizer_model to its "
            "tokenizer.json."
        )
    if how == "bpe" and kind == "megatron":
        raise ConfigError(
            "tokenizer_type=bpe is learned from text, and dataset.kind=megatron has token ids; set the tokenizer that "
            "the files were made with."
        )
