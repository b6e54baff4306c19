"""A run's name, its place, its process group and its data parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onstep.config.section import MINUTES, PATH, SAFE, SECONDS, TRAJECTORY, Bound, ConfigSection, option
from onstep.stores.urls import is_url, joined, local_place

_DEVICE = Bound(
    "cpu, cuda, cuda:<n> with n up to 127, or null for CUDA where there is one",
    lambda device: re.fullmatch(r"cpu|cuda(:(\d|[1-9]\d|1[01]\d|12[0-7]))?", device, re.ASCII) is not None,
)


WITHOUT_DYNAMIC_SCALE = "mixed_precision other than fp16_mixed or optimizer.loss_scale"
"""A loss scale that adapts lets float16 gradients overflow on purpose."""

IN_A_STORE = "a URL of an object store as run.output_dir"


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
        "runs",
        SAFE,
        bound=PATH,
        common=True,
        needs="run.name",
        help="Where run directories are created. The URL of an object store (s3://bucket/runs, gs://, az://, file://) "
        "mirrors what the run writes in `scratch_dir`.",
    )
    scratch_dir: str | None = option(
        None,
        SAFE,
        bound=PATH,
        needs=IN_A_STORE,
        help="Local directory in which runs work whose `output_dir` is a URL; all ranks must see it. None is "
        "`stores` in the cache directory.",
    )
    scratch_gib: float | None = option(
        None,
        SAFE,
        bound="> 0",
        needs=IN_A_STORE,
        help="Size in GiB of the local checkpoints, the next one included: older ones are deleted, also while the "
        "object store cannot be reached; the newest stays in any case. None keeps what retention keeps.",
    )
    lease_seconds: float = option(
        60.0,
        SAFE,
        bound=SECONDS,
        needs=IN_A_STORE,
        help="Seconds without a sign of life after which another machine may take over a run in an object store.",
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

    @property
    def is_in_store(self) -> bool:
        """Whether run directories are mirrored in an object store."""
        return is_url(self.output_dir)

    @property
    def place(self) -> str:
        """The path or URL of the run's directory, for words."""
        name = str(self.name)
        return joined(self.output_dir, name) if self.is_in_store else str(Path(self.output_dir, name))

    @property
    def local_output_dir(self) -> Path:
        """Where run directories are on this machine."""
        return local_place(self.output_dir, self.scratch_dir) if self.is_in_store else Path(self.output_dir)


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
    """Data parallelism of whole models: torch's DistributedDataParallel, or ranks that divide the updates."""

    use_distributed_optimizer: bool = option(
        False,
        SAFE,
        known_as=("zero_optimization", "zero_stage"),
        help="Divide the updates of a whole model, and the state of its optimizer, between the ranks (ZeRO-1): each "
        "updates some rows of each parameter, and then gathers those of the others.",
    )
    overlap_grad_reduce: bool = option(
        False,
        SAFE,
        needs="ddp.use_distributed_optimizer=true",
        help="Begin to sum the gradients of a bucket over the ranks during the backward pass, as soon as it is full; "
        "false does so after it. Without ddp.use_distributed_optimizer, sums overlap with the backward pass in any "
        "case.",
    )
    overlap_param_gather: bool = option(
        False,
        SAFE,
        needs="ddp.use_distributed_optimizer=true",
        help="Gather updated parameters during the next forward pass, in which each module waits for its own; false "
        "waits for all of them after the update.",
    )
    fp8_param_gather: bool = option(
        False,
        TRAJECTORY,
        effect="the forward pass reads weights in another precision from here on",
        only_with="ddp.use_distributed_optimizer=true",
        help="Gather the rows of matrices in MXFP8, about 1.03 bytes for each number: the model has what is left of "
        "them in its own type, and each rank float32 masters of the rows that it updates, which checkpoints save.",
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = option(
        False,
        SAFE,
        only_with="ddp.fp8_param_gather=true",
        help="Let what is gathered in MXFP8 arrive in the memory of the gradients, which is cleared then; false "
        "allocates memory for it.",
    )
    num_distributed_optimizer_instances: int = option(
        1,
        SAFE,
        bound=Bound("from 1 to 1,048,576", lambda number: 1 <= number <= 1 << 20),
        needs="ddp.use_distributed_optimizer=true",
        help="Groups of ranks that divide the updates each for itself; it divides the number of ranks.",
    )
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
