"""An S3 server in a process of its own, and a proxy in front of it; `make test-main` installs moto for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.faulty_proxy import Proxy, faulty_proxy
from tests.support.object_store import environment_of, store_server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of the server."""
    with store_server() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """In front of it. The process of the test itself reaches the server directly."""
    with faulty_proxy(server) as proxy:
        for name, value in environment_of(server).items():
            monkeypatch.setenv(name, value)
        yield proxy
