"""Provides tokenizers: raw bytes, a `tokenizer.json`, or a local `transformers` tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from onstep.config import TokenizerConfig
from onstep.config.suggestions import nearest
from onstep.data.corpus.build_cache import write_text
from onstep.data.corpus.tokenizer_files import OUR_KEY, keep_ids_in_transformers
from onstep.errors import DataError, MissingExtraError

TokenIds = Sequence[int] | npt.NDArray[Any]

_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "<|eot_id|>", "[SEP]")


FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Tokenizer files in a Hugging Face directory."""


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
        """Ids of a prompt; special tokens written in it are parsed as such, and none are added."""

    def encode_content(self, text: str) -> list[int]:
        """Ids of user-written content; a special token written in it is encoded as text."""

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
        """Nothing: bytes need no files."""
        return []


class TokenizersTokenizer:
    """A tokenizer of the `tokenizers` library, loaded from its JSON file.

    Raises:
        DataError: if the file is missing or is not a tokenizer.
        MissingExtraError: if `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _read_tokenizer_file(path)
        self._content = content.decode("utf-8", "replace")
        self._tokenizer = _load_tokenizers(path, content)
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = _size_of_vocab(vocab, path)
        self.eos_id = next((vocab[name] for name in _EOS_NAMES if name in vocab), None)
        self.fingerprint = f"tokenizers 2-{_digest(content)}"

    def encode(self, document: bytes) -> list[int]:
        """Ids of the UTF-8 text of `document`."""
        return self.encode_content(document.decode("utf-8"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are parsed as such."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_content(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are encoded as text."""
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        text: str = self._tokenizer.decode([int(i) for i in ids])
        return text

    def save(self, directory: Path) -> list[Path]:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        config = _tokenizer_config(self._content, self.eos_id)
        texts = {"tokenizer.json": self._content, "tokenizer_config.json": config}
        for name, text in texts.items():
            write_text(directory / name, text)
        keep_ids_in_transformers(directory, self.encode_content)
        return [directory / name for name in texts]


class HuggingFaceTokenizer:
    """A `transformers` tokenizer from a local directory; nothing is downloaded and no code in the directory is run.

    Raises:
        DataError: if the directory is missing or does not contain a tokenizer.
        MissingExtraError: if `transformers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise DataError(f"tokenizer_model {str(path)!r} is not a directory; huggingface requires a local directory")
        self.path = path
        self.library_tokenizer = _load_transformers(path)
        """The `transformers` tokenizer object."""
        vocab: dict[str, int] = self.library_tokenizer.get_vocab()
        self.vocab_size = _size_of_vocab(vocab, path)
        self.eos_id: int | None = self.library_tokenizer.eos_token_id
        backend = getattr(self.library_tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else json.dumps(sorted(vocab.items()))
        described = f"{type(self.library_tokenizer).__name__}\0{self.eos_id}\0{rules}"
        self.fingerprint = f"huggingface 2-{_digest(described.encode())}"

    def encode(self, document: bytes) -> list[int]:
        """Ids of the UTF-8 text of `document`."""
        return self.encode_content(document.decode("utf-8"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text`, however long; special tokens in it are parsed as such."""
        return list(self.library_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_content(self, text: str) -> list[int]:
        """Ids of `text`, however long; special tokens in it are encoded as text."""
        encoding = self.library_tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(encoding["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        text: str = self.library_tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def save(self, directory: Path) -> list[Path]:
        """Copy its files."""
        copied = [Path(shutil.copy(self.path / name, directory)) for name in FILES if (self.path / name).is_file()]
        keep_ids_in_transformers(directory, self.encode_content)
        return copied


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that `config` describes.

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
    return _FROM_PATH[kind](Path(model).expanduser())


def tokenizer_in_run(config: TokenizerConfig, path: Path) -> TokenizerConfig:
    """The configuration that opens the tokenizer of a run, where `path` is the run directory or a path inside it.

    A tokenizer trained by the run is loaded from its directory.

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


def _read_tokenizer_file(path: Path) -> bytes:
    if path.is_dir():
        raise DataError(
            f"tokenizer_model {str(path)!r} is a directory; give its tokenizer.json, or use type huggingface"
        )
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read tokenizer file {str(path)!r}: {reason}; check tokenizer_model") from error


def _load_tokenizers(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise _missing("tokenizers") from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise DataError(
            f"{path} is not a tokenizer of the `tokenizers` library: {error}; give a tokenizer.json"
        ) from error


def _load_transformers(path: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing("transformers") from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(f"{path} does not contain a tokenizer that transformers can load: {error}") from error


def _tokenizer_config(tokenizer_json: str, eos_id: int | None) -> str:
    """What `AutoTokenizer` needs besides `tokenizer.json`: the class that reads it, and the end token."""
    tokens: list[dict[str, Any]] = json.loads(tokenizer_json).get("added_tokens") or []
    ending = next((token["content"] for token in tokens if token.get("id") == eos_id), None)
    named = {} if ending is None else {"eos_token": ending}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **named, OUR_KEY: "tokenizers"}
    return json.dumps(described, indent=2) + "\n"


def _missing(library: str) -> MissingExtraError:
    return MissingExtraError(f"this tokenizer requires the library {library!r}; install it: pip install 'onstep[hf]'")


def _size_of_vocab(vocab: dict[str, int], path: Path) -> int:
    if not vocab:
        raise DataError(f"the tokenizer in {path} has an empty vocabulary; train it first")
    return max(vocab.values()) + 1  # ids may have gaps, so the number of entries is not enough


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
