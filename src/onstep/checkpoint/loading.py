"""Reads a verified checkpoint: loads its components into a run, or its raw states for inspection and conversion."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onstep.checkpoint.catalog.discovery import CheckpointInfo
from onstep.checkpoint.components import (
    WHOLE,
    ComponentFiles,
    Placement,
    SharingPattern,
    StateComponent,
    Stateful,
    tensors_at,
)
from onstep.checkpoint.format.codec import MAX_DOCUMENT_BYTES
from onstep.checkpoint.format.decoding import decode_state, document_from_bytes
from onstep.checkpoint.format.stored_tensors import StoredTensor, open_tensors
from onstep.checkpoint.format.tensor_file import read_tensors
from onstep.checkpoint.in_place import Filling
from onstep.checkpoint.saving import check_keys
from onstep.checkpoint.storage.manifest import ComponentEntry, Manifest
from onstep.distributed import World
from onstep.distributed.outcomes import attempt, raise_together, together
from onstep.errors import CheckpointError
from onstep.files.bounded_reading import read_bytes

logger = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """Parts of the checkpoint that were not loaded on this rank."""

    missing: list[str] = field(default_factory=list)
    """Optional components that the checkpoint does not have."""
    unexpected: list[str] = field(default_factory=list)
    """Components of the checkpoint that were not requested."""
    other_ranks: bool = False
    """Saved with a different layout: some component has no file for this rank and was not loaded."""


def load_components(
    world: World,
    placement: Placement,
    info: CheckpointInfo,
    components: Sequence[StateComponent],
    skip: Collection[str] = (),
) -> LoadReport:
    """Implement `CheckpointManager.load`: each rank reads its files by the pattern they were saved with. Collective."""
    wanted = [component for component in components if component.key not in skip]
    together(world, partial(check_keys, wanted), f"Loading {info.path}")
    stored = info.manifest.components
    report = LoadReport(unexpected=[key for key in stored if key not in {*skip, *(one.key for one in components)}])
    if world.is_main:
        _report_lost(info, wanted)
    for component in wanted:
        doing = f"Loading {component.key!r} of {info.path}"
        if _is_in_shards(info, component):
            _load_in_place(world, info, component, doing)
            continue
        state = together(world, partial(_read, placement, info, component, report), doing)
        error = None
        if state is not None:
            _, error = attempt(partial(component.stateful.load_state_dict, state))
        raise_together(world, error, doing)
    return report


def _report_lost(info: CheckpointInfo, components: list[StateComponent]) -> None:
    """Warn of states that ranks had and could not save."""
    for key in [one.key for one in components if one.key in info.manifest.components]:
        entry = info.manifest.components[key]
        lost = sorted(set(range(info.manifest.world_size)) - set(entry.ranks))
        if lost and entry.sharing_pattern == SharingPattern.PER_RANK:
            logger.warning(
                "%s has no state of %r for ranks %s, where it could not be saved; it starts afresh there. To keep it, "
                "continue from an earlier checkpoint.",
                info.path,
                key,
                lost,
            )


def _is_in_shards(info: CheckpointInfo, component: StateComponent) -> bool:
    """Whether the component's state is in shards, in the checkpoint or in this run."""
    entry = info.manifest.components.get(component.key)
    patterns = (component.sharing_pattern, None if entry is None else entry.sharing_pattern)
    return SharingPattern.SHARDED in patterns and all(pattern in WHOLE for pattern in patterns)


def _load_in_place(world: World, info: CheckpointInfo, component: StateComponent, doing: str) -> None:
    """Read what this rank holds of the component's state. Collective; nothing is changed before all ranks can read."""

    filling = together(world, partial(_filling, info, component), doing)
    together(world, filling.fill, doing)
    together(world, partial(component.stateful.load_state_dict, filling.state), doing)


def _filling(info: CheckpointInfo, component: StateComponent) -> Filling:
    (stored,) = _states_of(component.key, info.manifest.components[component.key])
    outline = read_outline(info, stored)
    return Filling(component, outline.state, outline.places)


def load_model(info: CheckpointInfo, weights: Stateful) -> None:
    """Load the model of a checkpoint, whole or in shards, into the tensors of `weights`, one at a time.

    Not collective: each rank reads what it holds.

    Args:
        info: the checkpoint.
        weights: the state of a model, such as `ModelState`.

    Raises:
        CheckpointError: if the checkpoint has no model as a single state, or it does not fit; nothing is changed then.
    """
    _state_of_model(info)
    filling = _filling(info, StateComponent("model", weights, SharingPattern.SHARDED))
    filling.fill()
    weights.load_state_dict(filling.state)


def _read(placement: Placement, info: CheckpointInfo, component: StateComponent, report: LoadReport) -> Any:
    """The state for this rank; None if there is none, which is noted in the report."""
    entry = info.manifest.components.get(component.key)
    if entry is None:
        if component.required:
            raise CheckpointError(
                f"it is required, but the checkpoint has only {', '.join(info.manifest.components) or 'nothing'}; "
                f"resume from another checkpoint."
            )
        report.missing.append(component.key)
        return None
    pattern = SharingPattern(entry.sharing_pattern)
    files = placement.files(component, pattern)
    if files.document in entry.files:
        there = [tensors_at(component.key, at_root) for at_root in (True, False)]
        tensors = next((name for name in there if name in entry.files), files.tensors)
        return read_state(info.path, replace(files, tensors=tensors), entry.files)
    # With a different number of ranks, a PER_RANK file may legitimately be missing; that of a group must exist.
    if component.required and pattern is not SharingPattern.PER_RANK:
        raise CheckpointError(
            f"it is required, but {files.document} is not in the checkpoint; resume with the groups and machines it "
            f"was saved with."
        )
    report.other_ranks = True
    return None


def read_state(directory: Path, files: ComponentFiles, listed: Collection[str]) -> Any:
    """Read a state; opens only files that the manifest lists.

    Raises:
        CheckpointError: for a file that is damaged or was not written by Onstep.
    """
    tensors = read_tensors(directory / files.tensors) if files.tensors in listed else {}
    path = directory / files.document
    return decode_state(tensors, _read_document(path), str(path))


def _read_document(path: Path) -> Any:
    try:
        return document_from_bytes(read_bytes(path, MAX_DOCUMENT_BYTES, error=CheckpointError), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; resume from another checkpoint.") from error


@dataclass(frozen=True)
class StoredState:
    """A single state of a component: the only one, or that of a rank, group or machine."""

    label: str
    """For example `model` or `rng/rank_0`."""
    document: str
    """The file with everything but tensors, relative to the checkpoint."""
    tensors: tuple[str, ...]
    """The tensor files: at most one, or those of all ranks for a state in shards."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files."""
        return (self.document, *self.tensors)


@dataclass(frozen=True)
class Outline:
    """A state whose larger tensors are left in their files and represented by meta tensors."""

    state: Any
    places: dict[int, StoredTensor]
    """What is stored for each meta tensor, by `id`."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors left in the files."""
        return len(self.places)

    def stored(self, value: object) -> StoredTensor | None:
        """What is stored for a tensor of the outline; None for a value that is not left in a file."""
        return self.places.get(id(value)) if isinstance(value, Tensor) else None

    def read(self, tensor: Tensor) -> Tensor:
        """Read a tensor of the outline, as a whole, into newly allocated CPU memory."""
        return self.places[id(tensor)].read()


def stored_states(manifest: Manifest) -> list[StoredState]:
    """All states that the manifest lists, in its order."""
    return [state for key, entry in manifest.components.items() for state in _states_of(key, entry)]


def read_outline(info: CheckpointInfo, stored: StoredState, *, leaves_all: bool = False) -> Outline:
    """Read a state without its larger tensors.

    Args:
        leaves_all: leave single numbers in their file too, but not NumPy arrays.

    Raises:
        CheckpointError: for a file that is damaged, of another step, or was not written by Onstep.
    """
    there = open_tensors((info.path / name for name in stored.tensors), info.manifest.step)
    document = _read_document(info.path / stored.document)
    whole = set(_array_names(document))
    if not leaves_all:
        whole |= {name for name, one in there.items() if one.shape == ()}
    tensors = {
        name: one.read() if name in whole else torch.empty(one.shape, dtype=one.dtype, device="meta")
        for name, one in there.items()
    }
    places = {id(tensors[name]): there[name] for name in there if name not in whole}
    return Outline(decode_state(tensors, document, stored.label), places)


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a model in a checkpoint, each of which can be read alone, as a whole or a part of it."""

    tensors: dict[str, StoredTensor]
    """By name, tied ones once."""
    tied: dict[str, str]
    """For each omitted name, the name that has its tensor."""


def open_weights(info: CheckpointInfo) -> StoredWeights:
    """The model's weights, whole or in shards, without reading any.

    Raises:
        CheckpointError: if the checkpoint does not hold the weights as a single state, or its files are damaged.
    """
    outline = read_outline(info, _state_of_model(info), leaves_all=True)
    if not isinstance(outline.state, dict):
        raise CheckpointError(f"{info.path}: the state of 'model' is not a dictionary of tensors.")
    stored = {str(name): one for name, value in outline.state.items() if (one := outline.stored(value)) is not None}
    first: dict[str, str] = {}
    for name, one in stored.items():
        first.setdefault(one.name, name)
    kept = {name: one for name, one in stored.items() if first[one.name] == name}
    return StoredWeights(kept, {name: first[one.name] for name, one in stored.items() if name not in kept})


def read_weights(info: CheckpointInfo) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's tensors by name, tied ones once; and for each omitted name, the name that holds its tensor.

    Raises:
        CheckpointError: if the checkpoint does not hold the weights as a single state.
    """
    weights = open_weights(info)
    return {name: one.read() for name, one in weights.tensors.items()}, weights.tied


def _state_of_model(info: CheckpointInfo) -> StoredState:
    entry = info.manifest.components.get("model")
    if entry is None:
        there = ", ".join(map(repr, info.manifest.components)) or "nothing"
        raise CheckpointError(f"{info.path} has no component 'model', only {there}; give a checkpoint that has one.")
    states = _states_of("model", entry)
    if len(states) != 1 or entry.sharing_pattern not in WHOLE:
        raise CheckpointError(
            f"{info.path} holds the model as {len(states)} states ({entry.sharing_pattern}), not as a single set of "
            f"weights; load it in a run of {info.manifest.world_size} ranks and save the model there."
        )
    return states[0]


def _states_of(key: str, entry: ComponentEntry) -> list[StoredState]:
    files = entry.files
    if entry.sharing_pattern == SharingPattern.SHARDED:
        return [StoredState(key, f"{key}/state.json", tuple(name for name in files if name.endswith(".safetensors")))]
    found = []
    for document in [name for name in files if name.endswith(".json")]:
        stem = document.removesuffix(".json")
        label, tensors = stem, f"{stem}.safetensors"
        if document == f"{key}/state.json":
            label, tensors = key, tensors_at(key, tensors_at(key, True) in files)
        found.append(StoredState(label, document, (tensors,) if tensors in files else ()))
    return found


def _array_names(node: Any) -> Iterator[str]:
    """Names of tensors that hold NumPy arrays; a false match merely reads its tensor eagerly."""
    if isinstance(node, list):
        for each in node:
            yield from _array_names(each)
    elif isinstance(node, dict):
        array = node.get("ndarray")
        if isinstance(array, dict) and isinstance(array.get("tensor"), str):
            yield array["tensor"]
        for each in node.values():
            yield from _array_names(each)
