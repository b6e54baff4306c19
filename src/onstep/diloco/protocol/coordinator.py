"""Decides which submissions count and when a round closes: the server's side of the protocol.

It handles metadata only. It has no clock (`now` is an argument, in seconds, and never goes back), no threads and no
randomness, so that the same code serves real workers and a simulated thousand.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from onstep.diloco.protocol.aging import Contribution, scale_of, steps_of_round
from onstep.diloco.protocol.losses import GIVEN_UP, NOT_THEIRS, TOO_OLD, WENT_BACK, Losses
from onstep.diloco.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    Left,
    NotYet,
    Ready,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Settings,
    Submit,
)
from onstep.diloco.protocol.relay import Relay
from onstep.diloco.protocol.roster import Member, Roster
from onstep.diloco.protocol.rounds import Closed, Rounds
from onstep.diloco.protocol.settings import STATE_VERSION, check_settings, check_state, misfit
from onstep.errors import ConfigError


class Coordinator:
    """Roster, rounds and versions of a run.

    The owner passes each request to `handle` and calls `tick` at `next_wake`. After either, it executes the rounds of
    `take_closed`: the outer step, then persisting the tensors together with `state_after`, then `committed`. Only then
    do workers get the version. Nothing else may be persisted between the last two: it would undo the commit. The owner
    keeps the tensors of an accepted submission until its round is taken.

    A round closes when all registered workers are in it and it has a quorum, or when it has a quorum and its deadline
    has passed (see `Arrivals`). Until `num_workers` have been registered, or have submitted, at the
    same time, the first round closes only by its deadline.

    A submission that is late by `s` rounds joins the open round with less weight, or is dropped if `s > max_staleness`
    (see `aging`). In asynchronous mode every submission is a round of its own.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        run_id: str,
        fingerprint: str,
        state: Mapping[str, Any] | None = None,
        now: float = 0.0,
    ) -> None:
        """Start a run, or continue the one whose `state_dict` is given.

        Raises:
            ConfigError: for settings that are out of range.
        """
        check_settings(settings)
        self.settings = settings
        self.run_id = run_id
        self.fingerprint = fingerprint
        self.revision = 0
        """Incremented when the roster changes; `state_dict` must then be persisted before the request is answered."""
        self.counts: Counter[str] = Counter()
        self.relay = Relay()
        self.on_member: Callable[[str, str, str], None] = lambda kind, worker_id, reason: None
        """Called when a worker has come or gone, with the name under which that is counted, and why it left, or whose
        share of the data it continues."""
        self._roster = Roster(settings.num_workers)
        self._rounds = [Rounds(fragment, now) for fragment in range(settings.num_fragments)]
        self._has_assembled = False
        self._to_take: deque[Closed] = deque()
        self._handlers: dict[type, Callable[..., Reply]] = {
            Submit: self._submit,
            Await: self._await,
            Heartbeat: self._heartbeat,
            Register: self._register,
            Deregister: self._deregister,
        }
        if state is not None:
            self._load(state, now)

    @property
    def versions(self) -> tuple[int, ...]:
        """Newest committed version of each fragment."""
        return tuple(rounds.version for rounds in self._rounds)

    @property
    def workers(self) -> Collection[str]:
        """Ids of the registered workers."""
        return self._roster.last_seen.keys()

    @property
    def absent(self) -> list[str]:
        """Ids of the workers that were registered once and are not now."""
        return [one for one in self._roster.members if one not in self._roster.last_seen]

    @property
    def losses(self) -> Losses:
        """The steps that no round has and none will have."""
        return self._roster.losses

    def open_steps(self, worker_id: str) -> int:
        """The steps of a worker that are in no submission, as far as it has said."""
        return self._roster.members[worker_id].open_steps

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far."""
        return round(max(rounds.committed.steps for rounds in self._rounds))

    @property
    def tokens(self) -> float:
        """Tokens in all committed submissions: each is in those of every fragment."""
        return self._rounds[0].committed.tokens

    def handle(self, request: Request, now: float) -> Reply:
        """Answer a request."""
        reply = self._handlers[type(request)](request, now)
        if type(reply) is Refused:
            self.counts["refused"] += 1
        return reply

    def begin(self, now: float) -> None:
        """Restart all clocks: serving begins later than the construction, or with another clock."""
        self._roster.begin(now)
        for rounds in self._rounds:
            rounds.open.start = now

    def tick(self, now: float) -> None:
        """Evict workers after their heartbeat timeout, and close rounds after their deadline."""
        if self.settings.heartbeat_timeout:
            for worker_id in self._roster.silent(now, self.settings.heartbeat_timeout):
                self._remove(worker_id, "deaths")
        for rounds in self._rounds:
            self._close_if_due(rounds, now)

    def next_wake(self) -> float | None:
        """The time of the next `tick`, if no request comes before."""
        times = [
            rounds.open.deadline for rounds in self._rounds if rounds.open.deadline is not None and not rounds.closing
        ]
        if self.settings.heartbeat_timeout and self._roster.last_seen:
            times.append(next(iter(self._roster.last_seen.values())) + self.settings.heartbeat_timeout)
        return min(times, default=None)

    def take_closed(self) -> list[Closed]:
        """The rounds closed since the last call, to be executed in this order."""
        taken = list(self._to_take)
        self._to_take.clear()
        return taken

    def committed(self, closed: Closed, digest: str, now: float) -> None:
        """Make the version of an executed and persisted round the newest.

        Raises:
            ValueError: if an earlier round of the fragment is not committed yet.
        """
        rounds = self._rounds[closed.fragment]
        rounds.commit(closed, digest, self._steps_of(closed), now)
        self.counts += _counted(closed)
        self._close_if_due(rounds, now)

    def hold_back(self, closed: Closed, reasons: Mapping[int, str]) -> Closed:
        """Take contributions, by their index, out of a round that is being executed; returns what is left of it."""
        if reasons:
            self.counts["held_back"] += len(reasons)
            for index in reasons if closed.fragment == 0 else ():
                submit = closed.contributions[index].submit
                if closed.restores is None:
                    self._roster.take_back_submission(submit)
                else:
                    self.losses.note(submit.worker_id, submit.steps, WENT_BACK)
            closed = self._rounds[closed.fragment].hold_back(closed, reasons)
        return closed

    def go_back(self, version: int, now: float) -> None:
        """Make an earlier version of each fragment its next one; what workers have begun since does not count.

        Raises:
            ConfigError: while a round is being executed.
        """
        if any(rounds.closing for rounds in self._rounds):
            raise ConfigError("a round is being committed; go back when it is there.")
        self._to_take.extend(rounds.go_back(version, now) for rounds in self._rounds)

    def forget_update(self, fragment: int) -> None:
        """Send whole parameters from now on: the owner has freed the update to the newest version."""
        self._rounds[fragment].has_update = False

    def preview(self, request: Submit, now: float) -> Reply | None:
        """The answer to a submission whose tensors need not be read; None if it will count."""
        member = self._roster.find(request.worker_id, request.session)
        if isinstance(member, Refused):
            return member
        self._roster.touch(request.worker_id, now)
        rounds = self._rounds_of(request.fragment)
        if isinstance(rounds, Refused):
            return rounds
        answer = rounds.answer(request, self.settings)
        if answer is None and request.fragment in member.void:
            reason = "another worker was given the share of the data that it was trained on"
            return Dropped(reason, rounds.version, is_anew=True)
        return answer

    def evict(self, worker_id: str, now: float) -> bool:
        """Remove a worker as after its heartbeat timeout; whether it was registered."""
        return self._leave(worker_id, "evictions", now)

    def command(self, name: str) -> int:
        """Give a command to all workers that have joined so far; returns its number."""
        self.revision += 1
        return self.relay.add(name)

    def set_num_workers(self, num_workers: int, now: float) -> None:
        """Expect another number of workers; the quorum stays, and so does the division of the data.

        Raises:
            ConfigError: if it is below the quorum.
        """
        settings = replace(self.settings, num_workers=num_workers)
        check_settings(settings)
        self.settings = settings
        self._has_assembled = self._are_all_there()
        self.revision += 1
        for rounds in self._rounds:
            self._close_if_due(rounds, now)

    def _rounds_of(self, fragment: int) -> Rounds | Refused:
        if 0 <= fragment < len(self._rounds):
            return self._rounds[fragment]
        error = f"fragment must be from 0 to {len(self._rounds) - 1}, got {fragment}"
        return Refused(400, error, {"kind": "fragment"})

    def _register(self, request: Register, now: float) -> Reply:
        refused = misfit(request, self.fingerprint, self.settings.num_fragments)
        if refused is not None:
            return refused
        before, holders = self._roster.members.get(request.worker_id), self._roster.holders
        is_known = before is not None
        is_same = not isinstance(self._roster.find(request.worker_id, request.session), Refused)
        is_same_session = before is not None and before.session == request.session
        member = self._roster.enter(request, now, self._rounds[0].next_sequence(request.worker_id))
        if isinstance(member, Refused):
            return member
        if member.session != request.session:
            incumbent = self._roster.incumbent(member, now)
            return replace(self._registered(member), offer=member.offer, incumbent=incumbent)
        has_work = is_same_session or request.resumes_at is not None
        if not has_work:
            member.void = []
        elif not member.keeps_share:
            member.void = list(range(self.settings.num_fragments))
        if not is_same:
            self.revision += 1
            kind = "rejoins" if is_known else "joins"
            self.counts[kind] += 1
            had = holders.get(member.slot, member.worker_id)
            share = f"with the share of the data that {had} had" if had != member.worker_id else ""
            self.on_member(kind, request.worker_id, share if member.has_share else "")
            self._has_assembled = self._has_assembled or self._are_all_there()
        for rounds in self._rounds:
            if rounds.version == 0 and not rounds.open.contributions:
                rounds.open.start = now  # the wait for the first workers is not part of a round
        return self._registered(member)

    def _are_all_there(self) -> bool:
        """Whether all expected workers are registered or have a submission in an open round."""
        arrived = [rounds.open.contributions.keys() for rounds in self._rounds]
        return len(set(self._roster.last_seen).union(*arrived)) >= self.settings.num_workers

    def _registered(self, member: Member) -> Registered:
        return Registered(
            run_id=self.run_id,
            settings=self.settings,
            versions=self.versions,
            slot=member.slot,
            num_slots=self._roster.num_slots,
            step=self.step,
            next_sequences=tuple(self._next_sequence(rounds, member) for rounds in self._rounds),
            slot_steps=self._roster.slot_steps[member.slot],
            has_share=member.has_share,
            command_number=self.relay.number,
        )

    def _next_sequence(self, rounds: Rounds, member: Member) -> int:
        known = rounds.next_sequence(member.worker_id)
        return max(known, member.last_noted + 1) if rounds.fragment == 0 else known

    def _submit(self, request: Submit, now: float) -> Reply:
        answer = self.preview(request, now)
        if isinstance(answer, Accepted):
            self.counts["repeats"] += 1
        elif isinstance(answer, Dropped):
            self._count_dropped(request, answer, now)
        if answer is not None:
            return answer
        rounds = self._rounds[request.fragment]
        version = rounds.next_version
        staleness = version - 1 - request.base_version
        self.counts["accepted"] += 1
        if staleness:
            self.counts["late"] += 1
            rounds.observe_late(request, now)
        if request.fragment == 0:  # all fragments of a step are trained on the same data
            self._roster.note_submission(request)
        contribution = Contribution(request, float(request.tokens), scale_of(request, staleness, self.settings))
        rounds.add(contribution, now, self._roster.last_seen.keys(), self.settings)
        self._close_if_due(rounds, now)
        return Accepted(version)

    def _count_dropped(self, request: Submit, answer: Dropped, now: float) -> None:
        rounds = self._rounds[request.fragment]
        if rounds.was_dropped(request):
            self.counts["repeats"] += 1
            return
        member = self._roster.members[request.worker_id]
        is_back, is_void = request.base_version < rounds.restored_at, request.fragment in member.void
        reason = WENT_BACK if is_back else NOT_THEIRS if is_void else TOO_OLD
        self.losses.note(request.worker_id, request.steps, reason, request.fragment)
        member.submitted_steps += 0 if request.fragment else request.steps
        member.void = [one for one in member.void if one != request.fragment]
        rounds.observe_late(request, now)
        rounds.drop(request)
        self.counts["dropped"] += 1

    def _await(self, request: Await, now: float) -> Reply:
        member = self._roster.find(request.worker_id, request.session)
        if isinstance(member, Refused):
            return member
        self._roster.touch(request.worker_id, now)
        rounds = self._rounds_of(request.fragment)
        if isinstance(rounds, Refused):
            return rounds
        if request.sequence is not None:
            version = rounds.known_version(request.worker_id, request.sequence)
            if version is None:
                dropped = rounds.dropped(request.worker_id, request.sequence)
                return NotYet(rounds.version, is_pending=False) if dropped is None else dropped
            if version > rounds.version:
                return NotYet(rounds.version)
        return self._ready(request, rounds) if request.version <= rounds.version else NotYet(rounds.version)

    def explained(self, reply: NotYet, fragment: int) -> NotYet:
        """The same answer, with what the round waits for."""
        return self._rounds[fragment].explained(reply, self._roster.last_seen.keys())

    def _ready(self, request: Await, rounds: Rounds) -> Ready:
        """The newest version: as an update, if the owner has it and the worker has the previous version."""
        codec = self.settings.codec
        is_update = rounds.has_update and codec != "fp32" and request.have_version == rounds.version - 1
        return Ready(
            fragment=request.fragment,
            version=rounds.version,
            kind="update" if is_update else "full",
            codec=codec if is_update else "fp32",
            digest=rounds.committed.digest,
            num_contributors=len(rounds.committed.contributors),
            command_number=self.relay.number,
        )

    def _heartbeat(self, request: Heartbeat, now: float) -> Reply:
        member = self._roster.find(request.worker_id, request.session)
        if isinstance(member, Refused):
            return member
        self._roster.touch(request.worker_id, now)
        member.command_number = request.command_number
        self._note_progress(member, request)
        if request.steps_per_second > 0:
            self._roster.note_speed(member, request.steps_per_second)
        recommended, relay = self._recommended(member), self.relay
        commands = relay.since(request.command_number)
        return Beat(self.versions, len(self._roster.last_seen), recommended, relay.number, commands)

    def _recommended(self, member: Member) -> int | None:
        """Steps per round with which a worker submits together with the others. Source: Liu et al. 2024, section 5."""
        if not self.settings.dylu or member.steps_per_second <= 0:
            return None
        return max(1, math.floor(member.steps_per_second / self._roster.fastest * self.settings.sync_every))

    def _deregister(self, request: Deregister, now: float) -> Reply:
        member = self._roster.find(request.worker_id, request.session)
        if isinstance(member, Member):
            self._note_progress(member, request)
            member.retire()
            self._leave(request.worker_id, "departures", now, request.reason)
        return Left()

    def _note_progress(self, member: Member, request: Heartbeat | Deregister) -> None:
        lost = member.note_progress(request.step, request.lost_steps)
        self.losses.note(member.worker_id, lost, GIVEN_UP)

    def _leave(self, worker_id: str, counted_as: str, now: float, reason: str = "") -> bool:
        was_registered = self._remove(worker_id, counted_as, reason)
        for rounds in self._rounds:
            self._close_if_due(rounds, now)
        return was_registered

    def _remove(self, worker_id: str, counted_as: str, reason: str = "") -> bool:
        was_registered = self._roster.leave(worker_id)
        if was_registered:
            self.counts[counted_as] += 1
            self.on_member(counted_as, worker_id, reason)
            self.revision += 1
        return was_registered

    def _close_if_due(self, rounds: Rounds, now: float) -> None:
        if self.settings.mode == "async":
            closed = rounds.close(now) if rounds.open.contributions else None
        else:
            has_begun = rounds.version > 0 or self._has_assembled
            closed = rounds.close_if_due(now, self._roster.last_seen.keys(), has_begun, self.settings)
        if closed is not None:
            self._to_take.append(closed)

    def _steps_of(self, closed: Closed) -> float:
        """Optimizer steps by which a version advances the run."""
        if self.settings.mode == "sync":
            return steps_of_round(closed.contributions, closed.version)
        steps = max((one.scale * one.submit.steps for one in closed.contributions), default=0)
        return steps / max(1, len(self._roster.last_seen))

    def state_dict(self) -> dict[str, object]:
        """JSON-safe: everything committed. Open rounds are rebuilt from repeated submissions."""
        return {
            "state_version": STATE_VERSION,
            "protocol_version": PROTOCOL_VERSION,
            "run_id": self.run_id,
            "fingerprint": self.fingerprint,
            "settings": asdict(self.settings),
            "roster": self._roster.state_dict(),
            "fragments": [rounds.state_dict() for rounds in self._rounds],
            "has_assembled": self._has_assembled,
            "relay": self.relay.state_dict(),
            "counts": dict(self.counts),
        }

    def state_after(self, closed: Closed, digest: str) -> dict[str, object]:
        """The `state_dict` after the commit of a closed round: to be persisted together with its tensors."""
        state = self.state_dict()
        fragments = state["fragments"]
        assert isinstance(fragments, list)
        fragments[closed.fragment] = self._rounds[closed.fragment].state_after(closed, digest, self._steps_of(closed))
        return state | {"counts": dict(self.counts + _counted(closed))}

    def status(self, now: float) -> dict[str, object]:
        """JSON-safe: members, rounds and counts."""
        return {
            "run_id": self.run_id,
            "mode": self.settings.mode,
            "step": self.step,
            "tokens": self.tokens,
            "versions": list(self.versions),
            "num_workers": self.settings.num_workers,
            "min_workers": self.settings.min_workers,
            "num_registered": len(self._roster.last_seen),
            "workers": self._roster.status(now),
            "rounds": [rounds.status(now, self._roster.last_seen.keys()) for rounds in self._rounds],
            "counts": dict(self.counts),
            "lost_steps": dict(self.losses.steps),
            "open_steps_of_others": self._roster.open_steps_of_others(),
            "command": {"number": self.relay.number, "name": self.relay.newest},
        }

    def _load(self, state: Mapping[str, Any], now: float) -> None:
        check_state(state, self.fingerprint, self.settings.num_fragments)
        self.run_id, self._has_assembled = state["run_id"], state["has_assembled"]
        is_same = state.get("protocol_version") == PROTOCOL_VERSION  # else workers register again, and are refused
        self._roster.load_state_dict(state["roster"], now, state["roster"]["registered"] if is_same else ())
        self.relay.load_state_dict(state.get("relay", {}))
        for rounds, saved in zip(self._rounds, state["fragments"], strict=True):
            rounds.load_state_dict(saved, now)
        self.counts = Counter(state["counts"])


def _counted(closed: Closed) -> Counter[str]:
    """The counts of one committed round."""
    how = "complete_rounds" if closed.is_complete else "rounds_by_deadline"
    counted = Counter({"commits": 1, how: 1, "contributions": len(closed.contributions)})
    if closed.fragment == 0:
        counted["steps"] = sum(one.submit.steps for one in closed.contributions)
    return counted
