"""Combines Muon for the matrices of the layers and AdamW for everything else in one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onstep.errors import ConfigError
from onstep.optim.fused_step import FusedStep
from onstep.optim.guarded_step import GuardedStep
from onstep.optim.sharded_muon import PRECISION, Float32Muon


class MuonWithAdamW(torch.optim.Optimizer):
    """Two torch optimizers with one list of groups, one state and one step.

    Its groups are those of `muon`, then those of `adamw`, as the same dictionaries, even after loading a state. A group
    added later belongs to AdamW.

    Args:
        muon: the optimizer of the layers' matrices.
        adamw: the optimizer of all else; None if there is nothing else.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning rate that
    matches AdamW's: Liu et al. 2025, "Muon is Scalable for LLM Training" (arXiv:2502.16982), section 2.2.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW | None = None) -> None:
        self._muon, self._adamw = muon, adamw
        self._num_muon_groups = len(muon.param_groups)
        self._is_made = False
        super().__init__(muon.param_groups + ([] if adamw is None else adamw.param_groups), {})
        self._is_made = True
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters for AdamW.

        Args:
            param_group: the parameter group: `params` and its settings.

        Raises:
            ConfigError: if Muon has all parameters, so that no AdamW exists.
        """
        if self._is_made:
            if self._adamw is None:
                raise ConfigError("a group can only be added to AdamW, but Muon has all parameters; build a new one")
            self._adamw.add_param_group(param_group)  # which fills in AdamW's defaults
            param_group = self._adamw.param_groups.pop()
        super().add_param_group(param_group)
        if self._is_made:
            self._share()

    @property
    def accepts_flag(self) -> bool:
        """Whether `step` updates nothing while a tensor `found_inf` on the device is 1, without reading it."""
        return self._adamw is None or all(group["fused"] for group in self._adamw.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices of the layers, then everything else, unless the attribute `found_inf` is 1.

        Args:
            closure: must be None; a step here never computes the loss again.
        """
        assert closure is None, "a training step has no closure"
        found_inf: Tensor | None = vars(self).get("found_inf")
        if self._adamw is not None:
            vars(self._adamw)["found_inf"] = found_inf
        if found_inf is None:
            for step in self._steps:
                step()
        elif self._guard.is_possible():
            self._guard(found_inf)
            for step in self._steps[1:]:
                step()
        elif not found_inf.item():
            for step in self._steps:
                step()

    def __getstate__(self) -> dict[str, Any]:
        """The content of copies and pickles: torch's three attributes, and the two optimizers, which share them."""
        parts = {name: vars(self)[name] for name in ("_muon", "_adamw", "_num_muon_groups", "_is_made")}
        return {**super().__getstate__(), **parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Make both optimizers use the groups and the state of this one."""
        for inner, groups in (
            (self._muon, self.param_groups[: self._num_muon_groups]),
            (self._adamw, self.param_groups[self._num_muon_groups :]),
        ):
            if inner is not None:
                inner.param_groups, inner.state = groups, self.state
        keeps = isinstance(self._muon, Float32Muon)
        for group in self._muon.param_groups:  # perhaps as they were saved with the other precision
            group.update({PRECISION: "highest"} if keeps else {})
            if not keeps:
                group.pop(PRECISION, None)
        self._guard = GuardedStep(self._muon)
        self._steps = [FusedStep(inner) for inner in (self._muon, self._adamw) if inner is not None]
