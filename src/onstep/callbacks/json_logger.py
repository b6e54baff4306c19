"""Records every logged step, evaluation and test of a run in `trainer_logs.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.events import TrainerCallback, TrainerState
from onstep.metrics.json_log_writer import JsonLogWriter, logging_dir_of
from onstep.metrics_log import encode, read_records
from onstep.trackers.tag_record import BRIDGE_KEY

FILE_NAME = "trainer_logs.json"
_INFO_KEY = "experiment_info"
_LEAST = len(("epoch", "step"))
"""What a record has that reports nothing."""


class JsonLogger(TrainerCallback):
    """Appends a record to ``<args.logging_dir>/trainer_logs.json`` at every `on_log`, `on_evaluate` and `on_predict`.

    A record is ``{"timestamp": <unix seconds>, "global_step": ..., "epoch": ...}`` and the reported metrics, which win
    over those three. The file is valid JSON after every record, whatever happens to the process. The first record of a
    journal has the constructor's keyword arguments under ``"experiment_info"``; it has no `loss`.

    `state.log_history` of a continued run is read from its journal, since no checkpoint holds it.

    Where Megatron Bridge's tags are asked for, a record has under ``"bridge"`` what they were since the record before.

    A run that continues (with this callback's state from a checkpoint, or at a step > 0) continues its journal; what
    was recorded after the checkpoint is kept aside in ``trainer_logs.branch-<n>.json``. A run that starts from another
    run's checkpoint begins with that run's records. A run that begins where a journal exists moves that one to
    ``trainer_logs.<n>.json``. An evaluation without training adds to the journal there is. A file that is no journal is
    renamed, never overwritten, and so is a folder of that name. What JSON cannot hold is recorded as text. Where
    another live run writes the file, this one takes the next ``trainer_logs.<n>.json``. Without `args.logging_dir`
    nothing is recorded; one that cannot be written is a `ConfigError` when training begins.

    Args:
        **kwargs: Anything to record about the experiment when training starts.
    """

    ranks = "main"

    def __init__(self, **kwargs: Any) -> None:
        self.experiment_info = kwargs
        self._writer = JsonLogWriter(FILE_NAME)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the journal, cut to the step that training continues from."""
        folder = logging_dir_of(args)
        if not state.is_world_process_zero or folder is None:
            return
        self._writer.open(folder, state.global_step)
        assert self._writer.path is not None
        records = read_records(self._writer.path)
        if state.global_step > 0 and isinstance(state, TrainerState):
            history = [one for one in map(_reported, records) if len(one) > _LEAST]
            if len(history) > len(state.log_history):
                state.log_history[:] = history
        recorded = [record[_INFO_KEY] for record in records if _INFO_KEY in record]
        # once a journal, and again where a continued run has other arguments
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
        """Close the journal; a later evaluation opens it again."""
        tags = _tags(state, reads=False)
        if tags:
            self._record(args, state, tags)
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the journal's path, the step of its last record (-1 before the first), and how many.

        What was recorded later, even at the same step, does not belong to the checkpoint.
        """
        return self._writer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's journal when training begins; while training, go back to the checkpoint at once."""
        self._writer.load_state_dict(state_dict)

    def _record(self, args: Any, state: Any, metrics: Mapping[str, Any]) -> None:
        folder = logging_dir_of(args)
        if not state.is_world_process_zero or folder is None:
            return
        self._writer.reopen(folder)
        self._writer.write_record(state.global_step, state.epoch, metrics)


def _tags(state: Any, reads: bool = True) -> dict[str, Any]:
    """Megatron Bridge's tags since the last record; a foreign trainer's state has none."""
    waiting = getattr(state, "bridge_tags", None)
    columns = {} if waiting is None else waiting.take(reads)
    return {BRIDGE_KEY: columns} if columns else {}


def _reported(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the journal as `log_history` has it."""
    own = ("timestamp", "global_step", _INFO_KEY, BRIDGE_KEY)
    return {**{key: value for key, value in record.items() if key not in own}, "step": record.get("global_step", 0)}
