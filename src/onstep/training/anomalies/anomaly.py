"""An anomaly: what is wrong with a step (not finite, or a spike), who is to blame, and how it is told and raised."""

from __future__ import annotations

import logging
import math
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch
from torch import nn

from onstep.config.parts import AnomalyConfig
from onstep.distributed import no_sync
from onstep.errors import AnomalyError, NonFiniteError
from onstep.events import Request
from onstep.training.compute.losses import MicroLoss
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.protocols import Metrics, StateDict
from onstep.training.stages.forward_backward import backward_start_of, forward_of
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation.
Source: Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993), equation 1.2."""
_LEAST_SPREAD = 0.01
"""A spread below this share of the median counts as this much: of losses that hardly differ, noise is no spike."""
AUTHOR = "anomaly gate"
IDS_SHOWN = 12
"""Sample ids of one list that an error about several steps shows; the sinks have them all."""
_IDS = re.compile(r"\[(-?\d+(?:, -?\d+)+)\]")


@dataclass(frozen=True)
class Culprit:
    """A micro-batch of one rank whose loss or gradient is not finite."""

    rank: int
    micro_batch: int
    found: str
    """What is not finite, with its value: "loss nan", "gradient norm inf"."""
    sample_ids: list[int] | None
    is_empty: bool = False
    """The micro-batch has no labels."""

    def __str__(self) -> str:
        ids = "" if self.sample_ids is None else f", sample ids {self.sample_ids}"
        empty = ", no labels in it" if self.is_empty else ""
        return f"rank {self.rank}, micro-batch {self.micro_batch}: {self.found}{ids}{empty}"


@dataclass(frozen=True)
class Findings:
    """What all ranks know of a bad step; the same on every rank."""

    culprits: list[Culprit]
    ids_by_rank: list[list[list[int]] | None]
    """Sample ids of every rank's micro-batches; None where samples have no index."""

    @property
    def sample_ids(self) -> list[int] | None:
        """The samples to blame: of the bad micro-batches, else of the whole step; None where there are no ids."""
        if any(ids is None for ids in self.ids_by_rank):
            return None
        of_culprits = [one for culprit in self.culprits for one in culprit.sample_ids or []]
        of_all = [one for micros in self.ids_by_rank for ids in micros or [] for one in ids]
        return sorted(set(of_culprits or of_all))

    def __str__(self) -> str:
        if self.culprits:
            return "; ".join(map(str, self.culprits))
        ranks = [f"rank {rank}, sample ids {ids}" for rank, ids in enumerate(self.ids_by_rank) if ids]
        return (
            "every local loss was finite, so a gradient overflowed or became NaN in the backward pass"
            + " of " * bool(ranks)
            + "; ".join(ranks)
        )


@dataclass(frozen=True)
class Anomaly:
    """A step whose update is not applied, the same on all ranks."""

    step: int
    what: str
    """For example "non-finite loss"."""
    action: str
    """raise | stop | skip | rollback"""
    loss: float
    grad_norm: float | None
    asked: Request | None = None
    """The callback's request, where it was not the gate's own finding."""
    findings: Findings = field(default_factory=lambda: Findings([], []))

    @classmethod
    def of(cls, step: int, what: str, action: str, values: Mapping[str, float]) -> Anomaly:
        """One of a step with these values of `loss` and perhaps `grad_norm`."""
        return cls(step, what, action, values["loss"], values.get("grad_norm"))

    @classmethod
    def non_finite(cls, step: int, action: str, values: Mapping[str, float]) -> Anomaly:
        """One of a step whose loss or gradient is not finite."""
        what = "non-finite gradient" if math.isfinite(values["loss"]) else "non-finite loss"
        return cls.of(step, what, action, values)

    def __str__(self) -> str:
        where = f": {self.findings}" if self.is_non_finite else ""
        return f"{self.what} at step {self.step}{where}"

    @property
    def is_non_finite(self) -> bool:
        """Whether there are culprits to look for."""
        return self.what.startswith("non-finite")

    def logs(self) -> Metrics:
        """What every sink is shown; a value that is not known is left out."""
        logs = {
            "anomaly": self.what,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "action": self.action,
            "sample_ids": self.findings.sample_ids,
            "where": str(self.findings) if self.is_non_finite else None,
        }
        return {key: value for key, value in logs.items() if value is not None}

    def request(self, flag: str, rank: int) -> Request:
        """The decision as the trace keeps it: a callback's own request, or one in the gate's name."""
        details = {
            "bad_step": self.step,
            "anomaly": self.what,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "sample_ids": self.findings.sample_ids,
        }
        if self.asked is not None:
            return replace(self.asked, details={**self.asked.details, **details})
        return Request(flag, AUTHOR, "", str(self), rank, details)

    def error(self) -> AnomalyError | NonFiniteError:
        """What the policy `raise` raises."""
        untouched = f"the update was not applied and the weights are those of step {self.step - 1}"
        if self.is_non_finite:
            return NonFiniteError(
                f"NaN or infinity in the loss or gradient norm of step {self.step}: {self.findings}. "
                f"train.on_nonfinite=raise: {untouched}. Look at these samples, lower optimizer.lr, or leave such "
                f"steps out with train.on_nonfinite=skip."
            )
        return AnomalyError(
            f"{self.what} at step {self.step}. anomaly.on_spike=raise: {untouched}. Raise anomaly.spike_threshold, "
            f"or leave such steps out with anomaly.on_spike=skip. Sample ids: {self.findings.sample_ids}."
        )


def too_many(what: str, count: int, most: int, known: list[str]) -> AnomalyError:
    """The error of a run with more skips or rollbacks than it may have, naming them."""
    more = f" ({count - len(known)} earlier ones are not listed)" if count > len(known) else ""
    listed = "; ".join(map(shorten_ids, known))
    return AnomalyError(
        f"{count} {what}s are more than anomaly.max_{what}s={most}: {listed}{more}. The data or the "
        f"learning rate is at fault; look at these samples, lower optimizer.lr, or raise anomaly.max_{what}s."
    )


def shorten_ids(text: str) -> str:
    """The text with every list of sample ids cut to its first `IDS_SHOWN` and a count."""

    def cut(match: re.Match[str]) -> str:
        ids = match[1].split(", ")
        if len(ids) <= IDS_SHOWN:
            return match[0]
        return f"[{', '.join(ids[:IDS_SHOWN])}, ... and {len(ids) - IDS_SHOWN} more]"

    return _IDS.sub(cut, text)


def investigate(job: Job, micros: list[MicroLoss], sample_ids: list[list[int]] | None, step: Step | None) -> Findings:
    """Find out which micro-batches of which ranks are to blame. Collective.

    Where every local loss is finite and the weights are still those of the step (which is given), each rank computes
    the gradient of each of its micro-batches again, without reducing it.
    """
    world = job.run.world
    by_rank = world.gather((_bad_losses(world.rank, micros, sample_ids), sample_ids))
    culprits = [culprit for found, _ in by_rank for culprit in found]
    if not culprits and step is not None:
        found_again = world.gather(_bad_gradients(job, step, sample_ids))
        culprits = [culprit for found in found_again for culprit in found]
    return Findings(culprits, [ids for _, ids in by_rank])


def _bad_losses(rank: int, micros: list[MicroLoss], sample_ids: list[list[int]] | None) -> list[Culprit]:
    """Losses that are not finite; a mean over no labels is NaN, and to blame only where no other is."""
    bad = [number for number, micro in enumerate(micros) if not math.isfinite(float(micro.loss))]
    with_labels = [number for number in bad if float(micros[number].weight) != 0]
    return [
        Culprit(
            rank,
            number,
            f"loss {float(micros[number].loss)}",
            None if sample_ids is None else sample_ids[number],
            is_empty=not float(micros[number].weight),
        )
        for number in with_labels or bad
    ]


def _bad_gradients(job: Job, step: Step, sample_ids: list[list[int]] | None) -> list[Culprit]:
    world = job.run.world
    try:
        with _random_state_kept(world.device), job.run.features.pause("replay"):
            norms = list(_gradient_norms(job, step))
    except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer; without one less is named
        logger.warning("the gradients of the bad step could not be computed again: %s: %s", type(error).__name__, error)
        return []
    finally:
        _drop_gradients(job.model)
    return [
        Culprit(world.rank, number, f"gradient norm {norm}", None if sample_ids is None else sample_ids[number])
        for number, norm in enumerate(norms)
        if not math.isfinite(norm)
    ]


def _gradient_norms(job: Job, step: Step) -> Iterator[float]:
    """The gradient norm of each micro-batch on this rank."""
    model, forward = job.model, forward_of(job)
    iterator = MicroBatches(step.batches, job.run.world.device)
    for index in range(len(iterator)):
        _drop_gradients(model)
        batch = iterator.stage(index)
        with no_sync(model):
            micro = forward(iterator, batch, step.batches.is_filler[index])
            micro.backward(backward_start_of(job, micro, len(iterator)))
        grads = [p.grad for chunk in model for p in chunk.parameters() if p.grad is not None]
        yield float(torch.stack(torch._foreach_norm(grads)).norm()) if grads else 0.0


def _drop_gradients(model: list[nn.Module]) -> None:
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.grad = None


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the random generators as they are: what follows must not depend on whether something was recomputed."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@dataclass(frozen=True)
class Spike:
    """A value above its limit."""

    metric: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} above {self.limit:.6g} (median of the last steps {self.median:.6g})"


class SpikeDetector:
    """Compares each step's values with median and median absolute deviation of the last accepted steps.

    A step is a spike when a watched value lies more than `spike_threshold` robust standard deviations above the median
    of the last `spike_window` accepted steps; values that fall are none. Spikes are not accepted, so that they do not
    raise the limit. The first `spike_warmup` accepted steps are never spikes.

    The values must be the same on all ranks; then so is what is found.
    """

    def __init__(self, config: AnomalyConfig) -> None:
        self._threshold = config.spike_threshold
        self._warmup = config.spike_warmup
        self._window: dict[str, deque[tuple[int, float]]] = {
            metric: deque(maxlen=config.spike_window) for metric in config.spike_metrics
        }
        self._num_accepted = 0

    def find(self, values: Mapping[str, float]) -> Spike | None:
        """The first watched value that is a spike; None where there is none, or too few steps are known."""
        if self._num_accepted < self._warmup:
            return None
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if not window or math.isnan(value):
                continue
            center = median(one for _, one in window)
            spread = _TO_SIGMA * median(abs(one - center) for _, one in window)
            limit = center + self._threshold * max(spread, _LEAST_SPREAD * abs(center))
            if value > limit:
                return Spike(metric, value, center, limit)
        return None

    def accept(self, step: int, values: Mapping[str, float]) -> None:
        """Take up the values of a step whose update is applied; those that are not finite are left out."""
        self._num_accepted += 1
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if math.isfinite(value):
                window.append((step, value))

    def forget_after(self, step: int) -> None:
        """Drop the values of later steps, which a rollback has undone."""
        for metric, window in self._window.items():
            self._window[metric] = deque((one for one in window if one[0] <= step), maxlen=window.maxlen)

    def state_dict(self) -> StateDict:
        """The accepted values, with their steps."""
        window = {metric: [list(one) for one in values] for metric, values in self._window.items()}
        return {"num_accepted": self._num_accepted, "window": window}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with saved values; a metric that was not watched then starts anew."""
        self._num_accepted = state_dict["num_accepted"]
        for metric, window in self._window.items():
            window.clear()
            window.extend((int(step), float(value)) for step, value in state_dict["window"].get(metric, []))
