"""Opens trained models for `onstep generate` and `onstep chat`: those of runs, and Hugging Face directories."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.analysis.text_tables import printable
from onstep.cli.completed_words import complete_runs
from onstep.cli.why import find_run
from onstep.console.style import in_words
from onstep.errors import ConfigError, OnstepError
from onstep.files.bounded_reading import read_json
from onstep.stores.urls import is_url

if TYPE_CHECKING:
    from onstep.config import ConfigContainer, TokenizerConfig
    from onstep.data import Tokenizer
    from onstep.models.generation.generate import Sampling
    from onstep.models.hf.any_directory import LanguageModel


def _checked_top_k(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"--top-k must be >= 1, got {value}; drop the option for no restriction.")
    return value


def _checked_top_p(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise ConfigError(f"--top-p must be in (0, 1], got {value}; write --top-p=1 for no restriction.")
    return value


Name = Annotated[
    str,
    typer.Argument(
        help="A run's name below runs/, its directory, or a Hugging Face directory.", autocompletion=complete_runs
    ),
]
RopeScaling = Annotated[
    str | None,
    typer.Option(metavar="linear|dynamic", help="Extend the context of a model with rotary positions."),
]
RopeFactor = Annotated[float, typer.Option(help="How many times the trained length, with --rope-scaling.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler; the same seed gives the same text.")]
Temperature = Annotated[float, typer.Option(help="0 always picks the most likely token.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.", callback=_checked_top_k)]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the smallest set of tokens with this total probability.", callback=_checked_top_p),
]


@dataclass(frozen=True)
class Trained:
    """A trained model and what it was trained with."""

    model: LanguageModel
    tokenizer: Tokenizer
    directory: Path
    end_ids: frozenset[int]
    """The tokens that end a text."""
    is_chat_run: bool = False
    """Whether it is a run that was trained on conversations."""

    def pieces(self, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int | None) -> Iterator[str]:
        """The text that follows `ids`, piece by piece, up to a token that ends it."""
        import torch

        from onstep.models.generation.generate import stream_tokens
        from onstep.models.generation.text_stream import text_pieces

        chosen = stream_tokens(
            self.model, torch.tensor([list(ids)]), sampling, max_new_tokens=max_new_tokens, seed=seed
        )
        new = itertools.takewhile(lambda token: token not in self.end_ids, (int(one) for one in chosen))
        return text_pieces(new, self.tokenizer.decode, after=ids)


def open_trained(name: str, rope_scaling: str | None = None, rope_factor: float = 2.0) -> Trained:
    """The model that a run's name, its directory or a Hugging Face directory stands for.

    A run has its final weights, or those of its newest checkpoint if it has no final ones yet.

    Raises:
        ConfigError: if there is no such run or directory, or its context cannot be extended as asked.
        OnstepError: if its files are damaged.
    """
    if is_url(name):
        from onstep.mirror.copies import trained_copy

        url, name = name, str(trained_copy(name))
        if not any((Path(name) / file).is_file() for file in ("config.json", "run.json")):
            raise ConfigError(
                f"{url} is a checkpoint, not a model; name its run, or export the checkpoint and name that directory: "
                f"onstep checkpoint export {url} DIR."
            )
    given = Path(os.path.expanduser(name))
    if given.suffix.lower() == ".gguf":
        raise ConfigError(
            f"{name} is a GGUF file, the format of llama.cpp and Ollama, which run it: llama-cli -m {name}. Here, name "
            "the run or the Hugging Face directory that it was exported from; onstep evaluate reads it, too."
        )
    is_hugging_face = (given / "config.json").is_file() and not (given / "run.json").is_file()
    trained = _of_hugging_face(given) if is_hugging_face else _of_run(find_run(name))
    if rope_scaling is not None:
        from onstep.models.generation.context_window import extend_context

        extend_context(trained.model, rope_scaling, rope_factor)
    return trained


def _of_hugging_face(directory: Path) -> Trained:
    from onstep.config import TokenizerConfig
    from onstep.data import build_tokenizer
    from onstep.models.hf.any_directory import load_directory

    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(directory)))
    return Trained(load_directory(directory), tokenizer, directory, _end_ids(tokenizer, directory))


def configuration_of(directory: Path) -> ConfigContainer:
    """The configuration of a run.

    Raises:
        OnstepError: if its record is damaged.
    """
    from onstep.config import from_dict

    return from_dict(_record(directory / "run.json")["config"])


def _of_run(directory: Path) -> Trained:
    from onstep.data import build_tokenizer
    from onstep.training.runs.identity import changed_tokenizer

    record, config = _record(directory / "run.json"), configuration_of(directory)
    tokenizer_config = _tokenizer(directory, config)
    tokenizer = build_tokenizer(tokenizer_config)
    if note := changed_tokenizer(tokenizer_config, record.get("identity")):
        print(in_words(f"warning: {note}", sys.stderr), file=sys.stderr)
    model, end_ids = _model(directory), _end_ids(tokenizer, Path(tokenizer_config.tokenizer_model or directory))
    return Trained(model, tokenizer, directory, end_ids, is_chat_run=config.dataset.kind == "chat")


def _end_ids(tokenizer: Tokenizer, directory: Path) -> frozenset[int]:
    """The tokenizer's end token and those that `generation_config.json` names, such as the end of a turn."""
    named: Any = None
    file = directory / "generation_config.json"
    if file.is_file():
        content = read_json(file, error=OnstepError)
        named = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = [tokenizer.eos_id, *(named if isinstance(named, list) else [named])]
    return frozenset(one for one in ids if isinstance(one, int))


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


def _tokenizer(directory: Path, config: ConfigContainer) -> TokenizerConfig:
    """The configuration that opens a run's tokenizer; a Trainer's is saved beside the weights.

    Raises:
        OnstepError: if a Trainer had none.
    """
    from onstep.config import TokenizerConfig
    from onstep.data import tokenizer_in_run

    place = _place_of_trainer(directory)
    if place is None:
        return tokenizer_in_run(config.tokenizer, directory)
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


def _model(directory: Path) -> LanguageModel:
    """The model with the final weights of a run, or else with those of its newest checkpoint."""
    from onstep.models.hf.any_directory import load_directory
    from onstep.training.runs.run_dir import RunDir
    from onstep.training.setup.checkpoint_models import model_of_checkpoint

    run = RunDir(directory)
    if (place := _place_of_trainer(directory)) is not None:
        return load_directory(place)
    if (run.model / "config.json").is_file():
        return load_directory(run.model)
    if not run.has_checkpoints:
        raise OnstepError(
            f"{directory} has no weights: there is neither {run.path / 'model'} nor a checkpoint; train until the end "
            f"or the first checkpoint, or name another run."
        )
    return model_of_checkpoint(directory)


def show(pieces: Iterable[str]) -> str:
    """Print pieces of text as they come, and end the line; returns the text.

    A model can write anything: a terminal is shown no control characters, while a file or a pipe gets all.
    """
    shown, is_terminal = [], sys.stdout.isatty()
    for piece in pieces:
        text = "".join(one if one in "\n\t" else printable(one) for one in piece) if is_terminal else piece
        print(text, end="", flush=True)
        shown.append(piece)
    print()
    return "".join(shown)
