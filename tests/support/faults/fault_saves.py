"""What the fault tests save: small checkpoints of several files, by three drivers, with a fault at one operation."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from onstep.checkpoint.catalog.discovery import CheckpointInfo, checkpoints, newest_verified
from onstep.checkpoint.catalog.retention import Retention, to_delete
from onstep.checkpoint.checkpoint_manager import CheckpointManager, SaveRequest
from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.checkpoint.storage.manifest import ComponentEntry, Manifest, verify
from onstep.checkpoint.storage.store import FileStore, Operation
from onstep.checkpoint.storage.transaction import LATEST, SaveTransaction
from onstep.distributed import World
from onstep.errors import CheckpointError

KEEP_TWO = Retention(most_recent_k=2)


class Driver(Protocol):
    """One way to save; each save keeps two checkpoints and deletes older ones."""

    def save(self, root: Path, step: int, edition: str, store: FileStore) -> None:
        """Save the state of `step`; `edition` tells apart two states of one step."""

    def edition(self, info: CheckpointInfo) -> str:
        """Which edition a checkpoint holds, after comparing all of its content with what was saved."""


def content(step: int, edition: str) -> dict[str, bytes]:
    """Files of a checkpoint, told apart by step and edition."""
    mark = f"step {step} edition {edition} ".encode()
    return {
        "model/model.safetensors": mark * 40,
        "model/state.json": mark,
        "optimizer/optimizer.safetensors": mark * 80,
        "rng/rank_0.json": mark * 3,
    }


class DirectDriver:
    """The transaction and the store, without the manager."""

    def save(self, root: Path, step: int, edition: str, store: FileStore) -> None:
        transaction = SaveTransaction(store, root, step)
        try:
            transaction.prepare()
            files = {}
            for name, data in content(step, edition).items():
                store.make_dir((transaction.directory / name).parent)
                with store.open(transaction.directory / name) as file:
                    file.write(data[: len(data) // 2])
                    file.write(data[len(data) // 2 :])
                files[name] = file.digest
            transaction.commit(self._manifest(step, edition, files), replace=True)
        except CheckpointError:
            transaction.abandon()
            raise
        for info in to_delete(checkpoints(root), KEEP_TWO, newest=step):
            store.remove_tree(info.path)

    def edition(self, info: CheckpointInfo) -> str:
        edition = str(info.manifest.extra["edition"])
        for name, data in content(info.step, edition).items():
            assert (info.path / name).read_bytes() == data
        return edition

    def _manifest(self, step: int, edition: str, files: dict[str, Any]) -> Manifest:
        component = ComponentEntry("global", [0], list(files), sum(digest.size for digest in files.values()))
        return Manifest(step, "run", "2026-01-01", 1, {"all": component}, files, extra={"edition": edition})


class Holder:
    """A state with tensors and plain values."""

    def __init__(self, step: int, edition: str) -> None:
        self.state: dict[str, Any] = {
            "weights": torch.arange(64, dtype=torch.float32).reshape(8, 8) + step,
            "steps": [step, {"edition": edition}],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@dataclass(frozen=True)
class ManagerDriver:
    """The manager of a run of one rank."""

    async_save: bool = False

    def save(self, root: Path, step: int, edition: str, store: FileStore) -> None:
        manager = CheckpointManager(root, World(), retention=KEEP_TWO, store=store, async_save=self.async_save)
        try:
            manager.save(SaveRequest(step, self._components(step, edition), config={"edition": edition}))
            manager.finalize()
        finally:
            manager.close()

    def edition(self, info: CheckpointInfo) -> str:
        edition = str(info.manifest.config["edition"])
        expected, loaded = self._components(info.step, edition), self._components(0, "")
        CheckpointManager(info.path.parent, World()).load(info, loaded)
        for ours, theirs in zip(loaded, expected, strict=True):
            got, wanted = ours.stateful.state_dict(), theirs.stateful.state_dict()
            assert torch.equal(got["weights"], wanted["weights"])
            assert got["steps"] == wanted["steps"]
        return edition

    def _components(self, step: int, edition: str) -> list[StateComponent]:
        return [
            StateComponent("model", Holder(step, edition), SharingPattern.GLOBAL),
            StateComponent("optimizer", Holder(step + 1, edition), SharingPattern.REPLICATED),
            StateComponent("rng", Holder(step + 2, edition), SharingPattern.PER_RANK),
        ]


DRIVERS: dict[str, Driver] = {
    "direct": DirectDriver(),
    "manager": ManagerDriver(),
    "manager-async": ManagerDriver(async_save=True),
}


@dataclass
class Recorder:
    """Keeps each operation, with its bytes."""

    operations: list[Operation] = field(default_factory=list)

    def __call__(self, operation: Operation) -> None:
        data = memoryview(bytes(operation.data))
        self.operations.append(Operation(operation.kind, operation.path, operation.target, data))


@dataclass
class FailAt:
    """Fails one operation, or all from one on, with an error of the operating system."""

    number: int
    error_number: int
    is_lasting: bool = False
    count: int = 0

    def __call__(self, operation: Operation) -> None:
        self.count += 1
        if self.count == self.number or (self.is_lasting and self.count > self.number):
            raise OSError(self.error_number, os.strerror(self.error_number), str(operation.path))


DIED = 86
"""Exit code of a child that died where it was told to."""


@dataclass
class DieAt:
    """Ends the process at once: before an operation, or when half of the bytes of a write are in the file."""

    number: int
    is_half_done: bool = False
    count: int = 0

    def __call__(self, operation: Operation) -> None:
        self.count += 1
        if self.count != self.number:
            return
        if self.is_half_done:
            descriptor = os.open(operation.path, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, operation.data[: operation.size // 2])
        os._exit(DIED)


def what_is_wrong(root: Path, driver: Driver, allowed: set[tuple[int, str]], *, pointer: int | None = None) -> str:
    """What breaks a promise in this directory; empty if nothing does.

    Args:
        root: the directory of the checkpoints.
        driver: knows what each checkpoint must hold.
        allowed: (step, edition) that the newest verified checkpoint may be.
        pointer: the step that `latest` must name; None allows any that is verified, and no pointer.
    """
    for info in checkpoints(root):
        try:
            verify(info.path)
        except CheckpointError as error:
            return f"a listed checkpoint is none: {error}"
    newest = newest_verified(root, report=lambda line: None)
    found = None if newest is None else (newest.step, driver.edition(newest))
    if found not in allowed:
        return f"the newest verified checkpoint is {found}, not one of {sorted(allowed)}"
    return _what_is_wrong_with_the_pointer(root, pointer)


def _what_is_wrong_with_the_pointer(root: Path, step: int | None) -> str:
    path = root / LATEST
    text = path.read_text() if path.exists() else None
    if step is not None and text != f"checkpoint-{step}\n":
        return f"latest holds {text!r}, not step {step}"
    if text is not None and text not in {f"checkpoint-{info.step}\n" for info in checkpoints(root)}:
        return f"latest holds {text!r}, which is no checkpoint"
    return ""


def debris(root: Path) -> list[str]:
    """Names in the directory that are neither checkpoints nor the pointer."""
    known = {info.path.name for info in checkpoints(root)} | {LATEST}
    return sorted(path.name for path in root.iterdir() if path.name not in known)
