"""Makes tensors small enough for ordinary networks: `specs` describes parameters, `formats` encodes and decodes them,
`blocks` does so in 8 and 4 bits, `body` makes one safetensors body of them, `feedback` adds what a codec lost to the
next submission.
"""

from onstep.diloco.codec.body import body_bytes, read_body, write_body
from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.codec.formats import CODECS, check_codec, decode, encode, encoded_bytes, encoded_specs
from onstep.diloco.codec.specs import InvalidTensorsError, digest, master_dtype, specs_of

__all__ = [
    "CODECS",
    "ErrorFeedback",
    "InvalidTensorsError",
    "body_bytes",
    "check_codec",
    "decode",
    "digest",
    "encode",
    "encoded_bytes",
    "encoded_specs",
    "master_dtype",
    "read_body",
    "specs_of",
    "write_body",
]
