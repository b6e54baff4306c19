"""Defines the callback that lets the model of the demo write, before, during and after its training."""

from __future__ import annotations

from typing import Any

from onstep.callbacks.textgen_callback import TextgenCallback

PROMPTS = ["    def read(self", "if __name__ =="]
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
MAX_NEW_TOKENS = 80


class DemoSamples(TextgenCallback):
    """Continues the prompts of the demo after each evaluation; its end shows them."""

    def __init__(self) -> None:
        super().__init__(_NoWriter(), PROMPTS, GENERATION, max_new_tokens=MAX_NEW_TOKENS)


class _NoWriter:
    """The samples are only needed in their file."""

    def add_text(self, *sample: Any) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""
