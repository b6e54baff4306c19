"""Saving and loading checkpoints, on all ranks alike, while training waits or goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from onstep.checkpoint.catalog.discovery import CheckpointInfo, checkpoints, newest_verified
from onstep.checkpoint.catalog.retention import Retention, best_verified, set_aside, to_delete
from onstep.checkpoint.components import Placement, StateComponent, find_placement
from onstep.checkpoint.loading import LoadReport, load_components
from onstep.checkpoint.saving import (
    EncodedState,
    PendingSave,
    SavedCheckpoint,
    SaveRequest,
    WrittenFile,
    build_manifest,
    check_free_space,
    check_replicas,
    check_visible,
    take_states,
    write_states,
)
from onstep.checkpoint.storage.memory_copies import Snapshot, WarmBuffers
from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction, sweep
from onstep.distributed import World
from onstep.distributed.world import attempt, together
from onstep.errors import CheckpointError, ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints in one folder, written and read by all ranks of a run together.

    A save is all or nothing: what fails on one rank fails on all, and leaves the checkpoints before it as they were.
    Methods marked collective must be reached by every rank, in the same order and with the same components.
    """

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        run_id: str = "",
        retention: Retention | None = None,
        async_save: bool = False,
        on_durable: Callable[[SavedCheckpoint], None] | None = None,
        on_save_error: Literal["stop", "continue"] = "stop",
        store: FileStore | None = None,
        groups: Mapping[str, Any] | None = None,
        validate_free_space: bool = True,
    ) -> None:
        """
        Args:
            root: the folder of the checkpoints, on a file system that all ranks share; made when needed.
            world: the ranks.
            run_id: kept in the manifest.
            retention: which checkpoints are kept; None keeps all.
            async_save: write in a thread; training waits only while the tensors are copied.
            on_durable: told on all ranks, in `save` or `finalize`, once a checkpoint is durable.
            on_save_error: a save that fails raises (stop) or warns (continue).
            store: what touches the files.
            groups: process groups by name, for PER_GROUP; None as a group is all ranks.
            validate_free_space: refuse a save that the file system has no room for before writing anything.
        """
        self.root = root
        self.world = world
        self.async_save = async_save
        self._run_id = run_id
        self._retention = retention or Retention()
        self._on_durable = on_durable
        self._on_save_error = on_save_error
        self._store = store or FileStore()
        self._groups = groups or {}
        self._validate_free_space = validate_free_space
        self._pending: PendingSave | None = None
        self._buffers = WarmBuffers()
        self._writer: ThreadPoolExecutor | None = None
        self._deleting: Future[None] = _done(lambda: None)
        self._is_swept = False

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not finalised; the same on all ranks."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its files of the pending save, or failed to; True without one."""
        return self._pending is None or self._pending.writing.done()

    def save(self, request: SaveRequest) -> None:
        """Write a checkpoint. Collective.

        Blocking: it is durable on return. Asynchronous: its tensors are copied on return, and may change; it becomes
        durable in `finalize`, and older checkpoints are then deleted in the background. A save that is still under way
        is finalised first.

        Raises:
            CheckpointError: on all ranks, if any failed and `on_save_error` is "stop".
            ConfigError: on all ranks, for two components of one key and a group that this run does not have.
        """
        self.finalize()
        with self._failures():
            self._pending = self._begin(request)
        if not self.async_save:
            self.finalize()

    def finalize(self) -> None:
        """Wait until all ranks have written their files of the pending save, and make it a checkpoint. Collective.

        Does nothing without a pending save. To keep training, call it when `is_written` holds on all ranks.

        Raises:
            CheckpointError: on all ranks, if the save failed on any and `on_save_error` is "stop".
        """
        saved = None
        with self._failures():
            saved = self._complete()
        if saved is not None and self._on_durable is not None:
            self._on_durable(saved)

    def close(self) -> None:
        """Let go of thread and memory, after waiting for the writer. No collective: it may follow an error of one rank.

        A save that is not finalised becomes a checkpoint if there is one rank only; a failure is warned of. Then
        `on_durable` is not told: the run may be ending with an error, and what it calls expects a run that goes on.
        With several ranks the save is abandoned, with a warning: nobody can ask the others whether they wrote it.
        """
        if self._writer is not None:
            self._writer.shutdown(wait=True)
            self._writer = None
        pending = self._pending
        if pending is not None and self.world.size == 1:
            _, error = attempt(self._complete)
            if error is not None:
                logger.warning("The checkpoint of step %s is abandoned: %s", pending.request.step, error)
        elif pending is not None:
            _, error = attempt(pending.writing.result)
            why = f": {error}" if error else ", since after an error the other ranks cannot be asked if they wrote it"
            logger.warning("The checkpoint of step %s is abandoned%s", pending.request.step, why)
            _abandon(pending.transaction)
        self._pending = None
        self._buffers.release()

    def newest(self, max_step: int | None = None) -> CheckpointInfo | None:
        """The newest checkpoint whose every file is as it was written; warns why newer ones are not it. Collective.

        Without `max_step`, the checkpoints of this run before it are deleted that no rule keeps: a run that was killed
        right after a save has not come to that.

        Args:
            max_step: look at checkpoints up to this step only.

        Raises:
            CheckpointError: on all ranks, if the folder cannot be read.
        """

        def look() -> CheckpointInfo | None:
            found = newest_verified(self.root, max_step, logger.warning)
            if found is not None and max_step is None and found.manifest.run_id == self._run_id:
                self._delete_surplus(found.step)
            return found

        return self._on_tidy_main(look, f"Looking for checkpoints in {self.root}")

    def best(self) -> CheckpointInfo | None:
        """The verified checkpoint with the best value of the retention's metric; None if none has one. Collective.

        Raises:
            CheckpointError: on all ranks, if the folder cannot be read.
        """
        find = partial(best_verified, self.root, self._retention, logger.warning)
        return self._on_tidy_main(find, f"Looking for the best checkpoint in {self.root}")

    def set_aside_newer(self, step: int) -> None:
        """Move the checkpoints after `step` into the folder `aside`: the run leaves their branch. Collective.

        Raises:
            CheckpointError: on all ranks, if they cannot be moved.
        """
        move = partial(set_aside, self._store, self.root, step)
        self._on_tidy_main(move, f"Setting the checkpoints after step {step} aside")

    def load(
        self, info: CheckpointInfo, components: Sequence[StateComponent], *, skip: Collection[str] = ()
    ) -> LoadReport:
        """Load the components, in order, from a checkpoint of `newest` or `resolve`. Collective.

        Files are verified there, once; this reads them as they are.

        Args:
            info: the checkpoint.
            components: what is loaded; a stateful is given the state of this rank.
            skip: keys of the checkpoint that are left out and do not count as unexpected.

        Raises:
            CheckpointError: on all ranks, for a required component that is missing and for any that fails to load.
            ConfigError: on all ranks, for two components of one key and a group that this run does not have.
        """
        return load_components(self.world, self._placement, info, components, skip)

    @cached_property
    def _placement(self) -> Placement:
        """Collective at the first use, which is the first save or load."""
        return find_placement(self.world, self._groups)

    def _begin(self, request: SaveRequest) -> PendingSave:
        world, doing = self.world, f"Saving the checkpoint of step {request.step}"
        placement = self._placement
        taken = together(world, lambda: take_states(request.components, placement), doing)
        for component in request.components:
            check_replicas(world, component, taken.states.get(component.key), doing)
        everywhere = world.gather((taken.size_bytes, taken.left_out))
        if world.is_main:
            _report_left_out([left_out for _, left_out in everywhere])
        total_bytes = sum(size for size, _ in everywhere)
        transaction = together(world, lambda: self._prepare(request.step, total_bytes), doing)
        folder = world.share(transaction.folder if transaction else None)
        return PendingSave(request.frozen(), self._start_writing(folder, taken.encoded), transaction)

    def _prepare(self, step: int, total_bytes: int) -> SaveTransaction | None:
        """The transaction, on rank 0, if there is room for it."""
        if not self.world.is_main:
            return None
        self._sweep_once()
        if self._validate_free_space:
            check_free_space(self.root, total_bytes)
        transaction = SaveTransaction(self._store, self.root, step)
        try:
            transaction.prepare()
        except CheckpointError:
            transaction.abandon()
            raise
        return transaction

    def _start_writing(self, folder: Path, states: list[EncodedState]) -> Future[list[WrittenFile]]:
        """A failure here is one of the writing: other ranks write already, and hear of it when they finalise."""
        if not self.async_save:
            return _done(lambda: write_states(self._store, folder, states))
        snapshot = _done(lambda: self._buffers.copy([one for state in states for one in state.tensors.values()]))
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onstep-save")
        return self._writer.submit(lambda: write_states(self._store, folder, _copied(states, snapshot.result())))

    def _complete(self) -> SavedCheckpoint | None:
        """Commit the pending save once all ranks have written, or abandon it."""
        pending = self._pending
        if pending is None:
            return None
        doing = f"Saving the checkpoint of step {pending.request.step}"
        try:
            everyone = self.world.gather(together(self.world, pending.writing.result, doing))
            path = self._on_main(lambda: self._commit(pending, everyone), doing)
        except (CheckpointError, ConfigError):
            _abandon(pending.transaction)
            self._pending = None
            raise
        self._pending = None
        return SavedCheckpoint(pending.request.step, path, dict(pending.request.metrics))

    def _commit(self, pending: PendingSave, everyone: list[list[WrittenFile]]) -> Path:
        """Make the written files a checkpoint and delete those that are not to be kept, on rank 0."""
        assert pending.transaction is not None
        check_visible(pending.transaction.folder, everyone)
        manifest = build_manifest(pending.request, self._run_id, self.world.size, everyone)
        path = pending.transaction.commit(manifest, replace=True)
        if self._writer is None:
            self._delete_surplus(pending.request.step)
        else:  # deleting some gigabytes takes as long as a few steps
            self._deleting = self._writer.submit(self._delete_surplus, pending.request.step)
        return path

    def _delete_surplus(self, saved_step: int) -> None:
        """Delete what is not to be kept; what cannot be deleted makes no save fail."""
        try:
            there = checkpoints(self.root)
            for info in to_delete(there, self._retention, newest=saved_step, run_id=self._run_id):
                self._store.remove_tree(info.path)
        except CheckpointError as error:
            logger.warning("An old checkpoint could not be deleted: %s", error)

    def _on_main(self, work: Callable[[], T], doing: str) -> T:
        """What the work gives on rank 0, on all ranks. Collective."""
        shared: T = self.world.share(together(self.world, lambda: work() if self.world.is_main else None, doing))
        return shared

    def _on_tidy_main(self, work: Callable[[], T], doing: str) -> T:
        """`_on_main` after deletions have ended and what dead saves have left is removed. Collective."""

        def tidy_and_work() -> T:
            self._deleting.result()
            self._sweep_once()
            return work()

        return self._on_main(tidy_and_work, doing)

    def _sweep_once(self) -> None:
        """Remove what dead saves have left, at the latest before this manager's own first save."""
        if not self._is_swept:
            sweep(self._store, self.root)
            self._is_swept = True

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """A failed save ends the run or is warned of, as `on_save_error` says; all ranks meet the same failure."""
        try:
            yield
        except CheckpointError as error:
            if self._on_save_error == "stop":
                raise
            if self.world.is_main:
                logger.warning("%s The run goes on (on_save_error=continue); older checkpoints are intact.", error)


def _report_left_out(everywhere: list[dict[str, str]]) -> None:
    for key, why in {key: why for left_out in reversed(everywhere) for key, why in left_out.items()}.items():
        ranks = [rank for rank, left_out in enumerate(everywhere) if key in left_out]
        logger.warning("The checkpoint goes without %r of ranks %s, which is optional: %s", key, ranks, why)


def _abandon(transaction: SaveTransaction | None) -> None:
    if transaction is not None:
        transaction.abandon()


def _copied(states: list[EncodedState], snapshot: Snapshot) -> list[EncodedState]:
    """The same states in the memory of the snapshot, once the copies are complete."""
    copies = iter(snapshot.wait())
    # `copies` is one iterator for all states: it stands second, so that a state's end does not swallow the next's first
    return [replace(state, tensors=dict(zip(state.tensors, copies, strict=False))) for state in states]


def _done(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    result, error = attempt(work)
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(cast(T, result))
    return future
