"""Refuses a forward step whose tokens or losses differ between ranks that compute one model."""

from __future__ import annotations

from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job
from onstep.training.stages.staged import TOKENS

_ROUNDING = 1e-6
"""How far apart losses may be that are computed from the same values, relatively."""


class SameTokens(Feature[Job]):
    """Compares the tokens and the losses of the first step on ranks that compute one model."""

    name = "same_tokens"
    when = "parallel.tensor_model_parallel_size or parallel.pipeline_model_parallel_size is above 1"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        sizes = host.run.world.sizes
        return sizes.tp * sizes.pp > 1

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._hooks: list[RemovableHandle] = []
        self._sums: list[list[Tensor]] = []
        self._is_due = True

    def after_zero_grad(self) -> None:
        """A step begins, or is computed again."""
        if self._is_due:
            self._stop()
            self._sums = [[] for _ in self.host.model]
            for chunk, sums in zip(self.host.model, self._sums, strict=True):
                hook = _Noted(sums)
                self._hooks.append(unwrap(chunk).register_forward_pre_hook(hook, with_kwargs=True))

    def before_update(self, step: Step) -> None:
        """Compare the tokens and losses of this step with those of other ranks. Collective.

        Raises:
            ConfigError: on all ranks, for different ones.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._stop()
        world = self.host.run.world
        own = [sorted(one.tolist() for one in sums) for sums in self._sums], [float(one.loss) for one in step.micros]
        calls, losses = zip(*world.gather(own), strict=True)
        for part in world.parts("pp", "cp", "tp"):
            other = next((rank for rank in part for of_chunk in calls[rank] if of_chunk != calls[part[0]][0]), None)
            if other is not None:
                raise ConfigError(
                    f"the forward step has called the model with other tokens on {world.place(other)} than on "
                    f"{world.place(part[0])}, which compute one model: on each rank it must call it with the tokens of "
                    f"next(data_iterator), and change them alike, at random by torch's own generator only."
                )

        for part in world.parts("tp"):
            first = part[0]
            for rank in part:
                for here, there in zip(losses[rank], losses[first], strict=True):
                    are_known = isfinite(here) and isfinite(there)  # others are found by their own checks
                    if are_known and not isclose(here, there, rel_tol=_ROUNDING):
                        raise ConfigError(
                            f"the loss of a micro-batch is {here} on {world.place(rank)} and {there} on "
                            f"{world.place(first)}, which compute one model: it reads a part that each rank has of a "
                            f"weight (to_local()) or of activations (by a forward hook); compute it from what the "
                            f"model returns and from whole weights, weight.full_tensor(), or set "
                            f"parallel.tensor_model_parallel_size=1."
                        )

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Noted:
    """Appends a checksum of the tokens that a module is called with."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._sums = sums

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = [*(keywords[name] for name in TOKENS if name in keywords), *args]
        tokens = next((one for one in given if isinstance(one, Tensor) and not one.is_floating_point()), None)
        if tokens is not None:
            places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
            self._sums.append((tokens.flatten() * places).sum())
