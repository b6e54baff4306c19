"""Provides tokenizers: raw bytes, a `tokenizer.json`, or a local `transformers` tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from onstep.config import TokenizerConfig
from onstep.config.suggestions import nearest
from onstep.data.corpus.build_cache import write_text
from onstep.data.corpus.byte_tokens import byte_tokenizer_json
from onstep.data.corpus.tokenizer_files import CONFIG_FILE, OUR_KEY, READ_AS_IT_IS, keep_ids_in_transformers
from onstep.data.corpus.tokenizer_library import (
    FILES,
    Explained,
    check_growth,
    load_tokenizers,
    load_transformers,
    read_tokenizer_file,
    size_of_vocab,
    switch_off_alterations,
)
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

TokenIds = Sequence[int] | npt.NDArray[Any]

_END = "<|endoftext|>"
_EOS_NAMES = (_END, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer(Protocol):
    """The tokenizer interface used throughout Onstep."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document; None if the tokenizer has none."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of some text could change."""

    def encode(self, document: bytes) -> TokenIds:
        """Ids of a document without special tokens; a special token written in the document is encoded as text.

        Raises:
            UnicodeDecodeError: if the tokenizer requires UTF-8 and `document` is not.
        """

    def encode_text(self, text: str) -> list[int]:
        """Ids of a prompt; special tokens written in it are parsed as such, and none are added.

        Args:
            text: the text; names of special tokens in it become those tokens.
        """

    def encode_content(self, text: str) -> list[int]:
        """Ids of user-written content; a special token written in it is encoded as text.

        Args:
            text: the text, of which nothing becomes a special token.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    def save(self, directory: Path) -> list[Path]:
        """Write the files that `AutoTokenizer` needs into the existing directory `directory`; returns their paths."""


class ByteTokenizer:
    """Each byte is a token; 256 ends a document. Accepts arbitrary bytes."""

    vocab_size = 257
    eos_id: int | None = 256
    fingerprint = "bytes-257"

    def encode(self, document: bytes) -> npt.NDArray[np.uint8]:
        """The bytes of `document`, without a copy."""
        return np.frombuffer(document, dtype=np.uint8)

    def encode_text(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_content(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return self.encode_text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, and ids that are not bytes are dropped."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> list[Path]:
        """Write a `tokenizer.json` with the same ids, and the `tokenizer_config.json` for `AutoTokenizer`.

        Args:
            directory: the directory to write to.
        """
        config = {"eos_token": _END, "clean_up_tokenization_spaces": False, **READ_AS_IT_IS}
        contents = {FILES[0]: byte_tokenizer_json(_END, 256), CONFIG_FILE: config}
        for name, content in contents.items():
            write_text(directory / name, json.dumps(content, indent=2) + "\n")
        return [directory / name for name in contents]


class TokenizersTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its JSON file.

    Documents are encoded whole: truncation and padding in the file are switched off, and so is the dropout of BPE,
    which would make ids random. `save` writes the tokenizer as it was used.

    Raises:
        DataError: if the file is missing or is not a tokenizer.
        MissingExtraError: if `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._encoding = Explained(f"the tokenizer {path} cannot encode this text")
        content = read_tokenizer_file(path)
        self._tokenizer = load_tokenizers(path, content)
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = size_of_vocab(vocab, path)
        self.eos_id = next((vocab[name] for name in _EOS_NAMES if name in vocab), None)
        check_growth(self._tokenizer, path)
        self._pad_token = _pad_token(self._tokenizer, vocab)
        altering = switch_off_alterations(self._tokenizer)
        self.warning = _warning_of(altering, path)
        """What the user should know about this tokenizer."""
        self._content = self._tokenizer.to_str(pretty=True) if altering else content.decode("utf-8", "replace")
        self.fingerprint = f"tokenizers 2-{_digest(self._content.encode() if altering else content)}"

    def encode(self, document: bytes) -> list[int]:
        """Ids of the UTF-8 text of `document`."""
        return self.encode_content(document.decode("utf-8"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are parsed as such."""
        return self._ids(text, parses_special=True)

    def encode_content(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are encoded as text."""
        return self._ids(text, parses_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        with Explained(f"the tokenizer {self.path} cannot decode these ids"):
            text: str = self._tokenizer.decode([int(i) for i in ids])
        return text

    def save(self, directory: Path) -> list[Path]:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        texts = {"tokenizer.json": self._content, "tokenizer_config.json": self._config()}
        for name, text in texts.items():
            write_text(directory / name, text)
        keep_ids_in_transformers(directory, self.encode_content)
        return [directory / name for name in texts]

    def _ids(self, text: str, *, parses_special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not parses_special
        with self._encoding:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _config(self) -> str:
        """What `AutoTokenizer` needs besides `tokenizer.json`: the class that reads it, the end and padding tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        ending = {} if self.eos_id not in added else {"eos_token": added[self.eos_id].content}
        padding = {} if self._pad_token is None else {"pad_token": self._pad_token}
        described = {"tokenizer_class": "PreTrainedTokenizerFast", **ending, **padding, OUR_KEY: "tokenizers"}
        return json.dumps(described, indent=2) + "\n"


class HuggingFaceTokenizer:
    """A `transformers` tokenizer from a local directory; nothing is downloaded and no code in the directory is run.

    Documents are encoded whole, as by `TokenizersTokenizer`.

    Raises:
        DataError: if the directory is missing or does not contain a tokenizer.
        MissingExtraError: if `transformers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise DataError(f"tokenizer_model {str(path)!r} is not a directory; huggingface requires a local directory")
        self.path = path
        self._encoding = Explained(f"the tokenizer {path} cannot encode this text")
        self.library_tokenizer = load_transformers(path)
        """The `transformers` tokenizer object."""
        with Explained(f"{path} does not contain a tokenizer that transformers can use"):
            vocab: dict[str, int] = self.library_tokenizer.get_vocab()
            self.eos_id: int | None = self.library_tokenizer.eos_token_id
        self.vocab_size = size_of_vocab(vocab, path)
        if self.eos_id is not None and (type(self.eos_id) is not int or not 0 <= self.eos_id < self.vocab_size):
            raise DataError(
                f"the tokenizer in {path} has the eos_token_id {self.eos_id!r}, which is not an id of its vocabulary; "
                "set eos_token in tokenizer_config.json to one of its tokens"
            )
        self._backend = getattr(self.library_tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            check_growth(self._backend, path)
        self._altering = [] if self._backend is None else switch_off_alterations(self._backend)
        self.warning = _warning_of(self._altering, path)
        """What the user should know about this tokenizer."""
        self.fingerprint = _fingerprint(self.library_tokenizer, self._backend)

    def encode(self, document: bytes) -> list[int]:
        """Ids of the UTF-8 text of `document`."""
        return self.encode_content(document.decode("utf-8"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text`, however long; special tokens in it are parsed as such."""
        return self._ids(text)

    def encode_content(self, text: str) -> list[int]:
        """Ids of `text`, however long; special tokens in it are encoded as text."""
        return self._ids(text, split_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        with Explained(f"the tokenizer {self.path} cannot decode these ids"):
            text: str = self.library_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def save(self, directory: Path) -> list[Path]:
        """Copy its files."""
        copied = [Path(shutil.copy(self.path / name, directory)) for name in FILES if (self.path / name).is_file()]
        if self._altering and self._backend is not None:
            write_text(directory / "tokenizer.json", self._backend.to_str(pretty=True))
        keep_ids_in_transformers(directory, self.encode_content)
        return copied

    def _ids(self, text: str, **options: bool) -> list[int]:
        with self._encoding:
            return list(self.library_tokenizer(text, add_special_tokens=False, verbose=False, **options)["input_ids"])


def library_fingerprint(tokenizer: Any) -> str:
    """The fingerprint of a `transformers` tokenizer, as `HuggingFaceTokenizer` has it; it is not changed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend = type(backend).from_str(backend.to_str())
        switch_off_alterations(backend)
    return _fingerprint(tokenizer, backend)


def _fingerprint(tokenizer: Any, backend: Any) -> str:
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    described = f"{type(tokenizer).__name__}\0{tokenizer.eos_token_id}\0{rules}"
    return f"huggingface 2-{_digest(described.encode())}"


def build_tokenizer(config: TokenizerConfig, *, warns: bool = True) -> Tokenizer:
    """Build the tokenizer that `config` describes.

    Args:
        warns: log what the user should know about it; False leaves that to another rank.

    Raises:
        DataError: for an unknown type, or a missing or unreadable file.
        MissingExtraError: if the tokenizer's library is not installed.
    """
    kind, model = config.tokenizer_type, config.tokenizer_model
    if kind == "bytes":
        if model is not None:
            raise DataError(f"tokenizer_type 'bytes' does not use tokenizer_model, got {model!r}; set tokenizer_type")
        return ByteTokenizer()
    if kind == "bpe":
        raise DataError("tokenizer_type 'bpe' is trained on a corpus: use onstep.data.learn_bpe")
    if kind not in _FROM_PATH:
        known = ["bytes", "bpe", *_FROM_PATH]
        raise DataError(f"unknown tokenizer_type {kind!r}.{nearest(str(kind), known)} Known: {', '.join(known)}.")
    if model is None:
        raise DataError(f"tokenizer_type {kind!r} requires tokenizer_model, the path of a file or directory; got None")
    tokenizer = _FROM_PATH[kind](Path(os.path.expanduser(model)))
    if warns and tokenizer.warning is not None:
        _LOGGER.warning("%s", tokenizer.warning)
    return tokenizer


def tokenizer_in_run(config: TokenizerConfig, path: Path) -> TokenizerConfig:
    """The configuration that opens the tokenizer of a run, where `path` is the run directory or a path inside it.

    A tokenizer trained by the run is loaded from its directory.

    Args:
        config: the configuration of the run.

    Raises:
        DataError: if a trained tokenizer is missing.
    """
    if config.tokenizer_type != "bpe":
        return config
    for directory in (path, *path.absolute().parents):
        if (directory / "tokenizer.json").is_file():
            return TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(directory / "tokenizer.json"))
        if (directory / "run.json").is_file():
            break
    raise DataError(
        f"the tokenizer trained by the run of {path} is missing: its directory has no tokenizer.json; restore it"
    )


_FROM_PATH: dict[str, type[TokenizersTokenizer] | type[HuggingFaceTokenizer]] = {
    "tokenizers": TokenizersTokenizer,
    "huggingface": HuggingFaceTokenizer,
}


def _warning_of(altering: list[str], path: Path) -> str | None:
    """What the user should know about settings that were switched off."""
    if not altering:
        return None
    verb = "is" if len(altering) == 1 else "are"
    return f"{path}: {' and '.join(altering)} {verb} switched off: text is encoded whole, the same each time"


def _pad_token(tokenizer: Any, vocab: dict[str, int]) -> str | None:
    """The padding token of a `tokenizers.Tokenizer`, if it is in the vocabulary."""
    padding = tokenizer.padding
    named = None if padding is None else padding["pad_token"]
    return named if named is not None and vocab.get(named) == padding["pad_id"] else None


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
