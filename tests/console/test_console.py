"""Lines go to one stream once, however many writers there are, and can be followed through the logger."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from tqdm import tqdm

from onstep.console.line_writer import LineWriter


def test_two_writers_of_one_name_do_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = LineWriter("twice"), LineWriter("twice")
    first.write("a")
    second.write("b")
    assert capsys.readouterr().out == "a\nb\n"


def test_streams_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    buffer = io.StringIO()
    LineWriter("apart", buffer).write("buffer")
    LineWriter("apart", "stderr").write("err")
    LineWriter("apart", "stdout").write("out")
    LineWriter("apart").write("default")
    captured = capsys.readouterr()
    assert (buffer.getvalue(), captured.err, captured.out) == ("buffer\n", "err\n", "out\ndefault\n")


def test_unknown_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="'stdout', 'stderr', a text stream or None, got 'stdlog'"):
        LineWriter("x", "stdlog")


def test_others_can_follow_and_silence_the_logger() -> None:
    followed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: followed.append(record.getMessage())  # type: ignore[method-assign]
    named = logging.getLogger("followed")
    named.addHandler(handler)
    buffer = io.StringIO()
    writer = LineWriter("followed", buffer)
    writer.write("100% seen", prefix="12:00:00 ")
    named.setLevel(logging.WARNING)
    writer.write("silenced")
    assert followed == ["100% seen"]
    assert buffer.getvalue() == "12:00:00 100% seen\n"


def test_lines_stand_above_an_open_bar(capsys: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter("bars")
    with tqdm(total=10, desc="bar", file=sys.stderr):
        capsys.readouterr()
        writer.write("line")
        captured = capsys.readouterr()
    assert captured.out == "line\n"
    assert captured.err.startswith("\r ")  # cleared
    assert captured.err.strip().startswith("bar:")  # and drawn again
