"""Holds the tensors of a worker, each rank its parts: anchors, submitted parameters, residuals and momenta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from onstep.diloco.client.membership import ATTEMPTS, Tensors
from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.codec.specs import Digest
from onstep.diloco.worker.eager import OwnSteps
from onstep.diloco.worker.exchange import Exchange, Restored
from onstep.diloco.worker.fragment import Fate, Fragment
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.ranks import on_main
from onstep.distributed.world import World


class Holdings:
    """The tensors of a worker; bytes travel as from one process, since rank 0 encodes and decodes whole tensors.

    It has one whole tensor at a time, and the bodies of submissions and of versions. Methods are collective unless they
    say otherwise.

    Args:
        world: the ranks of the worker.
        parameters: of the model.
        names: of the parameters of each fragment.
        exchange: on rank 0; None on the others.
        keeps_submitted: whether a checkpoint has the parameters at submissions that are in flight.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        names: Sequence[Sequence[str]],
        exchange: Exchange | None,
        keeps_submitted: bool,
    ) -> None:
        self._world, self.parameters, self.exchange = world, parameters, exchange
        self._keeps_submitted = keeps_submitted
        self.feedback = ErrorFeedback()
        self._own_steps = OwnSteps()
        self.fragments = [Fragment({name: parameters.dtype(name) for name in sorted(group)}) for group in names]

    def open(self, index: int, state: Mapping[str, Any] | None) -> Restored:
        """Start from a fragment's newest version, which the model gets if none of its restored progress counts.

        Args:
            index: the fragment's.
            state: of the exchange in a checkpoint, on rank 0.

        Returns:
            See `Exchange.open`.
        """
        fragment = self.fragments[index]
        opened = partial(Exchange.open, index=index, state=state, has_submitted=bool(fragment.submitted))
        restored, correction = on_main(self._world, self.exchange, opened)
        if correction == "undo":
            self.feedback.undo(fragment.names)
        elif correction == "forget":
            self.feedback.forget(fragment.names)
        base = self._receive(index)
        if restored == "in flight":
            fragment.base = base
            self.deliver(index)
            return restored
        if fragment.submitted:  # of which the server has the result, or a later one
            self._own_steps.forget(fragment.names)
        fragment.advance(base)
        if restored == "nothing":
            self.parameters.write(fragment.names, base.__getitem__)
        return restored

    def submit(self, index: int, **amount: Any) -> None:
        """Encode the fragment's pseudo-gradient, and send it.

        Args:
            index: the fragment's.
            amount: see `Exchange.submit`.

        Raises:
            InvalidTensorsError: if the model is not finite.
        """
        fragment = self.fragments[index]
        local = self.parameters.read(fragment.names)
        self._encode(index, lambda name: fragment.start(name) - local[name])
        fragment.submitted = fragment.ahead = local
        base = fragment.base
        on_main(self._world, self.exchange, lambda exchange: exchange.submit(index, base, **amount))

    def go_ahead(self, index: int) -> None:
        """Apply this worker's own outer step to a fragment that was just submitted."""
        fragment = self.fragments[index]
        num_workers, registered = on_main(self._world, self.exchange, lambda exchange: exchange.outer(index))
        difference = {name: fragment.start(name) - local for name, local in fragment.submitted.items()}
        ahead = self._own_steps.ahead(fragment.base, difference, num_workers, registered)
        fragment.ahead = {name: fragment.rounded(name, value) for name, value in ahead.items()}
        self.parameters.write(fragment.names, fragment.ahead.__getitem__)

    def deliver(self, index: int) -> None:
        """Ask again for the result of a submission."""
        base = self.fragments[index].base
        on_main(self._world, self.exchange, lambda exchange: exchange.deliver(index, base))

    def merge(self, index: int, fate: Fate, has_moved: bool, local_share: float | None) -> None:
        """Let the model continue from the version that has arrived.

        Args:
            index: the fragment's.
            fate: of its submission.
            has_moved: whether a step was taken since the submission.
            local_share: see `Fragment.merged`.
        """
        fragment, parameters = self.fragments[index], self.parameters
        new = self._receive(index)
        now = parameters.read(fragment.names) if has_moved else {}
        parameters.write(
            fragment.names, lambda name: fragment.merged(name, new[name], now.get(name), fate, local_share)
        )
        if fate not in ("counted", "late"):
            self._own_steps.forget(fragment.names)
        if fate in ("outdated", "given up"):
            self.feedback.forget(fragment.names)
        elif fate == "dropped":
            self.feedback.undo(fragment.names)
        fragment.advance(new)
        on_main(self._world, self.exchange, lambda exchange: exchange.merge(index, fate, has_moved))

    def keep(self, index: int, *, tokens: int, steps: int, loss: float | None) -> None:
        """Keep the fragment's pending submission for the next start, and the later steps as one more.

        Args:
            index: the fragment's.
            tokens: of these steps.
            steps: since the submission.
            loss: of these steps.
        """
        fragment = self.fragments[index]
        on_main(self._world, self.exchange, lambda exchange: exchange.keep(index))
        if steps:
            now = self.parameters.read(fragment.names)
            self._encode(index, lambda name: fragment.ahead[name] - now[name])
            later = partial(Exchange.keep_later, index=index, tokens=tokens, steps=steps, loss=loss)
            on_main(self._world, self.exchange, later)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by parameter: DTensors on several ranks. Not collective.

        They are the residuals, those before the last encoding, and, of a run that overlaps, the momenta of this
        worker's own steps and the parameters at submissions in flight, and after its own step.
        """
        in_flight = self.fragments if self._keeps_submitted else []
        own: dict[str, dict[str, Tensor]] = {
            "residuals": self.feedback.residuals,
            "before": self.feedback.before,
            "momenta": self._own_steps.momenta,
            "submitted": {name: part for one in in_flight for name, part in one.submitted.items()},
            "ahead": {
                name: part for one in in_flight if one.ahead is not one.submitted for name, part in one.ahead.items()
            },
        }
        return {kind: self.parameters.parts.to_state(parts) for kind, parts in own.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue with what another process had, before `open`; see `Parts.from_state`."""
        parts = self.parameters.parts
        self.feedback.residuals = parts.from_state(state.get("residuals", {}))
        self.feedback.before = parts.from_state(state.get("before", {}))
        self._own_steps.momenta = parts.from_state(state.get("momenta", {}))
        submitted, ahead = (parts.from_state(state.get(kind, {})) for kind in ("submitted", "ahead"))
        for one in self.fragments:
            if all(name in submitted for name in one.names):
                one.submitted = {name: submitted[name] for name in one.names}
                has_own_step = all(name in ahead for name in one.names)
                one.ahead = {name: ahead[name] for name in one.names} if has_own_step else one.submitted

    def _encode(self, index: int, difference: Callable[[str], Tensor]) -> None:
        exchange, feedback, names = self.exchange, self.feedback, self.fragments[index].names
        codec = on_main(self._world, exchange, partial(Exchange.begin_encoding, index=index))

        def encoded(name: str, wanted: Tensor | None) -> Tensor | None:
            assert exchange is not None
            return exchange.encode(name, wanted)

        def corrected(name: str) -> Tensor:
            return feedback.corrected(name, difference(name))

        lost = self.parameters.parts.through_main(names, encoded, corrected, returns=codec != "fp32")
        feedback.replace(names, lost)

    def _receive(self, index: int) -> Tensors:
        """The version that has arrived, or a newer one if that is damaged.

        Raises:
            InvalidTensorsError: if its hash differs from the server's in every attempt.
        """
        world, exchange, fragment = self._world, self.exchange, self.fragments[index]
        attempts = 0
        while True:
            is_update = on_main(world, exchange, lambda exchange: exchange.arrived[index].is_update)
            attempts += not is_update
            digest = Digest()

            def new(name: str, base: Tensor | None, digest: Digest = digest) -> Tensor:
                assert exchange is not None
                version = exchange.arrived[index]
                value = version.parameters[name] if base is None else base + version.parameters[name]
                if version.digest:
                    digest.add(name, value)
                return value

            given = fragment.base.__getitem__ if is_update else None
            found = self.parameters.parts.through_main(fragment.names, new, given)
            accept = partial(Exchange.accept, index=index, digest=digest.text(), is_last=attempts == ATTEMPTS)
            if on_main(world, exchange, accept):
                return found
