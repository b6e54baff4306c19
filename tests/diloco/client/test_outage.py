"""What a worker says while its server is away."""

from __future__ import annotations

import logging

import pytest

from onstep.diloco.client.outage import Outage


def test_a_long_outage_is_said_again_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco")
    now = 0.0
    outage = Outage(lambda: now)
    for _ in range(2):
        begin = now
        while now < begin + 600:
            outage.begin("it is down.")
            now += 10
        assert outage.is_on
        outage.end()
        assert not outage.is_on
    said = [
        "DiLoCo: the server does not answer (it is down); training continues, and its steps are submitted later",
        *(f"DiLoCo: the server has not answered for 0:0{m}:00; training continues without it" for m in (1, 2, 4, 8)),
        "DiLoCo: the server answers again, and has this worker's submission",
    ]
    assert caplog.messages == 2 * said


def test_work_that_the_server_drops_is_not_called_received(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco")
    outage = Outage()
    outage.begin()
    outage.end(has_submission=False)
    assert caplog.messages[1:] == ["DiLoCo: the server answers again"]
