"""Finds a Hugging Face model by its directory or its name on the Hub, and lets a run start from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from onstep.cli.first_checks import is_main
from onstep.config import ConfigContainer
from onstep.config.sequence_lengths import SEQ_LENGTHS
from onstep.console.style import in_words
from onstep.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from onstep.training.setup.pretrained import PretrainedSource

FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
"""What is downloaded: weights, configuration and tokenizer; never a pickle or code."""


def hf_directory(name: str) -> Path:
    """The directory of a model; one of the Hub is downloaded, or found where an earlier download left it.

    `NAME@REVISION` is that of a branch, tag or commit. The directory is named by the commit, and so is the model in
    run.json.

    Raises:
        ConfigError: if there is no such directory, and the Hub has no such model or cannot be reached.
        MissingExtraError: for a name of the Hub without the package huggingface-hub.
    """
    directory = Path(os.path.expanduser(name))
    if directory.is_dir():
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"--hf-model={name} is not a directory; pass that of a Hugging Face model, or its Hub name.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError(
            f"--hf-model={name} is not a directory; to download it from the Hub: pip install huggingface-hub"
        ) from None
    try:
        repository, _, revision = name.partition("@")
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # the package's errors, of connections too, derive from these
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--hf-model={name} is neither a directory nor a model that could be downloaded from the Hub ({reason})."
        ) from None


def start_from(config: ConfigContainer, directory: Path, keys: Collection[str]) -> None:
    """Let a run start from a Hugging Face directory, in place; of one without weights only the model is used.

    Args:
        keys: the dotted keys that the user has set.
    """
    from onstep.training.setup.pretrained import find_model

    if any(directory.glob("*.safetensors")) or config.checkpoint.finetune:
        config.checkpoint.pretrained_checkpoint = str(directory)
    else:
        config.model.hf_model = str(directory)
        _say(f"{directory} has no weights (*.safetensors): training starts from new ones by rng.seed")
    _fit_length(config, find_model(config), is_set=not frozenset(SEQ_LENGTHS).isdisjoint(keys))


def _say(note: str) -> None:
    if is_main():
        print(in_words(f"--hf-model: {note}", sys.stderr), file=sys.stderr)


def _fit_length(config: ConfigContainer, source: PretrainedSource | None, *, is_set: bool) -> None:
    """Shorten sequences that are longer than the pretrained model's positions, unless the user has set their length."""
    length = config.model.seq_length
    if source is None or not source.is_hugging_face or length <= source.model.seq_length:
        return
    limit = source.model.seq_length
    note = None
    if not is_set:
        config.model.seq_length = config.dataset.seq_length = limit
        note = f"sequences have {limit} tokens, the model's max_position_embeddings, not {length}"
    elif source.model.position_embedding_type != "learned_absolute":  # which is an error later
        note = (
            f"model.seq_length={length} is more than the model's max_position_embeddings={limit}; it has not learned "
            f"the positions beyond"
        )
    if note is not None:
        _say(note)
