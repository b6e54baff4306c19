"""Finds the parameters that a server starts with: those of a module, a state dict, a checkpoint or a directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor, nn

from onstep.checkpoint import read_tensors, resolve
from onstep.checkpoint.catalog.discovery import describe_foreign
from onstep.checkpoint.loading import read_weights
from onstep.errors import CheckpointError, ConfigError
from onstep.models.hf import weight_files

Source = nn.Module | Mapping[str, Tensor] | str | Path
"""What parameters can come from."""


def initial_parameters(source: Source, exclude: Collection[str] = ()) -> dict[str, Tensor]:
    """The parameters to be trained, by name.

    Args:
        source: a module (its parameters that require a gradient), a state dict, a safetensors file, a checkpoint or a
            directory with some, or a Hugging Face directory. Of all but a module, every tensor of floating point is
            taken, tied ones once.
        exclude: names not to take, with `*` for any text: buffers and frozen parameters of a state dict.

    Raises:
        ConfigError: if there are none, or a pattern fits no name.
        CheckpointError: for a file that cannot be read.
    """
    found = _all(source)
    unused = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in found)]
    if unused:
        raise ConfigError(f"exclude must fit names of the model, and {unused[0]!r} fits none; see its names.")
    kept = {
        name: tensor for name, tensor in found.items() if not any(fnmatchcase(name, pattern) for pattern in exclude)
    }
    if not kept:
        raise ConfigError("the model of a server must have parameters to train, and none is left.")
    return kept


def _all(source: Source) -> dict[str, Tensor]:
    if isinstance(source, nn.Module):
        return {name: one.detach() for name, one in source.named_parameters() if one.requires_grad}
    if isinstance(source, Mapping):
        return _trainable(source)
    return _trainable(_read(Path(source)))


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.is_file():
        return read_tensors(path)
    if path.is_dir() and describe_foreign(path) is not None:
        state: Mapping[str, Tensor] = weight_files.read_tensors(weight_files.weight_files(path))
        return state
    return read_weights(resolve(path))[0]


def _trainable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is of floating point, and tensors that share their memory once, under the first name."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name}: a state dict must have tensors, got {type(tensor).__name__}.")
        place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape))
        is_twin = tensor.numel() > 0 and place in seen
        seen.add(place)
        if tensor.is_floating_point() and tensor.element_size() >= 2 and not is_twin:
            kept[name] = tensor.detach()
    return kept
