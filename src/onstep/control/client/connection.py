"""One control server: requests to it over TCP or a Unix socket, and what their failures mean."""

from __future__ import annotations

import getpass
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from onstep.analysis.text_tables import printable, shortened
from onstep.errors import ConfigError, DataError, OnstepError, extra
from onstep.files.bounded_reading import MAX_JSON_BYTES, brief, parse_json

if TYPE_CHECKING:
    import httpx

TIMEOUT_SECONDS = 30.0
_LONGEST_REASON = 1000
_SPARE_SECONDS = 1.0
"""In which httpx reports its own timeout."""


class ControlError(OnstepError):
    """A control server that cannot be reached, or a request that it refuses."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status code; None if there was no answer."""


@dataclass(frozen=True)
class Connection:
    """Requests to one control server.

    Redirects are not followed, and proxies from the environment are not used, so a token reaches no other host.
    """

    url: str
    """Without a path: `http://127.0.0.1:8900`."""
    uds: str | None = None
    """Path of a Unix socket to use in place of TCP."""
    token: str | None = field(default=None, repr=False)
    timeout: float = TIMEOUT_SECONDS
    program: str = "onstep"
    """What asks, as the job records it of a command."""

    @property
    def place(self) -> str:
        """The address, for messages."""
        return self.uds or self.url

    def __post_init__(self) -> None:
        if self.token is not None and not re.fullmatch(r"[!-~]+", self.token):
            raise ConfigError(f"the token for {self.place} must be a single word of ASCII characters; check its file.")

    def get(self, path: str, parameters: Mapping[str, Any] | None = None, wait: float = 0.0) -> dict[str, Any]:
        """The JSON object that a path answers; `wait` are the seconds that the server may take before it answers."""
        return self._request("GET", path, wait, params=dict(parameters or {}))

    def post(self, path: str, body: Any, wait: float = 0.0) -> dict[str, Any]:
        """Send JSON; the JSON object of the answer.

        Raises:
            ControlError: if the server cannot be reached, or the answer is not a success.
            ConfigError: if `body` cannot be written as JSON.
        """
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"what is sent with a command must be JSON, got {body!r}: {error}.") from error
        return self._request("POST", path, wait, content=content, headers={"Content-Type": "application/json"})

    @contextmanager
    def stream(
        self, path: str, parameters: Mapping[str, Any], headers: Mapping[str, str], silence: float
    ) -> Iterator[Any]:
        """The bytes of an answer that does not end, as they arrive; fails after `silence` seconds without any."""
        with (
            self._client() as client,
            self._explained(),
            client.stream(
                "GET",
                path,
                params=dict(parameters),
                headers=dict(headers),
                timeout=(self.timeout, silence, self.timeout, self.timeout),
            ) as answer,
        ):
            if answer.status_code != 200:
                raise refusal(answer, _content_of(answer, self), self)
            _refuse_compressed(answer, self)
            yield answer.iter_raw()

    def _request(self, method: str, path: str, wait: float, **more: Any) -> dict[str, Any]:
        """The answer, within a time in all: the limits of httpx begin again with every byte."""
        seconds, outcome = self.timeout + wait, queue.SimpleQueue[Callable[[], dict[str, Any]]]()

        def exchange() -> None:
            try:
                found = self._exchange(method, path, seconds, **more)
                outcome.put(lambda: found)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                outcome.put(partial(_raised, error))

        threading.Thread(target=exchange, name="onstep-request", daemon=True).start()
        try:
            return outcome.get(timeout=seconds + _SPARE_SECONDS)()
        except queue.Empty:
            raise self._silent(seconds) from None

    def _exchange(self, method: str, path: str, seconds: float, **more: Any) -> dict[str, Any]:
        with (
            self._client() as client,
            self._explained(seconds),
            client.stream(method, path, timeout=seconds, **more) as answer,
        ):
            content = _content_of(answer, self)
        if not answer.is_success:
            raise refusal(answer, content, self)
        return _json_of(answer, content, self)

    def _silent(self, seconds: float) -> ControlError:
        return ControlError(
            f"{self.place} did not answer within {seconds:g} s; the process may be stopped or overloaded."
        )

    def _client(self) -> httpx.Client:
        with extra("control", "Steering a running job requires httpx"):
            import httpx
        # Our servers do not compress, and what expands a thousandfold is not read.
        headers = {
            "User-Agent": f"{self.program}/{version('onstep')}",
            "X-Onstep-User": _user(),
            "Accept-Encoding": "identity",
        }
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        # The protocol is plain HTTP; preparing TLS would cost 20 ms a request.
        transport = httpx.HTTPTransport(verify=False, trust_env=False, uds=self.uds)
        return httpx.Client(
            base_url=self.url, headers=headers, transport=transport, trust_env=False, timeout=self.timeout
        )

    @contextmanager
    def _explained(self, seconds: float | None = None) -> Iterator[None]:
        """Turn errors of the network into one line; `seconds` is the time for an answer."""
        import httpx

        try:
            yield
        except httpx.TimeoutException as error:
            raise self._silent(self.timeout if seconds is None else seconds) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ControlError(f"cannot reach {self.place}: {str(error) or type(error).__name__}.") from error


def refusal(answer: httpx.Response, content: bytes, connection: Connection) -> ControlError:
    """The error for an answer that is not a success: `HTTP <code>: <what the server says>`."""
    body = _parsed(content)
    text = (body.get("error") or body.get("detail")) if isinstance(body, dict) else None
    if isinstance(body, dict) and isinstance(body.get("jobs"), list):
        text = f"{text} It has {', '.join(map(str, body['jobs'][:10])) or 'none'}."
    if text is None:
        text = f"{answer.reason_phrase or 'no reason given'}; is {connection.place} a control server?"
    remedy = ""
    if answer.status_code == 401:
        given = "the token given is not that of this server" if connection.token else "no token was given"
        remedy = f" ({given}; the token is in the file auth_token of the job's registry entry)"
    said = shortened(printable(str(text)), _LONGEST_REASON)
    return ControlError(f"HTTP {answer.status_code}: {said}{remedy}", answer.status_code)


def field_of(answer: Mapping[str, Any], name: str, kind: type, connection: Connection) -> Any:
    """A field of an answer.

    Raises:
        ControlError: if it is missing or of another type.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise ControlError(f"the answer of {connection.place} has no {name!r}; is it a control server?")
    return value


def _content_of(answer: httpx.Response, connection: Connection) -> bytes:
    """The body of an answer, as it was sent.

    Raises:
        ControlError: for one that is compressed, or too large.
    """
    content = bytearray()
    _refuse_compressed(answer, connection)
    for piece in answer.iter_raw():
        content += piece
        if len(content) > MAX_JSON_BYTES:
            raise ControlError(f"the answer of {connection.place} has more than {MAX_JSON_BYTES:,} bytes.")
    return bytes(content)


def _refuse_compressed(answer: httpx.Response, connection: Connection) -> None:
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise ControlError(
            f"the answer of {connection.place} is compressed ({brief(encoding)}), which it was not asked for; is it a "
            f"control server?",
            answer.status_code,
        )


def _raised(error: BaseException) -> NoReturn:
    raise error


def _json_of(answer: httpx.Response, content: bytes, connection: Connection) -> dict[str, Any]:
    body = _parsed(content)
    if not isinstance(body, dict):
        raise ControlError(
            f"the answer of {connection.place} is not a JSON object; is it a control server?", answer.status_code
        )
    return body


def _parsed(content: bytes) -> Any:
    """The JSON of an answer; None for anything else."""
    try:
        return parse_json(content, "the answer")
    except DataError:
        return None


def _user() -> str:
    """This user's name, for the log of decisions; nobody checks it."""
    with suppress(OSError, KeyError):  # a container may have no name for its user
        return quote(getpass.getuser(), safe=" @.-_+")
    return ""
