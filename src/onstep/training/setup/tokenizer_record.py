"""Records a run's tokenizer in `run.json`, so that losses of runs with different ones can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onstep.data import ByteTokenizer, TokenDataset, Tokenizer
from onstep.training.run import Run
from onstep.training.runs.run_dir import RunDir

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
    write_tokenizer(state.run_dir, tokenizer.fingerprint, found[0] if found else None)


def write_tokenizer(directory: RunDir, fingerprint: str, ratio: float | None) -> None:
    """Write a tokenizer's fingerprint and, if they are known, its bytes per token to `run.json`."""
    record = {"fingerprint": fingerprint} | ({} if ratio is None else {"bytes_per_token": ratio})
    content = directory.read()
    if content.get("tokenizer") != record:
        directory.write({**content, "tokenizer": record})


def bytes_per_token(dataset: TokenDataset, tokenizer: Tokenizer) -> float:
    """The UTF-8 bytes of the text of a dataset per token, from a few of its sequences; end tokens have no text."""
    if isinstance(tokenizer, ByteTokenizer):
        return 1.0
    count = min(_ROWS, len(dataset))
    rows = dataset.get_batch([number * len(dataset) // count for number in range(count)])["tokens"].tolist()
    texts = [tokenizer.decode([one for one in ids if one != tokenizer.eos_id]) for ids in rows]
    return bytes_of(texts) / sum(map(len, rows))


def bytes_of(texts: Sequence[str]) -> int:
    """The UTF-8 bytes of decoded texts; a character that is cut counts as one."""
    return sum(len(text.replace("\ufffd", "?").encode("utf-8", "surrogatepass")) for text in texts)
