"""A fragment on the main rank: the version it starts from, and what becomes of local progress when a new one arrives.

All computations are in float32, or float64 for parameters in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from onstep.diloco.client.versions import Tensors
from onstep.diloco.codec import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec


@dataclass
class Fragment:
    """Some of the parameters, which are submitted and received together."""

    index: int
    specs: Sequence[ParameterSpec]
    version: int = -1
    """The version that `base` is; -1 before the first."""
    base: Tensors = field(default_factory=dict)
    """Parameters of the version, equal on all workers."""
    submitted: Tensors = field(default_factory=dict)
    """Parameters of the model at the pending submission; empty without one."""
    is_late: bool = False
    """Whether its result was not known in time, so that more than the steps of an overlap followed it."""

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [spec.name for spec in self.specs]

    def start(self, dtypes: Mapping[str, torch.dtype]) -> Tensors:
        """What the model has after `base` is written into it: rounded, if the model is in a smaller dtype."""
        return {name: _rounded(value, dtypes[name]) for name, value in self.base.items()}

    def difference(self, local: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Tensors:
        """The pseudo-gradient: where the model started, minus where it is."""
        return {name: start - local[name] for name, start in self.start(dtypes).items()}

    def advance(self, version: int, base: Tensors) -> None:
        """Continue from a newer version; the submission is settled."""
        self.version, self.base, self.submitted = version, base, {}


def kept(new: Tensors, now: Mapping[str, Tensor], since: Mapping[str, Tensor]) -> Tensors:
    """The new version plus the progress that the model made since: `new + (now - since)`."""
    return {name: value if name not in now else value + (now[name] - since[name]) for name, value in new.items()}


def blended(new: Tensors, now: Mapping[str, Tensor], local_share: float) -> Tensors:
    """The new version and the model that trained on meanwhile, mixed: `share * now + (1 - share) * new`.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", algorithm 2 (alpha).
    """
    return {name: torch.lerp(value, now[name], local_share) for name, value in new.items()}


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if dtype == value.dtype else value.to(dtype).to(master_dtype(dtype))
