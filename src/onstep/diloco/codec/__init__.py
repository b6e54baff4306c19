"""Makes tensors small enough for ordinary networks: `specs` describes parameters, `formats` encodes and decodes them,
`blocks` does so in 8 and 4 bits, `body` writes and reads one safetensors body, and `feedback` adds what a codec lost to
the next submission.
"""
