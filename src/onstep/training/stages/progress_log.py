"""Writes `progress.txt` next to the checkpoints: a line for each start and save of a job, in Megatron Bridge's format.

A line is `YYYY-MM-DD HH:MM:SS<TAB>Job ID: <id><TAB># GPUs: <ranks><TAB><what happened>`. Rank 0 writes it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import torch.distributed as dist

from onstep.config import ConfigContainer
from onstep.distributed import World, world_size_from_environment
from onstep.errors import CheckpointError
from onstep.training.run import Run

logger = logging.getLogger(__name__)

FILE_NAME = "progress.txt"
_TIME = "%Y-%m-%d %H:%M:%S"
_FLOPS = "Floating-point operations: "


def append_to_progress_log(save_dir: str | Path, text: str, world: World | None = None, barrier: bool = True) -> None:
    """Append a line about this job to the log in `save_dir`, which is created if needed.

    Collective if `barrier` is True: the line then reports what all ranks have done. A line that an earlier job left
    incomplete is terminated first.

    Args:
        save_dir: directory of the checkpoints.
        text: the event; its fields are separated by tabs.
        world: None means torch's default process group.
    """
    if world is None:
        world = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
    if barrier:
        world.barrier()
    if not world.is_main:
        return
    path = Path(save_dir) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    job = os.environ.get("SLURM_JOB_ID", "")
    # Megatron Bridge's line, and its events below: tools read them
    line = f"{datetime.now():{_TIME}}\tJob ID: {job}\t# GPUs: {world.size}\t{text}\n"
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        is_cut = size > 0 and file.read(1) != b"\n"
        file.write(("\n" + line if is_cut else line).encode())


def log_job_start(state: Run) -> None:
    """Record the start of a job: `Starting job`. Collective."""
    directory = _dir_of(state)
    if directory is not None:
        append_to_progress_log(directory, "Starting job", state.world)


def log_async_checkpoint_saved(state: Run, step: int) -> None:
    """Record that the asynchronous save of `step` is durable: `Saved async checkpoint`. Not collective."""
    directory = _dir_of(state)
    if directory is not None:
        append_to_progress_log(directory, f"Saved async checkpoint\tIteration: {step}", state.world, barrier=False)


def get_start_time_from_progress_log(
    cfg: ConfigContainer, *, directory: str | Path | None = None, world_size: int | None = None
) -> tuple[datetime, float]:
    """The start of the jobs with the current number of ranks, and the floating-point operations done before that.

    The start is the first `Starting job` line after the last line with another number of ranks; the operations are
    those of the last checkpoint that was durable by then. An asynchronous save counts from its `Saved async checkpoint`
    line on. Unreadable lines, such as the last line of a killed job, are skipped.

    Args:
        cfg: its `checkpoint.save` is the directory of the log, unless `directory` is given.
        world_size: number of ranks; None means that of the process group, or of torchrun's environment.

    Raises:
        CheckpointError: if the directory, the log or such a line is missing.
    """
    directory = directory if directory is not None else cfg.checkpoint.save
    if directory is None:
        raise CheckpointError("checkpoint.save is not set; set it to the directory of the progress log.")
    path = Path(directory) / FILE_NAME
    ranks = world_size if world_size is not None else world_size_from_environment()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # the rest is an incomplete line
    except FileNotFoundError:
        raise CheckpointError(
            f"found no progress log {path}; logger.log_progress=true writes one from the start of a job."
        ) from None
    start = _first_start(lines, ranks)
    if start is None:
        raise CheckpointError(
            f"{path} must have a 'Starting job' line with {ranks} ranks after the last line with another number, but "
            f"has none; start jobs with logger.log_progress=true."
        )
    return start


def compute_throughputs_and_append_to_progress_log(state: Run, num_floating_point_operations_so_far: float) -> None:
    """Record that a checkpoint is saved (or that its asynchronous save begins), with the model's TFLOP/s per GPU.

    Job throughput counts from `state.start_time`, cumulative throughput from the first job with as many ranks.
    Collective; does nothing without a checkpoint directory. Tokens are the samples so far times the run's
    `model.seq_length`, as in Bridge, whatever the model or the samples look like.

    Args:
        state: the run's state; its `flops_at_start` is where the job began.
        num_floating_point_operations_so_far: of the whole run, over all ranks.
    """
    directory = _dir_of(state)
    if directory is None:
        return
    text = _save_text(state, directory, num_floating_point_operations_so_far) if state.world.is_main else ""
    append_to_progress_log(directory, text, state.world)


def pending_flops(state: Run) -> float:
    """Floating-point operations since the last logged step, which the run's own count does not include yet.

    Reads the device, and does not change the log interval.
    """
    accumulator = state.features.of_the_loop.get("meter")
    return 0.0 if accumulator is None else accumulator.tokens_so_far() * state.flops_per_token


def _save_text(state: Run, directory: Path, flops: float) -> str:
    ranks, progress = state.world.size, state.train_state
    job_seconds = time.time() - state.start_time
    job = _tflops_per_gpu(flops - state.flops_at_start, job_seconds, ranks)
    cumulative = job
    try:
        start, flops_at_first_start = get_start_time_from_progress_log(state.cfg, directory=directory, world_size=ranks)
    except CheckpointError as error:  # a deleted log must not end the run at its next save
        logger.warning("reporting this job's throughput as the cumulative one: %s", error)
    else:
        seconds = (datetime.now() - start).total_seconds()
        cumulative = _tflops_per_gpu(flops - flops_at_first_start, seconds, ranks)
    kind = "Saving async checkpoint" if state.cfg.checkpoint.async_save else "Saved checkpoint"
    tokens = progress.consumed_train_samples * state.cfg.model.seq_length
    return "\t".join(
        (
            kind,
            f"Iteration: {progress.step}",
            f"Job throughput: {job:.1f} MODEL_TFLOP/s/GPU",
            f"Cumulative throughput: {cumulative:.1f} MODEL_TFLOP/s/GPU",
            f"{_FLOPS}{flops:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        )
    )


def _tflops_per_gpu(flops: float, seconds: float, ranks: int) -> float:
    """0 for an empty time span, and for a run that was rolled back to before its start."""
    return max(flops, 0.0) / (seconds * 1e12 * ranks) if seconds > 0 else 0.0


def _first_start(lines: Iterable[str], own_ranks: int) -> tuple[datetime, float] | None:
    """The start of the first job with this number of ranks after the last other number, and the operations by then."""
    start = None
    committed = 0.0
    pending: dict[str, float] = {}  # of asynchronous saves that are not durable yet, by their `Iteration: N`
    for line in lines:
        try:
            timestamp, _, gpus, kind, *rest = line.split("\t")
            when, ranks = datetime.strptime(timestamp, _TIME), int(gpus.removeprefix("# GPUs: "))
            # the last field is ignored: its last digits may be missing
            flops = [float(part.removeprefix(_FLOPS)) for part in rest[:-1] if part.startswith(_FLOPS)]
        except ValueError:
            continue
        is_save = kind in ("Saved checkpoint", "Saving async checkpoint")
        if is_save and not flops:
            continue
        if ranks != own_ranks:
            start = None
        if kind == "Saved checkpoint":
            committed = flops[0]
        elif kind == "Saving async checkpoint":
            pending[rest[0]] = flops[0]
        elif kind == "Saved async checkpoint" and rest:
            committed = pending.pop(rest[0], committed)
        elif kind == "Starting job" and ranks == own_ranks and start is None:
            start = (when, committed)
    return start


def _dir_of(state: Run) -> Path | None:
    """The directory of the run's checkpoints: `checkpoint.save`, else the one that the run chose itself."""
    if state.cfg.checkpoint.save is not None:
        return Path(state.cfg.checkpoint.save)
    return state.checkpoints.root if state.checkpoints is not None else None
