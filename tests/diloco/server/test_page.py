"""The page of a server, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.protocol.messages import Deregister
from onstep.diloco.server import DiLoCoServer
from tests.support.browser import Watched
from tests.support.diloco.raw_worker import RawWorker
from tests.support.waiting import PATIENCE

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]


def test_the_page_needs_no_token_and_has_no_data(serve: Serve) -> None:
    server = serve()
    found = [httpx.get(f"{server.url}{path}", timeout=PATIENCE) for path in ("/", "/page.js", "/status")]
    assert [one.status_code for one in found] == [200, 200, 401]
    assert "script-src 'self'" in found[0].headers["Content-Security-Policy"]
    assert server.run_id not in found[0].text


def test_with_a_token_it_shows_workers_rounds_and_the_loss(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], new_page: Callable[..., Watched]
) -> None:
    server = serve()
    one = worker(server, "<b>a</b>")
    one.join()
    body = write_body({name: torch.ones_like(tensor) for name, tensor in parameters.items()})
    for number, loss in enumerate((4.0, 2.5)):
        one.client.send(replace(one.request(number, number, tokens=300), loss=loss), body)
        one.get(number + 1)
    other = worker(server, "b")
    other.join()
    other.client.send(Deregister("b", other.session, reason="it was <i>stopped</i>"))

    page = new_page()
    page.page.goto(f"{server.url}/")
    page.page.locator("#login").wait_for()
    assert page.page.locator("#data").is_hidden()
    assert not page.page.locator("#problem").inner_text()  # nothing was wrong so far
    for token in ("another", f"\u200b{server.token}…"):  # as it may be pasted
        page.page.fill("#token", token)
        page.page.click("button")
        if token == "another":
            page.until("document.querySelector('#problem').textContent.startsWith('The token is wrong')")
    page.until("document.querySelectorAll('#rounds tr').length === 2")
    assert page.page.locator("#rounds tr").first.inner_text().split("\t")[:4] == ["2", "<b>a</b>", "2.50000", "300"]
    assert page.page.locator("#workers tr").inner_text().startswith("<b>a</b>\t")
    assert page.page.locator("#range").inner_text() == "loss 4.0000 to 2.5000"
    assert [page.page.locator(f"#{one}").inner_text() for one in ("high", "low")] == ["4.000", "2.500"]
    assert "600\ntokens" in page.page.locator("#numbers").inner_text()
    assert page.page.locator("#gone li").inner_text().startswith("b left: it was <i>stopped</i> (")
    assert page.page.locator("#lost").inner_text() == ""
    assert len(page.page.locator("polyline").get_attribute("points").split()) == 2
    assert {url.removeprefix(server.url) for url in page.urls} <= {"/", "/page.js", "/status", "/favicon.ico"}
