"""Serves a run over HTTP: `thread` listens and answers, `app` has the routes of workers, `control` those of operators.

`connections` and `receiving` bring bodies from the socket into memory, `sending` the way back, `guard` checks requests
before either.
"""
