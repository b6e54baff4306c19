"""Ends a run before an update if a gradient of a rank is NaN, infinite or unexpectedly large (`ddp.check_for_...`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onstep.config.suggestions import listed
from onstep.distributed.buffered import BufferedDataParallel
from onstep.distributed.data_parallel import FixedBuckets
from onstep.distributed.gradient_exchange import LocalGradients, Noted, notes_of
from onstep.distributed.shards import local_part
from onstep.errors import AnomalyError, NonFiniteError
from onstep.training.compute.largest_results import LargestResults
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict
from onstep.training.stages.job import Job

_NAMES_SHOWN, _IDS_SHOWN = 3, 8
_THRESHOLD = 10.0
"""Megatron-Core's: gradients are large if their norm is this many times the largest of the first 100."""


class Found(NamedTuple):
    """What is wrong with the gradients of one rank."""

    is_non_finite: bool
    text: str


def _notes_of(chunk: nn.Module) -> LocalGradients | None:
    """What a wrapper notes of gradients before the ranks exchange them; None if it does not."""
    return chunk.notes if isinstance(chunk, FixedBuckets | BufferedDataParallel) else None


class GradientChecks(Feature[Job]):
    """Checks this rank's gradients before each update.

    They are those from before the ranks exchanged them, of a model that `data_parallel` has wrapped; otherwise those
    that the update is about to use, which may be sums over the ranks: no samples are then to blame.
    """

    name = "gradient_checks"
    when = "ddp.check_for_nan_in_grad, ddp.check_for_large_grads"
    collective = True
    per_rank = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._run, self._options = host.run, host.run.cfg.ddp
        self._largest = LargestResults()
        self._is_own = all(_notes_of(chunk) is not None for chunk in host.model)
        self.has_state = self._options.check_for_large_grads

    def wrap_update(self, update: Callable[[Step], None]) -> Callable[[Step], None]:
        """Check before gradients are scaled and clipped. Collective; waits for the device."""

        def checked(step: Step) -> None:
            self._check(step)
            update(step)

        return checked

    def state_dict(self) -> StateDict:
        """The largest norm of the first steps."""
        return {"largest": self._largest.state_dict()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with saved values."""
        self._largest.load_state_dict(state_dict["largest"])

    def _check(self, step: Step) -> None:
        """Raise on all ranks if any has found something, naming it.

        Raises:
            NonFiniteError: for a gradient that is NaN or infinite.
            AnomalyError: for one that is unexpectedly large.
        """
        world, found = self._run.world, self._found(step)
        if world.agree([int(found is not None)]) == [0]:
            return
        everything = [one for one in world.gather(found) if one is not None]
        is_non_finite = any(one.is_non_finite for one in everything)
        key = "check_for_nan_in_grad" if is_non_finite else "check_for_large_grads"
        instead = "train.on_nonfinite" if is_non_finite else "anomaly.on_spike"
        error = NonFiniteError if is_non_finite else AnomalyError
        raise error(
            f"{'; '.join(one.text for one in everything)}. ddp.{key}=true: the update of step {step.number} was not "
            f"applied and the weights are still those of step {step.number - 1}. Inspect its samples, lower "
            f"optimizer.lr, or set ddp.{key}=false, by which {instead} decides."
        )

    def _found(self, step: Step) -> Found | None:
        """What is wrong with this rank's gradients. Reads the device."""
        noted, scaler = list(self._noted()), self.host.scaler
        adapts = scaler is not None and not scaler.is_constant  # an overflow is then no error, and lowers the scale
        largest = self._by_name((one.parameters, one.largest) for one in noted)
        bad = [name for name, value in largest.items() if not math.isfinite(value)]
        if bad and not adapts:
            return Found(True, f"the gradient of {listed(bad, _NAMES_SHOWN)} is {largest[bad[0]]}{self._place(step)}")
        norms = self._by_name((one.parameters, one.norms) for one in noted)
        norm = math.hypot(*norms.values()) / (1.0 if scaler is None else float(scaler.scale))
        if math.isnan(norm) or (adapts and math.isinf(norm)):
            return None
        before = self._largest.largest("grads")
        if norms and self._largest.is_exceeded(norm, _THRESHOLD, "grads"):
            return Found(
                False,
                f"the gradients have a norm of {norm:.6g}, more than {_THRESHOLD:g} times the largest of the first "
                f"steps ({before:.6g}), most of it of {max(norms, key=norms.__getitem__)}{self._place(step)}",
            )
        return None

    def _noted(self) -> Iterator[Noted]:
        """What is known of each gradient of this rank; of a model without notes, from the gradients as they are now."""
        for chunk in self.host.model:
            if (notes := _notes_of(chunk)) is not None:
                yield from notes.take()
                continue
            pairs = [(one, local_part(one.grad)) for one in chunk.parameters() if one.grad is not None]
            now = notes_of(self._options)
            if now is not None:
                now.add([one for one, _ in pairs], [grad for _, grad in pairs])
                yield from now.take()

    def _by_name(self, noted: Iterable[tuple[list[Tensor], Tensor | None]]) -> dict[str, float]:
        """The numbers by the parameters' names, in the order of the model."""
        known = [(parameters, values) for parameters, values in noted if values is not None]
        if not known:
            return {}
        numbers = torch.cat([values.double() for _, values in known]).tolist()
        identities = [id(one) for parameters, _ in known for one in parameters]
        found = dict(zip(identities, numbers, strict=True))
        names = {id(one): name for chunk in self.host.model for name, one in chunk.named_parameters()}
        return {name.removeprefix("module."): found[one] for one, name in names.items() if one in found}

    def _place(self, step: Step) -> str:
        """The rank and, if what it found is of its own samples, these, as they end a sentence."""
        if self._run.world.size > 1 and not self._is_own:
            return f" on {self._run.world.place()}, perhaps by samples of other ranks"
        ids = [str(one) for row in step.batches.sample_ids or [] for one in row]
        return f" on {self._run.world.place()}" + (f" (sample ids {listed(ids, _IDS_SHOWN)})" if ids else "")
