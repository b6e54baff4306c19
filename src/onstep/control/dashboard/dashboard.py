"""Keeps the jobs of a dashboard: those in run directories and those in the registry, each once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from onstep.control.dashboard.file_job import FileJob
from onstep.control.dashboard.found_runs import check_paths, find_runs, id_of
from onstep.control.dashboard.remote_job import RemoteJob
from onstep.control.registry import JobInfo, is_alive, list_infos

logger: logging.Logger = logging.getLogger(__name__)

_SECONDS = 1.0
_DISCOVER_EVERY = 3
"""Refreshes between two looks for new runs."""
Job = FileJob | RemoteJob


class Dashboard:
    """The jobs of a dashboard, kept current by a thread of its own.

    Args:
        paths: run directories, logs, or directories of runs; None for `runs/` and every job of the registry.

    Raises:
        ConfigError: if a path does not exist.
    """

    def __init__(self, paths: Sequence[Path] | None = None) -> None:
        check_paths(paths or [])
        self._paths = [Path("runs")] if paths is None else list(paths)
        self._takes_registered = paths is None
        self._jobs: dict[str, Job] = {}
        self._ids: dict[Path, str] = {}
        self._unreadable: set[str] = set()
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="onstep-dashboard", daemon=True)

    def __enter__(self) -> Dashboard:
        self.discover()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    def jobs(self) -> Mapping[str, Job]:
        """The jobs by id, newest first; called by any thread."""
        return self._jobs

    def listed(self) -> list[dict[str, Any]]:
        """What `GET /jobs` lists."""
        return [job.describe() for job in self._jobs.values()]

    def discover(self) -> None:
        """Look for new runs and jobs, and drop those that are gone."""
        known = {job.job_id: job for job in self._jobs.values() if isinstance(job, RemoteJob)}
        live = {info.job_id: self._remote(info) for info in list_infos() if is_alive(info) and self._is_wanted(info)}
        remotes = {**live, **{job_id: job for job_id, job in known.items() if job_id not in live}}
        taken = {path for job in remotes.values() for path in _directories(job.info)}
        logs = [log for log in find_runs(self._paths) if log.parent.resolve() not in taken]
        jobs: dict[str, Job] = {**remotes}
        for log in logs:
            job = self._file_job(log, jobs)
            jobs[job.job_id] = job
        self._jobs = jobs

    def _remote(self, info: JobInfo) -> RemoteJob:
        known = self._jobs.get(info.job_id)
        return known if isinstance(known, RemoteJob) and known.info == info else RemoteJob(info)

    def _is_wanted(self, info: JobInfo) -> bool:
        roots = [path.resolve() for path in self._paths]
        places = [(place, *place.parents) for place in _directories(info)]
        return self._takes_registered or any(root in place for root in roots for place in places)

    def _file_job(self, log: Path, taken: Mapping[str, Job]) -> FileJob:
        job_id = self._ids.get(log)
        if job_id is None or job_id in taken:
            job_id = self._ids[log] = id_of(log, [*taken, *self._ids.values()])
        known = self._jobs.get(job_id)
        return known if isinstance(known, FileJob) and known.log == log else FileJob(job_id, log, self._wake)

    def _run(self) -> None:
        rounds = 0
        while not self._is_closed:
            rounds += 1
            if rounds % _DISCOVER_EVERY == 0:
                self._attempt("the list of runs", self.discover)
            for job_id, job in list(self._jobs.items()):
                self._attempt(job_id, job.refresh)
            self._wake.wait(_SECONDS)
            self._wake.clear()

    def _attempt(self, what: str, work: Callable[[], None]) -> None:
        """Warn once of what cannot be read: it must not keep the thread from showing everything else."""
        try:
            work()
        except Exception as error:
            if what not in self._unreadable:
                logger.warning("The dashboard cannot read %s: %s", what, error, exc_info=True)
            self._unreadable.add(what)
        else:
            self._unreadable.discard(what)


def _directories(info: JobInfo) -> set[Path]:
    """The run directory of a job, as it may be written in a path of its log."""
    return {Path(one).resolve() for one in (info.logging_dir, info.output_dir) if one}
