"""Kills or stops a rank after a while, to rehearse what follows."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading

from onstep.config import FaultToleranceConfig
from onstep.distributed import World

logger = logging.getLogger(__name__)


_SIGNALS = {"rank_killed": signal.SIGKILL, "rank_hung": signal.SIGSTOP}


def plan_fault(config: FaultToleranceConfig, world_size: int, draw: random.Random) -> tuple[int, str, float]:
    """The rank to fail, the kind of failure and the delay in seconds; settings left open are drawn at random."""
    kind = config.simulated_fault_type
    kind = draw.choice(sorted(_SIGNALS)) if kind == "random" else kind
    rank = config.simulated_fault_rank
    rank = draw.randrange(world_size) if rank is None else rank
    return rank, kind, config.simulated_fault_base_delay * (1.0 + 0.2 * draw.random())


def simulate_fault(config: FaultToleranceConfig, world: World) -> None:
    """Kill or stop one rank after a delay, from a separate thread. Collective.

    Draws from the system's generator: the run's generators are not touched.
    """
    rank, kind, delay = world.share(plan_fault(config, world.size, random.SystemRandom()))
    if world.is_main:
        logger.warning("ft.simulate_fault: rank %d will fail (%s) in %.1f seconds", rank, kind, delay)
    if world.rank != rank:
        return
    fails = threading.Timer(delay, os.kill, (os.getpid(), _SIGNALS[kind]))
    fails.name, fails.daemon = "onstep-simulated-fault", True
    fails.start()
