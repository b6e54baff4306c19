"""How ranks leave their group: after an error without waiting for the others, and else as torch asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onstep import Callback, pretrain
from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.distributed import open_world
from onstep.distributed.process_group import group_options
from tests.support import torchrun
from tests.support.forked_processes import Processes, output_of

JOBS = "tests.support.jobs.group_end_jobs"
GPU = torch.device("cuda", 1)


class Ends(Callback):
    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def on_train_step_end(self, context: Any) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ways in which groups ended."""
    found: list[str] = []
    for owner, name in ((dist, "destroy_process_group"), (dist.distributed_c10d, "_abort_process_group")):
        original = getattr(owner, name)

        def end(*args: Any, name: str = name, original: Any = original) -> None:
            found.append(name)
            original(*args)

        monkeypatch.setattr(owner, name, end)
    return found


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "destroy_process_group"),
        (SystemExit(3), "destroy_process_group"),
        (ValueError("of the test"), "_abort_process_group"),
        (KeyboardInterrupt(), "_abort_process_group"),
    ],
    ids=["none", "exit", "error", "interrupt"],
)
def test_a_group_is_aborted_after_an_error_and_destroyed_otherwise(
    tiny_config: ConfigContainer, ends: list[str], error: BaseException | None, expected: str
) -> None:
    tiny_config.train.train_iters = 3
    if error is None:
        pretrain(tiny_config)
    else:
        with pytest.raises(type(error)):
            pretrain(tiny_config, callbacks=[Ends(error)])
    assert ends == [expected]
    assert not dist.is_initialized()


def test_a_group_is_aborted_after_the_error_that_ended_the_script(
    ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the exit of Python, where a group of several ranks ends, that error is not being handled any more."""
    world = open_world(DistributedInitConfig(device="cpu"))
    monkeypatch.setattr(sys, "last_value", ValueError("of the script"), raising=False)
    world.close()
    assert ends == ["_abort_process_group"]


def test_an_error_that_is_older_than_the_group_does_not_count(tiny_config: ConfigContainer, ends: list[str]) -> None:
    tiny_config.train.train_iters = 3
    try:
        raise ValueError("of an earlier run")
    except ValueError:
        pretrain(tiny_config)
    assert ends == ["destroy_process_group"]


@pytest.mark.parametrize("door", ["pretrain", pytest.param("trainer", marks=pytest.mark.process)])
@pytest.mark.distributed
def test_a_failing_rank_shows_its_traceback_and_ends(
    door: str, processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    settings = {"door": door, "corpus": str(corpus), "cache": str(token_cache)}
    if door == "pretrain":
        assert processes.run(JOBS, "fails", tmp_path, settings, ranks=2) == [1, 1]
        said = output_of(tmp_path)
    else:  # the group ends with the process
        code, said = torchrun.finish(torchrun.job(JOBS, "fails", settings), tmp_path)
        assert code == 1
    assert "ValueError: of the test" in said
    assert "destroying the group" not in said


@pytest.mark.distributed
def test_tensors_on_the_cpu_are_reduced_beside_a_backend_for_the_gpu(processes: Processes, tmp_path: Path) -> None:
    assert processes.results(JOBS, "reduces", tmp_path) == [{"sum": 3.0, "agreed": [1], "has_own_group": True}] * 2


def test_nccl_has_gloo_beside_it_and_knows_its_gpu() -> None:
    assert group_options("nccl", GPU) == {"backend": "cuda:nccl,cpu:gloo", "device_id": GPU}
    assert group_options("gloo", GPU) == {"backend": "gloo"}


@pytest.mark.distributed
def test_a_rank_that_waits_too_long_names_the_limit(processes: Processes, tmp_path: Path) -> None:
    notes = processes.results(JOBS, "waits", tmp_path)[1]
    assert "rank 1 of 2 waited in World.barrier" in notes
    assert "dist.distributed_timeout_minutes=0.05" in notes


@pytest.mark.slow
def test_after_the_first_step_a_rank_waits_for_a_shorter_time(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache)}
    waits, late = processes.results(JOBS, "comes_late", tmp_path, settings)
    for result in (waits, late):
        before, after = result["limits"]
        assert len(before) > 1
        assert set(before) == {1800.0}
        assert after == [2.0] * len(before)
    assert "waited in World.agree for longer than dist.timeout_after_first_step=2" in waits["notes"]


def test_after_a_training_groups_have_the_limits_that_they_had(processes: Processes, tmp_path: Path) -> None:
    for found in processes.results(JOBS, "limits_for_a_while", tmp_path):
        assert [set(one) for one in found] == [{1800.0}, {45.0}, {1800.0}, {30.0}, {1800.0}]


def test_a_process_keeps_no_group_of_a_run_that_is_over(processes: Processes, tmp_path: Path) -> None:
    for found in processes.results(JOBS, "opens_again", tmp_path):
        assert [one[:3] for one in found] == [[0, 0, 0]] * 5
        assert len({one[3] for one in found}) == 1, "nor the threads of one"
