"""Tensor files: exact, streamed, and read by safetensors and torch.distributed.checkpoint alike."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from onstep.checkpoint.format.codec import encode_state
from onstep.checkpoint.format.stored_tensors import open_tensors
from onstep.checkpoint.format.tensor_file import (
    CHUNK_BYTES,
    WRITE_BYTES,
    read_header,
    read_tensors,
    write_tensors,
)
from onstep.checkpoint.format.tensor_header import DTYPE_NAMES
from onstep.errors import CheckpointError, UnsupportedStateError
from tests.support.forked_processes import Processes, output_of


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, **parts: Any) -> Path:
    with path.open("wb") as file:
        write_tensors(file, tensors, metadata, **parts)
    return path


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


def assert_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert first[name].shape == second[name].shape, name
        assert raw(first[name]) == raw(second[name]), name


def of_every_dtype() -> dict[str, Tensor]:
    """Five items of each, from random bytes (bools: 0 and 1)."""
    result = {}
    for dtype, name in DTYPE_NAMES.items():
        items = torch.randint(0, 2 if dtype == torch.bool else 256, (5 * dtype.itemsize,), dtype=torch.uint8)
        result[f"of {name}"] = items.view(dtype)
    return result


def test_one_tensor_is_read_as_all_are(tmp_path: Path) -> None:
    path = save(tmp_path / "x", of_every_dtype())
    assert_same({name: one.read() for name, one in open_tensors([path]).items()}, read_tensors(path))


def of_every_layout() -> dict[str, Tensor]:
    return {
        "plain": torch.randn(3, 4),
        "transposed": torch.randn(3, 4).t(),
        "every_third": torch.arange(20)[::3],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0, 2),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
        "negated and contiguous": torch._neg_view(torch.randn(4)),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "ünïcode \n name": torch.ones(1),
    }


@pytest.mark.parametrize("tensors", [of_every_dtype(), of_every_layout(), {}], ids=["dtypes", "layouts", "none"])
def test_tensors_come_back_to_the_bit(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", tensors)
    assert_same(read_tensors(path), tensors)
    header = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in header.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }


def test_what_was_read_is_memory_of_its_own(tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", {"a": torch.ones(1000)})
    before = path.read_bytes()
    tensor = read_tensors(path)["a"]
    tensor.mul_(3)
    path.unlink()
    assert torch.equal(tensor, torch.full((1000,), 3.0))
    assert save(path, {"a": torch.ones(1000)}).read_bytes() == before


@pytest.mark.parametrize("tensors", [of_every_dtype(), of_every_layout()], ids=["dtypes", "layouts"])
def test_the_safetensors_library_reads_our_files(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", tensors, {"step": "20"})
    assert_same(safetensors.torch.load_file(path), tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "20"}


def test_we_read_the_files_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    assert_same(read_tensors(tmp_path / "x.safetensors"), tensors)


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    for length in range(8):
        path = save(tmp_path / "x.safetensors", {"n" * (length + 1): torch.ones(1)} | of_every_dtype())
        assert all(info.start % info.dtype.itemsize == 0 for info in read_header(path).values())


def test_equal_tensors_give_equal_files_whatever_the_order(tmp_path: Path) -> None:
    tensors = of_every_layout()
    first = save(tmp_path / "a", tensors).read_bytes()
    second = save(tmp_path / "b", dict(reversed(tensors.items()))).read_bytes()
    assert first == second


class Collecting:
    """Keeps the sizes of what it was given, and sees how much of it is still alive."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.most_alive = 0
        self.addresses: list[int] = []
        self._buffers: list[weakref.ref[Any]] = []

    def write(self, buffer: bytes | memoryview) -> None:
        self.sizes.append(memoryview(buffer).nbytes)
        if isinstance(buffer, memoryview):
            self.addresses.append(np.frombuffer(buffer, np.uint8).ctypes.data)
            self._buffers.append(weakref.ref(buffer.obj))
        self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self._buffers))


def test_a_contiguous_tensor_is_handed_over_without_a_copy() -> None:
    tensor = torch.zeros(2 * WRITE_BYTES + 400_000, dtype=torch.uint8)
    file = Collecting()
    write_tensors(file, {"big": tensor})
    assert file.addresses == [tensor.data_ptr() + at * WRITE_BYTES for at in range(3)]


def test_neighbours_in_memory_are_handed_over_together(tmp_path: Path) -> None:
    memory = torch.arange(1_000_000, dtype=torch.float32)
    parts = {"a": memory[:400_000], "b": memory[400_000:900_000].view(1000, 500), "d": memory[900_001:]}
    parts["c"] = torch.ones(300_000)
    file = Collecting()
    write_tensors(file, parts)
    assert file.sizes[1:3] == [900_000 * 4, 300_000 * 4], "a and b lie side by side; c is elsewhere, d after a gap"
    assert file.addresses[0] == memory.data_ptr()
    path = tmp_path / "parts.safetensors"
    with path.open("wb") as plain:
        write_tensors(plain, parts)
    for name, tensor in read_tensors(path).items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3000, 5000).t(),
        torch.zeros(2, 6_000_000).t().reshape(3_000_000, 2, 2).permute(1, 2, 0),
        torch.zeros(1).expand(12_000_000),
        torch.zeros(5_000_000, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "few long rows", "expanded", "conjugated"],
)
def test_staging_needs_a_few_chunks_of_memory(tensor: Tensor) -> None:
    assert tensor.nbytes > 4 * CHUNK_BYTES
    file = Collecting()
    write_tensors(file, {"big": tensor})
    assert max(file.sizes) <= CHUNK_BYTES
    assert sum(file.sizes[1:]) == tensor.nbytes
    assert file.most_alive <= 3


def test_large_staged_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    count = 3 * CHUNK_BYTES // 4 + 13
    tensors = {
        "long": torch.arange(count),
        "wide": torch.arange(2 * count, dtype=torch.int32).reshape(count, 2).t(),
        "strided": torch.arange(2 * count, dtype=torch.int32)[::2],
    }
    assert_same(read_tensors(save(tmp_path / "x.safetensors", tensors)), tensors)


def test_thousands_of_small_tensors_take_few_writes(tmp_path: Path) -> None:
    tensors = {f"state.{index}.step": torch.tensor(float(index)) for index in range(3000)}
    tensors |= {f"state.{index}.exp_avg": torch.full((50,), float(index)) for index in range(3000)}
    file = Collecting()
    write_tensors(file, tensors)
    assert len(file.sizes) <= 3
    assert_same(read_tensors(save(tmp_path / "x.safetensors", tensors)), tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_to_the_bit(tmp_path: Path) -> None:
    tensors = {"plain": torch.randn(3000, 3000), "strided": torch.randn(3000, 2000).t(), "bool": torch.ones(3) > 0}
    path = save(tmp_path / "x.safetensors", {name: tensor.cuda() for name, tensor in tensors.items()})
    assert_same(read_tensors(path), tensors)
    back = read_tensors(path, device="cuda")
    assert all(tensor.is_cuda for tensor in back.values())
    assert_same({name: tensor.cpu() for name, tensor in back.items()}, tensors)


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ({"z": torch.ones(1, dtype=torch.complex128)}, None, "z: a tensor file cannot hold torch.complex128"),
        ({"s": torch.eye(2).to_sparse()}, None, "s: only dense tensors"),
        ({"m": torch.ones(1, device="meta")}, None, "m: only dense tensors"),
        ({"__metadata__": torch.ones(1)}, None, "which the format reserves"),
        ({"\ud800": torch.ones(1)}, None, "not valid Unicode"),
        ({}, {"step": 3}, "map str to str"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    tensors: Any, metadata: Any, reason: str
) -> None:
    file = Collecting()
    with pytest.raises(UnsupportedStateError, match=reason):
        write_tensors(file, {"a": torch.ones(2), **tensors}, metadata)
    assert file.sizes == []


def load_with_dcp(directory: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return state


dcp_says = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.distributed", "ignore::FutureWarning:torch.distributed"
)


@dcp_says
def test_dcp_reads_a_file_of_whole_tensors(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 3).t(), "b": torch.randn(3).bfloat16(), "n": torch.tensor(7)}
    save(tmp_path / "model.safetensors", tensors)
    back = load_with_dcp(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    assert_same(back, tensors)


@dcp_says
def test_dcp_puts_together_tensors_whose_parts_lie_in_two_files(tmp_path: Path) -> None:
    full = {
        "rows": torch.randn(5, 4),
        "columns": torch.randn(3, 6),
        "whole": torch.randn(2),
        "scalar": torch.tensor(1.5),
    }
    shapes = {"rows": full["rows"].shape, "columns": full["columns"].shape}
    first = {"rows": full["rows"][:3], "columns": full["columns"][:, :2], "whole": full["whole"]}
    second = {"rows": full["rows"][3:], "columns": full["columns"][:, 2:], "scalar": full["scalar"]}
    save(tmp_path / "a.safetensors", first, offsets={"rows": (0, 0)}, full_shapes=shapes)
    offsets = {"rows": (3, 0), "columns": (0, 2)}
    save(tmp_path / "b.safetensors", second, offsets=offsets, full_shapes=shapes)
    back = load_with_dcp(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in full.items()})
    assert_same(back, full)
    assert_same(read_tensors(tmp_path / "b.safetensors"), second)


@pytest.mark.distributed
def test_dcp_reshards_the_files_of_three_ranks_onto_two(processes: Processes, tmp_path: Path) -> None:
    full = torch.arange(20.0).reshape(5, 4)
    for start, end in ((0, 1), (1, 3), (3, 5)):
        parts = {"rows": full[start:end], "columns": full[start:end]}
        offsets = {"rows": [start, 0], "columns": [start, 0]}
        save(tmp_path / f"rank_{start}.safetensors", parts, offsets=offsets, full_shapes={"rows": [5, 4]})
    codes = processes.run(
        "tests.support.jobs.checkpoint_jobs", "reshard", tmp_path / "ranks", {"folder": str(tmp_path)}, ranks=2
    )
    assert codes == [0, 0], output_of(tmp_path / "ranks")


def test_a_distributed_tensor_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = torch.distributed.tensor.distribute_tensor(torch.zeros(6, 4), mesh)
        with pytest.raises(UnsupportedStateError, match="w: only plain tensors can be written, got DTensor"):
            write_tensors(Collecting(), {"w": sharded})
        with pytest.raises(UnsupportedStateError, match=r"model\.w: .*DTensor; .*to_local\(\) or full_tensor\(\)"):
            encode_state({"w": sharded}, "model")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("offsets", "shapes", "reason"),
    [
        ({"w": [3, 0]}, {"w": [5, 4]}, "exceeds a tensor of shape"),
        ({"w": [-1, 0]}, {}, "exceeds"),
        ({"w": [0]}, {}, "exceeds"),
        ({}, {"w": [5]}, "exceeds"),
        ({"v": [0, 0]}, {}, "not among the tensors"),
        ({}, {"v": [1]}, "not among the tensors"),
    ],
)
def test_a_part_outside_its_full_tensor_is_refused(offsets: Any, shapes: Any, reason: str) -> None:
    file = Collecting()
    with pytest.raises(CheckpointError, match=reason):
        write_tensors(file, {"w": torch.ones(3, 4)}, offsets=offsets, full_shapes=shapes)
    assert file.sizes == []


def test_the_header_says_where_the_parts_stand(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"w": torch.ones(2, 3), "b": torch.ones(1)}, offsets={"w": [4, 0]}, full_shapes={})
    with safetensors.safe_open(path, framework="pt") as file:
        sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
    assert sharding["w"] == {"saved_offsets": [4, 0], "full_shape": [6, 3]}
    assert sharding["b"] == {"saved_offsets": [0], "full_shape": [1]}


def test_a_single_element_of_a_strided_tensor_is_written(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"w": torch.arange(8.0).reshape(2, 4)[:, 2:3].t()[:, 1:]})
    assert_same(read_tensors(path), {"w": torch.tensor([[6.0]])})
