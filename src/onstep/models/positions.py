"""Where the tokens of a sequence stand: rotary angles, a table of learned positions, or neither."""

from __future__ import annotations

from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.context import KeyValueCache, SequenceContext, document_mask, document_positions
from onstep.models.rotary import RotaryTables
from onstep.models.sizes import head_width


def build_rotary(config: ModelConfig) -> RotaryTables | None:
    """The angles of the positions; None in a model without rotary embeddings."""
    if config.position_embedding_type != "rope":
        return None
    return RotaryTables(head_width(config), config.rotary_base, config.seq_length, config.rope_scaling)


def build_position_embedding(config: ModelConfig) -> nn.Embedding | None:
    """A row for each position of a training sequence; None in a model without learned positions."""
    if config.position_embedding_type != "learned_absolute":
        return None
    return nn.Embedding(config.seq_length, config.hidden_size)


def learned_positions(table: nn.Embedding, start: int, length: int, position_ids: Tensor | None) -> Tensor:
    """What a model with learned positions adds to the embedding of its tokens, (seq, hidden) or (batch, seq, hidden).

    Raises:
        ConfigError: positions beyond the table. Of `position_ids` on a GPU it is not asked, since that would wait for
            the device; there they are CUDA's error.
    """
    check_positions(table, start + length if position_ids is None else 0)
    if position_ids is None:
        return table.weight[start : start + length]
    if position_ids.device.type == "cpu" and position_ids.numel():
        _check_position_ids(table, position_ids)
    rows: Tensor = table(position_ids)
    return rows


def check_positions(table: nn.Embedding, end: int) -> None:
    """Refuse sequences that are longer than a table of learned positions.

    Raises:
        ConfigError: naming both lengths.
    """
    if end > table.num_embeddings:
        raise ConfigError(
            f"the sequence has {end} positions, but learned positions end at model.seq_length={table.num_embeddings}; "
            "shorten it, or train a model with rotary positions (position_embedding_type=rope)."
        )


def _check_position_ids(table: nn.Embedding, position_ids: Tensor) -> None:
    least, largest = (int(one) for one in position_ids.aminmax())
    if least < 0 or largest >= table.num_embeddings:
        raise ConfigError(
            f"position_ids go from {least} to {largest}, but learned positions are those from 0 to "
            f"{table.num_embeddings - 1} (model.seq_length={table.num_embeddings}); give others, or train a model with "
            "rotary positions (position_embedding_type=rope)."
        )


def sequence_context(
    rotary: RotaryTables | None,
    tokens: Tensor,
    cache: KeyValueCache | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
) -> SequenceContext:
    """What the layers must know of `tokens`.

    Raises:
        ConfigError: documents together with a cache, or either beyond the length from which on dynamic angles change.
    """
    if cache is not None and document_ids is not None:
        raise ConfigError("document_ids and a key/value cache do not go together; generate one document at a time.")
    mask = None if document_ids is None else document_mask(document_ids)
    if rotary is None:
        return SequenceContext(mask=mask, cache=cache)
    start = 0 if cache is None else cache.length
    end = start + tokens.shape[1]
    if cache is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"rope_scaling of type dynamic turns all positions of a sequence of {end} tokens anew (beyond "
            "model.seq_length), so that earlier keys cannot be kept; call the model on the whole sequence without a "
            "cache."
        )
    if document_ids is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"document_ids of a sequence of {end} tokens do not go with rope_scaling of type dynamic: beyond "
            "model.seq_length its angles follow from the length, and each document has its own; call the model on one "
            "document at a time, or on shorter sequences."
        )
    cos, sin = rotary(start, end - start) if position_ids is None else rotary.at(position_ids)
    return SequenceContext(cos, sin, mask, cache)


def chosen_positions(position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """The caller's positions, or those that count anew in each document; None counts from the first token on."""
    if position_ids is None and document_ids is not None:
        return document_positions(document_ids)
    return position_ids
