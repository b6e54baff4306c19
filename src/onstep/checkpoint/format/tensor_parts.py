"""Reads a part of a tensor from a tensor file into memory that exists."""

from __future__ import annotations

import math
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_file import CHUNK_BYTES, fill, opened
from onstep.checkpoint.format.tensor_header import TensorInfo
from onstep.distributed.boxes import Box

RUN_BYTES = 64 * 1024
"""Runs of the file that are at least as long are read one by one; shorter ones with what lies between them."""


def read_part(path: Path, name: str, info: TensorInfo, part: Box, destination: Tensor) -> None:
    """Read a part of a tensor, straight into `destination` where the bytes lie alike.

    Args:
        path: the tensor file.
        name: the tensor's, for errors.
        info: its entry in the header of the file.
        part: the elements to read.
        destination: a tensor of the part's shape, on any device; of another dtype, it gets the values converted.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    if part.numel:
        with opened(path) as file, torch.no_grad():
            _Reading(file, path, name, info.dtype).read(info.start, info.shape, part, destination.detach())


class _Reading:
    """The reading of one tensor."""

    def __init__(self, file: BufferedReader, path: Path, name: str, dtype: torch.dtype) -> None:
        self._file, self._path, self._name, self._dtype = file, path, name, dtype

    def read(self, start: int, shape: tuple[int, ...], part: Box, destination: Tensor) -> None:
        """Read a part of the tensor of `shape` whose bytes begin at `start`."""
        run, is_one_run = _run_of(shape, part)
        row_bytes = math.prod(shape[1:]) * self._dtype.itemsize
        if is_one_run:
            self._read_run(start + part.first_in(shape) * self._dtype.itemsize, destination)
        elif run * self._dtype.itemsize >= RUN_BYTES or row_bytes > CHUNK_BYTES:
            inner = Box(part.offsets[1:], part.sizes[1:])
            for index in range(part.sizes[0]):
                at = start + (part.offsets[0] + index) * row_bytes
                self.read(at, shape[1:], inner, destination[index])
        else:
            self._read_rows(start, shape, part, destination, row_bytes)

    def _read_rows(self, start: int, shape: tuple[int, ...], part: Box, destination: Tensor, row_bytes: int) -> None:
        """Read whole rows, a chunk at a time, and keep what belongs to the part."""
        at_a_time = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, part.sizes[0], at_a_time):
            count = min(at_a_time, part.sizes[0] - first)
            rows = torch.empty((count, *shape[1:]), dtype=self._dtype)
            self._fill(start + (part.offsets[0] + first) * row_bytes, rows)
            kept = Box((0, *part.offsets[1:]), (count, *part.sizes[1:])).of(rows)
            destination[first : first + count].copy_(kept)

    def _read_run(self, start: int, destination: Tensor) -> None:
        is_alike = destination.dtype == self._dtype and destination.device.type == "cpu"
        if is_alike and destination.is_contiguous() and not destination.is_conj() and not destination.is_neg():
            self._fill(start, destination)
        else:
            staged = torch.empty(destination.shape, dtype=self._dtype)
            self._fill(start, staged)
            destination.copy_(staged)

    def _fill(self, start: int, tensor: Tensor) -> None:
        self._file.seek(start)
        fill(self._file, self._path, self._name, tensor)


def _run_of(shape: tuple[int, ...], part: Box) -> tuple[int, bool]:
    """The number of elements of the part that lie together, and whether these are all of them."""
    run, dim = 1, len(shape)
    while dim > 0 and part.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
        run *= shape[dim]
    if dim > 0:
        run *= part.sizes[dim - 1]
    return run, run == part.numel
