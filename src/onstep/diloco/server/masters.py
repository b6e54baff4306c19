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

from onstep.diloco.codec.formats import decode_one, encode
from onstep.diloco.codec.specs import digest
from onstep.diloco.outer import OuterFactory
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.server.averaging import Contribution, average
from onstep.diloco.server.memory import Buffers, allocate
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
        buffers: has the memory of versions, and of submissions; None for its own.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        parameters: Mapping[str, Tensor],
        factory: OuterFactory,
        codec: str,
        buffers: Buffers | None = None,
    ) -> None:
        self._buffers = buffers or Buffers()
        self.specs = tuple(specs)
        self.codec = codec
        self._masters = allocate(self.specs, self._buffers)
        for name, master in self._masters.items():
            master.copy_(parameters[name].detach())
        self.optimizer: Optimizer = factory(list(self._masters.values()))
        first = self._copied(self._masters)
        self.newest = Version(0, first, digest(first))

    def step(self, contributions: list[Contribution]) -> Version:
        """The next version, after a step of the outer optimizer on the average; `newest` is still the old one.

        The contributions are removed from the list as soon as they are averaged, so that their memory is free.
        """
        self._set_gradients(contributions)
        contributions.clear()
        self.optimizer.step()
        for master in self._masters.values():
            master.grad = None
        parameters = allocate(self.specs, self._buffers)
        update = self._broadcast(parameters)
        return Version(self.newest.number + 1, parameters, digest(parameters), update)

    def forget_update(self) -> None:
        """Free the memory of the last update: workers that do not have it yet get all parameters."""
        self.newest = Version(self.newest.number, self.newest.parameters, self.newest.digest)

    def _set_gradients(self, contributions: Sequence[Contribution]) -> None:
        """Average, in the memory of a contribution that is not compressed, if there is one."""
        exact = next((one.encoded for one in contributions if one.codec == "fp32"), None)
        gradients = allocate(self.specs, self._buffers) if exact is None else exact
        average(contributions, self.specs, gradients)
        for name, master in self._masters.items():
            master.grad = gradients[name]

    def _broadcast(self, result: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Write what workers have after this step to `result`; returns what leads there."""
        if self.codec == "fp32":
            for name, master in self._masters.items():
                result[name].copy_(master)
            return None
        update: dict[str, Tensor] = {}
        for spec in self.specs:
            before, after = self.newest.parameters[spec.name], result[spec.name]
            torch.sub(self._masters[spec.name], before, out=after)
            encoded = encode({spec.name: after}, self.codec)
            torch.add(before, decode_one(encoded, spec, self.codec), out=after)
            update |= encoded
        return update

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = allocate(self.specs, self._buffers)
        for name, copy in copies.items():
            copy.copy_(tensors[name])
        return copies

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Learning rate, momentum and so on of each parameter group of the outer optimizer; JSON-safe."""
        return [
            {
                key: list(one) if isinstance(one, tuple) else one
                for key, one in group.items()
                if isinstance(one, (bool, int, float, str, tuple))
            }
            for group in self.optimizer.param_groups
        ]

    def set_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Change what `groups` gives, or a part of it."""
        for group, some in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: tuple(one) if isinstance(one, list) else one for key, one in some.items()})

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
        parameters = self._copied(state["broadcast"] or self._masters)
        self.newest = Version(state["version"], parameters, digest(parameters))
        if self.newest.digest != state["digest"]:
            raise CheckpointError("the parameters in the state of the server do not have the hash that they had.")
