"""Answers registrations that do not fit the run, and submissions that do not count or counted before."""

from __future__ import annotations

from onstep.diloco.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Dropped,
    Refused,
    Register,
    Reply,
    Settings,
    Submit,
)
from onstep.diloco.protocol.rounds import Rounds


def unfit(request: Register, fingerprint: str, num_fragments: int) -> Refused | None:
    """Why a worker cannot take part; None if it can."""
    if request.protocol_version != PROTOCOL_VERSION:
        error = (
            f"the worker speaks version {request.protocol_version} of the protocol, the server {PROTOCOL_VERSION}; "
            "install the same version of onstep at both ends"
        )
        return Refused(422, error, {"kind": "protocol"})
    if request.fingerprint != fingerprint:
        error = "the worker's model is not the server's: names, shapes or dtypes of parameters differ"
        return Refused(422, error, {"kind": "fingerprint"})
    if request.num_fragments not in (None, num_fragments):
        error = f"num_fragments must be the server's, {num_fragments}, got {request.num_fragments}; leave it out"
        return Refused(422, error, {"kind": "settings"})
    return None


def no_such_fragment(fragment: int, num_fragments: int) -> Refused:
    """The answer to a request about a fragment that does not exist."""
    return Refused(400, f"fragment must be from 0 to {num_fragments - 1}, got {fragment}", {"kind": "fragment"})


def verdict(request: Submit, rounds: Rounds, settings: Settings) -> Reply | None:
    """The answer to a submission that was there before or cannot count; None if it is new and counts."""
    version = rounds.known_version(request.worker_id, request.sequence)
    if version is not None:
        return Accepted(version, is_repeat=True)
    if request.sequence < rounds.next_sequence(request.worker_id):
        return _over(request, rounds)
    if request.base_version > rounds.version:
        error = (
            f"base_version {request.base_version} does not exist, the newest is {rounds.version}; "
            "if the server was started from an older state, restart the workers"
        )
        return Refused(409, error, {"kind": "future_version"})
    staleness = rounds.next_version - 1 - request.base_version
    if settings.mode == "async" or staleness <= settings.max_staleness:
        return None
    return Dropped(f"{staleness} versions late, max_staleness is {settings.max_staleness}", rounds.version)


def _over(request: Submit, rounds: Rounds) -> Reply:
    """The answer to a submission that was dropped, or that a later one of the worker has overtaken."""
    settled = rounds.settled.get(request.worker_id)
    if settled is not None and settled.sequence == request.sequence:
        return Dropped("dropped before", rounds.version)
    error = f"sequence {request.sequence} is over; the next is {rounds.next_sequence(request.worker_id)}"
    return Refused(409, error, {"kind": "old_sequence"})
