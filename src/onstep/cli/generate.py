"""`onstep generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from onstep.errors import OnstepError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(help="Folder of a run, such as runs/tiny_gpt.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this total.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
) -> None:
    """Continue a text with the weights of a finished run."""
    import torch

    from onstep.config import from_dict
    from onstep.data import build_tokenizer, tokenizer_in_run
    from onstep.models import generate as continue_tokens
    from onstep.models import load_hf

    folder = Path(run)
    if not (folder / "model").is_dir():
        raise OnstepError(f"{run} has no weights: {folder / 'model'} is missing; train it first, or name another run.")
    stored = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    tokenizer = build_tokenizer(tokenizer_in_run(from_dict(stored["config"]).tokenizer, folder))
    model = load_hf(folder / "model")
    start = tokenizer.encode_text(prompt) or [tokenizer.eos_id if tokenizer.eos_id is not None else 0]
    tokens = continue_tokens(
        model,
        torch.tensor([list(start)]),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    ids = [token for token in tokens[0].tolist() if token != tokenizer.eos_id]
    print(tokenizer.decode(ids))
