"""Reads the weights of a Hugging Face directory one tensor at a time, and of each no more than is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from onstep.errors import OnstepError
from onstep.models.hf.architecture import Architecture
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.directory import architecture_of, check_shapes
from onstep.models.hf.weight_files import FLOATS, check_room, naming, read_shapes, weight_files
from onstep.models.transformer import Transformer
from onstep.models.weight_values import Give, GiveAll, Slices, Value, value_of

_ROWS = 4096
"""Number of rows that are compared at once."""


class _Files:
    """The tensors of a directory, by their names in its files."""

    def __init__(self, directory: Path) -> None:
        files = weight_files(directory)
        self.shapes = read_shapes(files)
        self._places: dict[str, Path] = {}
        for file in files:
            with naming(file), safe_open(file, "pt") as opened:
                self._places |= dict.fromkeys(opened.keys(), file)

    def value(self, name: str) -> Value:
        """A tensor of which only parts are read."""
        return Value(tuple(self.shapes[name].shape), lambda part: self._read(name, part))

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._read(name, tuple(slice(0, size) for size in self.shapes[name].shape))

    def _read(self, name: str, part: Slices) -> Tensor:
        file = self._places[name]
        with naming(file), safe_open(file, "pt") as opened:
            read: Tensor = opened.get_slice(name)[part] if part else opened.get_tensor(name)
        return read


def hf_values(directory: Path, model: Transformer) -> GiveAll:
    """What gives the weights of `load_hf`, in the files' types under Onstep's names.

    A matrix that the files have in another form, as GPT-2's, is converted as a whole.

    Args:
        directory: the directory with the weights.
        model: the model that they are for; its parameters need no values.

    Raises:
        ConfigError: for a model that no `transformers` architecture computes.
        OnstepError: for files that are missing or damaged, or of another model.
    """
    files = _Files(directory)
    config, architecture = model.config, architecture_of(model.config)
    check_room(config, files.shapes, directory, memory_bytes=sys.maxsize)  # no rank has them all in memory
    cleaned = architecture.clean(files.shapes)
    output = f"{architecture.modules['output']}.weight"
    tied = cleaned.pop(output, None) if config.share_embeddings_and_output_weights else None
    check_shapes(architecture.to_hf({name: one.to("meta") for name, one in model.state_dict().items()}), cleaned)
    origin = {_storage(tensor): name for name, tensor in files.shapes.items()}

    def give_all(give: Give) -> None:
        if tied is not None:
            embedding = f"{architecture.modules['embedding']}.weight"
            _check_same(files, origin[_storage(cleaned[embedding])], origin[_storage(tied)], output, embedding)
        parts: dict[str, set[str]] = {}
        for name, tensor in cleaned.items():
            for ours, converted in architecture.from_hf({name: tensor}).items():
                if converted is tensor and tensor is files.shapes[origin[_storage(tensor)]]:
                    give(ours, files.value(origin[_storage(tensor)]))
                else:
                    parts.setdefault(ours, set()).add(name)
        done: set[str] = set()
        for names in parts.values():
            if not names <= done:
                for ours, converted in _converted(architecture, files, names, cleaned, origin).items():
                    give(ours, value_of(converted))
            done |= names

    return give_all


def _converted(
    architecture: Architecture,
    files: _Files,
    names: Iterable[str],
    cleaned: Mapping[str, Tensor],
    origin: Mapping[int, str],
) -> dict[str, Tensor]:
    """The tensors of the model that these ones of the files make up."""
    read = {name: files.read(name) for name in {origin[_storage(cleaned[name])] for name in names}}
    found = architecture.clean({**files.shapes, **read})  # which may look at the other names
    return architecture.from_hf({name: one for name, one in found.items() if not one.is_meta})


def _check_same(files: _Files, embedding: str, output: str, output_name: str, embedding_name: str) -> None:
    one, other = files.value(embedding), files.value(output)
    same = one.shape == other.shape
    for start in range(0, one.shape[0] if same else 0, _ROWS):
        part = (slice(start, min(start + _ROWS, one.shape[0])), slice(0, one.shape[1]))
        ours, theirs = one.read(part), other.read(part)
        dtype = torch.promote_types(ours.dtype, theirs.dtype)
        same = same and torch.equal(ours.to(dtype), theirs.to(dtype))
    if not same:
        raise OnstepError(
            f"the weights contain an {output_name} that differs from {embedding_name}, but the configuration ties "
            "them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
        )


def family_values(directory: Path, model: CausalLM) -> GiveAll | None:
    """What gives the weights of a directory to a model of `transformers` whose files have its own names and shapes.

    Args:
        directory: the directory with the weights.
        model: the model that they are for; its parameters need no values.

    Returns:
        None if `transformers` converts the files of this model, or lacks some of its weights.

    Raises:
        OnstepError: for files that are missing or damaged.
    """
    files = _Files(directory)
    theirs: Any = model.model
    stored_as = _names_in_model(theirs, files.shapes)
    found: dict[str, str] = {}
    filled: set[int] = set()
    for name, tensor in theirs.state_dict(keep_vars=True).items():
        stored = stored_as.get(name)
        if stored is not None and id(tensor) not in filled:
            if files.shapes[stored].shape != tensor.shape or files.shapes[stored].dtype not in FLOATS:
                return None
            filled.add(id(tensor))
            found[f"model.{name}"] = stored
    if any(id(parameter) not in filled for parameter in theirs.parameters()):
        return None

    def give_all(give: Give) -> None:
        for name, stored in found.items():
            give(name, files.value(stored))

    return give_all


def _names_in_model(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """For each tensor in files that `transformers` at most renames, its name in the model, with that in the files."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return {}
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    others: list[Any] = [one for one in transforms if not isinstance(one, WeightRenaming)]
    prefix, known, found = model.base_model_prefix, model.state_dict(), {}
    for name in stored:
        renamed, converted_by = rename_source_key(name, renamings, others, prefix, known)
        if converted_by is None:
            found[renamed] = name
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
