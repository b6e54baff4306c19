"""Says before a model is built how much memory its training requires, and refuses what its device cannot hold."""

from __future__ import annotations

import logging

import torch

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.metrics.memory.fitting import check_gpu, check_machine, shown, summary
from onstep.metrics.memory.machine import machine_memory
from onstep.training.setup.family_memory import memory_estimator

logger = logging.getLogger(__name__)


def check_device_memory(config: ConfigContainer, world: World) -> None:
    """Log the estimate beside what this rank's device has, on the main rank; nothing if no formula is known.

    Raises:
        ConfigError: if the training cannot fit, with changes that would make it fit.
    """
    is_traced = config.model.hf_config is not None  # which lasts seconds, and knows no plan
    if config.validation.skip_train or (is_traced and (world.device.type == "cpu" or world.sizes.tp > 1)):
        return
    estimator = memory_estimator(config, device=world.device.type, ranks=world.data.size)
    estimate = estimator(config)
    if estimate is None:
        return
    if world.device.type == "cuda":
        free, there = torch.cuda.mem_get_info(world.device)
        name = torch.cuda.get_device_name(world.device)
        has, is_tight = f"{name} has {shown(there)}, {shown(free)} of it free", estimate.total > free
    else:
        machine = machine_memory()
        if machine is None:
            return
        has = f"this machine has {shown(machine.available)} available of {shown(machine.limit)}"
        is_tight = estimate.total > machine.available
    if world.is_main:
        logger.log(logging.WARNING if is_tight else logging.INFO, "%s", summary(estimate, has))
    if not config.run.check_memory:
        return
    if world.device.type == "cuda":
        check_gpu(config, estimate, there, name, estimator=estimator)
    elif machine is not None:
        check_machine(config, estimate, machine, estimator=estimator)
