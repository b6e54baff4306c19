"""Served jobs, and the page of one in a headless Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.control.browser.steered_job import Served, SteeredJob
from tests.support.browser import Watched

pytest.importorskip("starlette", reason="requires the control extra: pip install 'onstep[control]'")


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve jobs until the test ends."""
    opened: list[Any] = []

    def start(*jobs: SteeredJob, port: int = 0) -> Served:
        served = Served(*jobs, port=port)
        opened.extend([served, *jobs])
        return served

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def job() -> SteeredJob:
    """A job that has made 30 steps."""
    made = SteeredJob()
    made.step(30)
    return made


@pytest.fixture
def opened(job: SteeredJob, serve: Callable[..., Served], new_page: Callable[..., Watched]) -> Watched:
    """The page of the job, logged in, with its curves drawn."""
    watched = new_page(viewport={"width": 1280, "height": 900})
    watched.page.goto(serve(job).new_link())
    watched.until("document.querySelector('[data-chart=loss]')?.dataset.points >= 30")
    return watched
