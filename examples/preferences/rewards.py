"""Rewards of completions for grpo.yaml: a list of numbers, higher for a better completion."""

from __future__ import annotations

from typing import Any

Chat = list[dict[str, str]]


def number_first(completions: list[Chat], answer: list[str], **others: Any) -> list[float]:
    """1 for the right answer, 0.2 for another number, 0 for anything else; what follows the first word is ignored."""
    first = [(chat[0]["content"].split() or [""])[0] for chat in completions]
    return [1.0 if word == right else 0.2 * word.isdigit() for word, right in zip(first, answer, strict=True)]
