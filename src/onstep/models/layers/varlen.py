"""Calls torch's attention for sequences of different lengths, which has kernels for CUDA in bfloat16 and float16.

Imported where it is used first: the import of torch's module lasts a second, as it brings the compiler.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_SMALL_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
"""Compute capabilities on which flash attention has no backward pass for the widest heads."""


def runs_varlen(query: Tensor) -> bool:
    """Whether torch's kernel has both passes for this device, dtype and head width."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return bool(_has_kernel(query.device.index, query.shape[-1]))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernel(device_index: int, head_width: int) -> bool:
    if torch.version.cuda is None or not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    if not {"enable_gqa", "window_size"} <= inspect.signature(varlen_attn).parameters.keys():
        return False  # a version of torch without grouped queries there
    capability = torch.cuda.get_device_capability(device_index)
    widest = 192 if capability in _SMALL_SHARED_MEMORY else 256
    return capability >= (8, 0) and head_width % 8 == 0 and head_width <= widest


def attend_by_boundaries(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Causal attention of each document to itself, (batch, seq, heads, width); no pair of tokens is masked.

    Args:
        query: (batch, seq, heads, width).
        key: (batch, seq, groups, width), as is `value`; heads are a multiple of groups.
        cu_seqlens: (documents + 1,), int32: where each begins in the flattened batch, and the end of the last one.
        max_seqlen: at least the length of the longest document.
    """
    attended = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[2] != key.shape[2],
    )
    assert isinstance(attended, Tensor)
    return attended.view_as(query)
