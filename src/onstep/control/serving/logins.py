"""Admits browsers: by the token, or by a link that works once."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from onstep.control.serving.access import Access
from onstep.control.serving.guard import unauthenticated
from onstep.control.serving.limits import LOGIN_SECONDS, LOGINS_AT_ONCE
from onstep.control.serving.messages import answer, json_object, refusal
from onstep.control.serving.static_files import page


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
        return page("login.html", "This link has expired or has been used. Ask for another one.", 401)

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
