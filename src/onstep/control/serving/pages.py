"""Gives browsers what they need: the page and its files, all from installed packages, and a cookie."""

from __future__ import annotations

import asyncio
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from onstep.control.serving.guard import unauthenticated
from onstep.control.serving.limits import LOGIN_SECONDS, LOGINS_AT_ONCE
from onstep.http.access import Access
from onstep.http.messages import answer, json_object, refusal

PAGE = Path(__file__).parents[1] / "page"
_CHART = Path(__file__).parents[2] / "analysis" / "reports" / "page" / "chart.js"
"""Draws the charts, those of reports too."""
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".mjs": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


def page(name: str, instead: str, status: int = 200) -> Response:
    """A page of the package; a line of text where its file is missing."""
    content = _content(name)
    if content is None:
        return Response(instead, status, media_type="text/plain")
    return Response(content, status, {"Cache-Control": "no-cache"}, media_type="text/html")


async def static_file(request: Request) -> Response:
    """A file of the page; only names that are in the package's directory exist."""
    name = request.path_params["file"]
    content = _content(name)
    if content is None:
        return refusal(404, "There is no such file.")
    tag = f'"{_digest(name)}"'
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, media_type=_TYPES[Path(name).suffix])


def _files() -> dict[str, Path]:
    """The files that are served, by name."""
    own = [path for path in PAGE.iterdir() if path.suffix in _TYPES] if PAGE.is_dir() else []
    return {path.name: path for path in (*own, _CHART) if path.is_file()}


@cache
def _content(name: str) -> bytes | None:
    path = _files().get(name)
    return None if path is None else path.read_bytes()


@cache
def _digest(name: str) -> str:
    return sha256(_content(name) or b"").hexdigest()[:32]


class LoginRoutes:
    """The routes by which a browser gets and loses its cookie."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._turns = asyncio.Semaphore(LOGINS_AT_ONCE)

    async def login(self, request: Request) -> Response:
        """POST /login"""
        body = await json_object(request)
        token = body.get("token")
        if not isinstance(token, str):
            return refusal(400, "token must be a text.")
        async with self._turns:
            await asyncio.sleep(LOGIN_SECONDS)
        if not self._access.is_token(token.strip().encode()):
            return unauthenticated()
        return self._admitted(204)

    async def new_link(self, request: Request) -> Response:
        """POST /login-links"""
        return answer({"path": f"/login/{self._access.new_link()}"})

    async def use_link(self, request: Request) -> Response:
        """GET /login/{code}"""
        if self._access.use_link(request.path_params["code"]):
            return self._admitted(303, {"Location": "/"})
        return page("index.html", "This link has expired or has been used. Ask for another one.", 401)

    async def logout(self, request: Request) -> Response:
        """POST /logout"""
        self._access.close_session(request.headers.get("cookie", ""))
        response = Response(status_code=204)
        response.delete_cookie(self._access.cookie_name, path="/", httponly=True, samesite="strict")
        return response

    def _admitted(self, status: int, headers: dict[str, str] | None = None) -> Response:
        response = Response(status_code=status, headers=headers)
        session = self._access.open_session()
        response.set_cookie(self._access.cookie_name, session, path="/", httponly=True, samesite="strict")
        return response
