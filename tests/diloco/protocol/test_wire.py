"""Messages as JSON, and what is refused when it comes from a network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from onstep.diloco.protocol.messages import (
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
from onstep.diloco.protocol.wire import InvalidMessageError, reply_from_json, request_from_json, to_json

REQUESTS: list[Request] = [
    Register("a", "s", "print", hostname="h", sync_every=3, step=7, offer=2),
    Submit("a", "s", 3, 1, 2, 100, 50, "int8"),
    Await("a", "s", 0, 4, 3, 2, 1.5),
    Heartbeat("a", "s", 1.25, 9),
    Deregister("a", "s"),
]
REPLIES: list[Reply] = [
    Registered("run", Settings(codec="int4", dylu=True), (1, 2), 0, 4, 100, (3, 4), 2, 9),
    Accepted(3, is_repeat=True),
    Dropped("late", 3),
    Ready(0, 3, "update", "int8", "digest", 4),
    NotYet(3, is_pending=False),
    Beat((1, 2), 3, None),
    Left(),
    Refused(422, "why", {"kind": "fingerprint", "first": ["a", 1]}),
]


def through_json(message: Request | Reply) -> object:
    return json.loads(json.dumps(to_json(message), allow_nan=False))


@pytest.mark.parametrize("request_sent", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_come_back_as_they_were(request_sent: Request) -> None:
    assert request_from_json(through_json(request_sent)) == request_sent


@pytest.mark.parametrize("reply", REPLIES, ids=lambda one: type(one).__name__)
def test_replies_come_back_as_they_were(reply: Reply) -> None:
    assert reply_from_json(through_json(reply)) == reply


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sequence", -1, "Submit.sequence must be >= 0, got -1"),
        ("sequence", 1.0, "Submit.sequence must be an integer of at most 2"),
        ("sequence", True, "Submit.sequence must be an integer"),
        ("sequence", "0", "Submit.sequence must be an integer"),
        ("sequence", 2**60, "Submit.sequence must be an integer"),
        ("tokens", 0, "Submit.tokens must be >= 1, got 0"),
        ("base_version", None, "Submit.base_version must be an integer"),
        ("worker_id", "", "worker_id must have 1 to 200 printable characters, got ''"),
        ("worker_id", "a\n", "worker_id must have 1 to 200 printable characters"),
        ("worker_id", "a" * 201, "worker_id must have 1 to 200 printable characters"),
        ("session", "s" * 10_000, "Submit.session must be a text of at most 1000 characters"),
        ("session", [], "Submit.session must be a text"),
        ("more", 1, "Submit has no field 'more'"),
        ("type", "Unknown", "type must be one of Register, Submit, Await, Heartbeat, Deregister, got 'Unknown'"),
        ("type", "Accepted", "type must be one of Register"),
        ("type", {}, "type must be one of Register"),
    ],
)
def test_what_is_malformed_is_refused_by_field(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidMessageError, match=message):
        request_from_json(to_json(REQUESTS[1]) | {field: value})


@pytest.mark.parametrize("value", [None, [], "text", 1, {}, {"type": "Submit"}, {"type": None}])
def test_what_is_not_a_message_is_refused(value: object) -> None:
    with pytest.raises(InvalidMessageError):
        request_from_json(value)
    with pytest.raises(InvalidMessageError):
        reply_from_json(value)


@pytest.mark.parametrize("speed", [float("nan"), float("inf"), -1.0])
def test_numbers_that_are_not_finite_or_negative_are_refused(speed: float) -> None:
    with pytest.raises(InvalidMessageError, match="steps_per_second must be"):
        request_from_json(to_json(Heartbeat("a", "s", speed)))


@pytest.mark.parametrize(
    "settings", [{"mode": "other"}, {"sync_every": 1.5}, {"more": 1}, {"codec": 3}, {"dylu": 1}, [], None]
)
def test_settings_from_a_network_are_checked(settings: object) -> None:
    value = to_json(REPLIES[0])
    value["settings"] = value["settings"] | settings if isinstance(settings, dict) else settings
    with pytest.raises(InvalidMessageError):
        reply_from_json(value)


def test_lists_from_a_network_are_checked() -> None:
    value = to_json(replace(REPLIES[5]))  # type: ignore[type-var]
    for versions in (3, ["1"], [None], list(range(200_000))):
        with pytest.raises(InvalidMessageError, match=r"Beat\.versions must be"):
            reply_from_json(value | {"versions": versions})


def test_objects_from_a_network_are_checked() -> None:
    value = to_json(Refused(400, "no"))
    for details in (3, [], {str(number): 0 for number in range(200_000)}):
        with pytest.raises(InvalidMessageError, match=r"Refused\.details must be an object"):
            reply_from_json(value | {"details": details})
