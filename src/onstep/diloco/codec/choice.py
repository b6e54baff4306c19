"""Chooses the codec of submissions for the bandwidth of a link."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch

from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.sizes import check_codec, encoded_bytes

AUTO = "auto"
CANDIDATES = ("fp32", "bf16", "int8", "int4")
"""From exact to coarse."""
MAX_SHARE = 0.05
"""Of a cycle, which an exact codec may cost."""
_SAMPLE_VALUES = 2**18


def cheapest_exact(
    specs: Sequence[ParameterSpec],
    bytes_per_second: float,
    cycle_seconds: float,
    seconds_per_value: Mapping[str, float],
) -> str:
    """The most exact codec with which encoding and sending last at most MAX_SHARE of a cycle; else the fastest.

    On a fast link an exact codec is also the fastest, because encoding lasts longer than sending.

    Args:
        seconds_per_value: of encoding, for each candidate.
    """
    count = sum(math.prod(spec.shape) for spec in specs)
    seconds = {
        codec: encoded_bytes(specs, codec) / bytes_per_second + count * seconds_per_value[codec] for codec in CANDIDATES
    }
    affordable = (codec for codec in CANDIDATES if seconds[codec] <= MAX_SHARE * cycle_seconds)
    return next(affordable, min(CANDIDATES, key=seconds.__getitem__))


class CodecChoice:
    """A codec, or `auto`, which chooses one for each submission from the measured bandwidth and encoding speed.

    Raises:
        ConfigError: for an unknown codec.
    """

    def __init__(self, codec: str) -> None:
        if codec != AUTO:
            check_codec(codec)
        self.codec = codec
        self._seconds_per_value: dict[str, float] = {}

    def choose(self, specs: Sequence[ParameterSpec], bytes_per_second: float, cycle_seconds: float) -> str:
        """The codec of the next submission; without a measured bandwidth, `auto` is `bf16`."""
        if self.codec != AUTO:
            return self.codec
        if bytes_per_second <= 0:
            return "bf16"
        if not self._seconds_per_value:
            self._seconds_per_value = measure_encoding()
        return cheapest_exact(specs, bytes_per_second, cycle_seconds, self._seconds_per_value)


def measure_encoding() -> dict[str, float]:
    """Seconds per value that encoding and the residual take on this machine, for each candidate."""
    sample = {"sample": torch.linspace(-1, 1, _SAMPLE_VALUES)}
    measured = {}
    for codec in CANDIDATES:
        ErrorFeedback().encode(sample, codec)
        start = time.perf_counter()
        ErrorFeedback().encode(sample, codec)
        measured[codec] = (time.perf_counter() - start) / _SAMPLE_VALUES
    return measured
