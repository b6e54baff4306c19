"""Describes tokenizers in the terms of GGUF files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from onstep.data import ByteTokenizer, Tokenizer
from onstep.data.corpus.tokenizer_files import read_config
from onstep.errors import DataError
from onstep.files.bounded_reading import read_json

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""GGUF's types of tokens."""

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_QWEN: "qwen2", _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"): "llama-bpe"}
"""Regular expressions that split text before BPE, with llama.cpp's names of them."""
_IGNORES_MERGES = "llama-bpe"
"""Where llama.cpp does not merge within a word that is a token."""


def gguf_vocabulary(tokenizer: Tokenizer, num_rows: int) -> dict[str, Any]:
    """The `tokenizer.*` entries of a GGUF file for a model whose embedding has `num_rows` rows.

    llama.cpp then encodes text to the ids of `tokenizer.encode_text`, apart from Unicode normalization (NFC), which it
    does not do.

    Raises:
        DataError: for a tokenizer that is neither bytes nor a byte-level BPE that llama.cpp knows.
    """
    entries: dict[str, Any]
    if isinstance(tokenizer, ByteTokenizer):
        # llama.cpp's tokenizer of RWKV chooses the longest token that fits: here, one byte
        tokens = {f"\\x{byte:02x}": byte for byte in range(256)} | {"<|endoftext|>": 256}
        entries, types = {"tokenizer.ggml.model": "rwkv"}, {256: _CONTROL}
    else:
        content = _content(tokenizer)
        bpe, added = content["model"], content.get("added_tokens") or []
        tokens = bpe["vocab"] | {one["content"]: one["id"] for one in added}
        merges = [one if isinstance(one, str) else " ".join(one) for one in bpe["merges"]]
        entries = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(content),
            "tokenizer.ggml.merges": merges,
        }
        types = {one["id"]: _CONTROL if one["special"] else _USER_DEFINED for one in added}
    eos, template = tokenizer.eos_id, _chat_template(tokenizer)
    if eos is None:
        raise _refused("it has no token that ends a document")
    names = {index: token for token, index in tokens.items()}
    ids = range(num_rows)
    return {
        **entries,
        "tokenizer.ggml.tokens": [names.get(index, f"[PAD{index}]") for index in ids],
        "tokenizer.ggml.token_type": [types.get(index, _NORMAL if index in names else _UNUSED) for index in ids],
        "tokenizer.ggml.bos_token_id": eos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        **({"tokenizer.chat_template": template} if isinstance(template, str) else {}),
    }


def _chat_template(tokenizer: Tokenizer) -> object:
    """The chat template of the tokenizer, or of the files beside its `tokenizer.json`; None if there is none."""
    library, path = getattr(tokenizer, "library_tokenizer", None), getattr(tokenizer, "path", None)
    if library is not None or path is None:
        return getattr(library, "chat_template", None)
    file = Path(path).parent / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return read_config(file.parent).get("chat_template")


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of its `tokenizer.json`, which must be a byte-level BPE."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(Path(directory))
        file = Path(directory) / "tokenizer.json"
        content = read_json(file) if file.is_file() else {}
    model = content.get("model") or {}
    has_bytes = "ByteLevel" in json.dumps(content.get("decoder"))
    if model.get("type") != "BPE" or model.get("byte_fallback") or not has_bytes or not model["merges"]:
        raise _refused(f"it is not a byte-level BPE with merges but {model.get('type') or 'without tokenizer.json'}")
    return content


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name for the way in which text is split before BPE."""
    normalizer, split = content.get("normalizer"), content.get("pre_tokenizer") or {}
    parts = split.get("pretokenizers", [split])
    last = parts[-1]
    found = None
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if len(parts) == 1 and last.get("use_regex", True):
            found = "gpt-2"
        elif len(parts) == 2 and parts[0].get("behavior") == "Isolated" and not last.get("use_regex", True):
            found = _SPLITS.get(str((parts[0].get("pattern") or {}).get("Regex")))
    if found is None or bool(content["model"].get("ignore_merges")) != (found == _IGNORES_MERGES):
        raise _refused("it splits text in a way that is not GPT-2's, Llama 3's or Qwen's")
    if normalizer not in (None, {"type": "NFC"}):
        raise _refused(f"it has the normalizer {normalizer.get('type')}")
    return found


def _refused(why: str) -> DataError:
    return DataError(
        f"the tokenizer of this run cannot be written to a GGUF file: {why}; export with --format hf, which "
        "convert_hf_to_gguf.py of llama.cpp converts if it knows the tokenizer"
    )
