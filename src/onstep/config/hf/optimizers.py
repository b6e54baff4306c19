"""The optimizers that `TrainingArguments.optim` names: those built here, those of other packages, those refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.sections.optimizer import OF_BITSANDBYTES, OF_TORCHAO
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

NATIVE = {"adamw_torch_fused": "adam", "adamw_torch": "adam", "sgd": "sgd", "muon": "muon"}
"""Names with a corresponding `optimizer.optimizer` of the configuration."""


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer by Hugging Face's name."""

    module: str = ""
    """What is imported for it, besides torch."""
    install: str = ""
    """What installs that."""
    options: tuple[str, ...] = ()
    """Keys of `optim_args`."""
    has_targets: bool = False
    """Whether it requires `optim_target_modules`."""
    refusal: str = ""
    """Why it is not supported, and what to do."""


def _of(module: str, install: str, *options: str, has_targets: bool = False) -> NamedOptimizer:
    return NamedOptimizer(module, f"pip install {install}", options, has_targets)


_BITSANDBYTES = _of("bitsandbytes", "bitsandbytes")
_RMSPROP = ("momentum", "alpha", "eps", "centered")
_ADEMAMIX = _of("bitsandbytes", "bitsandbytes", "beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_TORCHAO = _of("torchao", "torchao", "block_size", "bf16_stochastic_round")
_GALORE = _of("galore_torch", "galore-torch", "rank", "update_proj_gap", "scale", "proj_type", has_targets=True)
_APOLLO = _of(
    "apollo_torch",
    "apollo-torch",
    *("rank", "proj", "scale_type", "update_proj_gap", "scale", "proj_type"),
    has_targets=True,
)
_SCHEDULE_FREE = _of("schedulefree", "schedulefree", "weight_lr_power", "r")
_IN_BACKWARD = (
    "it updates each weight during the backward pass, before the gradients of the step are known, so they cannot be "
    "accumulated, clipped or checked"
)

OPTIMIZERS: dict[str, NamedOptimizer] = {
    "adamw_torch_fused": NamedOptimizer(),
    "adamw_torch": NamedOptimizer(),
    "sgd": NamedOptimizer(options=("momentum", "dampening", "nesterov")),
    "adagrad": NamedOptimizer(options=("lr_decay", "eps")),
    "rmsprop": NamedOptimizer(options=_RMSPROP),
    "adafactor": _of("transformers", "transformers"),
    **dict.fromkeys(OF_BITSANDBYTES, _BITSANDBYTES),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), _BITSANDBYTES),
    **dict.fromkeys(("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _ADEMAMIX),
    **dict.fromkeys(OF_TORCHAO, _TORCHAO),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), _GALORE),
    "apollo_adamw": _APOLLO,
    "grokadamw": _of(
        "grokadamw",
        "grokadamw",
        *("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    ),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _SCHEDULE_FREE),
    "stable_adamw": _of("optimi", "torch-optimi", "max_lr", "kahan_sum", "decouple_lr"),
    "adamw_anyprecision": _of(
        "torchdistx",
        "git+https://github.com/pytorch/torchdistx",
        *("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype"),
    ),
    "adamw_torch_xla": NamedOptimizer(refusal="it is for XLA devices, and Onstep trains on CPU and CUDA"),
    "adamw_torch_npu_fused": NamedOptimizer(refusal="it is for Ascend devices, and Onstep trains on CPU and CUDA"),
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        NamedOptimizer(refusal=f"{_IN_BACKWARD}; use it without '_layerwise'"),
    ),
    "apollo_adamw_layerwise": NamedOptimizer(refusal=f"{_IN_BACKWARD}; use 'apollo_adamw'"),
    **dict.fromkeys(
        ("lomo", "adalomo"),
        NamedOptimizer(refusal=f"{_IN_BACKWARD}; use 'adafactor', 'galore_adamw' or 'adamw_bnb_8bit' to save memory"),
    ),
    "muon": NamedOptimizer(),  # of Onstep
}
"""`optim`: every name of transformers 5.23, and Onstep's own."""

WITHOUT_BETAS = ("sgd", "adagrad", "rmsprop", "adafactor", "schedule_free_sgd", "galore_adafactor")
"""Optimizers that do not read `adam_beta1`, `adam_beta2` and `adam_epsilon`."""


def check_optimizer(args: Any) -> None:
    """Refuse (ConfigError) an optimizer that is not supported, and options without a form."""
    refusal = OPTIMIZERS[args.optim].refusal
    if refusal:
        raise ConfigError(f"TrainingArguments.optim={args.optim!r} is not supported: {refusal}.")
    parse_options(args.optim_args)


def check_options(args: Any) -> None:
    """Refuse (ConfigError) options that the optimizer does not read, and a lack of those that it requires."""
    named = OPTIMIZERS[args.optim]
    for key in parse_options(args.optim_args):
        if key not in named.options:
            allowed = ", ".join(named.options) or "nothing; adam_beta1, weight_decay and others are arguments"
            if args.optim == "muon":
                allowed = "nothing; set optimizer.muon_momentum and the like in config_overrides"
            raise ConfigError(
                f"TrainingArguments.optim_args has {key!r}, which optim={args.optim!r} does not read; it reads "
                f"{allowed}.{nearest(key, list(named.options))}"
            )
    if named.has_targets and not args.optim_target_modules:
        raise ConfigError(
            f"TrainingArguments.optim={args.optim!r} requires optim_target_modules: names of linear layers, a regular "
            f"expression, or 'all-linear'."
        )
    if args.optim_target_modules and not named.has_targets:
        raise ConfigError(
            f"TrainingArguments.optim_target_modules={args.optim_target_modules!r} has no effect with "
            f"optim={args.optim!r}; only GaLore and APOLLO read it."
        )


def parse_options(text: str | None) -> dict[str, str]:
    """The options in `optim_args`: 'momentum=0.9,nesterov=True'.

    Raises:
        ConfigError: for an entry that is not `name=value`.
    """
    options: dict[str, str] = {}
    for entry in (text or "").replace(" ", "").split(","):
        if not entry:
            continue
        name, _, value = entry.partition("=")
        if not (name and value):
            raise ConfigError(f"TrainingArguments.optim_args={text!r} must be 'name=value,...', got {entry!r}.")
        options[name] = value
    return options
