"""Holds the parameters of the server: masters that the outer optimizer steps, and what every worker has of them.

A lossy codec cannot send the masters exactly. So the server also keeps the *broadcast* parameters: those that every
worker has. After an outer step it encodes the difference `master - broadcast` once, and adds to the broadcast
parameters what workers will decode. All workers have the same bits, and what the codec loses in one round is part of
the difference in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from onstep.checkpoint.format.tensor_header import DTYPES_BY_NAME
from onstep.diloco.codec.blocks import CHUNK_VALUES
from onstep.diloco.codec.formats import encode_part, encoded_specs, is_finite
from onstep.diloco.codec.specs import Digest, InvalidTensorsError, digest
from onstep.diloco.outer import DelayedNesterov, OuterFactory, SgdPieces, check_rates, steps_in_pieces
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.server.averaging import Averages, Contribution
from onstep.diloco.server.memory import Buffers, allocate
from onstep.errors import CheckpointError, OnstepError


@dataclass(frozen=True)
class Version:
    """One version of a fragment, as workers get it. Its tensors never change."""

    number: int
    parameters: Mapping[str, Tensor]
    """By name, in float32 or float64."""
    digest: str
    update: Mapping[str, Tensor] | None = None
    """What to add to the version before, encoded; None if it is not known, or the codec is exact."""


Mover = Callable[[int, Tensor], None]
"""Moves the elements of a parameter from an index on by an average, whose memory it may use."""

_STEP_BY_PARTS = (Adam, AdamW, DelayedNesterov)
"""Outer optimizers that step each parameter by itself: not all gradients need be in memory together."""
_PART_VALUES = 1 << 22
"""Elements of a part."""


class NotFiniteError(OnstepError):
    """An outer step led to values that are NaN or infinite; the fragment has to be restored."""


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
        self._masters = allocate(self.specs, Buffers())
        self._scratch = Buffers()
        for name, master in self._masters.items():
            master.copy_(parameters[name].detach())
        self.optimizer: Optimizer = factory(list(self._masters.values()))
        check_rates(self.optimizer)
        first = self._copied(self._masters)
        self.newest = Version(0, first, digest(first, self._buffers.release))

    def step(self, contributions: list[Contribution], is_mean: bool = False) -> Version:
        """The next version, after a step of the outer optimizer on the average; `newest` is still the old one.

        With `is_mean`, the parameters move by the whole average, whatever the scale of a contribution, and the outer
        optimizer starts without a state: that is from long before.

        The contributions are removed from the list, so that their memory is free.

        Raises:
            NotFiniteError: if a value of the result, or of the optimizer's state, is NaN or infinite. Then the fragment
                is of no use until `load_state_dict` or `begin_again`.
        """
        if is_mean:
            contributions[:] = [replace(one, scale=1.0) for one in contributions]
        try:
            if is_mean or steps_in_pieces(self.optimizer):
                return self._finished(self._movers(is_mean), contributions)
            self._step_by_parts(contributions)
            self._check_state()
            return self._finished({}, [])
        finally:
            contributions.clear()
            if is_mean:
                self.optimizer.state.clear()

    def _movers(self, is_mean: bool) -> dict[str, Mover]:
        """What moves a piece of each parameter by a piece of the average."""
        if is_mean:
            return {name: partial(_subtract, master.view(-1)) for name, master in self._masters.items()}
        groups = {id(one): group for group in self.optimizer.param_groups for one in group["params"]}
        return {
            name: SgdPieces(master, groups[id(master)], self.optimizer.state[master]).step
            for name, master in self._masters.items()
        }

    def _finished(self, movers: Mapping[str, Mover], contributions: Sequence[Contribution]) -> Version:
        """The version after a step, in one pass over pieces that stay in the processor's cache.

        Args:
            movers: move the masters piece by piece; without any, the masters were moved before.
            contributions: by whose average the masters move.
        """
        after = allocate(self.specs, self._buffers)
        update = None if self.codec == "fp32" else self._empty_update()
        hasher, averages = Digest(), Averages(contributions)
        for spec in self.specs:
            name, master = spec.name, self._masters[spec.name].view(-1)
            for start in range(0, master.numel(), CHUNK_VALUES):
                piece = master[start : start + CHUNK_VALUES]
                if name in movers:
                    movers[name](start, averages.piece(spec, start, piece.numel(), piece.dtype))
                work = averages.work(piece.dtype)[:, : piece.numel()]
                self._publish(spec, start, piece, after[name].view(-1)[start : start + CHUNK_VALUES], update, work)
            hasher.add(name, after[name])
            self._release(spec, after, contributions)
        return Version(self.newest.number + 1, after, hasher.text(), update)

    def _publish(
        self,
        spec: ParameterSpec,
        start: int,
        master: Tensor,
        after: Tensor,
        update: Mapping[str, Tensor] | None,
        work: Tensor,
    ) -> None:
        """Write what workers have after this step to `after`, and what leads there to `update`.

        A momentum that is not finite makes its master so: that is not looked at.
        """
        if update is None:
            self._require_finite(spec.name, master)
            after.copy_(master)
            return
        before = self.newest.parameters[spec.name].view(-1)[start : start + CHUNK_VALUES]
        difference, decoded = work
        torch.sub(master, before, out=difference)
        try:
            encode_part(difference, spec, self.codec, start, update, decoded)
        except InvalidTensorsError:
            self._require_finite(spec.name, master)
            raise
        torch.add(decoded, before, out=after)

    def _empty_update(self) -> dict[str, Tensor]:
        specs = encoded_specs(self.specs, self.codec)
        return {one.name: torch.empty(one.shape, dtype=DTYPES_BY_NAME[one.dtype]) for one in specs}

    def _release(self, spec: ParameterSpec, after: Mapping[str, Tensor], contributions: Sequence[Contribution]) -> None:
        """Let the system take away what the next parameters do not need."""
        self._buffers.release(after[spec.name])
        self._buffers.release(self.newest.parameters[spec.name])
        for one in contributions:
            self._buffers.release(one.encoded[spec.name])

    def _step_by_parts(self, contributions: Sequence[Contribution]) -> None:
        """Step an optimizer of any kind, with as few gradients in memory as it allows."""
        averages = Averages(contributions)
        for part in _parts(self.specs) if type(self.optimizer) in _STEP_BY_PARTS else [self.specs]:
            self._set_gradients(part, averages, contributions)
            self.optimizer.step()
            for spec in part:
                self._masters[spec.name].grad = None
                for one in contributions:
                    self._buffers.release(one.encoded[spec.name])

    def forget_update(self) -> None:
        """Free the memory of the last update: workers that do not have it yet get all parameters."""
        self.newest = Version(self.newest.number, self.newest.parameters, self.newest.digest)

    def begin_again(self) -> None:
        """Continue from what the workers have, with an outer optimizer that has no state yet."""
        for name, master in self._masters.items():
            master.copy_(self.newest.parameters[name])
        self.optimizer.state.clear()

    def _check_state(self) -> None:
        for name, master in self._masters.items():
            for one in self.optimizer.state.get(master, {}).values():
                if isinstance(one, Tensor):
                    self._require_finite(name, one)

    def _require_finite(self, name: str, tensor: Tensor) -> None:
        if not is_finite(tensor):
            rates = ", ".join(f"{key} {self.groups[0].get(key)}" for key in ("lr", "momentum"))
            raise NotFiniteError(f"the outer step made {name} NaN or infinite (outer {rates})")

    def _set_gradients(
        self, specs: Sequence[ParameterSpec], averages: Averages, contributions: Sequence[Contribution]
    ) -> None:
        """Average, in the memory of a contribution that is not compressed, if there is one."""
        exact = next((one.encoded for one in contributions if one.codec == "fp32"), None)
        gradients = allocate(specs, self._scratch) if exact is None else exact
        averages.write(specs, gradients)
        for name in [spec.name for spec in specs]:
            self._masters[name].grad = gradients[name]

    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = allocate(self.specs, self._buffers)
        for name, copy in copies.items():
            copy.copy_(tensors[name])
            self._buffers.release(copy)
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
                "the saved outer state is of other parameters; start with the model and the number of fragments "
                "that it had."
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        parameters = self._copied(state["broadcast"] or self._masters)
        self.newest = Version(state["version"], parameters, digest(parameters, self._buffers.release))
        if self.newest.digest != state["digest"]:
            raise CheckpointError("the parameters in the saved outer state do not have the hash that they had.")


def _subtract(master: Tensor, start: int, average: Tensor) -> None:
    master[start : start + average.numel()].sub_(average)


def _parts(specs: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    """The parameters in parts of a few million elements."""
    parts: list[list[ParameterSpec]] = [[]]
    size = 0
    for spec in specs:
        if parts[-1] and size + math.prod(spec.shape) > _PART_VALUES:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += math.prod(spec.shape)
    return parts
