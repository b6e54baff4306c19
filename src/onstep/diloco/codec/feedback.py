"""Adds the error of a codec in one submission to the next one, so that errors do not accumulate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import InvalidTensorsError, specs_of


class ErrorFeedback:
    """Encodes differences and keeps the error of each parameter, in float32 on the host.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", algorithm 2.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self.relative_error = 0.0
        """Norm of the last encoding's error, relative to the norm of its input."""

    def encode(self, tensors: Mapping[str, Tensor], codec: str) -> dict[str, Tensor]:
        """Encode the tensors plus their residuals of earlier encodings. An exact codec leaves no residuals.

        Raises:
            InvalidTensorsError: if an element is not finite; the residuals are then as before.
        """
        wanted = {name: self._with_residual(name, tensor.detach().cpu()) for name, tensor in tensors.items()}
        encoded = encode(wanted, codec)
        lost: dict[str, Tensor] = {}
        if codec != "fp32":
            decoded = decode(encoded, specs_of(wanted), codec)
            lost = {name: tensor.to(decoded[name].dtype) - decoded[name] for name, tensor in wanted.items()}
        self._take_out(tensors, self._before)
        self._before.update((name, self.residuals.pop(name)) for name in tensors if name in self.residuals)
        self.residuals.update(lost)
        self.relative_error = _norm(lost) / (_norm(wanted) or 1.0) if lost else 0.0
        return encoded

    def undo(self, names: Iterable[str]) -> None:
        """Undo the last encoding of these parameters, which was not counted: its input will be encoded again."""
        names = list(names)
        self._take_out(names, self.residuals)
        self.residuals.update((name, self._before.pop(name)) for name in names if name in self._before)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the residuals of these parameters: a submission that this process does not know contains them."""
        self._take_out(names, self.residuals)

    def _take_out(self, names: Iterable[str], tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name, None)

    def _with_residual(self, name: str, tensor: Tensor) -> Tensor:
        residual = self.residuals.get(name)
        return tensor if residual is None else tensor + residual

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The residuals by parameter, and those before the last encoding, for `undo`."""
        return {"residuals": dict(self.residuals), "before": dict(self._before)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Restore the residuals of another process.

        Raises:
            InvalidTensorsError: for a residual of a parameter that this model does not have, or of another shape.
        """
        for name, tensor in [*state["residuals"].items(), *state["before"].items()]:
            if tuple(tensor.shape) != shapes.get(name):
                raise InvalidTensorsError(
                    f"{name}: the checkpoint has a residual of shape {list(tensor.shape)}, but this model has "
                    f"{list(shapes[name]) if name in shapes else 'no such parameter'}; resume with the same model."
                )
        self.residuals = {name: tensor.cpu() for name, tensor in state["residuals"].items()}
        self._before = {name: tensor.cpu() for name, tensor in state["before"].items()}


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()) ** 0.5)
