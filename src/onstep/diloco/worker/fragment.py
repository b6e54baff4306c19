"""A fragment on a rank: its part of the version that it starts from, and how progress is combined with a newer one.

All computations are in float32, or float64 for parameters in float64, and element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from onstep.diloco.codec.specs import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec, Submit

Tensors = dict[str, Tensor]
Fate = Literal["counted", "late", "outdated", "dropped", "given up"]
"""The fate of a submission and of the steps after it: the submission counts in the first three cases, of which it is
`late` if its result was not known in time, and not in the last two; after `outdated` and `given up` the worker starts
over, and nothing is left of its steps in the model."""


@dataclass
class Lineage:
    """The versions of a fragment that local progress began from; on rank 0."""

    specs: Sequence[ParameterSpec]
    number: int = -1
    """Of the version that local progress is relative to; -1 before the first."""
    origin: int = -1
    """The version that the oldest local progress began from: an earlier one after an absence."""
    num_contributors: int = 0
    """To the version `number`."""
    sent: tuple[Submit, bytes | bytearray] | None = None
    """The submission whose result is not merged, and its body."""
    knows_start: bool = True
    """Whether the local progress began from `number`; False for a submission of an earlier session, if there is a newer
    version now."""
    is_late: bool = False
    """Whether the submission's result was not known in time, so that more than the steps of an overlap followed it."""


@dataclass
class Fragment:
    """Some of the parameters, which are submitted and received together: this rank's parts."""

    dtypes: Mapping[str, torch.dtype]
    """Of the model's parameters, by name."""
    base: Tensors = field(default_factory=dict)
    """The version that local progress is relative to."""
    submitted: Tensors = field(default_factory=dict)
    """The model's parameters at the pending submission; empty without one."""
    ahead: Tensors = field(default_factory=dict)
    """Those that it continued with: the same, unless its own outer step was applied at once."""

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return list(self.dtypes)

    def start(self, name: str) -> Tensor:
        """The model's parameter after `base` was written to it: rounded, if it is of a smaller dtype."""
        return self.rounded(name, self.base[name])

    def rounded(self, name: str, value: Tensor) -> Tensor:
        """What the model has of a parameter that is written to it: less, if it is of a smaller dtype."""
        dtype = self.dtypes[name]
        return value if dtype == value.dtype else value.to(dtype).to(master_dtype(dtype))

    def local(self, name: str, now: Tensor | None) -> Tensor:
        """The model's parameter, as it would be if it had continued from what was submitted."""
        if now is None or self.ahead is self.submitted:
            return self.submitted[name] if now is None else now
        return self.submitted[name] + (now - self.ahead[name])

    def advance(self, base: Tensors) -> None:
        """Continue from a newer version; there is no pending submission any more."""
        self.base, self.submitted, self.ahead = base, {}, {}

    def merged(self, name: str, new: Tensor, now: Tensor | None, fate: Fate, local_share: float | None) -> Tensor:
        """The parameter with which the model continues from a newer version.

        Progress made since a submission that was counted is kept, or blended in with `local_share`. Blending is meant
        for the few steps of an overlap, so what followed a late result is kept, unless it is too old to count. The
        progress of a submission that was dropped stays in the model, unless the worker is to start over.

        Args:
            name: of the parameter.
            new: in the newer version.
            now: the model's; None if no step was taken since the submission.
            fate: of the submission.
            local_share: of the model in a blend; None keeps its progress.

        Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", algorithm 2 (alpha).
        """
        if fate in ("outdated", "given up"):
            return new
        if fate == "dropped":
            return new + (self.local(name, now) - self.start(name))
        if now is None:
            return new
        if fate == "counted" and local_share is not None:
            return torch.lerp(new, now, local_share)
        return new + (now - self.ahead[name])
