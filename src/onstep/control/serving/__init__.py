"""Serves jobs over HTTP: `server` runs the thread, `app` has the routes, `guard` checks requests before them.

`routes`, `event_streams`, `pages`, `prometheus` and `openapi` are what it answers, `served_job` is what it asks,
`limits` bounds what may be asked. What it shares with other servers is in `onstep.http`.
"""

from onstep.errors import extra

with extra("control", "Serving jobs requires starlette and uvicorn"):
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
