"""Describes the HTTP interface in OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from onstep.commands import COMMANDS
from onstep.control.feed import KINDS
from onstep.control.serving.limits import MOST_WAIT_SECONDS
from onstep.http.messages import MOST_BODY_BYTES

Json = dict[str, Any]

_JOB_ID: Json = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"}
_NUMBER_OR_NULL: Json = {"type": ["number", "null"]}


def describe_api(title: str, *, is_dashboard: bool, is_open: bool, cookie_name: str) -> Json:
    """The description of a server.

    Args:
        title: names the server.
        is_dashboard: whether it shows jobs of other processes.
        is_open: whether it requires no token.
        cookie_name: name of the cookie of a browser's session.
    """
    subject = (
        "Shows jobs, finished and running, and hands commands to those that run." if is_dashboard else "Shows a job."
    )
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": cookie_name},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1", "description": subject},
        "security": [{}] if is_open else [{"bearer": []}, {"session": []}],
        "paths": {path: _finished(operations) for path, operations in {**_job_paths(), **_other_paths()}.items()},
        "components": {"schemas": _schemas(), "securitySchemes": schemes},
    }


def _job_paths() -> Json:
    job = _parameter("job_id", "path", _JOB_ID, "The job")
    wait = {"type": "number", "minimum": 0, "maximum": MOST_WAIT_SECONDS}
    return {
        "/jobs": {"get": _operation("List the jobs that the server knows", _json("Jobs"))},
        "/jobs/{job_id}/status": {
            "get": _operation("The newest metrics and the state of a job", _json("Status"), [job], {404: "UnknownJob"})
        },
        "/jobs/{job_id}/metrics": {
            "get": _operation(
                "The curves of a job, downsampled so that no spike is lost",
                _json("Metrics"),
                [
                    job,
                    _parameter("names", "query", {"type": "string"}, "The curves, separated by commas; all without it"),
                    _parameter(
                        "points",
                        "query",
                        _integer(10, 10_000, 1000),
                        "Most points of a curve; fewer if there are very many curves",
                    ),
                    _parameter("since_step", "query", _integer(-1, 2**53), "Only points after this step"),
                ],
                {400: "Error", 404: "UnknownJob"},
            )
        },
        "/jobs/{job_id}/events": {"get": _events(job)},
        "/jobs/{job_id}/commands/{id}": {
            "get": _operation(
                "A command that was sent, and its outcome",
                _json("Ticket"),
                [
                    job,
                    _parameter("id", "path", _text("^[0-9a-f]{16}$"), "The command"),
                    _parameter("wait", "query", wait, "Seconds to wait for the outcome"),
                ],
                {400: "Error", 404: "UnknownJob"},
            )
        },
        "/jobs/{job_id}/control": {
            "post": _operation(
                "Send a command, which is applied after the current step",
                _json("Acknowledgement"),
                [job],
                {400: "Error", 404: "UnknownJob", 409: "Error", 415: "Error"},
                "Command",
            )
        },
    }


def _events(job: Json) -> Json:
    """The operation that streams events, or lists them."""
    kinds = {"type": "string", "pattern": f"^({'|'.join(KINDS)})(,({'|'.join(KINDS)}))*$"}
    found = _json("Events")
    found["200"]["content"]["text/event-stream"] = {"schema": _reference("StreamedEvent")}
    found["204"] = {"description": "The job has ended, and there is nothing after that event"}
    return _operation(
        "What happens, as server-sent events until the job ends; or what has happened",
        found,
        [
            job,
            _parameter("after", "query", _integer(0, 2**53, 0), "Only events after this id"),
            _parameter("kinds", "query", kinds, "The kinds of events, separated by commas; all without it"),
            _parameter("stream", "query", _integer(0, 1, 1), "0: list at most 500 events, and end"),
            _parameter("Last-Event-ID", "header", {"type": "string"}, "In place of `after`, as browsers send it"),
        ],
        {400: "Error", 404: "UnknownJob"},
    )


def _other_paths() -> Json:
    text = {"200": {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    page = {"200": _content("The page", "text/html", "text/plain")}
    files = ("text/css", "text/html", "text/javascript", "image/svg+xml", "image/png", "image/x-icon", "font/woff2")
    file = {"200": _content("The file", *files, "application/json"), "304": {"description": "It has not changed"}}
    admitted = {
        "303": {"description": "Admitted, with a cookie"},
        "401": _content("No longer valid", "text/html", "text/plain"),
    }
    code = _parameter("code", "path", _text("^[A-Za-z0-9_-]{43}$"), "The code of the link")
    name = _parameter("file", "path", _text("^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"), "Its name")
    return {
        "/metrics": {"get": _operation("The newest metrics in Prometheus' text format", text)},
        "/openapi.json": {"get": _operation("This description", _json("Description"))},
        "/login-links": {"post": _operation("Make a link that admits a browser, once, within a minute", _json("Link"))},
        "/logout": {"post": _operation("End the session of a browser", {"204": {"description": "Ended"}})},
        "/login": {
            "post": _operation(
                "Admit a browser",
                {"204": {"description": "Admitted, with a cookie"}},
                errors={400: "Error", 401: "Unauthenticated", 415: "Error"},
                body="Login",
                is_public=True,
            )
        },
        "/login/{code}": {"get": _operation("Admit a browser that follows a link", admitted, [code], is_public=True)},
        "/": {"get": _operation("The page", page, is_public=True)},
        "/static/{file}": {
            "get": _operation("A file of the page", file, [name], {404: "Error"}, is_public=True),
        },
    }


def _operation(
    summary: str,
    responses: Json,
    parameters: list[Json] | None = None,
    errors: dict[int, str] | None = None,
    body: str | None = None,
    *,
    is_public: bool = False,
) -> Json:
    found = {str(status): _json(schema, "Refused")["200"] for status, schema in (errors or {}).items()}
    operation: Json = {"summary": summary, "parameters": parameters or [], "responses": {**responses, **found}}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    if is_public:
        operation["security"] = []
    else:
        operation["responses"]["401"] = _json("Unauthenticated", "No valid token or session")["200"]
    return operation


def _finished(operations: Json) -> Json:
    """Operations with the answers that every one can give."""
    common = {
        "403": "The request comes from the page of another server",
        "413": f"The body has more than {MOST_BODY_BYTES} bytes",
        "421": "The server is not called by the name in Host",
        "500": "A bug of the server",
        "503": "Too many event streams, or requests without a valid token",
    }
    for operation in operations.values():
        for status, description in common.items():
            operation["responses"].setdefault(status, _json("Error", description)["200"])
        operation["responses"].setdefault("400", _content("Not HTTP", "text/plain", "application/json"))
        operation["responses"] = dict(sorted(operation["responses"].items()))
    return operations


def _schemas() -> Json:
    strings = {"type": "array", "items": {"type": "string"}}
    numbers = {"type": "array", "items": _NUMBER_OR_NULL}
    series = _object({"step": {"type": "array", "items": {"type": "integer"}}, "value": numbers, "time": numbers})
    return {
        "Error": _object({"error": {"type": "string"}}, {"valid_commands": strings}),
        "UnknownJob": _object({"error": {"type": "string"}}, {"jobs": strings}),
        "Unauthenticated": _object({"detail": {"type": "string"}}),
        "Jobs": _object({"jobs": {"type": "array", "items": _reference("Job")}}),
        "Job": _object(
            {
                "job_id": _JOB_ID,
                "alive": {"type": "boolean"},
                "is_here": {"type": "boolean"},
                "is_served": {"type": "boolean", "description": "Whether this server has the job's routes."},
            },
            {"host": {"type": "string"}, "port": {"type": "integer"}, "pid": {"type": ["integer", "null"]}},
        ),
        "Status": _object({"job_id": {"type": "string"}, "timestamp": {"type": "number"}}),
        "Metrics": _object(
            {
                "job_id": {"type": "string"},
                "names": strings,
                "num_points": {"type": "integer"},
                "series": {"type": "object", "additionalProperties": series},
            }
        ),
        "Events": _object({"events": {"type": "array", "items": _reference("Event")}}),
        "Event": _object(
            {
                "id": {"type": "integer"},
                "kind": {"enum": list(KINDS)},
                "timestamp": {"type": "number"},
                "data": {"type": "object"},
            }
        ),
        "StreamedEvent": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
        },
        "Command": _object(
            {"command": {"type": "string", "examples": list(COMMANDS)}},
            {
                "data": {"type": ["object", "null"]},
                "wait": {"type": ["number", "null"], "minimum": 0, "maximum": MOST_WAIT_SECONDS},
            },
        )
        | {"additionalProperties": False},
        "Acknowledgement": _object(
            {
                "status": {"const": "acknowledged"},
                "command": {"type": "string"},
                "timestamp": {"type": "number"},
                "message": {"type": "string"},
                "id": {"type": "string"},
            },
            {"ticket": _reference("Ticket")},
        ),
        "Ticket": _object(
            {
                "id": {"type": "string"},
                "command": {"type": "string"},
                "data": {"type": "object"},
                "author": {"type": "string"},
                "received_at": {"type": "number"},
                "status": {"enum": ["queued", "applied", "refused"]},
                "step": {"type": ["integer", "null"]},
                "applied_at": _NUMBER_OR_NULL,
                "message": {"type": "string"},
            },
            {"result": {}},
        ),
        "Login": _object({"token": {"type": "string"}}),
        "Link": _object({"path": {"type": "string"}}),
        "Description": _object({"openapi": {"type": "string"}}),
    }


def _text(pattern: str) -> Json:
    return {"type": "string", "pattern": pattern}


def _object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _integer(least: int, most: int, default: int | None = None) -> Json:
    bounds: Json = {"type": "integer", "minimum": least, "maximum": most}
    return bounds if default is None else {**bounds, "default": default}


def _parameter(name: str, place: str, schema: Json, description: str) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema, "description": description}


def _reference(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}


def _json(schema: str, description: str = "Found") -> Json:
    content = {"application/json": {"schema": _reference(schema)}}
    return {"200": {"description": description, "content": content}}


def _content(description: str, *types: str) -> Json:
    return {"description": description, "content": {kind: {"schema": {}} for kind in types}}
