"""Runs on Ray: ranks and drivers that are killed cost no bit, and Ray knows metrics and committed checkpoints.

Requires Ray: `make ray` installs it into an environment of its own.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onstep.config import ConfigContainer, save_yaml
from tests.support.ray_cluster import RayCluster, Victims, kill, ray_cluster
from tests.support.whole_runs import check_same, left_by

pytest.importorskip("ray", reason="Ray is not installed (make ray)")
pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.distributed, pytest.mark.timeout(3600)]


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
