"""Reports of mixtures of experts and multi-token prediction, with Megatron Bridge's names and its writer."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from onstep.trackers.tracker_logger import TrackerLogger
from onstep.training.compute.losses import Weight
from onstep.training.experts.experts import Experts

T = TypeVar("T")


class ScalarWriter(Protocol):
    """What reports need of a `SummaryWriter`."""

    def add_scalar(self, name: str, value: Weight, iteration: int, /) -> object: ...


class MetricLogger(Protocol):
    """What they need of a client of MLflow or Comet."""

    def log_metrics(self, metrics: dict[str, Weight], /, *, step: int) -> object: ...


class _MoeMetricFanoutWriter:
    """Looks like a TensorBoard writer, and hands every value to MLflow and Comet too.

    Args:
        tb_writer: gets the value as it is, by `add_scalar`; None is none.
        comet_logger: gets a plain number, by `log_metrics`; None is none.
        mlflow_logger: the same.
    """

    def __init__(
        self, tb_writer: ScalarWriter | None, comet_logger: MetricLogger | None, mlflow_logger: MetricLogger | None
    ) -> None:
        self._tb_writer = tb_writer
        self._loggers = [logger for logger in (mlflow_logger, comet_logger) if logger is not None]

    @staticmethod
    def _sanitize(value: Tensor | T) -> Tensor | T | float:
        """`value` as a plain number if it is a tensor without dimensions, which waits for its device, else as it is."""
        return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value

    def add_scalar(self, name: str, value: Weight, iteration: int) -> None:
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
        for logger in self._loggers:
            given = value if isinstance(logger, TrackerLogger) else self._sanitize(value)
            logger.log_metrics({name: given}, step=iteration)


def _build_moe_metric_writer(
    tb_writer: ScalarWriter | None, comet_logger: MetricLogger | None, mlflow_logger: MetricLogger | None
) -> ScalarWriter | None:
    """What reports of experts are written with: `tb_writer` itself where there is nothing else, else one for all.

    Args:
        tb_writer: TensorBoard's, returned as it is, None too, without the other two.
        comet_logger: has `log_metrics`; None is none.
        mlflow_logger: the same.
    """
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)


def step_losses(experts: Experts | None) -> dict[str, Tensor]:
    """The step's losses of experts and multi-token prediction, unread."""
    if experts is None or experts.last is None:
        return {}
    return experts.losses(experts.last)


def interval_losses(experts: Experts | None) -> dict[str, Tensor]:
    """The same of the steps since the last logged one, unread."""
    if experts is None or experts.interval is None:
        return {}
    return experts.losses(experts.interval)
