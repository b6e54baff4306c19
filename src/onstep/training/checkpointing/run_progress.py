"""The state of the loop itself in a checkpoint."""

from __future__ import annotations

from onstep.events import Request
from onstep.events.control import FLAGS
from onstep.files.durability import try_to_sync
from onstep.training.protocols import StateDict
from onstep.training.run import Run
from onstep.training.stages.record import last_loss


class RunProgress:
    """Counters, pending decisions and the sums of the mean loss: the same on all ranks.

    Of the log it holds only the length, for a rollback, and the final metrics: the lines are in the record.
    """

    def __init__(self, state: Run) -> None:
        self._state = state

    def state_dict(self) -> StateDict:
        """Plain values, and Megatron Bridge's counters as 0-d tensors."""
        state, history = self._state, self._state.info.history
        return {
            "train_state": state.train_state.state_dict(),
            "flags": {flag: getattr(state.control, flag) for flag in FLAGS},
            "stopped_by": None if state.ending.stopped_by is None else vars(state.ending.stopped_by),
            "first_loss": None if state.losses.first is None else float(state.losses.first),
            "logged_loss": state.losses.logged,
            "last_loss": last_loss(state),
            "loss_sum": state.losses.total,
            "loss_steps": state.losses.num_steps,
            "num_records": len(history),
            "record_position": state.record.state_dict(),
            "final_metrics": None if history.final_metrics is None else dict(history.final_metrics),
            "last_metrics": dict(state.evaluated.last_metrics),
            "evaluated_at": state.evaluated.at_step,
            "evaluation_due_at": state.evaluated.due_at_step,
            "epoch_is_open": state.stage.epoch_is_open,
            "was_concluded": state.stage.final_metrics_logged,
        }

    def make_durable(self) -> None:
        """Fsync the record and the decisions that precede the checkpoint, on rank 0."""
        run_dir = self._state.run_dir
        self._state.record.make_durable()
        if run_dir is not None and self._state.world.is_main:
            try_to_sync(run_dir.decisions)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore everything; a decided stop stays decided, unless `lift_end` follows."""
        state = self._state
        state.train_state.load_state_dict(state_dict["train_state"])
        for flag, value in state_dict["flags"].items():
            if flag in FLAGS:
                state.control.__dict__[flag] = value
        asked = state_dict["stopped_by"]
        state.ending.stopped_by = None if asked is None else Request(**asked)
        state.losses.total, state.losses.num_steps = state_dict["loss_sum"], state_dict["loss_steps"]
        state.losses.first = state_dict.get("first_loss")
        state.losses.logged, state.losses.restored = state_dict.get("logged_loss"), state_dict.get("last_loss")
        if state.world.is_main:
            state.record.go_back(state_dict.get("record_position"), state.train_state.step)
        history, final = state.info.history, state_dict.get("final_metrics")
        if "log_history" in state_dict:  # in checkpoints before version 0.5
            history.replace(state_dict["log_history"])
        else:
            history.final_metrics = None if final is None else dict(final)
        history.num_saved = state_dict.get("num_records", len(history))
        history.go_back(history.num_saved, state.train_state.step)
        if final is not None and not len(history):
            history.append(dict(final))
        state.evaluated.last_metrics, state.evaluated.at_step = state_dict["last_metrics"], state_dict["evaluated_at"]
        state.evaluated.due_at_step = state_dict.get("evaluation_due_at", 0)
        state.stage.epoch_is_open, state.stage.final_metrics_logged = (
            state_dict["epoch_is_open"],
            state_dict["was_concluded"],
        )
