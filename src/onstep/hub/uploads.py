"""Commits to a repository of the Hub in the background, one after the other."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from onstep.errors import ConfigError, HubError
from onstep.hub.repository import Repository

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Upload:
    """Files that are committed together."""

    files: Mapping[str, Path]
    """By their paths in the repository."""
    message: str
    """Of the commit."""
    staged: Path
    """The directory of the files, which is deleted afterwards."""
    cleared: str | None = None
    """See `Repository.commit`."""
    repository: Repository | None = None
    """Where to, if elsewhere, or with another token."""


class Uploads:
    """What is uploaded to one repository. Its threads end with the process, and hold up neither training nor exit.

    Args:
        repository: where to.
        then: ends the warning of an upload that failed: when its files come instead.
    """

    def __init__(self, repository: Repository, then: str) -> None:
        self.repository, self._then = repository, then
        self.jobs: list[Future[CommitInfo]] = []
        """Those that are not known to have ended; the name that transformers has."""

    def submit(self, upload: Upload, *, warns: bool = True) -> Future[CommitInfo]:
        """Commit it once those before it have ended.

        Args:
            upload: its files are not changed meanwhile.
            warns: whether a failure is logged; it is the exception of the result in any case.
        """
        future: Future[CommitInfo] = Future()
        before = self.jobs = [one for one in self.jobs if not one.done()]
        self.jobs = [*before, future]
        Thread(target=self._work, args=(upload, future, before, warns), name="onstep-hub", daemon=True).start()
        return future

    def is_done(self) -> bool:
        """Whether none is left to do."""
        return all(one.done() for one in self.jobs)

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait for all of them, at most `timeout` seconds; whether they have ended."""
        return not wait(self.jobs, timeout).not_done

    def announce(self) -> None:
        """Say what is being waited for."""
        name = self.repository.id or self.repository.name
        logger.warning("waiting for the upload to the Hub (%s); Ctrl-C leaves it unfinished", name)

    def finish(self, leaves: Callable[[], bool]) -> None:
        """Wait for all uploads, and say so; Ctrl-C, or `leaves()`, leaves them.

        Args:
            leaves: asked twice a second.
        """
        if self.wait_until_done(_LOOK_SECONDS):
            return
        self.announce()
        try:
            while not self.wait_until_done(_LOOK_SECONDS) and not leaves():
                pass
        except KeyboardInterrupt:
            logger.debug("interrupted while waiting for an upload")
        if not self.is_done():
            logger.warning("the upload to %s is left unfinished", self.repository.id or self.repository.name)

    def _work(self, upload: Upload, future: Future[Any], before: list[Future[Any]], warns: bool) -> None:
        wait(before)
        try:
            repository = upload.repository or self.repository
            future.set_result(repository.commit(upload.files, upload.message, upload.cleared))
        except (ConfigError, HubError) as error:
            if warns:
                logger.warning("%s %s", error, self._then)
            future.set_exception(error)
        finally:
            shutil.rmtree(upload.staged, ignore_errors=True)
            if not future.done():
                future.set_exception(HubError(f"the commit {upload.message!r} ended with an unexpected error."))
