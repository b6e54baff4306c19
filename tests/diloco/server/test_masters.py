"""Parameters of many pieces are averaged, stepped and encoded as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment, NotFiniteError

SHAPE = (700, 1001)
"""Of two pieces and a part of one, whose last block is not complete."""
OPTIMIZERS = {
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "plain": {"lr": 0.7},
    "damped": {"lr": 0.1, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.01, "maximize": True},
}


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_an_update_of_many_pieces_leads_to_what_the_outer_step_of_the_average_makes(codec: str) -> None:
    torch.manual_seed(0)
    parameters = {"weight": torch.randn(SHAPE)}
    specs = specs_of(parameters)
    sent = [encode({"weight": torch.randn(SHAPE)}, codec) for _ in range(2)]
    fragment = Fragment(specs, parameters, nesterov_sgd, codec)
    version = fragment.step([Contribution(one, codec, weight) for one, weight in zip(sent, (1.0, 3.0), strict=True)])
    assert version.update is not None
    update = decode(version.update, specs, codec)["weight"]
    assert torch.equal(version.parameters["weight"], update + parameters["weight"])
    first, second = (decode(one, specs, codec)["weight"] for one in sent)
    step = 0.7 * 1.6 * (first / 4 + second * 3 / 4)
    assert float((update + step).norm() / step.norm()) < {"bf16": 0.005, "int8": 0.02, "int4": 0.3}[codec]


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_by_pieces_are_those_of_torchs_sgd_to_the_bit(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameters = {"bias": torch.randn(7), "double": torch.randn(3, dtype=torch.float64), "weight": torch.randn(SHAPE)}
    fragment = Fragment(specs_of(parameters), parameters, lambda masters: SGD(masters, **options), "fp32")
    ours = {name: tensor.clone() for name, tensor in parameters.items()}
    optimizer = SGD(ours.values(), **options)
    for _ in range(3):
        sent = [{name: torch.randn_like(one) for name, one in parameters.items()} for _ in range(2)]
        fragment.newest = fragment.step([Contribution(one, "fp32", 1.0) for one in sent])
        for name, tensor in ours.items():
            tensor.grad = (sent[0][name] * 0.5).add_(sent[1][name], alpha=0.5)
        optimizer.step()
        assert all(torch.equal(fragment.newest.parameters[name], tensor) for name, tensor in ours.items())
    theirs = fragment.optimizer.state_dict()["state"]
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert value is None or torch.equal(theirs[number][key], value)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_step_that_is_not_finite_is_refused_with_its_parameter(codec: str) -> None:
    parameters = {"bias": torch.zeros(3), "weight": torch.zeros(5)}
    fragment = Fragment(specs_of(parameters), parameters, nesterov_sgd, codec)
    contribution = Contribution({"bias": torch.zeros(3), "weight": torch.full((5,), 1e38)}, "fp32", 1.0, scale=1e3)
    with pytest.raises(NotFiniteError, match="made weight NaN or infinite"):
        fragment.step([contribution])
