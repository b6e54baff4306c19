"""Computes how many bytes tensors occupy in each codec; does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import require

CODECS = ("fp32", "bf16", "int8", "int4")
"""Formats in which tensors can be sent. `fp32` is exact: parameters in float64 stay in float64."""
BLOCKS = {"int8": 128, "int4": 64}
"""Elements per scale of the block formats."""
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
_SCALE_BYTES = 4


def check_codec(codec: str) -> None:
    """Raise ConfigError unless the codec is one of CODECS."""
    require(codec in CODECS, "codec", f"one of {', '.join(CODECS)}", codec)


def encoded_bytes(specs: Sequence[ParameterSpec], codec: str) -> int:
    """Bytes of the tensors that `encode` gives for parameters; a body's header comes on top."""
    check_codec(codec)
    return sum(_bytes(math.prod(spec.shape), spec.dtype, codec) for spec in specs)


def _bytes(count: int, dtype: str, codec: str) -> int:
    bits = 64 if (codec, dtype) == ("fp32", "F64") else _BITS[codec]
    scales = -(-count // BLOCKS[codec]) if codec in BLOCKS else 0
    return -(-count * bits // 8) + scales * _SCALE_BYTES


MASTER_BYTES = 4
"""Of a parameter in float32; so have the masters, the momentum, and what the workers have."""


def server_memory(count: int, codec: str) -> int:
    """Bytes of memory that a server of so many parameters needs beyond Python itself, with SGD and momentum.

    Masters and momentum, and the update of a codec that is not exact. Submissions and versions are mapped from files.
    """
    update = 0 if codec == "fp32" else _bytes(count, "F32", codec)
    return 2 * MASTER_BYTES * count + update


def server_disk(count: int, codec: str, num_workers: int, num_kept: int = 3, num_checkpoints: int = 3) -> int:
    """Bytes of disk that it needs: saved versions and checkpoints, one more of each while it is written, and what is
    mapped into memory: a submission of each worker, and two versions.
    """
    saved = (2 if codec == "fp32" else 3) * MASTER_BYTES * count
    mapped = num_workers * _bytes(count, "F32", codec) + 2 * MASTER_BYTES * count
    return (num_kept + 2) * saved + (num_checkpoints + 1) * MASTER_BYTES * count + mapped
