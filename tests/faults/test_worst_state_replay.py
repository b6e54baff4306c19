"""The power goes at any operation of a save and takes whatever POSIX lets it take: each fsync is needed and enough."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onstep.checkpoint.storage.store import FileStore, Operation
from onstep.checkpoint.storage.transaction import sweep
from tests.support.faults.fault_saves import DRIVERS, Recorder, what_is_wrong
from tests.support.faults.power_loss import Disk, Tree, states_after_power_loss, write_tree

pytestmark = pytest.mark.faults

EXTREMES_ONLY, THOROUGH = 8, 256


@dataclass
class Story:
    """Operations on a disk, and what must be found after the power went at any of them."""

    driver: str
    at_start: Path
    """A missing directory is an empty disk."""
    root: Path
    """The directory that the operations' paths lie below."""
    operations: list[Operation]
    below: str
    """Where the checkpoints are, seen from the root."""
    before: set[tuple[int, str] | None]
    """What may be found before the save has returned from its commit."""
    after: tuple[int, str]
    """What must be found from then on."""

    @property
    def committed_at(self) -> int:
        """Number of operations when the save says that the checkpoint is durable."""
        pointers = [index for index, operation in enumerate(self.operations) if _is_pointing(operation)]
        return pointers[0] + 2 if pointers else len(self.operations) + 1


def _is_pointing(operation: Operation) -> bool:
    return operation.kind == "rename" and operation.target is not None and operation.target.name == "latest"


class Judge:
    """Looks at states on a real file system; at each only once."""

    def __init__(self, story: Story, place: Path) -> None:
        self._story = story
        self._place = place
        self._verdicts: dict[tuple[bool, Tree], str] = {}

    def verdict(self, tree: Tree, is_committed: bool) -> str:
        """What is wrong in this state; empty if nothing is."""
        known = (is_committed, tree)
        if known not in self._verdicts:
            directory = Path(tempfile.mkdtemp(dir=self._place)) / "disk"
            write_tree(tree, directory)
            self._verdicts[known] = self._look(directory / self._story.below, is_committed)
            shutil.rmtree(directory.parent)
        return self._verdicts[known]

    def _look(self, root: Path, is_committed: bool) -> str:
        story = self._story
        allowed = {story.after} if is_committed else story.before | {story.after}
        if not root.is_dir():
            return "" if None in allowed else "the directory of the checkpoints is gone"
        return what_is_wrong(root, DRIVERS[story.driver], allowed, pointer=story.after[0] if is_committed else None)


def faults_in(story: Story, judge: Judge, most_combinations: int, missing: Collection[int] = ()) -> Iterator[str]:
    """What is wrong in any state at any moment, if the operations at the places `missing` were left out."""
    operations = [operation for index, operation in enumerate(story.operations) if index not in missing]
    committed_at = story.committed_at - sum(index < story.committed_at for index in missing)
    disk, start = Disk(story.root, story.at_start), min(missing, default=0)
    for done, tree in states_after_power_loss(disk, operations, most_combinations, start):
        verdict = judge.verdict(tree, done >= committed_at)
        if verdict:
            yield f"power lost after {done} operations: {verdict}; there is {[path for path, _ in tree]}"


FreshCopy = Callable[[str], Path]
Tell = Callable[[str, str], Story]


@pytest.fixture
def notify(saved_twice: Callable[[str], Path], fresh_copy: FreshCopy, memory_dir: Path) -> Tell:
    """Makes a story of a save."""

    def calls(name: str, driver: str) -> Story:
        recorder, old = Recorder(), saved_twice(driver)
        store = FileStore(recorder)
        if name == "first save":
            top = Path(tempfile.mkdtemp(dir=memory_dir))
            DRIVERS[driver].save(top / "runs" / "checkpoints", 20, "b", store)
            return Story(driver, top / "missing", top, recorder.operations, "runs/checkpoints", {None}, (20, "b"))
        root = fresh_copy(driver)
        if name == "next save":
            DRIVERS[driver].save(root, 20, "b", store)
            return Story(driver, old, root, recorder.operations, ".", {(10, "a")}, (20, "b"))
        if name == "same step again":
            DRIVERS[driver].save(root, 10, "b", store)
            return Story(driver, old, root, recorder.operations, ".", {(10, "a")}, (10, "b"))
        assert name == "sweep after a death while replacing"
        _die_after_publishing(driver, root, recorder)
        sweep(FileStore(recorder), root)
        return Story(driver, old, root, recorder.operations, ".", {(10, "a")}, (10, "b"))

    return calls


class Died(BaseException):
    """Ends a save without letting it tidy up."""


def _die_after_publishing(driver: str, root: Path, recorder: Recorder) -> None:
    """Save step 10 again up to the last rename of the checkpoint, which no fsync covers yet."""

    def die_at_the_fsync(operation: Operation) -> None:
        if recorder.operations and recorder.operations[-1].target == root / "checkpoint-10":
            raise Died
        recorder(operation)

    with pytest.raises(Died):
        DRIVERS[driver].save(root, 10, "b", FileStore(die_at_the_fsync))


STORIES = ["first save", "next save", "same step again", "sweep after a death while replacing"]
DRIVERS_BY_COST = ["direct", pytest.param("manager", marks=pytest.mark.slow)]


@pytest.mark.parametrize("driver", DRIVERS_BY_COST)
@pytest.mark.parametrize("name", STORIES)
def test_a_power_loss_at_any_operation_leaves_a_verified_checkpoint(
    name: str, driver: str, notify: Tell, memory_dir: Path
) -> None:
    story = notify(name, driver)
    found = list(faults_in(story, Judge(story, memory_dir), EXTREMES_ONLY))
    assert not found, f"{len(found)} bad states, the first: {found[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_no_combination_of_lost_changes_takes_the_checkpoint_away(name: str, notify: Tell, memory_dir: Path) -> None:
    story = notify(name, "direct")
    found = list(faults_in(story, Judge(story, memory_dir), THOROUGH))
    assert not found, f"{len(found)} bad states, the first: {found[0]}"


def _fsyncs(story: Story, name: str) -> list[set[int]]:
    """Places of the fsyncs, each by itself.

    When a step is saved again, `latest` names it already and any later fsync of the directory does for an earlier one,
    so that only all of them together can be missed; each is needed by itself in the other stories, by the same code.
    """
    places = {index for index, operation in enumerate(story.operations) if operation.kind.startswith("fsync")}
    of_the_root = {index for index in places if story.operations[index].path == story.root}
    if name == "same step again":
        return [*({index} for index in sorted(places - of_the_root)), of_the_root]
    return [{index} for index in sorted(places)]


@pytest.mark.parametrize("driver", DRIVERS_BY_COST)
@pytest.mark.parametrize("name", [*STORIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in STORIES[2:])])
def test_a_save_without_any_one_of_its_fsyncs_is_not_safe(
    name: str, driver: str, notify: Tell, memory_dir: Path
) -> None:
    story = notify(name, driver)
    judge = Judge(story, memory_dir)
    for missing in _fsyncs(story, name):
        is_unsafe = any(True for _ in faults_in(story, judge, EXTREMES_ONLY, missing))
        assert is_unsafe, f"not needed: {[story.operations[index] for index in missing]}"
