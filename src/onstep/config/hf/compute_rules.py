"""Fills in and checks the arguments for how the model computes, as Hugging Face does."""

from __future__ import annotations

from typing import Any

from onstep.config.hf.launcher import settle_launcher
from onstep.config.hf.sharding import settle_sharding, sharding_keys
from onstep.errors import ConfigError

_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
UNDERFLOW_OVERFLOW = "underflow_overflow"


def settle_compute(args: Any) -> None:
    """Follow the launcher, give both names of activation checkpointing one value, and switch `torch_compile` on where
    it is configured.

    Source: `TrainingArguments.__post_init__` of transformers 5.23.
    """
    settle_launcher(args)
    settle_sharding(args)
    for old, new in _ALIASES.items():
        if getattr(args, new) is None:
            setattr(args, new, getattr(args, old))
    args.activation_checkpointing = bool(args.activation_checkpointing)
    for old, new in _ALIASES.items():
        setattr(args, old, getattr(args, new))
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.debug is None or isinstance(args.debug, str):
        args.debug = (args.debug or "").split()


def check_compute(args: Any) -> None:
    """Refuse (ConfigError) an unknown kind of debugging, and what cannot be sharded as asked."""
    settle_sharding(args)
    sharding_keys(args)
    unknown = [kind for kind in args.debug if kind != UNDERFLOW_OVERFLOW]
    if unknown:
        raise ConfigError(
            f"TrainingArguments.debug={unknown[0]!r} is not supported; use {UNDERFLOW_OVERFLOW!r}, or '' for none."
        )
