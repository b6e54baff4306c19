"""Applies the arguments that change how the user's model computes, and how torch does, for the time of a session."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig, TrainingArguments, TrainingConfig
from onstep.distributed import world_size_from_environment
from onstep.errors import ConfigError
from onstep.models import Transformer
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.offloading import offloads_activations
from onstep.models.recomputation import recompute_in
from onstep.trainer.loss_convention import inner_module
from onstep.training.lifecycle.float32 import float32_precision, has_tf32

_OWN_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_OF_THE_MODEL = ("every_n_layers", "offload")
"""Entries of `activation_checkpointing_kwargs` that are not passed to `torch.utils.checkpoint`."""


def check_options(args: TrainingArguments) -> None:
    """Refuse (ConfigError) what this machine, its packages or the number of ranks cannot do."""
    if args.debug and find_spec("transformers") is None:
        raise ConfigError(
            f"TrainingArguments.debug={args.debug!r} requires the package transformers; install it, or use ''."
        )
    if args.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ConfigError(
            "TrainingArguments.use_liger_kernel=True requires the package liger-kernel; install it with `pip install "
            "liger-kernel`, or use False."
        )
    if args.tf32 and not has_tf32():
        raise ConfigError(
            "TrainingArguments.tf32=True requires a CUDA GPU of the Ampere generation or newer; use None."
        )
    if args.auto_find_batch_size and world_size_from_environment() > 1:
        raise ConfigError(
            "TrainingArguments.auto_find_batch_size=True requires a single process, because one rank that runs out of "
            "memory leaves the others waiting; set per_device_train_batch_size instead."
        )
    if args.torch_compile and args.torch_compile_backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(
            f"TrainingArguments.torch_compile_backend={args.torch_compile_backend!r} is not known; use one of {known}."
        )


@contextmanager
def torch_options(args: TrainingArguments) -> Iterator[None]:
    """Context with the precision of float32 products that the arguments ask for."""
    wanted = args.tf32
    if args.torch_compile and has_tf32() and ((wanted is None and not args.fp16) or args.bf16):
        wanted = True  # as transformers: the compiler expects it
    with nullcontext() if wanted is None or not has_tf32() else float32_precision(tf32=wanted):
        yield


class Configured(Protocol):
    """A Trainer, as far as it has options of a model."""

    args: TrainingArguments
    neftune_noise_alpha: float | None
    enable_activation_checkpoint_fn: Callable[[int, nn.Module], object] | None


@contextmanager
def model_options(trainer: Configured, module: nn.Module, *, trains: bool) -> Iterator[None]:
    """Context in which a model has the options of the arguments.

    Kernels, activation checkpointing, `use_cache` and debugging stay, as in Hugging Face's Trainer; noise on embeddings
    ends with the training.

    Raises:
        ConfigError: for a model that lacks what an option requires.
    """
    args = trainer.args
    config = getattr(inner_module(module), "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
    if not trains:
        yield
        return
    if args.use_liger_kernel:
        _use_liger_kernel(inner_module(module), args.liger_kernel_config or {})
    own = trainer.enable_activation_checkpoint_fn
    if args.activation_checkpointing and own is not None:
        own(args.process_index, inner_module(module))
    elif args.activation_checkpointing:
        checkpoint_activations(module, dict(args.activation_checkpointing_kwargs or {}))
    if args.debug:
        importlib.import_module("transformers.debug_utils").DebugUnderflowOverflow(module)
    alpha = trainer.neftune_noise_alpha
    noise = None if alpha is None else _embeddings(module).register_forward_hook(Noise(alpha))
    try:
        yield
    finally:
        if noise is not None:
            noise.remove()


@contextmanager
def memory_options(module: nn.Module, config: ModelConfig) -> Iterator[None]:
    """Context in which a model recomputes and offloads its activations as the section `model` says.

    As with `gradient_checkpointing`, the recomputation stays.

    Raises:
        ConfigError: for a model that lacks what an option requires.
    """
    inner = inner_module(module)
    if isinstance(inner, Transformer | CausalLM):
        own, inner = inner.config, inner if isinstance(inner, Transformer) else inner.model
        if config.recompute_granularity is not None:
            own.recompute_granularity = config.recompute_granularity
            own.recompute_interval = config.recompute_interval
        own.offload_activations = config.offload_activations or own.offload_activations
        own.fused_linear_loss = config.fused_linear_loss or own.fused_linear_loss
    if isinstance(inner, Transformer):
        yield
        return
    if config.recompute_granularity is not None:
        recompute_in(inner, config)
    with offloads_activations(inner, config):
        yield


class Noise:
    """A forward hook that adds uniform noise of up to `alpha / sqrt(seq * hidden)` to embeddings in training.

    Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (arXiv:2310.05914).
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def __call__(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        """The output (batch, seq, hidden) with noise."""
        if not module.training:
            return output
        size = float(self._alpha / torch.sqrt(torch.tensor(output.size(1) * output.size(2))))
        return output + torch.zeros_like(output).uniform_(-size, size)


def checkpoint_activations(module: nn.Module, options: dict[str, object]) -> None:
    """Make a model recompute its activations in the backward pass, by its own method.

    Raises:
        ConfigError: for a model without one, or options that it does not have.
    """
    inner = inner_module(module)
    if isinstance(inner, Transformer):
        if options:
            raise ConfigError(
                f"activation_checkpointing_kwargs={options} is only for models of transformers; use None: Onstep's "
                f"Transformer recomputes every layer."
            )
        inner.config.recompute_granularity = "full"
        return
    name = next((one for one in _OWN_CHECKPOINTING if callable(getattr(inner, one, None))), None)
    if name is None:
        raise ConfigError(
            f"activation_checkpointing=True requires a model with a method activation_checkpointing_enable or "
            f"gradient_checkpointing_enable, which {type(inner).__name__} does not have; call "
            f"torch.utils.checkpoint.checkpoint in its forward, and use False."
        )
    own = {key: options.pop(key) for key in _OF_THE_MODEL if key in options}
    keyword = name.replace("_enable", "_kwargs")
    getattr(inner, name)(**{keyword: options or None}, **own)


@contextmanager
def compiled(config: TrainingConfig, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which calls of modules run their compiled code. They stay the same, with their names of weights."""
    parts = [one for one in parts if config.torch_compile and "_orig_mod" not in one._modules]
    before = [one._compiled_call_impl for one in parts]
    for one in parts:
        one.compile(backend=config.torch_compile_backend or "inductor", mode=config.torch_compile_mode)
    try:
        yield
    finally:
        for one, call in zip(parts, before, strict=True):
            one._compiled_call_impl = call


def _use_liger_kernel(model: nn.Module, options: dict[str, object]) -> None:
    if not hasattr(model, "config"):
        warnings.warn(
            f"{type(model).__name__} is not a model of transformers: no Liger kernel is applied", stacklevel=2
        )
        return
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model, **options)


def _embeddings(module: nn.Module) -> nn.Module:
    inner = inner_module(module)
    found = inner.embedding if isinstance(inner, Transformer) else None
    get = getattr(inner, "get_input_embeddings", None)
    if found is None and callable(get):
        found = get()
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"neftune_noise_alpha requires a model with a method get_input_embeddings, which {type(inner).__name__} "
            f"does not have; add one that returns its embedding, or use None."
        )
    return found
