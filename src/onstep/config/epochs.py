"""Where a run stands after some steps, in samples and epochs: the tails of epochs decide on the sizes that follow."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.batch_sizes import BatchSizes


@dataclass(frozen=True)
class Standing:
    """What the first steps of a run have taken."""

    whole: int = 0
    """Samples of the steps, with a tail counted as a whole step: what the learning-rate schedule moves by."""
    consumed: int = 0
    """Samples that were trained on."""
    epochs: float = 0.0


def standing_after(num_steps: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> Standing:
    """Where a run stands after `num_steps` steps over a dataset of `num_samples`; none is passed over.

    Args:
        num_steps: steps from the start of the run.
        sizes: the global batches by consumed samples.
        num_samples: samples of an epoch, over all ranks.
        drop_last: a tail shorter than the step that is due is dropped; else it is a step of its own.
    """
    now = Standing()
    while num_steps > 0:
        steps, whole, taken = _epoch(now.consumed, sizes, num_samples, drop_last)
        if num_steps < steps:
            part = sizes.samples_after(num_steps, now.consumed)
            return Standing(now.whole + part, now.consumed + part, now.epochs + part / num_samples)
        alike = _epochs_alike(now.consumed, taken, sizes)
        count = num_steps // steps if alike is None else max(1, min(num_steps // steps, alike))
        now = Standing(now.whole + count * whole, now.consumed + count * taken, now.epochs + count)
        num_steps -= count * steps
    return now


def _epoch(start: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> tuple[int, int, int]:
    """(steps, their samples as whole steps, samples consumed) of the epoch that begins after `start` samples."""
    steps, taken = sizes.whole_steps(start, num_samples)
    if steps and (drop_last or taken == num_samples):
        return steps, taken, taken
    return steps + 1, taken + sizes.at(start + taken), num_samples


def _epochs_alike(start: int, taken: int, sizes: BatchSizes) -> int | None:
    """How many epochs of `taken` samples fit after `start` before the size changes; None where it never does."""
    later = [at for at in sizes.starts if at > start]
    return (later[0] - start) // taken if later else None
