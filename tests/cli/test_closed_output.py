"""`onstep train | head`: a run outlives the reader of its output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes
from tests.support.shell import Shell

SMALL = (
    "model.num_layers=1 model.hidden_size=16 model.num_attention_heads=1 model.seq_length=16 "
    "dataset.paths=[corpus.txt] train.train_iters=8 train.global_batch_size=2 train.micro_batch_size=2 "
    "logger.log_interval=1 dist.device=cpu"
)


@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_to_its_end(
    processes: Processes, tmp_path: Path, closed: str
) -> None:
    (tmp_path / "corpus.txt").write_text("It is written here what a run reads. " * 500)
    pipe, errors = tmp_path / "pipe", tmp_path / "errors.txt"
    os.mkfifo(pipe)
    words = ("train", "logger.console=verbose", "run.name=a", *SMALL.split())
    run = Shell(processes, tmp_path).start(*words, stdout=pipe, stderr=errors if closed == "stdout" else pipe)
    with pipe.open() as reader:
        assert any("loading PyTorch" in line for line in reader)
    said = "" if closed == "both" else errors.read_text()
    assert run.wait() == 0, said
    assert "Traceback" not in said
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert (record["status"], record.get("error")) == ("completed", None)
