"""Notices that the run diverges, by the logged training losses of a worker."""

from __future__ import annotations

import logging
import math

from onstep.diloco.protocol.messages import Settings

logger: logging.Logger = logging.getLogger(__name__)

_RISE, _FACTOR = 0.5, 1.2
"""A loss this much above the lowest, and this many times as large, is not noise..."""
_NUM_LOGS = 3
"""...in so many logs in a row."""


class DivergenceWatch:
    """Warns when the losses of several logs in a row are far above the lowest one, and again after a recovery."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lowest = math.inf
        self._num_high = 0

    @property
    def is_diverging(self) -> bool:
        """Whether the last losses were far above the lowest."""
        return self._num_high >= _NUM_LOGS

    def note(self, loss: float, step: int) -> None:
        """Compare a logged loss with the lowest one.

        Args:
            loss: the mean over the steps since the last log.
            step: the number of the step.
        """
        is_high = not loss < max(self._lowest + _RISE, self._lowest * _FACTOR)
        self._num_high = self._num_high + 1 if is_high else 0
        if self._num_high == _NUM_LOGS:
            logger.warning(
                "DiLoCo: the run diverges: the loss was %.4g at its lowest and is %.4g at step %d; %s",
                self._lowest,
                loss,
                step,
                self._remedy(),
            )
        self._lowest = min(self._lowest, loss)

    def _remedy(self) -> str:
        rates = "`onstep diloco control` can lower the outer momentum and learning rate of the server"
        if self._settings.mode == "sync":
            return rates
        return f"submissions are applied one by one here (--async): {rates}, and a run without --async learns better"
