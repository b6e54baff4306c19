"""Makes tensors small enough for ordinary networks: `specs` describes parameters, `formats` encodes and decodes them,
`blocks` does so in 8 and 4 bits, `sizes` says how many bytes that gives, `body` makes one safetensors body of them,
`feedback` adds what a codec lost to the next submission. Importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.diloco.codec.body import body_bytes, read_body, write_body
    from onstep.diloco.codec.feedback import ErrorFeedback
    from onstep.diloco.codec.formats import check_encoded, check_values, decode, decode_one, encode, encoded_specs
    from onstep.diloco.codec.sizes import CODECS, check_codec, encoded_bytes
    from onstep.diloco.codec.specs import InvalidTensorsError, digest, master_dtype, specs_of

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

_NAMES_OF = {
    "body": ("body_bytes", "read_body", "write_body"),
    "feedback": ("ErrorFeedback",),
    "formats": ("check_encoded", "check_values", "decode", "decode_one", "encode", "encoded_specs"),
    "sizes": ("CODECS", "check_codec", "encoded_bytes"),
    "specs": ("InvalidTensorsError", "digest", "master_dtype", "specs_of"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES_OF.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
