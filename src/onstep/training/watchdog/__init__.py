"""Ends a run on all ranks within a bound when one rank hangs, fails or dies.

`watchdog.Watching` is the feature; ranks exchange reports (`rank_report`, `exchange`, `stacks`), and `diagnosis` says
which rank was first.
"""
