"""An anomaly: what was wrong with one step, and how it is told, recorded and raised."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from onstep.errors import AnomalyError, NonFiniteError
from onstep.events import Request
from onstep.training.culprits import Findings

AUTHOR = "anomaly gate"
IDS_SHOWN = 12
"""Sample ids of one list that an error about several steps shows; the sinks have them all."""
_IDS = re.compile(r"\[(-?\d+(?:, -?\d+)+)\]")


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

    def __str__(self) -> str:
        where = f": {self.findings}" if self.is_non_finite else ""
        return f"{self.what} at step {self.step}{where}"

    @property
    def is_non_finite(self) -> bool:
        """Whether there are culprits to look for."""
        return self.what.startswith("non-finite")

    def logs(self) -> dict[str, Any]:
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
