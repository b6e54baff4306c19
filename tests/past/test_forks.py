"""A fork is a new run that begins at the end of a step of another one."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.cli.config import import_file, load_callback
from onstep.cli.main import main
from onstep.events import Request
from onstep.past.fork_directory import prepare
from onstep.past.forks import plan_fork
from onstep.record import read_records
from tests.support.forked_processes import Processes
from tests.support.past_runs import run_config
from tests.support.shell import Shell
from tests.support.small_configs import small_pretrain_config
from tests.support.whole_runs import left_by

STEPS = 10


NOTES = """
import json, os, signal
from onstep import Callback

class Notes(Callback):
    ranks = "all"

    def on_train_step_start(self, context):
        state = context.state
        with (state.run_dir.path / f"samples-{state.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps([context.step + 1, sum(context.sample_ids, [])]) + chr(10))

    def on_step_end(self, context):
        if context.step == int(os.environ.get("DIES_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""Notes the samples of each step, and kills its process after one."""


class Steers(Callback):
    """Halves the learning rate after a step, as somebody would from outside."""

    def on_step_end(self, context: Any) -> None:
        if context.step == 7 and context.state.run_dir.path.name == "a":
            details = {"key": "lr_factor", "value": 0.5, "command_id": "one"}
            context.control.add_request(Request("set", "someone", context.event, "by hand", 0, details))


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """A run with checkpoints of steps 4, 8 and 10, with dropout, that was steered after step 7."""
    config = small_pretrain_config(corpus, token_cache)
    config.run.name, config.run.output_dir = "a", str(tmp_path_factory.mktemp("runs"))
    config.dataset.num_workers, config.validation.eval_iters = 0, 0
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = STEPS, 4, 2
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 4, 10
    config.checkpoint.certify, config.logger.log_interval = True, 1
    config.model.hidden_dropout = 0.1
    manager = CallbackManager()
    (Path(config.run.output_dir) / "notes.py").write_text(NOTES)
    import_file(str(Path(config.run.output_dir) / "notes.py"))
    manager.add([JsonLogger(), Steers(), load_callback("notes:Notes")])
    pretrain(config, callbacks=manager)
    return Path(config.run.output_dir) / "a"


def digests(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def fork(parent: Path, step: int, name: str, *words: str) -> Path:
    assert main(["fork", f"{parent}@{step}", "--name", name, "-q", *words]) == 0
    return parent.parent / name


def end_of(run: Path) -> dict[str, Any]:
    """What a run has learned and logged."""
    found = left_by(run)
    journal = [{k: v for k, v in one.items() if k in ("global_step", "loss", "grad_norm")} for one in found["journal"]]
    return {"step": found["step"], "weights": found["weights"], "files": found["files"], "journal": journal}


def samples_by_step(run: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, as the newest process that did it has read them."""
    found: dict[int, list[int]] = {}
    for path in sorted(run.glob("samples-*.jsonl")):
        of_rank = dict(json.loads(line) for line in path.read_text().splitlines())
        found = {step: found.get(step, []) + of_rank[step] for step in of_rank}
    return found


@pytest.mark.parametrize("step", [8, 6, pytest.param(2, marks=pytest.mark.slow), 0])
def test_a_fork_with_nothing_changed_ends_as_its_parent_which_is_not_touched(parent: Path, step: int) -> None:
    before = digests(parent)
    end = end_of(fork(parent, step, f"same-{step}"))
    assert digests(parent) == before
    assert end == end_of(parent)


def test_what_killed_forks_have_left_is_removed_but_not_that_of_another_user(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError if pid == 1 else ProcessLookupError

    monkeypatch.setattr("os.kill", kill)
    left = [parent.parent / f".left.fork-{socket.gethostname()}-{pid}" for pid in (1, 2)]
    for one in left:
        one.mkdir()
    assert prepare(plan_fork(parent, 8, "left"))
    assert [one.exists() for one in left] == [True, False]


def test_it_trains_on_exactly_the_samples_that_are_not_left_out_each_once(parent: Path) -> None:
    read = samples_by_step(parent)
    gone = [read[7][0], read[7][3], read[9][1]]
    run = fork(parent, 6, "without", "--without-samples", ",".join(map(str, gone)))
    found = samples_by_step(run)
    earlier = [one for step in range(1, 7) for one in read[step]]
    ours = [one for step in range(7, STEPS + 1) for one in found[step]]
    theirs = [one for step in range(7, STEPS + 1) for one in read[step] if one not in gone]
    assert ours[: len(theirs)] == theirs
    assert len({*earlier, *ours}) == len(earlier) + len(ours) == 4 * STEPS
    assert not set(gone) & set(ours)
    again = fork(run, 8, "without-more", "--without-samples", str(found[9][2]))  # a fork of a fork
    assert not {*gone, found[9][2]} & {one for ids in samples_by_step(again).values() for one in ids}


def test_what_differs_begins_after_the_step_and_is_recorded(parent: Path) -> None:
    run = fork(parent, 6, "changed", "--lr-factor", "0.25", "optimizer.clip_grad=0.5")
    ours, theirs = end_of(run)["journal"], end_of(parent)["journal"]
    assert ours[:7] == theirs[:7]  # step 7 is computed before its update
    assert ours[7]["loss"] != theirs[7]["loss"]
    record = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    content = json.loads((run / "run.json").read_text())
    origin = content["forked_from"]
    assert (origin["run"], origin["step"], origin["lr_factor"]) == (str(parent), 6, 0.25)
    assert origin["run_id"] == json.loads((parent / "run.json").read_text())["run_id"] != content["run_id"]
    assert origin["changes"] == {"optimizer.clip_grad": [1.0, 0.5]}
    assert [one.get("forked_from", {}).get("step") for one in record if one["kind"] == "start"] == [None, 6, 6]
    rates = {one["global_step"]: one["learning_rate"] for one in record if one.get("kind") == "log" and "loss" in one}
    was = {one["global_step"]: one["learning_rate"] for one in journal_of(parent)}
    assert rates[5] == was[5]
    assert rates[7] == pytest.approx(was[7] / 0.5 * 0.25)  # its parent was told to halve it after step 7


def journal_of(run: Path) -> list[dict[str, Any]]:
    return [one for one in left_by(run)["journal"] if "learning_rate" in one]


@pytest.mark.parametrize(
    ("ranks", "step"), [(2, 6), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 6), (2, 8)))]
)
@pytest.mark.slow
def test_a_killed_fork_continues_with_the_same_command(
    parent: Path, processes: Processes, tmp_path: Path, ranks: int, step: int
) -> None:
    gone = samples_by_step(parent)[9][0]
    words = [f"{parent}@{step}", f"--without-samples={gone}", "optimizer.clip_grad=0.5", "-q"]
    words += ["checkpoint.save_interval=1"]
    shell = Shell(processes, tmp_path)
    whole, name = f"whole-{ranks}-{step}", f"killed-{ranks}-{step}"
    done = shell.onstep("fork", *words, "--name", whole, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for dies_at in ("5", "9", "10"):
        shell.onstep("fork", *words, "--name", name, ranks=ranks, DIES_AT=dies_at)
    done = shell.onstep("fork", *words, "--name", name, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert end_of(parent.parent / name) == end_of(parent.parent / whole)
    assert end_of(parent.parent / name) != end_of(parent)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["{run}"], "must have the form RUN@STEP"),
        (["{run}@x"], "must have the form RUN@STEP"),
        (["nothing@3"], "there is no run 'nothing'"),
        (["{run}@11"], "step=11 is beyond"),
        (["{run}@8", "--name", "a"], "exists and is not this fork; choose another --name"),
        (["{run}@8", "model.num_layers=3"], "model.num_layers is 1 there and 3 here"),
        (["{run}@8", "checkpoint.load=x"], "checkpoint.load cannot change in a fork"),
        (["{run}@8", "optimizer.clip=1"], "optimizer.clip"),
        (["{run}@8", "--lr-factor", "-1"], "lr_factor"),
        (["{run}@8", "--without-samples", "a"], "must be ids of samples"),
        (["{run}@8", "--without-samples", "{read}"], "is not read after step 8 in epoch 0"),
        (["{run}@6", "--without-samples", "1234567"], "sample 1234567 is not read after step 6"),
    ],
)
def test_what_cannot_be_forked_is_refused_in_a_line_and_leaves_nothing(
    parent: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    there = digests(parent.parent)
    read = samples_by_step(parent)[8][0]
    words = [word.format(run=parent, read=read) for word in words]
    assert main(["fork", *(["--name", "new"] if "--name" not in words else []), "-q", *words]) == 1
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert error in line
    assert digests(parent.parent) == there


@pytest.mark.parametrize("step", [8, 6])
@pytest.mark.parametrize("interval", ["recorded", pytest.param("repeated", marks=pytest.mark.slow)])
def test_a_dry_fork_shows_what_the_fork_does_and_leaves_nothing(
    parent: Path, capsys: pytest.CaptureFixture[str], step: int, interval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if interval == "repeated":
        monkeypatch.setattr("onstep.past.dry_fork._recorded", lambda *_: None)
    gone = samples_by_step(parent)[step + 1][0]
    words = ["optimizer.clip_grad=0.5", "--lr-factor", "0.25", "--without-samples", str(gone)]
    run = fork(parent, step, f"wet-{step}-{interval}", *words)
    ours = {one["global_step"]: one["loss"] for one in end_of(run)["journal"] if "grad_norm" in one}
    theirs = {one["global_step"]: one["loss"] for one in end_of(parent)["journal"] if "grad_norm" in one}
    there = digests(parent.parent)
    capsys.readouterr()
    assert main(["fork", f"{parent}@{step}", *words, "--dry", "--steps", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    expected = [[str(at), f"{theirs[at]:.6g}", f"{ours[at]:.6g}"] for at in (step + 1, step + 2)]
    assert [row[:3] for row in rows] == expected
    assert digests(parent.parent) == there


def test_what_the_parent_writes_outside_of_its_directory_is_not_touched_either(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    config = run_config(corpus, token_cache, tmp_path / "runs", validation__eval_interval=None)
    config.logger.logging_dir, config.logger.tensorboard_dir = str(tmp_path / "logs"), str(tmp_path / "tb")
    config.checkpoint.save = str(tmp_path / "saved")
    manager = CallbackManager()
    manager.add([JsonLogger()])
    pretrain(config, callbacks=manager)
    places = [tmp_path / name for name in ("runs/x", "logs", "tb", "saved")]
    before = list(map(digests, places))
    run = fork(tmp_path / "runs" / "x", 6, "y")
    assert list(map(digests, places)) == before
    whole = [one.get("loss") for one in read_records(tmp_path / "logs" / "trainer_logs.json")]
    assert [one.get("loss") for one in read_records(run / "trainer_logs.json")] == whole
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"checkpoint-6", "checkpoint-8"}


def test_a_fork_of_a_run_that_was_moved_has_its_record(
    corpus: Path, token_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrain(run_config(corpus, token_cache, tmp_path, validation__eval_interval=None))
    (tmp_path / "x").rename(tmp_path / "moved")
    run = fork(tmp_path / "moved", 6, "y")
    assert "missing" not in [word for one in caplog.messages for word in one.split() if "records" in one]
    losses = [
        [one.get("loss") for one in read_records(place / "record.jsonl") if one.get("kind") == "log"]
        for place in (run, tmp_path / "moved")
    ]
    assert losses[0] == losses[1]
