"""What a save is asked to write, the states that it takes, and the manifest that makes it a checkpoint."""

from __future__ import annotations

import copy
import platform
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onstep.checkpoint.codec import encode_state
from onstep.checkpoint.component_io import EncodedState, WrittenFile
from onstep.checkpoint.components import StateComponent
from onstep.checkpoint.manifest import ComponentEntry, Manifest
from onstep.checkpoint.placement import Placement
from onstep.checkpoint.tensor_header import ordered_names
from onstep.checkpoint.transaction import SaveTransaction
from onstep.distributed.rank_errors import attempt
from onstep.errors import CheckpointError, ConfigError

LIBRARIES = ("onstep", "torch", "numpy", "safetensors")
"""Whose versions a manifest keeps, beside Python's."""

SPACE_MARGIN = 1.05
"""Free space that a save asks for, in multiples of its tensors' bytes."""


@dataclass
class SaveRequest:
    """One checkpoint to be written."""

    step: int
    components: list[StateComponent]
    config: dict[str, Any]
    """The run's configuration, plain JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What retention judges the checkpoint by."""
    layout: dict[str, Any] = field(default_factory=dict)
    """How the work is divided among ranks, plain JSON."""
    persistent: bool = True
    """False: deleted as soon as a newer one is there."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else for the manifest, plain JSON."""

    def frozen(self) -> SaveRequest:
        """The same request, out of reach of what is done to this one while it is saved."""
        plain = copy.deepcopy((self.config, self.metrics, self.layout, self.extra))
        config, metrics, layout, extra = plain
        return SaveRequest(
            self.step, list(self.components), config, metrics, layout, persistent=self.persistent, extra=extra
        )


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that no crash can take away any more."""

    step: int
    path: Path
    metrics: dict[str, float]


@dataclass
class PendingSave:
    """A save whose files are being written, or wait to be committed."""

    request: SaveRequest
    writing: Future[list[WrittenFile]]
    transaction: SaveTransaction | None
    """On rank 0."""


def check_keys(components: Sequence[StateComponent]) -> None:
    """Refuse components that would write the same files.

    Raises:
        ConfigError: naming the key.
    """
    keys = [component.key for component in components]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{keys.count(key)} components have the key {key!r}; give each a key of its own.")


@cache
def versions() -> Mapping[str, str]:
    """The libraries that write."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from its sources
            found[name] = "not installed"
    return found


def build_manifest(request: SaveRequest, run_id: str, world_size: int, everyone: list[list[WrittenFile]]) -> Manifest:
    """The manifest of the files that all ranks have written; `everyone` is in rank order."""
    files = {written.path: written.digest for one in everyone for written in one}
    return Manifest(
        step=request.step,
        run_id=run_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        world_size=world_size,
        layout=request.layout,
        config=request.config,
        versions=dict(versions()),
        metrics=request.metrics,
        persistent=request.persistent,
        extra=request.extra,
        components={
            component.key: entry
            for component in request.components
            if (entry := _entry(component, everyone)) is not None
        },
        files=files,
    )


def _entry(component: StateComponent, everyone: list[list[WrittenFile]]) -> ComponentEntry | None:
    """None for an optional component that no rank could write."""
    own = [(rank, written) for rank, one in enumerate(everyone) for written in one if written.key == component.key]
    if not own:
        return None
    return ComponentEntry(
        sharing_pattern=component.sharing_pattern.value,
        ranks=sorted({rank for rank, _ in own}),
        files=[written.path for _, written in own],
        size_bytes=sum(written.digest.size for _, written in own),
        required=component.required,
        metadata=component.metadata,
    )


def check_visible(folder: Path, everyone: list[list[WrittenFile]]) -> None:
    """Refuse a save whose files do not all lie where rank 0 commits them.

    Raises:
        CheckpointError: naming the rank and the file.
    """
    for rank, one in enumerate(everyone):
        for written in one:
            path = folder / written.path
            size = path.stat().st_size if path.is_file() else None
            if size != written.digest.size:
                found = "does not see it" if size is None else f"sees {size} bytes"
                raise CheckpointError(
                    f"rank {rank} wrote {path} ({written.digest.size} bytes) and rank 0 {found}; all ranks must "
                    f"save to one shared file system."
                )


def check_free_space(root: Path, tensor_bytes: int) -> None:
    """Refuse a save that there is no room for.

    Raises:
        CheckpointError: naming what is needed and what is free.
    """
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    needed, free = int(tensor_bytes * SPACE_MARGIN), shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{root} has {free} bytes free and the checkpoint needs {needed}; make room, or keep fewer checkpoints "
            f"(checkpoint.most_recent_k)."
        )


@dataclass
class TakenStates:
    """The states of one moment, on one rank; their tensors are still those that training changes."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, also of what other ranks write."""
    encoded: list[EncodedState] = field(default_factory=list)
    """What this rank writes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Optional components that failed here, and why."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(state.size_bytes for state in self.encoded)


def take_states(components: Sequence[StateComponent], placement: Placement) -> TakenStates:
    """Ask each component for its state, on every rank, since some gather it from all; encode what this rank writes.

    Raises:
        ConfigError: for two components of one key and a group that this run does not have.
        Exception: what a required component fails with, UnsupportedStateError included.
    """
    check_keys(components)
    taken = TakenStates()
    for component in components:
        placement.files(component)  # an unknown group is no failure of the component
        _, error = attempt(partial(_take, taken, component, placement))
        if error is None:
            continue
        if component.required:
            error.add_note(f"while the state of component {component.key!r} was taken")
            raise error
        taken.states.pop(component.key, None)
        taken.left_out[component.key] = f"{type(error).__name__}: {error}"
    return taken


def _take(taken: TakenStates, component: StateComponent, placement: Placement) -> None:
    state = component.stateful.state_dict()
    taken.states[component.key] = state
    if placement.writes(component):
        tensors, document = encode_state(state, component.key)
        in_file_order = {name: tensors[name] for name in ordered_names(tensors)}
        taken.encoded.append(EncodedState(component, placement.files(component), in_file_order, document))
