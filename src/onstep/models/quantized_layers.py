"""Linear layers in 4 or 8 bits by `bitsandbytes`: a frozen base for LoRA, its state in checkpoints, and its floats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from onstep.errors import MissingExtraError
from onstep.models.deferred import applied, value_of

THRESHOLD = 6.0
"""Inputs above this are multiplied in float16, not in int8: the default of LLM.int8() and of transformers."""

_STATE_4BIT = ".weight.quant_state.bitsandbytes__nf4"
_SCALES_8BIT = ".SCB"


def check_installed(kind: str) -> None:
    """Refuse (MissingExtraError) a quantization whose package is not installed."""
    if find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"peft.base_quantization={kind} requires the package bitsandbytes, which is not installed: "
            f"pip install 'onstep[quantization]'"
        )


def quantized_linear(
    weight: Tensor, bias: Tensor | None, kind: str, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A frozen linear layer of `bitsandbytes` with this weight, (out, in) in floating point on the CPU.

    `nf4` is `Linear4bit` with quantized scales, as in the paper; `int8` is `Linear8bitLt`.

    Source: Dettmers et al., "QLoRA" (2023), sections 3; "LLM.int8()" (2022), section 3.

    Args:
        kind: `nf4` or `int8`.
        dtype: what it computes in, and what 4 bits are expanded to.
        device: where the weight is quantized and stays.
    """
    layers = import_module("bitsandbytes").nn
    sizes = {"input_features": weight.shape[1], "output_features": weight.shape[0], "bias": bias is not None}
    if kind == "nf4":
        layer = layers.Linear4bit(**sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
        four_bits = layers.Params4bit(
            weight.to(dtype), requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
        )
        layer.weight = four_bits.to(device)
    else:
        layer = layers.Linear8bitLt(**sizes, has_fp16_weights=False, threshold=THRESHOLD, device="meta")
        layer.weight = layers.Int8Params(weight.to(dtype), requires_grad=False, has_fp16_weights=False).to(device)
    if bias is not None:
        # a copy: a view would keep the whole file of weights mapped
        layer.bias = nn.Parameter(bias.to(device, copy=True), requires_grad=False)
    prepare(layer, dtype)
    linear: nn.Module = layer
    return linear


def quantization_config(kind: str, dtype: torch.dtype, kept: list[str]) -> Any:
    """The same layers for `transformers`' `from_pretrained`.

    Args:
        kept: the names of linear layers that stay as they are.
    """
    config = import_module("transformers").BitsAndBytesConfig
    if kind == "int8":
        return config(load_in_8bit=True, llm_int8_threshold=THRESHOLD, llm_int8_skip_modules=kept)
    return config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weights of a linear layer are integers."""
    return not layer.get_parameter("weight").is_floating_point()


def prepare(layer: Any, dtype: torch.dtype) -> None:
    """Let a layer of `bitsandbytes` compute in `dtype` alone, the same in training and in evaluations, and load states.

    Layers of `bitsandbytes` load a state only as long as they are new.
    """
    # an evaluation on a CPU would repack 4 bits, and the next step of training would read them so
    layer.support_avx512bf16_for_cpu = False
    if layer.bias is not None:
        layer.bias.data = layer.bias.data.to(dtype)
    layer.register_forward_pre_hook(_CastInput(dtype))
    register: Any = layer.register_load_state_dict_pre_hook
    register(_load_4bit if hasattr(layer.weight, "quant_type") else _load_8bit)


class _CastInput:
    """Casts the input of a layer: its output and its bias get the input's type, which autocast does not choose."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0].to(self._dtype), *args[1:])


def _load_4bit(layer: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    inner = f"{prefix}weight."
    given = {name.removeprefix(inner): state.pop(name) for name in [name for name in state if name.startswith(inner)]}
    if given:
        kind = import_module("bitsandbytes").functional.QuantState
        layer.weight.quant_state = layer.quant_state = kind.from_dict(given, device=layer.weight.device)


def _load_8bit(layer: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    scales = state.pop(f"{prefix}SCB", None)
    if scales is not None:
        own = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB  # where it is after a forward pass
        own.copy_(scales)


def dequantized(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model with the floating-point weights of its quantized layers, under the plain names.

    They are float32. Four bits are expanded to the type that the layer computes in first, as in a forward pass.

    Raises:
        MissingExtraError: if `bitsandbytes` is not installed.
    """
    four = [name.removesuffix(_STATE_4BIT) for name in state if name.endswith(_STATE_4BIT)]
    eight = [name.removesuffix(_SCALES_8BIT) for name in state if name.endswith(_SCALES_8BIT)]
    if not four and not eight:
        return dict(state)
    check_installed("nf4" if four else "int8")
    functional, found = import_module("bitsandbytes").functional, dict(state)
    for name in four:
        inner = f"{name}.weight."
        parts = {
            one.removeprefix(inner): value_of(found.pop(one)) for one in [one for one in found if one.startswith(inner)]
        }
        quantization = functional.QuantState.from_dict(parts, device=found[f"{name}.weight"].device)
        expand = partial(_expanded, functional, quantization)
        found[f"{name}.weight"] = applied(expand, found[f"{name}.weight"], quantization.shape, torch.float32)
    for name in eight:
        found.pop(f"{name}.weight_format", None)
        scales, weight = value_of(found.pop(f"{name}{_SCALES_8BIT}")), found[f"{name}.weight"]
        scale = partial(functional.int8_vectorwise_dequant, stats=scales)
        found[f"{name}.weight"] = applied(scale, weight, weight.shape, torch.float32)
    return found


def _expanded(functional: Any, quantization: Any, packed: Tensor) -> Tensor:
    expanded: Tensor = functional.dequantize_4bit(packed, quantization).float()
    return expanded


def num_weights(parameter: Tensor) -> int:
    """The number of weights that a parameter holds; two are in each byte of 4 bits."""
    quantization = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantization is None else quantization.shape.numel()
