"""Gives the model the documents of packed sequences, with their boundaries where a GPU can use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onstep.events.context import unwrap
from onstep.models import Transformer
from onstep.training.compute.step import MicroBatches

_BOUNDS_STEP = 16
"""The number of boundaries is rounded up to a multiple of it, so that compiled code sees few different shapes."""


def packed_inputs(batch: Mapping[str, Any], data_iterator: Iterator[Any], model: nn.Module) -> dict[str, Any]:
    """The arguments of `model` that a micro-batch of packed sequences adds; none for other sequences.

    `position_ids` and `document_ids` are those of `batch`. The built-in model on a GPU gets the boundaries of the
    documents too, `cu_seqlens` and `max_seqlen`, without which its attention is slower. They are computed from the
    micro-batch on the host, so that nothing waits for the GPU.

    Args:
        batch: the micro-batch that `data_iterator` has just returned.
        data_iterator: what the forward step was called with.
    """
    if "document_ids" not in batch:
        return {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    inputs = {key: batch[key] for key in ("position_ids", "document_ids") if key in batch}
    if not isinstance(data_iterator, MicroBatches):
        return inputs
    device, ids = data_iterator.device, data_iterator.on_host["document_ids"]
    if device.type == "cpu" or ids.device.type != "cpu" or not isinstance(unwrap(model), Transformer):
        return inputs
    cu_seqlens, max_seqlen = boundaries(ids)
    if device.type == "cuda":
        cu_seqlens = cu_seqlens.pin_memory()
    return {**inputs, "cu_seqlens": cu_seqlens.to(device, non_blocking=True), "max_seqlen": max_seqlen}


def boundaries(document_ids: Tensor) -> tuple[Tensor, int]:
    """Where each document begins in the flattened batch, and bounds of their lengths.

    Args:
        document_ids: (batch, seq), on the host; a document is a run of equal ids.

    Returns:
        (documents + 1,), int32, whose last element is the number of tokens and may be repeated; and at least the length
        of the longest document, a power of two or the length of a sequence.
    """
    ids = document_ids.numpy()
    starts = np.ones(ids.shape, dtype=np.bool_)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    found = np.append(np.flatnonzero(starts), ids.size)
    bounds = np.full(-(-found.size // _BOUNDS_STEP) * _BOUNDS_STEP, ids.size, dtype=np.int32)
    bounds[: found.size] = found
    longest = int(np.diff(found).max(initial=1))
    return torch.from_numpy(bounds), min(1 << (longest - 1).bit_length(), ids.shape[1])
