"""Sends the lines of a run to a tracker and keeps how far it is; used in the tracker's own thread."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Empty
from typing import Any

from onstep.record.saved_log import step_of
from onstep.trackers.breaker import CircuitBreaker
from onstep.trackers.lines import Line, MemoryLines, RecordLines, TakenBackError
from onstep.trackers.own_random import draw_from_own_random
from onstep.trackers.progress import Place, Progress, write_progress
from onstep.trackers.projection import Projection, Shown
from onstep.trackers.session import Session
from onstep.trackers.tracker import CannotContinueError, Tracker

logger: logging.Logger = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""After this time, a tracker has written the points it received; W&B, Trackio and MLflow need up to a second."""
_SAVING_SECONDS = 0.2
"""The shortest time between two writes of the progress."""
_NOTING_SECONDS = 0.05
"""The shortest time between two kept states of the progress that has not settled."""


class Sender:
    """Calls a tracker, whose faults become one warning, and sends it each line once.

    Args:
        tracker: The tracker.
        name: Its name in the run.
        names: Naming schemes: hf, bridge, or both.
        breaker: Decides when a failing tracker is tried again.
        warn: Logs what the tracker does in a session.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        names: Sequence[str],
        breaker: CircuitBreaker,
        warn: Callable[[str, Session], None],
    ) -> None:
        self._tracker, self._name, self._names = tracker, name, tuple(names)
        self._breaker, self._warn = breaker, warn
        self._takes_back = bool(getattr(tracker, "takes_back", False))
        self._settling = 0.0 if self._takes_back else float(getattr(tracker, "settling_seconds", SETTLING_SECONDS))
        self.is_tracker_open = False
        self._progress = Progress()
        self._unsettled: deque[tuple[float, Progress]] = deque()
        self._saved_at = -_SAVING_SECONDS
        self._last = Line({}, 0)
        """The last line that the tracker has."""
        self._state_before: Mapping[str, Any] = {}
        """The tracker's last state."""
        self._is_state_odd = False
        self._num_sent = 0
        """Number of lines of which the tracker was sent something."""
        self._projection = Projection(self._names, tracker)
        self._skips: Progress | None = None
        """What the tracker has of steps that were taken back, and come again; None beyond."""
        self._highest = -1
        """The highest step since the tracker was opened."""
        self._num_calls: dict[int, int] = {}
        """How many calls have succeeded for a line that the tracker does not have as a whole yet, by its end."""
        self._lost_after = -1
        """The position that the tracker had when the service last lost the run; -1 if it has not."""

    def send_now(self, session: Session, status: str) -> int:
        """Open the tracker, send what it lacks, and close it; a service that lacks nothing is not opened.

        Returns:
            The number of lines that it was sent something of.

        Raises:
            Exception: that of the tracker.
        """
        self._num_sent, ended = 0, "failed"
        self._continue(session)
        if session.file is not None and not self._takes_back and not self._lacks_anything(session):
            return 0
        try:
            self._open_tracker(session)
            while self._send_some(session):
                self._save(session)
            ended = status
        finally:
            was_open, self.is_tracker_open = self.is_tracker_open, False
            if was_open:
                self._tracker.close(ended)
        session.settled = self._progress
        self._write(session)
        return self._num_sent

    def work(self, session: Session, previous: Session | None) -> None:
        """Send lines until the close; a tracker is never used by two threads at once."""
        if previous is not None and previous.thread is not None:
            previous.thread.join()
        self._lost_after = -1
        self._continue(session)
        self._write(session)  # what another run left there is not this one's
        while not session.is_abandoned:
            closes = session.closes_as is not None
            self._catch_up(session, closes)
            if closes:
                break
            session.wake.wait(_SAVING_SECONDS if self._unsettled else 1.0)
            session.wake.clear()
        self._close_tracker(session, session.closes_as or "failed")
        session.has_ended = True

    def _continue(self, session: Session) -> None:
        """Continue the run's progress."""
        progress = session.settled.in_lines(session.lines)
        was_cut, self._highest = not session.lines.has(progress.last.line), -1
        self._skips = progress if was_cut and not self._takes_back else None
        if self._takes_back:
            progress = replace(progress, step=-1, values={}, num_own=0, tags_until=-1, tags=(), state={})
        self._progress = replace(progress, names=self._names)
        self._unsettled.clear()
        self._num_calls.clear()
        continues = not self._takes_back and not was_cut
        self._last = progress.last.line if continues else progress.place.line
        is_record = isinstance(session.lines, RecordLines)
        self._projection = Projection(self._names, self._tracker, progress.step, progress.values, is_record)

    def _catch_up(self, session: Session, closes: bool) -> None:
        """Send all lines that there are, unless the tracker fails repeatedly."""
        may_try = self._breaker.allows() or closes
        while may_try and not session.is_abandoned:
            try:
                self._call(session)
                if not self._send_some(session):
                    break
            except BaseException as error:  # noqa: BLE001 - third-party code; its faults must not affect training
                self._breaker.failed()
                self._warn(f"failed with {type(error).__name__}: {error}", session)
                if isinstance(error, CannotContinueError) and self._may_begin_again():
                    self._lost_after = self._last.end
                    self._begin_again(session)
                may_try = not self._breaker.is_open or self._leaves_out(session)
            else:
                self._breaker.succeeded()
        self._save(session)

    def _call(self, session: Session) -> None:
        self._open_tracker(session)
        while True:
            try:
                function = session.calls.get_nowait()
            except Empty:
                break
            function()

    def _go_back(self, session: Session) -> None:
        """Go back to the newest place that the lines still have."""
        session.settled = self._progress
        if self._takes_back:
            self._close_tracker(session, "preempted")
        self._lost_after = -1  # positions are other lines now
        self._continue(session)
        self._open_tracker(session)

    def _may_begin_again(self) -> bool:
        """Whether a service that says it has lost the run gets it again: not where it has lost it before."""
        return not self._takes_back and self._last.end > self._lost_after

    def _begin_again(self, session: Session) -> None:
        """Let a service that has lost the run, such as one that has restarted empty, get everything again."""
        self._close_tracker(session, "preempted")
        session.settled = Progress(session.run.run_id, names=self._names)
        self._continue(session)
        self._write(session)  # before the service has an empty run, which a later start would take for the whole

    def _open_tracker(self, session: Session) -> None:
        """Open the tracker, unless it is open, at the newest place that it has not lost."""
        if self.is_tracker_open:
            return
        draw_from_own_random(getattr(self._tracker, "package", None))
        progress = self._progress
        try:
            state = progress.place.state if self._takes_back else progress.state
            self._tracker.open(session.run, dict(state))
        except CannotContinueError as error:
            if not self._takes_back and state:
                logger.warning("The tracker %r gets the whole run again: %s", self._tracker.name, error)
                self._begin_again(session)
            elif self._takes_back and progress.places and progress.place != Place():
                session.settled = replace(progress, places=progress.places[:-1])
                self._continue(session)
            else:
                raise
            self._open_tracker(session)
            return
        self.is_tracker_open = True
        self._state_before = state
        own = self._state()
        if self._takes_back:
            progress = replace(progress, places=(*progress.places[:-1], replace(progress.place, state=own)))
        else:
            progress = replace(progress, state=own)
        self._progress = progress
        self._note()
        self._save(session, at_once=True)

    def _close_tracker(self, session: Session, status: str) -> None:
        was_open, self.is_tracker_open = self.is_tracker_open, False
        if not was_open:
            return
        try:
            self._tracker.close(status)
        except BaseException as error:  # noqa: BLE001 - as in `_catch_up`
            self._warn(f"failed with {type(error).__name__}: {error}", session)
        else:
            self._unsettled.clear()
            session.settled = self._progress
            self._write(session)

    def _send_some(self, session: Session) -> bool:
        """Send the next lines; whether there were any."""
        try:
            lines = session.lines.read(self._last)
        except TakenBackError:
            self._go_back(session)
            return True
        expect = getattr(self._tracker, "expect", None)
        if expect is not None and len(lines) > 1:
            expect(self._projection.names_of(line.data for line in lines))
        for line in lines:
            if session.is_abandoned:
                break
            self._send(line)
            self._took(line)
            self._save(session)
            if not session.calls.empty():
                self._call(session)
        return bool(lines)

    def _lacks_anything(self, session: Session) -> bool:
        """Whether there is a line after the last one that the tracker is sent something of."""
        last = self._last
        while lines := session.lines.read(last):
            if any(any(self._projection.calls(line.data, self._is_own(line))) for line in lines):
                return True
            last = lines[-1]
        return False

    def _send(self, line: Line) -> None:
        """Send the points of a line that the tracker does not have yet."""
        step = step_of(line.data)
        has = self._skips
        if has is not None and step > has.step:
            has = self._skips = None
        if has is not None and step < has.step:
            return
        is_own = self._is_own(line)
        if is_own and has is not None and has.num_own > 0:
            self._skips = replace(has, num_own=has.num_own - 1)
            return
        shown = None if has is None else Shown(has.tags_until, has.tags)
        calls = list(self._projection.calls(line.data, is_own, shown))
        for call in calls[self._num_calls.get(line.end, 0) :]:
            call()
            self._num_calls[line.end] = self._num_calls.get(line.end, 0) + 1
        self._num_sent += bool(calls)

    def _took(self, line: Line) -> None:
        """Note that the tracker has a line."""
        self._num_calls.pop(line.end, None)
        progress, step, projection = self._progress, step_of(line.data), self._projection
        steps = projection.steps_of(line.data)
        is_new_step = projection.is_complete and min(steps) > self._highest
        self._highest = max(self._highest, *steps)
        if self._skips is None or step >= self._skips.step:
            projection.took(line.data)
            of_line = projection.tags_of(line.data)
            if of_line.tags and of_line.tags_until >= progress.tags_until:
                before = progress.tags if of_line.tags_until == progress.tags_until else ()
                tags = tuple(sorted({*before, *of_line.tags}))
                progress = replace(progress, tags_until=of_line.tags_until, tags=tags)
        is_checkpoint = line.data.get("kind") == "checkpoint"
        if is_new_step:
            state = self._state_before if self._takes_back else {}
            place = Place(self._last.end, self._last.size, self._last.digest, state, line.size, line.digest)
            progress = progress.at(place, is_checkpoint=False)
        if is_checkpoint:
            progress = progress.at(progress.place, is_checkpoint=True)
        if step >= progress.step:
            num_own = (progress.num_own if step == progress.step else 0) + self._is_own(line)
            progress = replace(progress, step=step, values=projection.values_at(step), num_own=num_own)
        self._progress = replace(progress, last=Place(line.end, line.size, line.digest))
        self._last = line
        if self._takes_back:
            self._state()
        self._note()

    def _is_own(self, line: Line) -> bool:
        return line.data.get("kind") == "tracker" and line.data.get("to") == self._name

    def _state(self) -> Mapping[str, Any]:
        """The tracker's state; the one before, with a warning, if it is not plain."""
        try:
            state: dict[str, Any] = json.loads(json.dumps(dict(self._tracker.state_dict())))
        except (TypeError, ValueError, RecursionError) as error:
            if not self._is_state_odd:
                text = "The state of the tracker %r cannot be kept (%s: %s); the one before stays"
                logger.warning(text, self._tracker.name, type(error).__name__, error)
            self._is_state_odd = True
            return self._state_before
        self._state_before = state
        return state

    def _note(self) -> None:
        """Keep the progress until it has settled, often enough, and not that of each of many lines."""
        now, unsettled = time.monotonic(), self._unsettled
        if len(unsettled) > 1 and now - unsettled[-2][0] < _NOTING_SECONDS:
            unsettled.pop()
        unsettled.append((now, self._progress))

    def _save(self, session: Session, at_once: bool = False) -> None:
        """Keep what has settled, at most every `_SAVING_SECONDS`."""
        now = time.monotonic()
        if not at_once and now - self._saved_at < _SAVING_SECONDS:
            return
        settled = None
        while self._unsettled and (at_once or now - self._unsettled[0][0] >= self._settling):
            settled = self._unsettled.popleft()[1]
        if settled is not None:
            self._saved_at, session.settled = now, settled
            self._write(session)

    def _write(self, session: Session) -> None:
        if isinstance(session.lines, MemoryLines):
            session.lines.forget(session.settled.place.end)
        if session.file is not None:
            try:
                write_progress(session.file, session.settled)
            except OSError as error:
                logger.debug("%s cannot be written: %s", session.file, error)  # the tracker gets some lines again

    def _leaves_out(self, session: Session) -> bool:
        """Leave out the next line if the tracker refuses it, but accepts the one after it; whether it continues."""
        if not self.is_tracker_open:
            return False
        lines: list[Line] = []
        try:
            lines = session.lines.read(self._last)[:2]
            self._send(lines[0])
        except BaseException:  # noqa: BLE001 - as in `_catch_up`
            if not self._accepts(lines[1:]):
                return False
            text = "The tracker %r refuses a line of step %d, which it will lack"
            logger.warning(text, self._tracker.name, step_of(lines[0].data))
            self._took(lines[0])
            self._took(lines[1])
        else:
            self._took(lines[0])
        self._breaker.succeeded()
        return True

    def _accepts(self, lines: Sequence[Line]) -> bool:
        """Whether there is a line that the tracker accepts."""
        try:
            for line in lines:
                self._send(line)
        except BaseException:  # noqa: BLE001 - as in `_catch_up`
            return False
        return bool(lines)
