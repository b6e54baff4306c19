"""What a step asks of its model, found out once: an attribute that a module does not have takes long to look for."""

from __future__ import annotations

from torch import nn

from onstep.training.model_parallel import model_parallel_group
from onstep.training.state import GlobalState
from onstep.training.step_size import model_options


class ModelFacts:
    """What the chunks of a model offer.

    Args:
        state: of the run.
        model: list of model chunks.
    """

    def __init__(self, state: GlobalState, model: list[nn.Module]) -> None:
        self.chunks = tuple(model)
        options = model_options(state.cfg, model)
        self.logs_attention_logit = bool(getattr(options, "log_max_attention_logit", False))
        """Whether the model was built to keep its largest attention logit."""
        self.model_parallel_group = model_parallel_group(model)
        """The group of the ranks that hold this model; None where one rank holds all of it."""


def facts_of(state: GlobalState, model: list[nn.Module]) -> ModelFacts:
    """The facts of this model, looked up again only where it is another one."""
    known: ModelFacts | None = state.model_facts
    if known is None or len(known.chunks) != len(model) or known.chunks[0] is not model[0]:
        known = state.model_facts = ModelFacts(state, model)
    return known
