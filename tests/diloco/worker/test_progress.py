"""What a worker counts between two submissions."""

from __future__ import annotations

import torch

from onstep.diloco.progress import Progress


def test_the_tokens_of_a_long_run_are_counted_to_the_last_one() -> None:
    progress = Progress(1)
    progress.count(torch.tensor(10_000_000_000))
    assert progress.submit(0).tokens == 1e10
    progress.end_submission(0, is_counted=True)
    for _ in range(500):
        progress.count(torch.tensor(500))
    assert progress.submit(0).tokens == 250_000
