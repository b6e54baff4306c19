"""Reports a run to Ray Train or Ray Tune: its metrics, and which of its checkpoints is committed."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError, extra
from onstep.events import Callback, CallbackContext
from onstep.files.bounded_reading import read_json
from onstep.stores.urls import is_url, joined

POINTER = "onstep-checkpoint.json"
"""The one file of a checkpoint as Ray keeps it."""


class RayReport(Callback):
    """Reports metrics and committed checkpoints to Ray, in a training function of Ray Train or Ray Tune.

    Before the next step, every rank passes Ray the newest value of each metric, with `step` and `epoch`, if there was
    an evaluation, a checkpoint or a logged step. Ray Train fetches one report in two seconds, and would let the run
    wait for that: a logged step alone is left out if the report before it is younger.

    A checkpoint is reported once it is committed, as a directory with one file that says where it is (`checkpoint_of`).
    The directory of the run keeps it, and decides from where the run continues when Ray starts its workers again. When
    Ray announces at a logged step that it will remove a node, the run saves once and trains on.

    Args:
        metric: what a scheduler of Tune compares, such as `eval_loss`: nothing is reported before it has a value.

    Raises:
        ConfigError: outside of Ray Train and Ray Tune, before anything is built, and for a run in the temporary
            directory in which Ray Train starts its workers.
        MissingExtraError: if Ray is not installed.
    """

    reads_weights = False
    changes_weights = False

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self._newest: dict[str, Any] = {}
        self._is_due = False
        self._committed: dict[str, Any] | None = None
        """A checkpoint that is not reported yet, as in its file."""
        self._reported_at = -math.inf
        self._has_saved_for_preemption = False

    def check_start(self) -> None:
        """Check that there is a Ray to report to."""
        with extra("ray", "RayReport requires Ray Train"):
            import ray.train  # noqa: F401
        if not (is_in_ray_train() or _is_in_ray_tune()):
            raise ConfigError(
                "RayReport reports to Ray, but this process is not a worker of Ray Train or Ray Tune; start the "
                "training by TorchTrainer(...).fit(), or drop the callback."
            )

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Refuse a directory that is lost with this start of Ray."""
        directory = context.state.run_dir
        if directory is None or not is_in_ray_train():
            return
        import ray.train

        try:
            storage = ray.train.get_context().get_storage()
        except NotImplementedError:  # in Ray's local mode, which starts no workers
            return
        temporary = Path(storage.local_working_directory).resolve()
        if directory.path.resolve().is_relative_to(temporary):
            raise ConfigError(
                f"The run's directory {directory.path} is in the temporary directory in which Ray starts workers, "
                f"where the run cannot be continued; give an absolute output_dir, which all nodes see."
            )

    def on_log(self, context: CallbackContext) -> None:
        """Report a logged step, unless Ray is not ready for it."""
        self._take(context.logs)
        is_ready = time.monotonic() - self._reported_at >= _fetched_every_seconds()
        if context.state.world.gather(is_ready)[0]:
            self._is_due = True
            self._save_before_preemption(context)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Report an evaluation."""
        self._take(context.metrics)
        self._is_due = True

    def on_test_end(self, context: CallbackContext) -> None:
        """Report a test."""
        self._take(context.metrics)
        self._is_due = True

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Report a checkpoint, which is committed."""
        self._committed = {"checkpoint": _place_of(context), "step": context.checkpoint_step}
        self._is_due = True

    def on_step_begin(self, context: CallbackContext) -> None:
        """Pass on what the step before has brought."""
        self._pass_on(context)

    def on_run_end(self, context: CallbackContext) -> None:
        """Pass on what the end has brought, unless other ranks might not get here."""
        if context.reason != "failed":
            self._pass_on(context)

    def _take(self, metrics: Mapping[str, Any] | None) -> None:
        numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        self._newest |= numbers

    def _pass_on(self, context: CallbackContext) -> None:
        """Report everything that is new. Ray lets every rank wait for all others."""
        if not self._is_due or (self.metric is not None and self.metric not in self._newest):
            return
        metrics = {**self._newest, "step": context.step, "epoch": context.epoch}
        committed, self._committed, self._is_due = self._committed, None, False
        with tempfile.TemporaryDirectory(prefix="onstep-ray-") as directory:
            has_checkpoint = committed is not None and context.state.world.is_main
            if has_checkpoint:
                Path(directory, POINTER).write_text(json.dumps(committed), encoding="utf-8")
            _report(metrics, directory if has_checkpoint else None)
        self._reported_at = time.monotonic()

    def _save_before_preemption(self, context: CallbackContext) -> None:
        """Ask for a checkpoint, once, if Ray will remove a node: it starts the workers again on others."""
        if self._has_saved_for_preemption or not is_in_ray_train():
            return
        import ray.train

        if ray.train.get_preemption_info() is not None:
            self._has_saved_for_preemption = True
            context.control.save("Ray will remove a node")


def checkpoint_of(checkpoint: Any) -> str:
    """The path or URL of the checkpoint that `RayReport` has reported.

    Args:
        checkpoint: Ray's, such as `result.checkpoint`.

    Raises:
        ConfigError: if it is another one.
    """
    with checkpoint.as_directory() as directory:
        path = Path(directory, POINTER)
        if not path.is_file():
            raise ConfigError(f"{checkpoint.path} has no {POINTER}; give a checkpoint that RayReport has reported.")
        return str(read_json(path)["checkpoint"])


def is_in_ray_train() -> bool:
    """Whether this process runs a training function of Ray Train."""
    return _kind_of_session() == "train"


def _is_in_ray_tune() -> bool:
    """Whether this process runs a trial of Ray Tune that is a function."""
    return _kind_of_session() == "tune"


def _kind_of_session() -> str:
    if "ray" not in sys.modules:
        return ""
    import ray.train

    try:
        ray.train.get_context()
    except DeprecationWarning:  # raised in a trial of Tune
        return "tune"
    except RuntimeError:
        return ""
    return "train"


def _report(metrics: dict[str, Any], directory: str | None) -> None:
    """Report to Ray, with a checkpoint if this rank has one, which Ray copies."""
    if _is_in_ray_tune():
        import ray.tune

        ray.tune.report(metrics, checkpoint=directory and ray.tune.Checkpoint.from_directory(directory))
    else:
        import ray.train

        ray.train.report(metrics, checkpoint=directory and ray.train.Checkpoint.from_directory(directory))


def _place_of(context: CallbackContext) -> str:
    """The path of the checkpoint; of a run in an object store, its URL."""
    root, directory, path = context.state.cfg.run.output_dir, context.state.run_dir, str(context.checkpoint_path)
    if directory is None or not is_url(root):
        return os.path.abspath(path)
    return joined(root, directory.path.name, *Path(path).relative_to(directory.path).parts)


def _fetched_every_seconds() -> float:
    """How often Ray Train fetches a report of each worker, by its own variable; Tune does it at once."""
    return float(os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "2")) if is_in_ray_train() else 0.0
