"""Tensors whose parts are in several files: any part is read from them, and what does not fit together is refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.checkpoint import write_tensors
from onstep.checkpoint.format import tensor_parts
from onstep.checkpoint.format.stored_tensors import STEP_KEY, open_tensors
from onstep.distributed.boxes import Box
from onstep.errors import CheckpointError


def write(path: Path, parts: Mapping[str, tuple[Tensor, tuple[int, ...], tuple[int, ...]]], step: int = 5) -> Path:
    """A file of parts, each with its offset and the shape of its whole tensor."""
    with path.open("wb") as file:
        write_tensors(
            file,
            {name: part for name, (part, _, _) in parts.items()},
            {STEP_KEY: str(step)},
            offsets={name: offset for name, (_, offset, _) in parts.items()},
            full_shapes={name: shape for name, (_, _, shape) in parts.items()},
        )
    return path


def in_quarters(root: Path, tensor: Tensor, at: tuple[int, int]) -> list[Path]:
    """The files of a tensor that is cut at a row and at a column."""
    cuts = [(0, at[0], tensor.shape[0]), (0, at[1], tensor.shape[1])]
    paths = []
    for number, (row, column) in enumerate(product((0, 1), (0, 1))):
        rows, columns = slice(*cuts[0][row : row + 2]), slice(*cuts[1][column : column + 2])
        part = (tensor[rows, columns], (cuts[0][row], cuts[1][column], 0), tuple(tensor.shape))
        paths.append(write(root / f"rank_{number}.safetensors", {"w": part}))
    return paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize(("run_bytes", "chunk_bytes"), [(1, 1 << 20), (1 << 20, 64), (1 << 20, 1)])
def test_any_part_is_read_from_any_division(
    tmp_path: Path, dtype: torch.dtype, run_bytes: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parts, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(tensor_parts, "CHUNK_BYTES", chunk_bytes)
    whole = torch.randint(2, (7, 5, 3)).to(dtype) if dtype == torch.bool else torch.randn(7, 5, 3).to(dtype)
    stored = open_tensors(in_quarters(tmp_path, whole, (3, 2)), 5)["w"]
    assert (stored.shape, stored.dtype, stored.size_bytes) == ((7, 5, 3), dtype, 105 * dtype.itemsize)
    assert torch.equal(stored.read(), whole)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ends = [sorted(torch.randint(size + 1, (2,), generator=generator).tolist()) for size in whole.shape]
        box = Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))
        assert torch.equal(stored.read_box(box), box.of(whole))
        strided = torch.zeros(*reversed(box.sizes), dtype=dtype).permute(2, 1, 0)
        stored.read_into(strided, box)
        assert torch.equal(strided, box.of(whole))


def test_no_more_of_the_files_is_read_than_a_rank_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(64, 8)
    halves = [
        write(tmp_path / f"rank_{rank}.safetensors", {"w": (whole[start : start + 32], (start, 0), (64, 8))})
        for rank, start in enumerate((0, 32))
    ]
    stored, read = open_tensors(halves)["w"], []
    real = tensor_parts.fill

    def counting(file: Any, path: Path, name: str, tensor: Tensor) -> None:
        read.append((path.name, tensor.nbytes))
        real(file, path, name, tensor)

    monkeypatch.setattr(tensor_parts, "fill", counting)
    assert torch.equal(stored.read_box(Box((30, 0), (4, 8))), whole[30:34])
    assert read == [("rank_0.safetensors", 64), ("rank_1.safetensors", 64)]


def refusals(root: Path) -> dict[str, tuple[list[Path], str]]:
    """Files that do not fit together, and what the error says."""
    root.mkdir(exist_ok=True)
    w = torch.ones(4, 2)

    def made(name: str, *parts: tuple[Tensor, int, tuple[int, ...]], step: int = 5) -> list[Path]:
        return [
            write(root / f"{name}-{n}.safetensors", {"w": (part, (row, 0), shape)}, step if n else 5)
            for n, (part, row, shape) in enumerate(parts)
        ]

    full = (8, 2)
    cut = made("cut", (w, 0, full), (w, 4, full))
    cut[1].write_bytes(cut[1].read_bytes()[:-8])
    return {
        "missing": (made("missing", (w, 0, full), (w[:2], 4, full)), r"4 of the 16 elements of 'w' are missing"),
        "lost": ([*made("lost", (w, 0, full)), root / "rank_1.safetensors"], r"rank_1.safetensors cannot be read: No"),
        "overlap": (made("over", (w, 0, full), (w, 4, full), (w, 2, full)), r"\[0:4, 0:2\] and \[2:6, 0:2\] of 'w'"),
        "shape": (made("shape", (w, 0, full), (w, 4, (9, 2))), r"shape \[9, 2\], but of one of \[8, 2\] in shape-0"),
        "dtype": (made("dtype", (w, 0, full), (w.double(), 4, full)), r"is of torch.float64, but of torch.float32 in"),
        "step": (made("step", (w, 0, full), (w, 4, full), step=4), r"is of step 4, but its checkpoint is of step 5"),
        "truncated": (cut, r"header describes \d+; it was truncated"),
    }


@pytest.mark.parametrize("case", ["missing", "lost", "overlap", "shape", "dtype", "step", "truncated"])
def test_files_that_do_not_fit_together_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    paths, said = refusals(tmp_path)[case]
    with pytest.raises(CheckpointError, match=said) as caught:
        open_tensors(paths, 5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"w": 3}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}']
)
def test_sharding_that_does_not_fit_the_file_is_refused(tmp_path: Path, text: str) -> None:
    with (tmp_path / "w.safetensors").open("wb") as file:
        write_tensors(file, {"w": torch.ones(2, 2)}, {"DCP_SHARDING_INFO": text})
    with pytest.raises(CheckpointError, match="DCP_SHARDING_INFO"):
        open_tensors([tmp_path / "w.safetensors"])
