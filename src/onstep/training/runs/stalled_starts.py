"""Ends a SLURM job that is requeued again and again, although none of its starts finishes a step."""

from __future__ import annotations

from onstep.errors import RunExistsError
from onstep.slurm.allocation import Allocation
from onstep.training.protocols import StateDict

STARTS = "starts_at_step"
"""Its key in run.json."""
_MOST = 5


def starts_at_step(content: StateDict, step: int) -> StateDict:
    """The entry of run.json that counts the starts of this SLURM job in a row that began at a step.

    It counts starts that were preempted: the script of a job requeues those without limit.

    Args:
        content: run.json as the start before has left it.
        step: that of the newest checkpoint.

    Returns:
        The entry; {} outside of SLURM.

    Raises:
        RunExistsError: if the last `_MOST` starts ended before they finished a step.
    """
    allocation = Allocation.of_process()
    if allocation is None:
        return {}
    before, count = content.get(STARTS), 1
    begun = {"job": allocation.job, "step": step}
    if content.get("status") == "preempted" and isinstance(before, dict) and before.items() >= begun.items():
        was_requeued, counted = before.get("restarts") != allocation.restarts, before.get("count")
        count = counted + 1 if was_requeued and isinstance(counted, int) else count
    if count > _MOST:
        raise RunExistsError(
            f"SLURM job {allocation.job} ends here: it was preempted {_MOST} times in a row at step {step}, before it "
            f"had finished another one. Submit it again with more time (--time), or a signal closer to the end "
            f"(--signal-seconds)."
        )
    return {STARTS: {**begun, "restarts": allocation.restarts, "count": count}}
