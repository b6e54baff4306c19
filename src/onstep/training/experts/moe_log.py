"""Reports mixtures of experts and multi-token prediction, with Megatron Bridge's names and its writer."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor

from onstep.trackers.tracker_logger import TrackerLogger
from onstep.training.compute.losses import Scalar
from onstep.training.experts.experts import Experts

T = TypeVar("T")


class _MoeMetricFanoutWriter:
    """Acts as a TensorBoard writer that also sends every value to MLflow and Comet.

    Args:
        tb_writer: receives the value unchanged, by `add_scalar`; None for no TensorBoard.
        comet_logger: receives a Python number, by `log_metrics`; None for no Comet.
        mlflow_logger: likewise.
    """

    def __init__(self, tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> None:
        self._tb_writer = tb_writer
        self._loggers = [logger for logger in (mlflow_logger, comet_logger) if logger is not None]

    @staticmethod
    def _sanitize(value: Tensor | T) -> Tensor | T | float:
        """`value` as a Python number if it is a 0-d tensor, which waits for its device; else unchanged."""
        return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value

    def add_scalar(self, name: str, value: Scalar, iteration: int) -> None:
        """Send one value of a step to every tracker.

        Onstep's own trackers read the device later, by themselves; only a client that replaced one receives a Python
        number here.

        Args:
            name: the tag.
            value: a number or a 0-d tensor.
            iteration: the step.
        """
        if self._tb_writer is not None:
            self._tb_writer.add_scalar(name, value, iteration)
        for logger in self._loggers:
            given = value if isinstance(logger, TrackerLogger) else self._sanitize(value)
            logger.log_metrics({name: given}, step=iteration)


def _build_moe_metric_writer(tb_writer: Any, comet_logger: Any, mlflow_logger: Any) -> Any:
    """The writer for reports of experts: `tb_writer` itself without other trackers, else one for all.

    Args:
        tb_writer: TensorBoard's; without the other two it is returned unchanged, even if None.
        comet_logger: has `log_metrics`; None for no Comet.
        mlflow_logger: likewise.
    """
    if comet_logger is None and mlflow_logger is None:
        return tb_writer
    return _MoeMetricFanoutWriter(tb_writer, comet_logger, mlflow_logger)


def step_losses(experts: Experts | None) -> dict[str, Tensor]:
    """The step's losses of experts and multi-token prediction, not yet read from the device."""
    if experts is None or experts.last is None:
        return {}
    return experts.losses(experts.last)


def interval_losses(experts: Experts | None) -> dict[str, Tensor]:
    """The same for the steps since the last logged one, not yet read from the device."""
    if experts is None or experts.interval is None:
        return {}
    return experts.losses(experts.interval)
