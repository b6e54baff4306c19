"""Hugging Face's methods of a Trainer that subclasses override, by theme; the session of a run calls them.

A method that is not overridden costs nothing: `onstep.trainer.overrides.overrides` says whether one is, and the loop
then calls it at its place; otherwise the loop does the same in its own, shorter way.
"""

from onstep.trainer.methods.evaluating import EvaluatingMethods
from onstep.trainer.methods.hub import HubMethods
from onstep.trainer.methods.loading import LoadingMethods
from onstep.trainer.methods.looping import LoopingMethods
from onstep.trainer.methods.optimizing import OptimizingMethods
from onstep.trainer.methods.reporting import ReportingMethods
from onstep.trainer.methods.resuming import ResumingMethods
from onstep.trainer.methods.searching import SearchingMethods
from onstep.trainer.methods.stepping import SteppingMethods


class TrainerMethods(
    LoadingMethods,
    OptimizingMethods,
    SteppingMethods,
    LoopingMethods,
    EvaluatingMethods,
    ReportingMethods,
    ResumingMethods,
    SearchingMethods,
    HubMethods,
):
    """All of them."""


__all__ = ["TrainerMethods"]
