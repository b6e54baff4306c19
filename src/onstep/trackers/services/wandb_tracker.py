"""Sends the metrics of a run to Weights & Biases, online or into files for `wandb sync`."""

from __future__ import annotations

import html
import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from onstep.trackers.tracker import STEP_NAME, RunIdentity, ServiceTracker, plain_name

logger: logging.Logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.2
"""The longest time that points stay in W&B's process before they are in its file."""


@dataclass(eq=False)
class WandbTracker(ServiceTracker):
    """A run in Weights & Biases.

    Without an API key (`WANDB_API_KEY`, or from `wandb login`) or with `WANDB_MODE=offline`, the run is recorded in
    files for `wandb sync`, without prompting. A resumed run has the same W&B id and `resume="allow"`; offline, it gets
    another directory. What the previous process might have lost in a kill is sent again, so a step may have several
    values, of which the newest counts. The x axis of all curves is `train/global_step`, because W&B's own step count
    cannot decrease.

    Args:
        project: W&B project; None is `WANDB_PROJECT`, else "onstep".
        run_name: Name of the W&B run; None is the run's name.
        entity: User or team; None is W&B's default (`WANDB_ENTITY`).
        save_dir: Directory in which `wandb/` is created; None is `WANDB_DIR`, else the run's directory.
        tags: Tags of the run.
        group: Group of the run.
        mode: online | offline | disabled; None is `WANDB_MODE`, else online if there is an API key.
        settings: Additional fields of `wandb.Settings`.
    """

    name = "wandb"
    package = "wandb"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "project": ("trainer.project", "logger.wandb_project"),
        "run_name": ("trainer.run_name", "logger.wandb_exp_name"),
        "entity": ("logger.wandb_entity",),
        "save_dir": ("logger.wandb_save_dir",),
    }
    place = "W&B; without a network `wandb/` in the run directory, for `wandb sync` later"
    artifacts = ("wandb",)
    project: str | None = None
    run_name: str | None = None
    entity: str | None = None
    save_dir: str | None = None
    tags: Sequence[str] = ()
    group: str | None = None
    mode: str | None = None
    settings: Mapping[str, Any] | None = None
    _segment: Path | None = field(default=None, init=False)
    """Directory of the segment, if the run is recorded offline."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start or resume the W&B run; offline, start a new segment."""
        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        if mode != "online":
            os.environ.setdefault(
                "WANDB_ERROR_REPORTING", "false"
            )  # the package reports its own errors over the network
        import wandb

        settings: Any = wandb.Settings
        ours = {"silent": True, "console": "off", "x_transaction_log_flush_interval": FLUSH_SECONDS}
        known = getattr(settings, "model_fields", ours)
        ours = {name: value for name, value in ours.items() if name in known}  # depending on the installed version
        directory = Path(self.save_dir or os.environ.get("WANDB_DIR") or run.directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT") or "onstep",
            entity=self.entity,
            name=self.run_name or run.name,
            id=self._take_id(run, state),
            group=self.group,
            tags=tuple(self.tags) or None,
            dir=str(directory),
            config=dict(run.config),
            resume="allow",
            reinit="create_new",
            settings=settings(mode=mode, **{**ours, **(self.settings or {})}),
        )
        self._run.define_metric(STEP_NAME)
        self._run.define_metric("*", step_metric=STEP_NAME, step_sync=True)
        if mode == "offline":
            self._segment = segment = Path(self._run.settings.sync_dir)
            runs = segment.parent / f"offline-run-*-{self._id}*"
            logger.info("wandb: offline, recording in %s; to send the run: wandb sync %s", segment, runs)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a row to the run's history."""
        named = {plain_name(name): value for name, value in metrics.items()}
        self._run.log({**named, STEP_NAME: step, "_timestamp": timestamp})

    def text(self, tag: str, text: str, step: int) -> None:
        """Show the text as preformatted HTML."""
        import wandb

        self._run.log({plain_name(tag): wandb.Html(f"<pre>{html.escape(text)}</pre>"), STEP_NAME: step})

    def media(self, values: Mapping[str, Any], step: int) -> None:
        """Add a row with W&B's own types, such as `wandb.Histogram`."""
        self._run.log({**{plain_name(name): value for name, value in values.items()}, STEP_NAME: step})

    @property
    def client(self) -> Any:
        """The package `wandb` with the tracker's run as its `wandb.run`; None while it is closed."""
        return None if self._run is None else _OfRun(self._run)

    def local_files(self) -> list[Path]:
        """The recording of an offline run."""
        return [] if self._segment is None else sorted(self._segment.glob("*.wandb"))

    def _end(self, run: Any, status: str) -> None:
        """Finish the run as finished, failed, or preempted (to be resumed)."""
        if status == "preempted":
            run.mark_preempting()
        run.finish(exit_code=0 if status in ("completed", "stopped") else 1)


class _OfRun:
    """The attributes of a run (`config`, `summary`, `log_artifact`), else those of the package (`Histogram`, `Table`).

    In the package itself, `wandb.run` is another run: the tracker's does not replace the user's own.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def __getattr__(self, name: str) -> Any:
        import wandb

        return getattr(self.run if hasattr(self.run, name) else wandb, name)


def _has_key() -> bool:
    """Whether W&B finds an API key without prompting."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            logger.warning("wandb: cannot read %s; the run is recorded offline", path)
    return False
