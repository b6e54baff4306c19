"""Fires the events of the end of a run exactly once and in order, however the run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from onstep.errors import named_text
from onstep.training.feature import Feature
from onstep.training.run import Run
from onstep.training.runs.microbatches import current_calculator
from onstep.training.runs.signals import Preempted
from onstep.training.runs.stage import Reason, RunEnding
from onstep.training.stages.job import Job


class TrainingEnd(Feature[Job]):
    """Fires `on_exception` and `on_train_end` if an exception ends the training, before anything is closed."""

    name = "training_end"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Catch the error in passing."""
        try:
            yield
        except BaseException as error:
            if self.host.run.ending.training != "before":
                fire_endings(self.host.run, self.host.notify.fire, error, is_outermost=False)
            raise


@contextmanager
def run_scope(run: Run, fire: Callable[..., None]) -> Iterator[None]:
    """Wraps a whole run, so that the events of its end are fired exactly once.

    `on_exception` fires once if an exception ends the run, `on_train_end` once if `on_train_start` was fired,
    `on_run_end` last. Scopes nest: what runs inside another scope shares its ending, and an evaluation that a callback
    runs, and whose error it handles, ends nothing.
    """
    if run.ending.in_run:
        yield
        return
    ending = run.ending = RunEnding(in_run=True)
    run.exits = run.exits.of_next_run()
    with current_calculator(run.batch_sizes):
        try:
            try:
                with run.world.postponing():
                    yield
            except BaseException as error:
                fire_endings(run, fire, error, is_outermost=True)
                raise
            fire_endings(run, fire, None, is_outermost=True)
        finally:
            ending.in_run = False
            run.record.close_unless_held()


class Endings(Feature[Run]):
    """Fires `on_run_end` after everything else, and `on_exception` if an exception ended the run."""

    name = "endings"

    def session(self) -> AbstractContextManager[None]:
        """Observe how the run ends."""
        return run_scope(self.host, self.host.entry_point.fire)


def fire_endings(run: Run, fire: Callable[..., None], error: BaseException | None, *, is_outermost: bool) -> None:
    """Fire the due events at the end of a training or of the run. All are fired; the first error is raised.

    Raises:
        BaseException: raised by a callback, if nothing else ended the run; else it becomes a note on that error.
    """
    ending = run.ending
    failure = None if isinstance(error, SystemExit) else error
    if failure is not None:
        run.features.failing(failure)
    described = None if failure is None else _described(failure)
    endings: list[tuple[str, dict[str, object]]] = []
    if failure is not None and ending.error is None:
        ending.error = described
        endings.append(("on_exception", {"exception": failure}))
    if ending.training == "during":
        ending.training = "after"
        endings.append(("on_train_end", {}))
    if is_outermost:
        ending.ended = reason_of(run, error)
        ending.error = described
        run.bridge_trackers.note_tags(reads=failure is None)
        endings.append(("on_run_end", {"reason": ending.ended, "exception": failure}))
    raised: list[BaseException] = []
    for event, fields in endings:
        try:
            fire(event, **fields)
        except BaseException as one:  # noqa: BLE001 - every event is fired; the first error is raised below
            raised.append(one)
    if not raised:
        return
    # nobody would see a note on an exit
    main = raised.pop(0) if error is None or isinstance(error, SystemExit) else error
    for other in raised:
        notes = "; ".join(getattr(other, "__notes__", []))  # they name its callback
        main.add_note(f"while the run ended: {named_text(other)}" + (f" ({notes})" if notes else ""))
    if main is not error:
        if is_outermost and not isinstance(main, SystemExit):
            ending.ended, ending.error = "failed", _described(main)
        raise main


def _described(error: BaseException) -> str:
    """The error in one text, with the callback that raised it, for the record of the run."""
    notes = [one for one in getattr(error, "__notes__", ()) if one.startswith("raised by callback ")]
    return named_text(error) + "".join(f" ({one})" for one in notes[-1:])


def reason_of(run: Run, error: BaseException | None) -> Reason:
    """The reason for the end; a callback that exits the process counts as having stopped it."""
    if isinstance(error, Preempted) or (error is None and run.exits.is_preempted):
        return "preempted"
    if error is not None:
        return "stopped" if isinstance(error, SystemExit) else "failed"
    return "stopped" if run.ending.was_stopped else "completed"
