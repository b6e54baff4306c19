"""Commands wait for the training thread; each gets one outcome, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.control.commands import CommandRefusedError
from onstep.control.inbox import Inbox
from tests.support.waiting import until


def test_the_training_thread_takes_what_waits_once() -> None:
    inbox = Inbox()
    assert not inbox.has_new
    first, second = inbox.submit("pause", {}, "a"), inbox.submit("save_checkpoint", {}, "b")
    assert inbox.has_new
    assert inbox.num_waiting == 2
    assert inbox.take() == [first, second]
    assert not inbox.has_new
    assert inbox.take() == []
    assert inbox.awaits("pause")
    inbox.settle(first, "applied", step=3)
    inbox.settle(first, "refused", step=4)
    assert (first.status, first.step) == ("applied", 3)
    assert not inbox.awaits("pause")
    assert inbox.get(first.id) is first


def test_when_it_is_closed_everything_is_refused_with_the_reason() -> None:
    inbox = Inbox()
    waiting = inbox.submit("pause", {}, "a")
    inbox.close("training has ended")
    assert (waiting.status, waiting.message) == ("refused", "training has ended")
    with pytest.raises(CommandRefusedError, match="pause: training has ended"):
        inbox.submit("pause", {}, "a")


def test_no_more_than_some_commands_wait() -> None:
    inbox = Inbox(most_waiting=2)
    for _ in range(2):
        inbox.submit("pause", {}, "a")
    with pytest.raises(CommandRefusedError, match="2 commands already wait"):
        inbox.submit("pause", {}, "a")


@pytest.mark.parametrize(("fails", "status"), [(False, "applied"), (True, "refused")])
def test_a_command_that_needs_no_training_thread_is_carried_out_at_once(fails: bool, status: str) -> None:
    def stacks() -> Any:
        if fails:
            raise OSError("no store")
        return {"rank 0": "here"}

    inbox = Inbox(at_once={"stacks": stacks})
    ticket = inbox.submit("stacks", {}, "a")
    until(lambda: ticket.status != "queued")
    assert ticket.status == status
    assert ticket.message == ("OSError: no store" if fails else "")
    assert ticket.result == (None if fails else {"rank 0": "here"})
