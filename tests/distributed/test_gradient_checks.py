"""Real gloo processes: gradients summed in float32, and a bad one of a rank, named before the update."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed
JOBS = "tests.support.jobs.gradient_jobs"


def test_bfloat16_gradients_are_summed_in_float32_if_asked_for_and_checks_change_no_bit(
    processes: Processes, tmp_path: Path
) -> None:
    found = processes.results(JOBS, "averages", tmp_path, ranks=3)
    assert found == [{"rounded once": [False, True], "float32 has the same bits": True}] * 3


DIVIDED = {"ddp.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True}


@pytest.mark.parametrize(("ranks", "keys"), [(1, {}), (2, {}), (2, DIVIDED)], ids=["one", "replicas", "divided"])
def test_a_bad_gradient_ends_the_run_before_the_update_and_names_the_parameter_and_the_rank(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, ranks: int, keys: dict[str, bool]
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache), "keys": keys}
    found = processes.results(JOBS, "checked", tmp_path, settings, ranks=ranks)
    assert found == found[:1] * ranks
    for case, result in found[0].items():
        kind, door = case.split()
        step, name = {"nan": 2, "large": 102}[kind], "out" if door == "through_trainer" else "final_norm"
        place = f"rank {ranks - 1}" + ", dp_shard 1" * bool(keys)
        said = {
            "nan": rf"NonFiniteError: the gradient of {name}.weight is nan on {place} \(sample ids .*\)\. "
            r"\S*ddp.check_for_nan_in_grad\S*=[tT]rue: ",
            "large": r"AnomalyError: the gradients have a norm of \S+, more than 10 times the largest of the first "
            rf"steps \(\S+\), most of it of {name}.weight on {place} \(sample ids .*\)\. \S*ddp.check_for_l",
        }[kind]
        assert re.match(said, result["error"]), (case, result)
        assert f"the update of step {step} was not applied and the weights are still those of step" in result["error"]
        assert result["same"], case
