"""Adds the error of a codec in one submission to the next one, so that errors do not accumulate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from onstep.diloco.codec.body import Body
from onstep.diloco.codec.formats import decode, encode, encoded_specs
from onstep.diloco.protocol.messages import ParameterSpec


class ErrorFeedback:
    """The error of each parameter, on the host, in float32, or float64 for parameters in float64.

    A rank of several has its part of each, as of the differences that the errors are added to.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", algorithm 2.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        """Those before the last encoding, for `undo`."""

    def corrected(self, name: str, difference: Tensor) -> Tensor:
        """What is to be encoded: the difference plus the residual of earlier encodings."""
        residual = self.residuals.get(name)
        return difference if residual is None else difference + residual

    def replace(self, names: Iterable[str], residuals: Mapping[str, Tensor]) -> None:
        """Note an encoding of these parameters, and what it has lost; an exact codec leaves no residuals."""
        for name in names:
            _move(name, self.residuals, self.before)
        self.residuals.update(residuals)

    def undo(self, names: Iterable[str]) -> None:
        """Undo the last encoding of these parameters, which was not counted: its input will be encoded again."""
        for name in names:
            _move(name, self.before, self.residuals)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the residuals of these parameters: a submission that this process does not know contains them."""
        for name in names:
            self.residuals.pop(name, None)


def _move(name: str, source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    target.pop(name, None)
    if name in source:
        target[name] = source.pop(name)


class Encoder:
    """Encodes the parameters of a fragment into the body of a submission, one whole tensor at a time.

    Raises:
        ConfigError: for an unknown codec.
    """

    def __init__(self, specs: Sequence[ParameterSpec], codec: str) -> None:
        self.codec = codec
        self._specs = {spec.name: spec for spec in specs}
        self._body = Body(encoded_specs(specs, codec))
        self._wanted, self._lost = 0.0, 0.0

    def add(self, name: str, wanted: Tensor) -> Tensor | None:
        """Encode a parameter; returns what the codec has lost of it, or None if it is exact.

        Raises:
            InvalidTensorsError: if an element is not finite, or too large.
        """
        encoded = encode({name: wanted}, self.codec)
        for part, tensor in encoded.items():
            self._body.tensors[part].copy_(tensor)
        if self.codec == "fp32":
            return None
        lost = decode(encoded, [self._specs[name]], self.codec)[name]
        lost = torch.sub(wanted, lost, out=lost)
        self._wanted, self._lost = self._wanted + _square(wanted), self._lost + _square(lost)
        return lost

    @property
    def relative_error(self) -> float:
        """Norm of what was lost, relative to the norm of what was encoded."""
        return math.sqrt(self._lost / self._wanted) if self._wanted else 0.0

    def finish(self) -> bytearray:
        """The body, after all parameters."""
        return self._body.memory


def _square(tensor: Tensor) -> float:
    return float(tensor.double().pow(2).sum())
