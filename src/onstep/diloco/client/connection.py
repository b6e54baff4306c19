"""Sends requests to one server over HTTP."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from onstep.diloco.protocol.messages import Refused, Register, Reply, Request, Submit
from onstep.diloco.protocol.session import RefusedByServerError, ServerLostError
from onstep.diloco.protocol.wire import InvalidMessageError, reply_from_json, to_json
from onstep.diloco.wire.http import FIRST_PORT, JSON, MESSAGE_HEADER, PATHS, TENSORS
from onstep.diloco.wire.tokens import checked, find_token
from onstep.errors import ConfigError, DataError, extra
from onstep.files.bounded_reading import parse_json

if TYPE_CHECKING:
    import httpx

PIECE_BYTES = 1 << 20
"""Sent at a time."""
MOST_BYTES = 1 << 40
"""Of an answer; memory is used as bytes arrive."""
_MOST_JSON_BYTES = 64 << 20
_TRANSIENT = frozenset({408, 500, 502, 504})
"""Statuses after which the same request may succeed."""
Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Received:
    """An answer: its status, message header and body."""

    status: int
    message: str | None
    body: memoryview


class Connection:
    """Requests to one server; safe to use from several threads.

    Redirects are not followed, and proxies from the environment are not used, so that a token reaches no other host.

    Args:
        address: `host`, `host:port`, or a URL with `http` or `https`.
        timeout: seconds without a byte from the server, or to it, after which it counts as lost.
        token: None for that of the environment, or of the token file of a server on this machine.
        verify: for `https`, the PEM file of the certification authority; None for those of the system.
    """

    def __init__(
        self, address: str, timeout: float = 600.0, token: str | None = None, verify: str | Path | None = None
    ) -> None:
        self.url = url_of(address)
        parts = urlsplit(self.url)
        self._timeout = timeout
        self._has_answered = False
        host, port = parts.hostname or "", parts.port or FIRST_PORT
        found = find_token(host, port) if token is None else token
        self._client = _http_client(self.url, timeout, checked(found) if found else None, verify)

    def send(self, request: Request, body: Body = b"") -> tuple[Reply, memoryview]:
        """Send a request of the protocol; returns the reply and its tensors, a safetensors file or nothing.

        Args:
            request: the message.
            body: the tensors of a submission; the list of parameters of a registration.

        Raises:
            ServerLostError: if no answer of the protocol comes.
        """
        text = json.dumps(to_json(request), separators=(",", ":"))
        if isinstance(request, Submit | Register):
            headers = {MESSAGE_HEADER: text, "Content-Type": TENSORS if isinstance(request, Submit) else JSON}
            received = self.request("POST", PATHS[type(request)], body, headers)
        else:
            received = self.request("POST", PATHS[type(request)], text.encode(), {"Content-Type": JSON})
        return self._reply(received)

    def request(self, method: str, path: str, body: Body = b"", headers: Mapping[str, str] | None = None) -> Received:
        """Any request.

        Raises:
            ServerLostError: if no answer comes.
        """
        import httpx

        sent = {"Content-Length": str(memoryview(body).nbytes), **(headers or {})}
        try:
            with self._client.stream(method, path, content=_pieces(body), headers=sent) as answer:
                self._has_answered = True
                return Received(answer.status_code, answer.headers.get(MESSAGE_HEADER), _body_of(answer))
        except httpx.TimeoutException as error:
            raise ServerLostError(f"{self.url} did not answer within {self._timeout:g} s.") from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: closed by another thread
            hint = ""
            may_be_tls = not self._has_answered and self.url.startswith("http:")
            if may_be_tls and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
                hint = "; if it serves https, give its address with https://"
            reason = (str(error) or type(error).__name__).rstrip(".")
            raise ServerLostError(f"cannot reach {self.url}: {reason}{hint}.") from error

    def json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A request that is answered with a JSON object.

        Raises:
            ServerLostError: if no answer comes.
            RefusedByServerError: if the server refuses.
        """
        content = b"" if body is None else json.dumps(body).encode()
        received = self.request(method, path, content, {"Content-Type": JSON})
        document = self._document(received)
        if received.status != 200:
            raise RefusedByServerError(received.status, _error_in(document), self.url)
        return document

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _reply(self, received: Received) -> tuple[Reply, memoryview]:
        """The protocol's reply in an answer; refusals of the HTTP layer count as such."""
        if received.status == 200 and received.message is not None:
            return self._read(parse_json(received.message, f"the answer of {self.url}")), received.body
        document = self._document(received)
        if "type" in document:
            return self._read(document), memoryview(b"")
        if received.status in _TRANSIENT or document.get("kind") == "superseded" or received.status < 400:
            raise ServerLostError(f"{self.url} answered HTTP {received.status}: {_error_in(document)}")
        details = {key: value for key, value in document.items() if key != "error"}
        return Refused(received.status, _error_in(document), details), memoryview(b"")

    def _read(self, document: object) -> Reply:
        try:
            return reply_from_json(document)
        except InvalidMessageError as error:
            raise ServerLostError(f"{self.url} does not answer like a DiLoCo server: {error}") from error

    def _document(self, received: Received) -> dict[str, Any]:
        """The JSON object of an answer; for any other text, an object with its beginning as `error`."""
        if received.body.nbytes > _MOST_JSON_BYTES:
            raise ServerLostError(f"{self.url} sent {received.body.nbytes} bytes where a DiLoCo server sends JSON.")
        content = bytes(received.body)
        try:
            document = parse_json(content, "the answer")
        except DataError:
            document = None
        if isinstance(document, dict):
            return document
        return {"error": content[:200].decode("utf-8", "replace") or "nothing; is it a DiLoCo server?"}


def url_of(address: str) -> str:
    """The URL of an address: `http` and port 8512 unless it says otherwise.

    Raises:
        ConfigError: for anything but the address of a server.
    """
    url = address if re.match(r"https?://", address) else f"http://{address}"
    try:
        parts = urlsplit(url)
        port = parts.port or FIRST_PORT
    except ValueError:
        parts, port = urlsplit(""), FIRST_PORT
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username is not None:
        raise ConfigError(f"a server's address must be host:port or http(s)://host:port, got {address[:200]!r}.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _error_in(document: Mapping[str, Any]) -> str:
    return str(document.get("error", "no reason given"))[:1000]


def _http_client(url: str, timeout: float, token: str | None, verify: str | Path | None) -> httpx.Client:
    with extra("control", "DiLoCo requires httpx"):
        import httpx
    requests = logging.getLogger("httpx")
    if requests.level == logging.NOTSET:  # it logs every request at INFO, between the lines of a training
        requests.setLevel(logging.WARNING)
    # bodies are raw: one that a proxy had compressed would have neither the announced length nor the tensors
    headers = {"User-Agent": f"onstep/{version('onstep')}", "Accept-Encoding": "identity"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    transport = httpx.HTTPTransport(verify=_trusted(url, verify), trust_env=False)
    return httpx.Client(base_url=url, headers=headers, transport=transport, trust_env=False, timeout=timeout)


def _trusted(url: str, verify: str | Path | None) -> Any:
    """The SSL context that verifies a server; creating one costs 20 ms, so only for TLS."""
    if not url.startswith("https:"):
        return False
    import ssl

    if verify is None:
        return ssl.create_default_context()
    if not Path(verify).is_file():
        raise ConfigError(f"verify must be the PEM file of an authority, and there is no file {verify}; give its path.")
    try:
        return ssl.create_default_context(cafile=str(verify))
    except ssl.SSLError as error:
        raise ConfigError(
            f"verify must be the PEM file of an authority, and {verify} is not one ({error.reason}); give another file."
        ) from None


def _pieces(body: Body) -> Iterator[bytes]:
    view = memoryview(body).cast("B")
    for start in range(0, view.nbytes, PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


def _body_of(answer: httpx.Response) -> memoryview:
    """The body, in memory of exactly its size that may be written.

    Raises:
        ServerLostError: if it is incomplete, or it has no Content-Length.
    """
    length = answer.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        raise ServerLostError(f"{answer.url} answers without a length; is it a DiLoCo server?")
    memory = np.empty(int(length), np.uint8).data if int(length) else memoryview(bytearray())
    position = 0
    for piece in answer.iter_raw():
        memory[position : position + len(piece)] = piece
        position += len(piece)
    if position != memory.nbytes:
        raise ServerLostError(f"{answer.url} sent {position} of {memory.nbytes} bytes.")
    return memory
