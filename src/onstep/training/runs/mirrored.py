"""Mirrors a run whose `run.output_dir` is a URL, from the claim of its directory until its release."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from onstep.checkpoint import Retention
from onstep.config import ConfigContainer
from onstep.errors import ConfigError, StoreError
from onstep.mirror.attach import Place, attach
from onstep.mirror.beat import Beat
from onstep.mirror.mirror import BEAT, SHARED, Mirror
from onstep.mirror.run_files import RunFiles
from onstep.mirror.shared_uploads import Helper
from onstep.stores.bucket import Bucket
from onstep.stores.urls import joined
from onstep.training.runs.last_upload import finish_upload, signals_kept
from onstep.training.runs.lock import LOCK, RunLock
from onstep.training.runs.signals import Preempted

_GIB = 1024**3


class MirroredRun:
    """The mirror of a run, and the lock that keeps other processes of this machine out of its directory.

    Args:
        config: the run's configuration, which names it.

    Raises:
        RunExistsError: if a live process works on the run.
        ConfigError: if the store cannot be reached or refuses.
    """

    def __init__(self, config: ConfigContainer) -> None:
        run = config.run
        assert run.name is not None
        if set("#?%") & set(run.name):
            raise ConfigError(f"run.name={run.name} is part of a URL, where #, ? and % are not; choose another name.")
        try:
            if run.fresh:
                run.name, run.fresh = _free_name(run.output_dir, run.local_output_dir, run.name), False
            place = _place(config, run.name)
            place.workplace.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(place.workplace / LOCK)
            self._train, self._is_closed, self._was_left = config.train, False, False
            try:
                self.mirror: Mirror = attach(place, retention_of(config), _asked_steps(config, place))
            except BaseException:
                self._lock.release()
                raise
        except StoreError as error:
            raise ConfigError(
                f"run.output_dir={run.output_dir} cannot be used: {error} Check the bucket, its permissions and the "
                f"credentials in the environment."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run.scratch_dir: {error.filename} cannot be written ({error.strerror}); choose another directory."
            ) from None

    def close(self) -> None:
        """Upload what is left, and let other processes in; calling it twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._was_left = not finish_upload(self.mirror, self._train)
            self._lock.release()

    def finish(self) -> None:
        """Close the mirror of a run that has ended as it should.

        Raises:
            Preempted: if signals, or the end of the allocation, have ended the upload.
            StoreError: if something of the run is not in its object store for another reason.
        """
        self.close()
        if self._was_left:
            raise Preempted(f"{self.mirror.unfinished}".rstrip("."))
        if self.mirror.unfinished is not None:
            raise StoreError(self.mirror.unfinished)


@contextmanager
def helping(config: ConfigContainer, directory: Path) -> Iterator[None]:
    """On ranks other than 0: upload a share of a run's checkpoints, at the end until rank 0 has uploaded everything.

    Launchers would end rank 0 soon after another rank has ended.

    Args:
        config: the run's configuration.
        directory: of the run.
    """
    place = _place(config, directory.name)
    helper = Helper(place.url, place.workplace / SHARED, Beat(place.workplace / BEAT))
    try:
        yield
    except Preempted:
        _help_to_the_end(helper, config)
        raise
    except BaseException:  # rank 0 may wait for this rank
        helper.close()
        raise
    _help_to_the_end(helper, config)


def _help_to_the_end(helper: Helper, config: ConfigContainer) -> None:
    with signals_kept(config.train):  # rank 0 obeys them
        helper.finish()


def _place(config: ConfigContainer, name: str) -> Place:
    run, root = config.run, config.run.local_output_dir
    limit = None if run.scratch_gib is None else run.scratch_gib * _GIB
    return Place(
        joined(run.output_dir, name),
        root / name,
        root / ".mirrored" / name,
        run.lease_seconds,
        limit,
        config.checkpoint.load_best_model_at_end,
    )


def _asked_steps(config: ConfigContainer, place: Place) -> set[int]:
    """The steps of the run's own checkpoints that the configuration names."""
    load = Path(config.checkpoint.load or "")
    named = re.fullmatch(r"checkpoint-([0-9]+)", load.name) if load.is_relative_to(place.directory) else None
    asked = {config.checkpoint.ckpt_step, None if named is None else int(named[1])}
    return {step for step in asked if step is not None}


def _free_name(url: str, local: Path, name: str) -> str:
    """The first of `name`, `name-2`, ... that neither the store nor this machine has a run of."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(one for one in names if not (local / one).exists() and not _is_taken(joined(url, one), local / one))


def _is_taken(url: str, directory: Path) -> bool:
    return bool(RunFiles(Bucket(url), directory).remote())


def retention_of(config: ConfigContainer) -> Retention:
    """The configured retention of checkpoints."""
    checkpoint, validation = config.checkpoint, config.validation
    return Retention(
        most_recent_k=checkpoint.most_recent_k,
        keep_every_n=checkpoint.keep_every_n,
        keep_best_n=max(checkpoint.keep_best_n, int(checkpoint.load_best_model_at_end)),
        metric=validation.metric_for_best_model or "loss",
        greater_is_better=validation.greater_is_better,
    )
