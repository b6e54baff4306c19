"""Examines a held step: what `onstep rewind` shows, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from onstep.analysis.logs.decisions_log import EVERYDAY, FILE_NAME, decision_lines, read_decisions
from onstep.events.context import unwrap
from onstep.past.layers import LayerNorms, Means, Weights, largest_activations, norms_by_layer
from onstep.past.rewinding import Past
from onstep.past.samples import Sample
from onstep.training.stages.record import learning_rate

NEAR = 20
"""Decisions of so many steps before and after the step are shown."""


@dataclass
class StepView:
    """A step of the past, as far as this rank and what all ranks give to it."""

    run: str
    step: int
    epoch: float
    cost: str
    seconds: float
    """The time that repeating the steps took, without loading."""
    comparison: dict[str, Any]
    loss: float
    grad_norm: float | None
    clip_factor: float | None
    """By which clipping has multiplied the gradients; 1 for a step that was not clipped."""
    learning_rate: float | None
    loss_scale: float | None
    samples: list[Sample]
    layers: list[LayerNorms]
    num_means: int
    """The number of steps that the means of the layers are over."""
    decisions: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Its values for JSON."""
        return asdict(self)

    @property
    def ranked(self) -> list[Sample]:
        """The samples, the largest share of the step's loss first."""
        return sorted(self.samples, key=lambda one: -(one.share if one.share == one.share else float("inf")))


def examine(past: Past) -> StepView:
    """Examine the step that is held: samples, layers, decisions near it. Collective; the update is then applied.

    The model's weights are those after the step from then on; `past.next()` continues.
    """
    job, step, seconds = past.job, past.current, past.seconds
    norm = past.grad_norm
    gradients = norms_by_layer(past.gradients.items())
    clipped = float(torch.stack(list(gradients.values())).norm()) if gradients else 0.0
    rate = learning_rate(job.raw_optimizer)
    scaler = job.scaler
    scale = None if scaler is None else float(scaler.scale)
    samples = past.samples()
    activations: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    with torch.no_grad(), largest_activations(past.model, activations, logits):
        past.forward()
    weights = norms_by_layer(unwrap(past.model).named_parameters())
    before = Weights(past.model)
    loss, epoch = past.loss, float(job.run.trainer_state.epoch)
    past.finish_step()
    updates = before.update_norms()
    means = past.means
    layers = [
        LayerNorms(
            name=name,
            weight=float(weight),
            gradient=_number(gradients.get(name)) or 0.0,
            update=_number(updates.get(name)) or 0.0,
            mean_gradient=Means.mean(means.gradients, name),
            mean_update=Means.mean(means.updates, name),
            activation=_number(activations.get(name)),
            attention_logit=_number(logits.get(name)),
        )
        for name, weight in weights.items()
    ]
    comparison = past.comparison
    deviation = comparison.deviation
    return StepView(
        run=str(past.plan.directory),
        step=step.number,
        epoch=epoch,
        cost=past.plan.cost,
        seconds=seconds,
        comparison={
            "summary": comparison.summary,
            "is_equal": comparison.is_equal,
            "num_values": comparison.num_values,
            "steps": comparison.steps,
            "deviation": None if deviation is None else asdict(deviation),
            "causes": comparison.causes,
        },
        loss=loss,
        grad_norm=norm,
        clip_factor=None if norm is None else min(1.0, clipped / norm) if norm else 1.0,
        learning_rate=rate,
        loss_scale=scale,
        samples=samples,
        layers=layers,
        num_means=len(means.gradients),
        decisions=decisions_near(past),
        warnings=list(dict.fromkeys(past.warnings)),
    )


def decisions_near(past: Past) -> list[dict[str, Any]]:
    """The decisions and commands of the steps near the held one, in words, with their step."""
    path, step = past.plan.directory / FILE_NAME, past.plan.step
    found = []
    for one in read_decisions(path) if path.is_file() else ():
        at = one.get("step")
        if isinstance(at, int) and abs(at - step) <= NEAR and one.get("flag") not in EVERYDAY:
            found.append({"step": at, "text": " ".join(line.strip() for line in decision_lines(one))})
    return found


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)
