"""Estimates the memory of training a model of `transformers`, by training it on tensors without content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from onstep.config import ConfigContainer
from onstep.metrics.memory.activations import MicroBatch
from onstep.metrics.memory.counts import WeightCounts
from onstep.metrics.memory.estimate import MemoryEstimate, estimate_of, estimate_training_memory
from onstep.metrics.memory.storage import Storage
from onstep.models.hf.any_directory import empty_model
from onstep.models.offloading import LEAST_BYTES
from onstep.training.profiling.live_memory import ACTIVATIONS, COPIES, LOGITS, OF_WEIGHTS, TEMPORARY, LiveMemory
from onstep.training.setup.lora import add_lora
from onstep.training.setup.weight_types import set_weight_types

_ON_HOST = "on the host"


def estimate_memory(config: ConfigContainer, *, device: str | None = None, ranks: int = 1) -> MemoryEstimate | None:
    """`estimate_training_memory`, also for a model of `transformers`: by a formula, else by `traced_memory`."""
    if config.model.hf_config is None:
        return estimate_training_memory(config, device=device, ranks=ranks)
    return traced_memory(config, ranks=ranks)


def traced_memory(config: ConfigContainer, *, ranks: int = 1) -> MemoryEstimate:
    """The estimate of any model that is built from its configuration.

    The model is built, and runs forward and backward on one micro-batch, with torch's fake tensors: they have shapes
    and types, so that all operations are known, but no memory. Operations are those of a CPU, also for a GPU, whose
    kernels keep no more.

    Raises:
        ConfigError: for a model that cannot be built.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import

    is_mixed = config.mixed_precision is not None
    dtype = torch.float16 if config.mixed_precision == "fp16_mixed" else torch.bfloat16
    shape = (config.train.micro_batch_size or 1, config.model.seq_length)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = empty_model(config.model)
        matrices = [one for one in model.modules() if isinstance(one, nn.Linear)]
        base = list(model.parameters())
        if config.peft.peft_scheme is not None:
            add_lora(model, config.peft, config.rng.seed)
        set_weight_types([model], config)
        counts, storage = _counts(model, base, matrices), Storage.of(config)
        model.config.offload_activations = False  # the hooks of its own would hide those that count
    with FakeTensorMode():
        _place_on_cpu(model)
        meter = LiveMemory(config.model.vocab_size or 0)
        for kind, is_trained in zip(OF_WEIGHTS, (True, False), strict=True):
            meter.assign(kind, [one.data for one in model.parameters() if one.requires_grad is is_trained])
        tokens = torch.zeros(shape, dtype=torch.int64)
        meter.assign("data", [tokens, *model.buffers()])
        for param in model.parameters():
            if param.requires_grad:
                hook: Any = param.register_post_accumulate_grad_hook
                hook(lambda param: meter.assign("gradients", _gradient(param)))
        with meter:
            meter.is_forward = True
            offloads = _offloading(meter) if config.model.offload_activations else nullcontext()
            with _documents_not_sought(), offloads, torch.autocast("cpu", dtype, enabled=is_mixed):
                loss = model(tokens, labels=tokens, reduction="sum")
            loss.backward()
    most, kept = meter.most, meter.kept
    on_host = kept[_ON_HOST]
    of_layer = on_host // config.model.num_layers  # what is computed again for it is temporary
    needs = MicroBatch(
        kept[ACTIVATIONS], of_layer, most[LOGITS], most[COPIES], kept[COPIES], most[TEMPORARY], on_host=on_host
    )
    return estimate_of(config, counts, storage, needs, ranks)


def _offloading(meter: LiveMemory) -> saved_tensors_hooks:
    """Context that counts as on the host what `model.offload_activations` moves there."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes >= LEAST_BYTES and meter.kind(tensor) == ACTIVATIONS:
            meter.assign(_ON_HOST, [tensor])
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


@contextmanager
def _documents_not_sought() -> Iterator[None]:
    """Context in which `transformers` does not look for packed documents in positions.

    It makes a mask of all pairs of positions whenever it cannot see that there are none, as with fake tensors, and
    offers no argument that says so.
    """
    from transformers import masking_utils

    found = getattr(masking_utils, "find_packed_sequence_indices", None)
    if found is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def _place_on_cpu(model: nn.Module) -> None:
    """Replace tensors on the meta device by tensors of the CPU without content; shared ones stay shared."""
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in placed:
                    empty = torch.empty(param.shape, dtype=param.dtype)
                    placed[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
                module._parameters[name] = placed[id(param)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                placed[id(buffer)] = module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _gradient(param: torch.Tensor) -> list[torch.Tensor]:
    return [] if param.grad is None else [param.grad]


def _counts(model: Any, base: Iterable[nn.Parameter], linear: list[nn.Linear]) -> WeightCounts:
    head = model.model.get_output_embeddings().weight
    embedding = model.model.get_input_embeddings().weight
    matrices = tuple((one.out_features, one.in_features) for one in linear if one.weight is not head)
    total = sum(param.numel() for param in base)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return WeightCounts(
        base=total,
        added=sum(param.numel() for param in model.parameters()) - total,
        matrices=matrices,
        muon=sum(rows * columns for rows, columns in matrices),
        cast=trained,
        head=(head.shape[0], head.shape[1]),
        ties_head=head is embedding,
    )
