"""Prints a run's progress on the console: a row per logged step and evaluation, bars, and a summary."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import NoReturn

from tqdm import tqdm

from onstep.config import TrainingArguments
from onstep.console.bars import Bars
from onstep.console.formats import format_by_type
from onstep.console.line_writer import LineWriter, OutputStream
from onstep.console.style import Style, height, place_of_output, shows_bars, width
from onstep.console.table import (
    ColumnSpec,
    MetricSpec,
    default_final_metrics,
    default_step_columns,
    fitting_columns,
    header_line,
    in_two_columns,
    merge_specs,
    row_formatter,
    summary_lines,
    summary_title,
)
from onstep.errors import require
from onstep.events import RunState, TrainerCallback
from onstep.record.kinds import Metrics

_HEADER_INTERVAL = 20
_LINES_BESIDE_THE_ROWS = 4
"""Lines of a terminal that header, bars and prompt occupy."""
_FILE_WIDTH = 91
"""Characters of a line in a file or pipe, without its time."""
_TIME = "%H:%M:%S "
_WIDTH_OF_TIME = len("12:00:00 ")
_AT_FIRST = ("epoch", "loss", "grad_norm", "learning_rate", "total_tokens")
"""Metrics of a logged step that are expected before the first one."""
_NOT_SHOWN = ("epoch", "step", "runtime", "samples_per_second", "steps_per_second", "perplexity", "loss")
"""Metrics of an evaluation that its row does not list: they have a column, or follow from others."""


class ProgressCallback(TrainerCallback):
    """Prints a table with a row for each logged step and each evaluation, and a summary at the end.

    On a terminal and in a notebook, rows appear above a tqdm bar; elsewhere they are plain lines with the time, from
    the logger "progress_logger", and of a run with many logged steps only some are shown. Nothing here affects what is
    recorded.

    Args:
        use_tqdm: Whether to show bars; None shows them unless standard output is a file or pipe, or
            `args.disable_tqdm` is set.
        output_stream: "stdout", "stderr" or a text stream for the rows; None is stdout. Not used with bars.
        step_columns: Changes to `default_step_columns()`: maps a metric to a dictionary of `key`, `label`, `width`,
            `fmt`, `reduce`, to a `ColumnSpec`, or to None, which removes the column. New columns are appended. Default
            columns that do not fit into a line are dropped.
        final_metrics: The same for `default_final_metrics()`, with `key`, `label`, `fmt`, `suffix`.
        header_interval: Rows between two header rows; the default is a screen, more on a taller terminal and in a file.
            A header is also printed when a column is added; with 0, only then.
        max_str_len: Longest text of a metric that is printed as it is; of a longer one, the length is printed.
        level: "quiet" prints the summary's first line only, "verbose" all rows also in a file.
        expected: Metrics that records have from the second on; they have their columns from the first row on.

    Raises:
        ConfigError: for an unknown output stream, format, reduction or field.
        TypeError: when a column is not a dictionary, spec or None.
    """

    reads_weights = False
    ranks = "main"
    shows_progress = True

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: OutputStream = None,
        step_columns: Mapping[str, object] | None = None,
        final_metrics: Mapping[str, object] | None = None,
        header_interval: int = _HEADER_INTERVAL,
        *,
        max_str_len: int = 100,
        level: str = "default",
        expected: Collection[str] = (),
    ) -> None:
        is_switch = use_tqdm is None or isinstance(use_tqdm, bool)
        require(is_switch, "use_tqdm", "True, False or None", use_tqdm, "; pass a length by name, as max_str_len.")
        require(header_interval >= 0, "header_interval", ">= 0", header_interval, "; pass 0 for no periodic header.")
        levels = ("quiet", "default", "verbose")
        require(level in levels, "level", "quiet, default or verbose", level, "")
        self.use_tqdm = False if level == "quiet" else use_tqdm
        self.step_columns = merge_specs(default_step_columns(), step_columns, ColumnSpec)
        self.final_metrics = merge_specs(default_final_metrics(), final_metrics, MetricSpec)
        self.header_interval, self.max_str_len, self.level = header_interval, max_str_len, level
        self._writer = LineWriter("progress_logger", output_stream)
        self._bars: Bars | None = None
        self._hidden_bar: tqdm[NoReturn] | None = None
        self.current_step = 0
        self._expected = frozenset((*_AT_FIRST, *expected))
        self._pace = RowPace()
        self._begin()

    def _begin(self) -> None:
        self._row_count = 0
        self._metrics: set[str] = set(self._expected)
        self._has_records = False
        self._fitted: tuple[list[ColumnSpec], int] | None = None
        self._shown: list[ColumnSpec] = []
        self._format_row = row_formatter([])
        self._evaluated: tuple[int, str, object] | None = None
        self._summary: Metrics | None = None

    @property
    def training_bar(self) -> tqdm[NoReturn] | None:
        """The tqdm bar of the training, which subclasses may use or replace; without bars, one that shows nothing.

        None outside of a training.
        """
        return self._hidden_bar if self._bars is None else self._bars.training

    @training_bar.setter
    def training_bar(self, bar: tqdm[NoReturn] | None) -> None:
        self._bars, self._hidden_bar = None if bar is None else Bars(bar), None

    @property
    def prediction_bar(self) -> tqdm[NoReturn] | None:
        """The tqdm bar of the current evaluation, which subclasses may use or replace; None if there is none."""
        return None if self._bars is None else self._bars.evaluation

    @prediction_bar.setter
    def prediction_bar(self, bar: tqdm[NoReturn] | None) -> None:
        self._bars = self._bars or Bars(self._hidden_bar)
        self._bars.evaluation = bar

    def skips_event(self, name: str) -> bool:
        """Skip the events that only advance bars if there are no bars.

        Args:
            name: the name of the event.
        """
        never_has_bars = not self.use_tqdm and (self.use_tqdm is False or place_of_output() == "file")
        return never_has_bars and name in ("on_step_end", "on_prediction_step")

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Open the bar at the step that training resumes from."""
        self._close_bars()
        self._begin()
        self.current_step = state.global_step
        if not state.is_world_process_zero:
            return
        shows_all = self.level == "verbose" or self._wants_bars(args) or place_of_output() != "file"
        self._pace.begin(None if shows_all else getattr(state, "logging_steps", 0), state.max_steps)
        if self._wants_bars(args):
            self._bars = Bars.of_training(state.global_step, state.max_steps)
        else:
            self._hidden_bar = tqdm(disable=True)

    def on_step_end(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Advance the bar."""
        self.current_step = state.global_step
        if self._bars is not None:
            self._bars.advance_training(state.global_step)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: RunState,
        control: object,
        eval_dataloader: object = None,
        **kwargs: object,
    ) -> None:
        """Advance the bar of the evaluation, opening it at its first batch."""
        if state.is_world_process_zero and self._wants_bars(args):
            self._bars = self._bars or Bars()
            self._bars.advance_evaluation(eval_dataloader, getattr(state, "max_eval_steps", -1))

    def on_log(
        self, args: TrainingArguments, state: RunState, control: object, logs: Metrics, **kwargs: object
    ) -> None:
        """Print the row of a logged step; the final metrics wait for the end of the run."""
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            self._summary = logs
            return
        shown = {column.key for column in self.step_columns.values()} - {"epoch"}
        if not shown.isdisjoint(logs):
            if not self._has_records:
                self._metrics &= {"tok_per_sec", *logs} if "tokens" in logs else set(logs)
                self._has_records = True
            self._metrics |= set(logs)
            step = state.global_step
            if self.level != "quiet" and self._pace.shows(step):
                self._row(step, "train", logs)
        if self._bars is not None:
            self._bars.set_training_total(state.max_steps)

    def on_evaluate(
        self, args: TrainingArguments, state: RunState, control: object, metrics: Metrics, **kwargs: object
    ) -> None:
        """Print the row of a validation."""
        self._evaluation(state, "eval", metrics)

    def on_predict(
        self, args: TrainingArguments, state: RunState, control: object, metrics: Metrics, **kwargs: object
    ) -> None:
        """Print the row of a test."""
        self._evaluation(state, "test", metrics)

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the bar; a final validation opens its own."""
        self._close_bars()

    def on_exception(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the bars so that they do not mix with the error message."""
        self._close_bars()

    def on_run_end(
        self, args: TrainingArguments, state: RunState, control: object, reason: str = "completed", **kwargs: object
    ) -> None:
        """Print the summary, and close the bar that a failed evaluation left open."""
        self._close_bars()
        logs, self._summary = self._summary, None
        if logs is None:
            losses = getattr(getattr(state, "history", None), "losses_at_exit", None)
            if losses and state.is_world_process_zero:
                title = summary_title({"step": state.global_step, **losses}, is_complete=False)
                self._write(title.rstrip(":"), self._is_live())
            return
        title = summary_title(logs, is_complete=reason != "stopped")
        is_quiet = self.level == "quiet"
        lines = [] if is_quiet else in_two_columns(summary_lines(self.final_metrics, logs), width())
        self._write("\n".join([title.rstrip(":") if is_quiet else title, *lines]), self._is_live())

    def _evaluation(self, state: RunState, split: str, metrics: Metrics) -> None:
        if not state.is_world_process_zero:
            return
        if self._bars is not None:
            self._bars.close_evaluation()
        shown = (state.global_step, split, metrics.get(f"{split}_loss"))
        if self.level == "quiet" or shown == self._evaluated:  # the final validation repeats that of the last step
            return
        self._evaluated = shown if shown[-1] is not None else None
        own = {key.removeprefix(f"{split}_"): value for key, value in metrics.items()}
        values: Metrics = {"epoch": state.epoch or 0.0}
        if own.get("loss") is not None:
            values["loss"] = own["loss"]
        further = [
            f"{key} {self._shortened(value)}"
            for key, value in own.items()
            if key not in _NOT_SHOWN or (key == "loss" and "loss" not in self.step_columns)
        ]
        self._row(state.global_step, split, values, "  ".join(further))

    def _shortened(self, value: object) -> str:
        if isinstance(value, str) and len(value) > self.max_str_len:
            return f"[text of {len(value)} characters; max_str_len is {self.max_str_len}]"
        return format_by_type(value) if isinstance(value, float) else str(value)

    def _row(self, step: int, split: str, values: Metrics, further: str = "") -> None:
        """Print a row of the table, below a header if one is due."""
        is_live = self._is_live()
        room = width() if is_live else _FILE_WIDTH
        is_due = self.header_interval > 0 and self._row_count % self._rows_per_header(is_live) == 0
        if self._has_new_columns(room) or is_due:
            self._row_count = 0
            self._write(header_line(self._shown), is_live, "heading")
        line = self._format_row(step, split, values)
        if further:
            fits = len(line) + len(further) + 2 <= room
            indent = 10 if is_live else 10 + _WIDTH_OF_TIME
            line += f"  {further}" if fits else f"\n{' ' * indent}{further}"
        self._write(line, is_live, None if split == "train" else "evaluation")
        self._row_count += 1

    def _has_new_columns(self, room: int) -> bool:
        """Whether the columns differ from those of the row before, because of other metrics or another width."""
        present = [column for column in self.step_columns.values() if column.key in self._metrics]
        if self._fitted == (present, room):
            return False
        self._fitted = present, room
        before, self._shown = self._shown, fitting_columns(present, room)
        self._format_row = row_formatter(self._shown)
        return self._shown != before

    def _rows_per_header(self, is_live: bool) -> int:
        if self.header_interval != _HEADER_INTERVAL:
            return self.header_interval
        return max(_HEADER_INTERVAL, height() - _LINES_BESIDE_THE_ROWS) if is_live else RowPace.MOST_ROWS

    def _write(self, text: str, is_live: bool, style: Style | None = None) -> None:
        self._writer.write(text, prefix="" if is_live else time.strftime(_TIME), style=style)

    def _is_live(self) -> bool:
        """Whether somebody is watching, who needs no times: where bars are asked for, too."""
        return bool(self.use_tqdm) or place_of_output() != "file"

    def _wants_bars(self, args: TrainingArguments) -> bool:
        if self.use_tqdm is not None:
            return self.use_tqdm
        return not getattr(args, "disable_tqdm", False) and shows_bars()

    def _close_bars(self) -> None:
        self._hidden_bar = None
        if self._bars is not None:
            self._bars.close()


class RowPace:
    """Chooses the logged steps that a file shows: about 20, the last one, and at least one in a minute."""

    MOST_ROWS, ABOUT, SECONDS = 40, 20, 60.0

    def __init__(self) -> None:
        self.clock = time.monotonic
        """Returns seconds; replace it to measure with another clock."""
        self._every, self._count, self._last_step, self._last_time = 1, 0, 0, 0.0

    def begin(self, log_interval: int | None, max_steps: int) -> None:
        """Begin a run; without an interval, or with a few rows only, every row is shown."""
        rows = max_steps // log_interval if log_interval and max_steps > 0 else 0
        self._every = math.ceil(rows / self.ABOUT) if rows > self.MOST_ROWS else 1
        self._count, self._last_step, self._last_time = 0, max_steps, self.clock()

    def shows(self, step: int) -> bool:
        """Whether the row of this logged step is shown; to be called once for each."""
        self._count += 1
        now = self.clock()
        is_due = self._count % self._every == 0 or self._count == 1 or step == self._last_step
        if is_due or now - self._last_time >= self.SECONDS:
            self._last_time = now
            return True
        return False
