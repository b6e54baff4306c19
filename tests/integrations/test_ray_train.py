"""Runs on Ray: ranks and drivers that are killed cost no bit, and Ray knows metrics and committed checkpoints.

Requires Ray: `make ray` installs it into an environment of its own.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep import pretrain
from onstep.checkpoint import checkpoints
from onstep.cli.main import main
from onstep.config import ConfigContainer, save_yaml
from onstep.errors import ConfigError
from onstep.integrations.ray import RayReport, checkpoint_of
from onstep.record import read_records
from tests.support.ray_cluster import RayCluster, Victims, kill, ray_cluster
from tests.support.waiting import until
from tests.support.whole_runs import check_same, left_by

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ray_train = pytest.importorskip("ray.train", reason="Ray is not installed (make ray)")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.distributed,
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        yield started


STEPS = 800


def configured(config: ConfigContainer, place: Path, steps: int) -> list[str]:
    """The words of a run of so many steps with asynchronous saves."""
    config.train.train_iters, config.train.micro_batch_size = steps, 2
    config.checkpoint.save_interval, config.checkpoint.async_save = 5, True
    config.logger.log_interval, config.validation.eval_interval = 1, 50
    config.run.output_dir = str(place / "runs")
    save_yaml(config, place / "config.yaml")
    return ["train", str(place / "config.yaml")]


def reported(place: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    """The path of each checkpoint that Ray knows, in order, and the metrics that were reported with it."""
    result = ray_train.Result.from_path(str(place / "ray_results" / name))
    return [(checkpoint_of(checkpoint), metrics) for checkpoint, metrics in result.best_checkpoints]


def test_metrics_and_committed_checkpoints_are_reported(
    cluster: RayCluster, tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    words = configured(tiny_config, tmp_path, 20)
    code, said = cluster.run(tmp_path, ["--nproc=2"], [*words, "run.name=run", "validation.eval_interval=10"])
    assert code == 0, said[-4000:]
    assert [said.count(line) for line in ("signals are off", "loading PyTorch ...", "Finished at step")] == [1, 1, 1]
    run, found = tmp_path / "runs" / "run", reported(tmp_path, "run")
    assert [path for path, _ in found] == [str(run / "checkpoints" / f"checkpoint-{step}") for step in (5, 10, 15, 20)]
    assert str(checkpoints(run / "checkpoints")[0].path) == found[-1][0]
    lines = read_records(run / "trainer_logs.json")
    for path, metrics in found:
        saved_at = int(path.rpartition("-")[2])
        assert metrics["step"] > saved_at or saved_at == 20, "an asynchronous save is committed after its step"
        assert metrics["loss"] == next(line["loss"] for line in lines if line["global_step"] == metrics["step"])
    evaluated = {line["global_step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert found[-1][1]["step"] == 20
    assert found[-1][1]["eval_loss"] == evaluated[20]


def test_a_rank_that_fails_is_named_and_a_preempted_run_ends_with_75(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, sys, time\n"
        "assert os.getcwd() == sys.argv[1] and os.environ['WORLD_SIZE'] == '2' and __name__ == '__main__'\n"
        "if sys.argv[2] == 'fail' and os.environ['RANK'] == '1':\n"
        "    raise ValueError('bad value')\n"
        "sys.exit(75)\n"
    )
    code, said = cluster.run(tmp_path, ["--nproc=2"], ["python", "job.py", str(tmp_path), "leave"])
    assert code == 75, said
    code, said = cluster.run(tmp_path, ["--nproc=2"], ["job.py", str(tmp_path), "fail"])
    assert code == 1, said
    assert "onstep launch: rank 1 failed: ValueError: bad value; its output is above\n" in said


def test_a_scheduler_of_tune_ends_the_worse_trial(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "tune.py").write_text(TUNE)
    driver = subprocess.run(
        [sys.executable, "tune.py", cluster.address],
        cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert driver.returncode == 0, driver.stderr[-4000:]
    good, bad = json.loads(driver.stdout.splitlines()[-1])
    assert good["step"] == 40
    assert bad["step"] < 40
    assert good["eval_loss"] < bad["eval_loss"]
    assert good["checkpoint"] == str(tmp_path / "runs" / "0.003" / "checkpoints" / "checkpoint-40")


TUNE = """\
import json, os, sys
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

place = os.getcwd()


def trial(parameters):
    from onstep import pretrain
    from onstep.config import apply_overrides
    from onstep.integrations.ray import RayReport
    from onstep.recipes import tiny_gpt_pretrain_config

    config = tiny_gpt_pretrain_config()
    config.run.name, config.run.output_dir = str(parameters["lr"]), place + "/runs"
    small = ["train.train_iters=40", "scheduler.lr_warmup_iters=0", "model.num_layers=1", "model.hidden_size=32"]
    small += ["model.seq_length=32", "dataset.seq_length=32", "train.global_batch_size=4", "train.micro_batch_size=4"]
    small += ["validation.eval_iters=1", "validation.eval_interval=10", "checkpoint.save_interval=20"]
    small += [f"optimizer.lr={parameters['lr']}", f"optimizer.min_lr={parameters['lr']}"]
    small += [f"dataset.paths=[{os.path.dirname(json.__file__)}]", f"dataset.cache_dir={place}/tokens"]
    apply_overrides(config, [*small, "dataset.split='80,10,10'", "logger.console=quiet"])
    pretrain(config, callbacks=[RayReport(metric="eval_loss")])


ray.init(address=sys.argv[1])
tuner = tune.Tuner(
    tune.with_resources(trial, {"cpu": 1}),
    param_space={"lr": tune.grid_search([3e-3, 1e-9])},
    tune_config=tune.TuneConfig(
        metric="eval_loss", mode="min", max_concurrent_trials=1,
        scheduler=ASHAScheduler(time_attr="step", max_t=40, grace_period=10, reduction_factor=2),
    ),
    run_config=tune.RunConfig(name="tune", storage_path=place + "/ray_results"),
)
found = []
from onstep.integrations.ray import checkpoint_of

for result in tuner.fit():
    assert result.error is None, result.error
    at = None if result.checkpoint is None else checkpoint_of(result.checkpoint)
    found.append({"step": result.metrics["step"], "eval_loss": result.metrics["eval_loss"], "checkpoint": at})
ray.shutdown()
print(json.dumps(found))
"""


def test_a_node_that_is_drained_costs_no_step_and_no_failure(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    """The run saves once when the removal is announced, trains on, and continues on another node from there."""
    words = [*configured(tiny_config, tmp_path, STEPS), "checkpoint.save_interval=10000", "run.name=run"]
    victims, run = Victims(tmp_path), tmp_path / "runs" / "run"
    with ray_cluster(cpus=0) as cluster, cluster.node(cpus=2) as one, cluster.node(cpus=2) as other:
        driver = cluster.launch(tmp_path, ["--nproc=2", "--max-restarts=0"], [*words, *victims.words])

        def said() -> str:
            return (tmp_path / "launch.txt").read_text(errors="replace")[-6000:]

        def is_driven() -> bool:
            return driver.poll() is None

        try:
            ranks = victims.wait_for(2, 10, said, is_driven)
            node = next(node for node in (one, other) if node.has_started(ranks[0]))
            cluster.drain(node, seconds=600)
            until(lambda: checkpoints(run / "checkpoints"), said, while_true=is_driven, seconds=600)
            saved_at = checkpoints(run / "checkpoints")[0].step
            assert is_driven(), said()
            node.kill()
            assert driver.wait(1200) == 0, said()
        finally:
            driver.kill()
            driver.wait()
    decisions = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
    assert {one["step"] for one in decisions if one["reason"] == "Ray will remove a node"} == {saved_at}
    steps = [one.step for one in victims.seen() if one.rank == 0]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    again = [step for step in set(steps) if steps.count(step) > 1]
    print(f"\nannounced, saved at step {saved_at}; {len(again)} of {STEPS} steps were repeated, from {min(again)}")
    assert min(again) == saved_at + 1


def test_a_trainer_runs_in_a_training_function_and_a_relative_directory_is_refused(
    cluster: RayCluster, tmp_path: Path
) -> None:
    (tmp_path / "function.py").write_text(FUNCTION)
    found = {}
    for runs in ("runs", str(tmp_path / "runs")):
        driver = subprocess.run(
            [sys.executable, "function.py", cluster.address, runs],
            cwd=tmp_path, env=cluster.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found[runs] = driver
    relative, absolute = found.values()
    assert relative.returncode == 1
    assert "/runs is in the temporary directory in which Ray starts workers" in relative.stderr
    assert absolute.returncode == 0, absolute.stderr[-4000:]
    said = json.loads(absolute.stdout.splitlines()[-1])
    assert said["step"] == 8
    assert said["checkpoint"] == str(tmp_path / "runs" / "checkpoint-8")
    assert said["loss"] > said["eval_loss"] > 0


FUNCTION = """\
import json, os, sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from onstep.integrations.ray import checkpoint_of


def train(settings):
    import torch
    from onstep import Trainer, TrainingArguments
    from onstep.integrations.ray import RayReport

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}

    samples = [{"x": torch.tensor([i / 10]), "labels": torch.tensor([2 * i / 10 + 1])} for i in range(40)]
    args = TrainingArguments(
        settings["runs"], max_steps=8, eval_strategy="steps", eval_steps=4, save_steps=4, logging_steps=1,
        learning_rate=0.1, use_cpu=True,
    )
    data = {"train_dataset": samples[:32], "eval_dataset": samples[:4]}
    Trainer(model=Line(), args=args, callbacks=[RayReport()], **data).train()


ray.init(address=sys.argv[1], logging_level="error")
trainer = TorchTrainer(
    train, train_loop_config={"runs": sys.argv[2]}, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="function", storage_path=os.path.abspath("ray")),
)
result = trainer.fit()
ray.shutdown()
print(json.dumps({**result.metrics, "checkpoint": checkpoint_of(result.checkpoint)}))
"""


def test_the_callback_is_refused_outside_of_ray(tiny_config: ConfigContainer) -> None:
    with pytest.raises(ConfigError, match="not a worker of Ray Train or Ray Tune; start the training by TorchTrainer"):
        pretrain(tiny_config, callbacks=[RayReport()])


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_an_address_that_does_not_answer_is_refused_in_one_line(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["launch", "--ray", address, "train"]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith(f"error: --ray={address}: no Ray cluster answers there (")
    assert said[0].endswith("or give --ray=local.")


def test_ten_kills_of_ranks_and_one_of_the_driver_cost_no_bit(
    cluster: RayCluster, tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    words, chance = configured(tiny_config, tmp_path, 200), random.Random(36)
    undisturbed = [sys.executable, "-m", "onstep", "launch", "--nproc=2", "--", *words, "run.name=whole"]
    subprocess.run(undisturbed, check=True, env=cluster.environment)
    victims, kills = Victims(tmp_path), []
    options, words = ["--nproc=2", "--max-restarts=20"], [*words, "run.name=storm", *victims.words]
    driver = cluster.launch(tmp_path, options, words)

    def said() -> str:
        return (tmp_path / "launch.txt").read_text(errors="replace")[-6000:]

    def is_driven() -> bool:
        return driver.poll() is None

    try:
        for number in range(11):
            pids = victims.wait_for(2, chance.randint(6, 16), said, is_driven)
            if number == 5:
                kill(driver.pid)
                driver.wait()
                driver = cluster.launch(tmp_path, options, words)
                kills.append("driver")
                continue
            victim = chance.choice(pids)
            kills.append(f"rank {next(one.rank for one in victims.seen() if one.pid == victim)}")
            kill(victim)
        assert driver.wait(1200) == 0, said()
    finally:
        driver.kill()
        driver.wait()
    check_same(left_by(tmp_path / "runs" / "storm"), left_by(tmp_path / "runs" / "whole"))
    repeated = len([one for one in victims.seen() if one.rank == 0]) - 200
    print(f"\n{len(kills)} kills ({', '.join(kills)}); {repeated} of 200 steps were repeated; the bits are the same")
