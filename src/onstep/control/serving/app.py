"""Builds the application that serves jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onstep.control.serving.guard import Guard
from onstep.control.serving.openapi import describe_api
from onstep.control.serving.pages import LoginRoutes, page, static_file
from onstep.control.serving.routes import JobRoutes
from onstep.control.serving.served_job import ServedJob
from onstep.http.access import Access
from onstep.http.messages import ERROR_HANDLERS, answer


def build_app(
    jobs: Callable[[], Mapping[str, ServedJob]],
    *,
    access: Access,
    listed: Callable[[], list[dict[str, Any]]],
    title: str,
    is_dashboard: bool = False,
) -> Starlette:
    """The application of a server.

    Args:
        jobs: gives the jobs that are served, by id; asked at every request.
        access: who may use it.
        listed: gives what `GET /jobs` lists.
        title: names the server in its description.
        is_dashboard: whether it shows jobs of other processes.
    """
    about, login = JobRoutes(jobs, listed), LoginRoutes(access)
    description = describe_api(title, is_dashboard=is_dashboard, is_open=access.is_open, cookie_name=access.cookie_name)

    async def index(request: Request) -> Response:
        return page("index.html", f"{title}: the page is not installed; use `onstep control`, or the HTTP interface.")

    async def openapi(request: Request) -> Response:
        return answer(description)

    routes = [
        Route("/", index),
        Route("/static/{file}", static_file),
        Route("/openapi.json", openapi),
        Route("/login", login.login, methods=["POST"]),
        Route("/login/{code}", login.use_link),
        Route("/login-links", login.new_link, methods=["POST"]),
        Route("/logout", login.logout, methods=["POST"]),
        Route("/metrics", about.prometheus),
        Route("/jobs", about.listing),
        Route("/jobs/{job_id}/control", about.control, methods=["POST"]),
        Route("/jobs/{job_id}/commands/{id}", about.command),
        Route("/jobs/{job_id}/status", about.status),
        Route("/jobs/{job_id}/events", about.events),
        Route("/jobs/{job_id}/metrics", about.metrics),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, access=access)],
        exception_handlers=ERROR_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app
