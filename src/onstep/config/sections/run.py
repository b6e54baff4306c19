"""A run's name, its place, its process group and its data parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onstep.config.section import MINUTES, PATH, SAFE, SECONDS, TRAJECTORY, Bound, ConfigSection, option

_DEVICE = Bound(
    "cpu, cuda, cuda:<n> with n up to 127, or null for CUDA where there is one",
    lambda device: re.fullmatch(r"cpu|cuda(:(\d|[1-9]\d|1[01]\d|12[0-7]))?", device, re.ASCII) is not None,
)


WITHOUT_DYNAMIC_SCALE = "mixed_precision other than fp16_mixed or optimizer.loss_scale"
"""A loss scale that adapts lets float16 gradients overflow on purpose."""


@dataclass
class RunConfig(ConfigSection):
    """The name of a run and the place of its files."""

    name: str | None = option(
        None,
        SAFE,
        bound=PATH,
        common=True,
        known_as=("run_name",),
        help="Name of the run, which is its directory in `output_dir`. None keeps no directory; `onstep train` fills "
        "in "
        "the recipe's name.",
    )
    output_dir: str = option(
        "runs", SAFE, bound=PATH, common=True, needs="run.name", help="Where run directories are created."
    )
    recipe: str | None = option(None, SAFE, help="Name of the recipe that this configuration is based on.")
    fresh: bool = option(False, SAFE, needs="run.name", help="Start a new run `<name>-2` if a run of this name exists.")
    default_callbacks: bool = option(
        True,
        SAFE,
        help="Add DefaultMetrics, ProgressCallback and InfoCallback first (`Trainer` and `onstep train`), or "
        "ProgressCallback alone (`pretrain`).",
    )
    control: bool = option(
        False,
        SAFE,
        hf="control",
        help="Add a TrainerControlCallback, so that `onstep control` can watch and steer the job.",
    )
    without_commands_from: int | None = option(
        None,
        SAFE,
        bound=">= 0",
        help="A run that continues does not repeat the commands that it was sent after this step or later, and "
        "continues from the newest checkpoint without them; once, so that a restart repeats what it was sent since.",
    )
    check_memory: bool = option(
        True,
        SAFE,
        help="Refuse a run that is estimated not to fit into the memory of its GPU, or by far not into that of the "
        "machine; false starts it all the same.",
    )
    save_weights: bool = option(True, SAFE, help="Write the final weights to `<run>/model` as safetensors.")


@dataclass
class DistributedInitConfig(ConfigSection):
    """The process group."""

    distributed_backend: str | None = option(
        None,
        SAFE,
        choices=("gloo", "nccl"),
        hf="ddp_backend",
        help="Communication backend: gloo | nccl; None is nccl where every rank has a GPU, else gloo.",
    )
    distributed_timeout_minutes: float = option(
        30.0,
        SAFE,
        bound=MINUTES,
        help="Timeout of a collective in minutes, until the first step is done: ranks wait for one that prepares data, "
        "loads or compiles.",
    )
    timeout_after_first_step: float | None = option(
        None,
        SAFE,
        bound=SECONDS,
        known_as=("distributed_timeout_seconds_after_init",),
        help="Timeout of a collective in seconds, once the first step is done. None is a minute more than "
        "`ft.watchdog_seconds`, which then names the rank that hangs, but at least ten minutes, and no more than "
        "`distributed_timeout_minutes`; without the watchdog, or in a process group of yours, it changes nothing.",
    )
    device: str | None = option(
        None,
        SAFE,
        bound=_DEVICE,
        common=True,
        help="Device to train on: cpu | cuda | cuda:<n>; None is CUDA where available.",
    )


@dataclass
class DistributedDataParallelConfig(ConfigSection):
    """Plain data parallelism (torch's DistributedDataParallel)."""

    bucket_cap_mb: float = option(
        25.0,
        SAFE,
        bound=Bound("> 0 and at most 1,000,000, a terabyte", lambda size: 0 < size <= 1_000_000),
        help="Size of a gradient bucket in MiB.",
    )
    find_unused_parameters: bool = option(False, SAFE, help="Search for parameters that a step does not use.")
    broadcast_buffers: bool = option(False, TRAJECTORY, help="Broadcast buffers from rank 0 at each forward pass.")
    gradient_as_bucket_view: bool = option(True, SAFE, help="Make gradients views of the buckets.")
    static_graph: bool = option(
        False,
        SAFE,
        help="Every step uses the same parameters in the same order, which torch then relies on; ranks exchange "
        "gradients after each micro-batch.",
    )
    sync_each_micro_batch: bool | None = option(
        None,
        SAFE,
        help="Exchange gradients after each micro-batch; false does so after the last one of a step, true after each "
        "one. null is false for replicas, and true for a model in shards, which then has no gradients of the whole "
        "model in memory.",
    )
    grad_reduce_in_bf16: bool = option(
        False,
        TRAJECTORY,
        effect="gradients are summed over the ranks in another precision from here on",
        known_as=("bf16_compress_hook", "reduce_dtype"),
        help="Sum gradients over the ranks in bfloat16, in half the bytes of float32; false sums them in the dtype of "
        "the weights.",
    )
    grad_reduce_in_fp32: bool = option(
        False,
        TRAJECTORY,
        effect="gradients are summed over the ranks in another precision from here on",
        help="Sum gradients of bfloat16 or float16 over the ranks in float32, which rounds once, in twice the bytes; "
        "false sums them in the dtype of the weights. Other gradients are summed as they are.",
    )
    check_for_nan_in_grad: bool = option(
        False,
        SAFE,
        needs=WITHOUT_DYNAMIC_SCALE,
        help="End the run before the update if a gradient of this rank is NaN or infinite before the ranks exchange "
        "it (after, in a model that you have wrapped or sharded yourself), naming the parameter and the rank; costs "
        "one small collective a step. false leaves it to `train.on_nonfinite`.",
    )
    check_for_large_grads: bool = option(
        False,
        SAFE,
        help="End the run before the update if the norm of this rank's gradients, before the ranks exchange them, is "
        "more than 10 times the largest of its first 100 steps, naming the parameter and the rank; costs one small "
        "collective a step.",
    )
