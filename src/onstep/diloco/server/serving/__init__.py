"""Serves a run over HTTP: `app` has the routes of workers, `control` those of operators.

`guard` checks requests before they are read, `receiving` brings bodies into memory, `sending` the way back, `limits`
makes room for the connections of all workers. The server itself is in `onstep.http`.
"""
