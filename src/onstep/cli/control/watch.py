"""`onstep control watch`: follows a job in the terminal until it ends."""

from __future__ import annotations

import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.logs.files import FILE_NAME
from onstep.analysis.logs.run_status import ending_of
from onstep.analysis.text_tables import printable, shortened
from onstep.cli.control.event_lines import event_lines
from onstep.cli.control.options import AsJson, Job, Remote, TokenFile
from onstep.cli.control.status import headline, one_line, read_status
from onstep.cli.control.target import Target, find_target
from onstep.control import ControlError
from onstep.control.feed import FeedEvent
from onstep.errors import OnstepError

_REFRESH_SECONDS = 2.0
_FREQUENT = ("metrics", "status")
"""Kinds that only update the status line."""
_MOST_UNSHOWN = 10_000
"""Events that have arrived and are not shown yet."""
_RARE = ("evaluation", "decision", "save", "sample", "command", "end")


def watch(
    job: Job = None,
    number: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Past events to show first.")] = 10,
    as_json: AsJson = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Follow a job until it ends: events as they happen, and progress in the last line.

    Into a pipe, every logged step is a line of its own. Ctrl-C ends watching; the job continues.
    """
    target = find_target(job, remote, token_file)
    try:
        _watch(target, number, as_json=as_json)
    except KeyboardInterrupt:
        print(file=sys.stderr)


def _watch(target: Target, number: int, *, as_json: bool) -> None:
    status = read_status(target)
    past = target.client.past_events(target.job_id, kinds=_RARE)
    screen = Screen(sys.stdout.isatty() and not as_json)
    shown = (lambda event: [json.dumps(event.to_dict())]) if as_json else event_lines
    if not as_json:
        screen.print_lines([printable(headline(status))])
    for event in past[-number:] if number else []:
        screen.print_lines(shown(event))
    if past and past[-1].kind == "end":
        return
    screen.update(one_line(status))
    try:
        _follow(target, past[-1].id if past else 0, status, screen, shown)
    finally:
        screen.clear()


def _follow(
    target: Target, after: int, status: dict[str, Any], screen: Screen, shown: Callable[[FeedEvent], list[str]]
) -> None:
    """Show events until the last one."""
    known_at = status.get("timestamp")
    begun = known_at if isinstance(known_at, (int, float)) else time.time()
    refreshed = time.monotonic()
    arrived = start_reading(target, after)
    while True:
        try:
            event = arrived.get(timeout=_REFRESH_SECONDS)
        except queue.Empty:
            event = None
        if isinstance(event, OnstepError):
            raise ControlError(_lost(event, status)) from event
        if isinstance(event, Exception):
            raise event
        if event is not None:
            status |= _news(event)
            if event.kind in _RARE or (not screen.is_terminal and event.kind == "metrics" and event.timestamp >= begun):
                screen.print_lines(shown(event))
            if event.kind == "end":
                return
        if screen.is_terminal and time.monotonic() - refreshed >= _REFRESH_SECONDS:
            status |= _newest_status(target)
            refreshed = time.monotonic()
        screen.update(one_line(status))


def _news(event: FeedEvent) -> Mapping[str, Any]:
    """What an event changes in the status."""
    if event.kind not in (*_FREQUENT, "evaluation"):
        return {}
    step = event.data.get("step", event.data.get("global_step"))
    return event.data if step is None else {**event.data, "global_step": step}


def _lost(error: OnstepError, status: Mapping[str, Any]) -> str:
    """Why the stream of events has ended, and what the directory of the run says about it."""
    directory = status.get("output_dir")
    ending = ending_of(Path(directory) / FILE_NAME) if isinstance(directory, str) else None
    return f"{error}" if ending is None else f"{error} ({ending})"


def start_reading(target: Target, after: int) -> queue.Queue[FeedEvent | Exception]:
    """A queue that a thread fills with the events of a job; an error, if one ends the stream, comes last."""
    arrived: queue.Queue[FeedEvent | Exception] = queue.Queue(maxsize=_MOST_UNSHOWN)

    def read() -> None:
        try:
            for event in target.client.events(target.job_id, after):
                arrived.put(event)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that reads the queue
            arrived.put(error)

    threading.Thread(target=read, name="onstep-watch", daemon=True).start()
    return arrived


class Screen:
    """Lines, and below them one that is updated; without a terminal, lines alone."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._last = ""

    def print_lines(self, lines: list[str]) -> None:
        """Print lines above the last one."""
        last = self._last
        self.clear()
        print("\n".join(lines), flush=True)
        self.update(last)

    def update(self, text: str) -> None:
        """Replace the last line."""
        if not self.is_terminal or text == self._last:
            return
        self.clear()
        self._last = shortened(text, max(20, shutil.get_terminal_size().columns - 1))
        print(self._last, end="", flush=True)

    def clear(self) -> None:
        """Remove the last line."""
        if self._last:
            print("\r\x1b[K", end="", flush=True)
            self._last = ""


def _newest_status(target: Target) -> Mapping[str, Any]:
    try:
        return read_status(target)
    except ControlError:  # the stream of events finds out whether the job has ended
        return {}
