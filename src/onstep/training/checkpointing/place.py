"""The directory in which a run saves: locks it outside of the run's own directory, and follows it if it is moved."""

from __future__ import annotations

from pathlib import Path

from onstep.distributed import on_main
from onstep.errors import CheckpointError, ConfigError
from onstep.training.run import Run
from onstep.training.runs.hold import missing_directories, remove_empty
from onstep.training.runs.lock import LOCK, RunLock


class SavePlace:
    """The directory in which a run saves its checkpoints; on rank 0 it is known by its locks.

    Args:
        run: the run.
        root: the directory, in the run's own or elsewhere (`checkpoint.save`).
    """

    def __init__(self, run: Run, root: Path) -> None:
        self._run, self._root = run, root
        self._made: tuple[Path, ...] = ()
        self._locks: list[RunLock] = []

    def lock(self) -> None:
        """Keep other runs out of a directory that is not the run's own. Collective.

        Raises:
            RunExistsError: on all ranks, if a live run saves there, or has its directory there.
            ConfigError: on all ranks, if it cannot be written.
        """
        run = self._run
        if run.cfg.checkpoint.save is None or run.cfg.validation.skip_train:
            return
        try:
            on_main(run.world, self._take_locks)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.save={self._root} cannot be written ({error}); choose another directory, or make it "
                f"writable."
            ) from None

    def now(self) -> Path:
        """Where the directory is now; if it was removed, where the run continues. Collective.

        Raises:
            CheckpointError: on all ranks, if none can be made in its place.
        """
        try:
            self._root = on_main(self._run.world, self._find)
        except Exception as error:
            raise CheckpointError(f"The directory to save in, {self._root}, is gone: {error}") from error
        return self._root

    def release(self) -> None:
        """Let other runs in; what was made for them and is empty is removed."""
        locks, self._locks = self._locks, []
        for lock in locks:
            is_unused = lock.place is not None and {one.name for one in lock.place.iterdir()} == {LOCK}
            lock.discard() if is_unused else lock.release()
        remove_empty(self._made)

    def _take_locks(self) -> None:
        own = None if self._run.run_dir is None else self._run.run_dir.path
        self._made = missing_directories(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        places = [self._root, *(above for above in self._root.absolute().parents[:3] if (above / "run.json").exists())]
        owner = "" if own is None else f"the run in {own}, "
        for place in places:
            if own is None or not (own.exists() and place.samefile(own)):
                self._locks.append(RunLock(place / LOCK, owner))

    def _find(self) -> Path:
        run_dir = self._run.run_dir
        if self._run.cfg.checkpoint.save is not None:
            return (self._locks[0].place if self._locks else None) or self._root
        if run_dir is None:
            return self._root
        run_dir.make_again_if_removed()
        return run_dir.checkpoints
