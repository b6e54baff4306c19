"""A rewind beside a live run, one that is killed, and rewinds on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onstep
from onstep import Callback, CallbackContext, pretrain
from tests.support.forked_processes import Processes
from tests.support.past_runs import content_of, run_config

JOBS = "tests.support.jobs.past_jobs"


def test_a_rewind_that_is_killed_changes_nothing(run: Path, processes: Processes, tmp_path: Path) -> None:
    before = content_of(run)
    assert processes.run(JOBS, "killed", tmp_path, {"run": str(run), "step": 6}) == [-9]
    assert content_of(run) == before
    [found] = processes.results(JOBS, "rewind", tmp_path, {"run": str(run), "step": 6}, ranks=1)
    assert found["summary"].startswith("equal to the bit")


class Rewinds(Callback):
    """Lets another process rewind the run that is training."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self._processes, self._directory = processes, directory
        self.found: dict[str, Any] = {}
        self.changed = True

    def on_step_end(self, context: CallbackContext) -> None:
        if context.state.train_state.step == 7:
            run = self._directory / "runs" / "x"
            before = content_of(run)
            [self.found] = self._processes.results(
                JOBS, "rewind", self._directory, {"run": str(run), "step": 5}, ranks=1
            )
            self.changed = content_of(run) != before


def test_a_run_that_is_training_is_rewound(
    corpus: Path, token_cache: Path, tmp_path: Path, processes: Processes
) -> None:
    rewinds = Rewinds(processes, tmp_path)
    pretrain(run_config(corpus, token_cache, tmp_path / "runs"), callbacks=[rewinds])
    assert rewinds.found["summary"].startswith("equal to the bit")
    assert not rewinds.changed


@pytest.mark.distributed
def test_ranks_are_repeated_to_the_bit_on_as_many(
    corpus: Path, token_cache: Path, tmp_path: Path, processes: Processes
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache)}
    assert processes.run(JOBS, "train", tmp_path, settings, ranks=2) == [0, 0]
    run = tmp_path / "runs" / "x"
    before = content_of(run)
    found = processes.results(JOBS, "rewind", tmp_path, {"run": str(run), "step": 6}, ranks=2)
    assert found[0]["summary"].startswith("equal to the bit")
    assert [len(set(one["indices"])) for one in found] == [4, 4]
    with onstep.rewind(run, 6) as past:
        assert "not to the bit from step 4 on" in past.comparison.summary
        assert "the run had 2 ranks, this has 1" in past.comparison.summary
    assert content_of(run) == before


@pytest.mark.distributed
@pytest.mark.slow
def test_samples_and_layers_are_measured_alike_whether_ranks_divide_weights_or_updates_or_nothing(
    corpus: Path, token_cache: Path, tmp_path: Path, processes: Processes
) -> None:
    """But for the gradient of a sample, of which there is none where weights are in shards."""
    flags = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    divided = {"ddp__bucket_cap_mb": 0.01} | {f"ddp__{one}": True for one in flags}
    layouts = {"ddp": {}, "distopt": divided, "fsdp": {"parallel__data_parallel_shard_size": 2}}
    found = {}
    for name, changes in layouts.items():
        settings = {"corpus": str(corpus), "cache": str(token_cache), "step": 6, "changes": changes}
        found[name], other = processes.results(JOBS, "views", tmp_path / name, settings)
        assert found[name].pop("summary").startswith("equal to the bit")
        assert other.pop("summary").startswith("not compared")
        assert other == found[name], "all ranks see the same"
    replicas = found.pop("ddp")
    for one in found.values():
        for own, expected in zip(one["samples"] + one["layers"], replicas["samples"] + replicas["layers"], strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
    for own, expected in zip(found["distopt"]["gradients"], replicas["gradients"], strict=True):
        assert own == pytest.approx(expected, rel=1e-5)
    assert found["fsdp"]["gradients"] == [[None, None]] * 4
