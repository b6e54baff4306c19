"""Defines the messages of workers and servers and makes their decisions, without sockets, clocks or threads.

`coordinator` is the server's side, `session` the worker's. Both are driven from outside, with the time as an argument:
by HTTP in `server/` and `worker/`, by a virtual network in `simulator/`.
"""
