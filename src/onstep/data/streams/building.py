"""Builds the stream of a configuration and what is held out of it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from onstep.config import DatasetConfig
from onstep.data.corpus.stream_files import find_all, find_stream
from onstep.data.corpus.tokenizers import Tokenizer
from onstep.data.streams.record_stream import RecordStream
from onstep.data.streams.records import Chats, Records, Texts
from onstep.data.token_dataset import Boundaries
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)


def build_stream(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    boundaries: Boundaries | None,
    shares: tuple[float, float, float],
    *,
    is_told: bool,
) -> tuple[RecordStream, Any, Any]:
    """The stream to train on, whose first record is read, and the samples of validation and test; None for no share.

    Args:
        shares: of training, validation and test.
        is_told: log what is read before training.

    Raises:
        DataError: for a stream that cannot be read, or a share without a record.
    """
    own = find_stream(config.paths, subset=config.hf_subset, split=config.hf_split)
    valid_files = find_all(config.stream_validation_paths) or own.valid
    files = {1: valid_files if shares[1] else None, 2: own.test if shares[2] else None}
    kept = [0.0 if files[share] else shares[share] for share in (1, 2)]
    records: Records[Any, Any] = (
        Chats(config, tokenizer) if config.stream_of == "chat" else Texts(config, tokenizer, boundaries)
    )
    stream_of = partial(
        RecordStream,
        records=records,
        window_bytes=config.stream_window_bytes,
        skips_damaged=config.stream_skip_damaged,
    )
    tokens = config.stream_epoch_tokens
    train = stream_of(
        own.train,
        shares=(1.0 - sum(kept), kept[0], kept[1]),
        epoch_samples=None if tokens is None else tokens // config.seq_length,
    )
    train.check()
    cut = [share for share in (1, 2) if kept[share - 1]]
    if is_told and (cut or any(files.values())):
        _LOGGER.info("reading up to %d sequences each of validation and test", config.stream_validation_samples)
    held_out = dict(zip(cut, train.held_out(cut, config.stream_validation_samples), strict=True)) if cut else {}
    for share, names in files.items():
        if names:
            (held_out[share],) = stream_of(names).held_out([0], config.stream_validation_samples)
    for share, samples in held_out.items():
        if samples is None:
            name = ("validation", "test")[share - 1]
            raise DataError(
                f"the {name} share of split {config.split!r} has no record of the stream; increase it, set it to 0, or "
                "name files in dataset.stream_validation_paths"
            )
    return train, held_out.get(1), held_out.get(2)
