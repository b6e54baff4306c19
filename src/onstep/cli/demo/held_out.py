"""Measures a run's model on text that it was not trained on, in nats per byte: comparable across tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onstep.cli.generation.trained import Trained, configuration_of

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss of a model on held-out text."""

    nats: float
    """The sum over all tokens."""
    num_tokens: int
    num_bytes: int

    @property
    def nats_per_byte(self) -> float:
        """The sum of the losses by the bytes of the text that the tokens stand for."""
        return self.nats / self.num_bytes


def held_out_loss(trained: Trained, most_rows: int | None = None) -> HeldOutLoss | None:
    """The loss on the test split of the run's corpus; None if there is none.

    Args:
        trained: the model of a run.
        most_rows: sequences that are read, spread evenly over the split; None reads all.
    """
    import torch

    from onstep.data import TokenDataset, build_datasets

    config = configuration_of(trained.directory)
    test = build_datasets(config.dataset, trained.tokenizer, show_progress=False)[2]
    if not isinstance(test, TokenDataset):
        return None
    count = len(test) if most_rows is None else min(most_rows, len(test))
    rows = [number * len(test) // count for number in range(count)]
    nats, num_bytes = 0.0, 0
    trained.model.eval()
    for start in range(0, count, _ROWS_AT_ONCE):
        batch = test.get_batch(rows[start : start + _ROWS_AT_ONCE])
        with torch.no_grad():
            nats += float(trained.model(batch["tokens"], batch["labels"], reduction="sum"))
        num_bytes += sum(_num_bytes(trained, ids) for ids in batch["labels"].tolist())
    return HeldOutLoss(nats, count * test.seq_length, num_bytes)


def _num_bytes(trained: Trained, ids: list[int]) -> int:
    """The bytes of the text of `ids`; a character that is cut counts as one of three, which is rare."""
    return len(trained.tokenizer.decode(ids).encode())


def name_of_run(path: Path) -> str:
    """A run as `onstep generate` finds it: its name if it is below runs/, else its directory."""
    return path.name if path.parent == Path("runs") else str(path)
