"""What workers and servers say to each other (`messages`) and decide, without sockets, clocks or threads of its own.

`coordinator` is the server's side, `session` the worker's. Both are driven from outside, with the time as an argument:
by HTTP in `server/` and `worker/`, by a virtual network in `simulator/`.
"""
