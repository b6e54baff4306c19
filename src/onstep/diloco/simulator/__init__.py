"""Runs the protocol on a virtual clock and network, to compare settings for the sites that a run would have.

`scenario` is what is simulated and `reading` reads it from YAML; `environment/` has time, lines and failures; `server`
and `worker` drive the protocol's coordinator and sessions; `simulation` puts them together; `measures` counts what
happens, `report` sums it up, `comparison` and `figures` show several simulations.
"""
