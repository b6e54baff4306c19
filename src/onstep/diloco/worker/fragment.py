"""A fragment on rank 0: the version that it starts from, and how local progress is combined with a newer one.

All computations are in float32, or float64 for parameters in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onstep.diloco.client.membership import Tensors, Version
from onstep.diloco.codec.specs import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec


@dataclass
class Fragment:
    """Some of the parameters, which are submitted and received together."""

    specs: Sequence[ParameterSpec]
    base: Version = field(default_factory=lambda: Version(-1, {}))
    """The version that local progress is relative to; number -1 before the first."""
    submitted: Tensors = field(default_factory=dict)
    """The model's parameters at the pending submission; empty without one."""
    is_late: bool = False
    """Whether the submission's result was not known in time, so that more than the steps of an overlap followed it."""

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [spec.name for spec in self.specs]

    def start(self, dtypes: Mapping[str, torch.dtype]) -> Tensors:
        """The model's parameters after `base` was written to it: rounded, if they are of a smaller dtype."""
        return {name: _rounded(value, dtypes[name]) for name, value in self.base.parameters.items()}

    def difference(self, local: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Tensors:
        """The pseudo-gradient: where the model started, minus where it is."""
        return {name: start - local[name] for name, start in self.start(dtypes).items()}

    def advance(self, version: Version) -> None:
        """Continue from a newer version; there is no pending submission any more."""
        self.base, self.submitted = version, {}


def kept(new: Tensors, now: Mapping[str, Tensor], since: Mapping[str, Tensor]) -> Tensors:
    """The new version plus the progress that the model has made since: `new + (now - since)`."""
    return {name: value if name not in now else value + (now[name] - since[name]) for name, value in new.items()}


def blended(new: Tensors, now: Mapping[str, Tensor], local_share: float) -> Tensors:
    """The new version and the model that trained on meanwhile, mixed: `share * now + (1 - share) * new`.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", algorithm 2 (alpha).
    """
    return {name: torch.lerp(value, now[name], local_share) for name, value in new.items()}


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if dtype == value.dtype else value.to(dtype).to(master_dtype(dtype))
