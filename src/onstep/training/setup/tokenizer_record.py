"""Records a run's tokenizer in `run.json`, so that losses of runs with different ones can be compared."""

from __future__ import annotations

from typing import Any

from onstep.data import ByteTokenizer, TokenDataset, Tokenizer
from onstep.training.run import Run

_ROWS = 16
"""Number of sequences, spread over the data, whose text is counted."""


def record_tokenizer(state: Run, tokenizer: Tokenizer, *loaders: Any) -> None:
    """Write the tokenizer's fingerprint to `run.json` and, if the data is text, the bytes of text of its tokens.

    Args:
        loaders: of the data, the validation data first; None where there is none.
    """
    if state.run_dir is None or not state.world.is_main:
        return
    datasets = [loader.dataset for loader in loaders if loader is not None]
    found = [bytes_per_token(one, tokenizer) for one in datasets if isinstance(one, TokenDataset)]
    record = {"fingerprint": tokenizer.fingerprint} | ({"bytes_per_token": found[0]} if found else {})
    content = state.run_dir.read()
    if content.get("tokenizer") != record:
        state.run_dir.write({**content, "tokenizer": record})


def bytes_per_token(dataset: TokenDataset, tokenizer: Tokenizer) -> float:
    """The UTF-8 bytes of the text of a dataset per token, from a few of its sequences; end tokens have no text."""
    if isinstance(tokenizer, ByteTokenizer):
        return 1.0
    count = min(_ROWS, len(dataset))
    rows = dataset.get_batch([number * len(dataset) // count for number in range(count)])["tokens"].tolist()
    texts = [tokenizer.decode([one for one in ids if one != tokenizer.eos_id]) for ids in rows]
    num_bytes = sum(len(text.replace("\ufffd", "?").encode()) for text in texts)  # a character that is cut
    return num_bytes / sum(map(len, rows))
