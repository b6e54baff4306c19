"""Saves and loads checkpoints collectively on all ranks, either blocking or while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from onstep.checkpoint.catalog.discovery import CheckpointInfo, newest_verified
from onstep.checkpoint.catalog.retention import Retention, best_verified, bring_back, delete_surplus, set_aside
from onstep.checkpoint.components import Placement, StateComponent, find_placement
from onstep.checkpoint.loading import LoadReport, load_components
from onstep.checkpoint.replicas import check_replicas
from onstep.checkpoint.saving import (
    EncodedState,
    PendingSave,
    SavedCheckpoint,
    SaveRequest,
    WrittenFile,
    backed_by,
    build_manifest,
    check_free_space,
    check_visible,
    collect_states,
    files_beside,
    report_left_out,
    write_durably,
)
from onstep.checkpoint.storage.manifest import Manifest
from onstep.checkpoint.storage.memory_copies import WarmBuffers, storage_of
from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction, sweep
from onstep.checkpoint.write_plans import WritePlans
from onstep.distributed import World
from onstep.distributed.outcomes import attempt, together
from onstep.errors import CheckpointError, ConfigError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints in one directory, written and read collectively by all ranks of a run.

    A save is all or nothing: a failure on one rank fails on all and leaves earlier checkpoints untouched. Every rank
    must call the methods marked collective, in the same order and with the same components.
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
        is_shared: bool = False,
        buffers: WarmBuffers | None = None,
    ) -> None:
        """
        Args:
            root: directory of the checkpoints, on a file system shared by all ranks; created on demand.
            world: the ranks.
            run_id: recorded in the manifest.
            retention: which checkpoints to keep; None keeps all.
            async_save: write in a background thread; training waits only while the tensors are copied.
            on_durable: called on all ranks, in `save` or `finalize`, once a checkpoint is durable.
            on_save_error: whether a failed save raises ("stop") or logs a warning ("continue").
            store: performs the file operations.
            groups: process groups by name, for PER_GROUP; a group of None means all ranks.
            validate_free_space: check for free space before writing anything, and refuse a save that does not fit.
            is_shared: the directory holds other files too; nothing but checkpoints is written there.
            buffers: the memory into which an asynchronous save copies.
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
        self._is_shared = is_shared
        self.failure: str | None = None
        """Why the newest save failed, if `on_save_error` is "continue"; the same on all ranks."""
        self._pending: PendingSave | None = None
        self._buffers = buffers or WarmBuffers()
        self._plans = WritePlans(world)
        self._writer: ThreadPoolExecutor | None = None
        self._deleting: Future[None] = _done(lambda: None)
        self._is_swept = False

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not yet finalized; the same on all ranks."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has finished (or failed) writing its files of the pending save; True if none is pending."""
        return self._pending is None or self._pending.writing.done()

    def copies_beside(self, device: torch.device) -> bool:
        """Whether a save can copy a device's tensors beside the device's own work: see `SaveRequest.steady`.

        Args:
            device: the device whose tensors are saved.
        """
        return self.async_save and self._buffers.copies_beside(device)

    def hold_back(self) -> None:
        """Make the devices' work from now on wait for the copies of steady tensors, which it may then change."""
        self._buffers.hold_back()

    def spoil(self, why: str) -> None:
        """Let the pending save fail: the values that it copies have changed meanwhile.

        Args:
            why: the reason, for messages.
        """
        if self._pending is not None:
            self._pending.spoiled = why

    def save(self, request: SaveRequest) -> None:
        """Write a checkpoint. Collective.

        Blocking: the checkpoint is durable on return. Asynchronous: on return the tensors have been copied and may
        change; the checkpoint becomes durable in `finalize`, and older checkpoints are then deleted in the background.
        A save still in progress is finalized first.

        Args:
            request: what is saved, and when.

        Raises:
            CheckpointError: on all ranks, if any rank failed and `on_save_error` is "stop".
            ConfigError: on all ranks, for two components with the same key, or for a group that this run does not have.
        """
        self.finalize()
        with self._failures():
            self._pending = self._begin(request)
        if not self.async_save:
            self.finalize()

    def finalize(self) -> None:
        """Wait until all ranks have written their files of the pending save, then commit it. Collective.

        Does nothing if no save is pending. To avoid blocking, call it once `is_written` is true on all ranks.

        Raises:
            CheckpointError: on all ranks, if the save failed on any and `on_save_error` is "stop".
        """
        saved = None
        with self._failures():
            saved = self._complete()
        if saved is not None and self._on_durable is not None:
            self._on_durable(saved)

    def close(self) -> None:
        """Wait for the writer, then release its thread and memory. Not collective: may be called after one rank failed.

        With a single rank, a save that is not finalized is committed, and a failure is logged as a warning.
        `on_durable` is not called then: the run may be ending with an error, and the callee expects a run that
        continues. With several ranks the save is abandoned with a warning, since the other ranks cannot be asked
        whether they wrote their files.
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
            why = f": {error}" if error else ": after an error, the other ranks cannot be asked whether they wrote it"
            logger.warning("The checkpoint of step %s is abandoned%s", pending.request.step, why)
            _abandon(pending.transaction)
        self._pending = None
        self._buffers.release()

    def newest(self, max_step: int | None = None) -> CheckpointInfo | None:
        """The newest checkpoint that passes verification; logs why newer ones are rejected. Collective.

        Without `max_step`, earlier checkpoints of this run that no retention rule keeps are deleted: a run killed
        right after a save did not get to that.

        Args:
            max_step: only consider checkpoints up to this step; None for all, see above.

        Raises:
            CheckpointError: on all ranks, if the directory cannot be read.
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
            CheckpointError: on all ranks, if the directory cannot be read.
        """
        find = partial(best_verified, self.root, self._retention, logger.warning)
        return self._on_tidy_main(find, f"Looking for the best checkpoint in {self.root}")

    def set_aside_newer(self, step: int) -> None:
        """Move the checkpoints after `step` into the directory `aside`: the run abandons their branch. Collective.

        Raises:
            CheckpointError: on all ranks, if they cannot be moved.
        """

        def move() -> None:
            branch = set_aside(self._store, self.root, step)
            if branch is not None:
                logger.warning("continuing from step %d; the checkpoints after it are now in %s", step, branch)

        self._on_tidy_main(move, f"Moving the checkpoints after step {step} aside")

    def bring_back(self, step: int, order: Callable[[Manifest], int | None]) -> None:
        """Move a checkpoint of this run that was set aside back, unless there is one of its step. Collective.

        Args:
            step: the checkpoint's.
            order: of several, the one with the highest value is moved; None for one that is not wanted.

        Raises:
            CheckpointError: on all ranks, if it cannot be moved.
        """

        def own(manifest: Manifest) -> int | None:
            return order(manifest) if manifest.run_id == self._run_id else None

        def move() -> None:
            found = bring_back(self._store, self.root, step, own)
            if found is not None:
                logger.warning("the checkpoint of step %d is needed again; it was in %s", step, found)

        self._on_tidy_main(move, f"Moving the checkpoint of step {step} back")

    def load(
        self, info: CheckpointInfo, components: Sequence[StateComponent], *, skip: Collection[str] = ()
    ) -> LoadReport:
        """Load the components, in order, from a checkpoint returned by `newest` or `resolve`. Collective.

        Those verify the files; this method does not verify them again.

        Args:
            info: the checkpoint.
            components: what to load; each stateful receives the state of this rank.
            skip: keys of the checkpoint that are not loaded and do not count as unexpected.

        Raises:
            CheckpointError: on all ranks, if a required component is missing or any component fails to load.
            ConfigError: on all ranks, for two components with the same key, or for a group that this run does not have.
        """
        return load_components(self.world, self._placement, info, components, skip)

    @cached_property
    def _placement(self) -> Placement:
        """Collective on first use, i.e. in the first save or load."""
        return find_placement(self.world, self._groups)

    def _begin(self, request: SaveRequest) -> PendingSave:
        world, doing = self.world, f"Saving the checkpoint of step {request.step}"
        placement = self._placement
        taken = together(world, lambda: collect_states(request.components, placement), doing)
        request = self._plans.add_shares(taken, request, doing)
        for component in request.components:
            check_replicas(world, component, taken.states.get(component.key), doing)
        everywhere = world.gather((taken.size_bytes, taken.left_out))
        if world.is_main:
            report_left_out([left_out for _, left_out in everywhere])
        total_bytes = sum(size for size, _ in everywhere)
        transaction = together(world, lambda: self._prepare(request, taken.encoded, total_bytes), doing)
        directory = world.share(transaction.directory if transaction else None)
        return PendingSave(request.frozen(), self._start_writing(directory, taken.encoded, request), transaction)

    def _prepare(self, request: SaveRequest, states: list[EncodedState], total_bytes: int) -> SaveTransaction | None:
        """Start the transaction on rank 0, after checking for free space."""
        if not self.world.is_main:
            return None
        self._sweep_once()
        if self._validate_free_space:
            check_free_space(self.root, total_bytes)
        transaction = SaveTransaction(self._store, self.root, request.step, names_latest=not self._is_shared)
        try:
            files = [name for state in states for name in (state.files.tensors, state.files.document)]
            transaction.prepare(adopts=request.adopts, own={Path(name).parts[0] for name in files})
        except CheckpointError:
            transaction.abandon()
            raise
        return transaction

    def _start_writing(
        self, directory: Path, states: list[EncodedState], request: SaveRequest
    ) -> Future[list[WrittenFile]]:
        """Errors are stored in the future: other ranks are already writing and learn of a failure in `finalize`."""
        write = partial(write_durably, self._store, directory, request.components)
        if not self.async_save:
            return _done(lambda: write(states))
        steady = {storage_of(tensor) for tensor in request.steady}
        tensors = [one for state in states for one in state.tensors.values()]
        snapshot = _done(lambda: self._buffers.copy(tensors, steady))
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onstep-save")
        return self._writer.submit(lambda: write(backed_by(states, snapshot.result())))

    def _complete(self) -> SavedCheckpoint | None:
        """Commit the pending save once all ranks have written their files, or abandon it."""
        pending = self._pending
        if pending is None:
            return None
        doing = f"Saving the checkpoint of step {pending.request.step}"
        try:
            everyone = self.world.gather(together(self.world, pending.result, doing))
            path = self._on_main(lambda: self._commit(pending, everyone), doing)
        except (CheckpointError, ConfigError):
            _abandon(pending.transaction)
            self._pending = None
            raise
        self._pending = self.failure = None
        return SavedCheckpoint(pending.request.step, path, dict(pending.request.metrics), dict(pending.request.extra))

    def _commit(self, pending: PendingSave, everyone: list[list[WrittenFile]]) -> Path:
        """Commit the written files as a checkpoint and delete surplus checkpoints; on rank 0."""
        assert pending.transaction is not None
        directory = pending.transaction.directory
        check_visible(directory, everyone)
        if pending.request.write_beside is not None:
            pending.request.write_beside(directory)
            everyone = [*everyone, files_beside(self._store, directory, everyone)]
        manifest = build_manifest(pending.request, self._run_id, self.world.size, everyone)
        path = pending.transaction.commit(manifest, replace=True)
        if self._writer is None:
            self._delete_surplus(pending.request.step)
        else:  # deleting gigabytes can last as long as a few training steps
            self._deleting = self._writer.submit(self._delete_surplus, pending.request.step)
        return path

    def _delete_surplus(self, saved_step: int) -> None:
        delete_surplus(self._store, self.root, self._retention, newest=saved_step, run_id=self._run_id)

    def _on_main(self, work: Callable[[], T], doing: str) -> T:
        """Run `work` on rank 0 and return its result on all ranks. Collective."""

        def alone() -> T:
            with self.world.main_only(doing):
                return work()

        shared: T = self.world.share(together(self.world, lambda: alone() if self.world.is_main else None, doing))
        return shared

    def _on_tidy_main(self, work: Callable[[], T], doing: str) -> T:
        """`_on_main` after pending deletions and the removal of leftovers from dead saves. Collective."""

        def tidy_and_work() -> T:
            self._deleting.result()
            self._sweep_once()
            return work()

        return self._on_main(tidy_and_work, doing)

    def _sweep_once(self) -> None:
        """Remove leftovers of dead saves, at the latest before this manager's first save."""
        if not self._is_swept:
            sweep(self._store, self.root)
            self._is_swept = True

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise or log a failed save, as `on_save_error` says; all ranks see the same failure."""
        try:
            yield
        except CheckpointError as error:
            if self._on_save_error == "stop":
                raise
            self.failure = str(error)
            if self.world.is_main:
                logger.warning("%s The run continues (on_save_error=continue); older checkpoints are intact.", error)


def _abandon(transaction: SaveTransaction | None) -> None:
    if transaction is not None:
        transaction.abandon()


def _done(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    result, error = attempt(work)
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(cast(T, result))
    return future
