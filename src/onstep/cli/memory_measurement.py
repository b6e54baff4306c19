"""Measures the memory of a training: builds its model, runs two steps on random tokens, and compares the estimate."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onstep.analysis.text_tables import table
from onstep.cli.measured_run import short_run, tiny
from onstep.config import ConfigContainer
from onstep.config.keys import typed_copy
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.shards import held_part
from onstep.events import Callback
from onstep.metrics.memory.estimate import MemoryEstimate
from onstep.training import pretrain
from onstep.training.profiling.live_memory import ACTIVATIONS, OF_WEIGHTS, LiveMemory
from onstep.training.setup.family_memory import memory_estimator

_MIB = 2**20
EXACT = (*OF_WEIGHTS, "masters", "gradients", "optimizer state")
"""The kinds that are counted from the tensors that the model and the optimizer hold."""


@dataclass
class Measurement:
    """What a training on this machine held, in bytes."""

    estimate: MemoryEstimate
    """For the device and the number of micro-batches of the measurement."""
    kinds: dict[str, int]
    """The most of each kind; of activations, what is kept when a backward pass begins."""
    total: int
    """The most that lived at once."""
    resident_before: int
    """Of the process, before the model is built."""
    resident_building: int
    """At most, while it is built."""
    resident_training: int
    """At most, in the two steps."""
    allocated: int | None
    """At most, by the allocator of CUDA; None on a CPU."""


def measure(config: ConfigContainer) -> Measurement:
    """Train the configured model for two steps on random tokens, in a directory that is deleted.

    Args:
        config: resolved. Of its data only the length of the sequences is used, and at most two micro-batches a step.

    Raises:
        ConfigError: for a model that cannot be written as pretrained weights, which LoRA starts from.
    """
    with TemporaryDirectory() as directory:
        short, meter = short_run(config, Path(directory)), _Meter()
        with redirect_stdout(StringIO()):  # what a run says about itself
            pretrain(short_run(tiny(config), Path(directory, "tiny")))  # which loads libraries and kernels
            before = _resident()
            pretrain(short, callbacks=[meter])
    assert meter.memory is not None
    device = "cpu" if meter.device.type == "cpu" else "cuda"
    estimate = memory_estimator(meter.config, device=device)(meter.config)
    assert estimate is not None
    found = {**meter.memory.most, **meter.held, ACTIVATIONS: meter.memory.kept[ACTIVATIONS]}
    kinds = {name: found.get(name, 0) for name in estimate.kinds}
    allocated = torch.cuda.max_memory_allocated(meter.device) if device == "cuda" else None
    return Measurement(
        estimate, kinds, meter.memory.peak.total(), before, meter.resident_building, meter.resident_training, allocated
    )


def report(measured: Measurement) -> str:
    """The table of estimate and measurement by kind, and the lines about the process."""
    estimate = {**measured.estimate.kinds, "total": measured.estimate.total}
    found = {**measured.kinds, "total": measured.total}
    rows = [("", "ESTIMATE", "MEASURED", "MEASURED/ESTIMATE")]
    for name, size in estimate.items():
        if size or found[name]:
            ratio = f"{found[name] / size:.4f}" if size else "-"
            rows.append((name, f"{size / _MIB:,.1f} MiB", f"{found[name] / _MIB:,.1f} MiB", ratio))
    lines = table(rows, "<>>>", indent="")
    if measured.allocated is not None:
        share = measured.allocated / measured.estimate.total
        lines.append(f"\nCUDA's allocator: at most {measured.allocated / _MIB:,.1f} MiB, {share:.3f} of the estimate.")
        return "\n".join(lines)
    grown = measured.resident_training - measured.resident_before
    lines.append(
        f"\nResident memory of the process: {measured.resident_before / _MIB:,.1f} MiB before the model, at most "
        f"{measured.resident_building / _MIB:,.1f} MiB while it is built and {measured.resident_training / _MIB:,.1f} "
        f"MiB in training, which is {grown / measured.estimate.total:.3f} of the estimate more than before."
    )
    return "\n".join(lines)


class _Meter(Callback):
    """Counts the tensors of a run."""

    def __init__(self) -> None:
        self.memory: LiveMemory | None = None
        self.held: dict[str, int] = {}
        self.resident_building = self.resident_training = 0
        self.device, self.config = torch.device("cpu"), ConfigContainer()

    def on_train_start(self, context: Any) -> None:
        """Begin to count, with the weights that there are."""
        model: nn.Module = context.model[0]
        self.config = typed_copy(context.state.cfg)
        self.device = next(model.parameters()).device
        self.memory = LiveMemory(self.config.model.vocab_size or 0)
        for param in model.parameters():
            if param.requires_grad:
                hook: Any = param.register_post_accumulate_grad_hook
                hook(self._count_gradient)
        self.memory.assign("buffers", model.buffers())
        self._count_weights(model)
        self.resident_building = _peak_resident()
        _restart_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.memory.__enter__()  # type: ignore[no-untyped-call]

    def on_forward_backward_start(self, context: Any) -> None:
        """What is made from now on is kept for the backward pass."""
        assert self.memory is not None
        self.memory.is_forward = True

    def on_forward_backward_end(self, context: Any) -> None:
        """Nothing is kept any more."""
        assert self.memory is not None
        self.memory.is_forward = False

    def on_train_step_end(self, context: Any) -> None:
        """Count what exists between steps, and the gradients."""
        assert self.memory is not None
        self._count_weights(context.model[0])
        self._count_state(context.optimizer)
        self.held["gradients"] = sum(grad.nbytes for grad in _gradients(context.model[0]))
        if masters := [held_part(one) for chunk in buffered_chunks(context.model) for one in chunk.masters.values()]:
            self.held["masters"] = _storage_bytes(masters)
            self.memory.assign("masters", masters)

    def on_train_end(self, context: Any) -> None:
        """End the count."""
        assert self.memory is not None
        self.memory.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.resident_training = _peak_resident()

    def _count_weights(self, model: nn.Module) -> None:
        assert self.memory is not None
        for kind, is_trained in zip(OF_WEIGHTS, (True, False), strict=True):
            params = [param for param in model.parameters() if param.requires_grad is is_trained]
            tensors = list(_with_scales(params, model))
            self.held[kind] = _storage_bytes(tensors)
            self.memory.assign(kind, tensors)

    def _count_state(self, optimizer: Any) -> None:
        assert self.memory is not None
        state = optimizer.state_dict()["state"].values()
        for kind, is_master in (("masters", True), ("optimizer state", False)):
            named = [pair for one in state for pair in one.items() if (pair[0] == "remainder") is is_master]
            tensors = [one for _, value in named for one in tree_leaves(value) if isinstance(one, Tensor)]
            tensors = [one for one in tensors if one.numel() > 1]  # without the numbers of steps
            self.held[kind] = _storage_bytes(tensors)
            self.memory.assign(kind, tensors)

    def _count_gradient(self, param: Tensor) -> None:
        assert self.memory is not None
        assert param.grad is not None
        self.memory.assign("gradients", [param.grad])


def _gradients(model: nn.Module) -> list[Tensor]:
    """Gradients, and where ranks divide the updates the buffers of gradients and of their sums."""
    if chunks := buffered_chunks([model]):
        members = [one for chunk in chunks for one in chunk.members]
        return [part for one in members for part in (one.gradient, held_part(one.shard_gradient))]
    return [param.grad for param in model.parameters() if param.grad is not None]


def _with_scales(params: list[nn.Parameter], model: nn.Module) -> Iterator[Tensor]:
    """Weights, and the scales and tables of quantized ones."""
    for param in params:
        yield param.data
        quantization = getattr(param, "quant_state", None)
        while quantization is not None:
            yield from (value for value in vars(quantization).values() if isinstance(value, Tensor))
            quantization = quantization.state2
        if isinstance(scales := getattr(param, "SCB", None), Tensor):
            yield scales
    if any(param.dtype == torch.int8 for param in params):
        for module in model.modules():
            scales = getattr(getattr(module, "state", None), "SCB", None)
            if isinstance(scales, Tensor):
                yield scales


def _storage_bytes(tensors: list[Tensor]) -> int:
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _resident() -> int:
    """Bytes of this process in memory."""
    return _status("VmRSS")


def _peak_resident() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    """A value of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _restart_peak() -> None:
    """Let `_peak_resident` count from now on, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
