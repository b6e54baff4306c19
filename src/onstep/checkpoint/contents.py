"""The states in a checkpoint that was verified, for those who look into it without a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from onstep.checkpoint.codec import decode_state, document_from_bytes
from onstep.checkpoint.component_io import read_state
from onstep.checkpoint.components import SharingPattern
from onstep.checkpoint.discovery import CheckpointInfo
from onstep.checkpoint.manifest import Manifest
from onstep.checkpoint.placement import ComponentFiles
from onstep.checkpoint.tensor_file import read_header
from onstep.checkpoint.tensor_header import TensorInfo
from onstep.errors import CheckpointError


@dataclass(frozen=True)
class StoredState:
    """One state of a component: the only one, or that of one rank, group or machine."""

    label: str
    """`model`, or `rng/rank_0`."""
    files: ComponentFiles
    listed: frozenset[str]
    """Which of the two files there are."""


@dataclass(frozen=True)
class Outline:
    """A state whose larger tensors are left in their file: they stand in it as tensors of the meta device."""

    state: Any
    places: dict[int, tuple[str, TensorInfo]]
    """Where each of those lies, by `id`: its name in the file, and what the header says."""
    path: Path
    """The tensor file."""

    @property
    def num_tensors(self) -> int:
        """Tensors that were left in the file."""
        return len(self.places)

    def read(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor of the outline, as CPU memory of their own."""
        return read_tensor(self.path, self.places[id(tensor)][1])


def stored_states(manifest: Manifest) -> list[StoredState]:
    """Every state that the manifest lists, in its order."""
    return [state for key, entry in manifest.components.items() for state in _states_of(key, entry.files)]


def read_outline(info: CheckpointInfo, stored: StoredState) -> Outline:
    """Read a state without its larger tensors.

    Raises:
        CheckpointError: for a file that is not what the writer writes.
    """
    path = info.path / stored.files.tensors
    header = read_header(path) if stored.files.tensors in stored.listed else {}
    document = _document(info.path / stored.files.document)
    whole = set(_array_names(document)) | {name for name, one in header.items() if one.shape == ()}
    tensors = {
        name: read_tensor(path, one) if name in whole else torch.empty(one.shape, dtype=one.dtype, device="meta")
        for name, one in header.items()
    }
    places = {id(tensors[name]): (name, header[name]) for name in header if name not in whole}
    return Outline(decode_state(tensors, document, stored.label), places, path)


def read_weights(info: CheckpointInfo) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by name, tied ones once; and for each name left out, the one that holds its tensor.

    Raises:
        CheckpointError: when the checkpoint has no weights in one piece.
    """
    entry = info.manifest.components.get("model")
    if entry is None:
        there = ", ".join(map(repr, info.manifest.components)) or "nothing"
        raise CheckpointError(
            f"{info.path} has no component 'model', only {there}; give a checkpoint that was saved with it."
        )
    states = _states_of("model", entry.files)
    if len(states) != 1 or SharingPattern(entry.sharing_pattern) not in (
        SharingPattern.GLOBAL,
        SharingPattern.REPLICATED,
    ):
        raise CheckpointError(
            f"{info.path} holds the model in {len(states)} parts ({entry.sharing_pattern}), which are no single set of "
            f"weights; load it in a run of {info.manifest.world_size} ranks and save the model there."
        )
    state = read_state(info.path, states[0].files, states[0].listed)
    if not isinstance(state, dict):
        raise CheckpointError(f"{info.path}: the state of 'model' is no dictionary of tensors.")
    return _without_twins({str(name): value for name, value in state.items() if isinstance(value, Tensor)})


def read_tensor(path: Path, info: TensorInfo) -> Tensor:
    """One tensor of a file, whose header was checked.

    Raises:
        CheckpointError: when the file cannot be read.
    """
    tensor = torch.empty(info.shape, dtype=torch.uint8 if info.dtype == torch.bool else info.dtype)
    buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with path.open("rb") as file:
            file.seek(info.start)
            count = file.readinto(buffer)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk it lies on.") from error
    if count != info.size_bytes:
        raise CheckpointError(f"{path} ended before its last tensor; it was cut while it was read.")
    return tensor


def _states_of(key: str, files: list[str]) -> list[StoredState]:
    found = []
    for document in files:
        path = PurePosixPath(document)
        if path.suffix != ".json":
            continue
        is_only = document == f"{key}/state.json"
        tensors = f"{key}/{key}.safetensors" if is_only else str(path.with_suffix(".safetensors"))
        listed = frozenset({document, tensors} & set(files))
        found.append(
            StoredState(key if is_only else str(path.with_suffix("")), ComponentFiles(tensors, document), listed)
        )
    return found


def _document(path: Path) -> Any:
    try:
        return document_from_bytes(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _array_names(node: Any) -> Iterator[str]:
    """The tensors that hold NumPy arrays; a key that looks like one costs only that its tensor is read at once."""
    if isinstance(node, list):
        for each in node:
            yield from _array_names(each)
    elif isinstance(node, dict):
        array = node.get("ndarray")
        if isinstance(array, dict) and isinstance(array.get("tensor"), str):
            yield array["tensor"]
        for each in node.values():
            yield from _array_names(each)


def _without_twins(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    kept = {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}
    return kept, {name: first[id(tensor)] for name, tensor in tensors.items() if name not in kept}
