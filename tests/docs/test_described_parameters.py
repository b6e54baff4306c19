"""The reference describes the parameters of the public functions, classes and methods."""

from __future__ import annotations

import pytest

from tests.docs.described_parameters import Parameter, parameters

FLOOR = 0.94
"""The least share of described parameters. It may only rise; raise it when the share is far above it."""


@pytest.fixture(scope="module")
def every() -> list[Parameter]:
    """All parameters of public names."""
    return parameters()


def test_every_parameter_of_the_trainer_is_described(every: list[Parameter]) -> None:
    own = [one for one in every if one.of.startswith("onstep.trainer.Trainer")]
    assert len(own) > 20
    assert not [str(one) for one in own if not one.is_described]


def test_the_share_of_described_parameters_only_rises(every: list[Parameter]) -> None:
    missing = [str(one) for one in every if not one.is_described]
    share = 1 - len(missing) / len(every)
    text = f"{share:.1%} of {len(every)} parameters are described"
    assert share >= FLOOR, f"{text}; python -m tests.docs.described_parameters lists the others"
    assert share < FLOOR + 0.03, f"{text}; raise FLOOR"
