"""What a metric's value looks like on the console."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onstep.console.formats import format_gib, format_si, formatter


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1_000, "1K"),
        (1_234, "1.23K"),
        (12_345, "12.3K"),
        (123_456, "123K"),
        (999_499, "999K"),
        (999_500, "1M"),
        (999_999, "1M"),
        (1_500_000, "1.5M"),
        (999_999_999, "1G"),
        (4_020_000_000, "4.02G"),
        (15_000_000_000_000, "15T"),
        (999.7, "1K"),
        (-12_345, "-12.3K"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_si_has_three_digits_and_never_an_exponent(value: float, text: str) -> None:
    assert format_si(value) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0.000 GiB"), (2**30, "1.000 GiB"), (5_583_457_485, "5.200 GiB")])
def test_gib(num_bytes: int, text: str) -> None:
    assert format_gib(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "fmt", "text"),
    [
        (1234.5678, "", "1235"),
        (0.00012345, "", "0.0001234"),
        (1234567, "", "1,234,567"),
        (True, "", "True"),
        ("linear", "", "linear"),
        ("linear", ".5f", "linear"),
        (None, ",d", "None"),
        (None, ".2f", "None"),
        (1234.9, ",d", "1,234"),
        (math.nan, ",d", "nan"),
        (math.inf, ",d", "inf"),
        (math.nan, ".3f", "nan"),
        (255, "x", "ff"),
        (0.4123, ".1%", "41.2%"),
        (3e-4, ".2e", "3.00e-04"),
        (np.float32(0.5), ".2f", "0.50"),
        (1500, "si", "1.5K"),
        (2**30, "gib", "1.000 GiB"),
        (3, lambda value: f"<{value}>", "<3>"),
        ({"a": 1}, ".2f", "{'a': 1}"),
    ],
)
def test_scalar_formats(value: Any, fmt: Any, text: str) -> None:
    assert formatter(fmt)(value) == text


@pytest.mark.parametrize(
    ("reduce", "text"),
    [
        (None, "3.0"),
        ("max", "3.0"),
        ("min", "1.0"),
        ("mean", "2.0"),
        ("sum", "6.0"),
        ("all", "1.0/2.0/3.0"),
        (len, "3.0"),
    ],
)
def test_lists_are_reduced(reduce: Any, text: str) -> None:
    assert formatter(".1f", reduce)([1, 2, 3]) == text


@pytest.mark.parametrize("reduce", [None, "max", "min", "mean", "sum"])
def test_empty_list_shows_zero(reduce: str | None) -> None:
    assert formatter("gib", reduce)([]) == "0.000 GiB"


def test_callable_reduce_also_gets_scalars_but_a_named_one_does_not() -> None:
    assert formatter(",d", lambda value: value * 2)(4) == "8"
    assert formatter(",d", "mean")(4) == "4"


def test_unknown_reduce_and_format_name_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"max, min, sum, mean, all.*'median'"):
        formatter("", "median")
    with pytest.raises(ValueError, match=r"'si', 'gib'.*'5q'"):
        formatter("5q")
    for fmt in ("", "si", "gib", ",d", ".5f", ",.0f", "b", str):
        formatter(fmt)
