"""Follows what `accelerate launch` asks of a training by environment variables, as transformers' arguments do."""

from __future__ import annotations

import os
from typing import Any

from onstep.errors import ConfigError
from onstep.slurm.ranks import adopt_ranks

_TRUE = ("1", "true", "yes", "y", "on", "t")
_SHARDED = "models are sharded by torch's fully_shard; launch with --use_fsdp --fsdp_version 2"
_COMPILED = "drop the option of accelerate launch; torch_compile_backend and torch_compile_mode say how to compile"
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": _SHARDED,
    "ACCELERATE_USE_MEGATRON_LM": _SHARDED,
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": _COMPILED,
    "ACCELERATE_DYNAMO_USE_DYNAMIC": _COMPILED,
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": _COMPILED,
}
_PRECISIONS = ("no", "bf16", "fp16")


def settle_launcher(args: Any) -> None:
    """Let the options of `accelerate launch` decide where the arguments leave it open: precision, device, compilation.

    The tasks of `srun` become ranks.

    Raises:
        ConfigError: for an option without its effect here.
    """
    adopt_ranks()
    for variable, remedy in _REFUSED.items():
        if os.environ.get(variable, "").lower() in _TRUE:
            raise ConfigError(f"accelerate launch sets {variable}={os.environ[variable]}, not supported: {remedy}.")
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if not (args.bf16 or args.fp16 or args.mixed_precision):
        if precision not in _PRECISIONS:
            raise ConfigError(
                f"accelerate launch --mixed_precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}; pass "
                f"bf16 to train in half precision."
            )
        args.mixed_precision = precision if precision != "no" else args.mixed_precision
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE:
        args.use_cpu = True
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no" and not args.torch_compile:
        mode = os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
        args.torch_compile, args.torch_compile_backend = True, args.torch_compile_backend or backend
        args.torch_compile_mode = args.torch_compile_mode or (mode if mode != "default" else None)
