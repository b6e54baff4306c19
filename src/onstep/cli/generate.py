"""`onstep generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onstep.errors import ConfigError, OnstepError

if TYPE_CHECKING:
    from onstep.models import Transformer


def generate(
    run: Annotated[str, typer.Argument(help="Folder of a run, such as runs/tiny_gpt.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens to add; fewer where positions are learned and end before.")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this total.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
) -> None:
    """Continue a text with the final weights of a run, else with those of its newest checkpoint."""
    import torch

    from onstep.config import from_dict
    from onstep.data import build_tokenizer, tokenizer_in_run
    from onstep.models import generate as continue_tokens

    folder = Path(run)
    if not (folder / "run.json").is_file():
        raise OnstepError(f"{run} is no run: {folder / 'run.json'} is missing; name a folder such as runs/tiny_gpt.")
    stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    tokenizer = build_tokenizer(tokenizer_in_run(from_dict(stored["config"]).tokenizer, folder))
    model = _model(folder)
    start = tokenizer.encode_text(prompt) or [tokenizer.eos_id if tokenizer.eos_id is not None else 0]
    tokens = continue_tokens(
        model,
        torch.tensor([list(start)]),
        max_new_tokens=_fitting(max_new_tokens, len(start), model),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    ids = [token for token in tokens[0].tolist() if token != tokenizer.eos_id]
    print(tokenizer.decode(ids))


def _model(folder: Path) -> Transformer:
    """The final weights of a run, else those of its newest checkpoint."""
    from onstep.models import load_hf
    from onstep.training.setup.pretrained import model_of_checkpoint

    if (folder / "model" / "config.json").is_file():
        return load_hf(folder / "model")
    if not any((folder / "checkpoints").glob("checkpoint-*")):
        raise OnstepError(
            f"{folder} has no weights: neither {folder / 'model'} nor a checkpoint; let it train to its end or to its "
            f"first checkpoint, or name another run."
        )
    return model_of_checkpoint(folder)


def _fitting(max_new_tokens: int, num_tokens: int, model: Transformer) -> int:
    """As many new tokens as a table of learned positions has room for; said where that is fewer.

    Raises:
        ConfigError: where the prompt leaves no room.
    """
    if model.position_embedding is None:
        return max_new_tokens
    length = model.position_embedding.num_embeddings
    room = length - num_tokens
    if room < 1:
        raise ConfigError(
            f"the prompt has {num_tokens:,} tokens, and the model's learned positions end at {length:,}, the next "
            f"token included; shorten it to {length - 1:,}."
        )
    if max_new_tokens > room:
        print(
            f"--max-new-tokens {max_new_tokens} is cut to {room}: the model's learned positions end at {length:,}",
            file=sys.stderr,
        )
    return min(max_new_tokens, room)
