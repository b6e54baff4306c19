"""Parameters that ranks gather in MXFP8, from float32 masters of which each rank has its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_processes import Processes
from tests.support.jobs.mxfp8_jobs import made

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.mxfp8_jobs"
SHARED = "reuse_grad_buf_for_mxfp8_param_ag"
BOTH = ["overlap_grad_reduce", "overlap_param_gather"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_as_one_process_whose_weights_are_rounded_and_whatever_overlaps_with_the_same_bits(
    processes: Processes, tmp_path: Path, ranks: int
) -> None:
    """The MXFP8 buffer, a known failure of Megatron-Core: masters that are staged in the memory of the gradients while
    the hooks are off must not be added to those of the first step, nor be lost when parameters are gathered by force.
    """
    [by_hand] = processes.results(JOBS, "by_hand", tmp_path / "hand", {}, ranks=1)
    settings = [
        {"megabytes": megabytes, "flags": flags}
        for megabytes in (1e-5, 1.0)
        for flags in ([], [SHARED], [SHARED, *BOTH])
    ]
    for runs in processes.results(JOBS, "steps", tmp_path / "ranks", {"runs": settings}, ranks=ranks):
        for plain, *others in (runs[:3], runs[3:]):
            assert plain["losses"] == pytest.approx(by_hand["losses"], rel=1e-5)
            for own, expected in zip(plain["masters"], by_hand["masters"], strict=True):
                assert own == pytest.approx(expected, abs=1e-5)
            assert all(plain["is_rounded"])
            for one in others:
                assert one["clean"], "the last gather has left nothing in the memory of the gradients"
                assert {**one, "clean": None} == plain


def test_a_gather_sends_33_bytes_for_32_numbers_and_each_rank_has_the_masters_of_its_rows(
    processes: Processes, tmp_path: Path
) -> None:
    """Rows of matrices that two ranks divide: 38, 32, 6 and 2 of them; vectors are sent in float32."""
    matrices = 38 * (3 + 1) + 32 * (37 + 2) + 6 * (32 + 1) + 2 * (5 + 1)
    vectors = 4 * (38 + 32 + 32 + 32 + 6 + 2)
    [one], [two] = processes.results(JOBS, "steps", tmp_path, {"runs": [{"flags": [SHARED, *BOTH]}]})
    assert one["gathered"] == two["gathered"] == matrices + vectors
    assert one["own"] + two["own"] == 4 * sum(parameter.numel() for parameter in made().parameters())


def test_what_is_written_to_a_parameter_is_its_master(processes: Processes, tmp_path: Path) -> None:
    for forward, update, between, load in processes.results(JOBS, "written", tmp_path, {"flags": []}):
        assert forward[0] == pytest.approx(0.3, rel=1e-6)
        assert forward[1] == 0.3125, "the nearest in MXFP8"
        assert update == [0.7], "and not 0.3 less a step"
        assert between == [0.4], "once the norm is known"
        assert load == [True]


def test_bfloat16_weights_and_early_gradients_are_refused(processes: Processes, tmp_path: Path) -> None:
    for said in processes.results(JOBS, "refused", tmp_path / "refused", {}):
        assert "5.bias is bfloat16; load the model in float32" in said
    for said in processes.results(JOBS, "early", tmp_path / "early", {"flags": [SHARED, BOTH[1]]}):
        assert "got a gradient in the memory in which it is being gathered" in said
