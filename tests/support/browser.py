"""A headless Chromium, and pages of it that notice what a page must not do: fixtures."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.waiting import PATIENCE

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NOT_LOGGED_IN = "the server responded with a status of 401"
"""What Chromium itself writes to the console when a page has no cookie yet."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser of a file of tests; without one they are skipped.

    Playwright keeps an event loop running in this thread, so the tests of other files could not start one.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="requires pip install playwright")
    path = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if path is None:
        pytest.skip("requires Chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=_ARGUMENTS, env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": ""}
        )
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, with every request and complaint of it."""

    page: Any
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> Watched:
        """Note requests, errors of scripts, what is written to the console, and violations of the policy."""
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", self._note)
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " (event) => console.error('policy: ' + event.violatedDirective + ' ' + event.blockedURI))"
        )
        return self

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning") and NOT_LOGGED_IN not in message.text:
            self.complaints.append(message.text)

    def points(self, chart: str) -> int:
        """Points drawn in a chart, over all of its curves."""
        return int(self.page.locator(f"[data-chart='{chart}']").get_attribute("data-points") or 0)

    def until(self, expression: str) -> None:
        """Wait until an expression of the page is true. Playwright's own way requires a policy that allows eval."""
        deadline = time.monotonic() + PATIENCE
        while not self.page.evaluate(f"() => Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(30)


@pytest.fixture
def new_page(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """Make pages, each of a browser without cookies; at the end none of them may have complained."""
    contexts, made = [], []

    def new(**options: Any) -> Watched:
        contexts.append(chromium.new_context(**options))
        contexts[-1].set_default_timeout(1000 * PATIENCE)
        made.append(Watched(contexts[-1].new_page()).watch())
        return made[-1]

    yield new
    for context in contexts:
        with suppress(Exception):  # a test that failed may have closed it
            context.close()
    complaints = [complaint for one in made for complaint in one.complaints]
    assert not complaints, complaints
