"""Applies a worker's own outer step at once, before the average of all workers is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from onstep.diloco.protocol.messages import Registered


class OwnSteps:
    """Steps of the outer optimizer on the pseudo-gradients of this worker alone, with a momentum of its own.

    A worker that has the version before a round continues from this version plus its share of its own step, and adds
    the difference to the round's version once that is there. The outer optimizer is linear: that is the published
    update, the last average of all with this worker's part in it replaced by the new one.

    Source: Kale, Douillard, Donchev 2025, "Eager Updates for Overlapped Communication and Computation in DiLoCo",
    algorithm 2.
    """

    def __init__(self) -> None:
        self.momenta: dict[str, Tensor] = {}
        """In float32 or float64, on the host: this rank's parts."""

    def ahead(
        self, base: Mapping[str, Tensor], gradients: Mapping[str, Tensor], num_workers: int, registered: Registered
    ) -> dict[str, Tensor]:
        """The parameters after this worker's part of the outer step that follows `base`.

        Args:
            base: the last version.
            gradients: the pseudo-gradient.
            num_workers: that the average is expected to have.
            registered: has the rates of the outer optimizer.
        """
        lr, momentum = registered.outer_lr / num_workers, registered.outer_momentum
        found = {}
        for name, gradient in gradients.items():
            before = self.momenta.get(name)
            self.momenta[name] = gradient if before is None else before * momentum + gradient
            found[name] = base[name] - lr * (gradient + momentum * self.momenta[name])
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Begin without momentum: the steps of these parameters did not count. The average will correct it."""
        for name in names:
            self.momenta.pop(name, None)
