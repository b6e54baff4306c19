"""The simulated server drives a coordinator as the real one does."""

from __future__ import annotations

from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    NotYet,
    Ready,
    Register,
    Registered,
    Reply,
    Settings,
    Submit,
)
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.server import FINGERPRINT, SimulatedServer

SUBMIT = Submit("a", "s", 0, 0, base_version=0, tokens=1, steps=1)


class Caller:
    """Notes what the server replies, and when."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.replies: list[tuple[float, Reply | str]] = []

    def answer(self, reply: Reply) -> None:
        self.replies.append((self.clock.now, reply))

    def fail(self, reason: str) -> None:
        self.replies.append((self.clock.now, reason))


def joined(clock: Clock, commits: list[Closed]) -> tuple[SimulatedServer, Caller]:
    settings = Settings(num_workers=1, min_workers=1)
    server = SimulatedServer(clock, settings, 5.0, commits.append, can_fail=True)
    caller = Caller(clock)
    server.receive(Register("a", "s", FINGERPRINT), caller)
    assert isinstance(caller.replies.pop()[1], Registered)
    return server, caller


def test_a_version_is_there_when_the_outer_step_is_over_and_not_before() -> None:
    clock, commits = Clock(), list[Closed]()
    server, caller = joined(clock, commits)
    clock.at(10.0, server.receive, SUBMIT, caller)
    clock.at(11.0, server.receive, Await("a", "s", 0, 0, None, 0, wait=20.0), caller)
    clock.run()
    (accepted_at, accepted), (ready_at, ready) = caller.replies
    assert (accepted_at, accepted) == (10.0, Accepted(1))
    assert isinstance(ready, Ready)
    assert (ready_at, ready.version, len(commits)) == (15.0, 1, 1)


def test_a_question_is_held_no_longer_than_it_asks_for() -> None:
    clock = Clock()
    server, caller = joined(clock, [])
    clock.at(10.0, server.receive, SUBMIT, caller)
    clock.at(11.0, server.receive, Await("a", "s", 0, 0, None, 0, wait=2.0), caller)
    clock.run()
    assert caller.replies[1] == (13.0, NotYet(0))


def test_a_server_that_dies_in_an_outer_step_breaks_connections_and_commits_nothing() -> None:
    clock, commits = Clock(), list[Closed]()
    server, caller = joined(clock, commits)
    question = Await("a", "s", 0, 0, None, 0, wait=20.0)
    clock.at(10.0, server.receive, SUBMIT, caller)
    clock.at(11.0, server.receive, question, caller)
    clock.at(12.0, server.fail)
    clock.at(13.0, server.receive, question, caller)
    clock.at(14.0, server.restart)
    clock.at(20.0, server.receive, question, caller)
    clock.run()
    assert commits == []
    assert caller.replies[1:] == [
        (12.0, "the server died"),
        (13.0, "the server is down"),
        (20.0, NotYet(0, is_pending=False)),  # the worker sends it again
    ]
