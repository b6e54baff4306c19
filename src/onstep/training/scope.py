"""The end of a run: who is told, in which order, whatever happened."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from onstep.training.microbatches_calculator import current_calculator
from onstep.training.signals import Preempted
from onstep.training.state import GlobalState, Reason
from onstep.training.telling import Teller


class RunScope:
    """Wraps everything of a run, so that its end is told exactly once.

    `on_exception` once when an exception ends the run, `on_train_end` once if `on_train_start` was told, `on_run_end`
    after everything. Scopes nest: `train()` inside `pretrain()` shares the outer one's ending, and an evaluation that a
    callback makes and whose error it handles ends nothing.
    """

    def __init__(self, tell: Teller) -> None:
        self.tell = tell
        self.state: GlobalState = tell.state
        self._outermost = False
        self._trains = False
        self._resources = ExitStack()

    def __enter__(self) -> RunScope:
        self._outermost = not self.state.in_run
        self.state.in_run = True
        if self._outermost:
            self.state.train_started = self.state.train_ended = False
            self.state.exception_told, self.state.ended = False, None
            self._resources.enter_context(current_calculator(self.state.batch_sizes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state = self.state
        if not (self._outermost or self._trains):
            return
        decided = error is None or isinstance(error, SystemExit)
        if not decided and error is not None and self._outermost and state.watchdog is not None:
            state.watchdog.publish(error)
        endings: list[tuple[str, dict[str, object]]] = []
        if not decided and not state.exception_told:
            state.exception_told = True
            endings.append(("on_exception", {"exception": error}))
        if state.train_started and not state.train_ended:
            state.train_ended = True
            endings.append(("on_train_end", {}))
        if self._outermost:
            state.ended = self.reason(error)
            state.error = None if decided else f"{type(error).__name__}: {error}"
            endings.append(("on_run_end", {"reason": state.ended, "exception": None if decided else error}))
        try:
            self._tell_all(endings, error)
        finally:
            if self._outermost:
                state.in_run = False
                self._resources.close()

    def reason(self, error: BaseException | None) -> Reason:
        """How the run ended; a callback that exits the process has stopped it."""
        if isinstance(error, Preempted) or (error is None and self.state.exits.decided == "signal"):
            return "preempted"
        if error is not None:
            return "stopped" if isinstance(error, SystemExit) else "failed"
        return "stopped" if self.state.was_stopped else "completed"

    def begin_training(self) -> None:
        """Tell `on_train_start`; from here on `on_train_end` will be told."""
        self._trains = True
        self.state.train_started, self.state.train_ended = True, False
        self.tell("on_train_start")

    def end_training(self) -> None:
        """Tell `on_train_end` at the regular end of the loop."""
        self.state.train_ended = True
        self.tell("on_train_end")

    def _tell_all(self, endings: list[tuple[str, dict[str, object]]], error: BaseException | None) -> None:
        raised: list[BaseException] = []
        for event, fields in endings:
            try:
                self.tell(event, **fields)
            except BaseException as one:  # noqa: BLE001 - every ending is told; the first error is raised below
                raised.append(one)
        if not raised:
            return
        # nobody would see a note on an exit
        main = raised.pop(0) if error is None or isinstance(error, SystemExit) else error
        for other in raised:
            main.add_note(_as_note(other))
        if main is not error:
            raise main


def _as_note(error: BaseException) -> str:
    """One line for an error while the run ended, with the notes that name its callback."""
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"while the run ended: {type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
