"""What a folder of weights says of its tokens, and whether `AutoTokenizer` reads them as they were trained on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onstep.config.parts import TokenizerConfig
from onstep.data.corpus.build_cache import write_text

logger = logging.getLogger(__name__)

CONFIG_FILE = "tokenizer_config.json"
OUR_KEY = "onstep_tokenizer_type"
"""Key of `tokenizer_config.json` by which a copied folder of weights keeps its ids here."""
_TOKENIZER_FILES = ("tokenizer.json", CONFIG_FILE, "tokenizer.model")
_NO_CODE = "no_code_here.OpenWithoutTrustRemoteCode"
_PROBE = (
    "It's 2024: 12345 + 67.5 = ?!  don't, caf\u00e9 cafe\u0301 \u4f60\u597d\n\n\ttwo  spaces   \r\n and a #@!... end\n"
)
"""Digits, signs, composed and decomposed letters, spaces and new lines: what tokenizers cut in different ways."""


def tokenizer_in_folder(folder: Path) -> TokenizerConfig | None:
    """The tokenizer of a Hugging Face folder; None where it has none.

    A `tokenizer.json` that a run left is read as it is; any other by `transformers`.
    """
    if read_config(folder).get(OUR_KEY) == "tokenizers" and (folder / "tokenizer.json").is_file():
        return TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(folder / "tokenizer.json"))
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(folder))
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `tokenizer_config.json`; empty where it has none that can be read."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_ids_in_transformers(folder: Path, encode: Callable[[str], list[int]]) -> None:
    """See to it that `AutoTokenizer` gives the ids of `encode` for a folder that has a model beside the tokenizer.

    For some architectures `transformers` takes a class of its own, whatever `tokenizer_config.json` names, and that
    cuts text in another way. Where a second try does not help either, a warning says so. Nothing is done where there is
    no model or `transformers` is not installed.
    """
    if not (folder / "config.json").is_file():
        return
    try:
        found = _ids_in_transformers(folder)
    except ImportError:
        return
    expected = encode(_PROBE)
    if found == expected:
        return
    before = read_config(folder)
    # In this form `transformers` reads `tokenizer.json` as it is. It looks for the class that a model type stands for
    # unless an `auto_map` names code of the folder. There is no such code, and none is looked for without
    # `trust_remote_code`; then the named class is taken.
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": [None, _NO_CODE]}}
    write_text(folder / CONFIG_FILE, json.dumps({**before, **named}, indent=2) + "\n")
    if _ids_in_transformers(folder) == expected:
        return
    write_text(folder / CONFIG_FILE, json.dumps(before, indent=2) + "\n")
    logger.warning(
        "transformers.AutoTokenizer gives other token ids for %s than this run was trained with; elsewhere, open "
        "%s with transformers.PreTrainedTokenizerFast(tokenizer_file=...)",
        folder,
        folder / "tokenizer.json",
    )


def _ids_in_transformers(folder: Path) -> list[int] | None:
    """What `AutoTokenizer` makes of the probe; None where it cannot open the folder."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
