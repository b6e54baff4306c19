"""The training layer: one loop that fires events, and everything that it calls.

`pretrain(config, forward_step)` trains a language model from a configuration, `train()` trains what it is given, and
`onstep.trainer.Trainer` builds on the same loop. Where things are, from the loop outward:

- `loop.py` is the loop, on one page; `stages/` are its stages, `compute/` is one step, `run.py` is the run it advances.
- `feature.py` is what an optional feature is, `features.py` the table of them all, in their order: `anomalies/`,
  `experts/`, `fault_tolerance/`, `interval_log/`, `lifecycle/`, `model_parallel/`, `profiling/`, `rerun/`,
  `stragglers/`, `verification/`, `watchdog/`.
- `checkpointing/` writes and resumes, `reporting/` measures, `runs/` has the run directory and signals, `setup/`
  builds, `opening.py` opens a run for both doors, `run_job.py` trains it.
- Above all this, `bridge/` and `train.py` have Megatron Bridge's names; they resolve from this package too, and from
  Bridge's own module paths.
"""

from typing import Any

from onstep.train_state import TrainState
from onstep.training import bridge
from onstep.training.bridge.global_state import GlobalState, TrainStepResult
from onstep.training.bridge.housekeeping import evaluate
from onstep.training.callable_module import show_module_as
from onstep.training.compute.losses import LossShare, MeanLoss
from onstep.training.compute.packed_inputs import packed_inputs
from onstep.training.pretrain import finetune, pretrain
from onstep.training.reporting.timers import Timers
from onstep.training.runs.signals import Preempted
from onstep.training.stages.forward_step import forward_step
from onstep.training.train import train, train_step

__all__ = [
    "GlobalState",
    "LossShare",
    "MeanLoss",
    "Preempted",
    "Timers",
    "TrainState",
    "TrainStepResult",
    "evaluate",
    "finetune",
    "forward_step",
    "packed_inputs",
    "pretrain",
    "train",
    "train_step",
]

show_module_as(pretrain)
show_module_as(train)


def __getattr__(name: str) -> Any:
    """Megatron Bridge's names, which live in `onstep.training.bridge`.

    Raises:
        AttributeError: for a name that Bridge's pages do not have either.
    """
    if name in bridge.HOMES:
        return getattr(bridge, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
