"""`onstep train | head`: a run outlives the reader of its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = (
    "model.num_layers=1 model.hidden_size=16 model.num_attention_heads=1 model.seq_length=16 "
    "dataset.paths=[corpus.txt] train.train_iters=8 train.global_batch_size=2 train.micro_batch_size=2 "
    "logger.log_interval=1 dist.device=cpu"
)


@pytest.mark.process
@pytest.mark.parametrize("closed", ["stdout", pytest.param("both", marks=pytest.mark.slow)])
def test_a_run_whose_output_nobody_reads_any_more_goes_on_to_its_end(tmp_path: Path, closed: str) -> None:
    command = [sys.executable, "-m", "onstep", "train", "logger.console=verbose", "run.name=a", *SMALL.split()]
    (tmp_path / "corpus.txt").write_text("It is written here what a run reads. " * 500)
    error = subprocess.PIPE if closed == "stdout" else subprocess.STDOUT
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=error) as run:
        assert run.stdout is not None
        assert any(b"loading PyTorch" in line for line in iter(run.stdout.readline, b""))
        run.stdout.close()
        said = b"" if run.stderr is None else run.stderr.read()
        assert run.wait() == 0, said
    assert b"Traceback" not in said
    record = json.loads((tmp_path / "runs" / "a" / "run.json").read_text())
    assert (record["status"], record.get("error")) == ("completed", None)
