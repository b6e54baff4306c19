"""Profilers, and the history of CUDA's allocator."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import PATH, SAFE, ConfigSection, option

WITHIN_THE_RUN = "a profiling.profile_step_start within the run"
_PYTORCH = "profiling.use_pytorch_profiler=true"
_PROFILES = "profiling.use_pytorch_profiler or profiling.use_nsys_profiler or profiling.record_memory_history"


@dataclass
class ProfilingConfig(ConfigSection):
    """Profiling, and recording of CUDA's memory allocator."""

    use_pytorch_profiler: bool = option(
        False,
        SAFE,
        needs=WITHIN_THE_RUN,
        help="Write a trace of torch's profiler, `torch_profile/rank-<r>.json.gz` beside `logger.tensorboard_dir` "
        "or in the run's directory, for the steps after `profile_step_start` up to `profile_step_end`.",
    )
    use_nsys_profiler: bool = option(
        False, SAFE, needs=WITHIN_THE_RUN, help="Mark the same steps for `nsys profile -c cudaProfilerApi`."
    )
    profile_step_start: int = option(
        10, SAFE, bound=">= 0", needs=_PROFILES, help="Steps to train before a profile begins."
    )
    pytorch_profiler_collect_shapes: bool = option(
        False, SAFE, needs=_PYTORCH, help="Record shapes of operands in torch's trace."
    )
    pytorch_profiler_collect_callstack: bool = option(
        False, SAFE, needs=_PYTORCH, help="Record Python's call stack in torch's trace."
    )
    pytorch_profiler_collect_chakra: bool = option(
        False, SAFE, needs=_PYTORCH, help="Write torch's execution trace too, `chakra/rank-<r>.json.gz`."
    )
    record_shapes: bool = option(
        False, SAFE, needs="profiling.use_nsys_profiler=true", help="Record shapes in the ranges that nsys shows."
    )
    nvtx_ranges: bool = option(
        False, SAFE, help="Name each step, its forward and backward passes and its update for nsys; requires a GPU."
    )
    record_memory_history: bool = option(
        False, SAFE, help="Record CUDA's allocations, for a snapshot at `profile_step_end` and when memory runs out."
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        SAFE,
        bound=PATH,
        needs="profiling.record_memory_history=true",
        help="Path of memory snapshots; the rank is inserted before the suffix.",
    )
    profile_step_end: int = option(
        12,
        SAFE,
        bound="> 0",
        needs=_PROFILES,
        help="Step after which a profile ends and the memory snapshot is written.",
    )
    profile_ranks: list[int] = option(
        [0],
        SAFE,
        needs=_PROFILES,
        help="Ranks that profile and record; an empty list is all ranks for profiles, and none for memory.",
    )
