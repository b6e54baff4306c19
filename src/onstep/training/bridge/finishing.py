"""What a run still has open after its last evaluation, for those who drive `train()` themselves."""

from __future__ import annotations

from typing import Any

from onstep.training.bridge.global_state import GlobalState
from onstep.training.microbatches_calculator import unset_num_microbatches_calculator
from onstep.training.nvrx_straggler import safe_shutdown_nvrx_straggler_manager


def _finish_train(global_state: GlobalState, checkpoint_manager: Any = None) -> None:
    """Finish a run that went well: end measurements, make a pending save durable, close the trackers. Collective.

    `pretrain()` calls it after the final evaluations; inside of it the trackers and the micro-batch calculator stay
    until `on_run_end` is told.

    Args:
        global_state: the run's state.
        checkpoint_manager: an object with `finish()` in place of the run's own checkpoints; anything else, such as
            Megatron Bridge's dictionary, means those.
    """
    safe_shutdown_nvrx_straggler_manager(global_state.nvrx_straggler_manager)
    finishes = callable(getattr(checkpoint_manager, "finish", None))
    checkpoints = checkpoint_manager if finishes else global_state.checkpoints
    if checkpoints is not None:
        checkpoints.finish()
    if not global_state.trackers.is_held:
        global_state.trackers.close("completed")
    if not global_state.ending.in_run:
        unset_num_microbatches_calculator()
