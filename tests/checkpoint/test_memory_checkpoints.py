"""States in the memory of nodes: whichever node is lost, the newest is whole, and never mixed with another."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint.node_memory import check_memory_file_system
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes, output_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory"),
]
JOBS = "tests.support.jobs.in_memory_jobs"


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A directory in memory."""
    with tempfile.TemporaryDirectory(prefix="onstep-tests-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def results(processes: Processes, memory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three nodes met."""
    directory = tmp_path_factory.mktemp("memory")
    found = processes.results(JOBS, "together", directory, {"memory": str(memory / "together")}, ranks=3)
    return [{**one, "log": (directory / f"rank-{rank}.log").read_text()} for rank, one in enumerate(found)]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_newest_state_is_left_whole_by_the_loss_of_any_node(results: list[dict[str, Any]], is_async: bool) -> None:
    for rank, found in enumerate(results):
        assert found[f"kept, async {is_async}"] == [1, 2]
        for lost in range(3):
            state = found[f"without {lost}, async {is_async}"]
            assert (state["step"], state["values"], state["rng"]) == (
                3 + lost,
                [3.0 + lost],
                {"rank": rank, "step": 3 + lost},
            )
            assert state["files"] == sorted({"manifest.json", *state["files"]})


def test_a_node_has_its_own_files_and_those_of_the_node_before_it(results: list[dict[str, Any]]) -> None:
    replicated = {"replica/replica.safetensors", "replica/state.json", "shards/state.json"}
    for files in (results[0]["files, async False"], results[0]["files, async True"]):
        for node, there in enumerate(files):
            both = {node, (node - 1) % 3}
            expected = {f"rng/rank_{rank}.json" for rank in both} | {f"shards/rank_{rank}.safetensors" for rank in both}
            expected |= replicated if 0 in both else set()
            assert set(there) == {f"checkpoint-2/{name}" for name in (*expected, "manifest.json")}


def test_what_is_damaged_incomplete_or_of_another_line_is_ignored_with_a_word(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["other line"] == [None, None]
        assert (found["damaged"]["step"], found["damaged"]["values"]) == (3, [3.0])
        assert found["two lost"] is None
    assert "does not have the BLAKE3 hash in its manifest" in results[0]["log"]
    assert "Its copy on another node is used." in results[0]["log"]
    assert "the state of step 4 in memory is ignored: " in results[0]["log"]


def test_a_state_without_space_is_not_kept_and_the_one_before_it_is(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["no space"]["kept"] == [3, 4, 5]
        assert (found["no space"]["found"]["step"], found["no space"]["found"]["values"]) == (5, [5.0])
        assert found["left"] == [False]
    assert "the state of step 6 is not kept in memory, that of step 5 stays: " in results[0]["log"]


def test_two_nodes_with_the_same_memory_are_refused_on_all(results: list[dict[str, Any]]) -> None:
    assert {found["same memory"].partition(":")[0] for found in results} == {"ConfigError"}
    assert "nodes 0 and 1 have the same memory" in results[0]["same memory"]


def test_a_state_of_three_nodes_is_that_of_the_two_that_are_left(
    processes: Processes, memory: Path, tmp_path: Path
) -> None:
    parent = memory / "fewer"
    settings = {"memory": str(parent), "size": 4, "is_async": False}
    ranks = processes.start(JOBS, "forever", tmp_path / "three", settings, ranks=3)
    steps = tmp_path / "three" / "steps.txt"
    until(lambda: steps.exists() and "kept 3" in steps.read_text(), lambda: output_of(tmp_path / "three"))
    for rank in ranks:
        rank.end()
    shutil.rmtree(parent / "0")
    (parent / "2").rename(parent / "0")
    found = processes.results(JOBS, "found", tmp_path / "two", settings, ranks=2)
    kept, begun = last_steps(steps)
    assert {one["step"] for one in found} <= {kept, begun}
    assert {value for one in found for value in one["values"]} == {float(found[0]["step"])}


def last_steps(path: Path) -> tuple[int, int]:
    """The last step that all nodes had kept for sure, and the last one that they have begun to save."""
    lines = [line.split() for line in path.read_text().splitlines()]
    last = {what: max((int(step) for word, step in lines if word == what), default=0) for what in ("kept", "begun")}
    return last["kept"], last["begun"]


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_thirty_kills_of_nodes_while_they_save_and_copy(processes: Processes, memory: Path, tmp_path: Path) -> None:
    chance, parent, amid = random.Random(68), memory / "storm", 0
    newest = 0
    for kill in range(30):
        directory = tmp_path / f"{kill}"
        settings = {"memory": str(parent), "size": 200_000, "is_async": kill % 2 == 1}
        ranks = processes.start(JOBS, "forever", directory, settings, ranks=3)
        steps, wanted = directory / "steps.txt", chance.randint(1, 3)

        def has_kept(steps: Path = steps, wanted: int = wanted) -> bool:
            return steps.exists() and steps.read_text().count("kept") >= wanted

        until(has_kept, lambda directory=directory: output_of(directory))  # type: ignore[misc]
        time.sleep(chance.random() * 0.05)
        lost = chance.randrange(3)
        ranks[lost].send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.end()
        shutil.rmtree(parent / str(lost))
        found = processes.results(JOBS, "found", directory / "found", settings, ranks=3)
        kept, begun = last_steps(steps)
        amid += begun > kept
        assert {one["step"] for one in found} <= {kept, begun}, (kill, kept, begun)
        assert {value for one in found for value in one["values"]} == {float(found[0]["step"])}
        assert [one["rng"]["step"] for one in found] == [found[0]["step"]] * 3
        assert found[0]["step"] > newest
        newest = found[0]["step"]
    print(f"\n30 kills, {amid} amid a save or copy, {newest} states: always the newest whole one or the one before")
    assert amid


def test_a_directory_on_a_disk_and_one_that_is_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_dir=.*/none must be a directory on a file system in memory"):
        check_memory_file_system(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"must be on a file system in memory \(tmpfs\), but is on \w+"):
        check_memory_file_system(Path("/proc"))
