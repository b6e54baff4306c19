"""Keeps the members of a run: their sessions, shares of the data and last requests."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from onstep.diloco.protocol.losses import ENDED, Losses
from onstep.diloco.protocol.messages import Refused, Register, Submit

NUM_RETIRED = 8
"""Replaced sessions that are remembered for each worker."""


@dataclass(slots=True)
class Member:
    """A worker that has registered at least once."""

    worker_id: str
    session: str
    slot: int
    hostname: str = ""
    step: int = 0
    submitted_steps: int = 0
    """Those of `step` that were submitted, or given up."""
    lost_steps: int = 0
    """Those that its session has given up."""
    steps_per_second: float = 0.0
    retired: list[str] = field(default_factory=list)
    """Sessions that left or were replaced: requests of theirs that arrive later must not count."""

    candidate: str = ""
    """Session that asked to replace this one."""
    offer: int = 0
    """Number that the candidate must send back."""
    last_noted: int = -1
    """Newest sequence number whose steps are included in the slot's."""
    last_steps: int = 0
    """Steps of that submission."""
    last_slot: int = -1
    """Slot at that submission."""
    last_end: int = -1
    """Steps of that slot after it."""
    details: dict[str, object] = field(default_factory=dict)
    """What the worker says of itself."""
    command_number: int = 0
    """Of the newest command that it has received."""
    has_share: bool = True
    """Whether no other registered worker has its slot."""
    keeps_share: bool = True
    """Whether nobody else has had its slot since it registered before."""
    void: list[int] = field(default_factory=list)
    """Fragments whose next submission must not count: another worker has the samples behind it."""

    def accepts(self, request: Register) -> bool:
        """Whether a new session may replace this one; if not yet, it gets a new offer."""
        if request.session == self.candidate and request.offer == self.offer:
            return True
        self.candidate, self.offer = request.session, self.offer + 1
        return False

    @property
    def has_left(self) -> bool:
        """Whether its session deregistered."""
        return self.session in self.retired

    def retire(self) -> None:
        """Refuse all later requests of the session."""
        self.retired = [*self.retired, self.session][-NUM_RETIRED:]

    @property
    def open_steps(self) -> int:
        """Those of `step` that are in no submission, as far as the worker has said."""
        return max(0, self.step - self.submitted_steps)

    def begin_session(self, session: str, step: int, kept_steps: int) -> int:
        """Replace the session by that of another process, which may have started from an older state.

        Returns:
            The steps that no submission has and the new process does not have either.
        """
        if not self.has_left:
            self.retire()
        lost = self.open_steps - max(0, step - self.submitted_steps, kept_steps)
        self.session, self.steps_per_second, self.lost_steps = session, 0.0, 0
        self.submitted_steps = min(self.submitted_steps, max(0, step - kept_steps))
        return max(0, lost)

    def note_progress(self, step: int | None, lost_steps: int) -> int:
        """Note what the worker says of its steps; returns those that it has given up since it said so before."""
        self.step = self.step if step is None else step
        lost, self.lost_steps = max(0, lost_steps - self.lost_steps), max(lost_steps, self.lost_steps)
        self.submitted_steps += lost
        return lost

    def note_submission(self, sequence: int, steps: int, slot_steps: int) -> None:
        """Note the newest submission, and the steps of the worker and its slot after it."""
        self.last_noted, self.last_steps = sequence, steps
        self.last_slot, self.last_end = self.slot, slot_steps
        self.submitted_steps += steps
        self.step = max(self.step, self.submitted_steps)

    def take_back_note(self) -> int:
        """Undo the note of the newest submission; returns its steps."""
        steps, self.last_noted, self.last_steps = self.last_steps, self.last_noted - 1, 0
        self.submitted_steps = max(0, self.submitted_steps - steps)
        return steps


class Roster:
    """All members, and the registered ones in order of their last request, the longest silent first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.members: dict[str, Member] = {}
        self.last_seen: OrderedDict[str, float] = OrderedDict()
        self.losses = Losses()
        self.slot_steps: Counter[int] = Counter()
        """Optimizer steps taken on each share of the data."""
        self._holders: dict[int, str] = {}
        """The worker that each share was given to last."""
        self._fastest = 0.0

    @property
    def fastest(self) -> float:
        """Steps per second of the fastest registered worker; 0 if no speed is known."""
        return self._fastest

    def enter(self, request: Register, now: float, next_sequence: int) -> Member | Refused:
        """Register a worker, make an offer to another session of its id, or refuse a session that has ended.

        A restored worker repeats the steps of a submission that a server lost when it died: `next_sequence` is the
        first of the worker's submissions that no round has.
        """
        member = self.members.get(request.worker_id)
        if member is None:
            slot = self._free_slot()
            member = Member(request.worker_id, request.session, self._shared_slot() if slot is None else slot)
            self.members[request.worker_id] = member
        elif request.session in member.retired:
            return replaced(member)
        elif request.session != member.session:
            if not member.accepts(request):
                return member
            if request.resumes_at is not None and next_sequence <= request.resumes_at == member.last_noted:
                self._take_back_note(member)
            lost = member.begin_session(request.session, request.step, request.kept_steps)
            self.losses.note(member.worker_id, lost, ENDED)
        member.keeps_share = True
        if request.worker_id not in self.last_seen:
            self._give_slot(member)
        member.hostname, member.step, member.details = request.hostname, request.step, request.details
        self.touch(request.worker_id, now)
        self._find_fastest()
        return member

    def _give_slot(self, member: Member) -> None:
        before, slot = member.slot, self._slot_again(member)
        member.has_share = slot is not None
        member.keeps_share = slot == before and self._holders.get(slot) == member.worker_id
        if slot is not None:
            member.slot = slot
            self._holders[slot] = member.worker_id

    @property
    def holders(self) -> dict[int, str]:
        """The worker that each share of the data was given to last; a copy."""
        return dict(self._holders)

    def find(self, worker_id: str, session: str) -> Member | Refused:
        """The member that sent a request, if it is registered."""
        member = self.members.get(worker_id)
        if member is not None and session in member.retired:
            return replaced(member)
        if member is None or worker_id not in self.last_seen or member.session != session:
            error = f"worker {worker_id!r} is not registered; register again and repeat the request"
            return Refused(404, error, {"kind": "unknown_worker"})
        return member

    def incumbent(self, member: Member, now: float) -> dict[str, object]:
        """The process that has a worker's id; empty if it is not registered."""
        seen = self.last_seen.get(member.worker_id)
        if seen is None:
            return {}
        known = {name: member.details.get(name) for name in ("pid", "started_at", "machine")}
        return {"silent_seconds": now - seen, **known}

    def touch(self, worker_id: str, now: float) -> None:
        """Note a request of a worker."""
        self.last_seen[worker_id] = now
        self.last_seen.move_to_end(worker_id)

    def leave(self, worker_id: str) -> bool:
        """Remove a worker from the registered ones; whether it was registered."""
        was_registered = self.last_seen.pop(worker_id, None) is not None
        self._find_fastest()
        return was_registered

    def note_speed(self, member: Member, steps_per_second: float) -> None:
        """Note the speed reported in a heartbeat."""
        was_fastest = member.steps_per_second == self._fastest
        member.steps_per_second = steps_per_second
        if was_fastest and steps_per_second < self._fastest:
            self._find_fastest()
        else:
            self._fastest = max(self._fastest, steps_per_second)

    def note_submission(self, submit: Submit) -> None:
        """Note how much of a share of the data is used, once for each submission: the next worker continues from there.

        The note is kept if the server dies before the submission is committed, so that no other session trains on the
        same data.
        """
        member = self.members[submit.worker_id]
        if submit.sequence > member.last_noted:
            self.slot_steps[member.slot] += submit.steps if member.has_share else 0
            member.note_submission(submit.sequence, submit.steps, self.slot_steps[member.slot])

    def take_back_submission(self, submit: Submit) -> None:
        """Undo the note of a submission that was held back: its worker has the steps still, and submits them again."""
        member = self.members[submit.worker_id]
        if submit.sequence == member.last_noted:
            self._take_back_note(member)

    def _take_back_note(self, member: Member) -> None:
        """Undo the note of the member's newest submission, unless another worker has used the share since."""
        steps = member.take_back_note()
        is_holder = self._holders.get(member.last_slot) == member.worker_id
        if is_holder and self.slot_steps[member.last_slot] == member.last_end:
            self.slot_steps[member.last_slot] -= steps

    def begin(self, now: float) -> None:
        """Restart the heartbeat timeouts of all registered workers."""
        self.last_seen = OrderedDict.fromkeys(self.last_seen, now)

    def silent(self, now: float, timeout: float) -> list[str]:
        """Registered workers whose last request is older than `timeout` seconds."""
        found = []
        for worker_id, seen in self.last_seen.items():
            if seen + timeout > now:
                break
            found.append(worker_id)
        return found

    def _find_fastest(self) -> None:
        self._fastest = max((self.members[one].steps_per_second for one in self.last_seen), default=0.0)

    def _slot_again(self, member: Member) -> int | None:
        """A returning member's slot: its own, unless another worker has it now; None if all are taken."""
        others = [self.members[one] for one in self.last_seen if one != member.worker_id]
        taken = {one.slot for one in others if one.has_share}
        return member.slot if member.slot not in taken else self._free_slot(member.worker_id)

    def _shared_slot(self) -> int:
        """For a worker that comes when all are taken."""
        return len(self.members) % self.num_slots

    def _free_slot(self, but: str | None = None) -> int | None:
        """A slot that was never used, else one of a member that left or was evicted; None if all are taken."""
        others = [member for one, member in self.members.items() if one != but and member.has_share]
        had = {member.slot for member in others}
        may_be_used = {member.slot for member in others if not member.has_left}
        taken = {member.slot for member in others if member.worker_id in self.last_seen}
        for unavailable in (had, may_be_used, taken):
            for slot in range(self.num_slots):
                if slot not in unavailable:
                    return slot
        return None

    def open_steps_of_others(self) -> dict[str, int]:
        """The steps in no submission of workers that are not registered, by worker."""
        others = {one: member.open_steps for one, member in self.members.items() if one not in self.last_seen}
        return {worker_id: steps for worker_id, steps in others.items() if steps}

    def status(self, now: float) -> dict[str, object]:
        """JSON-safe: the registered workers."""
        return {
            worker_id: self._status_of(self.members[worker_id], now - seen)
            for worker_id, seen in self.last_seen.items()
        }

    def _status_of(self, member: Member, silent_for: float) -> dict[str, object]:
        return {
            **member.details,
            "hostname": member.hostname,
            "slot": member.slot,
            "step": member.step,
            "steps_per_second": member.steps_per_second,
            "silent_seconds": silent_for,
            "command_number": member.command_number,
        }

    def state_dict(self) -> dict[str, object]:
        """JSON-safe."""
        return {
            "members": [asdict(one) for one in self.members.values()],
            "registered": list(self.last_seen),
            "num_slots": self.num_slots,
            "holders": {str(slot): worker_id for slot, worker_id in self._holders.items()},
            "slot_steps": {str(slot): steps for slot, steps in self.slot_steps.items()},
            "lost": dict(self.losses.steps),
        }

    def load_state_dict(self, state: Mapping[str, Any], now: float, registered: Iterable[str]) -> None:
        """Restore a `state_dict`, with the workers that stay registered; their heartbeat timeouts start now."""
        self.members = {saved["worker_id"]: Member(**saved) for saved in state["members"]}
        self.last_seen = OrderedDict.fromkeys(registered, now)
        self.num_slots = state.get("num_slots", self.num_slots)
        self._holders = {int(slot): worker_id for slot, worker_id in state.get("holders", {}).items()}
        self.losses.load_state_dict(state.get("lost", {}))
        self.slot_steps = Counter({int(slot): steps for slot, steps in state["slot_steps"].items()})
        self._find_fastest()


def replaced(member: Member) -> Refused:
    """The answer to an older session of a worker."""
    error = f"this session of worker {member.worker_id!r} has left or was replaced by a newer one; ids must be unique"
    return Refused(409, error, {"kind": "replaced"})
