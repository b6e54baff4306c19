"""What each rank of `test_sequence_gather.py` runs: a value head on its part of a sequence, beside the whole one."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from onstep.training import LinearForLastLayer, create_value_head_hook


class Chunk(torch.nn.Module):
    """A tensor-parallel chunk that tells its group as Megatron's do."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        super().__init__()
        self.output_layer = torch.nn.Linear(4, 9)
        self.pg_collection = type("Groups", (), {"tp": group})()


def head_of(*, is_parallel: bool) -> LinearForLastLayer:
    torch.manual_seed(1)
    if not is_parallel:
        return LinearForLastLayer(4, 3, sequence_parallel=False)
    chunk = Chunk(distributed.group.WORLD)
    create_value_head_hook(4, True, 3)([chunk])
    head = chunk.output_layer
    assert isinstance(head, LinearForLastLayer)
    with torch.no_grad():
        head.weight.copy_(head_of(is_parallel=False).weight)
    return head


def job_head(settings: dict[str, Any]) -> None:
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3 * size, 2, 4, generator=generator, dtype=torch.float32).requires_grad_()
    importance = torch.randn(3 * size, 2, 3, generator=generator)
    part = whole.detach().chunk(size)[rank].clone().requires_grad_()
    single, head = head_of(is_parallel=False), head_of(is_parallel=True)

    expected = single(whole)[0]
    (expected.square() * importance).sum().backward()
    values = head(part)[0]
    (values.square() * importance).sum().backward()

    torch.testing.assert_close(values, expected)
    assert whole.grad is not None
    torch.testing.assert_close(part.grad, whole.grad.chunk(size)[rank])
    assert getattr(head.weight, "sequence_parallel", False)
    distributed.all_reduce(head.weight.grad)  # what the mark asks for
    torch.testing.assert_close(head.weight.grad, single.weight.grad)
    distributed.destroy_process_group()
