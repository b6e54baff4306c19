"""Makes a job of this process reachable: its entry in the registry, and the server that answers for it."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onstep.control.feed import Feed
from onstep.control.inbox import Inbox
from onstep.control.registry import JobInfo, Registration, check_job_id, describe_jobs
from onstep.errors import ConfigError

if TYPE_CHECKING:
    from onstep.control.serving.server import ControlServer

logger: logging.Logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_REQUIRED = ("starlette", "uvicorn", "psutil", "platformdirs")


@dataclass(frozen=True)
class Address:
    """Where a job can be reached, and who may.

    Raises:
        ConfigError: for values that are invalid or contradict each other.
    """

    host: str | None = None
    """None: 127.0.0.1."""
    port: int | None = None
    """None: the first free one from 8900."""
    token: str | None = None
    """None: a generated one."""
    is_open: bool = False
    """No token is required."""
    uds: bool = False
    """A Unix socket in the registry, in place of host and port."""

    def __post_init__(self) -> None:
        port, token = self.port, self.token
        is_port = port is None or (isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535)
        if not is_port:
            raise ConfigError(f"port must be an integer from 0 to 65535, or None for a free one; got {port!r}.")
        if self.uds and not (port is None and self.host is None and token is None):
            raise ConfigError("uds=True binds a Unix socket, which has no host, port or token; drop these, or uds.")
        if token is not None and self.is_open:
            raise ConfigError("auth_token has no effect with disable_auth=True; drop one of them.")
        if token is not None and not _is_token(token):
            raise ConfigError(
                "auth_token must have 16 to 4096 printable ASCII characters without spaces; None generates one."
            )


class JobServer:
    """Claims the job's id and serves it, from `open` to `close`. Used by rank 0.

    Raises:
        ConfigError: if a live job has the same id, or the address cannot be bound.
        RuntimeError: if none of the ports from 8900 to 8999 is free.
    """

    def __init__(self, job_id: str, address: Address) -> None:
        self.job_id = job_id
        self.address = address
        self._registration: Registration | None = None
        self._server: ControlServer | None = None

    @property
    def is_open(self) -> bool:
        """Whether it serves."""
        return self._server is not None

    def open(self, feed: Feed, inbox: Inbox, own_commands: Mapping[str, str], **dirs: str | None) -> None:
        """Serve a job.

        Args:
            feed: what it shows.
            inbox: its commands.
            own_commands: commands that callbacks carry out, with their help.
            **dirs: its `output_dir` and `logging_dir`.
        """
        self.close()
        registration = Registration(self.job_id).open()
        try:
            self._serve(registration, feed, inbox, own_commands, dirs)
        except BaseException:
            registration.close()
            raise
        self._registration = registration

    def close(self) -> None:
        """Close the server, and remove the entry."""
        if self._server is not None:
            self._server.stop()
        if self._registration is not None:
            self._registration.close()
        self._server = self._registration = None

    def _serve(
        self, registration: Registration, feed: Feed, inbox: Inbox, own: Mapping[str, str], dirs: dict[str, str | None]
    ) -> None:
        from onstep.control.serving.app import build_app
        from onstep.control.serving.served_job import LiveJob
        from onstep.control.serving.server import ControlServer
        from onstep.http.access import Access, names_of

        address, path = self.address, registration.socket_path
        token = None if address.is_open or address.uds else address.token or secrets.token_hex(32)
        jobs: dict[str, LiveJob] = {}
        access = Access(token, None if address.uds else names_of(address.host))
        app = build_app(lambda: jobs, access=access, listed=describe_jobs, title=self.job_id)
        server = ControlServer(app, host=address.host, port=address.port, uds=path if address.uds else None)
        try:
            uds = str(path) if address.uds else None
            info = JobInfo.of_this_process(self.job_id, host=server.host, port=server.port, uds=uds, **dirs)
            jobs[self.job_id] = LiveJob(info, feed, inbox, own)
            registration.publish(info, token)
            server.start()
        except BaseException:
            server.stop()
            raise
        self._server = server
        self._announce(info)

    def _announce(self, info: JobInfo) -> None:
        if self.address.host not in (None, *LOOPBACK):
            logger.warning(
                "control: host=%s is exposed beyond loopback, without encryption; prefer 127.0.0.1 and an SSH tunnel",
                self.address.host,
            )
        if self.address.is_open:
            logger.warning("control: auth DISABLED, everyone who can connect can steer this job")
        logger.info("control: job %s at %s (onstep control status)", self.job_id, info.uds or info.endpoint_url)


def generated_id() -> str:
    """An id for a job of this process: `job_<unix seconds>_<host>_<pid>`."""
    host = "".join(one if one.isascii() and (one.isalnum() or one in "-_") else "-" for one in socket.gethostname())
    return check_job_id(f"job_{int(time.time())}_{host[:64]}_{os.getpid()}")


def missing_packages() -> list[str]:
    """What is not installed of the packages that serving requires."""
    return [one for one in _REQUIRED if importlib.util.find_spec(one) is None]


def absolute(path: Any) -> str | None:
    """A path as a client in another directory needs it."""
    return None if path is None else str(Path(path).absolute())


def _is_token(token: Any) -> bool:
    return (
        isinstance(token, str)
        and token.isascii()
        and token.isprintable()
        and " " not in token
        and 16 <= len(token) <= 4096
    )
