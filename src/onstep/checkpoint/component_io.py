"""The files of one component: a state taken apart, written, read and put together again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from onstep.checkpoint.codec import decode_state, document_from_bytes, document_to_bytes
from onstep.checkpoint.components import StateComponent
from onstep.checkpoint.placement import ComponentFiles
from onstep.checkpoint.store import FileStore
from onstep.checkpoint.tensor_file import FileDigest, read_tensors, write_tensors
from onstep.errors import CheckpointError


@dataclass(frozen=True)
class EncodedState:
    """The state of a component as this rank will write it."""

    component: StateComponent
    files: ComponentFiles
    tensors: dict[str, Tensor]
    document: Any

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> EncodedState:
        """The same state in other memory; `tensors` in the order of `self.tensors`."""
        return replace(self, tensors=dict(zip(self.tensors, tensors, strict=True)))


@dataclass(frozen=True)
class WrittenFile:
    """A file that lies in the folder of a save, fsynced."""

    key: str
    """Its component."""
    path: str
    """Relative to the checkpoint."""
    digest: FileDigest


def write_states(store: FileStore, folder: Path, states: Sequence[EncodedState]) -> list[WrittenFile]:
    """Write the files of this rank; each is on disk on return, its folder not yet.

    Raises:
        OSError: for what the file system refuses.
    """
    return [written for state in states for written in _write_state(store, folder, state)]


def _write_state(store: FileStore, folder: Path, state: EncodedState) -> list[WrittenFile]:
    key, files, written = state.component.key, state.files, []
    store.make_folder(folder / key)
    if state.tensors:
        with store.open(folder / files.tensors) as file:
            write_tensors(file, state.tensors)
        written.append(WrittenFile(key, files.tensors, file.digest))
    content = document_to_bytes(state.document, key)
    written.append(WrittenFile(key, files.document, store.write_file(folder / files.document, content)))
    return written


def read_state(folder: Path, files: ComponentFiles, listed: Collection[str]) -> Any:
    """Read a state back; only files that the manifest lists are opened.

    Raises:
        CheckpointError: for a file that is not what the writer writes.
    """
    tensors = read_tensors(folder / files.tensors) if files.tensors in listed else {}
    path = folder / files.document
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; resume from another checkpoint.") from error
    return decode_state(tensors, document_from_bytes(content, str(path)), str(path))
