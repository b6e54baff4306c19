"""Keeps the two lengths of a sequence equal: of the model and of the data."""

from __future__ import annotations

from collections.abc import Collection

from onstep.config.container import ConfigContainer

SEQ_LENGTHS = ("model.seq_length", "dataset.seq_length")


def fit_seq_length(config: ConfigContainer, given: Collection[str]) -> None:
    """Let one of the two lengths follow the other, in place, if only the other is among the keys that were given."""
    of_model, of_data = (key in given for key in SEQ_LENGTHS)
    if of_model and not of_data:
        config.dataset.seq_length = config.model.seq_length
    elif of_data and not of_model:
        config.model.seq_length = config.dataset.seq_length


def fit_changed_seq_length(config: ConfigContainer, base: ConfigContainer) -> None:
    """`fit_seq_length` where the given one is the one that differs from a recipe, or from the defaults."""
    changed = {
        SEQ_LENGTHS[0]: config.model.seq_length != base.model.seq_length,
        SEQ_LENGTHS[1]: config.dataset.seq_length != base.dataset.seq_length,
    }
    if base.model.seq_length == base.dataset.seq_length:
        fit_seq_length(config, [key for key, is_changed in changed.items() if is_changed])
