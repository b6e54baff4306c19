"""Sends the metrics of a run to Comet, online or into archives for `comet upload`."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from onstep.processes.forking import release_in_forked_children
from onstep.trackers.tracker import RunIdentity, ServiceTracker, plain_name

logger: logging.Logger = logging.getLogger(__name__)

MESSAGES = "messages.json"
META = "experiment.json"
"""Comet's names of the two files in an archive."""


class Segment:
    """A directory for the messages of this process about the experiment `key`, in the layout of Comet's archives.

    The experiment's description is written first, so the recording is complete at any time. The directory is locked
    until `release` or the end of the process.
    """

    def __init__(self, directory: Path, key: str, project: str, workspace: str | None, now: float) -> None:
        self.path = directory / f"{key}-segment-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        milliseconds = int(now * 1000)
        description: dict[str, object] = {
            "offline_id": key,
            "project_name": project,
            "workspace": workspace,
            "start_time": milliseconds,
            "stop_time": milliseconds,
            "tags": [],
            "resume_strategy": "get_or_create",
            "customer_error_reported": False,
            "customer_error_message": None,
            "user_provided_experiment_key": True,
            "comet_start_sourced": False,
        }
        (self.path / META).write_text(json.dumps(description), encoding="utf-8")
        self._lock: int | None = _lock(self.path)
        release_in_forked_children(self, Segment.release)

    def release(self) -> None:
        """Release the lock, so that another process can archive the segment."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _lock(segment: Path) -> int | None:
    """A locked descriptor of the segment's directory; None if another process holds the lock."""
    descriptor = os.open(segment, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def finish_segments(directory: Path, key: str) -> list[Path]:
    """Archive the segments of `key` left by killed processes, and remove the empty archives that belong to them."""
    archives, are_all_done = [], True
    for segment in sorted(path for path in directory.glob(f"{key}-segment-*") if path.is_dir()):
        lock = _lock(segment)
        if lock is None:  # another process is recording in it
            are_all_done = False
            continue
        try:
            archive = _finish(segment)
        finally:
            os.close(lock)
        archives += [] if archive is None else [archive]
    for archive in directory.glob(f"{key}-*.zip") if are_all_done else ():
        with suppress(BadZipFile), ZipFile(archive) as file:
            if not file.namelist():
                archive.unlink()
    return archives


def _finish(segment: Path) -> Path | None:
    messages = segment / MESSAGES
    if not messages.exists():
        shutil.rmtree(segment)
        return None
    content = messages.read_bytes()
    messages.write_bytes(content[: content.rfind(b"\n") + 1])  # the last line may be truncated
    archive = segment.with_suffix(".zip")
    partial = archive.with_suffix(".part")
    with ZipFile(partial, "w", ZIP_DEFLATED) as file:
        for each in sorted(segment.iterdir()):
            file.write(each, each.name)
    partial.replace(archive)
    shutil.rmtree(segment)
    return archive


_NOTHING_AUTOMATIC: dict[str, Any] = {
    "log_code": False,
    "log_graph": False,
    "parse_args": False,
    "display_summary_level": 0,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_log_co2": False,
}

_CONSTRUCTION = threading.Lock()
"""Held while any `CometTracker` of this process creates an experiment."""


@dataclass(eq=False)
class CometTracker(ServiceTracker):
    """An experiment in Comet; other experiments of this process, including the user's own, are not affected.

    Without an API key (`COMET_API_KEY` or Comet's configuration file) or with `COMET_START_ONLINE=0`, the experiment is
    recorded in archives for `comet upload`. A resumed run keeps its experiment key; offline, each process writes one
    archive. What the previous process might have lost in a kill is sent again, so a step may have several values, of
    which the newest counts. The archive of a killed process is created by the process that resumes the run.

    Args:
        project: Comet project; None is `COMET_PROJECT_NAME`, else "onstep".
        run_name: Name of the experiment; None is the run's name.
        workspace: Comet workspace; None is Comet's default (`COMET_WORKSPACE`).
        save_dir: Directory of archives; None is `COMET_OFFLINE_DIRECTORY`, else `comet` in the run's directory.
        tags: Tags of the experiment.
        online: Whether to log online; None does if there is an API key.
    """

    name = "comet"
    package = "comet_ml"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "project": ("trainer.project", "logger.comet_project"),
        "run_name": ("trainer.run_name", "logger.comet_experiment_name"),
        "workspace": ("logger.comet_workspace",),
        "tags": ("logger.comet_tags",),
    }
    place = "Comet; without a network `comet/` in the run directory, for `comet upload` later"
    artifacts = ("comet",)
    project: str | None = None
    run_name: str | None = None
    workspace: str | None = None
    save_dir: str | None = None
    tags: Sequence[str] = ()
    online: bool | None = None
    _segment: Segment | None = field(default=None, init=False)

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start or resume the experiment; offline, start a new archive."""
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # prevents patching of torch and other packages
        _print_errors_only()
        from comet_ml.config.config_api import get_config

        key = self._take_id(run, state, r"[A-Za-z0-9]{32,50}")
        project = self.project or os.environ.get("COMET_PROJECT_NAME") or "onstep"
        common = {"project_name": project, "workspace": self.workspace, "experiment_key": key}
        asked = self.online if self.online is not None else get_config("comet.start.online")
        has_key = bool(get_config("comet.api_key"))
        with _others_untouched():
            self._run = _online(common) if has_key and asked is not False else self._offline(common, run.directory)
        self._run.set_name(self.run_name or run.name)
        if self.tags:
            self._run.add_tags(list(self.tags))
        self._run.log_other("onstep_start_step", run.start_step)
        self._run.log_parameters(dict(run.config))

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric; Comet sets the timestamp on arrival."""
        self._run.log_metrics({plain_name(name): value for name, value in metrics.items()}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Log the text, with its tag as metadata."""
        self._run.log_text(text, step=step, metadata={"tag": plain_name(tag)})

    @property
    def client(self) -> Any:
        """Comet's experiment; None while it is closed."""
        return self._run

    def local_files(self) -> list[Path]:
        """The recording of an offline run."""
        segment = self._segment
        return [] if segment is None else sorted(path for path in segment.path.iterdir() if path.is_file())

    def _end(self, run: Any, status: str) -> None:
        """End the experiment; offline, this writes its archive."""
        try:
            run.log_other("onstep_status", status)
            run.end()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.release()

    def _offline(self, common: Mapping[str, Any], run_dir: Path) -> Any:
        directory = Path(self.save_dir or os.environ.get("COMET_OFFLINE_DIRECTORY") or run_dir / "comet").resolve()
        directory.mkdir(parents=True, exist_ok=True)
        key = common["experiment_key"]
        for archive in finish_segments(directory, key):
            logger.info("comet: archived the recording of an earlier process in %s", archive)
        self._let_go()
        self._segment = Segment(directory, key, common["project_name"], self.workspace, time.time())
        logger.info("comet: offline, recording in %s; to send the run: comet upload %s/*.zip", directory, directory)
        made = {**common, **_NOTHING_AUTOMATIC, "_resume_strategy": "get_or_create"}
        return _offline_class(self._segment.path)(offline_directory=str(directory), **made)


def _print_errors_only() -> None:
    """Let Comet print errors only, if the user has not chosen; `transformers` may have imported it before."""
    if "COMET_LOGGING_CONSOLE" in os.environ:
        return
    os.environ["COMET_LOGGING_CONSOLE"] = "ERROR"
    for handler in logging.getLogger("comet_ml").handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(logging.ERROR)


def _online(common: Mapping[str, Any]) -> Any:
    import comet_ml

    config = comet_ml.ExperimentConfig(**_NOTHING_AUTOMATIC)
    return comet_ml.start(mode="get_or_create", online=True, experiment_config=config, **common)


@contextmanager
def _others_untouched() -> Iterator[None]:
    """Create an experiment without ending the global one, which Comet's constructor would do."""
    from comet_ml.config import config_api

    comet: Any = config_api  # partly untyped
    with _CONSTRUCTION:
        before = comet.get_global_experiment()
        comet.set_global_experiment(None)
        try:
            yield
        finally:
            comet.set_global_experiment(before)


def _offline_class(segment: Path) -> Any:
    """Comet's offline experiment, but with its temporary files next to the archives, where they survive a kill.

    Comet draws the end of the archive's name from `random`, whose seed is that of the run: the archive of a process
    that continues the run would replace the one before.
    """
    from comet_ml import OfflineExperiment

    class SegmentExperiment(OfflineExperiment):
        @property
        def tmpdir(self) -> str:
            return str(segment)

        @tmpdir.setter
        def tmpdir(self, made: str) -> None:
            Path(made).rmdir()

        @property
        def offline_archive_name_suffix(self) -> Any:  # Comet's own is declared as None
            return segment.name.rpartition("-")[2]

        @offline_archive_name_suffix.setter
        def offline_archive_name_suffix(self, drawn: str | None) -> None:
            """Keep the segment's own."""

    return SegmentExperiment
