"""`auto` sends exactly over a fast link and coarsely over a slow one."""

from __future__ import annotations

import pytest

from onstep.diloco.codec.choice import CANDIDATES, CodecChoice, cheapest_exact, measure_encoding
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import ConfigError

MODEL = [ParameterSpec("w", (1000, 1000), "F32")]
FREE = dict.fromkeys(CANDIDATES, 0.0)
SLOW = {"fp32": 0.0, "bf16": 1e-6, "int8": 1e-5, "int4": 1e-5}


@pytest.mark.parametrize(
    ("megabytes_per_second", "expected"), [(10.0, "fp32"), (3.0, "bf16"), (1.5, "int8"), (0.6, "int4"), (0.01, "int4")]
)
def test_the_most_exact_codec_is_chosen_that_costs_at_most_a_twentieth_of_a_cycle(
    megabytes_per_second: float, expected: str
) -> None:
    assert cheapest_exact(MODEL, megabytes_per_second * 1e6, 20.0, FREE) == expected


def test_on_a_fast_link_encoding_would_cost_more_than_it_saves() -> None:
    assert cheapest_exact(MODEL, 1e9, 0.0, SLOW) == "fp32"
    assert cheapest_exact(MODEL, 1e4, 0.0, SLOW) == "int4"


def test_until_a_bandwidth_is_known_it_is_bf16_and_what_was_chosen_by_name_stays() -> None:
    assert CodecChoice("auto").choose(MODEL, 0.0, 10.0) == "bf16"
    assert CodecChoice("auto").choose(MODEL, 1e3, 10.0) == "int4"
    assert CodecChoice("auto").choose(MODEL, 1e12, 1e6) == "fp32"
    assert CodecChoice("fp16").choose(MODEL, 1e3, 10.0) == "fp16"
    with pytest.raises(ConfigError, match="codec must be one of"):
        CodecChoice("int3")


def test_what_encoding_costs_is_measured() -> None:
    measured = measure_encoding()
    assert tuple(measured) == CANDIDATES
    assert all(seconds > 0 for seconds in measured.values())
