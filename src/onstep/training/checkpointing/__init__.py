"""A run's checkpoints: when they are written and how a run resumes from one.

`writing.RunCheckpoints` saves (committed by `onstep.checkpoint.storage.transaction`) and resumes; `saved_states` lists
what a checkpoint holds, of which `run_progress` is the loop's own.
"""
