"""A signalled run gives up on a batch that does not come, and stands where it stood before."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onstep.data import TrainLoader
from onstep.training.lifecycle.data_timeout import DataTimeout, DataWait
from onstep.training.runs.signals import DistributedSignalHandler
from tests.support.waiting import PATIENCE


class SlowRows(torch.utils.data.Dataset[Any]):
    """Row 2 does not come while `stuck`; as in many a data set, errors are retried."""

    def __init__(self) -> None:
        self.stuck = True
        self.is_waiting = threading.Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        while index == 2 and self.stuck:
            self.is_waiting.set()
            try:
                time.sleep(1)  # a signal just before the system call is handled only when it returns
            except Exception:  # noqa: BLE001, S112 - what a dataset with retries does
                continue
        return {"x": torch.tensor([index])}


def loader_of(rows: Any) -> TrainLoader:
    return TrainLoader(rows, micro_batch_size=1, global_batch_size=1, shuffle=False)


@contextmanager
def signal_while_waiting(rows: SlowRows) -> Iterator[None]:
    """Sends SIGUSR1 to this process once the data set waits."""

    def send() -> None:
        if rows.is_waiting.wait(PATIENCE):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_signal_while_waiting_ends_the_wait_at_the_position_before() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    with DistributedSignalHandler("SIGUSR1") as handler, signal_while_waiting(rows):
        first = DataWait(lambda: loader.read(2), handler, 0.05)()
        assert first is not None
        assert first.sample_ids == [[0], [1]]
        with pytest.raises(DataTimeout, match=r"train.data_timeout=0.05 .* SIGUSR1"):
            DataWait(lambda: loader.read(2), handler, 0.05)()
    assert loader.state_dict() == {"epoch": 0, "samples_in_epoch": 2}
    rows.stuck = False
    again = loader.read(2)
    assert again is not None
    assert again.sample_ids == [[2], [3]]


def test_a_signal_before_the_read_counts_too() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    loader.read(2)
    with DistributedSignalHandler("SIGUSR1") as handler:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(DataTimeout):
            DataWait(lambda: loader.read(1), handler, 0.05)()


def test_one_wait_serves_all_reads_of_a_run() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    alarm_handler = signal.getsignal(signal.SIGALRM)
    with DistributedSignalHandler("SIGUSR1") as handler:
        size = 2
        wait = DataWait(lambda: loader.read(size), handler, 0.05)
        assert wait() is not None
        size = 1
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(2):
            with pytest.raises(DataTimeout):
                wait()
            assert signal.getsignal(signal.SIGALRM) is alarm_handler
        rows.stuck = False
        step = wait()
    assert step is not None
    assert step.sample_ids == [[2]]


def test_the_users_timer_and_alarm_handler_come_back() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    loader.read(2)

    def mine(number: int, frame: Any) -> None:
        raise AssertionError("the users alarm is far away")

    handler_before = signal.signal(signal.SIGALRM, mine)
    timer_before = signal.setitimer(signal.ITIMER_REAL, 1000, 7)
    try:
        with (
            DistributedSignalHandler("SIGUSR1") as handler,
            signal_while_waiting(rows),
            pytest.raises(DataTimeout),
        ):
            DataWait(lambda: loader.read(1), handler, 0.05)()
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert 0 < delay <= 1000
        assert interval == 7
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, handler_before)


def test_a_users_alarm_that_fell_due_meanwhile_comes_afterwards() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    loader.read(2)
    alarms: list[int] = []
    handler_before = signal.signal(signal.SIGALRM, lambda number, frame: alarms.append(number))
    timer_before = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with DistributedSignalHandler("SIGUSR1") as handler:
            os.kill(os.getpid(), signal.SIGUSR1)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(DataTimeout):
                DataWait(lambda: loader.read(1), handler, 0.5)()
        while not alarms:
            time.sleep(0.01)
        assert alarms == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, handler_before)


def test_data_that_comes_in_time_is_kept_and_no_timer_is_left() -> None:
    timer_before = signal.setitimer(signal.ITIMER_REAL, 0)
    alarm_handler = signal.getsignal(signal.SIGALRM)
    rows = SlowRows()
    rows.stuck = False
    loader = loader_of(rows)
    try:
        with DistributedSignalHandler("SIGUSR1") as handler:
            os.kill(os.getpid(), signal.SIGUSR1)
            step = DataWait(lambda: loader.read(3), handler, 60.0)()
            assert step is not None
            assert step.sample_ids == [[0], [1], [2]]
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
            assert signal.getsignal(signal.SIGALRM) is alarm_handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)


def test_without_a_timeout_the_data_is_waited_for() -> None:
    rows = SlowRows()
    loader = loader_of(rows)
    loader.read(2)

    def free() -> None:
        rows.is_waiting.wait(PATIENCE)
        rows.stuck = False
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with DistributedSignalHandler("SIGUSR1") as handler:

            def read() -> Any:
                thread = threading.Thread(target=free)
                thread.start()
                rows.is_waiting.set()
                thread.join()
                return loader.read(1)

            step = DataWait(read, handler, None)()
            assert handler.received
            assert step is not None
            assert step.sample_ids == [[2]]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_of_the_data_stays_that_error() -> None:
    def read() -> Any:
        raise RuntimeError("row 3 is broken")

    with DistributedSignalHandler("SIGUSR1") as handler:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(RuntimeError, match="row 3 is broken"):
            DataWait(read, handler, 60.0)()


def test_outside_the_main_thread_the_read_is_left_alone() -> None:
    rows = SlowRows()
    rows.stuck = False
    loader = loader_of(rows)
    read: list[Any] = []
    with DistributedSignalHandler("SIGUSR1") as handler:
        os.kill(os.getpid(), signal.SIGUSR1)
        thread = threading.Thread(target=lambda: read.append(DataWait(lambda: loader.read(1), handler, 60.0)()))
        thread.start()
        thread.join()
    assert read[0].sample_ids == [[0]]
