"""The anomaly gate names the samples of a spike with the largest losses, those of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes
from tests.support.shell import Shell
from tests.support.train_command import SMALL


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_largest_losses_of_a_spike_are_those_of_all_ranks(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, ranks: int
) -> None:
    words = [*SMALL, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}", "run.name=x"]
    words += ["anomaly.on_spike=skip", "anomaly.spike_threshold=0.0001", "anomaly.spike_warmup=3"]
    words += ["train.micro_batch_size=2", "anomaly.spike_metrics=[grad_norm]", "model.hidden_dropout=0", "-q"]
    shell = Shell(processes, tmp_path)
    done = shell.onstep("train", *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (tmp_path / "runs" / "x" / "decisions.jsonl").read_text().splitlines())
    skips = [one["details"] for one in lines if one["flag"] == "skip"]
    assert skips
    for details in skips:
        worst = details["worst_samples"]
        assert {one["sample_id"] for one in worst} < set(details["sample_ids"])
        assert len(worst) == 3
        assert worst == sorted(worst, key=lambda one: -one["share"])
        least = min(one["loss"] for one in worst)
        whole = sum(one["loss"] for one in worst)
        assert whole + least >= 4 * details["loss"] > whole  # the fourth of the step has the smallest loss
    shown = shell.onstep("why", "x").stdout
    assert f"largest losses: sample {skips[0]['worst_samples'][0]['sample_id']} (loss" in shown
