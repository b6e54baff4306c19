"""How many micro-batches a step has: Megatron's calculator, one object a run, and its functions for the current run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onstep.config.data_rules import check_multiple
from onstep.config.lengths import BatchSizes, ramp
from onstep.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class NumMicroBatchesCalculator:
    """The size of the current step, in micro-batches and samples.

    The size is a function of the consumed samples alone (`BatchSizes`), so there is nothing to save.
    """

    sizes: BatchSizes
    """The global batches of the run."""
    micro_batch_size: int
    """Samples of one forward pass on one rank."""
    data_parallel_size: int = 1
    """Ranks."""
    decrease_batch_size_if_needed: bool = False
    """A size that is not a multiple of both is rounded down, not refused."""
    consumed_samples: int = field(default=0, init=False)
    _told: int | None = field(default=None, init=False)

    @property
    def varies(self) -> bool:
        """Whether steps of this run may differ in size."""
        return self.sizes.varies

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the current step on one rank."""
        return max(1, self.current_running_global_batch_size // (self.micro_batch_size * self.data_parallel_size))

    def update(self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
        """Move to the step that starts after `consumed_samples`.

        Args:
            consumed_samples: samples of all steps before it, over all ranks.
            consistency_check: refuse a size that is not made of whole micro-batches.
            verbose: tell a change of size.

        Raises:
            ConfigError: with `consistency_check`, for a size that is not made of whole micro-batches on all ranks.
        """
        self.consumed_samples = consumed_samples
        size = self.current_global_batch_size
        if consistency_check and not self.decrease_batch_size_if_needed:
            parts = (self.micro_batch_size, self.data_parallel_size)
            check_multiple(f"the global batch={size}", size, "micro_batch_size * ranks", parts)
        if verbose and self.varies and self._told != size:
            told = f"ramping up batch size from {self._told} to {size}"
            logger.info("%s", f"setting initial batch size to {size}" if self._told is None else told)
            self._told = size

    @property
    def current_global_batch_size(self) -> int:
        """Configured samples of the current step over all ranks."""
        return self.sizes.nominal_at(self.consumed_samples)

    @property
    def current_running_global_batch_size(self) -> int:
        """Samples that the current step really takes: less where the configured size was rounded down."""
        return self.sizes.at(self.consumed_samples)


_current: list[NumMicroBatchesCalculator] = []
"""The calculators of the runs that go on in this process, the innermost last."""


def get_num_microbatches() -> int:
    """Micro-batches of the current step on one rank."""
    return _calculator().num_micro_batches


def get_current_global_batch_size() -> int:
    """Configured samples of the current step over all ranks."""
    return _calculator().current_global_batch_size


def get_current_running_global_batch_size() -> int:
    """Samples that the current step really takes, over all ranks."""
    return _calculator().current_running_global_batch_size


def get_micro_batch_size() -> int:
    """Samples of one forward pass on one rank."""
    return _calculator().micro_batch_size


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Move the current run's calculator to the step that starts after `consumed_samples`; the loop does it by itself.

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
    """Set a calculator up outside of a run; inside one the loop has done it.

    Args:
        rank: kept for Megatron; what is told goes to the log of this module.
        rampup_batch_size: [start, increment, samples], or None for a constant size.
        global_batch_size: samples of a step over all ranks, at the end.
        micro_batch_size: samples of one forward pass on one rank.
        data_parallel_size: ranks.
        decrease_batch_size_if_needed: see `NumMicroBatchesCalculator`.

    Raises:
        ConfigError: where there is one already, or for sizes that do not go together.
    """
    if _current:
        raise ConfigError(
            "the micro-batch calculator is set up already; use reconfigure_num_microbatches_calculator to replace it."
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
    """Set a calculator up in the place of the current one.

    The arguments are those of `init_num_microbatches_calculator`.

    Raises:
        ConfigError: for sizes that do not go together.
    """
    stages = ((0,), (global_batch_size,)) if rampup_batch_size is None else ramp(rampup_batch_size, global_batch_size)
    sizes = BatchSizes(*stages, micro_batch_size * data_parallel_size)
    made = NumMicroBatchesCalculator(sizes, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    made.update(0, consistency_check=rampup_batch_size is None)
    _current[-1:] = [made]


def unset_num_microbatches_calculator() -> None:
    """Take the current calculator away; nothing happens where there is none."""
    del _current[-1:]


destroy_num_microbatches_calculator = unset_num_microbatches_calculator
"""The same under Megatron's other name."""


@contextmanager
def current_calculator(calculator: NumMicroBatchesCalculator | None) -> Iterator[None]:
    """Let the functions of this module read `calculator` within the block; None leaves them as they are."""
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
            "there is no micro-batch calculator outside of a run; call this from a callback or a forward step, or set "
            "one up with init_num_microbatches_calculator."
        )
    return _current[-1]
