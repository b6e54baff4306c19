"""Writes metrics and a description of the run for TensorBoard."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from onstep.config.part import nearest
from onstep.errors import ConfigError
from onstep.events import TrainerCallback

logger: logging.Logger = logging.getLogger(__name__)

Transform = Callable[[Any, Mapping[str, Any]], float | None]
"""Turns a metric, with all others beside it, into what is shown; None shows nothing."""


@dataclass(frozen=True)
class TBScalar:
    """A chart of TensorBoard and where its values come from."""

    tag: str
    """Name of the chart."""
    source: str = ""
    """The metric in the logs or in an evaluation; "" is the tag with "_" for each "-"."""
    transform: Transform | None = None
    """`transform(value, metrics)`; None shows the value as it is, and the largest one of a list."""

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        """What the chart gets from these metrics; None for nothing."""
        value = metrics.get(self.source or self.tag.replace("-", "_"))
        if value is None:
            return None
        if self.transform is not None:
            value = self.transform(value, metrics)
        return _number(value)


def perplexity(loss: float, metrics: Mapping[str, Any]) -> float:
    """e to the power of a mean loss in nats; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def default_tb_scalars() -> dict[str, TBScalar]:
    """The charts that `TBLogger` fills unless told otherwise, by tag."""
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

    A chart gets one point a step: a second evaluation at a step adds only what the first did not have. The texts are
    "experiment" (where there is `experiment_info`) and "training_info" when training begins, and "train_results" (the
    last entry of the log history) when it ends. A continued run writes of the first two only what has changed, at its
    first new step, so that it is hidden with that step when the run is continued once more. A step that the anomaly
    gate left out becomes a text "anomaly" and no point, since its loss is not that of any update.

    The writer is flushed at every telling and never closed: it belongs to who made it. With a `ResumableSummaryWriter`,
    which is a callback too, a continued run shows each step once.

    Args:
        summary_writer: A `torch.utils.tensorboard.SummaryWriter` or what has its `add_scalar`, `add_text` and `flush`.
        scalars: Changes to `default_tb_scalars()`, by tag: a dictionary with `source` and `transform` (both may be
            left out), a whole `TBScalar`, or None to leave a default out. A `transform` that raises costs a warning
            and the point.
        experiment_info: What to write down about the experiment: a dictionary, or a text in markdown.

    Raises:
        ConfigError: for a field that a scalar does not have.
        TypeError: for something else as a scalar, or a writer that cannot write.
    """

    ranks = "main"

    def __init__(
        self,
        summary_writer: Any,
        scalars: Mapping[str, Mapping[str, Any] | TBScalar | None] | None = None,
        experiment_info: Mapping[str, Any] | str | None = None,
    ) -> None:
        if not callable(getattr(summary_writer, "add_scalar", None)):
            raise TypeError(
                f"summary_writer must be a SummaryWriter or ResumableSummaryWriter, got {summary_writer!r}; for a "
                f"folder pass ResumableSummaryWriter(folder)."
            )
        self.summary_writer = summary_writer
        self.scalars = _merged(default_tb_scalars(), scalars or {})
        self.experiment_info = experiment_info
        self._written: dict[str, int] = {}
        """Step of the newest point or text of each tag."""
        self._described: dict[str, str] = {}
        """Digest of each text about the run, as far as a continued run has to know."""
        self._failed: set[str] = set()
        """Tags whose `transform` has raised, which is said once each."""

    @staticmethod
    def mapping_as_markdown(mapping: Mapping[str, Any]) -> str:
        """The mapping as markdown: a fenced block with a line ``key: value`` for each entry."""
        text = "\n".join(f"{key}: {value}" for key, value in mapping.items())
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}\n{text}\n{fence}"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Describe the run."""
        if not state.is_world_process_zero:
            return
        self._written.clear()
        if state.global_step == 0:
            self._described.clear()
        texts = {"training_info": self.mapping_as_markdown(_facts(args, state, kwargs))}
        if self.experiment_info:
            info = self.experiment_info
            texts["experiment"] = info if isinstance(info, str) else self.mapping_as_markdown(info)
        for tag, text in sorted(texts.items()):
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            if self._described.get(tag) != digest:
                self._described[tag] = digest
                self._text(tag, text, state.global_step + 1 if state.global_step > 0 else 0)
        self.summary_writer.flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Write what is logged."""
        if not state.is_world_process_zero:
            return
        if "anomaly" in logs:
            self._text("anomaly", self.mapping_as_markdown(logs), state.global_step)
        else:
            self._points(logs, state.global_step)
        self.summary_writer.flush()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Write an evaluation."""
        if state.is_world_process_zero:
            self._points(metrics, state.global_step)
            self.summary_writer.flush()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Write a test, where there are scalars for it."""
        self.on_evaluate(args, state, control, metrics)

    def on_checkpoint_load(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a rollback the steps that were undone are written anew."""
        self._written.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the results, if anything was logged."""
        if state.is_world_process_zero and state.log_history:
            self._text("train_results", self.mapping_as_markdown(state.log_history[-1]), state.global_step)
            self.summary_writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Digests of the texts about the run, so that a continued run does not repeat them."""
        return {"described": dict(self._described)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a run that has been described."""
        self._described = dict(state_dict["described"])

    def _points(self, metrics: Mapping[str, Any], step: int) -> None:
        for tag, scalar in self.scalars.items():
            value = self._value(scalar, metrics)
            if value is not None and self._is_new(tag, step):
                self.summary_writer.add_scalar(tag, value, global_step=step)

    def _value(self, scalar: TBScalar, metrics: Mapping[str, Any]) -> float | None:
        """What the chart gets; nothing where its own code fails, since a picture must not end a run."""
        try:
            return scalar.value(metrics)
        except Exception as error:  # noqa: BLE001 - a user's transform may raise anything
            if scalar.tag not in self._failed:
                self._failed.add(scalar.tag)
                logger.warning("TBLogger leaves out scalar %r: its transform raised %r", scalar.tag, error)
            return None

    def _text(self, tag: str, text: str, step: int) -> None:
        if self._is_new(tag, step):
            self.summary_writer.add_text(tag, text, global_step=step)

    def _is_new(self, tag: str, step: int) -> bool:
        """Whether the tag has nothing at this step yet; from now on it has."""
        is_new = self._written.get(tag) != step
        self._written[tag] = step
        return is_new


def _merged(defaults: dict[str, TBScalar], changes: Mapping[str, Any]) -> dict[str, TBScalar]:
    """The defaults with the changes laid over them, new ones last."""
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
            raise TypeError(f"scalar {tag!r} must be a dictionary, a TBScalar or None (leave out), got {change!r}.")
    return {scalar.tag: scalar for scalar in merged.values()}


def _number(value: Any) -> float | None:
    """A plain number, infinite where it is too large for a float; of a list the largest; None for what is none."""
    if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0:
        numbers = [number for number in map(_number, value) if number is not None]
        return max(numbers, default=None)
    if not (isinstance(value, Real) or hasattr(value, "item")):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):  # a complex number, a text of numpy
        return None


def _facts(args: Any, state: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """What is about to be trained, on how much, and the arguments that are set; they leave out secrets themselves."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    ranks: int = getattr(state, "num_processes", 1)
    batch: list[int] = [getattr(args, name) for name in names if getattr(args, name, None) is not None]
    optimizer = told.get("optimizer")
    facts = {
        "max_steps": state.max_steps,
        "num_train_epochs": state.num_train_epochs,
        "total_train_batch_size": math.prod([*batch, ranks]) if len(batch) == len(names) else None,
        "num_processes": ranks,
        **_sizes(told.get("model")),
        "optimizer": None if optimizer is None else type(getattr(optimizer, "optimizer", optimizer)).__name__,
    }
    to_dict = getattr(args, "to_dict", None)
    arguments: Mapping[str, Any] = to_dict() if callable(to_dict) else {}
    facts |= {f"args.{key}": value for key, value in arguments.items()}
    return {key: value for key, value in facts.items() if value is not None}


def _sizes(model: Any) -> dict[str, Any]:
    """Parameter counts of a model or of a list of model chunks (this rank's part); a shared one counts once."""
    if model is None:
        return {}
    chunks = model if isinstance(model, (list, tuple)) else [model]
    parameters = {id(one): one for chunk in chunks for one in chunk.parameters()}.values()
    return {
        "model": ", ".join(type(chunk).__name__ for chunk in chunks),
        "total_parameters": sum(one.numel() for one in parameters),
        "trainable_parameters": sum(one.numel() for one in parameters if one.requires_grad),
    }
