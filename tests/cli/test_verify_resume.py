"""`onstep verify-resume` kills a real job and proves that it made no difference, or names the difference."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from onstep.cli import user_job
from onstep.cli.main import main
from onstep.cli.verify_resume import kill_steps
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes

DRAWS = """
import torch
from onstep import TrainerCallback

class Draws(TrainerCallback):
    def __init__(self):
        self.is_first = True

    def on_step_begin(self, args, state, control, **kwargs):
        if self.is_first:  # once in each process, which no checkpoint can know
            torch.rand(1)
        self.is_first = False
"""
DISTURBS = """
import torch
from onstep import TrainerCallback

class Disturbs(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            next(model.parameters()).add_(0.01)
"""
SEEN = Path("seen")
"""The last step that the command has seen, in the working directory."""


@pytest.fixture
def job(tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of 12 steps with dropout, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "job.yaml").write_text(
        "dataset: {split: '80,10,10', seq_length: 32}\n"
        "model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32, hidden_dropout: 0.1}\n"
        "train: {global_batch_size: 4, train_iters: 12}\n"
        "scheduler: {lr_warmup_iters: 2}\n"
        "validation: {eval_on_start: false, eval_interval: 5, eval_iters: 1}\n"
        "logger: {log_interval: 2}\n"
        "checkpoint: {save_interval: null}\n"
        "dist: {device: cpu}\n"
    )
    return ["job.yaml", f"dataset.paths=[{corpus / 'colorsys.py'}]", f"dataset.cache_dir={token_cache}"]


class Forked:
    """What stands for `subprocess.Popen` of `onstep` in this directory, without the seconds of its imports.

    The run stops after each step until the command has seen it, so that it cannot end before it is killed.
    """

    def __init__(self, processes: Processes, command: list[str], stdout: IO[bytes], **_: Any) -> None:
        words = command[command.index("onstep") + 1 :]
        SEEN.unlink(missing_ok=True)
        settings = {"words": words, "stdout": stdout.name, "stderr": stdout.name, "environment": {}, "seen": str(SEEN)}
        [self._child] = processes.start("tests.support.jobs.paced_jobs", "onstep", Path.cwd(), settings)
        self.pid = self._child.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = next(iter(self._child.processes.exit_codes(self.pid)), None)
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.005)


@pytest.fixture
def forked(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs are processes that are forked from one."""
    known = SimpleNamespace(Popen=partial(Forked, processes), DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(user_job, "subprocess", known)
    look = user_job.UserJob.step

    def step(job: user_job.UserJob) -> int:
        SEEN.write_text(str(found := look(job)))
        return found

    monkeypatch.setattr(user_job.UserJob, "step", step)


@pytest.mark.usefixtures("forked")
def test_a_job_that_resumes_is_proved_to(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-resume", *job, "--kills", "2"]) == 0
    captured = capsys.readouterr()
    assert "sets no checkpoint.save_interval; the killed run saves every 1 steps" in captured.out
    assert "12 steps on 1 rank; killed 2 times" in captured.out
    assert "Equal: samples" in captured.out
    assert "killed 2 times: 100%" in captured.err
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left behind"


@pytest.mark.usefixtures("forked")
def test_the_first_step_and_item_that_differ_are_named(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text(DRAWS)
    words = [*job, "checkpoint.save_interval=4", "--seed", "2"]
    assert main(["verify-resume", *words, "--import", "my.py", "callbacks=[my:Draws]", "--kills", "1"]) == 1
    captured = capsys.readouterr().out
    step = re.search(r"NOT equal. First difference: step (\d+): rng differs", captured)
    assert step is not None, captured
    assert int(step[1]) in (5, 9), "the first step after a checkpoint"
    assert "Code draws random numbers when a process starts" in captured
    kept = re.search(r"Both runs are kept in (\S+)\.\n", captured)
    assert kept is not None
    assert (Path(kept[1]) / "whole" / "run" / "certificate" / "chain.json").exists()


@pytest.mark.usefixtures("forked")
def test_weights_that_are_disturbed_at_each_start_are_found(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.py").write_text(DISTURBS)
    words = [*job, "checkpoint.save_interval=4", "--import", "my.py", "callbacks=[my:Disturbs]"]
    assert main(["verify-resume", *words, "--kills", "1", "--seed", "2"]) == 1
    assert re.search(r"First difference: step (5|9): loss differs", capsys.readouterr().out)


@pytest.mark.usefixtures("forked")
def test_a_setting_that_leaves_state_out_is_named_as_the_cause(
    job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*job, "checkpoint.save_interval=4", "checkpoint.save_rng=false", "--kills", "1", "--seed", "2"]
    assert main(["verify-resume", *words]) == 1
    captured = capsys.readouterr().out
    assert "checkpoint.save_rng=false: a start from a checkpoint does not get" in captured
    assert "callback" not in captured


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_are_proved_by_torchrun(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "proof"
    assert main(["verify-resume", *job, "--kills", "2", "--ranks", "2", "--directory", str(directory)]) == 0
    assert "12 steps on 2 ranks; killed 2 times" in capsys.readouterr().out
    assert (directory / "killed" / "run" / "certificate" / "chain.json").exists(), "a directory that was given is kept"


def test_a_job_that_fails_by_itself_shows_its_last_words(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the working directory was imported')")
    assert main(["verify-resume", *job, "callbacks=[nowhere:Thing]", "--kills", "1"]) == 1
    captured = capsys.readouterr()
    assert "the job itself failed (exit code 1)" in captured.err
    assert "No module named 'nowhere'" in captured.err
    assert "Both runs are kept in" in captured.out


def test_a_directory_with_something_in_it_is_refused(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify-resume", *job, "--directory", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_signal_that_ends_the_command_ends_the_job_too(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job = user_job.UserJob(("tiny_gpt",), ranks=1, output_dir=tmp_path)

    def begin_and_be_ended() -> None:
        with job.start() as attempt:
            os.kill(os.getpid(), signal.SIGTERM)
            attempt.wait_for(lambda: False, lambda step: None)

    with pytest.raises(SystemExit, match="143"):
        begin_and_be_ended()
    assert signal.getsignal(signal.SIGTERM) is before
    assert str(tmp_path) not in subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout


def test_kills_are_spread_over_the_run_and_none_comes_after_it() -> None:
    for seed in range(50):
        steps = kill_steps(21, 5, random.Random(seed))
        assert [(step - 1) // 4 for step in steps] == [0, 1, 2, 3, 4]
        assert kill_steps(6, 5, random.Random(seed)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("steps", "said"), [(5, "use at most --kills 4"), (1, "at least two steps")])
def test_a_run_that_is_too_short_to_be_killed_so_often_is_refused(steps: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kill_steps(steps, 5, random.Random(0))
