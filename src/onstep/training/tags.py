"""Megatron Bridge's tags: which values a step is reported by, and which tracker gets each under which name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onstep.config.reporting import LoggerConfig
from onstep.progress import TrainState
from onstep.sinks.sink_names import bridge_names
from onstep.sinks.tag_record import VS_SAMPLES, TagRecord
from onstep.sinks.tracker_logger import TrackerLogger
from onstep.training.seams import Loggers, Values

TENSORBOARD, WANDB, MLFLOW, COMET = "tensorboard", "wandb", "mlflow", "comet"


@dataclass(frozen=True)
class Point:
    """A value of one step."""

    tag: str
    value: Any
    """A number or a tensor of one element; it need not be read yet."""
    vs_samples: bool = False
    """TensorBoard shows it over consumed samples too."""


@dataclass(frozen=True)
class StepValues:
    """What a step is reported by, as numbers or unread tensors; what is None has no point and no field in the line."""

    losses: Values
    learning_rate: float | None = None
    decoupled_learning_rate: float | None = None
    loss_scale: Any = 1.0
    grad_norm: Any = None
    num_zeros: Any = None
    params_norm: Any = None
    max_attention_logit: Any = None

    @property
    def shown(self) -> Values:
        """Those of the last step that the console line shows."""
        names = ("loss_scale", "grad_norm", "num_zeros", "params_norm", "max_attention_logit")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class GpuEnergy:
    """What one GPU takes, as the mean of all."""

    joules: float
    """Of one step."""
    watts: float


def step_points(
    values: StepValues, progress: TrainState, batch_size: int, world_size: int, options: LoggerConfig
) -> list[Point]:
    """The points of a step, in Megatron Bridge's order."""
    points = [Point("samples vs steps", progress.consumed_train_samples)]
    points += _given("learning-rate", values.learning_rate)
    if values.decoupled_learning_rate is not None:
        points.append(Point("decoupled-learning-rate", values.decoupled_learning_rate))
    if progress.skipped_train_samples > 0:
        points.append(Point("skipped-train-samples", progress.skipped_train_samples))
    points += _given("batch-size", batch_size)
    for name, value in values.losses.items():
        points += _given(name, value)
    points += _given("loss-scale", values.loss_scale if options.log_loss_scale_to_tensorboard else None)
    points += _given("world-size", world_size if options.log_world_size_to_tensorboard else None)
    points += _given("grad-norm", values.grad_norm)
    points += _given("num-zeros", values.num_zeros)
    points += _given("params-norm", values.params_norm)
    points += _given("max-attention-logit", values.max_attention_logit)
    return points


def report_points(*reports: Values) -> list[Point]:
    """The points of reports by tag: throughput, memory, time, gradient norms."""
    return [Point(tag, value) for report in reports for tag, value in report.items()]


def interval_points(
    teraflops: float | None, world_size: int, seconds_per_step: float | None, energy: GpuEnergy | None = None
) -> list[Point]:
    """The points of a logged interval; `teraflops` are those of one device."""
    points = []
    if teraflops is not None:
        points.append(Point("throughput/tflops/device", teraflops))
        points.append(Point("throughput/tflops", teraflops * world_size))
    if seconds_per_step is not None:
        points.append(Point("iteration-time", seconds_per_step))
    if energy is not None:
        points.append(Point("iter-energy/gpu", energy.joules))
        points.append(Point("power/gpu", energy.watts))
    return points


def evaluation_points(kind: str, losses: Mapping[str, float], perplexities: Mapping[str, float]) -> list[Point]:
    """The points of an evaluation: `kind` is validation or test; `perplexities` may be empty."""
    points = []
    for name, loss in losses.items():
        points.append(Point(f"{name} {kind}", loss, vs_samples=True))
        if name in perplexities:
            points.append(Point(f"{name} {kind} ppl", perplexities[name], vs_samples=True))
    return points


def write_points(loggers: Loggers, points: Iterable[Point], step: int, samples: int) -> None:
    """Hand the points to the trackers that there are, by name; device tensors go to ours unread.

    A logger that the user put in the place of ours is called as its own client is: `add_scalar` of a `SummaryWriter`,
    `log` of W&B, `log_metrics` of MLflow and Comet, with plain numbers for the last two.
    """
    points = list(points)
    tags = {one.tag: one.value for one in points}
    over_samples = {one.tag + VS_SAMPLES: one.value for one in points if one.vs_samples}
    for tracker, logger in loggers.items():
        values = bridge_names(tracker, tags)
        if not values:
            continue
        if isinstance(logger, (TrackerLogger, TagRecord)):
            logger.add_tags(values, over_samples, step, samples)
        elif tracker == TENSORBOARD:
            for x, curves in ((step, values), (samples, over_samples)):
                for tag, value in curves.items():
                    logger.add_scalar(tag, value, x)
        elif tracker == WANDB:
            logger.log(values, step)
        else:
            logger.log_metrics({name: _plain(value) for name, value in values.items()}, step=step)


def _given(tag: str, value: Any) -> Iterator[Point]:
    if value is not None:
        yield Point(tag, value, vs_samples=True)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
