"""Rows, messages and whatever else is printed appear above the bars, whole, each once."""

from __future__ import annotations

import logging
import os
import pty
import sys
import termios
from typing import Any

import pytest

from onstep.callbacks import ProgressCallback
from tests.console.screen import Terminal
from tests.support.pseudo_terminal import read_terminal


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both standard streams become one terminal; not a fixture, since pytest sets the streams again before a test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def begin(callback: ProgressCallback, make_state: Any) -> None:
    callback.on_train_begin(None, make_state(), None)
    callback.on_step_end(None, make_state(step=1), None)


def test_nothing_cuts_the_bar_and_the_bar_cuts_nothing(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    callback, handler = ProgressCallback(), logging.StreamHandler(terminal)
    log = logging.Logger("user")  # with a handler that was made before the bar
    log.addHandler(handler)
    logging.getLogger("user.of.bars").addHandler(handler)
    begin(callback, make_state)
    callback.on_log(None, make_state(step=1), None, logs={"loss": 2.5})
    print("printed ", end="")
    print("by the user")
    log.warning("logged")
    sys.stderr.write("a.py:7: UserWarning: warned\n  code()\n")  # as `warnings` does, unless somebody formats them
    callback.on_prediction_step(None, make_state(step=1), None, eval_dataloader=[0, 0])
    print("during the evaluation", file=sys.stderr)
    callback.on_evaluate(None, make_state(step=1), None, metrics={"eval_loss": 2.25})
    assert terminal.shown()[-1].startswith("train:"), "the bar is below"
    callback.on_train_end(None, make_state(), None)
    logging.getLogger("user.of.bars").removeHandler(handler)
    lines = terminal.shown()
    assert len(lines) == 9, lines
    header, train, printed, logged, warned, code, during, evaluated, rest = lines
    assert header.split() == ["step", "split", "loss"]
    assert train.split() == ["1", "train", "2.50000"]
    assert printed == "printed by the user"
    assert logged == "logged"
    assert warned.endswith("UserWarning: warned")
    assert code.strip() == "code()"
    assert during == "during the evaluation"
    assert evaluated.split() == ["1", "eval", "2.25000"]
    assert rest == ""


def test_streams_and_handlers_are_restored(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    log, handler = logging.getLogger("restored"), logging.StreamHandler(terminal)
    log.addHandler(handler)
    callback = ProgressCallback()
    begin(callback, make_state)
    assert sys.stdout is not terminal
    assert handler.stream is sys.stdout or handler.stream is sys.stderr
    print("unfinished", end="")
    callback.on_exception(None, make_state(), None)
    log.removeHandler(handler)
    assert sys.stdout is terminal
    assert sys.stderr is terminal
    assert handler.stream is terminal
    assert terminal.shown() == ["unfinished"]


def test_input_recognizes_the_terminal(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`input` and `pdb` show their prompt only on a stream with the number of standard output."""
    monkeypatch.setattr(Terminal, "fileno", lambda self: self.number)
    terminals = {name: Terminal() for name in ("stdout", "stderr")}
    for number, (name, terminal) in enumerate(terminals.items(), start=1):
        terminal.number = number  # type: ignore[attr-defined]
        monkeypatch.setattr(sys, name, terminal)
    callback = ProgressCallback()
    begin(callback, make_state)
    assert sys.stdout is not terminals["stdout"]
    assert [sys.stdout.fileno(), sys.stderr.fileno()] == [1, 2]
    assert sys.stdout.isatty()
    callback.on_train_end(None, make_state(), None)


def test_a_stream_that_somebody_else_has_replaced_is_left_alone(
    make_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch)
    callback, mine = ProgressCallback(), Terminal()
    begin(callback, make_state)
    sys.stdout = mine
    callback.on_train_end(None, make_state(), None)
    assert sys.stdout is mine


def test_a_file_beside_the_terminal_is_not_touched(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    on_a_terminal(monkeypatch)
    with (tmp_path / "errors").open("w+") as file:
        monkeypatch.setattr(sys, "stderr", file)
        callback = ProgressCallback()
        begin(callback, make_state)
        assert sys.stderr is file
        callback.on_train_end(None, make_state(), None)


@pytest.mark.parametrize("variable", [None, ("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_for_terminals_that_want_them(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str] | None
) -> None:
    terminal = on_a_terminal(monkeypatch)
    if variable is not None:
        monkeypatch.setenv(*variable)
    callback = ProgressCallback(use_tqdm=False)
    callback.on_evaluate(None, make_state(), None, metrics={"eval_loss": 2.25})
    assert ("\x1b[36m" in terminal.getvalue()) is (variable is None)
    assert terminal.shown()[1].split() == ["0", "eval", "0.0000", "2.25000"]


def test_a_header_is_printed_once_a_screen(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setenv("LINES", "54")
    callback = ProgressCallback(use_tqdm=False)
    callback.on_train_begin(None, make_state(), None)
    for step in range(1, 61):
        callback.on_log(None, make_state(step=step), None, logs={"loss": 1.0})
    headers = [index for index, line in enumerate(terminal.shown()) if line.endswith("loss")]
    assert headers == [0, 51]


def test_the_bar_leaves_room_for_what_the_terminal_echoes(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C appears as ^C at the end of the bar; without room, it would begin another line."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        callback = ProgressCallback()
        begin(callback, make_state)
        callback.on_prediction_step(None, make_state(step=1), None, eval_dataloader=[0, 0])
        drawn = Terminal(read_terminal(ours, "eval")).shown()
        callback.on_train_end(None, make_state(), None)
    os.close(ours)
    assert [line.split(":")[0] for line in drawn] == ["train", "eval"]
    assert 70 < max(map(len, drawn)) <= 80 - len("^C")
