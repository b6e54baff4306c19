"""Sets the precision of float32 products on a GPU, and says where another one would be much faster: `train.tf32`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from onstep.errors import ConfigError
from onstep.training.feature import Feature
from onstep.training.run import Run

_FIRST_CAPABILITY = 8
"""The compute capability from which on a GPU has TensorFloat-32 and bfloat16."""


class Float32Products(Feature[Run]):
    """TensorFloat-32 or full precision for float32 products, for the time of a run."""

    name = "tf32"
    when = "train.tf32"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Also where it is false, which differs from torch's default for convolutions."""
        return host.cfg.train.tf32 is not None

    def session(self) -> AbstractContextManager[object]:
        device, tf32 = self.host.world.device, bool(self.host.cfg.train.tf32)
        if tf32 and not has_tf32(device):
            raise ConfigError(
                f"train.tf32=true requires a CUDA GPU of the Ampere generation or newer, and the run is on {device}; "
                f"use null."
            )
        return float32_precision(tf32=tf32) if has_tf32(device) else nullcontext()


@contextmanager
def float32_precision(*, tf32: bool) -> Iterator[None]:
    """Context in which a GPU computes float32 products in TensorFloat-32 or in full precision; then all is as before.

    Torch has an older and a newer interface for it, and raises where they contradict each other, for instance while
    inductor tunes kernels. Here they agree, and no setting of a single operation overrides them.
    """
    backends: Any = torch.backends
    cudnn = backends.cudnn
    # from the widest to the narrowest, each of which inherits while it is "none"
    owners = (backends, cudnn, backends.cuda.matmul, cudnn.conv, cudnn.rnn, backends.mkldnn.matmul)
    allowed, before = _cudnn_allows_tf32(), []
    for owner in owners:
        before.append(owner.fp32_precision)
        owner.fp32_precision = "none"
    matmul = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = allowed
        for owner, precision in zip(owners, before, strict=True):
            owner.fp32_precision = precision


def _cudnn_allows_tf32() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface contradicts it: it has its default
        return True


def has_tf32(device: torch.device | None = None) -> bool:
    """Whether a GPU has TensorFloat-32 and bfloat16; None means the current one."""
    if device is not None and device.type != "cuda":
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= _FIRST_CAPABILITY


def slow_float32(device: torch.device, model: Sequence[nn.Module], tf32: str, bf16: str) -> str | None:
    """A line for a float32 run on a GPU that has faster precisions, which nobody has decided on; else None.

    Args:
        model: the chunks that are trained.
        tf32: the setting that selects TensorFloat-32.
        bf16: the setting that selects bfloat16.
    """
    if not has_tf32(device) or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return None
    weights = [one.dtype for chunk in model for one in chunk.parameters() if one.ndim > 1 and one.is_floating_point()]
    if not weights or any(dtype != torch.float32 for dtype in weights):
        return None
    return (
        f"float32 on {torch.cuda.get_device_name(device)} computes matrix products without its tensor cores; several "
        f"times faster are {tf32} (products rounded to 10 bits) and {bf16}"
    )
