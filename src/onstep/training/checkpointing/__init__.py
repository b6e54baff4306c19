"""A run's checkpoints: when they are written and how a run resumes from one.

`writing.RunCheckpoints` saves (committed by `onstep.checkpoint.storage.transaction`) and resumes; `saved_states` lists
what a checkpoint holds, of which `run_progress` is the loop's own. Megatron Bridge's `save_checkpoint` and
`load_checkpoint`, which it has under this path, are loaded from `onstep.training.bridge` when they are first used.
"""

from onstep.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, dict.fromkeys(("load_checkpoint", "save_checkpoint"), "onstep.training.bridge.checkpoint_calls")
)
