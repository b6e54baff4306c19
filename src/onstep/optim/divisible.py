"""Says which optimizers cannot update parameters in shards."""

from __future__ import annotations

import torch

from onstep.distributed.shards import is_sharded
from onstep.errors import ConfigError

_QUANTIZING = ("bitsandbytes", "torchao")
"""The packages whose optimizers have quantized state: of whole parameters, or in tensors of their own kind."""


def check_divisible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer with quantized state where its parameters are sharded over ranks.

    Args:
        optimizer: one of any package.

    Raises:
        ConfigError: if it is one of bitsandbytes or torchao, and a parameter is a DTensor.
    """
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    package = next((one for one in _QUANTIZING if one in packages), None)
    if package and is_sharded(param for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            f"{type(optimizer).__name__} of {package} has quantized state, which cannot be divided between ranks; use "
            f"AdamW, SGD or Muon of torch"
        )
