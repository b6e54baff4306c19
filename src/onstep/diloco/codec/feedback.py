"""Adds what a codec lost of one submission to the next, so that in the long run nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import InvalidTensorsError, specs_of


class ErrorFeedback:
    """Encodes differences and keeps the error of each parameter, in float32 on the host.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", algorithm 1.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.relative_error = 0.0
        """Norm of what the last encoding lost, relative to what was to be encoded."""

    def encode(self, tensors: Mapping[str, Tensor], codec: str) -> dict[str, Tensor]:
        """Encode the tensors plus what earlier encodings lost of them. An exact codec leaves no residuals.

        Raises:
            InvalidTensorsError: if an element is not finite; the residuals are then as before.
        """
        wanted = {name: self._with_residual(name, tensor.detach().cpu()) for name, tensor in tensors.items()}
        encoded = encode(wanted, codec)
        if codec == "fp32":
            for name in tensors:
                self.residuals.pop(name, None)
            self.relative_error = 0.0
            return encoded
        decoded = decode(encoded, specs_of(wanted), codec)
        lost = {name: tensor.to(decoded[name].dtype) - decoded[name] for name, tensor in wanted.items()}
        self.residuals.update(lost)
        self.relative_error = _norm(lost) / (_norm(wanted) or 1.0)
        return encoded

    def _with_residual(self, name: str, tensor: Tensor) -> Tensor:
        residual = self.residuals.get(name)
        return tensor if residual is None else tensor + residual

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals by parameter."""
        return dict(self.residuals)

    def load_state_dict(self, state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
        """Take over residuals of another process.

        Raises:
            InvalidTensorsError: for a residual of a parameter that this model does not have, or of another shape.
        """
        for name, tensor in state.items():
            if tensor.shape != shapes.get(name):
                raise InvalidTensorsError(
                    f"{name}: the checkpoint has a residual of shape {list(tensor.shape)}, but this model has "
                    f"{list(shapes[name]) if name in shapes else 'no such parameter'}; resume with the same model."
                )
        self.residuals = {name: tensor.cpu() for name, tensor in state.items()}


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()) ** 0.5)
