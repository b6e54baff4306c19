"""Adds the L2 norm of all parameters to the logs."""

from __future__ import annotations

from typing import Any

from onstep.events import TrainerCallback
from onstep.metrics.norm_meters import WeightMeter


class WeightNormLogger(TrainerCallback):
    """Adds `weight_norm`, the L2 norm of all parameters together, to every logged step before anybody reads it.

    A norm that grows and grows says that weight decay is too weak; one that stands still while gradient norms rise
    points elsewhere. Tied parameters count once. Exact to float64, with one read of the device a logged step. Of
    sharded parameters (FSDP2, tensor parallelism) it is the norm of the whole model, on every rank. What has no values
    (parameters on the meta device, integers of quantised layers) is left out, with one warning that names it.
    """

    def __init__(self) -> None:
        self._meter = WeightMeter(self.name)

    def on_log_step(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add `weight_norm` to `logs`. Collective where parameters are sharded."""
        norm = self._meter.measure(kwargs["model"])
        if norm is not None:
            logs["weight_norm"] = norm
