"""Reads the files of a run into a feed, and what is appended to them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onstep.analysis.logs.decisions_log import FILE_NAME as DECISIONS
from onstep.analysis.logs.log_tail import LogTail
from onstep.analysis.logs.run_status import ending_of, rewind_command, run_record, status_of
from onstep.analysis.logs.samples_log import follow_samples, sample_of
from onstep.analysis.logs.tokenizers import tokenizer_of
from onstep.control.feed import Feed
from onstep.control.history import finite_number
from onstep.errors import DataError
from onstep.record import Record


class RunFiles:
    """The files of one run: `load` reads all of them into a feed, `follow` what is new.

    Args:
        log: the run's metrics log, which need not exist yet; the other files are beside it.
        feed: is filled; used by one thread.
    """

    def __init__(self, log: Path, feed: Feed) -> None:
        self._log = log
        self._feed = feed
        self._tails: dict[Path, LogTail] = {}
        self._samples: LogTail | None = None
        self._speed = _Speed()

    def load(self) -> None:
        """Read everything that is there; then the feed's status is no longer ``loading``."""
        with suppress(OSError, DataError):  # not there yet, not readable, or cut back while it is read
            self._add_records(self._tail(self._log).read())
        self._add_events()
        self._update_status()

    def follow(self) -> None:
        """Read what was added since the last call."""
        self._add_records(self._news(self._log))
        log = self._tails.get(self._log)
        if log is not None and log.was_rewritten:
            self._feed.history.begin_again(log.read())
        self._add_events()
        self._update_status()

    def _tail(self, path: Path) -> LogTail:
        if path not in self._tails:
            self._tails[path] = LogTail(path)
        return self._tails[path]

    def _news(self, path: Path) -> list[Record]:
        try:
            return self._tail(path).news()
        except OSError:  # not there yet, or not readable
            return []

    def _add_records(self, records: Iterable[Record]) -> None:
        for record in records:
            self._feed.add_record(dict(record))
            self._speed.add(record.get("global_step"), finite_number(record.get("timestamp")))

    def _add_events(self) -> None:
        for entry in self._news(self._log.parent / DECISIONS):
            self._feed.add_event("decision", dict(entry))
            if entry.get("flag") == "saved":
                details = entry.get("details")
                path = details.get("path") if isinstance(details, dict) else None
                self._feed.add_event("save", {**entry, "path": path})
        with suppress(OSError):  # there is none yet, or it is not readable
            self._samples = self._samples or follow_samples(self._log.parent)
            for sample in filter(None, map(sample_of, self._samples.news())):
                self._feed.add_event("sample", asdict(sample))

    def _update_status(self) -> None:
        record, latest = run_record(self._log.parent), self._feed.latest
        word, ending = status_of(self._log), ending_of(self._log)
        is_over = ending is not None or word is None
        step, total = finite_number(latest.get("global_step", record.get("step"))), _total_steps(record)
        self._feed.update(
            status="ended" if is_over else "running",
            reason=ending,
            run=record.get("name") or self._log.parent.name,
            output_dir=str(self._log.parent),
            rewind=rewind_command(self._log.parent),
            global_step=step if step is None else int(step),
            max_steps=total,
            progress=min(1.0, step / total) if total and step is not None else None,
            started_at=finite_number(record.get("started_at")),
            versions=record.get("versions"),
            tokenizer=tokenizer_of(record),
            **({"eta_seconds": None, "steps_per_second": None} if is_over else self._speed.estimates(step, total)),
        )


class _Speed:
    """Steps per second of the latest records."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []

    def add(self, step: Any, timestamp: float | None) -> None:
        """Add a record's step and Unix time."""
        if isinstance(finite_number(step), int) and timestamp is not None:
            self._points = [*self._points[-19:], (float(step), timestamp)]

    def estimates(self, step: float | None, total: int | None) -> dict[str, float | None]:
        """`steps_per_second` and `eta_seconds` of a run that is running."""
        if len(self._points) < 2 or time.time() - self._points[-1][1] > 3600:
            return {"steps_per_second": None, "eta_seconds": None}
        steps, seconds = (last - first for first, last in zip(self._points[0], self._points[-1], strict=True))
        speed = steps / seconds if steps > 0 and seconds > 0 else None
        left = (total - step) / speed if speed and total and step is not None else None
        return {"steps_per_second": speed, "eta_seconds": left}


def _total_steps(record: dict[str, Any]) -> int | None:
    """The length of a run in steps, by its run.json."""
    train = record.get("config", {}).get("train", {}) if isinstance(record.get("config"), dict) else {}
    total = train.get("train_iters") if isinstance(train, dict) else None
    return total if isinstance(total, int) and finite_number(total) and total > 0 else None
