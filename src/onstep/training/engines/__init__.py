"""Engines: how the forward and backward passes of a step's micro-batches are run; the loop calls that of its job."""

from onstep.training.engines.engine import Engine, engine_of

__all__ = ["Engine", "engine_of"]
