"""How much a run gets done in a second, over a window of its latest steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onstep.config.parts import TrainingConfig
from onstep.distributed import shards
from onstep.errors import ConfigError
from onstep.progress import TrainState


def report_throughput(
    train_config: TrainingConfig,
    iteration: int,
    seq_length: int,
    history_wct: Sequence[float],
    window_size: int,
    *,
    batch_size: int | None = None,
    world_size: int | None = None,
) -> dict[str, float]:
    """Batches, samples and tokens a second, of all ranks and of one, over a window of steps.

    The window spans `window_size - 1` steps: with W = `window_size` and T the time from the first entry to the last,
    the rate is (W-1)/T. It is the true rate when `history_wct` has W entries.

    Args:
        train_config: gives the sizes of batch and micro-batch.
        iteration: the step that was just done, for messages.
        seq_length: tokens of a sequence; 0 leaves the tokens out.
        history_wct: seconds at the end of each of the latest steps, on any clock, in order.
        window_size: entries that a report needs; with fewer of them it is empty.
        batch_size: samples of a step where they are not `train_config.global_batch_size`.
        world_size: ranks, each of which counts as a device; None asks `torch.distributed`.

    Returns:
        `throughput/{batches,samples,tokens}_per_sec`, the same under `throughput/device/`,
        `throughput/micro_batch_size` and `throughput/global_batch_size`; `{}` before the window is full, or where no
        time has passed.

    Raises:
        ConfigError: where no batch size is known.
    """
    if not history_wct or len(history_wct) < window_size:
        return {}
    elapsed = history_wct[-1] - history_wct[0]
    if elapsed <= 0:
        if shards.rank() == 0:
            text = f"Warning: elapsed_wct is {elapsed}, skipping throughput calculation at iteration {iteration}"
            print(text, flush=True)  # noqa: T201 - Bridge's line
        return {}
    samples = batch_size or train_config.global_batch_size
    if samples is None:
        raise ConfigError(
            "train.global_batch_size is None, and a throughput needs the samples of a step; set it, or hand batch_size."
        )
    batches_per_second = (window_size - 1) / elapsed
    rates = {
        "batches_per_sec": batches_per_second,
        "samples_per_sec": batches_per_second * samples,
        "tokens_per_sec": batches_per_second * samples * seq_length,
    }
    if not rates["tokens_per_sec"]:
        del rates["tokens_per_sec"]
    devices = world_size or shards.world_size()
    sizes = {"throughput/global_batch_size": samples}
    if train_config.micro_batch_size is not None:
        sizes = {"throughput/micro_batch_size": train_config.micro_batch_size, **sizes}
    return {
        **{f"throughput/{name}": rate for name, rate in rates.items()},
        **{f"throughput/device/{name}": rate / devices for name, rate in rates.items()},
        **sizes,
    }


SECONDS_OF_UNIT = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
"""The units that `report_runtime` counts in."""


def report_runtime(
    train_state: TrainState,
    start_time: float,
    seq_length: int,
    train_iters: int,
    time_unit: str = "seconds",
    *,
    start_step: int = 0,
    now: float | None = None,
) -> dict[str, float]:
    """Progress and time of a run, with an estimate of what remains at the pace of this process so far.

    Args:
        train_state: progress of the whole run, over all its restarts.
        start_time: unix seconds when this process began to train.
        seq_length: tokens of a sequence.
        train_iters: steps of the whole run.
        time_unit: seconds, minutes, hours or days.
        start_step: step that this process continued from. `train_state.step` counts the steps of earlier processes
            too, whose time is not in `now - start_time`.
        now: unix seconds; None reads the clock.

    Returns:
        `time/remaining_estimate` (absent before this process has done a step), `time/tokens`, `time/samples`,
        `time/batches` and `time/total`, which is the time of this process.

    Raises:
        ConfigError: for another unit.
    """
    if time_unit not in SECONDS_OF_UNIT:
        units = ", ".join(SECONDS_OF_UNIT)
        raise ConfigError(f"the unit of time must be one of {units}, got {time_unit!r}; set logger.runtime_time_unit.")
    unit = SECONDS_OF_UNIT[time_unit]
    elapsed = (time.time() if now is None else now) - start_time
    steps_here = train_state.step - start_step
    report: dict[str, float] = {}
    if steps_here > 0:
        report["time/remaining_estimate"] = elapsed / steps_here * max(0, train_iters - train_state.step) / unit
    return report | {
        "time/tokens": train_state.consumed_train_samples * seq_length,
        "time/samples": train_state.consumed_train_samples,
        "time/batches": train_state.step,
        "time/total": elapsed / unit,
    }
