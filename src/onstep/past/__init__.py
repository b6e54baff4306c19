"""Repeats steps of a run's past in memory, so that instruments can be attached to them afterwards.

`repetition` repeats a run from its nearest checkpoint to a step and holds it there; `rewinding` is what callers see.
`place` finds that checkpoint and makes the run's temporary copy, `configuration` switches off what writes, `turns`
alternates between the caller and the training, `observer` is the feature that holds it, and `comparison` compares what
is logged with the record.

`search` finds the first step for which a condition holds (`expressions`), and `blame` drops samples of a step. `forks`
and `fork_directory` begin a new run at a step of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.past.comparison import Comparison, Deviation
    from onstep.past.place import Plan, plan_rewind
    from onstep.past.repetition import rewind
    from onstep.past.rewinding import Past

__all__ = ["Comparison", "Deviation", "Past", "Plan", "plan_rewind", "rewind"]

__getattr__, __dir__ = lazy_names(__name__)
