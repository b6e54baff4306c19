"""`onstep logs tail`: shows the newest records of a log and follows new ones."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from onstep.analysis.logs.lines import MAX_LINE_BYTES
from onstep.analysis.logs.log_tail import LogTail
from onstep.analysis.logs.run_status import ending_of, is_locked
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.text_tables import printable
from onstep.cli.cells import time_shown, value_shown
from onstep.cli.completed_words import complete_runs
from onstep.cli.logs.lookup import find_log
from onstep.errors import ConfigError
from onstep.record import Record

POLL_SECONDS = 0.5
_POLLS_TO_END = 2
"""Polls without news after a run's end before the end is reported."""
_QUIET_POLLS = 10
"""The same after the final record of a log without run.json."""
_LONGEST_VALUE = 60
_HEAD_KEYS = ("timestamp", "global_step", "bridge")


def tail(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=complete_runs,
            help="A log, a run's directory or name; default: the newest log.",
        ),
    ] = None,
    number: Annotated[int, typer.Option("-n", metavar="N", min=0, help="Number of records to show.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new records until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as one line of JSON.")] = False,
) -> None:
    """Show the newest records of a log, newest last.

    With --follow, keeps showing new records, across resumes and rollbacks, until the run ends or Ctrl-C.
    """
    log = LogTail(find_log(path))
    as_text = json.dumps if as_json else one_line
    records = log.last(number)
    if not records and number:
        records = list(TrainingLog.from_file(log.path).records[-number:])
        if records and follow:
            raise ConfigError(f"{log.path} does not have one record per line, so it cannot be followed; drop --follow.")
    try:
        _show(records, as_text)
        _print_long_lines(log)
        if follow:
            _follow(log, as_text, has_final=any(map(_is_final, records)))
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(record: Record) -> str:
    """A record in human-readable form: time, step, and each key with a short value."""
    step = value_shown(record.get("global_step", "?"), _LONGEST_VALUE)
    head = [time_shown(record.get("timestamp")) or "-", f"step {step:>6}"]
    rest = [f"{key} {value_shown(value, _LONGEST_VALUE)}" for key, value in record.items() if key not in _HEAD_KEYS]
    return printable("  ".join([*head, *rest]))


def _follow(log: LogTail, as_text: Callable[[Record], str], *, has_final: bool) -> None:
    """Show new records until the run has ended."""
    num_quiet = 0
    while True:
        ending = ending_of(log.path)  # asked before reading, so that no record written before the end is missed
        records = log.news()
        if log.was_rewritten:
            _print_note("the log was rewritten: the run was rolled back, resumed or restarted")
            has_final = False
        _show(records, as_text)
        _print_long_lines(log)
        has_final = has_final or any(map(_is_final, records))
        num_quiet = 0 if records else num_quiet + 1
        if ending is None and has_final and num_quiet >= _QUIET_POLLS and not is_locked(log.path):
            ending = "the final record is written"
        if ending is not None and num_quiet >= _POLLS_TO_END:
            _print_note(ending)
            return
        time.sleep(POLL_SECONDS)


def _show(records: Sequence[Record], as_text: Callable[[Record], str]) -> None:
    for record in records:
        print(as_text(record), flush=True)


def _print_note(text: str) -> None:
    print(f"-- {text} --", file=sys.stderr, flush=True)


def _print_long_lines(log: LogTail) -> None:
    if log.num_long_lines:
        _print_note(f"{log.num_long_lines} lines of more than {MAX_LINE_BYTES:,} bytes were skipped")


def _is_final(record: Record) -> bool:
    return "train_runtime" in record
