"""How much a run gets done in a second, over a window of its latest steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from onstep.config.parts import TrainingConfig
from onstep.errors import ConfigError


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
        if _rank() == 0:
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
    devices = world_size or _world_size()
    sizes = {"throughput/global_batch_size": samples}
    if train_config.micro_batch_size is not None:
        sizes = {"throughput/micro_batch_size": train_config.micro_batch_size, **sizes}
    return {
        **{f"throughput/{name}": rate for name, rate in rates.items()},
        **{f"throughput/device/{name}": rate / devices for name, rate in rates.items()},
        **sizes,
    }


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
