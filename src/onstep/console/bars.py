"""The progress bars of a run; while one is open on a terminal, all other output is written above it."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

from onstep.console.style import has_widgets, place_of_output

_ROOM_FOR_AN_ECHO = len("^C")


class Bars:
    """The training bar and, below it, the bar of the running evaluation.

    Args:
        training: the training bar, if there is one; `open_training` opens another.
    """

    def __init__(self, training: tqdm[NoReturn] | None = None) -> None:
        self.training = training
        self.evaluation: tqdm[NoReturn] | None = None
        self._last_evaluation_steps: int | None = None
        self._above: _Above | None = None

    @classmethod
    def of_training(cls, step: int, max_steps: int | None) -> Bars:
        """Bars whose training bar begins at `step`."""
        bars = cls()
        bars._above = _Above()
        bars.training = bars._new("train", initial=step, total=known(max_steps), smoothing=0.03, leave=False)
        return bars

    def advance_training(self, step: int) -> None:
        """Move the training bar to `step`."""
        if self.training is not None:
            self.training.update(step - self.training.n)

    def set_training_total(self, max_steps: int | None) -> None:
        """Adopt a changed number of steps."""
        if self.training is not None and self.training.total != known(max_steps):
            self.training.total = known(max_steps)
            self.training.refresh()

    def advance_evaluation(self, loader: object, max_eval_steps: int | None) -> None:
        """Count a batch, opening the bar at the first."""
        if self.evaluation is not None:
            self.evaluation.update(1)
            return
        self._above = self._above or _Above()
        total = _evaluation_steps(loader, max_eval_steps) or self._last_evaluation_steps
        self.evaluation = self._new("eval", initial=1, total=total, leave=False)

    def close_evaluation(self) -> None:
        """Close the bar of an evaluation, if there is one."""
        if self.evaluation is not None:
            self._last_evaluation_steps = int(self.evaluation.n)
            self.evaluation.close()
            self.evaluation = None
        if self.training is None:
            self._release()

    def close(self) -> None:
        """Close all bars, and restore the standard streams."""
        self.close_evaluation()
        if self.training is not None:
            self.training.close()
            self.training = None
        self._release()

    def _release(self) -> None:
        if self._above is not None:
            self._above.close()
            self._above = None

    def _new(self, what: str, **options: object) -> tqdm[NoReturn]:
        file = _bar_stream() if self._above is None else self._above.bar_stream
        return _kind()(desc=what, unit="step", dynamic_ncols=True, file=file, **options)


class _TextBar(tqdm):  # type: ignore[type-arg]  # only its stub is generic
    """A bar with room behind it for the ^C that a terminal echoes, which would otherwise begin another line."""

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the bar shows, and its width."""
        values = dict(super().format_dict)
        columns = values.get("ncols")
        return {**values, "ncols": max(1, columns - _ROOM_FOR_AN_ECHO) if columns else columns}


def _kind() -> Callable[..., tqdm[NoReturn]]:
    """The class of a bar: a widget in a notebook that has them. Without, tqdm would warn as soon as it is imported."""
    if place_of_output() != "notebook" or not has_widgets():
        return _TextBar
    from tqdm import notebook

    is_too_old = getattr(notebook, "IProgress", None) is None
    return _TextBar if is_too_old else notebook.tqdm


class _Above:
    """Writes what others print above the bar, while it is open: on both standard streams, and in handlers of `logging`.

    Only streams that are terminals are replaced. `bar_stream` is the one to draw the bar on.
    """

    def __init__(self) -> None:
        self.bar_stream = _bar_stream()
        self._before = (sys.stdout, sys.stderr)
        self._replaced: list[tuple[str, TextIO, _AboveBars]] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        if not self.bar_stream.isatty():
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty() and not isinstance(stream, _AboveBars):
                above = _AboveBars(self.bar_stream, stream)
                self._replaced.append((name, stream, above))
                setattr(sys, name, above)
        for handler in _stream_handlers():
            stream = handler.stream
            for _, original, above in self._replaced:
                if stream is original:
                    self._handlers.append((handler, original))
                    handler.setStream(above)

    def close(self) -> None:
        """Restore the streams, unless somebody else has replaced them since."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        for name, stream, above in self._replaced:
            above.close_line()
            if getattr(sys, name) is above:
                setattr(sys, name, stream)
        self._handlers, self._replaced = [], []


class _AboveBars(io.TextIOBase):
    """A terminal whose lines appear above the bars that are drawn on it."""

    def __init__(self, stream: TextIO, replaced: TextIO) -> None:
        self._wrapped = stream  # tqdm compares streams by this name
        self._replaced = replaced
        self._pid = os.getpid()
        self._line = ""

    def write(self, text: str) -> int:
        """Write whole lines above the bars; the rest waits for its end."""
        if os.getpid() != self._pid:  # a forked worker: its copy of tqdm's lock may be held by a thread that is gone
            return self._wrapped.write(text)
        whole, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if end:
            tqdm.write(whole, file=self._wrapped)
        return len(text)

    def close_line(self) -> None:
        """Write the unfinished line."""
        if self._line:
            self._wrapped.write(self._line)
            self._line = ""

    def flush(self) -> None:
        """Flush the terminal; an unfinished line still waits."""
        self._wrapped.flush()

    def isatty(self) -> bool:
        """True."""
        return self._wrapped.isatty()

    def fileno(self) -> int:
        """That of the stream that it replaces, by which `input`, and so `pdb`, recognizes a terminal."""
        return self._replaced.fileno()

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The terminal's."""
        return self._wrapped.encoding

    @property
    def buffer(self) -> Any:
        """The terminal's, for bytes; these are not kept above the bar."""
        return self._wrapped.buffer


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    names = list(logging.root.manager.loggerDict)
    for one in (logging.root, *(logging.getLogger(name) for name in names)):
        for handler in one.handlers:
            if isinstance(handler, logging.StreamHandler):
                yield handler


def known(total: int | None) -> int | None:
    """The number of steps; None if there is no limit."""
    return total if total is not None and total > 0 else None


def _evaluation_steps(loader: object, max_eval_steps: int | None) -> int | None:
    """Number of batches of an evaluation: the loader's length, if any, limited by the cap, if any."""
    cap = known(max_eval_steps)
    try:
        length = len(loader)  # type: ignore[arg-type]  # what has no length raises
    except TypeError:
        return cap
    return length if cap is None else min(length, cap)


def _bar_stream() -> TextIO:
    """The standard stream that is a terminal, preferring stderr."""
    return sys.stdout if sys.stdout.isatty() and not sys.stderr.isatty() else sys.stderr
