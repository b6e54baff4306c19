"""Where a micro-batch has its labels, and how many of them are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from onstep.trainer.wrappers import inner_module
from onstep.training.losses import IGNORE_INDEX

MAPPING = (dict, Mapping)
"""For `isinstance`, which knows a dictionary at once and asks Python code about everything else."""


class Labels:
    """Finds and counts the labels of micro-batches.

    Args:
        names: keys of the labels in a mapping; of a tuple the last element is the labels.
        shifted: the model shifts its labels to predict the next token, so that the first of each row is not trained on.
    """

    def __init__(self, names: list[str] | None = None, *, shifted: bool = False) -> None:
        self._names = names or ["labels"]
        self._shifted = shifted

    def of(self, batch: Any) -> Any:
        """The labels: a tensor, a tuple of them where there are several names, None unless all are there."""
        if isinstance(batch, MAPPING):
            if len(self._names) == 1:
                return batch.get(self._names[0])
            found = tuple(batch.get(name) for name in self._names)
            return None if any(labels is None for labels in found) else found
        return batch[-1] if isinstance(batch, (list, tuple)) and len(batch) > 1 else None

    def count(self, batch: Any) -> Tensor | None:
        """Labels that are trained on, as a 0-d tensor; None where they are not whole numbers."""
        return self.measure(batch)[0]

    def measure(self, batch: Any) -> tuple[Tensor | None, bool]:
        """`count`, and whether there is a label for each position of a sequence, rather than one for each sample."""
        labels = self.of(batch)
        known = labels if isinstance(labels, Tensor) and _is_class_ids(labels) else None
        are_tokens = known is not None and known.ndim > 1
        if are_tokens and self._shifted:
            known = labels[:, 1:]
        shifted = batch.get("shift_labels") if isinstance(batch, MAPPING) else None
        if shifted is not None and _is_class_ids(shifted):  # shifted by the collator
            known = shifted
        return None if known is None else known.ne(IGNORE_INDEX).sum(), are_tokens


def shifts_labels(module: nn.Module) -> bool:
    """Whether a model predicts the next token and shifts its labels itself, as `transformers` models do."""
    module = inner_module(module)
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    name = type(module).__name__
    return getattr(module, "loss_type", None) == "ForCausalLM" or name.endswith(("ForCausalLM", "LMHeadModel"))


def _is_class_ids(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.ndim > 0 and not labels.is_floating_point()
