"""Optimizers by the names of `TrainingArguments.optim`: their classes, keywords and construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from onstep.config import OptimizerConfig
from onstep.config.hf.optimizers import NATIVE, OPTIMIZERS, parse_options
from onstep.config.sections.optimizer import OF_PACKAGES
from onstep.errors import ConfigError
from onstep.originals import original


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


_TORCHS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Callable[[str], Any]]]] = {
    "sgd": (torch.optim.SGD, {"nesterov": _is_true}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": _is_true}),
}
"""Classes of torch, and the types of their options that are not numbers."""


_IN_PLACE_OF_GROUPS = ("params", "model", "optimizer_dict")
"""Keywords whose value an optimizer gets in place of the groups, as in Hugging Face's `create_optimizer`; the last one
that is given decides."""


def is_native(args: Any) -> bool:
    """Whether `optimizer` of the configuration expresses the optimizer that the arguments name."""
    return args.optim in NATIVE and not args.optim_args


def check_installed(args: Any, key: str = "TrainingArguments.optim") -> None:
    """Refuse (ConfigError) an optimizer whose package is not installed, with the command that installs it.

    Args:
        key: what names the optimizer, for the message.
    """
    named = OPTIMIZERS[args.optim]
    # transformers knows the keywords of all other packages
    for module, install in (
        (named.module, named.install),
        (named.module and "transformers", "pip install transformers"),
    ):
        if module and find_spec(module) is None:
            raise ConfigError(f"{key}={args.optim!r} requires the package {module}, which is not installed: {install}.")


def optimizer_class(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
    """The class and the keywords of the optimizer that the arguments name, with Hugging Face's values.

    Raises:
        ConfigError: if its package is not installed, and for Muon, which is two optimizers.
    """
    check_installed(args)
    if args.optim == "muon":
        raise ConfigError("optim='muon' has no single class: it is Muon and AdamW; call create_optimizer().")
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        keywords = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        return torch.optim.AdamW, keywords | ({"fused": True} if args.optim == "adamw_torch_fused" else {})
    if args.optim in _TORCHS:
        cls, types = _TORCHS[args.optim]
        options = {key: types.get(key, float)(value) for key, value in parse_options(args.optim_args).items()}
        return cls, {"lr": args.learning_rate, **options}
    named = original("transformers.trainer", "Trainer").get_optimizer_cls_and_kwargs
    try:
        cls, keywords = named(args, model)
    except ImportError as error:  # of what the package itself imports
        raise ConfigError(f"TrainingArguments.optim={args.optim!r} cannot be used: {error}.") from error
    return cls, keywords


def check_configured(config: OptimizerConfig) -> None:
    """Refuse (ConfigError) an `optimizer.optimizer` of a package that is not installed."""
    if config.optimizer in OF_PACKAGES:
        check_installed(SimpleNamespace(optim=config.optimizer), "optimizer.optimizer")


def of_package(
    config: OptimizerConfig, modules: list[nn.Module], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer of another package that `optimizer.optimizer` names, with transformers' keywords for it.

    Raises:
        ConfigError: if its package is not installed.
    """
    args = SimpleNamespace(
        optim=config.optimizer,
        optim_args=None,
        learning_rate=config.lr,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_eps,
    )
    check_configured(config)
    cls, keywords = optimizer_class(args)
    optimizer: torch.optim.Optimizer = construct(cls, keywords, nn.ModuleList(modules), groups)
    return optimizer


def construct(cls: Any, keywords: dict[str, Any], module: nn.Module, groups: list[dict[str, Any]]) -> Any:
    """An optimizer of `cls` over the groups, or over what its keywords have in their place, which comes first.

    As in Hugging Face, a class of callable objects that is not an optimizer is a factory: `cls()(module, **keywords)`.
    """
    is_class = isinstance(cls, type)
    if is_class and not issubclass(cls, torch.optim.Optimizer) and any("__call__" in vars(one) for one in cls.__mro__):
        return cls()(module, **keywords)
    keywords = dict(keywords)
    optimized: Any = groups
    for name in _IN_PLACE_OF_GROUPS:
        optimized = keywords.pop(name, optimized)
    optimizer = cls(optimized, **keywords)
    if "bitsandbytes" in str(cls) and keywords.get("optim_bits") == 8:
        _keep_embeddings_wide(module)
    return optimizer


def decay_groups(module: nn.Module, decayed: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of trainable parameters: those named in `decayed`, with weight decay, and the others, without."""
    names = set(decayed)
    parameters = [
        (name in names, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
    ]
    groups: list[dict[str, Any]] = [
        {"params": [one for is_decayed, one in parameters if is_decayed], "weight_decay": weight_decay},
        {"params": [one for is_decayed, one in parameters if not is_decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _keep_embeddings_wide(module: nn.Module) -> None:
    """Keep the states of embeddings in 32 bits, as Hugging Face does: in 8 bits they are unstable."""
    manager = import_module("bitsandbytes").optim.GlobalOptimManager.get_instance()
    for each in module.modules():
        if isinstance(each, nn.Embedding):
            manager.register_module_override(each, "weight", {"optim_bits": 32})
