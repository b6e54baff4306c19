"""Reports of mixtures of experts and multi-token prediction, with Megatron Bridge's names and its writer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.metrics.moe_losses import prediction_losses, reported_losses, tracked_losses
from onstep.models.routing_record import FIGURES
from onstep.sinks.tracker_logger import TrackerLogger
from onstep.training.expert_steps import ExpertSteps
from onstep.training.step_size import model_options


class _MoeMetricFanoutWriter:
    """Looks like a TensorBoard writer, and hands every value to MLflow and Comet too.

    Args:
        tb_writer: gets the value as it is, by `add_scalar`; None is none.
        comet_logger: gets a plain number, by `log_metrics`; None is none.
        mlflow_logger: the same.
    """

    def __init__(self, tb_writer: Any | None, comet_logger: Any | None, mlflow_logger: Any | None) -> None:
        self._tb_writer = tb_writer
        self._comet_logger = comet_logger
        self._mlflow_logger = mlflow_logger

    @staticmethod
    def _sanitize(value: Any) -> Any:
        """`value` as a plain number where it is a tensor without dimensions, which waits for its device, else as it is.

        Args:
            value: what a tracker is to be given.
        """
        return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        """Hand one value of a step to every tracker that there is.

        Onstep's own trackers read the device later, by themselves; only a client that was put in their place is given a
        plain number here.

        Args:
            name: the tag.
            value: a number, or a tensor without dimensions.
            iteration: the step.
        """
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        for logger in (self._mlflow_logger, self._comet_logger):
            if logger is not None:
                given = value if isinstance(logger, TrackerLogger) else self._sanitize(value)
                logger.log_metrics({name: given}, step=iteration)


def _build_moe_metric_writer(
    tb_writer: Any | None, comet_logger: Any | None, mlflow_logger: Any | None
) -> _MoeMetricFanoutWriter | Any | None:
    """What reports of experts are written with: `tb_writer` itself where there is nothing else, else one for all.

    Args:
        tb_writer: TensorBoard's, returned as it is, None too, without the other two.
        comet_logger: has `log_metrics`; None is none.
        mlflow_logger: the same.
    """
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)


def expert_losses(experts: ExpertSteps, counts: Tensor, model: Any) -> dict[str, Tensor]:
    """The losses of experts and multi-token prediction in `counts`, by the names that they are reported by.

    Args:
        experts: of the run.
        counts: a step's (`experts.last`) or an interval's.
        model: the model's configuration.
    """
    layers = {}
    for router, row in zip(experts.routers, experts.rows(counts), strict=True):
        layers[router.layer_index] = dict(zip(FIGURES, row[router.num_experts :].unbind(), strict=True))
    losses = reported_losses(layers, tracked_losses(model), per_layer=model.moe_per_layer_logging)
    return losses | (prediction_losses(experts.prediction_sums(counts)) if experts.predictions else {})


def step_losses(experts: ExpertSteps | None, cfg: ConfigContainer, model: list[nn.Module]) -> dict[str, Tensor]:
    """The step's losses of experts and multi-token prediction, unread."""
    if experts is None or experts.last is None:
        return {}
    return expert_losses(experts, experts.last, model_options(cfg, model))


def add_experts(losses: dict[str, Tensor], total_loss_dict: dict[str, Any]) -> None:
    """Add the step's losses of experts to the sums of an interval: those that the console line shows."""
    for name, loss in losses.items():
        if name.endswith("loss"):
            before = total_loss_dict.get(name)
            total_loss_dict[name] = loss.double().reshape(1).clone() if before is None else before + loss.double()


def interval_losses(experts: ExpertSteps | None, cfg: ConfigContainer) -> dict[str, Tensor]:
    """The same of the steps since the last logged one, unread."""
    if experts is None or experts.interval is None:
        return {}
    return expert_losses(experts, experts.interval, model_options(cfg, experts.chunks))
