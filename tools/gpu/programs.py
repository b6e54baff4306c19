"""Small programs that `gpu_check.py` runs, each of which shows one thing on a GPU and prints one line about it.

    python tools/gpu/programs.py NAME [KEY=VALUE ...]

KEY=VALUE are overrides of the default job, as of `onstep train`; `recipe=NAME` chooses another. A program ends with 1
if it did not see what it should. With ONSTEP_GPU_CHECK_DEVICE=cpu and `dist.device=cpu` each runs on a CPU, without
what needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import runs
import steps
import torch
from common import IS_CUDA

PROGRAMS: dict[str, Callable[[list[str]], int]] = {
    one.__name__: one
    for one in (
        *(steps.versions, steps.sync, steps.sync_trainer, steps.kernel, steps.attention, steps.graphs),
        *(steps.recompiled, steps.price, steps.timeline),
        *(
            runs.saves,
            runs.reports,
            runs.overflow,
            runs.rank,
            runs.ranks,
            runs.peaks,
            runs.tokens,
            runs.lora,
            runs.diloco,
        ),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(torch.get_num_threads() if IS_CUDA else 1)
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
