"""An anomaly: a step whose update is not applied, how it is reported and raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from onstep.errors import AnomalyError, NonFiniteError
from onstep.events import Request
from onstep.training.anomalies.bad_samples import Findings
from onstep.training.protocols import Metrics
from onstep.training.stages.agreement import shorten_ids

AUTHOR = "anomaly gate"


@dataclass(frozen=True)
class Anomaly:
    """A step whose update is not applied; the same on all ranks."""

    step: int
    what: str
    """For example "non-finite loss"."""
    action: str
    """raise | stop | skip | rollback"""
    loss: float
    grad_norm: float | None
    asked: Request | None = None
    """The callback's request, if the gate did not find the anomaly itself."""
    findings: Findings = field(default_factory=lambda: Findings([], []))

    @classmethod
    def of(cls, step: int, what: str, action: str, values: Mapping[str, float]) -> Anomaly:
        """An anomaly with these values of `loss` and possibly `grad_norm`."""
        return cls(step, what, action, values["loss"], values.get("grad_norm"))

    @classmethod
    def non_finite(cls, step: int, action: str, values: Mapping[str, float]) -> Anomaly:
        """An anomaly of a step whose loss or gradient is not finite."""
        what = "non-finite gradient" if math.isfinite(values["loss"]) else "non-finite loss"
        return cls.of(step, what, action, values)

    def __str__(self) -> str:
        return f"{self.what} at step {self.step}{self._where}"

    @property
    def _where(self) -> str:
        """What was found about the samples, as it follows the step."""
        if self.is_non_finite:
            return f": {self.findings}"
        return f"; worst: {', '.join(map(str, self.findings.worst))}" if self.findings.worst else ""

    @property
    def is_non_finite(self) -> bool:
        """Whether to look for the micro-batches at fault."""
        return self.what.startswith("non-finite")

    @property
    def is_spike(self) -> bool:
        """Whether to look for the samples with the largest losses."""
        return self.what.startswith("spike")

    def logs(self) -> Metrics:
        """The metrics sent to every tracker; unknown values are omitted."""
        logs = {
            "anomaly": self.what,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "action": self.action,
            "sample_ids": self.findings.sample_ids,
            "where": self._where.lstrip(":; ") or None,
        }
        return {key: value for key, value in logs.items() if value is not None}

    def request(self, flag: str, rank: int) -> Request:
        """The decision as recorded: a callback's own request, or one in the gate's name."""
        details = {
            "bad_step": self.step,
            "anomaly": self.what,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "sample_ids": self.findings.sample_ids,
        }
        if self.findings.worst:
            details["worst_samples"] = [asdict(one) for one in self.findings.worst]
        if self.asked is not None:
            return replace(self.asked, details={**self.asked.details, **details})
        return Request(flag, AUTHOR, "", str(self), rank, details)

    def error(self) -> AnomalyError | NonFiniteError:
        """The error raised by the policy `raise`."""
        untouched = f"the update was not applied and the weights are still those of step {self.step - 1}"
        if self.is_non_finite:
            return NonFiniteError(
                f"NaN or infinity in the loss or gradient norm of step {self.step}: {self.findings}. "
                f"train.on_nonfinite=raise: {untouched}. Inspect these samples, lower optimizer.lr, or skip such "
                f"steps with train.on_nonfinite=skip."
            )
        return AnomalyError(
            f"{self.what} at step {self.step}{self._where}. anomaly.on_spike=raise: {untouched}. Raise "
            f"anomaly.spike_threshold, or skip such steps with anomaly.on_spike=skip. Sample ids: "
            f"{self.findings.sample_ids}."
        )


def too_many(what: str, count: int, most: int, known: list[str]) -> AnomalyError:
    """The error of a run with more skips or rollbacks than allowed, listing them."""
    more = f" ({count - len(known)} earlier ones are not listed)" if count > len(known) else ""
    listed = "; ".join(map(shorten_ids, known))
    return AnomalyError(
        f"{count} {what}s exceed anomaly.max_{what}s={most}: {listed}{more}. The data or the learning rate is likely "
        f"at fault; inspect these samples, lower optimizer.lr, or raise anomaly.max_{what}s."
    )
