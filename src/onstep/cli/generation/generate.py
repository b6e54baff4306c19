"""`onstep generate`: continues a prompt with a trained model."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from onstep.cli.generation.trained import (
    Name,
    RopeFactor,
    RopeScaling,
    Seed,
    Temperature,
    TopK,
    TopP,
    open_trained,
    show,
)


def generate(
    name: Name,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 0.95,
    seed: Seed = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = 2.0,
) -> None:
    """Continue a text with the final weights of a run, or with its newest checkpoint if it has none.

    The model sees as many tokens as it was trained on: the window slides over a text that becomes longer.
    """
    trained = open_trained(name, rope_scaling, rope_factor)
    from onstep.models.generation.generate import Sampling

    tokenizer = trained.tokenizer
    start = tokenizer.encode_text(prompt) or [tokenizer.eos_id if tokenizer.eos_id is not None else 0]
    pieces = trained.pieces(start, Sampling(temperature, top_k, top_p), max_new_tokens, seed)
    before = tokenizer.decode([token for token in start if token != tokenizer.eos_id])
    show(itertools.chain([before], pieces))
