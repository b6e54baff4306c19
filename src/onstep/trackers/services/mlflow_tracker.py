"""Sends the metrics of a run to MLflow."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote, urlsplit

from onstep.errors import DataError
from onstep.trackers.metric_names import METRICS_PER_BATCH, PARAMETERS_PER_BATCH, metric_name, parameters
from onstep.trackers.tracker import CannotContinueError, RunIdentity, ServiceTracker

logger: logging.Logger = logging.getLogger(__name__)

RUN_TAG = "onstep.run_id"
"""Tag with the run's own id, used to find the MLflow run."""
SEGMENTS_TAG = "onstep.segments"
"""Tag with the steps that the run was started and resumed from: '0, 10, 20'."""

_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}

_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST"})
"""MLflow's codes for points that it would not accept later either."""
_SEARCH_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds between two attempts to search a store."""
_TORN_SECONDS = 600.0
"""After which nobody will write the first point of a metric any more."""
_LOCAL_STORE = threading.Lock()
"""Held while this process looks up or creates entries of a local store: MLflow reads half-created experiments."""

Item = TypeVar("Item")


@dataclass(eq=False)
class MlflowTracker(ServiceTracker):
    """A run in MLflow: by default in the directory `mlruns` of the run, without a server.

    A resumed run continues the same MLflow run: its points are appended, and the tag `onstep.segments` lists the steps
    that it was resumed from. Metric names are converted to names that MLflow accepts (`tracker_names.metric_name`). The
    active run of `mlflow.start_run` is neither used nor changed.

    Args:
        experiment: MLflow experiment; None is `MLFLOW_EXPERIMENT_NAME`, else "onstep".
        run_name: Name of the MLflow run; None is the run's name.
        tracking_uri: MLflow's store; None is `MLFLOW_TRACKING_URI`, else `mlruns` in the run's directory. MLflow reads
            passwords and tokens from the environment.
        tags: Tags of the run.
        description: Description of the run.
        flush_seconds: How long points may be batched before they are sent; None is 0 for a local store, else 1. If the
            process is killed, pending points are sent again by the next start.
    """

    name = "mlflow"
    package = "mlflow"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "experiment": ("trainer.project", "logger.mlflow_experiment"),
        "run_name": ("trainer.run_name", "logger.mlflow_run_name"),
        "tracking_uri": ("logger.mlflow_tracking_uri",),
        "tags": ("logger.mlflow_tags",),
        "description": ("logger.mlflow_description",),
    }
    place = "`mlruns/` in the run directory, without a network; or a server"
    artifacts = ("mlruns",)
    experiment: str | None = None
    run_name: str | None = None
    tracking_uri: str | None = None
    tags: Mapping[str, str] | None = None
    description: str | None = None
    flush_seconds: float | None = None
    clock: Callable[[], float] = field(default=time.monotonic, init=False)
    """Returns seconds; replace it to measure with another clock."""
    _client: Any = field(default=None, init=False)
    _interval: float = field(default=0.0, init=False)
    _waiting: list[Any] = field(default_factory=list, init=False)
    _last_flush: float = field(default=0.0, init=False)

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Start an MLflow run, or resume the one with this run's id."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = (
            self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (run.directory.resolve() / "mlruns").as_uri()
        )
        is_local = "://" not in uri or uri.startswith("file:")
        if is_local:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 requires consent to use files
        from mlflow.tracking import MlflowClient

        self._identity, self._waiting = run, []
        self._interval = (0.0 if is_local else 1.0) if self.flush_seconds is None else self.flush_seconds
        with _LOCAL_STORE if is_local else nullcontext():
            self._client = MlflowClient(tracking_uri=uri)
            if is_local:
                remove_torn_metrics(uri, run.run_id)
            self._id = self._find(run, state)
            if self._id is None and state.get("run") == run.run_id:
                raise CannotContinueError(f"mlflow: {uri} has no run of {run.run_id}")
            if self._id is None:
                created = self._client.create_run(self._experiment_id(), run_name=self.run_name or run.name)
                self._id = str(created.info.run_id)
        self._client.update_run(self._id, status="RUNNING")
        self._describe(run)
        self._last_flush = self.clock()
        logger.info("mlflow: run %s in %s", self._id, uri)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric, in one batch with pending points."""
        from mlflow.entities import Metric

        milliseconds = round(timestamp * 1000)
        points = [Metric(metric_name(name), value, milliseconds, step) for name, value in metrics.items()]
        is_full = len(self._waiting) + len(points) >= METRICS_PER_BATCH
        if is_full or self.clock() - self._last_flush >= self._interval:
            self._flush(points)
        else:
            self._waiting += points

    def text(self, tag: str, text: str, step: int) -> None:
        """Save the text as the artifact `text/<tag>/step-<step>.txt`."""
        self._client.log_text(self._id, text, f"text/{metric_name(tag).replace('/', '_')}/step-{step:08d}.txt")

    @property
    def client(self) -> Any:
        """The methods of `MlflowClient`, with the tracker's run as their first argument; None while it is closed."""
        return None if self._client is None or self._id is None else _OfRun(self._client, self._id)

    def close(self, status: str) -> None:
        """Send pending points and set the run's status: FINISHED, KILLED (preempted) or FAILED."""
        if self._client is None:
            return
        try:
            self._flush()
        finally:
            client, self._client = self._client, None
            client.set_terminated(self._id, _STATUS.get(status, "FAILED"))

    def _flush(self, points: Sequence[Any] = ()) -> None:
        """Send pending points and others; if the service fails, pending ones stay, and the caller has the others."""
        for batch in _batches([*self._waiting, *points], METRICS_PER_BATCH):
            self._log_batch(batch)
            del self._waiting[: len(batch)]
        self._last_flush = self.clock()

    def _log_batch(self, batch: Sequence[Any]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, metrics=batch)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise CannotContinueError(f"mlflow: the run {self._id} is gone: {error.message}") from error
            if error.error_code in _REFUSALS:  # it would refuse them each time
                del self._waiting[: len(batch)]
            raise

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "onstep"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                found = self._client.get_experiment_by_name(name)
                if found is None:  # no other process has created it in the meantime
                    raise
        return str(found.experiment_id)

    def _find(self, run: RunIdentity, state: Mapping[str, Any]) -> str | None:
        """The id of this run's MLflow run: from the checkpoint, else by its tag; None if there is none yet."""
        from mlflow.exceptions import MlflowException

        saved = state.get("id")
        if state.get("run") == run.run_id and isinstance(saved, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", saved):
            try:
                if self._client.get_run(saved).info.lifecycle_stage == "active":
                    return saved
            except MlflowException as error:
                logger.warning("mlflow: the run %s of the checkpoint was not found (%s)", saved, error)
        tagged = f"tags.`{RUN_TAG}` = '{run.run_id}'"
        found = self._search(self._experiment_id(), tagged)
        return str(found[0].info.run_id) if found else None

    def _search(self, experiment_id: str, tagged: str) -> Any:
        """The run with a tag. A local store cannot be read while the first point of another run is being written."""
        search = partial(self._client.search_runs, [experiment_id], filter_string=tagged, max_results=1)
        for seconds in _SEARCH_PAUSES:
            try:
                return search()
            except ValueError as error:
                logger.info("mlflow: the store is being written (%s); trying again", error)
                time.sleep(seconds)
        try:
            return search()
        except ValueError as error:
            raise DataError(
                f"mlflow: a run in {self._client.tracking_uri} cannot be read ({error}); remove or repair its metrics, "
                "or choose another tracking_uri."
            ) from error

    def _describe(self, run: RunIdentity) -> None:
        """Set the tags and add new parameters; MLflow does not allow existing ones to change."""
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._id).data
        tags = {**(self.tags or {}), RUN_TAG: run.run_id}
        if not run.adds_only:
            before = [there.tags[SEGMENTS_TAG]] if SEGMENTS_TAG in there.tags else []
            tags[SEGMENTS_TAG] = ", ".join([*before, str(run.start_step)])
        if self.description is not None:
            tags["mlflow.note.content"] = self.description
        now = parameters(run.config)
        changed = {key: value for key, value in now.items() if there.params.get(key, value) != value}
        tags |= {f"onstep.from_step_{run.start_step}.{key}"[:250]: value for key, value in changed.items()}
        new = [Param(key, value) for key, value in now.items() if key not in there.params]
        self._client.log_batch(self._id, tags=[RunTag(key, value) for key, value in tags.items()])
        for batch in _batches(new, PARAMETERS_PER_BATCH):
            self._client.log_batch(self._id, params=batch)


class _OfRun:
    """The methods of `MlflowClient`, bound to one run where they begin with its id, and two of MLflow's module."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        first = next(iter(inspect.signature(found).parameters), "") if callable(found) else ""
        return partial(found, self._run_id) if first == "run_id" else found

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log parameters, like the module's function; one that exists with another value is MLflow's error."""
        from mlflow.entities import Param

        for batch in _batches((Param(key, str(value)) for key, value in params.items()), PARAMETERS_PER_BATCH):
            self._client.log_batch(self._run_id, params=batch)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags, like the module's function."""
        from mlflow.entities import RunTag

        for batch in _batches((RunTag(key, str(value)) for key, value in tags.items()), PARAMETERS_PER_BATCH):
            self._client.log_batch(self._run_id, tags=batch)


def remove_torn_metrics(uri: str, run_id: str) -> None:
    """Remove empty metric files that a kill left in a local store, in this run's directories or in another's long ago.

    MLflow creates a file before it writes the first point, and cannot read a store in which one is empty.
    """
    root = Path(unquote(urlsplit(uri).path) if uri.startswith("file:") else uri)
    for tag in root.glob(f"*/*/tags/{RUN_TAG}"):
        with suppress(OSError):  # a run that is being deleted
            is_own = tag.read_text("utf-8").strip() == run_id
            for path in (tag.parents[1] / "metrics").rglob("*"):
                _remove_torn(path, 0.0 if is_own else _TORN_SECONDS)


def _remove_torn(path: Path, seconds: float) -> None:
    """Remove a file that is empty, and has been for so long; one that cannot be removed is named when it is read."""
    with suppress(OSError):
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and not status.st_size and time.time() - status.st_mtime >= seconds:
            path.unlink()


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
