"""The layers of the transformer.

`layer` (norms, attention), `feed_forward` (dense and experts), `router`, `rotary`, `sequence_context` (masks,
positions, key-value cache), `routing_record` (what routers count).
"""
