"""Finds a Hugging Face model by its directory, or by its name on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from onstep.errors import ConfigError, MissingExtraError

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
