"""Holds the parameters of the server: masters that the outer optimizer steps, and what every worker has of them.

A lossy codec cannot send the masters exactly. So the server also keeps the *broadcast* parameters: those that every
worker has. After an outer step it encodes the difference `master - broadcast` once, and adds to the broadcast
parameters what workers will decode. All workers have the same bits, and what the codec loses in one round is part of
the difference in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onstep.diloco.codec import decode_one, digest, encode, master_dtype
from onstep.diloco.outer import OuterFactory
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import CheckpointError


@dataclass(frozen=True)
class Version:
    """One version of a fragment, as workers get it. Its tensors never change."""

    number: int
    parameters: Mapping[str, Tensor]
    """By name, in float32 or float64."""
    digest: str
    update: Mapping[str, Tensor] | None = None
    """What to add to the version before, encoded; None if it is not known, or the codec is exact."""


class Fragment:
    """The parameters of one fragment. Not thread-safe, except for `newest`.

    Args:
        specs: the parameters; the dtype decides between float32 and float64.
        parameters: their first values, which are copied.
        factory: makes the outer optimizer.
        codec: of updates.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], parameters: Mapping[str, Tensor], factory: OuterFactory, codec: str
    ) -> None:
        self.specs = tuple(specs)
        self.codec = codec
        self._masters = {spec.name: _master(parameters[spec.name], spec) for spec in specs}
        self.optimizer: Optimizer = factory(list(self._masters.values()))
        first = {name: tensor.clone() for name, tensor in self._masters.items()}
        self.newest = Version(0, first, digest(first))

    def step(self, gradients: dict[str, Tensor]) -> Version:
        """The next version, after a step of the outer optimizer; `newest` is still the old one.

        The gradients are taken out of the dictionary, so that their memory is free before the version needs its own.
        """
        for name, master in self._masters.items():
            master.grad = gradients.pop(name)
        self.optimizer.step()
        for master in self._masters.values():
            master.grad = None
        parameters, update = self._broadcast()
        return Version(self.newest.number + 1, parameters, digest(parameters), update)

    def forget_update(self) -> None:
        """Free the memory of the last update: workers that do not have it yet get all parameters."""
        self.newest = Version(self.newest.number, self.newest.parameters, self.newest.digest)

    def _broadcast(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """What workers have after this step, and what leads there."""
        if self.codec == "fp32":
            return {name: master.clone() for name, master in self._masters.items()}, None
        parameters: dict[str, Tensor] = {}
        update: dict[str, Tensor] = {}
        for spec in self.specs:
            before = self.newest.parameters[spec.name]
            encoded = encode({spec.name: self._masters[spec.name] - before}, self.codec)
            parameters[spec.name] = before + decode_one(encoded, spec, self.codec)
            update |= encoded
        return parameters, update

    def state_dict(self, version: Version) -> dict[str, Any]:
        """Everything, with the version that is about to be the newest; shares the memory of its tensors."""
        return {
            "masters": dict(self._masters),
            "broadcast": {} if self.codec == "fp32" else dict(version.parameters),
            "optimizer": self.optimizer.state_dict(),
            "names": list(self._masters),
            "version": version.number,
            "digest": version.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            CheckpointError: if it is of other parameters, or does not have the hash that it had.
        """
        if state["names"] != list(self._masters):
            raise CheckpointError(
                "the state of the server is of other parameters; start it with the model, the number of fragments and "
                "the share that it had."
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        parameters = state["broadcast"] or {name: master.clone() for name, master in self._masters.items()}
        self.newest = Version(state["version"], parameters, digest(parameters))
        if self.newest.digest != state["digest"]:
            raise CheckpointError("the parameters in the state of the server do not have the hash that they had.")

    def masters(self) -> dict[str, Tensor]:
        """Copies of the masters."""
        return {name: master.detach().clone() for name, master in self._masters.items()}


def _master(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    return tensor.detach().to("cpu", master_dtype(spec.dtype), copy=True).contiguous()
