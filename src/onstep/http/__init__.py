"""Serves HTTP from a thread beside a training, with bounds on what clients may cost; used by `control` and `diloco`.

`binding` binds ports, `listener` counts clients and cuts off slow ones, `server` runs uvicorn, `watch` tells the
listener what clients wait for, `access` decides who may use a server, `messages` reads and writes JSON.
"""
