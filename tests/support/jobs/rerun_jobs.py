"""What each of two ranks of the rerun test does; only rank 1 has suspicious results."""

from __future__ import annotations

from typing import Any

from onstep.config import DistributedInitConfig
from onstep.distributed import World, open_world
from onstep.training.rerun.machine import RerunStateMachine


def outcome(machine: RerunStateMachine, world: World, values: list[float]) -> list[Any]:
    """Runs, decision, diagnosis and the rank it names, for a step whose runs give `values` on rank 1."""
    runs = 0
    while machine.should_run_forward_backward():
        machine.validate_result(values[runs] if world.rank == 1 else 1.0, lambda value: value > 10, "large")
        runs += 1
    found = machine.diagnosis
    kind, rank = (found.kind.value, found.rejection.rank) if found else (None, None)
    return [runs, machine.should_checkpoint_and_exit(), kind, rank]


def job_decide(settings: dict[str, Any]) -> dict[str, Any]:
    world = open_world(DistributedInitConfig(device="cpu"))

    def machine(device: str) -> RerunStateMachine:
        return RerunStateMachine(world, "validate_results", device=f"{device}/{world.rank}")

    result = {"transient": outcome(machine("a"), world, [99.0, 1.0])}
    first = machine("a")
    result["in_place"] = outcome(first, world, [99.0, 99.0])
    for name, device in (("same_device", "a"), ("other_device", "b")):
        later = machine(device)
        later.load_state_dict(first.state_dict())
        result[name] = outcome(later, world, [1.0])
    world.close()
    return result
