"""Prints a run's progress on the console: facts at the start, a row per logged step, evaluations, and a summary."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from datetime import datetime
from pprint import pformat
from typing import Any, TextIO

from tqdm.auto import tqdm

from onstep.errors import require
from onstep.events import TrainerCallback
from onstep.metrics.console_table import (
    ColumnSpec,
    LineWriter,
    MetricSpec,
    OutputStream,
    default_final_metrics,
    default_step_columns,
    format_si,
    header_line,
    merge_specs,
    present_columns,
    row_line,
    summary_lines,
)

_LONGEST_ON_ONE_LINE = 80
_UNAVAILABLE = "Unavailable"


class InfoCallback(TrainerCallback):
    """Prints batch sizes, sample counts and parameter counts when training begins.

    Every entry is a line ``[INFO|info_logger] key: value`` on standard output; values longer than 80 characters get
    separate lines. Values that the trainer does not know are "Unavailable".

    Args:
        verbose: Also print arguments, state, tokenizer, optimizer, scheduler, data loaders and model, at level DEBUG.
    """

    ranks = "main"

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        level = logging.DEBUG if verbose else logging.INFO
        self._lines = LineWriter("info_logger", "[%(levelname)s|%(name)s] %(message)s", level=level)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the known values."""
        if not state.is_world_process_zero:
            return
        self._print(logging.INFO, {**_batches(args, state), **_sizes(kwargs.get("model"))})
        if self.verbose:
            self._print(logging.DEBUG, _objects(args, state, kwargs))

    def _print(self, level: int, entries: Mapping[str, Any]) -> None:
        for key, value in entries.items():
            text = str(value)
            is_long = len(text) > _LONGEST_ON_ONE_LINE
            self._lines.write(f"{key}:\n{text}\n" if is_long else f"{key}: {text}", level)


def _batches(args: Any, state: Any) -> dict[str, Any]:
    """Sample counts (over all ranks) and batch sizes (in samples).

    Counts that the trainer does not provide are estimated from full batches.
    """
    per_device = getattr(args, "per_device_train_batch_size", None)
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    batch = _product(per_device, accumulation, getattr(state, "num_processes", None))
    examples, samples = getattr(state, "num_examples", None), getattr(state, "num_train_samples", None)
    if examples is None:
        examples = _product(batch, getattr(state, "epoch_train_steps", None))
    if samples is None:
        samples = _product(batch, state.max_steps)
    found = {
        "total_examples": examples,
        "total_train_samples": samples,
        "per_device_train_batch_size": per_device,
        "actual_per_device_batch_size": getattr(state, "train_batch_size", None),
        "total_train_batch_size": batch,
        "max_steps": state.max_steps,
    }
    return {name: _UNAVAILABLE if value is None else value for name, value in found.items()}


def _product(*factors: int | None) -> int | None:
    """The product, or None if a factor is unknown or means "no limit" (-1)."""
    known = [factor for factor in factors if factor is not None and factor >= 0]
    return math.prod(known) if len(known) == len(factors) else None


def _sizes(model: Any) -> dict[str, str]:
    """Parameter counts of a model or list of model chunks (this rank's part); shared parameters count once."""
    names = ("total", "trainable", "embedding", "non_embedding")
    if model is None:
        return {**{f"{name}_parameters": _UNAVAILABLE for name in names}, "tied_embeddings": _UNAVAILABLE}
    owners: dict[Any, list[bool]] = {}
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            for parameter in module.parameters(recurse=False):
                # embeddings of all libraries have this attribute, but not all derive from torch's class
                owners.setdefault(parameter, []).append(hasattr(module, "num_embeddings"))
    total = sum(parameter.numel() for parameter in owners)
    trainable = sum(parameter.numel() for parameter in owners if parameter.requires_grad)
    embedding = sum(parameter.numel() for parameter, is_embedding in owners.items() if any(is_embedding))
    is_tied = any(any(is_embedding) and len(is_embedding) > 1 for is_embedding in owners.values())
    values = (total, trainable, embedding, total - embedding)
    sizes = {f"{name}_parameters": format_si(value) for name, value in zip(names, values, strict=True)}
    return {**sizes, "tied_embeddings": str(is_tied)}


def _objects(args: Any, state: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    names = ("processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
    return {
        "args": pformat(_fields(args)),
        "state": pformat(_fields(state)),
        **{name: pformat(kwargs.get(name)) for name in names},
        "model": str(kwargs.get("model")),
    }


def _fields(thing: Any) -> Any:
    """The attributes of `thing` as a dictionary; `to_dict` is preferred because it omits secrets."""
    to_dict = getattr(thing, "to_dict", None)
    if callable(to_dict):
        return to_dict()
    return vars(thing) if hasattr(thing, "__dict__") else thing


class PrinterCallback(TrainerCallback):
    """Prints the dictionary of each logged step on standard output, as Hugging Face's does."""

    shows_progress = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the logs, floats with four significant digits, without `total_flos`."""
        if state.is_local_process_zero:
            shown = {key: value for key, value in (logs or {}).items() if key != "total_flos"}
            rounded = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in shown.items()}
            sys.stdout.write(f"{rounded}\n")


_TIMESTAMP_WIDTH = 22


class ProgressCallback(TrainerCallback):
    """Prints a row of metrics for each logged step, a line for each evaluation, and a summary at the end.

    On a terminal and in a notebook, rows appear above a tqdm bar; elsewhere they are plain lines from the logger
    "progress_logger". The options here do not affect what is recorded.

    Args:
        use_tqdm: Whether to show bars; None shows them unless standard output is a file or pipe, or
            `args.disable_tqdm` is set.
        output_stream: "stdout", "stderr" or a text stream for plain rows; None is stdout. Not used with bars.
        step_columns: Changes to `default_step_columns()`: maps a metric to a dictionary of `key`, `label`, `width`,
            `fmt`, `reduce`, to a `ColumnSpec`, or to None, which removes the column. New columns are appended.
        final_metrics: The same for `default_final_metrics()`, with `key`, `label`, `fmt`, `suffix`.
        header_interval: Rows between two header rows. A header is always printed when the set of columns changes; with
            0, only then.
        max_str_len: Longest text of a metric that is printed as it is; of a longer one, the length is printed.

    Raises:
        ConfigError: for an unknown output stream, format, reduction or field.
        TypeError: when a column is not a dictionary, spec or None.
    """

    ranks = "main"
    shows_progress = True

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: OutputStream = None,
        step_columns: Mapping[str, Any] | None = None,
        final_metrics: Mapping[str, Any] | None = None,
        header_interval: int = 20,
        *,
        max_str_len: int = 100,
    ) -> None:
        is_switch = use_tqdm is None or isinstance(use_tqdm, bool)
        require(is_switch, "use_tqdm", "True, False or None", use_tqdm, "; pass a length by name, as max_str_len.")
        require(header_interval >= 0, "header_interval", ">= 0", header_interval, "; pass 0 for no periodic header.")
        self.use_tqdm = use_tqdm
        self.step_columns = merge_specs(default_step_columns(), step_columns, ColumnSpec)
        self.final_metrics = merge_specs(default_final_metrics(), final_metrics, MetricSpec)
        self.header_interval, self.max_str_len = header_interval, max_str_len
        self._plain = LineWriter("progress_logger", "%(asctime)s %(message)s", output_stream)
        self._bars: _Bars | None = None
        self._hidden_bar: Any = None
        self.current_step = 0
        self._row_count = 0
        self._shown: list[ColumnSpec] = []

    @property
    def training_bar(self) -> Any:
        """The tqdm bar of the training, which subclasses may use or replace; without bars, one that shows nothing.

        None outside of a training.
        """
        return self._hidden_bar if self._bars is None else self._bars.training

    @training_bar.setter
    def training_bar(self, bar: Any) -> None:
        self._bars, self._hidden_bar = None if bar is None else _Bars(bar), None

    @property
    def prediction_bar(self) -> Any:
        """The tqdm bar of the current evaluation, which subclasses may use or replace; None if there is none."""
        return None if self._bars is None else self._bars.evaluation

    @prediction_bar.setter
    def prediction_bar(self, bar: Any) -> None:
        self._bars = self._bars or _Bars(self._hidden_bar)
        self._bars.evaluation = bar

    def skips_event(self, name: str) -> bool:
        """Skip the events that only advance bars if there are no bars."""
        never_has_bars = not self.use_tqdm and (self.use_tqdm is False or _environment() == "file")
        return never_has_bars and name in ("on_step_end", "on_prediction_step")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar at the step that training resumes from."""
        self._row_count = 0
        self._shown = []
        self._close_bars()
        self.current_step = state.global_step
        if not state.is_world_process_zero:
            return
        if self._wants_bars(args):
            step, total = state.global_step, _known(state.max_steps)
            bar = tqdm(initial=step, total=total, smoothing=0.03, dynamic_ncols=True, file=_bar_stream())
            self._bars = _Bars(bar)
        else:
            self._hidden_bar = tqdm(disable=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        self.current_step = state.global_step
        if self._bars is not None:
            self._bars.advance_training(state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the bar of the evaluation, opening it at its first batch."""
        if state.is_world_process_zero and self._wants_bars(args):
            self._bars = self._bars or _Bars()
            self._bars.advance_evaluation(eval_dataloader, getattr(state, "max_eval_steps", -1))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Print the row of a logged step, or the summary if `logs` are the final metrics."""
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            self._write(args, "\n".join(["Training complete:", *summary_lines(self.final_metrics, logs)]))
            return
        columns = present_columns(self.step_columns, logs)
        if any(column.key != "epoch" for column in columns):
            is_due = self.header_interval > 0 and self._row_count % self.header_interval == 0
            if is_due or columns != self._shown:
                self._write(args, header_line(columns))
            self._write(args, row_line(state.global_step, columns, logs))
            self._row_count, self._shown = self._row_count + 1, columns
        if self._bars is not None:
            self._bars.set_training_total(state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Print the validation loss."""
        self._write_evaluation(args, state, "eval", metrics)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Print the test loss."""
        self._write_evaluation(args, state, "test", metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar; a final validation opens its own."""
        self._close_bars()

    def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bars so that they do not mix with the error message."""
        self._close_bars()

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar that a failed evaluation left open."""
        self._close_bars()

    def _write_evaluation(self, args: Any, state: Any, split: str, metrics: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        if self._bars is not None:
            self._bars.close_evaluation()
        loss, epoch = metrics.get(f"{split}_loss"), round(state.epoch or 0.0, 2)
        if loss is None:
            self._write(args, "\n".join(f"{key}: {self._shortened(value)}" for key, value in metrics.items()))
        else:
            self._write(args, f"{state.global_step:>10,d}  {epoch:<5.3}  {split}-loss: {round(loss, 5)}")

    def _shortened(self, value: Any) -> Any:
        is_long = isinstance(value, str) and len(value) > self.max_str_len
        return f"[text of {len(value)} characters; max_str_len is {self.max_str_len}]" if is_long else value

    def _write(self, args: Any, text: str) -> None:
        if self._wants_bars(args):
            tqdm.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}".ljust(_TIMESTAMP_WIDTH) + text)
        else:
            self._plain.write(text)

    def _wants_bars(self, args: Any) -> bool:
        if self.use_tqdm is not None:
            return self.use_tqdm
        return not getattr(args, "disable_tqdm", False) and _environment() != "file"

    def _close_bars(self) -> None:
        self._hidden_bar = None
        if self._bars is not None:
            self._bars.close()


class _Bars:
    """The training bar and, below it, the bar of the running evaluation."""

    def __init__(self, training: Any = None) -> None:
        self.training = training
        self.evaluation: Any = None
        self._last_evaluation_steps: int | None = None

    def advance_training(self, step: int) -> None:
        if self.training is not None:
            self.training.update(step - self.training.n)

    def set_training_total(self, max_steps: int | None) -> None:
        if self.training is not None and self.training.total != _known(max_steps):
            self.training.total = _known(max_steps)
            self.training.refresh()

    def advance_evaluation(self, loader: Any, max_eval_steps: int | None) -> None:
        if self.evaluation is not None:
            self.evaluation.update(1)
            return
        total = _evaluation_steps(loader, max_eval_steps) or self._last_evaluation_steps
        leave = self.training is None
        self.evaluation = tqdm(initial=1, total=total, leave=leave, dynamic_ncols=True, file=_bar_stream())

    def close_evaluation(self) -> None:
        if self.evaluation is not None:
            self._last_evaluation_steps = self.evaluation.n
            self.evaluation.close()
            self.evaluation = None

    def close(self) -> None:
        self.close_evaluation()
        if self.training is not None:
            self.training.close()
            self.training = None


def _evaluation_steps(loader: Any, max_eval_steps: int | None) -> int | None:
    """Number of batches of an evaluation: the loader's length, if any, limited by the cap, if any."""
    cap = _known(max_eval_steps)
    try:
        length = len(loader)
    except TypeError:
        return cap
    return length if cap is None else min(length, cap)


def _known(total: int | None) -> int | None:
    return total if total is not None and total > 0 else None


def _environment() -> str:
    """Where standard output goes: "notebook", "tty" or "file"."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and "IPKernelApp" in shell.config:
        return "notebook"
    return "tty" if sys.stdout.isatty() else "file"


def _bar_stream() -> TextIO:
    """The standard stream that is a terminal, preferring stderr."""
    return sys.stdout if sys.stdout.isatty() and not sys.stderr.isatty() else sys.stderr
