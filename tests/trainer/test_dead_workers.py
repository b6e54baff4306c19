"""A data worker that dies ends the run with an error that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from onstep.errors import DataError
from tests.support.small_models import Regression, arguments, quiet, regression_rows
from tests.support.waiting import PATIENCE

# torch's handler of SIGCHLD raises wherever its own code is, also while that opens a file
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROWS = regression_rows(16)


def die(code: int | None) -> None:
    if code is None:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code or 0)


class Dies(Dataset[Any]):
    def __init__(self, code: int | None) -> None:
        self.code = code

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        if index == 9:
            die(self.code)
        return ROWS[index]


class StreamDies(IterableDataset[Any]):
    def __init__(self, code: int | None) -> None:
        self.code = code

    def __iter__(self) -> Iterator[Any]:
        for index, row in enumerate(ROWS):
            if index == 9:
                die(self.code)
            yield row


@pytest.mark.parametrize("code", [None, 3])
@pytest.mark.parametrize("kind", [Dies, StreamDies])
def test_a_worker_that_dies_in_the_training_is_named_and_the_run_has_failed(
    tmp_path: Path, kind: type[Any], code: int | None
) -> None:
    args = arguments(tmp_path, dataloader_num_workers=2, max_steps=8)
    with pytest.raises(DataError, match=r"a data worker died: process \d+ (exited|was killed)"):
        quiet(Regression(), args, kind(code)).train()
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["error"][:29]) == ("failed", "DataError: a data worker died")


def test_a_worker_that_dies_in_an_evaluation_is_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, dataloader_num_workers=1)
    with pytest.raises(DataError, match="a data worker died: process"):
        quiet(Regression(), args).evaluate(Dies(None))


SPAWNS = """
import sys, torch
from onstep import Trainer, TrainingArguments
class Model(torch.nn.Linear):
    def forward(self, x): return {"loss": super().forward(x).mean()}
class Own(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, 2, num_workers=1, multiprocessing_context="spawn")
args = TrainingArguments(sys.argv[1], max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[])
Own(Model(2, 1), args, train_dataset=[{"x": torch.ones(2)}] * 8).train()
"""


@pytest.mark.slow
def test_a_script_without_a_guard_for_spawned_workers_is_told_to_have_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 1
    assert 'put what starts the training under if __name__ == "__main__":' in ended.stderr
    assert "DataError: a data worker died: process" in ended.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"
