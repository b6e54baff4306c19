"""Every file operation of a save fails, or is the process's last: a verified checkpoint is always there."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from onstep.checkpoint.storage.store import FileStore, Operation
from onstep.checkpoint.storage.transaction import sweep
from onstep.errors import CheckpointError
from tests.support.faults.fault_saves import DIED, DRIVERS, DieAt, FailAt, debris, what_is_wrong
from tests.support.faults.forking import Children

pytestmark = pytest.mark.faults

FreshCopy = Callable[[str], Path]
OperationsOf = Callable[[str, int], list[Operation]]
Count = Callable[[str, object], None]
"""pytest's `record_property`: a count for the page of promises."""

SAVES = {20: {(10, "a"), (20, "b")}, 10: {(10, "a"), (10, "b")}}
"""Saving step 20 on top of 10, and step 10 again in the place of the old one: what may be found after a fault."""
short_and_long = pytest.mark.parametrize(
    ("driver", "step"),
    [
        ("direct", 10),
        ("manager", 20),
        pytest.param("direct", 20, marks=pytest.mark.slow),
        pytest.param("manager", 10, marks=pytest.mark.slow),
        pytest.param("manager-async", 20, marks=pytest.mark.slow),
        pytest.param("manager-async", 10, marks=pytest.mark.slow),
    ],
)


def check_aftermath(root: Path, driver: str, step: int, what: str) -> None:
    """A verified checkpoint is there, a sweep removes the leftovers, and the next save works."""
    assert not what_is_wrong(root, DRIVERS[driver], SAVES[step]), what
    sweep(FileStore(), root)
    assert not debris(root), what
    assert not what_is_wrong(root, DRIVERS[driver], SAVES[step]), f"after the sweep: {what}"
    DRIVERS[driver].save(root, 20, "c", FileStore())
    assert not what_is_wrong(root, DRIVERS[driver], {(20, "c")}, pointer=20), what
    assert not debris(root), what
    shutil.rmtree(root)


@pytest.mark.parametrize("error_number", [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.slow)])
@short_and_long
def test_an_operation_that_fails_leaves_a_verified_checkpoint(
    driver: str,
    step: int,
    error_number: int,
    fresh_copy: FreshCopy,
    operations_of_a_save: OperationsOf,
    record_property: Count,
) -> None:
    operations = operations_of_a_save(driver, step)
    first_rename = [operation.kind for operation in operations].index("rename") + 1
    raised = 0
    for number in range(1, len(operations) + 1):
        root, what = fresh_copy(driver), f"operation {number} failed: {operations[number - 1]}"
        try:
            DRIVERS[driver].save(root, step, "b", FileStore(FailAt(number, error_number)))
        except CheckpointError:
            raised += 1
            if number <= first_rename:
                assert not debris(root), f"a failed save removes what it wrote: {what}"
                assert not what_is_wrong(root, DRIVERS[driver], {(10, "a")}, pointer=10), what
        else:
            assert not what_is_wrong(root, DRIVERS[driver], {(step, "b")}, pointer=step), f"no error, but: {what}"
        check_aftermath(root, driver, step, what)
    record_property("operations that failed once", len(operations))
    assert raised >= first_rename, "a fault before the rename must be an error of the save"


@short_and_long
def test_a_disk_that_stays_broken_leaves_a_verified_checkpoint(
    driver: str, step: int, fresh_copy: FreshCopy, operations_of_a_save: OperationsOf, record_property: Count
) -> None:
    operations = operations_of_a_save(driver, step)
    record_property("operations from which the disk stayed broken", len(operations))
    for number in range(1, len(operations) + 1):
        root, what = fresh_copy(driver), f"all failed from operation {number} on: {operations[number - 1]}"
        with suppress(CheckpointError):  # none is raised where only the tidying up failed
            DRIVERS[driver].save(root, step, "b", FileStore(FailAt(number, errno.EIO, is_lasting=True)))
        check_aftermath(root, driver, step, what)


@short_and_long
def test_a_death_at_any_operation_leaves_a_verified_checkpoint(
    driver: str,
    step: int,
    fresh_copy: FreshCopy,
    operations_of_a_save: OperationsOf,
    children: Children,
    record_property: Count,
) -> None:
    operations = operations_of_a_save(driver, step)
    deaths = [DieAt(number) for number in range(1, len(operations) + 1)]
    deaths += [DieAt(number + 1, True) for number, operation in enumerate(operations) if operation.kind == "write"]
    record_property("deaths at an operation, or in the middle of a write", len(deaths))
    for death in deaths:
        root, what = fresh_copy(driver), f"{death}: {operations[death.number - 1]}"
        assert children.exit_code(driver, str(root), step, "b", death.number, death.is_half_done) == DIED, what
        check_aftermath(root, driver, step, what)
