"""A coordinator whose clock and commits a test controls."""

from __future__ import annotations

from dataclasses import replace

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Await, Register, Registered, Reply, Settings, Submit
from onstep.diloco.protocol.rounds import Closed

THREE = Settings(num_workers=3, min_workers=2, sync_every=10, heartbeat_timeout=0.0)


class SteppedRun:
    """Sends requests of named workers to a coordinator; closed rounds wait for `commit`."""

    def __init__(self, settings: Settings = THREE, state: dict[str, object] | None = None, now: float = 0.0) -> None:
        self.now = now
        self.coordinator = Coordinator(settings, run_id="run", fingerprint="model", state=state, now=now)

    def join(self, *workers: str, session: str = "s1", resumes_at: int | None = None) -> list[Registered]:
        return [self._join(Register(one, session, "model", resumes_at=resumes_at)) for one in workers]

    def _join(self, request: Register) -> Registered:
        reply = self.coordinator.handle(request, self.now)
        assert isinstance(reply, Registered)
        return self._join(replace(request, offer=reply.offer)) if reply.offer else reply

    def submit(
        self,
        worker: str,
        sequence: int = 0,
        base: int = 0,
        *,
        tokens: int = 10,
        session: str = "s1",
        fragment: int = 0,
        steps: int = 10,
    ) -> Reply:
        return self.coordinator.handle(Submit(worker, session, sequence, fragment, base, tokens, steps), self.now)

    def submit_each(self, *workers: str) -> None:
        """Each worker submits its first pseudo-gradient."""
        for worker in workers:
            self.submit(worker)

    def ask(self, worker: str, version: int = 0, sequence: int | None = None, have: int | None = None) -> Reply:
        return self.coordinator.handle(Await(worker, "s1", 0, version, have, sequence), self.now)

    def commit(self) -> list[Closed]:
        """Execute the rounds that are closed."""
        done = self.coordinator.take_closed()
        for closed in done:
            self.coordinator.committed(closed, f"digest{closed.version}", self.now)
        return done

    def wait(self, seconds: float) -> list[Closed]:
        """Let time pass, tick when the coordinator asks for it, and execute what that closes."""
        until, done = self.now + seconds, self.commit()
        while (wake := self.coordinator.next_wake()) is not None and wake <= until:
            self.now = max(self.now, wake)
            self.coordinator.tick(self.now)
            done += self.commit()
        self.now = until
        return done

    def round(self, number: int, *workers: str, seconds: float = 10.0, after: float = 0.0) -> list[Closed]:
        """The workers submit to the round from version `number`, `seconds` after its start and then `after` apart."""
        done = self.wait(seconds)
        for index, worker in enumerate(workers):
            done += self.wait(after) if index else []
            self.submit(worker, number, number)
            done += self.commit()
        return done

    def arrived(self) -> list[str]:
        """Whose submissions are in the open round."""
        (rounds,) = self.coordinator.status(self.now)["rounds"]  # type: ignore[misc]
        return list(rounds["arrived"])


def joined(*workers: str, settings: Settings = THREE) -> SteppedRun:
    """A run that these workers have joined."""
    run = SteppedRun(settings)
    run.join(*workers)
    return run


def weights(closed: Closed) -> dict[str, float]:
    """Of each contributor."""
    return {one.submit.worker_id: one.weight for one in closed.contributions}
