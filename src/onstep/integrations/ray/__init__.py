"""Runs inside Ray Train: `RayReport` reports a run to Ray, `run_command` is a training function that runs a command."""

from onstep.integrations.ray.ranks import run_command
from onstep.integrations.ray.report import RayReport, checkpoint_of, is_in_ray_train

__all__ = ["RayReport", "checkpoint_of", "is_in_ray_train", "run_command"]
