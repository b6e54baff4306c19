"""Refuses to save, or to call trained, weights that an update has made infinite or NaN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from onstep.config.suggestions import listed
from onstep.distributed.shards import local_part
from onstep.errors import NonFiniteError
from onstep.training.feature import Feature, Interruption
from onstep.training.stages.job import Job

_NAMES_SHOWN = 3


class FiniteWeights(Feature[Job]):
    """Checks the trained weights before each checkpoint and at the end of the training.

    A step's loss tells of the weights before its update, so an update that overflows is only noticed in the next step;
    it may be the last one, or the one that a checkpoint is of.
    """

    name = "finite_weights"
    collective = True

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """Check the weights if a checkpoint is about to be taken. Collective."""
        if work == "save":
            self._check()
        return nullcontext()

    def end(self) -> None:
        """Check the weights that the training ends with. Collective."""
        self._check()

    def _check(self) -> None:
        """Raise NonFiniteError, on all ranks, if a trainable weight of any rank is not finite."""
        run = self.host.run
        bad = self._non_finite()
        [is_bad] = run.world.agree([int(bool(bad))])
        if is_bad:
            names = listed(bad, _NAMES_SHOWN) if bad else "parts of them on other ranks"
            raise NonFiniteError(
                f"the weights are NaN or infinite after step {run.train_state.step}: {names}. An update has overflowed "
                f"although its loss and gradients were finite, and it cannot be undone; these weights are not saved. "
                f"Lower optimizer.lr or the weight decay, and continue from an earlier checkpoint."
            )

    def _non_finite(self) -> list[str]:
        """The trainable weights of this rank that are not finite; reads the device once if there is none."""
        parts = {
            name: local_part(parameter.detach())
            for chunk in self.host.model
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }
        named = {name: part for name, part in parts.items() if part.numel()}  # a rank may have no part of a shard
        total = torch.nn.utils.get_total_norm(named.values(), norm_type=float("inf")) if named else torch.zeros(())
        if total.isfinite():
            return []
        return [name.removeprefix("module.") for name, weight in named.items() if not weight.isfinite().all()]
