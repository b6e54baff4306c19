"""Writes metrics and a description of the run to TensorBoard."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from onstep.config import TrainingArguments
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.events import Control, RunState, TrainerCallback
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)

Transform = Callable[[float, Metrics], float | None]
"""Maps a metric, given all metrics, to the value to plot; None plots nothing."""


@dataclass(frozen=True)
class TBScalar:
    """A TensorBoard chart and the source of its values."""

    tag: str
    """Name of the chart."""
    source: str = ""
    """Name of the metric in the logs or in an evaluation; "" uses the tag with "-" replaced by "_"."""
    transform: Transform | None = None
    """`transform(value, metrics)`; None plots the value unchanged, or the maximum of a list."""

    def value(self, metrics: Metrics) -> float | None:
        """The value to plot for these metrics; None for none.

        Args:
            metrics: the logged metrics by name.
        """
        value = metrics.get(self.source or self.tag.replace("-", "_"))
        if value is None:
            return None
        if self.transform is not None:
            value = self.transform(value, metrics)
        return _number(value)


def perplexity(loss: float, metrics: Metrics) -> float:
    """The exponential of a mean loss in nats; infinity if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def default_tb_scalars() -> dict[str, TBScalar]:
    """The default charts of `TBLogger`, by tag."""
    scalars = (
        TBScalar("train-loss", "loss"),
        TBScalar("learning-rate"),
        TBScalar("grad-norm"),
        TBScalar("eval-loss"),
        TBScalar("eval-perplexity", "eval_loss", perplexity),
    )
    return {scalar.tag: scalar for scalar in scalars}


class TBLogger(TrainerCallback):
    """Writes scalars at every `on_log` and `on_evaluate`, and texts about the run at its start and end.

    A chart gets one point per step: a second evaluation at a step adds only metrics that the first did not have. The
    texts are "experiment" (if there is `experiment_info`) and "training_info" when training begins, and "train_results"
    (the last entry of the log history) when it ends. A resumed run writes the first two only if they have changed, at
    its first new step, so they are hidden with that step if the run is resumed again. A step skipped by the anomaly
    gate becomes a text "anomaly" instead of a point, since its loss does not belong to an update.

    The writer is flushed at every event and never closed: its creator owns it. With a `ResumableSummaryWriter`, which
    must be registered as a callback too, a resumed run shows each step once.

    Args:
        summary_writer: A `torch.utils.tensorboard.SummaryWriter`, or an object with its `add_scalar`, `add_text` and
            `flush`.
        scalars: Changes to `default_tb_scalars()`, by tag: a dictionary with `source` and `transform` (both optional),
            a `TBScalar`, or None to remove a default. If a `transform` raises, a warning is logged and the point is
            omitted.
        experiment_info: Description of the experiment: a dictionary, or a Markdown text; None shows none.

    Raises:
        ConfigError: for an unknown field of a scalar.
        TypeError: for an invalid scalar, or a writer without `add_scalar`.
    """

    reads_weights = False
    ranks = "main"

    def __init__(
        self,
        summary_writer: Any,
        scalars: Mapping[str, Mapping[str, object] | TBScalar | None] | None = None,
        experiment_info: Mapping[str, object] | str | None = None,
    ) -> None:
        if not callable(getattr(summary_writer, "add_scalar", None)):
            raise TypeError(
                f"summary_writer must be a SummaryWriter or ResumableSummaryWriter, got {summary_writer!r}; to write "
                f"to a directory, pass ResumableSummaryWriter(directory)."
            )
        self.summary_writer = summary_writer
        self.scalars = _merged(default_tb_scalars(), scalars or {})
        self.experiment_info = experiment_info
        self._written: dict[str, int] = {}
        """Step of the newest point or text of each tag."""
        self._resumed_at: dict[int, Set[str] | None] = {}
        """The step that training has resumed from, with the tags that were shown there once somebody asks."""
        self._described: dict[str, str] = {}
        """Digest of each text about the run, for resumed runs."""
        self._failed: set[str] = set()
        """Tags whose `transform` has raised; each is reported once."""

    @staticmethod
    def mapping_as_markdown(mapping: Mapping[str, object]) -> str:
        """Format a mapping as Markdown: a fenced block with one line ``key: value`` per entry.

        Args:
            mapping: the values to show, which may be nested.
        """
        text = "\n".join(f"{key}: {value}" for key, value in mapping.items())
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}\n{text}\n{fence}"

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Describe the run."""
        if not state.is_world_process_zero:
            return
        if state.global_step == 0:
            self._written.clear()
            self._described.clear()
        self._resumed_at = {state.global_step: None} if state.global_step > 0 else {}
        texts = {"training_info": self.mapping_as_markdown(_info(args, state, kwargs))}
        if self.experiment_info:
            info = self.experiment_info
            texts["experiment"] = info if isinstance(info, str) else self.mapping_as_markdown(info)
        place = str(getattr(args, "logging_dir", None) or "")
        for tag, text in sorted(texts.items()):
            lasting = text.replace(place, "") if place else text  # a run that is moved is described only once
            digest = hashlib.blake2b(lasting.encode(), digest_size=8).hexdigest()
            if self._described.get(tag) != digest:
                self._described[tag] = digest
                self._text(tag, text, state.global_step + 1 if state.global_step > 0 else 0)
        self.summary_writer.flush()

    def on_log(self, args: object, state: RunState, control: object, logs: Metrics, **kwargs: object) -> None:
        """Write a logged step, the final metrics or a Trainer's evaluation."""
        if not state.is_world_process_zero:
            return
        if "anomaly" in logs:
            self._text("anomaly", self.mapping_as_markdown(logs), state.global_step)
        else:
            self._points(logs, state.global_step)
        self.summary_writer.flush()

    def on_evaluate(
        self, args: object, state: RunState, control: object, metrics: Metrics, trainer: object = None, **kwargs: object
    ) -> None:
        """Write an evaluation; a `Trainer` has passed it to `on_log`."""
        if state.is_world_process_zero and trainer is None:
            self._points(metrics, state.global_step)
            self.summary_writer.flush()

    def on_predict(
        self, args: TrainingArguments, state: RunState, control: Control, metrics: Metrics, **kwargs: object
    ) -> None:
        """Write a test, for metrics that have a scalar."""
        self.on_evaluate(args, state, control, metrics)

    def on_train_end(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Write the results, if anything was logged."""
        if state.is_world_process_zero and state.log_history:
            self._text("train_results", self.mapping_as_markdown(state.log_history[-1]), state.global_step)
            self.summary_writer.flush()

    def on_checkpoint_load(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Allow the steps undone by a rollback to be written again."""
        self._written = {tag: step for tag, step in self._written.items() if step <= state.global_step}

    def state_dict(self) -> StateDict:
        """What is shown up to the checkpoint, so that a resumed run, or one that is rolled back, does not repeat it."""
        return {"described": dict(self._described), "written": dict(self._written)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what the checkpoint's run shows; steps that follow it are written again.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._described = dict(state_dict["described"])
        self._written = dict(state_dict.get("written", {}))

    def _points(self, metrics: Metrics, step: int) -> None:
        for tag, scalar in self.scalars.items():
            value = self._value(scalar, metrics)
            if value is not None and self._is_new(tag, step):
                self.summary_writer.add_scalar(tag, value, global_step=step)

    def _value(self, scalar: TBScalar, metrics: Metrics) -> float | None:
        """The value to plot; None if its transform fails, since a chart must not end a run."""
        try:
            return scalar.value(metrics)
        except Exception as error:  # noqa: BLE001 - a user's transform may raise anything
            if scalar.tag not in self._failed:
                self._failed.add(scalar.tag)
                logger.warning("TBLogger skips scalar %r: its transform raised %r", scalar.tag, error)
            return None

    def _text(self, tag: str, text: str, step: int) -> None:
        if self._is_new(tag, step):
            self.summary_writer.add_text(tag, text, global_step=step)

    def _is_new(self, tag: str, step: int) -> bool:
        """Whether the tag has no point at this step yet; marks it as written."""
        is_new = self._written.get(tag) != step and tag not in self._shown_before(step)
        self._written[tag] = step
        return is_new

    def _shown_before(self, step: int) -> Set[str]:
        """The tags that a process which was killed after its checkpoint has shown at the checkpoint's step."""
        if step not in self._resumed_at:
            return frozenset()
        shown = self._resumed_at[step]
        if shown is None:
            tags_at = getattr(self.summary_writer, "tags_at", None)  # torch's own writer has none
            shown = self._resumed_at[step] = frozenset() if tags_at is None else tags_at(step)
        return shown


def _merged(defaults: dict[str, TBScalar], changes: Mapping[str, object]) -> dict[str, TBScalar]:
    """The defaults updated with the changes; new scalars come last."""
    merged = dict(defaults)
    known = [field.name for field in fields(TBScalar)]
    for tag, change in changes.items():
        if change is None:
            merged.pop(tag, None)
        elif isinstance(change, TBScalar):
            merged[tag] = change
        elif isinstance(change, Mapping):
            for name in change:
                if name not in known:
                    raise ConfigError(f"scalar {tag!r} has no field {name!r}.{nearest(name, known)} It has: {known}.")
            merged[tag] = replace(merged.get(tag, TBScalar(tag)), **change)
        else:
            raise TypeError(f"scalar {tag!r} must be a dictionary, a TBScalar or None (to remove it), got {change!r}.")
    return {scalar.tag: scalar for scalar in merged.values()}


def _number(value: Any) -> float | None:
    """Convert to a float, infinite on overflow; for a list, the maximum; None for anything that is not a number."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0:
        numbers = [number for number in map(_number, value) if number is not None]
        return max(numbers, default=None)
    if not (isinstance(value, Real) or hasattr(value, "item")):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):  # a complex number, a numpy string
        return None


def _info(args: TrainingArguments, state: RunState, fields: Mapping[str, object]) -> dict[str, object]:
    """Facts about the model, data and arguments of the run; `to_dict` of the arguments omits secrets."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    ranks: int = getattr(state, "num_processes", 1)
    batch: list[int] = [getattr(args, name) for name in names if getattr(args, name, None) is not None]
    optimizer = fields.get("optimizer")
    info = {
        "max_steps": state.max_steps,
        "num_train_epochs": state.num_train_epochs,
        "total_train_batch_size": math.prod([*batch, ranks]) if len(batch) == len(names) else None,
        "num_processes": ranks,
        **_sizes(fields.get("model")),
        "optimizer": None if optimizer is None else type(getattr(optimizer, "optimizer", optimizer)).__name__,
    }
    to_dict = getattr(args, "to_dict", None)
    arguments: Mapping[str, object] = to_dict() if callable(to_dict) else {}
    info |= {f"args.{key}": value for key, value in arguments.items()}
    return {key: value for key, value in info.items() if value is not None}


def _sizes(model: Any) -> dict[str, object]:
    """Parameter counts of a model or list of model chunks (this rank's part); shared parameters count once."""
    if model is None:
        return {}
    chunks = model if isinstance(model, (list, tuple)) else [model]
    parameters = {id(one): one for chunk in chunks for one in chunk.parameters()}.values()
    return {
        "model": ", ".join(type(chunk).__name__ for chunk in chunks),
        "total_parameters": sum(one.numel() for one in parameters),
        "trainable_parameters": sum(one.numel() for one in parameters if one.requires_grad),
    }
