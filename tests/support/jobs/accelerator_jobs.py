"""What the ranks of `test_accelerator.py` run: `trainer.accelerator` beside accelerate's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import accelerate
import torch

from tests.support.small_models import Regression, arguments, quiet


def results(accelerator: Any, rank: int) -> list[Any]:
    value = torch.tensor(float(rank + 1))
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    ragged = torch.ones(rank + 1, 2)
    gathered = accelerator.gather({"value": value, "rows": [rows]})
    return [
        gathered["value"].tolist(),
        gathered["rows"][0].tolist(),
        accelerator.reduce(value).tolist(),
        accelerator.reduce(value, "mean").tolist(),
        accelerator.gather_for_metrics(rows).tolist(),
        accelerator.pad_across_processes(ragged, dim=0, pad_index=-1).tolist(),
        accelerator.pad_across_processes(ragged, dim=0, pad_index=-1, pad_first=True).tolist(),
        accelerator.num_processes,
        accelerator.process_index,
        accelerator.is_main_process,
        accelerator.is_last_process,
        accelerator.device.type,
    ]


def job_compared(settings: dict[str, Any]) -> dict[str, Any]:
    ours = quiet(Regression(), arguments(Path())).accelerator
    rank = ours.process_index
    found: dict[str, Any] = {"ours": results(ours, rank)}
    found["rows"] = ours.gather_for_metrics(torch.arange(3.0 - 2 * rank) + 10 * rank).tolist()
    found["objects"] = ours.gather_for_metrics([f"a{rank}", f"b{rank}"])
    found["type"] = ours.distributed_type
    with ours.main_process_first():
        note = Path("first.txt")
        found["first"] = note.read_text() if note.exists() else "nobody"
        time.sleep(0.3 if rank == 0 else 0)  # rank 1 would overtake it if it did not wait
        note.write_text(str(rank))
    found["theirs"] = results(accelerate.Accelerator(cpu=True), rank)
    return found
