"""What a codec loses of one submission is in the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.feedback import Encoder, ErrorFeedback
from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import InvalidTensorsError, specs_of
from onstep.diloco.sizes import CODECS


def submit(feedback: ErrorFeedback, delta: Tensor, codec: str) -> tuple[bytes, Tensor]:
    """The body that a worker sends, and what it means."""
    wanted, specs = feedback.corrected("w", delta), specs_of({"w": delta})
    encoder = Encoder(specs, codec)
    lost = encoder.add("w", wanted)
    feedback.replace(["w"], {} if lost is None else {"w": lost})
    assert (encoder.relative_error == 0) is (codec == "fp32")
    encoded = encode({"w": wanted}, codec)
    assert bytes(encoder.finish()) == write_body(encoded)
    return bytes(encoder.finish()), decode(encoded, specs, codec)["w"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent_but_for_one_residual(codec: str) -> None:
    generator = torch.Generator().manual_seed(2)
    feedback, sent, arrived = ErrorFeedback(), torch.zeros(500).double(), torch.zeros(500).double()
    for _ in range(50):
        delta = torch.randn(500, generator=generator) * 1e-3
        sent, arrived = sent + delta, arrived + submit(feedback, delta, codec)[1]
    rest = feedback.residuals.get("w", torch.zeros(500))
    torch.testing.assert_close(arrived + rest, sent, rtol=0, atol=1e-7)
    assert rest.abs().max() < 2e-3


def test_a_difference_that_is_not_finite_leaves_the_residuals_as_they_were() -> None:
    feedback = ErrorFeedback()
    submit(feedback, torch.linspace(0, 1, 9), "int4")
    before = feedback.residuals["w"].clone()
    with pytest.raises(InvalidTensorsError):
        submit(feedback, torch.full((9,), torch.nan), "int4")
    assert torch.equal(feedback.residuals["w"], before)


def test_an_encoding_that_nobody_counted_is_undone() -> None:
    feedback, twin = ErrorFeedback(), ErrorFeedback()
    first, second = torch.linspace(0, 1, 99), torch.linspace(1, 3, 99)
    for one in (feedback, twin):
        submit(one, first, "int4")
    submit(feedback, second, "int4")
    feedback.undo(["w"])
    assert torch.equal(feedback.residuals["w"], twin.residuals["w"])
    assert submit(feedback, second, "int4")[0] == submit(twin, second, "int4")[0]
