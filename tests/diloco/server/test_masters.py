"""Parameters of many pieces are averaged, stepped and encoded as one."""

from __future__ import annotations

import pytest
import torch

from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment

SHAPE = (700, 1001)
"""Of two pieces and a part of one, whose last block is not complete."""


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
    step = 0.7 * 1.9 * (first / 4 + second * 3 / 4)
    assert float((update + step).norm() / step.norm()) < {"bf16": 0.005, "int8": 0.02, "int4": 0.3}[codec]
