"""Estimates the memory of training a model of `transformers`, by training it on tensors without content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

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
from onstep.training.setup.repeated_layers import repeated_layers
from onstep.training.setup.weight_types import set_weight_types

_ON_HOST = "on the host"


def memory_estimator(
    config: ConfigContainer, *, device: str | None = None, ranks: int = 1
) -> Callable[[ConfigContainer], MemoryEstimate | None]:
    """What estimates a configuration and its variants: by a formula, or for a model of `transformers` by traces."""
    if config.model.hf_config is None:
        return partial(estimate_training_memory, device=device, ranks=ranks)
    return TracedMemory(ranks)


class TracedMemory:
    """Estimates configurations of a model that is built from its configuration, and remembers what they share.

    The model is built, and runs forward and backward on one micro-batch, with torch's fake tensors: they have shapes
    and types, so that all operations are known, but no memory. Operations are those of a CPU, also for a GPU, whose
    kernels keep no more. Of layers that are alike, the first few are traced; each of the others adds as much.

    Args:
        ranks: number of data-parallel ranks that share a global batch.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._traces: dict[str, _Trace] = {}

    def __call__(self, config: ConfigContainer) -> MemoryEstimate:
        """The estimate of one configuration.

        Raises:
            ConfigError: for a model that cannot be built.
        """
        key = _traced_settings(config)
        if key not in self._traces:
            self._traces[key] = _trace_whole(config)
        trace = self._traces[key]
        kept, on_host, num_layers = trace.kept[ACTIVATIONS], trace.kept[_ON_HOST], trace.num_layers
        if not config.model.offload_activations:
            kept, on_host = kept + on_host, 0
        of_layer = on_host // num_layers  # what is computed again for it is temporary
        most = trace.most
        needs = MicroBatch(
            kept, of_layer, most[LOGITS], most[COPIES], trace.kept[COPIES], most[TEMPORARY], on_host=on_host
        )
        of_depth = replace(config, model=replace(config.model, num_layers=num_layers))
        return estimate_of(of_depth, trace.counts, Storage.of(config), needs, self._ranks)


@dataclass
class _Trace:
    """What forward and backward pass need."""

    counts: WeightCounts
    num_layers: int
    kept: Counter[str]
    most: Counter[str]


def _traced_settings(config: ConfigContainer) -> str:
    """What the operations of a step, and the types and shapes of their tensors, follow from."""
    model = replace(config.model, offload_activations=False)
    peft = replace(config.peft, base_quantization=None)
    train = config.train.micro_batch_size
    return repr((model, peft, config.mixed_precision, config.optimizer.params_dtype, train))


def _trace_whole(config: ConfigContainer) -> _Trace:
    """The trace of the whole model, or what the traces of its first layers say about it."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # seconds to import

    model, counts = _built(config)
    found = repeated_layers(model)
    if found is None:
        layers = getattr(model.model.config.get_text_config(), "num_hidden_layers", None)
        with FakeTensorMode():
            _place_on_cpu(model)
            return _Trace(counts, layers or 1, *_run(model, config))
    runs: dict[int, tuple[Counter[str], Counter[str]]] = {}
    with FakeTensorMode():
        for length in sorted(found.lengths, reverse=True):
            found.cut(model, length)
            if not runs:
                _place_on_cpu(model)
            runs[length] = _run(model, config)
    kept, most = Counter(runs[found.last][0]), Counter(runs[found.last][1])
    for index in range(found.last, len(found.layers)):
        like = found.example(index)
        for total, place in ((kept, 0), (most, 1)):
            for kind in (ACTIVATIONS, _ON_HOST, COPIES):
                total[kind] += runs[like + 1][place][kind] - runs[like][place][kind]
    return _Trace(counts, len(found.layers), kept, most)


def _built(config: ConfigContainer) -> tuple[Any, WeightCounts]:
    """The model without memory, and its weights in numbers."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model: Any = empty_model(config.model)
        matrices = [one for one in model.modules() if isinstance(one, nn.Linear)]
        base = list(model.parameters())
        if config.peft.peft_scheme is not None:
            add_lora(model, config.peft, config.rng.seed)
        set_weight_types([model], config)
    model.config.offload_activations = False  # the hooks of its own would hide those that count
    return model, _counts(model, base, matrices)


def _run(model: Any, config: ConfigContainer) -> tuple[Counter[str], Counter[str]]:
    """What a forward pass keeps by kind, and the most bytes of each kind."""
    is_mixed = config.mixed_precision is not None
    dtype = torch.float16 if config.mixed_precision == "fp16_mixed" else torch.bfloat16
    shape = (config.train.micro_batch_size or 1, config.model.seq_length)
    meter = _LiveMemory(config.model.vocab_size or 0)
    for kind, is_trained in zip(OF_WEIGHTS, (True, False), strict=True):
        meter.assign(kind, [one.data for one in model.parameters() if one.requires_grad is is_trained])
    tokens = torch.zeros(shape, dtype=torch.int64)
    meter.assign("data", [tokens, *model.buffers()])
    trained: list[Any] = [param for param in model.parameters() if param.requires_grad]
    hooks = [
        param.register_post_accumulate_grad_hook(lambda param: meter.assign("gradients", _gradient(param)))
        for param in trained
    ]
    with meter:
        meter.is_forward = True
        with _documents_not_sought(), _offloading(meter), torch.autocast("cpu", dtype, enabled=is_mixed):
            loss = model(tokens, labels=tokens, reduction="sum")
        loss.backward()
    for hook, param in zip(hooks, trained, strict=True):
        hook.remove()
        param.grad = None
    return Counter(meter.kept), Counter(meter.most)


class _LiveMemory(LiveMemory):  # type: ignore[no-untyped-call]
    """Also runs products of experts in float32, which fake tensors know in bfloat16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count what it has created."""
        is_wide = func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float32
        return super().__torch_dispatch__(_float32_product if is_wide else func, types, args, kwargs)


def _float32_product(one: torch.Tensor, other: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    product = torch.ops.aten._grouped_mm.default(one.bfloat16(), other.bfloat16(), *rest, **keywords)
    return cast(torch.Tensor, product.float())


def _offloading(meter: LiveMemory) -> saved_tensors_hooks:
    """Context that counts by itself what `model.offload_activations` would move to the host."""

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
        embedding=(embedding.shape[0], embedding.shape[1]),
    )
