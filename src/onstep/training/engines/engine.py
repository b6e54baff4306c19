"""Chooses what runs the passes of a job, and refuses features that ask more of it than it gives."""

from __future__ import annotations

from typing import Protocol

from onstep.distributed.pipeline.seats import is_staged
from onstep.errors import ConfigError
from onstep.training.compute.step import Step
from onstep.training.engines.loop_engine import LoopEngine
from onstep.training.feature import Need
from onstep.training.stages.job import Job

_NEEDS: dict[Need, str] = {
    "loss": "a loss of each micro-batch on every rank",
    "backward": "a backward pass right after each forward pass",
    "replay": "steps that can be run again",
}


class Engine(Protocol):
    """Runs the forward and backward passes of steps."""

    gives: frozenset[Need]
    """What features may rely on."""
    name: str
    """What an error calls it."""

    def compute(self, step: Step) -> None:
        """Run forward and backward of each micro-batch, and exchange the gradients.

        Afterwards `step.micros` has the losses of the micro-batches in their order, or nothing on a rank whose part of
        the model ends in no loss.
        """
        ...


def engine_of(job: Job) -> Engine:
    """The engine for a job's model. Call it when the features of the run are built: they wrap its passes.

    Raises:
        ConfigError: if a feature of the run relies on what the engine does not give.
    """
    engine: Engine
    if is_staged(job.model):
        from onstep.training.engines.pipeline_engine import PipelineEngine

        engine = PipelineEngine(job)
    else:
        engine = LoopEngine(job)
    check_needs(job, engine)
    return engine


def check_needs(job: Job, engine: Engine) -> None:
    """Refuse (ConfigError) features that rely on what the engine does not give."""
    for feature in job.run.features.built:
        for need in feature.needs_of_engine:
            if need not in engine.gives:
                raise ConfigError(
                    f"the feature {feature.name} requires {_NEEDS[need]}, which {engine.name} does not have; switch it "
                    f"off ({feature.when}), or train without a pipeline."
                )
