"""Sends the metrics of a run to Trackio."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from onstep.trackers.tracker import RunIdentity, ServiceTracker

logger: logging.Logger = logging.getLogger(__name__)

_ASKED = ("plotly.basedatatypes", "matplotlib.figure", "matplotlib.animation")
"""Modules that Trackio checks for each value, to distinguish figures from numbers."""


@dataclass(eq=False)
class TrackioTracker(ServiceTracker):
    """A run in Trackio's local store (`TRACKIO_DIR`, else Trackio's default), or in a Hugging Face Space.

    A resumed run continues the same Trackio run: its points are appended. Trackio writes twice a second, so points of
    the last half second before a kill are lost in it.

    Args:
        project: Trackio project; None is "onstep".
        run_name: Name of the run; None is the run's name.
        group: Group of the run.
        space_id: Space to log to (its token comes from the environment); None is `TRACKIO_SPACE_ID`, else the local
            store.
        bucket_id: Bucket of the Space.
    """

    name = "trackio"
    package = "trackio"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "project": ("trainer.project",),
        "run_name": ("trainer.run_name",),
        "space_id": ("trainer.trackio_space_id",),
        "bucket_id": ("trainer.trackio_bucket_id",),
    }
    place = "Trackio's local store, without a network; or a Space"
    artifacts = ()
    project: str | None = None
    run_name: str | None = None
    group: str | None = None
    space_id: str | None = None
    bucket_id: str | None = None

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start or resume the Trackio run."""
        self._take_id(run, state)
        project, name = self.project or "onstep", self.run_name or run.name
        config = {key: value for key, value in run.config.items() if not key.startswith("_")}  # reserved by Trackio
        space = self.space_id or os.environ.get("TRACKIO_SPACE_ID")
        common: dict[str, Any] = {"project": project, "name": name, "group": self.group, "config": config}
        self._run = self._in_space(space, common) if space else self._in_local_store(common)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a row to the run; Trackio sets the timestamp when it writes the row."""
        _wait_for_imports()
        self._run.log(dict(metrics), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Show the text as Markdown, in a code block."""
        import trackio

        _wait_for_imports()
        self._run.log({tag: trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def media(self, values: Mapping[str, Any], step: int) -> None:
        """Add a row with Trackio's own types, such as `trackio.Table`."""
        _wait_for_imports()
        self._run.log(dict(values), step=step)

    def _end(self, run: Any, status: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it uploads even if it does not
            run.finish()

    def _in_local_store(self, common: dict[str, Any]) -> Any:
        from trackio.run import Run
        from trackio.utils import TRACKIO_DIR

        # trackio.init() prints, monitors the machine and ends the user's own run; the class alone does not
        run = Run(url=None, client=None, run_id=self._id, **common)
        project = common["project"]
        logger.info("trackio: recording in %s; to see the run: trackio show --project %s", TRACKIO_DIR, project)
        return run

    def _in_space(self, space: str, common: dict[str, Any]) -> Any:
        import trackio

        own: dict[str, Any] = {"space_id": space, "bucket_id": self.bucket_id, "resume": "allow", "embed": False}
        with contextlib.redirect_stdout(io.StringIO()):
            run = trackio.init(**common, **own, auto_log_gpu=False, auto_log_cpu=False)
        logger.info("trackio: logging to the Space %s", space)
        return run


def _wait_for_imports() -> None:
    """Wait for modules that another thread is importing: Trackio (0.43) drops values if one is partially imported."""
    for name in _ASKED:
        if name in sys.modules:
            importlib.import_module(name)
