"""A run whose newest state is in the memory of its nodes continues from there when one of them is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onstep.config import ConfigContainer
from onstep.record import read_records
from tests.launch.test_elastic_restarts import check_samples, configured, furthest, losses
from tests.support.elastic_nodes import Cluster, Node, wait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.distributed,
    pytest.mark.faults,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory"),
]
STEPS = 24
IN_MEMORY = ["checkpoint.non_persistent_save_interval=2", "checkpoint.non_persistent_place=memory"]
ON_DISK = "checkpoint.save_interval"
LAYOUTS = {
    "replicas": [],
    "fsdp2": ["parallel.data_parallel_shard_size=-1"],
    "distopt2": ["ddp.use_distributed_optimizer=true"],
}
HOOK = """
import sys


def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and "/checkpoints/checkpoint-" in arguments[0]:
        with open(os.environ["SEEN"] + "-opened.txt", "a") as file:
            file.write(f"{arguments[0]} {arguments[1]}" + chr(10))


sys.addaudithook(note)
"""
"""Notes which files of checkpoints on the disk a rank opens."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="onstep-tests-", dir="/dev/shm") as directory:
        yield Path(directory)


class Runs:
    """The same run, undisturbed and disturbed, on some nodes."""

    def __init__(self, config: ConfigContainer, directory: Path, memory: Path, words: list[str]) -> None:
        self._words = [*configured(config, directory, STEPS), "checkpoint.save_interval=null", *IN_MEMORY, *words]
        self.directory, self._memory = directory, memory

    def cluster(self, name: str, least: int, most: int, pace: float) -> Cluster:
        place = self._memory / name
        place.mkdir()
        return Cluster(self.directory / name, least, most, [*self._words, f"run.name={name}"], pace, place)

    def undisturbed(self, size: int) -> Cluster:
        cluster = self.cluster("whole", size, size, 0.0)
        end_well(cluster, [cluster.start() for _ in range(size)])
        return cluster

    def losses(self, name: str) -> dict[int, float]:
        return losses(self.directory / "runs" / name)


def end_well(cluster: Cluster, nodes: list[Node]) -> None:
    """Wait for all nodes; what they have left in memory must be nothing."""
    try:
        wait(lambda: all(node.process.poll() is not None for node in nodes), cluster.said, 300)
        assert [node.process.returncode for node in nodes] == [0] * len(nodes), cluster.said()
        assert [[*node.memory.iterdir()] for node in nodes if node.memory is not None] == [[]] * len(nodes)
    finally:
        for node in nodes:
            node.kill()


def first_steps(cluster: Cluster) -> list[int]:
    """The first step of each attempt that got to one, in their order."""
    found: dict[str, int] = {}
    for one in cluster.seen():
        found.setdefault(one.attempt, one.step)
    return list(found.values())


def checkpoints_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("checkpoint-*"))


DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
TENSORS = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", *DROPOUT]
STAGES = ["parallel.pipeline_model_parallel_size=2", *DROPOUT]


@pytest.mark.parametrize(
    ("size", "lost", "words"),
    [(2, 0, []), (2, 1, []), (3, 1, []), (4, 0, []), (2, 1, TENSORS), (2, 0, STAGES), (4, 3, [*STAGES, *TENSORS])],
    ids=["2-0", "2-1", "3-1", "4-0", "tp2 sp", "pp2", "tp2 sp x pp2"],
)
def test_a_lost_node_that_is_replaced_costs_no_bit_and_no_checkpoint_on_the_disk(
    tiny_config: ConfigContainer, tmp_path: Path, memory: Path, size: int, lost: int, words: list[str]
) -> None:
    """A node of one rank has a replica, or is the only one with its part of the model."""
    runs = Runs(tiny_config, tmp_path, memory, words)
    whole = runs.undisturbed(size)
    cluster = runs.cluster("lost", size, size, 0.1)
    nodes = [cluster.start() for _ in range(size)]
    try:
        cluster.wait_for(size, 9, after=0.0)
        nodes.pop(lost).kill()
        assert checkpoints_of(tmp_path / "runs" / "lost") == []
        nodes.append(cluster.start())
        end_well(cluster, nodes)
    finally:
        for node in nodes:
            node.kill()
    assert checkpoints_of(tmp_path / "runs" / "lost") == [f"checkpoint-{STEPS}"]
    assert len(first_steps(cluster)) == 2
    assert first_steps(cluster)[1] >= 9, "it went on from the newest state"
    check_samples(cluster, whole, STEPS)
    assert runs.losses("lost") == runs.losses("whole")
    print(f"\n{size} nodes, node {lost} lost: {STEPS} losses with the bits of the undisturbed run")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_run_continues_on_fewer_nodes(
    tiny_config: ConfigContainer, tmp_path: Path, memory: Path, layout: str
) -> None:
    runs = Runs(tiny_config, tmp_path, memory, LAYOUTS[layout])
    whole = runs.undisturbed(4)
    cluster = runs.cluster("fewer", 1, 4, 0.1)
    nodes = [cluster.start() for _ in range(4)]
    try:
        cluster.wait_for(4, 9, after=0.0)
        nodes.pop(1).kill()
        assert checkpoints_of(tmp_path / "runs" / "fewer") == []
        end_well(cluster, nodes)
    finally:
        for node in nodes:
            node.kill()
    assert {one.size for one in cluster.seen()} == {3, 4}
    assert first_steps(cluster)[-1] >= 9
    check_samples(cluster, whole, STEPS)
    difference = furthest(runs.losses("fewer"), runs.losses("whole"))
    assert difference < 1e-5
    print(f"\n{layout}, 4 -> 3 nodes: the largest relative difference of a loss is {difference:.2g}")


def test_a_start_from_memory_opens_no_file_of_a_checkpoint_on_the_disk_but_manifests(
    tiny_config: ConfigContainer, tmp_path: Path, memory: Path
) -> None:
    """Until the node is lost, long before step 16, only step 8 is on the disk: no later one that would count."""
    runs = Runs(tiny_config, tmp_path, memory, ["checkpoint.save_interval=8", "checkpoint.async_save=true"])
    whole = runs.undisturbed(2)
    cluster = runs.cluster("lost", 2, 2, 0.1)
    writer = cluster.directory / "writer.py"
    writer.write_text(writer.read_text() + HOOK)
    opened = Path(f"{cluster.directory}/seen-opened.txt")
    nodes = [cluster.start() for _ in range(2)]
    try:
        cluster.wait_for(2, 13, after=0.0)
        nodes.pop().kill()
        assert checkpoints_of(tmp_path / "runs" / "lost") == ["checkpoint-8"]
        nodes.append(cluster.start())
        end_well(cluster, nodes)
    finally:
        for node in nodes:
            node.kill()
    assert first_steps(cluster)[1] > 9, "it went on from the newest state"
    check_samples(cluster, whole, STEPS)
    assert runs.losses("lost") == runs.losses("whole")
    noted = [line.split() for line in opened.read_text().splitlines()]
    assert noted, "the hook sees what saves open"
    read = [Path(path).name for path, mode in noted if mode.startswith("r")]
    assert set(read) <= {"manifest.json"}
    print(f"\na start at step {first_steps(cluster)[1]} has opened {len(read)} files on the disk, all manifests")


def test_a_killed_rank_of_a_single_node_continues_from_its_memory(
    tiny_config: ConfigContainer, tmp_path: Path, memory: Path
) -> None:
    runs = Runs(tiny_config, tmp_path, memory, [])
    whole = runs.undisturbed(1)
    cluster = runs.cluster("killed", 1, 1, 0.1)
    node = cluster.start()
    try:
        cluster.wait_for(1, 9, after=0.0)
        assert node.kill_rank()
        end_well(cluster, [node])
    finally:
        node.kill()
    assert first_steps(cluster)[-1] >= 9
    check_samples(cluster, whole, STEPS)
    assert runs.losses("killed") == runs.losses("whole")
    saved = [one for one in read_records(tmp_path / "runs" / "killed" / "decisions.jsonl") if one["flag"] == "saved"]
    assert {one["reason"] for one in saved[:-1]} >= {"in the memory of the nodes"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["checkpoint.memory_dir=/proc"], "must be on a file system in memory (tmpfs), but is on proc"),
        (
            ["checkpoint.memory_partner=true"],
            "checkpoint.memory_partner=true requires at least two nodes, but this run has one",
        ),
        (["checkpoint.non_persistent_place=tape"], "checkpoint.non_persistent_place"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tiny_config: ConfigContainer, tmp_path: Path, words: list[str], says: str
) -> None:
    given = [*configured(tiny_config, tmp_path, STEPS), "run.name=refused", *IN_MEMORY, *words]
    command = [sys.executable, "-m", "onstep", "train", *given]
    found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert found.returncode == 1
    said = [line for line in found.stderr.splitlines() if says in line]
    assert len(said) == 1, found.stderr
    assert "Traceback" not in found.stderr
    assert list(Path("/dev/shm").glob(f"onstep-{os.geteuid()}-refused-*")) == []
