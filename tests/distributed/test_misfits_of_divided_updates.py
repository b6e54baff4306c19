"""Two ranks that divide the updates of a model: what they refuse, in one line with its remedy, and what they do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.misfit_jobs"
REFUSED = {
    "gathers alone": r"overlap_param_gather\S*=[tT]rue gathers what ranks have .* set \S*use_distributed_optimizer",
    "no matrix": r"optimizer.optimizer\S*='?muon'? requires trainable matrices .*, got none; use adam$",
    "no dimension": r"scale has no dimension, so its update cannot be divided .*; make it a vector of one element, or",
    "LBFGS": r"LBFGS requires a closure, .*; use AdamW or SGD$",
    "closure": r"Closing requires a closure, .*; use AdamW or SGD$",
    "of Megatron": r"an optimizer of torch, got OfMegatron; pass a torch.optim.Optimizer, or set",
    "never used": r"spare.bias, spare.weight got no gradient in this step, .*; freeze what .*, or set \S*find_unused",
}
ACCEPTED = ["frozen", "frozen later", "few rows", "never used"]
"""A bucket with frozen and trained parameters; matrices for Muon with fewer rows than ranks, or rows that the ranks do
not divide evenly; and an unused parameter, once it is looked for."""


def test_misfits_are_refused_in_one_line_on_all_ranks_and_no_weight_changes(
    processes: Processes, tmp_path: Path
) -> None:
    for found in processes.results(JOBS, "refused", tmp_path, {"misfits": list(REFUSED)}):
        assert set(found) == set(REFUSED)
        for misfit, (error, is_same) in found.items():
            assert re.search(f"^ConfigError: .*{REFUSED[misfit]}", error), (misfit, error)
            assert "\n" not in error
            assert is_same, misfit


@pytest.mark.slow
def test_what_is_no_misfit_trains_as_replicas_do(processes: Processes, tmp_path: Path) -> None:
    divided, replicas = (
        processes.results(JOBS, "accepted", tmp_path / str(divides), {"names": ACCEPTED, "divides": divides})
        for divides in (True, False)
    )
    assert divided[0] == divided[1]
    for name in ACCEPTED:
        for own, expected in zip(divided[0][name], replicas[0][name], strict=True):
            assert own == pytest.approx(expected, abs=1e-4), name
