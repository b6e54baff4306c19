"""Sends requests to one server over HTTP."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from onstep.diloco.client.patience import BYTES_PER_SECOND, Patience
from onstep.diloco.protocol.messages import PROTOCOL_VERSION, Await, Refused, Register, Reply, Request, Submit
from onstep.diloco.protocol.operations import RefusedByServerError, ServerLostError
from onstep.diloco.protocol.settings import other_protocol
from onstep.diloco.protocol.wire import InvalidMessageError, reply_from_json, to_json
from onstep.diloco.wire.http import FIRST_PORT, INFO, JSON, MESSAGE_HEADER, PATHS, TENSORS, WAIT_SECONDS
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
_OTHER = "other server"
"""Kind of an answer that no DiLoCo server gives."""
Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Received:
    """An answer: its status, message header, media type and body."""

    status: int
    message: str | None
    media_type: str
    body: memoryview


class Connection:
    """Requests to one server; safe to use from several threads.

    Redirects are not followed, and proxies from the environment are not used, so that a token reaches no other host.

    Args:
        address: `host`, `host:port`, or a URL with `http` or `https`.
        timeout: seconds without a byte from the server, or to it, after which it counts as lost; requests of the
            protocol have shorter limits, which follow the answers so far (`Patience`).
        token: None for that of the environment, or of the token file of a server on this machine.
        verify: for `https`, the PEM file of the certification authority; None for those of the system.
    """

    def __init__(
        self, address: str, timeout: float = 600.0, token: str | None = None, verify: str | Path | None = None
    ) -> None:
        self.url = url_of(address)
        parts = urlsplit(self.url)
        self._timeout, self._patience = timeout, Patience(timeout)
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
        held = min(request.wait, WAIT_SECONDS) if isinstance(request, Await) else 0.0
        if isinstance(request, Submit | Register):
            headers = {MESSAGE_HEADER: text, "Content-Type": TENSORS if isinstance(request, Submit) else JSON}
            received = self.request("POST", PATHS[type(request)], body, headers, held)
        else:
            received = self.request("POST", PATHS[type(request)], text.encode(), {"Content-Type": JSON}, held)
        return self._reply(received)

    def request(
        self,
        method: str,
        path: str,
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        held_seconds: float | None = None,
    ) -> Received:
        """Any request.

        Args:
            method: of HTTP.
            path: what is requested.
            body: what is sent.
            headers: beside the length.
            held_seconds: for which the server may hold the answer; None for as long as `timeout`.

        Raises:
            ServerLostError: if no answer comes.
        """
        import httpx

        size = memoryview(body).nbytes
        limit = self._timeout if held_seconds is None else self._patience.limit(held_seconds, size)
        sent, pieces = {"Content-Length": str(size), **(headers or {})}, _Pieces(body)
        try:
            with self._client.stream(method, path, content=pieces, headers=sent, timeout=limit) as answer:
                self._has_answered = True
                if held_seconds is not None:
                    self._patience.note(time.monotonic() - pieces.sent_at - held_seconds - size / BYTES_PER_SECOND)
                media_type = answer.headers.get("content-type", "").partition(";")[0][:50]
                return Received(answer.status_code, answer.headers.get(MESSAGE_HEADER), media_type, _body_of(answer))
        except httpx.TimeoutException as error:
            raise ServerLostError(f"{self.url} did not answer within {limit:.3g} s.") from error
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

    def tensors(self, path: str) -> memoryview:
        """What is at a path, a safetensors file. Raises like `json`."""
        received = self.request("GET", path)
        if received.status != 200:
            raise RefusedByServerError(received.status, _error_in(self._document(received)), self.url)
        return received.body

    def check(self) -> None:
        """Check that a DiLoCo server answers, and accepts the token. Raises like `json`."""
        info = self.json("GET", INFO)
        if not isinstance(info.get("settings"), dict):
            raise RefusedByServerError(422, f"this is not a DiLoCo server; {_REMEDY}.", self.url)
        if info.get("protocol_version") != PROTOCOL_VERSION:
            raise RefusedByServerError(422, other_protocol(PROTOCOL_VERSION, info.get("protocol_version")), self.url)

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
        if document.get("kind") == _OTHER and received.status < 500:
            return Refused(422, f"{self.url}: {_error_in(document)}"), memoryview(b"")
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
        """The JSON object of an answer; for what no DiLoCo server sends, an object that says so as `error`."""
        if received.body.nbytes > _MOST_JSON_BYTES:
            raise ServerLostError(f"{self.url} sent {received.body.nbytes} bytes where a DiLoCo server sends JSON.")
        content = bytes(received.body)
        try:
            document = parse_json(content, "the answer")
        except DataError:
            document = None
        if isinstance(document, dict) and (received.status == 200 or document.keys() & {"error", "type"}):
            return document
        return {
            "error": f"this is not a DiLoCo server (it sent {received.media_type or 'nothing'}); {_REMEDY}.",
            "kind": _OTHER,
        }


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


_REMEDY = "give the address and port that `onstep diloco server` has printed"


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


class _Pieces:
    """The pieces of a body, and when the last one was taken to be sent."""

    def __init__(self, body: Body) -> None:
        self._view = memoryview(body).cast("B")
        self.sent_at = time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, self._view.nbytes, PIECE_BYTES):
            yield bytes(self._view[start : start + PIECE_BYTES])
        self.sent_at = time.monotonic()


def _body_of(answer: httpx.Response) -> memoryview:
    """The body, in memory of exactly its size that may be written.

    Raises:
        ServerLostError: if it is incomplete, or it has no Content-Length.
    """
    length = answer.headers.get("content-length", "")
    if not length and answer.status_code >= 400:
        return memoryview(b"")  # of a server that is not ours, or of a proxy
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
