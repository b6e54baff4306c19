"""The HTTP application of a server; `wire.http` says what requests and answers look like."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from torch import Tensor

from onstep.checkpoint.format.tensor_header import LENGTH_BYTES
from onstep.diloco.codec.body import read_body
from onstep.diloco.codec.formats import check_encoded, check_values, encoded_specs, norm
from onstep.diloco.codec.specs import InvalidTensorsError
from onstep.diloco.protocol import messages as protocol
from onstep.diloco.protocol.messages import ParameterSpec, Refused, Register, Reply, Submit, first_difference
from onstep.diloco.protocol.wire import InvalidMessageError, request_from_json, to_json
from onstep.diloco.server.memory import Buffers
from onstep.diloco.server.operator import Operator
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.serving.control import ControlRoutes
from onstep.diloco.server.serving.guard import check_access
from onstep.diloco.server.serving.receiving import read_body as receive_body
from onstep.diloco.server.serving.receiving import skip_body
from onstep.diloco.server.serving.sending import TensorResponse
from onstep.diloco.sizes import CODECS, encoded_bytes
from onstep.diloco.wire.http import (
    CONTROL,
    GLOBAL_PARAMS,
    HEALTH,
    INFO,
    MESSAGE_HEADER,
    MOST_JSON_BYTES,
    PAGE,
    PATHS,
    STATUS,
    specs_from_bytes,
)
from onstep.diloco.wire.roles import RoleTokens
from onstep.errors import DataError
from onstep.files.bounded_reading import parse_json
from onstep.http.access import Access
from onstep.http.listener import Client
from onstep.http.messages import RefusedError, answer, refusal
from onstep.http.watch import client_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]

_PAGE = Path(__file__).parents[1] / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MESSAGE_HEADER = MESSAGE_HEADER.encode()
_MOST_MESSAGE_BYTES = 64 << 10
_MOST_BYTES_AT_ONCE = 64 << 10
"""Of a submission that is checked in the loop: a thread would last longer."""
_HEADER_SLACK = 4096
"""For metadata and spaces in the header of a submission."""


def build_app(
    run: ServedRun,
    operator: Operator,
    access: Access,
    model: Sequence[ParameterSpec],
    buffers: Buffers,
    roles: RoleTokens,
) -> ASGIApp:
    """The application.

    Args:
        run: what is served.
        operator: what can be asked and changed apart from the protocol.
        access: who may use it.
        model: all parameters of the model.
        roles: the tokens that allow a part.
    """
    protocol, control = ProtocolRoutes(run, model, buffers), ControlRoutes(operator)
    handlers: dict[str, tuple[str, Handler]] = {
        **dict.fromkeys(PATHS.values(), ("POST", protocol.answer)),
        **{f"{CONTROL}/{name}": ("POST", partial(control.act, name)) for name in control.actions},
        GLOBAL_PARAMS: ("GET", control.parameters),
        STATUS: ("GET", control.status),
        INFO: ("GET", control.info),
        HEALTH: ("GET", control.health),
        **dict.fromkeys(PAGE, ("GET", page_file)),
    }
    return Application(handlers, access, roles)


async def page_file(request: Request) -> Response:
    """A file of the page, which asks for the status with the reader's token."""
    name, kind = PAGE[request.scope["path"]]
    return Response((_PAGE / name).read_bytes(), 200, _PAGE_HEADERS, media_type=kind)


class Application:
    """Answers a request with the handler of its path, if its sender may use the server.

    Args:
        handlers: by path, the method of its requests and what answers them.
        access: who may use it.
        roles: the tokens that allow a part.
    """

    def __init__(self, handlers: Mapping[str, tuple[str, Handler]], access: Access, roles: RoleTokens) -> None:
        self._handlers, self._roles = handlers, roles
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            check_access(scope, self._access, self._roles)
            response = await self._handler(scope)(Request(scope, receive))
        except RefusedError as error:
            response = error.response
        except ClientDisconnect:
            raise
        except Exception as error:
            await refusal(500, type(error).__name__)(scope, receive, send)
            raise
        await response(scope, receive, send)

    def _handler(self, scope: Scope) -> Handler:
        path: str = scope["path"]
        if path not in self._handlers:
            raise RefusedError(404, f"There is nothing at {path[:100]!r}.")
        method, handler = self._handlers[path]
        if scope["method"] != method:
            raise RefusedError(405, f"{path} is requested with {method}.")
        return handler


class ProtocolRoutes:
    """Answers the requests of workers."""

    def __init__(self, run: ServedRun, model: Sequence[ParameterSpec], buffers: Buffers) -> None:
        self._buffers = buffers
        self._run = run
        self._model = model
        self._most_bytes = [{codec: _most_bytes(one.specs, codec) for codec in CODECS} for one in run.fragments]
        """Of a submission, by fragment and codec."""
        self._largest_body = max(number for by_codec in self._most_bytes for number in by_codec.values())
        self._receiving: dict[tuple[str, int], Client] = {}
        """The connections on which submissions arrive, by worker and fragment."""

    async def answer(self, request: Request) -> Response:
        """Answer one request of the protocol."""
        message = await self._message(request)
        if PATHS[type(message)] != request.scope["path"]:
            raise RefusedError(400, f"{type(message).__name__} is sent to {PATHS[type(message)]}.")
        if isinstance(message, Submit):
            return _reply(await self._submit(request, message))
        result = await self._run.handle(message)
        if isinstance(message, Register) and isinstance(result.reply, Refused):
            return _reply(await self._explained(request, result.reply))
        if result.tensors is not None:
            return TensorResponse(json.dumps(to_json(result.reply)), result.tensors, self._buffers)
        return _reply(result.reply)

    async def _message(self, request: Request) -> protocol.Request:
        text: bytes | str | None = dict(request.scope["headers"]).get(_MESSAGE_HEADER)
        if text is None:
            text = bytes(await receive_body(request, _MOST_MESSAGE_BYTES, self._buffers))
        try:
            return request_from_json(parse_json(text, "The message", max_nesting=10, allows_constants=False))
        except (InvalidMessageError, DataError) as error:
            raise RefusedError(400, str(error)) from None

    async def _explained(self, request: Request, refused: Refused) -> Refused:
        """Name the parameter because of which a model is refused, if the worker has listed its own."""
        if refused.details.get("kind") != "fingerprint" or MESSAGE_HEADER not in request.headers:
            return refused
        try:
            theirs = specs_from_bytes(bytes(await receive_body(request, MOST_JSON_BYTES, self._buffers)))
        except DataError as error:
            raise RefusedError(400, str(error)) from None
        difference = first_difference(self._model, theirs)
        text = f"{refused.error}; the first is {difference}" if difference else refused.error
        return Refused(refused.status, text, {**refused.details, "first_difference": difference})

    async def _submit(self, request: Request, message: Submit) -> Reply:
        if self._run.coordinator.preview(message, self._run.now()) is not None:
            reply = self._run.submit(message, {})  # refused, dropped or known: its body is of no use
            await skip_body(request, self._largest_body)
            return reply
        if message.codec not in CODECS:
            raise RefusedError(422, f"codec must be one of {', '.join(CODECS)}, got {message.codec[:100]!r}.")
        specs = self._run.fragments[message.fragment].specs
        body = await self._received(request, message, self._most_bytes[message.fragment][message.codec])
        try:
            if body.nbytes > _MOST_BYTES_AT_ONCE:
                encoded, size = await asyncio.to_thread(_checked, body, specs, message.codec, self._buffers)
            else:
                encoded, size = _checked(body, specs, message.codec, self._buffers)
        except InvalidTensorsError as error:
            self._run.coordinator.counts["invalid"] += 1
            raise RefusedError(422, str(error), kind="tensors") from None
        return self._run.submit(message, encoded, size)

    async def _received(self, request: Request, message: Submit, most_bytes: int) -> memoryview:
        """The body; a worker that starts again has lost its connection, and what it sent before is given up."""
        key, client = (message.worker_id, message.fragment), client_of(request.scope)
        if key in self._receiving:
            self._receiving[key].cut()
        self._receiving[key] = client
        try:
            return await receive_body(request, most_bytes, self._buffers)
        finally:
            if self._receiving.get(key) is client:
                del self._receiving[key]


def _checked(
    body: memoryview, specs: Sequence[ParameterSpec], codec: str, buffers: Buffers
) -> tuple[dict[str, Tensor], float]:
    """The tensors of a submission, if they are what they should be, and their norm."""
    encoded = read_body(body)
    check_encoded(encoded, specs, codec)
    norms = []
    for spec in specs:
        check_values(encoded, [spec], codec)
        norms.append(norm(encoded, [spec], codec))
        buffers.release(encoded[spec.name])
    return encoded, math.hypot(*norms)


def _most_bytes(specs: Sequence[ParameterSpec], codec: str) -> int:
    """A body with these tensors has at most this size, whatever writes it."""
    expected = encoded_specs(specs, codec)
    header = sum(6 * len(spec.name) + 24 * len(spec.shape) + 128 for spec in expected)
    return LENGTH_BYTES + _HEADER_SLACK + header + encoded_bytes(specs, codec)


def _reply(reply: Reply) -> Response:
    return answer(to_json(reply), reply.status if isinstance(reply, Refused) else 200)
