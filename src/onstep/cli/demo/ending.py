"""The end of `onstep demo`: samples side by side, the loss, and what to try next."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onstep.analysis.logs.files import FILE_NAME as LOG_NAME
from onstep.analysis.logs.samples_log import newest_by_step, samples_of_run
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.terminal_curve import terminal_curve
from onstep.analysis.text_tables import printable
from onstep.cli.demo.held_out import held_out_loss, name_of_run
from onstep.cli.generation.trained import open_trained
from onstep.errors import OnstepError

_GAP = " \u2502 "
_LINES = 4
"""Lines of a sample that are shown."""
_NARROWEST = 60
"""Columns below which nothing is shown side by side, and no curve."""
_CURVE_LINES = 10
_ROWS = 96
"""Sequences on which the loss per byte is measured: a second's work."""


def show_end(directory: Path) -> None:
    """Print the end of the demo of a run: what it wrote, its loss, and the next commands."""
    width = min(shutil.get_terminal_size().columns, 160)
    by_step = newest_by_step(samples_of_run(directory))
    lines = [*sample_lines(by_step, width), *_curve(directory, width), *_loss_lines(directory), "Try next:"]
    encoding = sys.stdout.encoding or "utf-8"
    for line in [*lines, *(f"  {command}" for command in next_commands(name_of_run(directory)))]:
        print(line.encode(encoding, "replace").decode(encoding))


def sample_lines(by_step: Mapping[int, Mapping[str, str]], width: int) -> list[str]:
    """The texts of the first, a middle and the last step in columns, for each prompt that all of them have.

    Args:
        by_step: the text after each prompt, by step.
        width: columns of the terminal.
    """
    if len(by_step) < 2 or width < _NARROWEST:
        return []
    steps = list(by_step)
    chosen = sorted({steps[0], steps[(len(steps) - 1) // 2], steps[-1]})
    columns = (width - len(_GAP) * (len(chosen) - 1)) // len(chosen)
    lines = ["", "What it writes before, during and after its training:"]
    lines += [_row([f"step {step:,}" for step in chosen], columns)]
    for prompt in by_step[chosen[0]]:
        if all(prompt in by_step[step] for step in chosen):
            texts = [_folded(prompt + by_step[step][prompt], columns) for step in chosen]
            lines += ["\u2500" * width, *_side_by_side(texts, columns)]
    return lines


def _side_by_side(texts: Sequence[list[str]], columns: int) -> list[str]:
    count = min(_LINES, max(map(len, texts)))
    return [_row([text[number] if number < len(text) else "" for text in texts], columns) for number in range(count)]


def _row(cells: Iterable[str], columns: int) -> str:
    return _GAP.join(f"{cell:<{columns}}" for cell in cells).rstrip()


def _folded(text: str, columns: int) -> list[str]:
    """The lines of a text, those that are too long continued in the next."""
    lines = [printable(line) for line in text.expandtabs(4).split("\n")]
    return [line[start : start + columns] for line in lines for start in range(0, max(1, len(line)), columns)]


def _curve(directory: Path, width: int) -> list[str]:
    """The loss in Braille, if somebody looks at a terminal that can show it."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if not sys.stdout.isatty() or encoding != "utf8" or width < _NARROWEST:
        return []
    steps, losses = TrainingLog.from_file(directory / LOG_NAME).get_points("loss")
    points = list(zip(steps.tolist(), losses.tolist(), strict=True))
    lines = terminal_curve(points, width=min(width, 100), height=_CURVE_LINES)
    return ["", "Training loss, in nats per token:", *lines] if lines else []


def _loss_lines(directory: Path) -> list[str]:
    """The loss per byte of held-out text; nothing for a run without weights or test data."""
    try:
        loss = held_out_loss(open_trained(str(directory)), _ROWS)
    except OnstepError as error:
        return ["", f"The loss on held-out text is not known: {error}"]
    if loss is None:
        return []
    per_token, token = loss.nats / loss.num_tokens, loss.num_bytes / loss.num_tokens
    text = f"{loss.nats_per_byte:.2f} nats per byte ({per_token:.2f} per token of {token:.1f} bytes)"
    return ["", f"On held-out text: {text}."]


def next_commands(name: str) -> list[str]:
    """What to do with a run, as a shell reads it."""
    run = shlex.quote(name)
    commands = {
        f'onstep generate {run} "import"': "continue a text of yours",
        f"onstep chat {run}": "the same, line by line",
        f"onstep logs summary {run}": "losses and times; logs plot draws them",
        f"onstep why {run}": "what was decided, and why",
        'onstep train "dataset.paths=[DIR]"': "your own texts",
    }
    longest = max(map(len, commands))
    return [f"{command:<{longest}}  # {what}" for command, what in commands.items()]
