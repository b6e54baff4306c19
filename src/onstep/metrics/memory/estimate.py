"""Estimates the memory that training needs on each device from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onstep.config.pipelines import layers_of_stages, schedule_of, stages_of_rank, stages_per_rank
from onstep.metrics.memory.activations import MicroBatch, micro_batch
from onstep.metrics.memory.counts import WeightCounts
from onstep.metrics.memory.storage import Storage, optimizer_bytes, update_bytes
from onstep.metrics.model_shape import ModelShape

_MIB = 1024**2
_OF_TOKEN = 8 + 1
"""Bytes of a token's row of a divided embedding, and of whether it is another rank's."""
_SUMS_AT_ONCE = 4
"""Buckets that are summed at once after a backward pass: see `distributed/buffered.py`."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes on one device, each kind at its most."""

    num_parameters: int
    """Number of parameters, including those added by LoRA."""
    num_trainable: int
    """Number of trainable ones: with LoRA those that it adds, else all."""
    trained_weights: int
    """Bytes of the weights that are trained."""
    frozen_weights: int
    """Bytes of the weights that are not."""
    masters: int
    """What the optimizer keeps of the values of 16-bit weights: their float32 values, or what rounding would lose."""
    gradients: int
    """Gradients of trainable parameters."""
    optimizer: int
    """Optimizer state of trainable parameters."""
    weight_copies: int
    """The 16-bit copies of matrices that autocast creates for a forward and backward pass."""
    activations: int
    """Activations of one micro-batch (of one sample, if its size is not set) that are kept for its backward pass."""
    logits: int
    """Logits, and what the loss makes of them."""
    temporary: int
    """What the backward pass of a layer makes and frees, and what it computes again."""
    total: int
    """The most that exists at once. It may be less than the sum: gradients are made as activations are freed."""
    on_host: int = 0
    """Of the memory of the host, what `model.offload_activations` keeps of the activations there, at least; in no kind
    and not in the total."""

    @property
    def weights(self) -> int:
        """Weights, trained and frozen."""
        return self.trained_weights + self.frozen_weights

    @property
    def held(self) -> int:
        """What exists between steps: weights, masters and optimizer state."""
        return self.weights + self.masters + self.optimizer

    @property
    def weights_and_optimizer(self) -> int:
        """Weights, masters, gradients and optimizer state."""
        return self.held + self.gradients

    @property
    def kinds(self) -> dict[str, int]:
        """The bytes of each kind, by the names of the table."""
        return {
            "weights, trained": self.trained_weights,
            "weights, frozen": self.frozen_weights,
            "masters": self.masters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "16-bit copies": self.weight_copies,
            "activations": self.activations,
            "logits and loss": self.logits,
            "temporary": self.temporary,
        }


def estimate_training_memory(cfg: Any, *, device: str | None = None, ranks: int = 1) -> MemoryEstimate | None:
    """Memory needed per device to train with a `ConfigContainer`; None for a model without a known formula.

    Weights, gradients and optimizer state are exact, in the precision that the configuration gives each of them, and
    divided by `parallel.data_parallel_shard_size`; beside its shards, a rank holds the layers that it has gathered. Of
    tensor-parallel ranks, it is the first one's; of those of a pipeline, of the one that requires most. With
    `ddp.use_distributed_optimizer`, masters and state are divided, and gradients are whole, beside their sums.
    Activations assume attention that stores no scores. Buffers of data parallelism, memory fragmentation and the
    kernels' workspace come on top.

    Args:
        device: cpu or cuda, whose kernels keep different tensors; None is that of the configuration, else cuda.
        ranks: number of data-parallel ranks that share a global batch.
        cfg: the configuration of the run.
    """
    shape = ModelShape.of(cfg.model)
    if shape is None:
        return None
    whole = WeightCounts.of(shape, getattr(cfg, "peft", None))
    found = max(rank_estimates(cfg, device=device, ranks=ranks), key=lambda one: one.total)
    return replace(found, num_parameters=whole.total, num_trainable=whole.trained)


def rank_estimates(cfg: Any, *, device: str | None = None, ranks: int = 1) -> list[MemoryEstimate]:
    """The estimate of each rank of a pipeline, whose parameters are its own; one without a pipeline.

    Those of their activations are for stages of equal sizes, and of schedules with gradients of inputs and of weights
    apart from each other, they include what is freed between the two.

    Args:
        cfg: the configuration of the run, of a model with a known formula.
        device: as for `estimate_training_memory`.
        ranks: number of data-parallel ranks that share a global batch.
    """
    shape, storage, size = ModelShape.of(cfg.model), Storage.of(cfg, device), cfg.parallel.tensor_model_parallel_size
    assert shape is not None
    if size > 1:
        shape = shape.of_rank(size, divides_sequences=cfg.parallel.sequence_parallel)
    if cfg.parallel.pipeline_model_parallel_size > 1:
        return _of_stages(cfg, shape, storage, ranks)
    counts, needs = _needs_of(cfg, shape, storage)
    return [estimate_of(cfg, counts, storage, needs, ranks)]


def _of_stages(cfg: Any, shape: ModelShape, storage: Storage, ranks: int) -> list[MemoryEstimate]:
    layers, schedule = layers_of_stages(cfg.parallel, shape.num_layers), schedule_of(cfg.parallel)
    size, stages = cfg.parallel.pipeline_model_parallel_size, stages_per_rank(cfg.parallel)
    micro, batch = cfg.train.micro_batch_size or 1, cfg.train.global_batch_size
    count = batch // (micro * ranks) if batch else schedule.least(size)
    output = storage.residual * shape.hidden_size // shape.sequence_parts * shape.seq_length * micro
    found = []
    for rank in range(size):
        own = stages_of_rank(cfg.parallel, rank)
        ends = {"has_embedding": 0 in own, "has_head": len(layers) - 1 in own}
        of_rank = shape.of_stages([layer for stage in own for layer in layers[stage]], **ends)
        counts, needs = _needs_of(cfg, of_rank, storage)
        losses = (count if schedule.is_forward_first else 1) if of_rank.has_head else 0
        held = schedule.most_held(size, rank, count, stages) / stages
        needs = needs.in_pipeline(held, losses, outputs=(stages - 1) * output)
        found.append(estimate_of(cfg, counts, storage, needs, ranks))
    return found


def _needs_of(cfg: Any, shape: ModelShape, storage: Storage) -> tuple[WeightCounts, MicroBatch]:
    """The weights of a rank, and the needs of a micro-batch."""
    counts = WeightCounts.of(shape, getattr(cfg, "peft", None))
    needs = micro_batch(shape, cfg, counts, storage)
    if cfg.parallel.tensor_model_parallel_size > 1 and not counts.added and shape.has_embedding:
        tokens = shape.seq_length * (cfg.train.micro_batch_size or 1)  # the embedding keeps which ones are its own
        needs = replace(needs, activations=needs.activations + _OF_TOKEN * tokens)
    return counts, needs


def estimate_of(cfg: Any, counts: WeightCounts, storage: Storage, needs: MicroBatch, ranks: int = 1) -> MemoryEstimate:
    """The estimate for weights of these numbers and a micro-batch with these needs."""
    shards = _shards(cfg, ranks)
    if shards > 1:
        needs = _gathering(cfg, counts, storage, needs)
    whole = storage.gradients * counts.trained
    gradients, trained, frozen = (
        -(-size // shards) for size in (whole, storage.trained * counts.trained, storage.frozen_bytes(counts))
    )
    divides, parts = _divides_updates(cfg, ranks), shards
    if divides:
        parts = max(1, ranks // cfg.ddp.num_distributed_optimizer_instances)
        gradients += -(-whole // parts)
    masters, optimizer = (
        -(-size // parts)
        for size in (storage.masters * counts.trained, optimizer_bytes(cfg.optimizer, counts, storage.state))
    )
    update = update_bytes(cfg.optimizer, counts, storage, parts)
    if divides:
        at_once = whole if cfg.ddp.overlap_grad_reduce else _SUMS_AT_ONCE * cfg.ddp.bucket_cap_mb * _MIB
        received = 0 if storage.summed == storage.gradients else 1 / parts  # a sum in its own type is there already
        of_each = storage.summed * (storage.summands + received)
        update = max(update, int(min(whole, at_once) / storage.gradients * of_each))
    return MemoryEstimate(
        num_parameters=counts.total,
        num_trainable=counts.trained,
        trained_weights=trained,
        frozen_weights=frozen,
        masters=masters,
        gradients=gradients,
        optimizer=optimizer,
        weight_copies=needs.copies,
        activations=needs.activations,
        logits=needs.logits,
        temporary=needs.temporary + _brought_back(cfg, needs),
        total=trained
        + frozen
        + masters
        + optimizer
        + _peak(cfg, counts, storage, needs, gradients, update, divides or accumulates(cfg, ranks)),
        on_host=needs.on_host,
    )


def checkpoint_bytes(cfg: Any) -> int | None:
    """Bytes of the tensors of a checkpoint, over all ranks; None for a model without a known formula.

    Args:
        cfg: the configuration of the run.
    """
    shape = ModelShape.of(cfg.model)
    if shape is None:
        return None
    counts, storage = WeightCounts.of(shape, getattr(cfg, "peft", None)), Storage.of(cfg, None)
    weights = storage.trained * counts.trained + storage.frozen_bytes(counts)
    return weights + storage.masters * counts.trained + optimizer_bytes(cfg.optimizer, counts, storage.state)


def _shards(cfg: Any, ranks: int) -> int:
    size, replicas = cfg.parallel.data_parallel_shard_size, max(1, cfg.parallel.data_parallel_replicate_size)
    return int(size if size > 0 else max(1, ranks // replicas))


def _gathering(cfg: Any, counts: WeightCounts, storage: Storage, needs: MicroBatch) -> MicroBatch:
    """The needs of a micro-batch whose weights are gathered: of two layers, or all, and of what is outside of them.

    A layer is gathered in the precision that it computes in, so that nothing else is cast, and its gradients are whole
    until they are summed.
    """
    outside = counts.in_ends
    layer, width = (counts.total - outside) / cfg.model.num_layers, 2 if cfg.mixed_precision else storage.trained
    gathered = 2 * layer if cfg.fsdp.reshard_after_forward else counts.total - outside
    held = width * (gathered + outside) + storage.gradients * max(layer, outside)
    return replace(needs, copies=0, copies_of_layer=0, temporary=needs.temporary + int(held))


def _brought_back(cfg: Any, needs: MicroBatch) -> int:
    """Bytes of what a layer kept, which its backward pass computes again or fetches from the host."""
    return needs.layer if cfg.model.recompute_granularity is not None or cfg.model.offload_activations else 0


def _divides_updates(cfg: Any, ranks: int) -> bool:
    """Whether ranks divide the updates of a whole model."""
    return bool(cfg.ddp.use_distributed_optimizer and (ranks > 1 or cfg.ddp.fp8_param_gather))


def _peak(
    cfg: Any, counts: WeightCounts, storage: Storage, needs: MicroBatch, gradients: int, update: int, has_earlier: bool
) -> int:
    """The most bytes that exist at once beside what is held between steps.

    Args:
        update: what exists during the sums over ranks and the update only.
        has_earlier: whether the gradients of an earlier micro-batch, or their buffers, exist.
    """
    head, ends = counts.in_head * storage.gradients, counts.in_ends * storage.gradients
    before = gradients if has_earlier else 0
    loss = before + needs.copies + needs.activations + needs.logits
    update += gradients
    of_layer = needs.copies_of_layer + needs.temporary
    last_layer = before + of_layer + needs.activations + _brought_back(cfg, needs)
    first_layer = of_layer + needs.layer
    if counts.added:
        return max(loss, last_layer, gradients + first_layer, update)
    all_later = gradients if has_earlier else (gradients - ends) * (1 - 1 / cfg.model.num_layers) + head
    embedding = counts.in_embedding * storage.gradients * (has_earlier + counts.ties_head)
    return int(
        max(loss, last_layer + (0 if has_earlier else head), all_later + first_layer, gradients + embedding, update)
    )


def accumulates(cfg: Any, ranks: int) -> bool:
    """Whether a step has several micro-batches on a rank, as far as the configuration says."""
    micro, batch = cfg.train.micro_batch_size, cfg.train.global_batch_size
    return bool(micro and batch and batch > micro * ranks)


def format_training_memory_estimate(estimate: MemoryEstimate) -> str:
    """Format the estimate as a table in MiB, one line per kind, omitting those that are 0.

    Args:
        estimate: what `estimate_training_memory` returned.
    """
    lines = [f"{'parameters':<16}{estimate.num_parameters:>16,d}"]
    if estimate.num_trainable != estimate.num_parameters:
        lines.append(f"{'trained':<16}{estimate.num_trainable:>16,d}")
    rows = {**estimate.kinds, "total": estimate.total}
    if estimate.on_host:
        rows["on the host"] = estimate.on_host
    return "\n".join([*lines, *(f"{name:<16}{size / _MIB:>12,.1f} MiB" for name, size in rows.items() if size)])


def report_theoretical_memory(cfg: Any) -> None:
    """Print Megatron Bridge's line about weights, gradients and optimizer; nothing if no formula is known.

    Args:
        cfg: the configuration of the run.
    """
    estimate = estimate_training_memory(cfg)
    if estimate is not None:
        line = f"Theoretical memory footprints: weight and optimizer={estimate.weights_and_optimizer / _MIB:.2f} MB"
        print(line, flush=True)  # noqa: T201 - printing is the function's purpose
