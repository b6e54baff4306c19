"""`progress.txt` beside the checkpoints: a line for each start and each save of a job, in Megatron Bridge's format.

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
    """Append a line about this job to the log in `save_dir`, which is made if needed.

    Collective where `barrier` is True: the line then says what all ranks have done. A line that an earlier job left
    half-written is ended first.

    Args:
        save_dir: folder of the checkpoints.
        text: what happened; its parts are separated by tabs.
        world: None is torch's default process group.
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
    line = f"{datetime.now():{_TIME}}\tJob ID: {job}\t# GPUs: {world.size}\t{text}\n"
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        is_cut = size > 0 and file.read(1) != b"\n"
        file.write(("\n" + line if is_cut else line).encode())


def log_job_start(state: Run) -> None:
    """Write that a job starts: `Starting job`. Collective."""
    folder = _folder_of(state)
    if folder is not None:
        append_to_progress_log(folder, "Starting job", state.world)


def log_async_checkpoint_saved(state: Run, step: int) -> None:
    """Write that the asynchronous save of `step` is durable: `Saved async checkpoint`. No collective."""
    folder = _folder_of(state)
    if folder is not None:
        append_to_progress_log(folder, f"Saved async checkpoint\tIteration: {step}", state.world, barrier=False)


def get_start_time_from_progress_log(
    cfg: ConfigContainer, *, folder: str | Path | None = None, world_size: int | None = None
) -> tuple[datetime, float]:
    """When the jobs with the present number of ranks began, and the floating-point operations done before that.

    That is the first `Starting job` line after the last line of another number of ranks, and the operations of the last
    checkpoint that was durable by then. An asynchronous save counts from its `Saved async checkpoint` line on. Lines
    that cannot be read, as the last one of a job that was killed, are skipped.

    Args:
        cfg: its `checkpoint.save` is the folder of the log, unless `folder` is given.
        world_size: number of ranks; None is that of the process group, or of torchrun's environment.

    Raises:
        CheckpointError: when there is no folder, no log, or no such line in it.
    """
    folder = folder if folder is not None else cfg.checkpoint.save
    if folder is None:
        raise CheckpointError("checkpoint.save is not set, and the progress log is in that folder; set it.")
    path = Path(folder) / FILE_NAME
    ranks = world_size if world_size is not None else world_size_from_environment()
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # the rest is half a line
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no progress log {path}; logger.log_progress=true writes one from the start of a job on."
        ) from None
    start = _first_start(lines, ranks)
    if start is None:
        raise CheckpointError(
            f"{path} must have a 'Starting job' line of {ranks} ranks after the last line of another number, and has "
            f"none; start jobs with logger.log_progress=true."
        )
    return start


def compute_throughputs_and_append_to_progress_log(state: Run, num_floating_point_operations_so_far: float) -> None:
    """Write that a checkpoint is saved (or that its asynchronous save begins), with the model's TFLOP/s per GPU.

    Of this job: since `state.start_time`. Cumulative: since the first job with as many ranks. Collective; does nothing
    where there is no folder of checkpoints. Its tokens are the samples so far times the run's `model.seq_length`, as
    Bridge counts them, whatever the model or the samples are like.

    Args:
        state: the run's; its `flops_at_start` is where the job began.
        num_floating_point_operations_so_far: of the whole run, over all ranks.
    """
    folder = _folder_of(state)
    if folder is None:
        return
    text = _save_text(state, folder, num_floating_point_operations_so_far) if state.world.is_main else ""
    append_to_progress_log(folder, text, state.world)


def pending_flops(state: Run) -> float:
    """Floating-point operations since the last logged step, which the run's own count does not have yet.

    It reads the device, and leaves the log interval as it is.
    """
    meter = state.features.of_the_loop.get("meter")
    return 0.0 if meter is None else meter.tokens_so_far() * state.sums.flops_per_token


def _save_text(state: Run, folder: Path, flops: float) -> str:
    ranks, progress = state.world.size, state.train_state
    job_seconds = time.time() - state.start_time
    job = _tflops_per_gpu(flops - state.sums.flops_at_start, job_seconds, ranks)
    cumulative = job
    try:
        start, flops_at_first_start = get_start_time_from_progress_log(state.cfg, folder=folder, world_size=ranks)
    except CheckpointError as error:  # a log that somebody removed must not end the run at its next save
        logger.warning("cumulative throughput is that of this job: %s", error)
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
    """0 for no time at all, and for a run that went back to before its start."""
    return max(flops, 0.0) / (seconds * 1e12 * ranks) if seconds > 0 else 0.0


def _first_start(lines: Iterable[str], own_ranks: int) -> tuple[datetime, float] | None:
    """When the first job with this number of ranks began that no other number followed, and the operations by then."""
    start = None
    committed = 0.0
    pending: dict[str, float] = {}  # of the asynchronous saves that are not durable yet, by their `Iteration: N`
    for line in lines:
        try:
            moment, _, gpus, kind, *rest = line.split("\t")
            when, ranks = datetime.strptime(moment, _TIME), int(gpus.removeprefix("# GPUs: "))
            # the last part does not count: its last figures may be missing
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


def _folder_of(state: Run) -> Path | None:
    """Where the run's checkpoints are: `checkpoint.save`, else the folder that the run chose itself."""
    if state.cfg.checkpoint.save is not None:
        return Path(state.cfg.checkpoint.save)
    return state.checkpoints.root if state.checkpoints is not None else None
