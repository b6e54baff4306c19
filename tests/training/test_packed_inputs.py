"""What the model gets of packed sequences: on a GPU the boundaries of their documents, read on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.data import StepBatches
from onstep.models import build_transformer
from onstep.training import forward_step, packed_inputs
from onstep.training.compute.step import MicroBatches

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 3], [0] * 12])


def micro_batches(device: str, **entries: Tensor) -> MicroBatches:
    batch = {"tokens": torch.zeros_like(IDS), "labels": torch.zeros_like(IDS), **entries}
    return MicroBatches(StepBatches([batch], None, 2, [False]), torch.device(device))


def model() -> nn.Module:
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 7}
    return build_transformer(ModelConfig(**sizes, seq_length=12), seed=0)


def test_a_gpu_gets_the_boundaries_that_the_host_knows() -> None:
    batches = micro_batches("meta", document_ids=IDS, position_ids=IDS)
    received: dict[str, Any] = {}
    meta = model().to("meta")
    meta.register_forward_pre_hook(lambda module, args, kwargs: received.update(kwargs), with_kwargs=True)

    loss, _ = forward_step(batches, meta)
    loss.backward()

    assert received.keys() == {"reduction", "document_ids", "position_ids", "cu_seqlens", "max_seqlen"}
    assert received["cu_seqlens"].device.type == "meta"
    assert received["cu_seqlens"].dtype == torch.int32
    assert (received["cu_seqlens"].shape, received["max_seqlen"]) == ((16,), 12)


def test_the_boundaries_are_those_of_the_documents() -> None:
    from onstep.training.compute.packed_inputs import boundaries

    bounds, longest = boundaries(IDS)
    assert bounds.tolist() == [0, 3, 5, 11, 12] + [24] * 11
    assert longest == 12
    assert boundaries(IDS[:1])[1] == 8
    many, longest = boundaries(torch.arange(40).view(1, 40))
    assert many.tolist() == [*range(40)] + [40] * 8
    assert longest == 1


def test_a_cpu_and_a_model_of_ones_own_get_the_documents_alone() -> None:
    for device, module in (("cpu", model()), ("meta", nn.Linear(2, 2))):
        batches = micro_batches(device, document_ids=IDS, position_ids=IDS)
        batch = next(batches)
        assert packed_inputs(batch, batches, module) == {key: batch[key] for key in ("position_ids", "document_ids")}
    assert packed_inputs(batch, iter([]), model()).keys() == {"position_ids", "document_ids"}


def test_other_sequences_add_nothing_but_their_positions() -> None:
    assert packed_inputs({"tokens": IDS}, micro_batches("meta"), model()) == {}
    assert packed_inputs({"position_ids": IDS}, micro_batches("meta"), model()) == {"position_ids": IDS}
