"""Serves a dashboard with a token of its own, which is never printed: browsers come in by one-time links."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onstep.control.dashboard.dashboard import Dashboard
from onstep.errors import extra
from onstep.http.addresses import LOOPBACK, authority, reachable

if TYPE_CHECKING:
    from onstep.http.access import Access

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A dashboard that is being served."""

    url: str
    access: Access

    def new_link(self) -> str:
        """A link that lets one browser in, once, within a minute."""
        return f"{self.url}/login/{self.access.new_link()}"


@contextmanager
def serve(dashboard: Dashboard, host: str = "127.0.0.1", port: int | None = None) -> Iterator[Served]:
    """Serve the page over the jobs of a dashboard until the block ends.

    Raises:
        ConfigError: for a host or port that cannot be bound.
        MissingExtraError: where the libraries of the server are not installed.
    """
    with extra("control", "The dashboard requires a web server"):
        from onstep.control.serving.app import build_app
        from onstep.control.serving.server import ControlServer
        from onstep.http.access import Access, names_of
    if host not in LOOPBACK:
        logger.warning(
            "The dashboard listens on %s: anyone with a link can steer the jobs, and it is not encrypted.", host
        )
    access = Access(secrets.token_hex(32), names_of(host))
    app = build_app(dashboard.jobs, access=access, listed=dashboard.listed, title="Onstep dashboard", is_dashboard=True)
    server = ControlServer(app, host=host, port=port)
    server.start()
    try:
        yield Served(f"http://{authority(reachable(host), server.port)}", access)
    finally:
        server.stop()
