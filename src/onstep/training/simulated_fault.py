"""A rank that fails on purpose, to try what watches for it."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading

from onstep.config.watching import FaultToleranceConfig
from onstep.distributed import World

logger = logging.getLogger(__name__)

_SIGNALS = {"rank_killed": signal.SIGKILL, "rank_hung": signal.SIGSTOP}


def plan_fault(config: FaultToleranceConfig, world_size: int, draw: random.Random) -> tuple[int, str, float]:
    """Which rank fails, how, and after how many seconds: what the configuration leaves open is drawn."""
    kind = config.simulated_fault_type
    kind = draw.choice(sorted(_SIGNALS)) if kind == "random" else kind
    rank = config.simulated_fault_rank
    rank = draw.randrange(world_size) if rank is None else rank
    return rank, kind, config.simulated_fault_base_delay * (1.0 + 0.2 * draw.random())


def simulate_fault(config: FaultToleranceConfig, world: World) -> None:
    """Let one rank be killed or stopped after a while, by a thread of its own. Collective.

    Drawn from the system's generator: the run's own are not touched.
    """
    rank, kind, delay = world.share(plan_fault(config, world.size, random.SystemRandom()))
    if world.is_main:
        logger.warning("ft.simulate_fault: rank %d will fail (%s) in %.1f seconds", rank, kind, delay)
    if world.rank != rank:
        return
    fails = threading.Timer(delay, os.kill, (os.getpid(), _SIGNALS[kind]))
    fails.name, fails.daemon = "onstep-simulated-fault", True
    fails.start()
