"""The server's decisions: what counts, when a round closes, who takes part."""

from __future__ import annotations

from onstep.diloco.protocol.coordinator import Coordinator
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

THREE = Settings(num_workers=3, min_workers=2, sync_every=10)


class Run:
    """A coordinator with a clock, whose closed rounds are committed when the test says so."""

    def __init__(self, settings: Settings = THREE, state: dict[str, object] | None = None, now: float = 0.0) -> None:
        self.now = now
        self.coordinator = Coordinator(settings, run_id="run", fingerprint="model", state=state, now=now)
        self.commits: list[Closed] = []

    def join(self, *workers: str, session: str = "s1") -> list[Registered]:
        replies = [self.coordinator.handle(Register(one, session, "model"), self.now) for one in workers]
        assert all(isinstance(reply, Registered) for reply in replies)
        return [reply for reply in replies if isinstance(reply, Registered)]

    def submit(
        self, worker: str, sequence: int = 0, base: int = 0, tokens: int = 10, session: str = "s1", **more: int
    ) -> Reply:
        fragment = more.get("fragment", 0)
        request = Submit(worker, session, sequence, fragment, base, tokens, steps=10)
        return self.coordinator.handle(request, self.now)

    def ask(self, worker: str, version: int = 0, sequence: int | None = None, have: int | None = None) -> Reply:
        return self.coordinator.handle(Await(worker, "s1", 0, version, have, sequence), self.now)

    def commit(self) -> list[Closed]:
        """Execute what is closed."""
        done = self.coordinator.take_closed()
        for closed in done:
            self.coordinator.committed(closed, f"digest{closed.version}", self.now)
        self.commits += done
        return done

    def wait(self, seconds: float) -> list[Closed]:
        """Let time pass, with the ticks that the coordinator asks for."""
        until, done = self.now + seconds, []
        while True:
            wake = self.coordinator.next_wake()
            if wake is None or wake > until:
                break
            self.now = max(self.now, wake)
            self.coordinator.tick(self.now)
            done += self.commit()
        self.now = until
        return done


def weights(closed: Closed) -> dict[str, float]:
    return {one.submit.worker_id: one.weight for one in closed.contributions}


def test_a_round_closes_when_all_have_submitted_with_weights_by_tokens() -> None:
    run = Run()
    run.join("a", "b", "c")
    assert run.submit("a", tokens=10) == Accepted(1)
    assert run.submit("b", tokens=20) == Accepted(1)
    assert run.commit() == []
    assert run.submit("c", tokens=30) == Accepted(1)
    (closed,) = run.commit()
    assert (closed.fragment, closed.version, weights(closed)) == (0, 1, {"a": 10, "b": 20, "c": 30})
    assert run.coordinator.versions == (1,)


def test_a_version_is_there_only_after_its_round_was_committed() -> None:
    run = Run()
    run.join("a", "b", "c")
    for worker in "abc":
        run.submit(worker)
    assert run.ask("a", version=1, sequence=0) == NotYet(0)
    run.commit()
    assert run.ask("a", version=1, sequence=0) == Ready(0, 1, "full", "fp32", "digest1", 3)


def test_a_submission_sent_again_counts_once() -> None:
    run = Run()
    run.join("a", "b", "c")
    run.submit("a")
    assert run.submit("a") == Accepted(1, is_repeat=True)
    run.submit("b")
    run.submit("c")
    assert run.submit("c") == Accepted(1, is_repeat=True)
    (closed,) = run.commit()
    assert len(closed.contributions) == 3
    assert run.submit("a") == Accepted(1, is_repeat=True)
    assert run.coordinator.counts["repeats"] == 3
    assert run.coordinator.pending(0) == []
