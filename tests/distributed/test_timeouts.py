"""How long a collective waits once the first step is done."""

from __future__ import annotations

import pytest

from onstep.config import ConfigContainer, apply_overrides
from onstep.distributed.timeouts import seconds_after_first_step


@pytest.mark.parametrize(
    ("words", "is_own", "seconds"),
    [
        ([], True, 660.0),
        ([], False, None),
        (["ft.watchdog_seconds=null"], True, None),
        (["ft.watchdog_seconds=30"], True, 600.0),
        (["ft.watchdog_seconds=7200"], True, 1800.0),
        (["dist.distributed_timeout_minutes=2"], True, 120.0),
        (["dist.timeout_after_first_step=45"], False, 45.0),
        (["dist.distributed_timeout_seconds_after_init=45"], True, 45.0),
    ],
)
def test_a_collective_waits_longer_than_the_watchdog_and_no_longer_than_before(
    words: list[str], is_own: bool, seconds: float | None
) -> None:
    config = ConfigContainer()
    apply_overrides(config, words)
    assert seconds_after_first_step(config, is_own=is_own) == seconds
