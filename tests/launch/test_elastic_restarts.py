"""Nodes of an elastic launch that are lost and come back: the run continues, with every sample once."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from onstep.cli.main import main
from onstep.config import ConfigContainer, save_yaml
from onstep.record import read_records
from tests.support.elastic_nodes import Cluster, Node, wait

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.distributed]
BATCH = 12
"""What 1, 2, 3 and 4 ranks divide."""


def configured(config: ConfigContainer, directory: Path, steps: int) -> list[str]:
    """The words of a run of so many steps, whose loss is logged at each."""
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = steps, BATCH, 1
    config.optimizer.lr, config.optimizer.min_lr = 1e-4, 1e-5
    config.checkpoint.save_interval, config.logger.log_interval = 5, 1
    config.validation.eval_interval = None
    config.run.output_dir = str(directory / "runs")
    save_yaml(config, directory / "config.yaml")
    return [str(directory / "config.yaml")]


def losses(run: Path) -> dict[int, float]:
    return {one["global_step"]: one["loss"] for one in read_records(run / "trainer_logs.json") if "loss" in one}


def check_samples(cluster: Cluster, undisturbed: Cluster, steps: int) -> None:
    """Each step has had the samples that it has in a run that nobody disturbs, each once."""
    trained = cluster.trained()
    assert list(trained) == list(range(1, steps + 1))
    assert trained == undisturbed.trained()
    assert all(len(set(ids)) == len(ids) == BATCH for ids in trained.values())


def furthest(found: dict[int, float], expected: dict[int, float], *, after: int = 0) -> float:
    """The largest relative difference of losses."""
    assert found.keys() == expected.keys()
    return max(abs(found[step] / expected[step] - 1) for step in expected if step > after)


def test_the_run_continues_without_a_lost_node(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    words = configured(tiny_config, tmp_path, 20)
    alone = Cluster(tmp_path / "alone", 1, 1, [], 0.0)
    environment = {"SEEN": str(tmp_path / "alone" / "seen"), "PACE": "0"}
    with patch.dict("os.environ", environment):
        own = ["--import", str(tmp_path / "alone" / "writer.py"), "callbacks=[writer:Writer]"]
        assert main(["train", *words, "run.name=alone", *own]) == 0
    cluster = Cluster(tmp_path / "two", 1, 2, [*words, "run.name=two"], 0.1)
    remaining, lost = cluster.start(), cluster.start()
    try:
        cluster.wait_for(2, 7, after=0.0)
        lost.kill()
        wait(lambda: remaining.process.poll() is not None, cluster.said)
    finally:
        remaining.kill()
    assert remaining.process.returncode == 0, cluster.said()
    assert {one.size for one in cluster.seen()} == {1, 2}
    shown = [line.partition("] ")[2] for line in (cluster.directory / "node-1.txt").read_text().splitlines()]
    assert sum("a consequence of this" in line for line in shown) == 1, "the output of an attempt is shown once"
    check_samples(cluster, alone, 20)
    assert furthest(losses(tmp_path / "runs" / "two"), losses(tmp_path / "runs" / "alone")) < 1e-5


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_node_that_joins_and_one_that_is_asked_to_leave_cost_no_step(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    words = configured(tiny_config, tmp_path, 60)
    cluster = Cluster(tmp_path / "two", 1, 2, [*words, "run.name=two", "checkpoint.save_interval=1000"], 2.0)
    first = cluster.start()
    nodes = [first]
    try:
        cluster.wait_for(1, 5, after=0.0)
        nodes.append(cluster.start())
        cluster.wait_for(2, 5, after=0.0)
        nodes[1].process.terminate()
        assert nodes[1].process.wait(300) == 75, cluster.said()
        cluster.hurry()
        assert first.process.wait(300) == 0, cluster.said()
    finally:
        for node in nodes:
            node.kill()
    said = (cluster.directory / "node-1.txt").read_text()
    assert "another node leaves; the run continues with those that remain" in said
    assert "failed first" not in said
    assert [(one.step, one.size) for one in cluster.seen()] == sorted((one.step, one.size) for one in cluster.seen())
    assert Counter(one.step for one in cluster.seen()) == {
        step: max(one.size for one in cluster.seen() if one.step == step) for step in range(1, 61)
    }, "no step was repeated"


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_twenty_kills_of_nodes_and_ranks(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    steps, chance = 400, random.Random(36)
    words = configured(tiny_config, tmp_path, steps)
    whole = Cluster(tmp_path / "whole", 4, 4, [*words, "run.name=whole"], 0.0)
    for node in [whole.start() for _ in range(4)]:
        assert node.process.wait(600) == 0, whole.said()
    cluster = Cluster(tmp_path / "storm", 1, 4, [*words, "run.name=storm"], 0.1)
    nodes, kills = [cluster.start() for _ in range(4)], []
    try:
        same = strike_ranks(cluster, nodes, chance, kills, 7)
        for _ in range(2):
            strike_node(cluster, nodes, chance, kills)
        strike_ranks(cluster, nodes, chance, kills, 4)
        nodes.append(cluster.start())
        strike_ranks(cluster, nodes, chance, kills, 4)
        for _ in range(3):
            strike_node(cluster, nodes, chance, kills)
            nodes.append(cluster.start())
        cluster.wait_for(3, 1, after=time.time())
        for node in nodes:
            assert node.process.wait(600) == 0, cluster.said()
    finally:
        for node in nodes:
            node.kill()
    found, expected = (losses(tmp_path / "runs" / name) for name in ("storm", "whole"))
    last_sizes = {
        one.step: one.size for one in cluster.seen()
    }  # a node that was late may have been left out for a while
    of_four = [step for step in range(1, same + 1) if last_sizes[step] == 4]
    same_bits = [step for step in of_four if found[step] == expected[step]]
    difference = furthest(found, expected)
    sizes = [one.size for one in cluster.seen()]
    changes = [sizes[0], *(after for before, after in pairwise(sizes) if before != after)]
    check_samples(cluster, whole, steps)
    ids = list(chain.from_iterable(cluster.trained().values()))
    print(
        f"\n{len(kills)} kills ({', '.join(kills)}); sizes {changes}; {len(ids)} samples of {steps} steps, each as in "
        f"the undisturbed run; {len(same_bits)} of {len(of_four)} losses of the same size have its bits; largest "
        f"relative difference of a loss {difference:.2g}"
    )
    assert len(kills) == 20
    assert len(same_bits) == len(of_four) > same // 2
    assert difference < 1e-5
    assert json.loads((tmp_path / "runs" / "storm" / "run.json").read_text())["status"] == "completed"


def strike_ranks(cluster: Cluster, nodes: list[Node], chance: random.Random, kills: list[str], number: int) -> int:
    """Kill a rank, so many times; the last step before all of it that all sizes have in common."""
    for _ in range(number):
        cluster.wait_for(len(nodes), chance.randint(6, 12), after=time.time())
        assert chance.choice(nodes).kill_rank()
        kills.append("rank")
    cluster.wait_for(len(nodes), 2, after=time.time())
    return cluster.seen()[-1].step - 5


def strike_node(cluster: Cluster, nodes: list[Node], chance: random.Random, kills: list[str]) -> None:
    """Kill a launch with its rank."""
    cluster.wait_for(len(nodes), chance.randint(1, 8), after=time.time())
    nodes.pop(chance.randrange(len(nodes))).kill()
    kills.append("node")
