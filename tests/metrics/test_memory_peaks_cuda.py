"""On a GPU: the peak of a training does not depend on how often it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import TrainerCallback
from onstep.metrics import report_memory
from onstep.metrics.memory_peaks import MemoryPeaks
from tests.support.small_models import Regression, arguments, quiet, regression_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SPIKE = 512 << 20


class Spikes(TrainerCallback):
    """Allocates 512 MiB in step 2 and frees them."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            torch.empty(SPIKE, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_the_peak_of_a_training_has_its_highest_step(tmp_path: Path, logging_steps: int) -> None:
    pytest.importorskip("psutil")
    pytest.importorskip("transformers")
    args = arguments(tmp_path, use_cpu=False, skip_memory_metrics=False, logging_steps=logging_steps, max_steps=4)
    trainer = quiet(Regression(), args, regression_rows(16), callbacks=[Spikes()])
    peaked = trainer.train().metrics["train_mem_gpu_peaked_delta"]
    assert SPIKE <= peaked < SPIKE + (64 << 20)


def test_peaks_of_an_interval_and_of_the_run() -> None:
    peaks, device = MemoryPeaks(), torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats()
    torch.empty(SPIKE, dtype=torch.uint8, device="cuda")
    first, second = peaks.end_interval(device), peaks.end_interval(device)
    assert first is not None
    assert second is not None
    assert first >= SPIKE > second
    assert report_memory(peaks=peaks)["mem-max-allocated-gigabytes"] >= SPIKE / 1e9
