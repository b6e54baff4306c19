"""Commands become requests to the loop, and what it decides about them becomes their outcome."""

from __future__ import annotations

from dataclasses import replace

from onstep.control.commands import check_command
from onstep.control.delivery import Delivery
from onstep.control.feed import Feed
from onstep.control.inbox import Inbox
from onstep.events import Control


def test_a_rollback_refuses_what_was_decided_with_it_and_is_not_done_any_more() -> None:
    inbox, control = Inbox(), Control()
    delivery = Delivery(inbox, Feed())
    names = ("rollback", "rollback", "save_checkpoint", "evaluate", "profile")
    tickets = [inbox.submit(name, check_command(name, {}), "someone") for name in names]
    delivery.deliver(control, "on_step_end", 7)
    requests = control.pop_requests()
    for request in requests:
        delivery.note_decision(request, 7)
    delivery.note_decision(replace(requests[0], flag="rolled_back", details={**requests[0].details, "to_step": 5}), 5)
    assert [one.status for one in tickets] == ["applied", "refused", "refused", "refused", "queued"]
    assert "rolled back to step 5" in tickets[1].message
