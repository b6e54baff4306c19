"""Computes the number of micro-batches of a step: Megatron's calculator, one per run, and its module functions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onstep.config.checks.batches import check_multiple
from onstep.config.lengths import BatchSizes, ramp
from onstep.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class NumMicroBatchesCalculator:
    """The size of the current step, in micro-batches and samples.

    The size depends only on the consumed samples (`BatchSizes`), so nothing has to be saved.
    """

    sizes: BatchSizes
    """The global batches of the run."""
    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    data_parallel_size: int = 1
    """Ranks."""
    decrease_batch_size_if_needed: bool = False
    """Round down a size that is not a multiple of both, instead of rejecting it."""
    consumed_samples: int = field(default=0, init=False)
    _last_logged: int | None = field(default=None, init=False)

    @property
    def varies(self) -> bool:
        """Whether steps of this run may differ in size."""
        return self.sizes.varies

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the current step on one rank."""
        return max(1, self.current_running_global_batch_size // (self.micro_batch_size * self.data_parallel_size))

    def update(self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
        """Advance to the step that starts after `consumed_samples`.

        Args:
            consumed_samples: samples of all steps before it, over all ranks.
            consistency_check: reject a size that is not a multiple of the micro-batches on all ranks.
            verbose: log a change of size.

        Raises:
            ConfigError: with `consistency_check`, for a size that is not a multiple of the micro-batches on all ranks.
        """
        self.consumed_samples = consumed_samples
        size = self.current_global_batch_size
        if consistency_check and not self.decrease_batch_size_if_needed:
            parts = (self.micro_batch_size, self.data_parallel_size)
            check_multiple(f"the global batch={size}", size, "micro_batch_size * ranks", parts)
        if verbose and self.varies and self._last_logged != size:
            text = f"ramping up batch size from {self._last_logged} to {size}"
            logger.info("%s", f"setting initial batch size to {size}" if self._last_logged is None else text)
            self._last_logged = size

    @property
    def current_global_batch_size(self) -> int:
        """Configured samples of the current step over all ranks."""
        return self.sizes.nominal_at(self.consumed_samples)

    @property
    def current_running_global_batch_size(self) -> int:
        """Samples actually used by the current step: fewer if the configured size was rounded down."""
        return self.sizes.at(self.consumed_samples)


_current: list[NumMicroBatchesCalculator] = []
"""The calculators of the runs that are active in this process, the innermost last."""


def get_num_microbatches() -> int:
    """Number of micro-batches of the current step on one rank."""
    return _calculator().num_micro_batches


def get_current_global_batch_size() -> int:
    """Configured samples of the current step over all ranks."""
    return _calculator().current_global_batch_size


def get_current_running_global_batch_size() -> int:
    """Samples actually used by the current step, over all ranks."""
    return _calculator().current_running_global_batch_size


def get_micro_batch_size() -> int:
    """Samples of one forward pass on one rank."""
    return _calculator().micro_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Advance the current run's calculator to the step that starts after `consumed_samples`; the loop does this itself.

    See `NumMicroBatchesCalculator.update` for the arguments and errors.
    """
    _calculator().update(consumed_samples, consistency_check, verbose)


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set up a calculator outside of a run; inside a run the loop has done it.

    Args:
        rank: kept for Megatron; messages go to the log of this module.
        rampup_batch_size: [start, increment, samples], or None for a constant size.
        global_batch_size: samples of a step over all ranks, at the end.
        micro_batch_size: samples of one forward pass on one rank.
        data_parallel_size: number of ranks.
        decrease_batch_size_if_needed: see `NumMicroBatchesCalculator`.

    Raises:
        ConfigError: if a calculator is already set up, or for incompatible sizes.
    """
    if _current:
        raise ConfigError(
            "the micro-batch calculator is already set up; use reconfigure_num_microbatches_calculator to replace it."
        )
    reconfigure_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set up a calculator in place of the current one.

    The arguments are those of `init_num_microbatches_calculator`.

    Raises:
        ConfigError: for incompatible sizes.
    """
    stages = ((0,), (global_batch_size,)) if rampup_batch_size is None else ramp(rampup_batch_size, global_batch_size)
    sizes = BatchSizes(*stages, micro_batch_size * data_parallel_size)
    made = NumMicroBatchesCalculator(sizes, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    made.update(0, consistency_check=rampup_batch_size is None)
    _current[-1:] = [made]


def unset_num_microbatches_calculator() -> None:
    """Remove the current calculator; do nothing without one."""
    del _current[-1:]


destroy_num_microbatches_calculator = unset_num_microbatches_calculator
"""The same under Megatron's other name."""


@contextmanager
def current_calculator(calculator: NumMicroBatchesCalculator | None) -> Iterator[None]:
    """Make the functions of this module read `calculator` within the block; None changes nothing."""
    if calculator is None:
        yield
        return
    before = list(_current)
    _current.append(calculator)
    try:
        yield
    finally:
        _current[:] = before


def _calculator() -> NumMicroBatchesCalculator:
    if not _current:
        raise ConfigError(
            "no micro-batch calculator exists outside of a run; call this from a callback or a forward step, or set "
            "one up with init_num_microbatches_calculator."
        )
    return _current[-1]
