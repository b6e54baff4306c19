"""Jobs of two nodes on a real SLURM that are ended early come back, and end as if nobody had disturbed them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import checkpoints
from onstep.cli.main import main
from tests.support.slurm_runs import SlurmRuns
from tests.support.tracker_files import table
from tests.support.tracker_reading import comet_archives, mlflow_points, mlflow_runs, newest, wandb_segments
from tests.support.waiting import until
from tests.support.whole_runs import check_same, left_by

pytestmark = [pytest.mark.process, pytest.mark.distributed, pytest.mark.timeout(900)]

LIMITS = 5


def preempt(runs: SlurmRuns, name: str, job: str, restart: int = 0) -> None:
    """Ask a run that is held to save and exit, as SLURM does before the end of the allocation."""
    runs.held(name, restart)
    runs.cluster.ask("scancel", "--signal=USR2", job)
    until(lambda: runs.said(name).count("Received SIGUSR2") >= 2 * restart + 2, lambda: runs.said(name))
    runs.release(name, restart)
    until(lambda: runs.cluster.value(job, "Restarts") == str(restart + 1), lambda: runs.said(name))


def steps(runs: SlurmRuns, name: str) -> list[int]:
    return sorted(info.step for info in checkpoints(runs.run(name) / "checkpoints"))


def points(runs: SlurmRuns, name: str) -> list[tuple[str, ...]]:
    """The rows of the CSV tracker, without what a clock has written."""
    rows = table(runs.run(name) / "metrics.csv")
    assert not rows.duplicated(["step", "kind"]).any()
    return [(row.step, row.kind, str(row.loss), str(row.eval_loss)) for row in rows.itertuples()]


@pytest.mark.slow
def test_a_job_that_is_asked_to_save_is_requeued_and_ends_with_the_bits_of_an_undisturbed_one(
    runs: SlurmRuns, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = runs.launch("once", hold={0: 3})
    preempt(runs, "once", job)
    assert 3 in steps(runs, "once")
    check_same(runs.finish("once", job, restarts=1), whole)
    assert points(runs, "once") == points(runs, "whole")
    assert main(["why", str(runs.run("once"))]) == 0
    assert f"SLURM job {job} on node[1-2], requeued once." in capsys.readouterr().out
    assert "the run saves and exits with code 75 about" in runs.said("once")


@pytest.mark.slow
def test_tasks_of_srun_are_ranks_without_a_launcher(runs: SlurmRuns, whole: dict[str, Any]) -> None:
    job = runs.submit("tasks", hold={0: 3, 1: 6})
    preempt(runs, "tasks", job)
    preempt(runs, "tasks", job, restart=1)
    check_same(runs.finish("tasks", job, restarts=2), whole)


TORCHRUN = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=2
#SBATCH --requeue
#SBATCH --open-mode=append
{setup}
srun --label --kill-on-bad-exit=0 torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
    --rdzv-endpoint="$(hostname):$((20000 + SLURM_JOB_ID % 10000))" {command}
code=$?
echo "start ${{SLURM_RESTART_COUNT:-0}} has ended with $code"
if grep -q '"status": "preempted"' runs/tiny_gpt/run.json; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@pytest.mark.slow
def test_a_run_under_torchrun_leaves_before_its_end_and_comes_back(runs: SlurmRuns, whole: dict[str, Any]) -> None:
    (runs.place("torchrun") / "pace").write_text("14 1")
    job = runs.submit("torchrun", "train.exit_margin_seconds=15", script=TORCHRUN, launcher=("-m", "onstep"))
    check_same(runs.finish("torchrun", job, restarts=1), whole)
    assert "start 0 has ended with 1" in runs.said("torchrun")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_whose_time_is_over_five_times_ends_with_the_bits_and_points_of_an_undisturbed_one(
    runs: SlurmRuns,
) -> None:
    """Each allocation has two minutes, of which each step needs 14 seconds until the fifth requeue."""
    words = ["logger.report_to=[csv,wandb,mlflow,comet]", "train.exit_margin_seconds=15", "train.train_iters=60"]
    expected = runs.undisturbed("whole-of-60", *words)
    (runs.place("limits") / "pace").write_text(f"14 {LIMITS}")
    job = runs.submit("limits", *words, options=("--time=2",))
    until(lambda: runs.cluster.value(job, "JobState") == "COMPLETED", lambda: runs.said("limits"), seconds=1500)
    found = runs.finish("limits", job, restarts=LIMITS)
    check_same(found, expected)
    for restart in range(LIMITS):
        assert f"start {restart} has ended with 75" in runs.said("limits")
    assert runs.said("limits").count("exiting program before SLURM job") == LIMITS
    assert points(runs, "limits") == points(runs, "whole-of-60")
    same_points(runs.run("limits"), runs.run("whole-of-60"))


def same_points(found: Path, expected: Path) -> None:
    """Each service has one run, with the points of the undisturbed one."""
    segments = [wandb_segments(run, num_finished) for run, num_finished in ((found, LIMITS + 1), (expected, 1))]
    assert len({one.run.run_id for one in segments[0]}) == 1
    losses = [newest([point for one in some for point in one.points("train/loss")]) for some in segments]
    assert losses[0] == losses[1]
    histories = []
    for run in (found, expected):
        client, [one] = mlflow_runs(run)
        histories.append(newest(mlflow_points(client, one, "train/loss")))
    assert histories[0] == histories[1]
    archives = [comet_archives(run) for run in (found, expected)]
    assert len({one.meta["offline_id"] for one in archives[0]}) == 1
    curves = [newest([point for one in some for point in one.points("train/loss")]) for some in archives]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_a_run_that_does_not_know_its_end_is_asked_by_slurm(runs: SlurmRuns, whole: dict[str, Any]) -> None:
    (runs.place("signalled") / "pace").write_text("20 1")
    options = ("--time=2", "--signal=USR2@40")
    job = runs.submit("signalled", "train.exit_margin_seconds=null", options=options)
    check_same(runs.finish("signalled", job, restarts=1), whole)
    assert "exiting program after receiving SIGUSR2" in why(runs, "signalled")


def why(runs: SlurmRuns, name: str) -> str:
    return (runs.run(name) / "decisions.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the step", "one rank"])
def test_a_job_of_which_something_was_killed_comes_back(runs: SlurmRuns, whole: dict[str, Any], killed: str) -> None:
    name = killed.replace(" ", "-")
    job = runs.submit(name, hold={0: 5})
    ranks = runs.held(name)
    if killed == "the step":
        runs.cluster.ask("scancel", "--signal=KILL", f"{job}.0")
    else:
        os.kill(ranks[1], signal.SIGKILL)
    runs.release(name)
    runs.wait_for(name, "start 0 has ended with 137")
    check_same(runs.finish(name, job, restarts=1), whole)
    assert points(runs, name) == points(runs, "whole")


@pytest.mark.slow
def test_a_job_leaves_a_drained_node_at_its_requeue(
    runs: SlurmRuns, whole: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    job = runs.submit("drained", hold={0: 3})
    runs.held("drained")
    runs.cluster.ask("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=maintenance")
    try:
        preempt(runs, "drained", job)
        check_same(runs.finish("drained", job, restarts=1), whole)
    finally:
        runs.cluster.ask("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert main(["why", str(runs.run("drained"))]) == 0
    assert f"SLURM job {job} on node[1,3], requeued once." in capsys.readouterr().out


@pytest.mark.slow
def test_without_scontrol_and_squeue_the_exit_code_requeues(
    runs: SlurmRuns, whole: dict[str, Any], tmp_path: Path
) -> None:
    """As in a batch script that runs in a container; the cluster has RequeueExit=75."""
    for command in ("srun", "bash", "env"):
        (tmp_path / command).symlink_to(str(shutil.which(command)))
    job = runs.submit("container", hold={0: 3}, setup=f"export PATH={tmp_path}")
    preempt(runs, "container", job)
    assert "scontrol" not in runs.said("container")
    assert "SLURM does not say when job" in runs.said("container")
    check_same(runs.finish("container", job, restarts=1), whole)


@pytest.mark.slow
def test_a_job_that_is_preempted_before_each_first_step_ends_with_a_word(runs: SlurmRuns) -> None:
    (runs.place("stalled") / "asked").touch()
    job = runs.submit("stalled")
    until(lambda: runs.cluster.value(job, "JobState") == "FAILED", lambda: runs.said("stalled"), seconds=800)
    assert runs.said("stalled").count("has ended with 75\n") == 6
    assert runs.said("stalled").endswith("has ended with 1\n")
    assert f"SLURM job {job} ends here: it was preempted 5 times in a row at step 0" in runs.said("stalled")


@pytest.mark.slow
def test_each_job_of_an_array_is_a_run_of_its_own_and_is_requeued_alone(runs: SlurmRuns) -> None:
    expected = runs.undisturbed("single", ranks=1)
    options = ("--array=0-1", "--nodes=1")
    job = runs.submit("array", "run.name=sweep-$SLURM_ARRAY_TASK_ID", hold={0: 3}, options=options)
    held = [runs.place("array") / "held-0-0"]
    until(lambda: all(file.exists() for file in held), lambda: runs.said("array"))
    until(lambda: runs.said("array").count("split   epoch") == 2, lambda: runs.said("array"))
    runs.cluster.ask("scancel", "--signal=USR2", f"{job}_1")
    runs.wait_for("array", "Received SIGUSR2")
    runs.release("array")
    for task, restarts in ((0, 0), (1, 1)):
        until(
            lambda task=task: runs.cluster.value(f"{job}_{task}", "JobState") == "COMPLETED", lambda: runs.said("array")
        )
        assert runs.cluster.value(f"{job}_{task}", "Restarts") == str(restarts)
        found = left_by(runs.run("array", f"sweep-{task}"))
        check_same(found, expected)


@pytest.mark.slow
def test_a_job_that_makes_room_for_a_more_urgent_one_saves_and_comes_back(
    runs: SlurmRuns, whole: dict[str, Any]
) -> None:
    job = runs.launch("preempted", hold={0: 3})
    runs.held("preempted")
    urgent = runs.place("preempted") / "urgent.sbatch"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    runs.cluster.submit(urgent, "--partition=urgent", "--nodes=3", "--exclusive")
    until(lambda: runs.said("preempted").count("Received SIGTERM") == 2, lambda: runs.said("preempted"))
    runs.release("preempted")
    check_same(runs.finish("preempted", job, restarts=1), whole)
    assert "preempted at step 3;" in runs.said("preempted")


@pytest.mark.slow
def test_a_cancelled_job_saves_and_does_not_come_back(runs: SlurmRuns, whole: dict[str, Any]) -> None:
    job = runs.launch("cancelled", hold={0: 3})
    runs.held("cancelled")
    runs.cluster.ask("scancel", job)
    until(lambda: runs.said("cancelled").count("Received SIGTERM") == 2, lambda: runs.said("cancelled"))
    runs.release("cancelled")
    until(lambda: 3 in steps(runs, "cancelled"), lambda: runs.said("cancelled"))
    until(lambda: not runs.cluster.ask("squeue", "--noheader", "--me"), lambda: runs.said("cancelled"))
    assert runs.cluster.value(job, "JobState") == "CANCELLED"
    again = runs.launch("cancelled")
    check_same(runs.finish("cancelled", again, restarts=0), whole)
