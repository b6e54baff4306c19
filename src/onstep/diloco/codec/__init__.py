"""Makes tensors small enough for ordinary networks: `specs` describes parameters, `formats` encodes and decodes them,
`blocks` does so in 8 and 4 bits, `body` writes and reads one safetensors body, `feedback` adds what a codec lost to the
next submission, and `choice` chooses a codec for a bandwidth.
"""

from onstep.diloco.codec.body import body_bytes, read_body, write_body
from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.codec.formats import check_encoded, check_values, decode, decode_one, encode, encoded_specs
from onstep.diloco.codec.specs import InvalidTensorsError, digest, master_dtype, specs_of
from onstep.diloco.sizes import CODECS, check_codec, encoded_bytes

__all__ = [
    "CODECS",
    "ErrorFeedback",
    "InvalidTensorsError",
    "body_bytes",
    "check_codec",
    "check_encoded",
    "check_values",
    "decode",
    "decode_one",
    "digest",
    "encode",
    "encoded_bytes",
    "encoded_specs",
    "master_dtype",
    "read_body",
    "specs_of",
    "write_body",
]
