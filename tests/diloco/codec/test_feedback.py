"""What a codec loses of one submission is in the next."""

from __future__ import annotations

import pytest
import torch

from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.codec.formats import decode
from onstep.diloco.codec.specs import InvalidTensorsError, specs_of
from onstep.diloco.sizes import CODECS


@pytest.mark.parametrize("codec", CODECS)
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent_but_for_one_residual(codec: str) -> None:
    generator = torch.Generator().manual_seed(2)
    feedback, sent, arrived = ErrorFeedback(), torch.zeros(500).double(), torch.zeros(500).double()
    for _ in range(50):
        delta = torch.randn(500, generator=generator) * 1e-3
        decoded = decode(feedback.encode({"w": delta}, codec), specs_of({"w": delta}), codec)["w"]
        sent, arrived = sent + delta, arrived + decoded
    rest = feedback.residuals.get("w", torch.zeros(500))
    torch.testing.assert_close(arrived + rest, sent, rtol=0, atol=1e-7)
    assert rest.abs().max() < 2e-3
    assert (feedback.relative_error == 0) is (codec == "fp32")


def test_residuals_survive_a_checkpoint_of_the_same_model_only() -> None:
    one, other = ErrorFeedback(), ErrorFeedback()
    one.encode({"w": torch.linspace(0, 1, 99)}, "int4")
    other.load_state_dict(one.state_dict(), {"w": (99,)})
    delta = {"w": torch.linspace(1, 0, 99)}
    assert torch.equal(one.encode(delta, "int4")["w"], other.encode(delta, "int4")["w"])
    with pytest.raises(InvalidTensorsError, match="no such parameter"):
        other.load_state_dict(one.state_dict(), {"v": (99,)})


def test_a_difference_that_is_not_finite_leaves_the_residuals_as_they_were() -> None:
    feedback = ErrorFeedback()
    feedback.encode({"w": torch.linspace(0, 1, 9)}, "int4")
    before = feedback.residuals["w"].clone()
    with pytest.raises(InvalidTensorsError):
        feedback.encode({"w": torch.full((9,), torch.nan)}, "int4")
    assert torch.equal(feedback.residuals["w"], before)


def test_an_encoding_that_nobody_counted_is_undone() -> None:
    feedback, twin = ErrorFeedback(), ErrorFeedback()
    first, second = {"w": torch.linspace(0, 1, 99)}, {"w": torch.linspace(1, 3, 99)}
    for one in (feedback, twin):
        one.encode(first, "int4")
    feedback.encode(second, "int4")
    feedback.undo(["w"])
    assert torch.equal(feedback.residuals["w"], twin.residuals["w"])
    assert torch.equal(feedback.encode(second, "int4")["w"], twin.encode(second, "int4")["w"])
