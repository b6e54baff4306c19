"""`onstep generate`: continues a prompt with a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.bounded_reading import read_json
from onstep.errors import ConfigError, OnstepError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onstep.config import TokenizerConfig
    from onstep.models import Transformer


def generate(
    run: Annotated[str, typer.Argument(help="Run directory, such as runs/tiny_gpt.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens to add; fewer if the learned positions end earlier.")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0 always picks the most likely token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set of tokens with this total probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler; the same seed gives the same text.")] = None,
) -> None:
    """Continue a text with the final weights of a run, or with its newest checkpoint if it has none."""
    import torch

    from onstep.data import build_tokenizer
    from onstep.models import generate as continue_tokens
    from onstep.training.runs.identity import changed_tokenizer

    directory = Path(run)
    if not (directory / "run.json").is_file():
        raise OnstepError(
            f"{run} is not a run: {directory / 'run.json'} is missing; name a directory such as runs/tiny_gpt."
        )
    record = _record(directory / "run.json")
    config = _tokenizer(directory, record["config"])
    tokenizer = build_tokenizer(config)
    if note := changed_tokenizer(config, record.get("identity")):
        print(f"warning: {note}", file=sys.stderr)
    model = _model(directory)
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


def _record(path: Path) -> dict[str, Any]:
    """A run's record, with its configuration."""
    try:
        record = read_json(path, error=OnstepError)
        reason = "it must be a JSON object with the run's config"
    except OnstepError as error:
        record, reason = None, str(error)
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise OnstepError(f"{path} is not the record of a run: {reason}. Restore it, or name another run.")
    return record


def _tokenizer(directory: Path, config: Mapping[str, Any]) -> TokenizerConfig:
    """The configuration that opens a run's tokenizer; a Trainer's is saved beside the weights.

    Raises:
        OnstepError: if a Trainer had none.
    """
    from onstep.config import TokenizerConfig, from_dict
    from onstep.data import tokenizer_in_run

    place = _place_of_trainer(directory)
    if place is None:
        return tokenizer_in_run(from_dict(config).tokenizer, directory)
    if not (place / "tokenizer_config.json").is_file():
        raise OnstepError(
            f"{place} has no tokenizer, since its Trainer had no processing_class; save the one of its data there: "
            f"tokenizer.save_pretrained({str(place)!r})."
        )
    return TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(place))


def _place_of_trainer(directory: Path) -> Path | None:
    """Where a Trainer's weights are, as a Hugging Face directory: `output_dir`, else its newest checkpoint.

    None for other runs, and for a model that is not one of transformers.

    Raises:
        OnstepError: if these are the weights of an adapter.
    """
    from onstep.checkpoint.catalog.discovery import named_dirs
    from onstep.training.runs.run_dir import RunDir

    if RunDir(directory).layout != "hugging_face":
        return None
    for place in (directory, *(path for _, _, path in named_dirs(directory))):
        if (place / "adapter_config.json").is_file():
            raise OnstepError(
                f"{place} has the weights of an adapter, not of a whole model; generate with peft: "
                f"AutoPeftModelForCausalLM.from_pretrained({str(place)!r})."
            )
        if (place / "config.json").is_file():
            return place
    return None


def _model(directory: Path) -> Transformer:
    """The model with the final weights of a run, or else with those of its newest checkpoint."""
    from onstep.models import load_hf
    from onstep.training.runs.run_dir import RunDir
    from onstep.training.setup.pretrained import model_of_checkpoint

    run = RunDir(directory)
    if (place := _place_of_trainer(directory)) is not None:
        return load_hf(place)
    if (run.model / "config.json").is_file():
        return load_hf(run.model)
    if not run.has_checkpoints:
        raise OnstepError(
            f"{directory} has no weights: there is neither {run.path / 'model'} nor a checkpoint; train until the end "
            f"or the first checkpoint, or name another run."
        )
    return model_of_checkpoint(directory)


def _fitting(max_new_tokens: int, num_tokens: int, model: Transformer) -> int:
    """Limit the number of new tokens to the length of learned position embeddings, with a note on stderr.

    Raises:
        ConfigError: when the prompt leaves no room.
    """
    if model.position_embedding is None:
        return max_new_tokens
    length = model.position_embedding.num_embeddings
    room = length - num_tokens
    if room < 1:
        raise ConfigError(
            f"the prompt has {num_tokens:,} tokens, but the model has {length:,} learned positions including the "
            f"next token; shorten the prompt to {length - 1:,}."
        )
    if max_new_tokens > room:
        print(
            f"--max-new-tokens {max_new_tokens} is reduced to {room}: the model has {length:,} learned positions",
            file=sys.stderr,
        )
    return min(max_new_tokens, room)
