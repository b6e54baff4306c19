"""Provides heads that predict values instead of tokens, and hooks that put them in place of a model's output layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import dropout as dropped
from torch.nn.functional import linear

from onstep.config import ModelConfig
from onstep.distributed.shards import gather_sequence
from onstep.errors import ConfigError
from onstep.models.multi_token_prediction import MultiTokenPrediction

logger = logging.getLogger(__name__)

ModelList = list[nn.Module]
"""The chunks of a model that a rank holds."""

ModelHook = Callable[[ModelList], ModelList | None]
"""Modifies the chunks of a model before they are wrapped for data parallelism; returns None if it works in place."""


def ensure_model_list(model: nn.Module | ModelList) -> ModelList:
    """The chunks as a list: a list is returned unchanged, anything else becomes its only element.

    Args:
        model: one chunk, or a list of chunks.
    """
    return model if isinstance(model, list) else [model]


_ensure_model_list = ensure_model_list


class LinearForLastLayer(nn.Linear):
    """A linear head replicated on every rank, with float32 outputs.

    Args:
        input_size: size of the hidden states.
        output_size: number of values per position.
        sequence_parallel: hidden states hold this rank's part of the sequence along dimension 0, (seq / ranks, batch,
            hidden); the values are gathered to (seq, batch, out). The parameters are marked `sequence_parallel`,
            because their gradients must be summed over the group.
        bias: whether to add a bias to each value.
        dropout: dropout probability of the hidden states in training.
        output_in_fp32: return float32; otherwise the dtype of the computation.
        tp_group: the tensor-parallel group over which the sequence is split; None means a group of one.
        init_method: fills the weight in place, and the bias is set to 0; None means `nn.Linear`'s initialization.
        perform_initialization: False leaves the parameters uninitialized, for a caller that fills them.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        sequence_parallel: bool,
        *,
        bias: bool = False,
        dropout: float = 0.0,
        output_in_fp32: bool = True,
        tp_group: ProcessGroup | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        perform_initialization: bool = True,
    ) -> None:
        if not 0 <= dropout < 1:
            raise ConfigError(f"the dropout of a head must be at least 0 and below 1, got {dropout}; use 0 for none.")
        _register_linear_for_last_layer_mapping()
        # read by reset_parameters, which nn.Linear's constructor calls
        self._init_method = init_method
        self._initializes = perform_initialization
        self.sequence_parallel = sequence_parallel
        super().__init__(input_size, output_size, bias=bias)
        self.dropout = dropout
        self.output_in_fp32 = output_in_fp32
        self.tp_group = tp_group

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as configured at construction; also works after `to_empty`."""
        if self.sequence_parallel:
            for parameter in self.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
        if not self._initializes:
            return
        if self._init_method is None:
            super().reset_parameters()
            return
        with torch.no_grad():
            self._init_method(self.weight)
            if self.bias is not None:
                self.bias.zero_()

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The values (..., out) of hidden states (..., hidden), and None. Collective if the sequence is split.

        Args:
            input_: hidden states; if the sequence is split over ranks, this rank's part of dimension 0.
            weight: accepted for compatibility with a language model's output layer; ignored.
            runtime_gather_output: likewise.
        """
        values = linear(dropped(input_, self.dropout, self.training), self.weight, self.bias)
        if self.output_in_fp32:
            values = values.float()
        return (gather_sequence(values, self.tp_group) if self.sequence_parallel else values), None


def create_value_head_hook(hidden_size: int, sequence_parallel: bool, output_size: int = 1) -> ModelHook:
    """A hook that replaces the output layer of the last pipeline stage by a new `LinearForLastLayer`.

    The hook accepts a chunk or a list of chunks, modifies it in place before it is wrapped for data parallelism, and
    returns the list (the same object). The chunk's multi-token prediction is removed with its output layer, since no
    further tokens are predicted. Chunks of other stages are left unchanged. The head is created on the default
    device with the default dtype; move the model afterwards. Its tensor-parallel group is the chunk's
    `pg_collection.tp`, if it has one.

    Args:
        hidden_size: hidden size of the model.
        sequence_parallel: whether the model's hidden states are split along the sequence.
        output_size: number of values per position.

    Raises:
        ValueError: from the hook, if it cannot determine which of several chunks is the last stage's.
        ConfigError: from the hook, for a model without an `output_layer` or with a different width.
    """
    _register_linear_for_last_layer_mapping()

    def put_value_head(model: nn.Module | ModelList) -> ModelList:
        chunks = ensure_model_list(model)
        marks = [getattr(chunk, "post_process", None) for chunk in chunks]
        flags = [mark for mark in marks if isinstance(mark, bool)] or [True]  # a single stage if unspecified
        if len(flags) != len(chunks):
            raise ValueError(
                f"post_process is a bool in {sum(isinstance(mark, bool) for mark in marks)} of the model's "
                f"{len(chunks)} chunks; give each chunk one that says whether it ends in the output layer."
            )
        for chunk, is_final in zip(chunks, flags, strict=True):
            if is_final:
                _replace_output_layer(chunk, hidden_size, output_size, sequence_parallel)
        return chunks

    return put_value_head


def make_value_model(hidden_size: int, sequence_parallel: bool) -> ModelHook:
    """`create_value_head_hook` with one value per position.

    Args:
        hidden_size: width of the hidden states.
        sequence_parallel: whether the sequence is split over tensor-parallel ranks.
    """
    return create_value_head_hook(hidden_size, sequence_parallel)


def _replace_output_layer(chunk: nn.Module, hidden_size: int, output_size: int, sequence_parallel: bool) -> None:
    if not hasattr(chunk, "output_layer"):
        raise ConfigError(
            f"{type(chunk).__name__} has no output_layer for a value head to replace; pass a Transformer, or a chunk "
            "with the output layer under that name."
        )
    width = getattr(getattr(chunk, "config", None), "hidden_size", None)
    width = width if isinstance(width, int) else getattr(chunk.output_layer, "in_features", None)
    if width is not None and width != hidden_size:
        raise ConfigError(
            f"a value head for hidden_size={hidden_size} does not fit {type(chunk).__name__}, which has hidden size "
            f"{width}; create the hook with hidden_size={width}."
        )
    _leave_out_prediction(chunk)
    group = getattr(getattr(chunk, "pg_collection", None), "tp", None)
    head = LinearForLastLayer(hidden_size, output_size, sequence_parallel, tp_group=group)
    chunk.output_layer = head


def _leave_out_prediction(chunk: nn.Module) -> None:
    """Remove multi-token prediction: a value head has no such losses, so its depths would never get a gradient."""
    if not isinstance(getattr(chunk, "mtp", None), MultiTokenPrediction):
        return
    logger.info("the value head also replaces the model's multi-token prediction; its depths are removed")
    chunk.register_module("mtp", None)
    config = chunk.config
    if isinstance(config, ModelConfig):
        config.mtp_num_layers, config.mtp_loss_scaling_factor = None, ModelConfig().mtp_loss_scaling_factor


_LAYER_TYPES: dict[str, str] = {}
"""How checkpoint conversions treat layers, by class name."""


def _register_linear_for_last_layer_mapping() -> None:
    """Register `LinearForLastLayer` with conversions as replicated and without a name in `transformers`."""
    _LAYER_TYPES[LinearForLastLayer.__name__] = "replicated"


def replicated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model`, by name, that have no counterpart in other libraries' language models."""
    found = model.named_modules()
    return {name: module for name, module in found if _LAYER_TYPES.get(type(module).__name__) == "replicated"}
