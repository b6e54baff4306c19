"""What a worker finds out about its server before anything is built."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from onstep.diloco.client import RefusedByServerError, ServerLostError
from onstep.diloco.worker import first_contact
from onstep.diloco.worker.first_contact import check_server


class Clock:
    """The time, which passes with what is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(first_contact, "time", clock)
    return clock


def test_a_mute_port_is_given_up_when_the_words_say(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Mute:
        """Accepts, and never answers."""

        def __init__(self, addresses: str, timeout: float, *access: object) -> None:
            self.timeout = timeout

        def check(self) -> None:
            clock.now += self.timeout
            raise ServerLostError(f"did not answer within {self.timeout:.3g} s.")

        def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(first_contact, "Connection", Mute)
    with pytest.raises(ServerLostError, match="no answer from the server"):
        check_server("elsewhere:1", lost_seconds=14.0)
    assert 13.0 <= clock.now <= 14.0
    assert "waiting at most 4 s for the server: did not answer within 10 s" in caplog.text


@pytest.mark.parametrize("speaks", [True, False])
def test_an_id_of_another_machine_is_free_once_its_process_is_silent(
    speaks: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, first_contact.__name__)
    monkeypatch.setattr(first_contact, "Connection", lambda *given: there)

    def status(method: str, path: str) -> dict[str, Any]:
        silent = 5.0 + clock.now if not speaks or clock.now < 20 else clock.now - 20
        known = {"machine": "there", "pid": 7, "started_at": 0.0, "silent_seconds": silent}
        return {"workers": {"w": known}, "heartbeat_timeout": 120.0}

    there = SimpleNamespace(check=lambda: None, close=lambda: None, json=status)
    check_server("there:1", lost_seconds=14.0, worker_id="another")
    assert clock.now == 0
    if speaks:
        with pytest.raises(RefusedByServerError, match="'w' is process 7 on there, which is alive"):
            check_server("there:1", lost_seconds=14.0, worker_id="w")
        assert clock.now < 25
    else:
        check_server("there:1", lost_seconds=14.0, worker_id="w")
        assert 54 <= clock.now <= 56
    assert caplog.text.count("a process on there has the id 'w'; waiting until it is known if it lives") == 1
