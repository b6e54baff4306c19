"""Describes the tokenizer of bytes in the form of the `tokenizers` library."""

from __future__ import annotations

from typing import Any


def byte_tokenizer_json(end: str, end_id: int) -> dict[str, Any]:
    """The content of a `tokenizer.json` whose ids are the bytes of a text; `end` in a text is the token `end_id`."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end_id, "content": end, **special}],
        "normalizer": None,
        "pre_tokenizer": by_bytes,
        "post_processor": None,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {name: byte for byte, name in enumerate(_names())}, "merges": []},
    }


def _names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it is printable in Latin-1.

    Source: OpenAI's `bytes_to_unicode` of GPT-2.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(256)]
