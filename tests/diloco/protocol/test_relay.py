"""Commands that an operator gives to all workers of a run."""

from __future__ import annotations

import pytest

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Beat, Heartbeat, Register, Registered, Settings
from onstep.diloco.protocol.relay import NUM_KEPT, Relay, relayed_command
from onstep.errors import ConfigError


def run(state: dict[str, object] | None = None) -> Coordinator:
    return Coordinator(Settings(num_workers=2, min_workers=2), run_id="run", fingerprint="model", state=state)


def join(coordinator: Coordinator, worker: str, session: str = "s") -> int:
    reply = coordinator.handle(Register(worker, session, "model"), 0.0)
    assert isinstance(reply, Registered)
    return reply.command_number


def beat(coordinator: Coordinator, worker: str, number: int, session: str = "s") -> Beat:
    reply = coordinator.handle(Heartbeat(worker, session, command_number=number), 1.0)
    assert isinstance(reply, Beat)
    return reply


def test_every_worker_gets_each_command_until_it_says_that_it_has_it() -> None:
    coordinator = run()
    numbers = [join(coordinator, one) for one in ("a", "b")]
    assert numbers == [0, 0]
    coordinator.command("save_checkpoint")
    coordinator.command("graceful_stop")
    for _ in range(2):  # an answer may be lost
        reply = beat(coordinator, "a", 0)
        assert (reply.command_number, reply.commands) == (2, ("save_checkpoint", "graceful_stop"))
    assert beat(coordinator, "a", 2).commands == ()
    assert beat(coordinator, "b", 1).commands == ("graceful_stop",)
    assert coordinator.status(1.0)["workers"]["a"]["command_number"] == 2  # type: ignore[index]


def test_commands_outlive_the_server_and_are_not_for_later_sessions() -> None:
    coordinator = run()
    join(coordinator, "a")
    coordinator.command("graceful_stop")
    again = run(coordinator.state_dict())
    assert beat(again, "a", 0).commands == ("graceful_stop",)
    assert join(again, "late") == 1
    assert beat(again, "late", 1).commands == ()
    old = coordinator.state_dict()
    del old["relay"]  # of a server before commands were relayed
    assert beat(run(old), "a", 0) == Beat((0,), 1)


def test_a_relay_keeps_only_the_newest_commands() -> None:
    relay = Relay()
    for _ in range(NUM_KEPT):
        relay.add("save_checkpoint")
    relay.add("abort")
    assert len(relay.since(0)) == NUM_KEPT
    assert relay.since(100) == ("abort",)


def test_commands_have_their_names_and_their_verbs() -> None:
    names = ("save", "save_checkpoint", "stop", "graceful_stop", "save-stop", "save_and_stop", "abort")
    expected = ["save_checkpoint"] * 2 + ["graceful_stop"] * 2 + ["save_and_stop"] * 2 + ["abort"]
    assert [relayed_command(name) for name in names] == expected
    with pytest.raises(ConfigError, match="'pause'"):
        relayed_command("pause")
