"""How a browser gets in: with the token, or by a link that works once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.control.browser.conftest import Watched
from tests.control.browser.steered_job import TOKEN, Served, SteeredJob

pytestmark = pytest.mark.process


def test_without_a_token_there_is_a_login_and_nothing_else(
    job: SteeredJob, serve: Callable[..., Served], new_page: Callable[..., Watched]
) -> None:
    page = new_page().page
    page.goto(serve(job).url)
    page.get_by_role("heading", name="Log in").wait_for()
    assert "first-run" not in page.content()
    page.get_by_label("Access token").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("This is not the token of this server.").wait_for()
    page.get_by_label("Access token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.locator(".card h2", has_text="first-run").wait_for()
    assert TOKEN not in page.evaluate("JSON.stringify([document.cookie, {...localStorage}, location.href])")


def test_a_link_works_once(job: SteeredJob, serve: Callable[..., Served], new_page: Callable[..., Watched]) -> None:
    served = serve(job)
    link = served.new_link()
    first, second = new_page().page, new_page().page
    first.goto(link)
    first.locator(".card h2", has_text="first-run").wait_for()
    assert first.url == f"{served.url}/"
    second.goto(link)
    second.get_by_text("This link has expired or has been used").wait_for()
    assert second.url == f"{served.url}/"


def test_logging_out_ends_the_session(opened: Watched) -> None:
    opened.page.get_by_role("button", name="Log out").click()
    opened.page.get_by_role("heading", name="Log in").wait_for()
    opened.page.reload()
    opened.page.get_by_role("heading", name="Log in").wait_for()
