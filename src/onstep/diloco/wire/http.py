"""Defines what requests and answers look like in HTTP.

Requests of the protocol are POST. Messages are JSON (`protocol.wire`): in the body, or in the header `X-Onstep-Message`
of what has a body of its own: a submission, a registration (whose body lists the worker's parameters), and the answer
`Ready`. Tensors are a safetensors file. Everything else the server says is JSON; an error has the member `error`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from onstep.diloco.protocol.messages import Await, Deregister, Heartbeat, ParameterSpec, Register, Submit
from onstep.errors import DataError
from onstep.files.bounded_reading import parse_json

MESSAGE_HEADER = "x-onstep-message"
TENSORS = "application/vnd.safetensors"
JSON = "application/json"
FIRST_PORT = 8512
PORTS = range(FIRST_PORT, FIRST_PORT + 100)
"""A server binds the first that is free."""

PATHS: dict[type, str] = {
    Register: "/register",
    Submit: "/submit_pseudograd",
    Await: "/await",
    Heartbeat: "/heartbeat",
    Deregister: "/deregister",
}
"""Where each request is sent."""
GLOBAL_PARAMS, STATUS, INFO, HEALTH, CONTROL = "/global_params", "/status", "/info", "/health", "/control"

PAGE: dict[str, tuple[str, str]] = {"/": ("index.html", "text/html"), "/page.js": ("page.js", "text/javascript")}
"""The files of the page, by path, and their types; they have no data, and need no token."""

MOST_HEADER_BYTES = 32 << 10
"""For all headers of a request."""
MOST_JSON_BYTES = 16 << 20
"""For a list of parameters; a hundred thousand have about 10 MB."""
MOST_PARAMETERS = 200_000
WAIT_SECONDS = 20.0
"""For which a server holds the answer to `Await`; proxies cut off what is silent for a minute."""


class MalformedBodyError(DataError):
    """A body that is not what its request requires."""


def specs_to_bytes(specs: Sequence[ParameterSpec]) -> bytes:
    """The parameters of a model as the body of a registration."""
    return json.dumps([[spec.name, list(spec.shape), spec.dtype] for spec in specs], separators=(",", ":")).encode()


def specs_from_bytes(body: bytes) -> tuple[ParameterSpec, ...]:
    """Read the body of a registration.

    Raises:
        MalformedBodyError: for anything but a list of `[name, shape, dtype]` with different names.
    """
    items = parse_json(body, "the list of parameters", error=MalformedBodyError, max_digits=20, max_nesting=5)
    if not isinstance(items, list) or len(items) > MOST_PARAMETERS:
        raise MalformedBodyError(f"the parameters must be a list of at most {MOST_PARAMETERS} items.")
    specs = tuple(_spec(item) for item in items)
    if len({spec.name for spec in specs}) != len(specs):
        raise MalformedBodyError("the list of parameters has a name twice.")
    return specs


def _spec(item: object) -> ParameterSpec:
    match item:
        case [str(name), list(shape), str(dtype)] if all(type(size) is int and 0 <= size < 2**63 for size in shape):
            return ParameterSpec(name, tuple(shape), dtype)
    raise MalformedBodyError(f"a parameter must be [name, shape, dtype], got {str(item)[:100]!r}.")
