"""Finds the tokenizer of a directory of weights, and ensures that `AutoTokenizer` yields the ids used in training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onstep.config import TokenizerConfig
from onstep.data.corpus.build_cache import write_text
from onstep.data.corpus.tokenizer_library import Explained
from onstep.errors import DataError
from onstep.files.bounded_reading import read_json

logger = logging.getLogger(__name__)

CONFIG_FILE = "tokenizer_config.json"
OUR_KEY = "onstep_tokenizer_type"
"""Key in `tokenizer_config.json` that preserves the token ids when a directory of weights is copied."""
_TOKENIZER_FILES = ("tokenizer.json", CONFIG_FILE, "tokenizer.model")
_NO_CODE = "no_code_here.OpenWithoutTrustRemoteCode"
_PROBE = (
    "It's 2024: 12345 + 67.5 = ?!  don't, caf\u00e9 cafe\u0301 \u4f60\u597d\n\n\ttwo  spaces   \r\n and a #@!... end\n"
)
"""Digits, symbols, composed and decomposed characters, spaces and newlines: text that tokenizers split differently."""
READ_AS_IT_IS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "auto_map": {"AutoTokenizer": [None, _NO_CODE]},
}
"""Entries with which `transformers` reads `tokenizer.json` as it is. It uses the class registered for the model type
unless an `auto_map` names code in the directory. There is no such code, but `transformers` does not look for it without
`trust_remote_code` and falls back to the class named here."""


def tokenizer_in_dir(directory: Path) -> TokenizerConfig | None:
    """The tokenizer of a Hugging Face directory; None if it has none.

    A `tokenizer.json` written by an Onstep run is read directly, any other by `transformers`, and so is one that has
    been given a chat template since.
    """
    config = read_config(directory)
    has_template = "chat_template" in config or (directory / "chat_template.jinja").is_file()
    is_ours = config.get(OUR_KEY) == "tokenizers" and not has_template
    if is_ours and (directory / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(directory / "tokenizer.json"))
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(directory))
    return None


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's `tokenizer_config.json`; empty if it is missing or unreadable."""
    try:
        content = read_json(directory / CONFIG_FILE)
    except (OSError, DataError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_ids_in_transformers(directory: Path, encode: Callable[[str], list[int]]) -> None:
    """Make `AutoTokenizer` yield the ids of `encode` for a directory that holds a model as well as the tokenizer.

    For some architectures `transformers` picks its own class, whatever `tokenizer_config.json` names, and that class
    splits text differently. Logs a warning if the workaround does not help either. Does nothing if there is no model
    or `transformers` is not installed.
    """
    if not (directory / "config.json").is_file():
        return
    try:
        found = _ids_in_transformers(directory)
    except ImportError:
        return
    expected = encode(_PROBE)
    if found == expected:
        return
    before = read_config(directory)
    write_text(directory / CONFIG_FILE, json.dumps({**before, **READ_AS_IT_IS}, indent=2) + "\n")
    if _ids_in_transformers(directory) == expected:
        return
    write_text(directory / CONFIG_FILE, json.dumps(before, indent=2) + "\n")
    logger.warning(
        "transformers.AutoTokenizer yields different token ids for %s than this run was trained with; outside Onstep, "
        "open %s with transformers.PreTrainedTokenizerFast(tokenizer_file=...)",
        directory,
        directory / "tokenizer.json",
    )


def _ids_in_transformers(directory: Path) -> list[int] | None:
    """The ids that `AutoTokenizer` yields for the probe text; None if it cannot open the directory."""
    from transformers import AutoTokenizer

    try:
        with Explained(f"{directory} does not contain a tokenizer that transformers can load"):
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
            return list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    except DataError:
        return None
