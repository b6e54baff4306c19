"""Messages of `logging` and `warnings` in the process of a command: one line each, by level."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

SCRIPT = """
import logging, warnings
from onstep.console.messages import show_messages
show_messages({level!r}, is_main={is_main})
log = logging.getLogger("onstep.part")
log.debug("debugging")
log.info("informing")
log.warning("warned of %s", "this")
log.error("failed")
logging.getLogger("foreign").info("of another package")
warnings.warn("python's own", UserWarning)
"""


def lines(level: str, is_main: bool = True) -> list[str]:
    script = SCRIPT.format(level=level, is_main=is_main)
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


WARNINGS = ["warning: warned of this", "error: failed"]
PYTHONS = ["warning: python's own"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("quiet", [*WARNINGS, *PYTHONS]),
        ("default", ["informing", *WARNINGS, "of another package", *PYTHONS]),
        ("verbose", ["debugging", "informing", *WARNINGS, "of another package", *PYTHONS]),
    ],
)
def test_a_level_shows_its_messages_without_lines_of_code(level: str, expected: list[str]) -> None:
    assert lines(level) == expected


def test_other_ranks_show_onsteps_warnings_once_each() -> None:
    assert lines("default", is_main=False) == WARNINGS


def test_a_warning_ends_its_line_wherever_it_is_written() -> None:
    """As after `logging.captureWarnings(False)`, by which a user's code or a test takes warnings back."""
    script = SCRIPT.format(level="quiet", is_main=True) + "logging.captureWarnings(False)\n"
    script += "for text in ('one', 'two'):\n    warnings.warn(text, UserWarning)\n"
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert done.stderr.splitlines()[-2:] == ["one", "two"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_message_is_broken_between_words_on_a_terminal_only(is_terminal: bool) -> None:
    text = "checkpoint.save_interval=5 is beyond the end-of-run; set it lower"
    script = f"""
import logging, sys
from onstep.console.messages import show_messages
sys.stderr.isatty = lambda: {is_terminal}
show_messages("default", is_main=True)
logging.getLogger("onstep").warning({text!r})
"""
    environment = {**os.environ, "COLUMNS": "45", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True, env=environment)
    broken = ["warning: checkpoint.save_interval=5 is beyond", "  the end-of-run; set it lower"]
    assert done.stderr.splitlines() == (broken if is_terminal else [f"warning: {text}"])
