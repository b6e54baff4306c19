"""Declares the arguments for devices, precision and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class ComputeArguments:
    """Devices, precision and data parallelism."""

    bf16: bool = False
    """bfloat16 autocast over float32 weights."""
    fp16: bool = False
    """float16 autocast over float32 weights, with a dynamic loss scale (`optimizer.loss_scale`, ... in
    `config_overrides`)."""
    mixed_precision: str | None = argument(None, choices=(None, "no", "bf16", "fp16"))
    """Forgather's spelling of `bf16` and `fp16`: None | no | bf16 | fp16."""
    use_cpu: bool = False
    local_rank: int = -1
    """Accepted for old launchers; the rank is `local_process_index`."""
    ddp_find_unused_parameters: bool | None = None
    """None is False, for any model."""
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    """None is False."""
    ddp_backend: str | None = None
    ddp_timeout: int = argument(1800, bound="> 0")
    """Seconds."""
