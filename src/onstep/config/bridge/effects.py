"""Megatron Bridge's keys that have an effect under another name: what they set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onstep.config.bridge.own_values import LLAMA3, NULL_TOKENIZER
from onstep.config.bridge.precision import MixedPrecisionConfig, loss_scaling
from onstep.config.bridge.rules import Either, Rule
from onstep.config.bridge.values import comparable
from onstep.config.later_parts import LATER_PARTS
from onstep.config.suggestions import shown
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment

logger = logging.getLogger(__name__)

_BYTES_PER_MIB = 2**20
_ADJUST = "optimizer.muon_adjust_lr_fn"
_MUON = "for Muon: (spectral, 0.2) is match_rms_adamw, (shape_scaling, 1.0) is original; others are refused"
_MUON_SCALES = {("spectral", 0.2): "match_rms_adamw", ("shape_scaling", 1.0): "original"}


def _get(config: Any, key: str) -> Any:
    section, name = key.split(".") if "." in key else ("", key)
    return getattr(getattr(config, section) if section else config, name)


def _set(config: Any, key: str, value: Any) -> None:
    section, name = key.split(".") if "." in key else ("", key)
    setattr(getattr(config, section) if section else config, name, value)


def _renamed(key: str, default: Any = None, why: str = "", skips: object = ...) -> Rule:
    """A key that is `key` here; a value that is `skips` changes nothing."""

    def apply(config: Any, value: Any) -> None:
        if value is not skips:
            _set(config, key, value)

    return Rule(
        default=default, accepts=None, why=why, becomes=(key,), apply=apply, read=lambda config: _get(config, key)
    )


def _size(name: str) -> Rule:
    """The key of the section `parallel` of the same name."""
    part, key = LATER_PARTS[name], f"parallel.{name}"
    of_section = _renamed(key, default=part.values[0], why=part.why)
    return replace(of_section, accepts=part.values, remedy=part.remedy)


def _set_fsdp2(config: Any, value: Any) -> None:
    """All ranks that are left hold one replica in shards, unless the shards have a size; false changes nothing."""
    if value and config.parallel.data_parallel_shard_size == 1:
        config.parallel.data_parallel_shard_size = -1


def _precision(name: str) -> Rule:
    """`bf16` or `fp16`; as in Bridge, `mixed_precision` decides where it is set."""

    def apply(config: Any, value: Any) -> None:
        if comparable(value) and config.mixed_precision is None:
            config.mixed_precision = name

    def read(config: Any) -> bool:
        return bool(config.mixed_precision == name)

    key = "mixed_precision"
    why = f"true is {key}={name}, unless mixed_precision is set"
    return Rule(default=False, accepts=(False, True), why=why, remedy="", becomes=(key,), apply=apply, read=read)


def _set_blend(config: Any, value: Any) -> None:
    """`([prefix, ...], [weight, ...] or None)`; None leaves the data as it is."""
    if value is None:
        return
    pair = isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], list | tuple)
    if not pair:
        raise ConfigError(
            f"dataset.blend={shown(value)} must be null or a pair of lists: the prefixes of Megatron's files, and "
            f"their weights or null."
        )
    prefixes, weights = value
    config.dataset.kind, config.dataset.paths = "megatron", list(prefixes)
    config.dataset.weights = None if weights is None else list(weights)


def _blend(config: Any) -> Any:
    dataset = config.dataset
    return (dataset.paths, dataset.weights) if dataset.kind == "megatron" else None


def _set_position_ids(config: Any, value: Any) -> None:
    """Positions restart where attention does."""
    if value:
        config.dataset.reset_attention_mask = True


def _set_rope_factor(config: Any, value: Any) -> None:
    scaling = config.model.rope_scaling
    if isinstance(scaling, Mapping) and scaling.get("rope_type") == "llama3":
        config.model.rope_scaling = {**scaling, "factor": float(value)}


def _rope_factor(config: Any) -> float:
    return float((config.model.rope_scaling or LLAMA3)["factor"])


def _set_interpolation(config: Any, value: Any) -> None:
    if value is not None and float(value) != 1.0:
        config.model.rope_scaling = {"rope_type": "linear", "factor": float(value)}


def _inverse(key: str) -> Rule:
    """A key that says the opposite of `key`."""
    return Rule(
        default=True,
        accepts=(True, False),
        why="the opposite of it",
        becomes=(key,),
        apply=lambda config, value: _set(config, key, not value),
        read=lambda config: not _get(config, key),
    )


def _rule(
    key: str | tuple[str, ...],
    apply: Callable[[Any, Any], None],
    read: Callable[[Any], Any] | None = None,
    *,
    default: Any = None,
    why: str = "",
    accepts: Either | None = None,
    remedy: str = "",
) -> Rule:
    keys = (key,) if isinstance(key, str) else key
    values = None if accepts is None else accepts.values
    return Rule(default=default, accepts=values, why=why, remedy=remedy, becomes=keys, apply=apply, read=read)


_OF_PIPELINES = ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")
_BFLOAT16 = ("torch.bfloat16", "bfloat16")

EFFECTS: dict[str, dict[str, Rule]] = {
    "": {},
    "train": {
        "eval_interval": _renamed("validation.eval_interval"),
        "eval_iters": _renamed("validation.eval_iters"),
        "skip_train": _renamed("validation.skip_train", default=False, why="null leaves it as it is", skips=None),
    },
    "model": {
        **{name: _size(name) for name in LATER_PARTS},
        "tensor_model_parallel_size": _renamed("parallel.tensor_model_parallel_size", default=1),
        "sequence_parallel": _renamed("parallel.sequence_parallel", default=False),
        "pipeline_model_parallel_size": _renamed("parallel.pipeline_model_parallel_size", default=1),
        **{name: _renamed(f"parallel.{name}") for name in _OF_PIPELINES},
        "account_for_embedding_in_pipeline_split": _renamed(
            "parallel.account_for_embedding_in_pipeline_split", default=False
        ),
        "account_for_loss_in_pipeline_split": _renamed("parallel.account_for_loss_in_pipeline_split", default=False),
        "bf16": _precision("bf16_mixed"),
        "fp16": _precision("fp16_mixed"),
        "params_dtype": Rule(
            default="torch.float32",
            accepts=("torch.float32", "float32", *_BFLOAT16),
            why="torch.bfloat16 sets it, and holds over the value of the optimizer's own key; float32 leaves it",
            remedy="for float16 set mixed_precision=fp16_mixed, whose weights are float32",
            becomes=("optimizer.params_dtype",),
        ),
        "deterministic_mode": _renamed("train.deterministic", why="false leaves it as it is", skips=False),
        "rope_scaling_factor": _rule(
            "model.rope_scaling", _set_rope_factor, _rope_factor, why="the factor, where rope_scaling is true"
        ),
        "seq_len_interpolation_factor": _rule(
            "model.rope_scaling", _set_interpolation, why="linear scaling by the factor; null leaves it as it is"
        ),
    },
    "optimizer": {
        "bf16": _precision("bf16_mixed"),
        "fp16": _precision("fp16_mixed"),
        "muon_use_nesterov": Rule(
            default=False, accepts=(False, True), why="for Muon", becomes=("optimizer.muon_nesterov",)
        ),
        "muon_scale_mode": Rule(default="spectral", accepts=None, why=_MUON, becomes=(_ADJUST,)),
        "muon_extra_scale_factor": Rule(default=1.0, accepts=None, why=_MUON, becomes=(_ADJUST,)),
    },
    "dataset": {
        "sequence_length": _renamed("dataset.seq_length"),
        "random_seed": _renamed("rng.data_seed"),
        "path_to_cache": _renamed("dataset.cache_dir"),
        "blend": _rule(
            ("dataset.kind", "dataset.paths", "dataset.weights"),
            _set_blend,
            _blend,
            why="null, generated data there, leaves the data as it is",
        ),
        "reset_position_ids": _rule(
            "dataset.reset_attention_mask",
            _set_position_ids,
            lambda config: config.dataset.reset_attention_mask,
            why="positions restart where attention does; null and false leave it as it is",
            accepts=Either.of(None, False, True),
        ),
    },
    "ddp": {
        "bucket_size": _rule(
            "ddp.bucket_cap_mb",
            lambda config, value: (
                None if value is None else _set(config, "ddp.bucket_cap_mb", 4 * value / _BYTES_PER_MIB)
            ),
            lambda config: int(config.ddp.bucket_cap_mb * _BYTES_PER_MIB / 4),
            why="elements of 4 bytes there, MiB here; null leaves it as it is",
        ),
    },
    "dist": {
        "distributed_timeout_seconds_after_init": _renamed("dist.timeout_after_first_step"),
        "use_torch_fsdp2": _rule(
            "parallel.data_parallel_shard_size",
            _set_fsdp2,
            lambda config: config.parallel.data_parallel_shard_size != 1,
            default=False,
            accepts=Either.of(False, True),
            why="true divides the model between the ranks, as -1 does; false leaves the size as it is",
        ),
    },
    "straggler": {"enable_straggler_on_startup": _inverse("straggler.disable_straggler_on_startup")},
}
"""By section."""


def settle(config: Any) -> None:
    """Set what depends on several keys: Muon's, the vocabulary of Bridge's NullTokenizer, flags of two sections.

    Raises:
        ConfigError: for a scale of Muon's updates that torch's Muon does not have.
    """
    optimizer, tokenizer = config.optimizer, config.tokenizer
    given = optimizer.given_of_bridge
    if optimizer.optimizer == "muon" and "muon_use_nesterov" in given:
        optimizer.muon_nesterov = given["muon_use_nesterov"]
    if optimizer.optimizer == "muon" and {"muon_scale_mode", "muon_extra_scale_factor"} & given.keys():
        scale = given.get("muon_scale_mode", "spectral"), given.get("muon_extra_scale_factor", 1.0)
        if scale not in _MUON_SCALES:
            raise ConfigError(
                f"optimizer.muon_scale_mode={scale[0]} with muon_extra_scale_factor={scale[1]} is not how torch's Muon "
                f"scales its updates; set spectral and 0.2 (match_rms_adamw), or shape_scaling and 1.0 (original)."
            )
        optimizer.muon_adjust_lr_fn = _MUON_SCALES[scale]
    if tokenizer.tokenizer_type == NULL_TOKENIZER:
        tokenizer.tokenizer_type = "bytes"
        if config.model.vocab_size is None and tokenizer.vocab_size is not None:
            config.model.vocab_size = tokenizer.vocab_size + 1
        tokenizer.vocab_size = None
    if comparable(config.model.given_of_bridge.get("params_dtype")) in _BFLOAT16:
        optimizer.params_dtype = "bfloat16"
    _enable_together(config)
    if isinstance(config.mixed_precision, MixedPrecisionConfig):
        if not config.ddp.grad_reduce_in_bf16:  # which Bridge does not have
            config.ddp.grad_reduce_in_fp32 = config.mixed_precision.grad_reduce_in_fp32
        if config.mixed_precision.params_dtype is not None:
            optimizer.params_dtype = config.mixed_precision.params_dtype
        for name in _OF_GATHERS:
            if getattr(config.mixed_precision, name):
                setattr(config.ddp, name, True)
        for name, value in loss_scaling(config.mixed_precision).items():
            setattr(optimizer, name, value)
        config.mixed_precision = config.mixed_precision.name


_OF_BOTH = ("use_distributed_optimizer", "overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
"""Flags that `ddp` and `optimizer` share."""
_OF_GATHERS = ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
"""Flags of `ddp` that an object for `mixed_precision` enables, too."""
_warned: set[str] = set()
"""The flags that were warned of: a run copies its configuration more than once."""


def _enable_together(config: Any) -> None:
    """As in Bridge, a flag that one of the sections enables is enabled in both, with a warning on rank 0.

    Raises:
        ConfigError: for a value that is neither true nor false.
    """
    for name in _OF_BOTH:
        values = {section: getattr(getattr(config, section), name) for section in ("ddp", "optimizer")}
        for section, value in values.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{section}.{name}={shown(value)} must be true or false; set one of them.")
        if len({*values.values()}) == 1:
            continue
        is_said = name in config.optimizer.given_of_bridge  # else the key of `ddp` decides, as the only one
        for section in values:
            setattr(getattr(config, section), name, True)
        if is_said and name not in _warned and integer_from_environment("RANK", 0) == 0:
            _warned.add(name)
            said = ", ".join(f"{section}.{name}={str(value).lower()}" for section, value in values.items())
            logger.warning("%s differ, so both are true; set both to the same value", said)
