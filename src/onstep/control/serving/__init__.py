"""Serves jobs over HTTP: `server`, `accepting`, `connections` (the thread), `app`, `guard`, `access` (who may do what).

`routes`, `event_streams`, `pages`, `prometheus` and `openapi` are what it answers, `served_job` is what it asks,
`messages` reads requests and makes answers, `limits` bounds what clients cost the training.
"""

from onstep.errors import MissingExtraError

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError("Serving jobs requires starlette and uvicorn: pip install 'onstep[control]'") from error
