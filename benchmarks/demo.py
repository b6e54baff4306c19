"""What the model of `onstep demo` has learned: its loss on held-out text per byte, and by position.

Run with `python benchmarks/demo.py [RUN ...]` after `onstep demo`. The loss by position is that of long rows of text
held out, given what `onstep generate` sees at each position: it must stay flat beyond the trained length. Beside it is
what the model's own forward gives there without the sliding window. The limits are 1.35 nats per byte, and 5% above the
loss at the end of the trained length.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from onstep.cli.demo.held_out import held_out_loss
from onstep.cli.generation.trained import Trained, configuration_of, open_trained
from onstep.data import TokenDataset, build_datasets
from onstep.models import Transformer
from onstep.models.generation.context_window import context_length, token_losses

MOST_NATS_PER_BYTE = 1.35
MOST_ABOVE = 1.05
TIMES, ROWS, PARTS = 4, 96, 2
"""Trained lengths that are read, rows of text, and figures for each length."""


def main(names: list[str]) -> int:
    """Measure runs; returns 1 if one misses a limit."""
    results = [measured(name) for name in names]  # all of them, whatever the first ones show
    return int(not all(results))


def measured(name: str) -> bool:
    """Print the figures of a run; returns whether it meets the limits."""
    trained = open_trained(name)
    trained.model.eval()
    loss = held_out_loss(trained)
    assert loss is not None
    print(f"{name}: {loss.nats_per_byte:.4f} nats per byte of held-out text ({loss.num_bytes:,} bytes, all of it;")
    print(f"{loss.nats / loss.num_tokens:.4f} per token of {loss.num_bytes / loss.num_tokens:.3f} bytes)")
    length = context_length(trained.model.config)
    rows = long_rows(trained, TIMES * length)
    with_window, without = by_position(trained, rows, length)
    print(f"\n{'positions':>12}  {'as generated':>12}  {'no window':>9}   nats per token, {len(rows)} rows")
    size = length // PARTS
    for number, (one, other) in enumerate(zip(with_window, without, strict=True)):
        print(f"{number * size:>5} - {(number + 1) * size:>4}  {one:12.3f}  {other:9.3f}")
    reached, beyond = with_window[PARTS - 1], sum(with_window[PARTS:]) / len(with_window[PARTS:])
    print(f"\nbeyond {length}: {beyond / reached:.3f} times the loss at the end of it (limit {MOST_ABOVE})\n")
    return loss.nats_per_byte < MOST_NATS_PER_BYTE and beyond < MOST_ABOVE * reached


def long_rows(trained: Trained, length: int) -> Tensor:
    """Rows of held-out tokens (rows, length + 1), spread over validation and test."""
    config = configuration_of(trained.directory)
    found = []
    for part in build_datasets(config.dataset, trained.tokenizer, show_progress=False)[1:]:
        assert isinstance(part, TokenDataset)
        starts = torch.linspace(part.start, part.end - length - 1, ROWS // 2).long().tolist()
        found += [torch.from_numpy(part.token_file.read(at, at + length + 1).astype("int64")) for at in starts]
    return torch.stack(found)


def by_position(trained: Trained, rows: Tensor, length: int) -> tuple[list[float], list[float]]:
    """The mean losses of consecutive stretches of positions, with and without the window."""
    assert isinstance(trained.model, Transformer)
    with torch.no_grad():
        without = torch.cat([trained.model(some[:, :-1], some[:, 1:]) for some in torch.split(rows, 16)])
    with_window = torch.cat([token_losses(trained.model, some) for some in torch.split(rows, 16)])
    return means(with_window, length // PARTS), means(without, length // PARTS)


def means(losses: Tensor, size: int) -> list[float]:
    """The mean of each stretch of `size` positions of losses (rows, positions)."""
    return [part.mean().item() for part in torch.split(losses, size, dim=1)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["demo"]))
