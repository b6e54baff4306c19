"""The schedules as pure functions, against tables worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onstep.errors import ConfigError
from onstep.optim import LrSchedule, WdSchedule, learning_rate, weight_decay


def schedule(style: str, **changes: float | str | None) -> LrSchedule:
    """Warm-up over 10 samples from 0 to 1, decay to 0.1 at 110."""
    values: dict[str, object] = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 110,
        "lr_decay_style": style,
    }
    return LrSchedule(**(values | changes))  # type: ignore[arg-type]


TABLES = {
    "constant": {0: 0.0, 5: 0.5, 10: 1.0, 11: 1.0, 110: 1.0, 500: 1.0},
    "linear": {0: 0.0, 5: 0.5, 10: 1.0, 35: 0.775, 60: 0.55, 110: 0.1, 111: 0.1, 500: 0.1},
    "cosine": {10: 1.0, 35: 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 60: 0.55, 110: 0.1, 500: 0.1},
    "inverse-square-root": {5: 0.5, 10: 1.0, 40: 0.5, 90: 1 / 3, 111: 0.1},
}


@pytest.mark.parametrize(("style", "num_steps"), [(style, n) for style, table in TABLES.items() for n in table])
def test_learning_rate_follows_the_table(style: str, num_steps: int) -> None:
    assert learning_rate(num_steps, schedule(style)) == pytest.approx(TABLES[style][num_steps], rel=1e-14, abs=1e-15)


WSD_TABLES = {
    "linear": {90: 1.0, 95: 0.775, 100: 0.55, 110: 0.1},
    "cosine": {90: 1.0, 95: 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 100: 0.55, 110: 0.1},
    "exponential": {90: 1.0, 95: 0.1 + 0.9 * (2 * 0.5**0.25 - 1), 100: 0.1 + 0.9 * (math.sqrt(2) - 1), 110: 0.1},
    "minus_sqrt": {90: 1.0, 95: 0.55, 110: 0.1},
}


@pytest.mark.parametrize(("style", "num_steps"), [(style, n) for style, table in WSD_TABLES.items() for n in table])
def test_wsd_is_stable_and_then_decays(style: str, num_steps: int) -> None:
    wsd = schedule("WSD", wsd_decay_steps=20, lr_wsd_decay_style=style)
    assert learning_rate(50, wsd) == 1.0
    assert learning_rate(111, wsd) == 0.1
    assert learning_rate(num_steps, wsd) == pytest.approx(WSD_TABLES[style][num_steps], rel=1e-14)


def curve(style: str, warmup: int, wsd: int = 0) -> np.ndarray[Any, Any]:
    """Rates after 0 to 130 samples in 80-bit floats: from 0.05 to 1 over the warm-up, 0.1 from sample 110 on."""
    samples = np.arange(131, dtype=np.longdouble)
    share = (samples - warmup) / (110 - warmup)
    rest = np.clip((samples - (110 - wsd)) / np.longdouble(wsd or 1), 0, 1)
    pi = np.arccos(np.longdouble(-1))
    shapes = {
        "constant": np.ones_like(samples),
        "linear": 1 - share,
        "cosine": np.cos(pi / 2 * share) ** 2,
        "inverse-square-root": (np.sqrt(max(warmup, 1) / np.maximum(samples, 1)) - 0.1) / np.longdouble("0.9"),
        "WSD-linear": 1 - rest,
        "WSD-cosine": np.cos(pi / 2 * rest) ** 2,
        "WSD-exponential": np.exp2(1 - rest) - 1,
        "WSD-minus_sqrt": 1 - np.sqrt(rest),
    }
    least, start = np.longdouble("0.1"), np.longdouble("0.05")
    rates = np.maximum(least + (1 - least) * shapes[style], least)
    rates[111:] = 1 if style == "constant" else least
    if warmup:
        rates[: warmup + 1] = start + (1 - start) * samples[: warmup + 1] / warmup
    return rates


STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WSD_STYLES = ("WSD-linear", "WSD-cosine", "WSD-exponential", "WSD-minus_sqrt")


@pytest.mark.parametrize(
    ("style", "warmup", "wsd"),
    [
        *((style, warmup, 0) for style in STYLES for warmup in (0, 1, 10, 109)),
        *((style, *lengths) for style in WSD_STYLES for lengths in ((0, 110), (10, 1), (10, 20), (10, 100))),
    ],
)
def test_every_sample_of_a_schedule_is_that_of_the_description(style: str, warmup: int, wsd: int) -> None:
    name, _, decay = style.partition("WSD-")
    own = {"wsd_decay_steps": wsd, "lr_wsd_decay_style": decay} if decay else {}
    shape = schedule(name or "WSD", init_lr=0.05, lr_warmup_steps=warmup, **own)
    ours = [learning_rate(n, shape) for n in range(131)]
    np.testing.assert_allclose(np.array(ours, dtype=np.longdouble), curve(style, warmup, wsd), rtol=1e-14, atol=1e-15)


WD_TABLES = {
    "linear": {0: 0.1, 25: 0.15, 50: 0.2, 100: 0.3, 101: 0.3},
    "cosine": {0: 0.1, 25: 0.1 + 0.2 * 0.5 * (1 - math.sqrt(0.5)), 50: 0.2, 100: 0.3, 101: 0.3},
}


@pytest.mark.parametrize(("style", "num_steps"), [(style, n) for style, table in WD_TABLES.items() for n in table])
def test_weight_decay_follows_the_table(style: str, num_steps: int) -> None:
    assert weight_decay(num_steps, WdSchedule(0.1, 0.3, 100, style)) == pytest.approx(WD_TABLES[style][num_steps])


def test_constant_weight_decay_stays() -> None:
    assert {weight_decay(n, WdSchedule(0.1, 0.1, 0, "constant")) for n in (0, 50, 500)} == {0.1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_decay_style": "cosin"}, "Did you mean 'cosine'"),
        ({"min_lr": -0.1}, "min_lr must be >= 0, got -0.1"),
        ({"min_lr": 2.0}, "max_lr must be >= min_lr"),
        ({"init_lr": 2.0}, "init_lr must be <= max_lr"),
        ({"lr_decay_steps": 0}, "lr_decay_steps must be > 0"),
        ({"lr_warmup_steps": 110}, "lr_warmup_steps must be >= 0 and < lr_decay_steps"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps must be >= 0"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}, "wsd_decay_steps must be > 0"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "wsd_decay_steps": 101}, "at most the 100 samples"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 10}, "lr_wsd_decay_style must be one of"),
    ],
)
def test_impossible_learning_rate_schedule_is_refused(changes: dict[str, float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule("linear", **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.1, 0.2, 100, "constant"), "constant weight decay must end where it starts"),
        ((0.2, 0.1, 100, "linear"), "not shrink"),
        ((-0.1, 0.1, 100, "linear"), "must start at >= 0"),
        ((0.1, 0.2, 0, "linear"), "wd_incr_steps must be > 0"),
        ((0.1, 0.2, 100, "linaer"), "Did you mean 'linear'"),
    ],
)
def test_impossible_weight_decay_schedule_is_refused(values: tuple[float, float, int, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WdSchedule(*values)
