"""Reads the weights of a Hugging Face directory one layer at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import OnstepError
from onstep.models.hf.directory import architecture_of
from onstep.models.hf.weight_files import check_room, naming, read_shapes, weight_files

_LAYER = re.compile(r"\.?(\d+)\.")


def layer_of(name: str) -> str:
    """What the names of all weights of a layer have in common: the first number in them; empty outside of layers."""
    found = _LAYER.search(name)
    return found[1] if found else ""


def hf_weights_by_layer(directory: str | Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """The weights of `load_hf` in the files' types under Onstep's names, first those outside of layers.

    Raises:
        OnstepError: for files that are missing or damaged, or of a smaller model.
    """
    target = Path(directory)
    files = weight_files(target)
    shapes = read_shapes(files)
    check_room(config, shapes, target, memory_bytes=sys.maxsize)  # these weights are never in memory together
    architecture = architecture_of(config)
    embedding, output = (f"{architecture.modules[name]}.weight" for name in ("embedding", "output"))
    for layer in dict.fromkeys(["", *map(layer_of, shapes)]):
        read = _read(files, {name for name in shapes if layer_of(name) == layer})
        cleaned = architecture.clean({**shapes, **read})  # which may look at names of other layers
        given = {name: tensor for name, tensor in cleaned.items() if not tensor.is_meta}
        if config.share_embeddings_and_output_weights and output in given:
            tied = given.pop(output)
            if not torch.equal(tied.float(), given[embedding].float()):
                raise OnstepError(
                    f"the weights contain an {output} that differs from {embedding}, but the configuration ties them; "
                    "set tie_word_embeddings (share_embeddings_and_output_weights) to false."
                )
        yield architecture.from_hf(given)


def _read(files: list[Path], names: set[str]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in files:
        with naming(file), safe_open(file, "pt") as opened:
            state |= {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118
    return state
