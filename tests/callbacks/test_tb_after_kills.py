"""After kills and resumes, TensorBoard's own reader shows each step once."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.record import read_records
from tests.support.forked_processes import Processes
from tests.support.tracker_files import scalars, steps_by_tag
from tests.support.whole_runs import Ranks

JOBS = "tests.support.jobs.tb_jobs"
KILLS = (("on_log", 3), ("on_checkpoint_save", 1), ("on_eval_end", 1))
"""Before the first checkpoint; right after that of step 4; at step 6, to go on from 4 once more."""


@pytest.fixture(scope="module")
def runs(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("runs"), JOBS, corpus=str(corpus), cache=str(token_cache))


def kill_again_and_again(runs: Ranks, name: str, *, ranks: int = 1, **settings: bool) -> Path:
    """The directory of a run that was killed three times and then ended."""
    for event, number in KILLS:
        strikes = [{"signal": "SIGKILL", "event": event, "number": number}]
        codes = runs.start(name, "train", ranks=ranks, strikes=strikes, **settings)
        assert codes == [-9] * ranks, runs.output(name)
    codes = runs.start(name, "train", ranks=ranks, **settings)
    assert codes == [0] * ranks, runs.output(name)
    return runs.directory / name


@pytest.mark.parametrize(("writer_first", "own_dirs", "ranks"), [(True, True, 1), (False, False, 1), (False, False, 2)])
@pytest.mark.slow
def test_each_step_is_shown_once(runs: Ranks, writer_first: bool, own_dirs: bool, ranks: int) -> None:
    name = f"run-{own_dirs}-{ranks}"
    settings = {"own_dirs": own_dirs, "writer_first": writer_first}
    directory = kill_again_and_again(runs, name, ranks=ranks, **settings)
    tb = directory / ("tb-2" if own_dirs else "tb")  # the first start left no checkpoint that knows its directory
    found = steps_by_tag(tb)
    every_step, every_second = list(range(1, 11)), list(range(2, 11, 2))
    for tag in ("train-loss", "learning-rate", "grad-norm", "weights"):
        assert found[tag] == every_step, tag
    for tag in ("eval-loss", "eval-perplexity"):
        assert found[tag] == every_second, tag
    for part in ("parts_a", "parts_b"):
        assert steps_by_tag(tb / part) == {"parts": every_step}, part
    for tag, steps in found.items():
        assert steps == sorted(set(steps)), tag
    assert found["training_info/text_summary"] == [0]
    assert found["experiment/text_summary"] == [0, 5], "that of the third start is hidden"
    check_values(directory, tb)
    check_files(directory, tb, own_dirs)


def check_values(directory: Path, tb: Path) -> None:
    """The reader for scripts sees the same, and what it sees is what the metrics log has."""
    records = read_records(directory / "runs" / "run" / "trainer_logs.json")
    for tag, key in (("train-loss", "loss"), ("eval-loss", "eval_loss")):
        recorded = {record["global_step"]: record[key] for record in records if key in record}
        assert dict(scalars(tb)[tag]) == pytest.approx(recorded, rel=1e-6)
        assert len(scalars(tb)[tag]) == len(recorded)


def check_files(directory: Path, tb: Path, own_dirs: bool) -> None:
    """Only rank 0 of each start has made files, and only in the directory that is continued."""
    pids = {path.name.split(".")[-2] for path in tb.glob("events.out.tfevents.*")}
    assert len(pids) == len(KILLS) + 1 - own_dirs
    assert not (directory / "tb-3").exists()
