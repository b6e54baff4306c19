"""Collects the states of a checkpoint, writes the files and builds the manifest."""

from __future__ import annotations

import copy
import logging
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from onstep.checkpoint.components import ComponentFiles, Placement, SharingPattern, StateComponent, make_durable
from onstep.checkpoint.format.codec import document_to_bytes, encode_state
from onstep.checkpoint.format.tensor_file import FileDigest, write_tensors
from onstep.checkpoint.format.tensor_header import ordered_names
from onstep.checkpoint.storage.manifest import ComponentEntry, Manifest
from onstep.checkpoint.storage.memory_copies import Snapshot
from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction
from onstep.errors import CheckpointError, ConfigError, named_text

logger = logging.getLogger(__name__)

LIBRARIES = ("onstep", "torch", "numpy", "safetensors")
"""Libraries whose versions a manifest records, besides Python's."""

SPACE_MARGIN = 1.05
"""Free space that a save requires, as a multiple of its tensors' bytes."""


@dataclass
class SaveRequest:
    """A checkpoint to be written."""

    step: int
    """The step (optimizer updates) that the checkpoint is of."""
    components: list[StateComponent]
    """What is saved, by name."""
    config: dict[str, Any]
    """The run's configuration, as plain JSON."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics by which retention ranks the checkpoint."""
    layout: dict[str, Any] = field(default_factory=dict)
    """How the work is divided among ranks, as plain JSON."""
    persistent: bool = True
    """False: deleted as soon as a newer checkpoint exists."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else for the manifest, as plain JSON."""
    adopts: bool = False
    """Whether files that other code wrote to a directory with the checkpoint's name become part of the checkpoint."""
    write_beside: Callable[[Path], None] | None = None
    """Writes files for other programs into the checkpoint, on rank 0. The manifest lists them; nothing loads them."""
    steady: Sequence[Tensor] = ()
    """Tensors that nothing changes before `CheckpointManager.hold_back` is called, which the caller has to do."""

    def frozen(self) -> SaveRequest:
        """A copy that later changes to this request do not affect."""
        config, metrics, layout, extra = copy.deepcopy((self.config, self.metrics, self.layout, self.extra))
        own = list(self.components)
        return replace(self, components=own, config=config, metrics=metrics, layout=layout, extra=extra)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A durable checkpoint: it survives any crash from now on."""

    step: int
    """The step (optimizer updates) that the checkpoint is of."""
    path: Path
    """The directory of the checkpoint."""
    metrics: dict[str, float]
    """The metrics by which the best one is chosen."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the request had for the manifest, as plain JSON."""


@dataclass(frozen=True)
class EncodedState:
    """The state of a component in the form in which this rank writes it."""

    key: str
    """The component's key."""
    files: ComponentFiles
    tensors: dict[str, Tensor]
    document: Any
    """The rest as typed JSON; None if another rank writes it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts for the tensor file."""
    offsets: Mapping[str, Sequence[int]] | None = None
    """For tensors that are parts of others, the index of their first element; None if all are whole."""
    full_shapes: Mapping[str, Sequence[int]] | None = None
    """The shapes of those others."""


@dataclass(frozen=True)
class WrittenFile:
    """A file that was written and fsynced in the directory of a save."""

    key: str
    """The component's key."""
    path: str
    """Relative to the checkpoint."""
    digest: FileDigest


def write_states(store: FileStore, directory: Path, states: Sequence[EncodedState]) -> list[WrittenFile]:
    """Write this rank's files; on return their contents are durable, but not yet their directory entries.

    Raises:
        OSError: if the file system refuses an operation.
    """
    written = []
    for state in states:
        key, files = state.key, state.files
        store.make_dir(directory / key)
        if state.tensors:
            metadata = dict(state.metadata) if "/" in files.tensors else {"format": "pt"}
            with store.open(directory / files.tensors) as file:
                write_tensors(file, state.tensors, metadata, offsets=state.offsets, full_shapes=state.full_shapes)
            written.append(WrittenFile(key, files.tensors, file.digest))
        if state.document is not None:
            content = document_to_bytes(state.document, key)
            written.append(WrittenFile(key, files.document, store.write_file(directory / files.document, content)))
    return written


def write_durably(
    store: FileStore, directory: Path, components: Sequence[StateComponent], states: Sequence[EncodedState]
) -> list[WrittenFile]:
    """Like `write_states`, while what the components have written elsewhere is made durable, too."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="onstep-sync") as pool:
        # meanwhile: the disk commits both together
        others = [pool.submit(make_durable, component.stateful) for component in components]
        written = write_states(store, directory, states)
        for other in others:
            other.result()
    return written


@dataclass
class PendingSave:
    """A save whose files are being written or are waiting to be committed."""

    request: SaveRequest
    writing: Future[list[WrittenFile]]
    transaction: SaveTransaction | None
    """Only on rank 0."""
    spoiled: str = ""
    """Why the copies are not of one step, if that is known."""

    def result(self) -> list[WrittenFile]:
        """Wait for the files.

        Raises:
            CheckpointError: if the copies are not of one step.
            Exception: whatever writing has raised.
        """
        written = self.writing.result()
        if self.spoiled:
            raise CheckpointError(self.spoiled)
        return written


def check_keys(components: Sequence[StateComponent]) -> None:
    """Refuse components that would write the same files.

    Raises:
        ConfigError: naming the key.
    """
    for key, count in Counter(component.key for component in components).items():
        if count > 1:
            raise ConfigError(f"{count} components have the key {key!r}; give each a unique key.")


@cache
def versions() -> Mapping[str, str]:
    """Versions of Python and of the libraries that write a checkpoint."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # running from a source tree
            found[name] = "not installed"
    return found


def files_beside(store: FileStore, directory: Path, everyone: list[list[WrittenFile]]) -> list[WrittenFile]:
    """Make the files durable that no component has written.

    Raises:
        CheckpointError: if the file system refuses an operation.
    """
    known = {written.path for one in everyone for written in one}
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory).as_posix() for path in paths]
    return [WrittenFile("", name, store.adopt(directory / name)) for name in names if name not in known]


def build_manifest(request: SaveRequest, run_id: str, world_size: int, everyone: list[list[WrittenFile]]) -> Manifest:
    """Build the manifest of the files that all ranks wrote; `everyone` is in rank order."""
    entries = {component.key: _entry(component, everyone) for component in request.components}
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
        components={key: entry for key, entry in entries.items() if entry is not None},
        files={written.path: written.digest for one in everyone for written in one},
    )


def _entry(component: StateComponent, everyone: list[list[WrittenFile]]) -> ComponentEntry | None:
    """The component's entry; None for an optional component that no rank could write."""
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


def check_visible(directory: Path, everyone: list[list[WrittenFile]]) -> None:
    """Refuse a save unless rank 0, which commits it, sees the files of all ranks.

    Raises:
        CheckpointError: naming the rank and the file.
    """
    for rank, one in enumerate(everyone):
        for written in one:
            path = directory / written.path
            size = path.stat().st_size if path.is_file() else None
            if size != written.digest.size:
                found = "does not see it" if size is None else f"sees {size} bytes"
                raise CheckpointError(
                    f"rank {rank} wrote {path} ({written.digest.size} bytes), but rank 0 {found}; all ranks must "
                    f"save to the same shared file system."
                )


def check_free_space(root: Path, tensor_bytes: int) -> None:
    """Refuse a save that the file system has no room for.

    Raises:
        CheckpointError: stating the needed and the free bytes.
    """
    existing = next(directory for directory in (root, *root.absolute().parents) if directory.exists())
    needed, free = int(tensor_bytes * SPACE_MARGIN), shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{root} has {free} bytes free, but the checkpoint needs {needed}; free up space or keep fewer checkpoints "
            f"(checkpoint.most_recent_k)."
        )


@dataclass
class CollectedStates:
    """The states of one step on one rank; the tensors are not copied, so training still modifies them."""

    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, including states that other ranks write."""
    encoded: list[EncodedState] = field(default_factory=list)
    """States that this rank writes."""
    shards: dict[str, EncodedState] = field(default_factory=dict)
    """States in shards, as this rank sees them: with DTensors, and what all ranks have."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Optional components that failed on this rank, and why."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of the tensors that this rank writes."""
        return sum(tensor.nbytes for state in self.encoded for tensor in state.tensors.values())


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they follow each other in a file."""
    return {name: tensors[name] for name in ordered_names(tensors)}


def collect_states(components: Sequence[StateComponent], placement: Placement) -> CollectedStates:
    """Call `state_dict` of each component on every rank (it may be collective) and encode the states this rank writes.

    Raises:
        ConfigError: for two components with the same key, or for a group that this run does not have.
        Exception: whatever a required component raises, including UnsupportedStateError.
    """
    check_keys(components)
    taken = CollectedStates()
    for component in components:
        files = placement.files(component)  # outside the try: an unknown group is not the component's failure
        try:
            state = component.stateful.state_dict()
            if component.sharing_pattern is SharingPattern.SHARDED:
                encoded = encode_state(state, component.key, takes_shards=True)
                taken.shards[component.key] = EncodedState(component.key, files, *encoded)
            elif placement.writes(component):
                tensors, document = encode_state(state, component.key)
                taken.encoded.append(EncodedState(component.key, files, in_file_order(tensors), document))
            taken.states[component.key] = state
        except Exception as error:  # the component's code may raise anything
            if component.required:
                error.add_note(f"while collecting the state of component {component.key!r}")
                raise
            taken.left_out[component.key] = named_text(error)
    return taken


def report_left_out(everywhere: list[dict[str, str]]) -> None:
    """Warn of the optional components that ranks leave out, given for each rank by key."""
    for key, why in {key: why for left_out in reversed(everywhere) for key, why in left_out.items()}.items():
        ranks = [rank for rank, left_out in enumerate(everywhere) if key in left_out]
        text = "The checkpoint omits the optional component %r of ranks %s, which a resume starts afresh: %s"
        logger.warning(text, key, ranks, why)


def backed_by(states: list[EncodedState], snapshot: Snapshot) -> list[EncodedState]:
    """The same states backed by the snapshot's memory, once the copies are complete."""
    copies = iter(snapshot.wait())
    # `copies` is shared by all states; as zip's second argument, it is not advanced past the end of a state
    return [replace(state, tensors=dict(zip(state.tensors, copies, strict=False))) for state in states]
