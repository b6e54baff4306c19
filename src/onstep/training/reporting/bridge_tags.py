"""Defines Megatron Bridge's tags: the reported values of a step, and their names in each tracker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from onstep.config import LoggerConfig
from onstep.trackers.metric_names import bridge_names
from onstep.trackers.tag_record import VS_SAMPLES, TagRecord
from onstep.trackers.tracker_logger import TrackerLogger
from onstep.train_state import TrainState
from onstep.training.compute.losses import Scalar
from onstep.training.protocols import Loggers

TENSORBOARD, WANDB, MLFLOW, COMET = "tensorboard", "wandb", "mlflow", "comet"

STEPS_ONLY = ("samples vs steps", "decoupled-learning-rate", "skipped-train-samples")
"""Tags of a step that TensorBoard does not also show over consumed samples."""


@dataclass(frozen=True)
class StepValues:
    """The reported values of a step, as numbers or unread tensors; None means no tag and no field in the line."""

    losses: Mapping[str, Tensor]
    learning_rate: float | None = None
    decoupled_learning_rate: float | None = None
    loss_scale: Scalar = 1.0
    grad_norm: Scalar | None = None
    num_zeros: Tensor | int | None = None
    params_norm: Scalar | None = None
    max_attention_logit: Scalar | None = None

    @property
    def shown(self) -> dict[str, Scalar | None]:
        """The last step's values that the console line shows."""
        names = ("loss_scale", "grad_norm", "num_zeros", "params_norm", "max_attention_logit")
        return {name: getattr(self, name) for name in names}


def step_tags(
    values: StepValues, progress: TrainState, batch_size: int, world_size: int, options: LoggerConfig
) -> dict[str, Scalar]:
    """The tags of a step, in Megatron Bridge's order."""
    tags: dict[str, Scalar | None] = {
        "samples vs steps": progress.consumed_train_samples,
        "learning-rate": values.learning_rate,
        "decoupled-learning-rate": values.decoupled_learning_rate,
        "skipped-train-samples": progress.skipped_train_samples or None,
        "batch-size": batch_size,
        **values.losses,
        "loss-scale": values.loss_scale if options.log_loss_scale_to_tensorboard else None,
        "world-size": world_size if options.log_world_size_to_tensorboard else None,
        "grad-norm": values.grad_norm,
        "num-zeros": values.num_zeros,
        "params-norm": values.params_norm,
        "max-attention-logit": values.max_attention_logit,
    }
    return {tag: value for tag, value in tags.items() if value is not None}


def evaluation_tags(kind: str, losses: Mapping[str, float], perplexities: Mapping[str, float]) -> dict[str, float]:
    """The tags of an evaluation: `kind` is validation or test; `perplexities` may be empty."""
    tags = {}
    for name, loss in losses.items():
        tags[f"{name} {kind}"] = loss
        if name in perplexities:
            tags[f"{name} {kind} ppl"] = perplexities[name]
    return tags


def write_tags(
    loggers: Loggers, tags: Mapping[str, Scalar], step: int, samples: int, over_samples: Collection[str] = ()
) -> None:
    """Write tags to the trackers given by name; Onstep's own receive device tensors unread.

    A logger that the user installed is called like its own client: `add_scalar` of a `SummaryWriter`, `log` of W&B,
    `log_metrics` of MLflow and Comet, with Python numbers for the last two.

    Args:
        over_samples: the tags that TensorBoard also shows over consumed samples.
    """
    curves = {tag + VS_SAMPLES: value for tag, value in tags.items() if tag in over_samples}
    for tracker, logger in loggers.items():
        values = bridge_names(tracker, tags)
        if not values:
            continue
        if isinstance(logger, (TrackerLogger, TagRecord)):
            logger.add_tags(values, curves, step, samples)
        elif tracker == TENSORBOARD:
            for x, shown in ((step, values), (samples, curves)):
                for tag, value in shown.items():
                    logger.add_scalar(tag, value, x)
        elif tracker == WANDB:
            logger.log(values, step)
        else:
            plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
            logger.log_metrics(plain, step=step)
