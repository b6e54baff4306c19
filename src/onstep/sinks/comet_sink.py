"""Comet."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.sinks.comet_archive import Segment, finish_segments
from onstep.sinks.metric_sink import RunIdentity
from onstep.sinks.tracker_run import id_state, plain_name, require_package, tracker_id

logger: logging.Logger = logging.getLogger(__name__)

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
"""Held while an experiment is made, by whichever sink of this process."""


class CometSink:
    """An experiment in Comet; others of this process, also the user's own, go on beside it.

    Without an API key (`COMET_API_KEY`, or Comet's own configuration file) or with `COMET_START_ONLINE=0`, it is kept
    in archives for `comet upload`. A run that continues has the same experiment key; offline, each process leaves one
    archive. That begins with the points which a kill might have taken from the one before
    (`RunIdentity.last_points`), so a step may have several values, of which the newest counts. The archive of a process
    that was killed is made by the process that continues the run, from what was written until then.

    Args:
        project: Comet project; None is `COMET_PROJECT_NAME`, else "onstep".
        run_name: Name of the experiment; None is the run's.
        workspace: Comet workspace; None is Comet's own choice (`COMET_WORKSPACE`).
        save_dir: Where archives go; None is `COMET_OFFLINE_DIRECTORY`, else `comet` in the run's folder.
        tags: Tags of the experiment.
        online: None is: where there is a key.
    """

    name = "comet"
    keeps_names = False
    takes_back = False

    def __init__(
        self,
        project: str | None = None,
        run_name: str | None = None,
        workspace: str | None = None,
        save_dir: str | None = None,
        tags: Sequence[str] = (),
        online: bool | None = None,
    ) -> None:
        require_package("comet")
        self.project = project
        self.run_name = run_name
        self.workspace = workspace
        self.save_dir = save_dir
        self.tags = tuple(tags)
        self.online = online
        self._identity: RunIdentity | None = None
        self._key: str | None = None
        self._experiment: Any = None
        self._segment: Segment | None = None

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Begin or continue the experiment; offline, a new archive of it."""
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "ERROR")
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # else it changes torch and other packages
        from comet_ml.config.config_api import get_config

        self._identity = run
        self._key = tracker_id(run, state, r"[A-Za-z0-9]{32,50}")
        asked = self.online if self.online is not None else get_config("comet.start.online")
        has_key = bool(get_config("comet.api_key"))
        with _others_untouched():
            self._experiment = self._start_online() if has_key and asked is not False else self._start_offline(run)
        self._experiment.set_name(self.run_name or run.name)
        if self.tags:
            self._experiment.add_tags(list(self.tags))
        self._experiment.log_other("onstep_start_step", run.start_step)
        self._experiment.log_parameters(dict(run.config))

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric; Comet stamps it with the time of its arrival."""
        self._experiment.log_metrics({plain_name(name): value for name, value in metrics.items()}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Log the text, with its tag as metadata."""
        self._experiment.log_text(text, step=step, metadata={"tag": plain_name(tag)})

    def state_dict(self) -> dict[str, Any]:
        """The experiment's key."""
        return id_state(self._identity, self._key)

    def close(self, status: str) -> None:
        """End the experiment; offline, its archive is written."""
        experiment, self._experiment = self._experiment, None
        if experiment is None:
            return
        try:
            experiment.log_other("onstep_status", status)
            experiment.end()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.release()

    def _project(self) -> str:
        return self.project or os.environ.get("COMET_PROJECT_NAME") or "onstep"

    def _start_online(self) -> Any:
        import comet_ml

        return comet_ml.start(
            workspace=self.workspace,
            project_name=self._project(),
            experiment_key=self._key,
            mode="get_or_create",
            online=True,
            experiment_config=comet_ml.ExperimentConfig(**_NOTHING_AUTOMATIC),
        )

    def _start_offline(self, run: RunIdentity) -> Any:
        assert self._key is not None
        folder = Path(self.save_dir or os.environ.get("COMET_OFFLINE_DIRECTORY") or run.folder / "comet").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for archive in finish_segments(folder, self._key):
            logger.info("comet: %s holds what a process before this one recorded", archive)
        self._let_go()
        self._segment = Segment(folder, self._key, self._project(), self.workspace, time.time())
        experiment = _offline_class(self._segment.path)(
            project_name=self._project(),
            workspace=self.workspace,
            experiment_key=self._key,
            offline_directory=str(folder),
            _resume_strategy="get_or_create",
            **_NOTHING_AUTOMATIC,
        )
        logger.info("comet: offline, recording in %s; to send the run: comet upload %s/*.zip", folder, folder)
        return experiment


@contextmanager
def _others_untouched() -> Iterator[None]:
    """Let an experiment be made here without ending another one: Comet's constructor ends the global one."""
    from comet_ml.config import config_api

    comet: Any = config_api  # parts of it have no types
    with _CONSTRUCTION:
        before = comet.get_global_experiment()
        comet.set_global_experiment(None)
        try:
            yield
        finally:
            comet.set_global_experiment(before)


def _offline_class(segment: Path) -> Any:
    """Comet's offline experiment, but what it writes until the end lies beside the archives, where a kill leaves it."""
    from comet_ml import OfflineExperiment

    class SegmentExperiment(OfflineExperiment):
        @property
        def tmpdir(self) -> str:
            return str(segment)

        @tmpdir.setter
        def tmpdir(self, made: str) -> None:
            Path(made).rmdir()

    return SegmentExperiment
