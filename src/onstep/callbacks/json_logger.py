"""Records every logged step, evaluation and test of a run in `trainer_logs.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.events import TrainerCallback, TrainerState
from onstep.json_values import encode
from onstep.log_gaps import MISSING
from onstep.metrics.json_log_writer import JsonLogWriter, logging_dir_of
from onstep.metrics_log import read_records
from onstep.trackers.tag_record import BRIDGE_KEY

FILE_NAME = "trainer_logs.json"
_INFO_KEY = "experiment_info"
_LEAST = len(("epoch", "step"))
"""Number of keys in a record without metrics."""


class JsonLogger(TrainerCallback):
    """Appends a record to ``<args.logging_dir>/trainer_logs.json`` at every `on_log`, `on_evaluate` and `on_predict`.

    A record is ``{"timestamp": <unix seconds>, "global_step": ..., "epoch": ...}`` plus the reported metrics, which
    take precedence over those three keys. The file is valid JSON after every record, even if the process is killed. The
    first record of a metrics log contains the constructor's keyword arguments under ``"experiment_info"`` and no
    `loss`.

    `state.log_history` of a resumed run is read from its metrics log, since checkpoints do not contain it.

    If Megatron Bridge's tags are enabled, a record contains their values since the previous record under ``"bridge"``.

    A resumed run (one with this callback's state from a checkpoint, or at a step > 0) continues its metrics log;
    records written after the checkpoint are moved to ``trainer_logs.branch-<n>.json``. The records that a checkpoint
    covers are durable before it is, or part of it; if the file has lost some all the same, a record with
    ``"missing_records"`` replaces them, and a warning names them. A run that starts from another
    run's checkpoint begins with that run's records. A run that starts from scratch moves an existing metrics log to
    ``trainer_logs.<n>.json``. An evaluation without training appends to the existing metrics log. A file that is not a
    metrics log, or a directory with its name, is renamed and never overwritten. Values that JSON cannot represent are
    recorded as text. If another live run is writing the file, this run uses the next ``trainer_logs.<n>.json``. Without
    `args.logging_dir` nothing is recorded; if that directory is not writable, a `ConfigError` is raised when training
    begins.

    Args:
        **kwargs: Anything to record about the experiment when training starts.
    """

    ranks = "main"

    def __init__(self, **kwargs: Any) -> None:
        self.experiment_info = kwargs
        self._writer = JsonLogWriter(FILE_NAME)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the metrics log, truncated to the step that training resumes from."""
        directory = logging_dir_of(args)
        if not state.is_world_process_zero or directory is None:
            return
        self._writer.open(directory, state.global_step)
        assert self._writer.path is not None
        records = read_records(self._writer.path)
        if state.global_step > 0 and isinstance(state, TrainerState):
            history = [one for one in map(_reported, records) if len(one) > _LEAST]
            if len(history) > len(state.log_history):
                state.log_history[:] = history
        recorded = [record[_INFO_KEY] for record in records if _INFO_KEY in record]
        # once per metrics log, and again if a resumed run has other arguments
        if self.experiment_info and [encode(self.experiment_info)] != [encode(info) for info in recorded[-1:]]:
            self._writer.write_record(state.global_step, state.epoch, {_INFO_KEY: self.experiment_info})

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Record a logged step, or the final metrics."""
        self._record(args, state, {**logs, **_tags(state)})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Record an evaluation."""
        self._record(args, state, metrics)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Record a test."""
        self._record(args, state, metrics)

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the metrics log; a later evaluation reopens it."""
        tags = _tags(state, reads=False)
        if tags:
            self._record(args, state, tags)
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the metrics log, and records that could not be written to it: see `JsonLogWriter.state_dict`.

        Records written later, even at the same step, do not belong to the checkpoint.
        """
        return self._writer.state_dict()

    def make_durable(self) -> None:
        """Fsync the file, before a checkpoint that refers to it is committed."""
        self._writer.make_durable()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a checkpoint's position in the metrics log: when training begins, or immediately in a rollback."""
        self._writer.load_state_dict(state_dict)

    def _record(self, args: Any, state: Any, metrics: Mapping[str, Any]) -> None:
        directory = logging_dir_of(args)
        if not state.is_world_process_zero or directory is None:
            return
        self._writer.reopen(directory)
        self._writer.write_record(state.global_step, state.epoch, metrics)


def _tags(state: Any, reads: bool = True) -> dict[str, Any]:
    """Megatron Bridge's tags since the last record; the state of other trainers has none."""
    waiting = getattr(state, "bridge_tags", None)
    columns = {} if waiting is None else waiting.take(reads)
    return {BRIDGE_KEY: columns} if columns else {}


def _reported(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the metrics log in the form of `log_history`."""
    own = ("timestamp", "global_step", _INFO_KEY, BRIDGE_KEY, MISSING)
    return {**{key: value for key, value in record.items() if key not in own}, "step": record.get("global_step", 0)}
