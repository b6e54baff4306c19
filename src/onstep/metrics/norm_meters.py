"""What the norm loggers measure, and what of it a checkpoint keeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from onstep.distributed.shards import is_sharded, world_size
from onstep.metrics.named_parameters import MissingOnce, Model, named_parameters
from onstep.metrics.parameter_norms import (
    LocalNorms,
    full_norms,
    local_gradient_norms,
    parameter_norms,
    total_norm,
)
from onstep.metrics.spectral_norms import SpectralNorms

logger: logging.Logger = logging.getLogger(__name__)


class GradientMeter:
    """Keeps the norms of a step's gradients on the device until somebody wants them.

    Args:
        who: what warnings call it.
    """

    def __init__(self, who: str) -> None:
        self._missing = MissingOnce(who)
        self._norms = LocalNorms.none()
        self._step = -1
        self._num_ranks = 0
        self._live_step = -1

    def before_update(self, model: Model, step: int, is_foreseen: bool) -> None:
        """The gradients of the update that makes step `step` are complete.

        Args:
            is_foreseen: whether they will be wanted, as far as one knows; they are measured now.
        """
        self._live_step = step
        if is_foreseen:
            self._capture(model, step)

    def before_evaluation(self, model: Model, step: int) -> None:
        """Measure the gradients of step `step` now, where nobody foresaw that and they are still there."""
        if step == self._live_step != self._step:
            self._capture(model, step)

    def _capture(self, model: Model, step: int) -> None:
        self._norms, self._step, self._num_ranks = local_gradient_norms(model), step, world_size()

    def read(self, model: Model, step: int, is_main: bool) -> dict[str, float]:
        """The norms by parameter, where those of step `step` were captured; else nothing.

        Where parameters are sharded every rank must call it, and gets them; else rank 0 alone does. Reads the device
        once.
        """
        needs_all = is_sharded(named_parameters(model).values())
        if self._step != step or not (is_main or needs_all):
            return {}
        self._missing.say(model)
        if needs_all and self._num_ranks != world_size():
            logger.warning("gradient norms of step %d were captured on %d ranks; dropped", step, self._num_ranks)
            return {}
        return full_norms(self._norms, model)

    def state_dict(self) -> dict[str, Any]:
        """What was captured last on this rank, still on the device."""
        norms = self._norms
        return {
            "step": self._step,
            "num_ranks": self._num_ranks,
            "names": list(norms.names),
            "values": norms.values.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint holds."""
        self._norms = LocalNorms(tuple(state_dict["names"]), state_dict["values"])
        self._step, self._num_ranks = state_dict["step"], state_dict["num_ranks"]
        self._live_step = -1


class ParameterMeter:
    """Measures the L2 and spectral norms of all parameters.

    Args:
        who: what warnings call it.
        has_norms: whether to measure L2 norms, as `norms`.
        has_spectral_norms: whether to measure spectral norms, as `spectral_norms`.
        num_steps: iterations for a spectral norm; see `SpectralNorms`.
    """

    def __init__(self, who: str, has_norms: bool, has_spectral_norms: bool, num_steps: int) -> None:
        self._missing = MissingOnce(who)
        self._has_norms, self._has_spectral_norms = has_norms, has_spectral_norms
        self._spectral = SpectralNorms(num_steps)

    def measure(self, model: Model, is_main: bool) -> dict[str, dict[str, float]]:
        """``{"norms": {<parameter>: ...}, "spectral_norms": ...}``; nothing of a model without values.

        Where parameters are sharded every rank must call it, and gets them; else rank 0 alone does.
        """
        self._missing.say(model)
        found: dict[str, dict[str, float]] = {}
        if not (is_main or is_sharded(named_parameters(model).values())):
            return found
        if self._has_norms:
            found["norms"] = parameter_norms(model)
        if self._has_spectral_norms:
            found["spectral_norms"] = self._spectral.measure(model)
        return found if any(found.values()) else {}

    def state_dict(self) -> dict[str, Any]:
        """What spectral norms start from next."""
        return self._spectral.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Start from what a checkpoint holds."""
        self._spectral.load_state_dict(state_dict)


class WeightMeter:
    """Measures the L2 norm of all parameters together.

    Args:
        who: what warnings call it.
    """

    def __init__(self, who: str) -> None:
        self._missing = MissingOnce(who)

    def measure(self, model: Model) -> float | None:
        """The norm; None for a model without values. Collective where parameters are sharded. Reads the device once."""
        self._missing.say(model)
        norms = parameter_norms(model)
        return total_norm(norms) if norms else None
