"""Megatron Bridge's objects for the precision of a run, and for the overlap of its communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onstep.config.bridge.values import TARGET, comparable
from onstep.config.suggestions import listed, shown
from onstep.errors import ConfigError

EIGHT_BITS = "8-bit and 4-bit floating point are not supported; set mixed_precision=bf16_mixed"


@dataclass(kw_only=True)
class MixedPrecisionConfig:
    """Which precision a step computes in: `bf16=True`, `fp16=True`, or neither (float32).

    `params_dtype` is `optimizer.params_dtype` if it is set, else weights are float32. Gradients have the type of the
    weights, and `grad_reduce_in_fp32` is that of the section `ddp`, unless that has `grad_reduce_in_bf16`. The type of
    pipelines changes nothing. The values of the loss scale are those of the section `optimizer`.
    """

    fp32: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: Any = None
    pipeline_dtype: Any = None
    autocast_dtype: Any = None
    autocast_enabled: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: str | None = None
    fp8_recipe: str = "tensorwise"
    first_last_layers_bf16: bool = False
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | None = None
    fp8_param_gather: bool = False
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    loss_scale: float | None = None
    initial_loss_scale: float | None = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    reuse_grad_buf_for_mxfp8_param_ag: bool = False

    @property
    def name(self) -> str | None:
        """The value of `mixed_precision`.

        Raises:
            ConfigError: for 8-bit or 4-bit floating point, or two precisions at once.
        """
        if self.fp8 is not None or self.fp4 is not None:
            raise ConfigError(f"mixed_precision: fp8={self.fp8!r}, fp4={self.fp4!r}: {EIGHT_BITS}.")
        if self.bf16 and self.fp16:
            raise ConfigError("mixed_precision: bf16 and fp16 exclude each other; set one of them.")
        return "bf16_mixed" if self.bf16 else "fp16_mixed" if self.fp16 else None


def bf16_mixed() -> MixedPrecisionConfig:
    """bfloat16: `mixed_precision=bf16_mixed`."""
    return MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=True)


def fp16_mixed() -> MixedPrecisionConfig:
    """float16 with a loss scale: `mixed_precision=fp16_mixed`."""
    return MixedPrecisionConfig(fp16=True)


def get_mixed_precision_config(name: str | MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The object for a name, `bf16_mixed` or `fp16_mixed`; an object as it is.

    Raises:
        ConfigError: for any other name.
    """
    known = {"bf16_mixed": bf16_mixed, "fp16_mixed": fp16_mixed, "16_mixed": fp16_mixed}
    if isinstance(name, MixedPrecisionConfig):
        return name
    asked = precision_of(name.replace("-", "_"))
    if asked not in known:
        raise ConfigError(f"mixed_precision={shown(name)} must be bf16_mixed or fp16_mixed.")
    return known[asked]()


@dataclass(kw_only=True)
class CommOverlapConfig:
    """How communication overlaps with computation in Megatron Bridge; accepted, without effect."""

    tp_comm_overlap: bool = False
    tp_comm_overlap_cfg: Any = None
    tp_comm_bootstrap_backend: str | None = "nccl"
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None
    data_parallel_size: int | None = None
    overlap_moe_expert_parallel_comm: bool | None = None
    delay_wgrad_compute: bool | None = None


_SCALING = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""The fields that `optimizer` has, too."""


def precision_of(value: Any) -> Any:
    """A value of `mixed_precision`: text as it is, an object, or a dictionary that stands for one, as an object.

    Raises:
        ConfigError: for 8-bit or 4-bit floating point, or a field that does not exist.
    """
    if isinstance(value, str) and any(bits in value for bits in ("fp8", "fp4", "mxfp")):
        raise ConfigError(f"mixed_precision={shown(value)}: {EIGHT_BITS}.")
    if not isinstance(value, Mapping) or TARGET not in value:
        return value
    given = {str(key): comparable(entry) for key, entry in value.items() if key != TARGET}
    unknown = [key for key in given if key not in MixedPrecisionConfig.__dataclass_fields__]
    if unknown:
        raise ConfigError(f"mixed_precision has no field {listed(unknown, 3)}; set mixed_precision=bf16_mixed.")
    return MixedPrecisionConfig(**given)


def loss_scaling(value: MixedPrecisionConfig) -> dict[str, Any]:
    """What an object says about the loss scale where that is not the default, by the keys of `optimizer`."""
    default = MixedPrecisionConfig()
    return {name: getattr(value, name) for name in _SCALING if getattr(value, name) != getattr(default, name)}
