"""Weights that are computed when they are written: the values, one at a time, in the bytes that safetensors writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onstep.models.deferred import DeferredTensor, applied, deferred, value_of
from onstep.models.hf.weight_files import INDEX_FILE, WEIGHTS_FILE, write_weights

A, B = torch.randn(6, 4), torch.randn(6, 4)


def later(tensor: Tensor) -> Tensor:
    return deferred(tensor.shape, tensor.dtype, tensor.clone)


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: torch.cat([a, b]).chunk(2)[1],
        lambda a, b: torch.stack([a, b]).transpose(1, 2).contiguous(),
        lambda a, b: a + 0.5 * (b.float() @ a.float().t() @ b).to(a.dtype),
        lambda a, b: a.reshape(2, 3, -1).transpose(1, 2).reshape(a.shape).cpu().to(torch.bfloat16),
        lambda a, b: applied(lambda one: one.view(torch.uint8), b, (6, 16), torch.uint8),
    ],
)
def test_what_follows_from_deferred_tensors_is_deferred(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    found, expected = compute(later(A), later(B)), compute(A, B)
    assert isinstance(found, DeferredTensor)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(value_of(found), expected)


def test_a_module_may_hold_them_but_nothing_changes_them() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 6, bias=False)
    layer.load_state_dict({"weight": later(A)}, assign=True)
    assert torch.equal(value_of(layer.state_dict()["weight"]), A)
    with pytest.raises(TypeError, match="values are not here yet"):
        layer.weight.data.mul_(2)


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        f"{kind}": torch.ones(3, 5).to(kind) for kind in (torch.float16, torch.bfloat16, torch.int64, torch.bool)
    }
    tensors |= {"ä": A, "transposed": B.t(), "number": torch.tensor(3.0), "empty": torch.empty(0, 2), "u": A.byte()}
    write_weights({name: later(one) for name, one in tensors.items()}, tmp_path, 10**9)
    plain = {name: one.contiguous() for name, one in tensors.items()}
    save_file(plain, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / WEIGHTS_FILE).read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_one_tensor_is_in_memory_at_a_time_also_over_several_files(tmp_path: Path) -> None:
    made: list[weakref.ref[Any]] = []
    most = 0

    def read(number: int) -> Tensor:
        nonlocal most
        most = max(most, sum(one() is not None for one in made))
        array = np.full(8, number, np.float32)
        made.append(weakref.ref(array))
        return torch.from_numpy(array)

    tensors = {f"w{i}": deferred((8,), torch.float32, lambda i=i: read(i)) for i in range(9)}  # type: ignore[misc]
    write_weights(tensors, tmp_path, 100)
    assert most <= 1, most  # the one before, when the next is read
    files = sorted(tmp_path.glob("model-*-of-00003.safetensors"))
    assert {name: one[0].item() for file in files for name, one in load_file(file).items()} == {
        f"w{i}": i for i in range(9)
    }
    assert (tmp_path / INDEX_FILE).is_file()


def test_all_values_are_computed_by_who_does_not_write_and_after_an_error(tmp_path: Path) -> None:
    computed: list[int] = []
    tensors = {
        f"w{i}": deferred((2,), torch.float32, lambda i=i: (computed.append(i), torch.ones(2))[1])  # type: ignore[misc]
        for i in range(3)
    }
    write_weights(tensors, tmp_path, 10**9, writes=False)
    assert (computed, [*tmp_path.iterdir()]) == ([0, 1, 2], [])
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        write_weights(tensors, tmp_path / "file", 10**9)
    assert computed == [0, 1, 2, 0, 1, 2]
