"""`Trainer` with a model of transformers whose layers two ranks divide."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.forked_processes import Processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOBS = "tests.support.jobs.tensor_trainer_jobs"


def trained(processes: Processes, place: Path, *trainers: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    settings = {"trainers": [{**one, "ranks": ranks, "directory": str(place / one["directory"])} for one in trainers]}
    found: list[dict[str, Any]] = processes.results(JOBS, "trainers", place, settings, ranks=ranks)[0]
    return found


def test_a_trainer_on_two_ranks_is_one_in_one_process_and_continues_to_the_bit(
    processes: Processes, tmp_path: Path
) -> None:
    whole, _, rest, refused = trained(
        processes,
        tmp_path,
        {"directory": "whole"},
        {"directory": "part", "steps": 2},
        {"directory": "part", "resumes": True},
        {"directory": "other", "kind": "opt"},
        ranks=2,
    )
    assert rest == whole
    assert refused["refused"].startswith("OPTForCausalLM has no plan by which parallelism_config['tp_size'] could ")
    shutil.copytree(tmp_path / "part" / "checkpoint-2", tmp_path / "continued" / "checkpoint-2")
    one, continued = trained(
        processes, tmp_path, {"directory": "one"}, {"directory": "continued", "resumes": True}, ranks=1
    )
    for found in (one, continued):
        for name, value in whole.items():
            assert found[name] == pytest.approx(value, rel=1e-5), name
    ours, alone = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "one"))
    assert {name: one.shape for name, one in ours.items()} == {name: one.shape for name, one in alone.items()}
    assert max(float((ours[name] - alone[name]).abs().max()) for name in ours) < 1e-4
