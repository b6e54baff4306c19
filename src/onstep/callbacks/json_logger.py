"""Records every logged step, evaluation and test of a run in `trainer_logs.json`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b

from onstep.config import TrainingArguments
from onstep.events import RunState, TrainerCallback
from onstep.files.json_values import encode
from onstep.record.history import BRIDGE_KEY, INFO_KEY, history_of, is_reported
from onstep.record.kinds import Metrics
from onstep.record.saved_log import SavedLog
from onstep.record.writer import JsonLogWriter, logging_dir_of
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)

FILE_NAME = "trainer_logs.json"


@dataclass
class _Known:
    """What a resumed run need not look for in the metrics log; an object, since plain attributes are part of the id."""

    num_reported: int = 0
    """Number of records that belong to `log_history`."""
    info: str | None = None
    """Digest of the last arguments recorded; None if there are none."""


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
    ``"missing_records"`` replaces them, and a warning names them. A file that has changed before its end is named in a
    warning, too. A run that starts from another run's checkpoint begins with that run's records. A run that starts from
    scratch moves an existing metrics log to ``trainer_logs.<n>.json``. An evaluation without training appends to the
    existing metrics log. A file that is not a metrics log, or a directory with its name, is renamed and never
    overwritten. Values that JSON cannot represent are recorded as text. If another live run is writing the file, this
    run uses the next ``trainer_logs.<n>.json``. Without `args.logging_dir` nothing is recorded; if that directory is
    not writable, a `ConfigError` is raised when training begins.

    Args:
        **kwargs: Anything to record about the experiment when training starts.
    """

    reads_weights = False
    ranks = "main"

    def __init__(self, **kwargs: object) -> None:
        self.experiment_info = kwargs
        self._writer = JsonLogWriter(FILE_NAME)
        self._known = _Known()
        self._at_checkpoint = _Known()
        """What was known at the checkpoint that training is about to resume from."""

    @property
    def kwargs(self) -> dict[str, object]:
        """Forgather's name of `experiment_info`."""
        return self.experiment_info

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Open the metrics log, truncated to the step that training resumes from."""
        directory = logging_dir_of(args)
        if not state.is_world_process_zero:
            return
        if directory is None:
            logger.warning("JsonLogger writes nothing: the run has no directory; set run.name or logger.logging_dir")
            return
        records = self._writer.open(directory, state.global_step)
        position = self._writer.position
        if records is None:
            self._known = replace(self._at_checkpoint)
        else:
            infos = (record[INFO_KEY] for record in reversed(records) if INFO_KEY in record)
            self._known.info = next(map(_digest, infos), None)
            history = history_of(records)
            self._known.num_reported = len(history)
        if state.global_step > 0 and isinstance(state, RunState) and self._known.num_reported > len(state.history):
            read = (lambda: _read_history(position)) if records is None else lambda: history
            state.history.begin_with(self._known.num_reported, read)
        # once per metrics log, and again if a resumed run has other arguments
        if self.experiment_info and _digest(self.experiment_info) != self._known.info:
            self._known.info = _digest(self.experiment_info)
            self._writer.write_record(state.global_step, state.epoch, {INFO_KEY: self.experiment_info})

    def on_log(
        self, args: TrainingArguments, state: RunState, control: object, logs: Metrics, **kwargs: object
    ) -> None:
        """Record a logged step, the final metrics or a Trainer's evaluation."""
        self._record(args, state, {**logs, **_tags(state)})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: RunState,
        control: object,
        metrics: Metrics,
        trainer: object = None,
        **kwargs: object,
    ) -> None:
        """Record an evaluation; a `Trainer` has passed it to `on_log`."""
        if trainer is None:
            self._record(args, state, metrics)

    def on_predict(
        self, args: TrainingArguments, state: RunState, control: object, metrics: Metrics, **kwargs: object
    ) -> None:
        """Record a test."""
        self._record(args, state, metrics)

    def on_run_end(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Close the metrics log; a later evaluation reopens it."""
        tags = _tags(state, reads=False)
        if tags:
            self._record(args, state, tags)
        self._writer.close()

    def state_dict(self) -> StateDict:
        """The position in the metrics log, and records that could not be written to it: see `JsonLogWriter.state_dict`.

        Records written later, even at the same step, do not belong to the checkpoint. What else a resumed run needs of
        the earlier records is added: how many are in `log_history`, and a digest of the last `experiment_info`.
        """
        state = self._writer.state_dict()
        known = {"num_reported": self._known.num_reported, "info_digest": self._known.info}
        return state if state["log_path"] is None else {**state, **known}

    def make_durable(self) -> None:
        """Fsync the file, before a checkpoint that refers to it is committed."""
        self._writer.make_durable()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a checkpoint's position in the metrics log: when training begins, or immediately in a rollback.

        Args:
            state_dict: what `state_dict()` returned.
        """
        number, info = state_dict.get("num_reported"), state_dict.get("info_digest")
        num_reported = number if isinstance(number, int) and 0 <= number < 2**63 else 0
        self._at_checkpoint = _Known(num_reported, info if isinstance(info, str) else None)
        self._known = replace(self._at_checkpoint)
        self._writer.load_state_dict(state_dict)

    def _record(self, args: TrainingArguments, state: RunState, metrics: Metrics) -> None:
        directory = logging_dir_of(args)
        if not state.is_world_process_zero or directory is None:
            return
        self._writer.reopen(directory)
        self._known.num_reported += is_reported(metrics)
        self._writer.write_record(state.global_step, state.epoch, metrics)


def _tags(state: RunState, reads: bool = True) -> Metrics:
    """Megatron Bridge's tags since the last record; the state of other trainers has none."""
    waiting = getattr(state, "bridge_tags", None)
    columns = {} if waiting is None else waiting.take(reads)
    return {BRIDGE_KEY: columns} if columns else {}


def _read_history(position: SavedLog) -> list[Metrics] | None:
    """The records up to a position in the form of `log_history`; None, with a warning, if the file has lost them."""
    records = position.read()
    if records is None:
        logger.warning(
            "state.log_history lacks the records before the resume: %s no longer begins with them", position.path
        )
        return None
    return history_of(records)


def _digest(info: Metrics) -> str:
    return blake2b(encode(info).encode(), digest_size=16).hexdigest()
