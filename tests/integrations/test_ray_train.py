"""Runs on Ray: ranks and drivers that are killed cost no bit, and Ray knows metrics and committed checkpoints.

Requires Ray: `make ray` installs it into an environment of its own.
"""

from __future__ import annotations

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
    assert said.count("signals are off") == 1
    run, found = tmp_path / "runs" / "run", reported(tmp_path, "run")
    assert [path for path, _ in found] == [str(run / "checkpoints" / f"checkpoint-{step}") for step in (5, 10, 15, 20)]
    assert str(checkpoints(run / "checkpoints")[-1].path) == found[-1][0]
    lines = read_records(run / "trainer_logs.json")
    for path, metrics in found:
        assert metrics["step"] >= int(path.rpartition("-")[2]), "it was committed before it was reported"
        assert metrics["loss"] == next(line["loss"] for line in lines if line["global_step"] == metrics["step"])
    evaluated = {line["global_step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert found[-1][1]["step"] == 20
    assert found[-1][1]["eval_loss"] == evaluated[20]


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
