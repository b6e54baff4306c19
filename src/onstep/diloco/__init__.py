"""Trains one model at several sites over ordinary networks (DiLoCo): workers train, a server averages now and then.

`protocol/` is what both sides say to each other and decide, without sockets, clocks or threads of its own; `outer` and
`fragments` are the algorithm; `codec/` compresses what is sent; `server/` and `client/` speak HTTP; `worker/` is
between the protocol and a model; `simulator/` drives the protocol with a virtual clock and network.
"""
