"""Measures the memory of a training: builds its model, runs two steps on random tokens, and compares the estimate."""

from __future__ import annotations

import json
import random
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
from onstep.config import CheckpointConfig, ConfigContainer, DatasetConfig, ModelConfig
from onstep.config.keys import typed_copy
from onstep.errors import ConfigError
from onstep.events import Callback
from onstep.metrics.memory.estimate import MemoryEstimate, accumulates
from onstep.models import Transformer, hf_config_dict
from onstep.models.hf.directory import architecture_of
from onstep.models.hf.weight_files import MAX_SHARD_BYTES, write_weights
from onstep.training import pretrain
from onstep.training.profiling.live_memory import ACTIVATIONS, OF_WEIGHTS, LiveMemory
from onstep.training.setup.family_memory import estimate_memory

STEPS = 2
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
        short, meter = _short_run(config, Path(directory)), _Meter()
        with redirect_stdout(StringIO()):  # what a run says about itself
            pretrain(_short_run(_tiny(config), Path(directory, "tiny")))  # which loads libraries and kernels
            before = _resident()
            pretrain(short, callbacks=[meter])
    assert meter.memory is not None
    device = "cpu" if meter.device.type == "cpu" else "cuda"
    estimate = estimate_memory(meter.config, device=device)
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
        params = [param.grad for param in context.model[0].parameters() if param.grad is not None]
        self.held["gradients"] = sum(grad.nbytes for grad in params)

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


def _short_run(config: ConfigContainer, directory: Path) -> ConfigContainer:
    """A run of two steps with the model, the batch, the precision and the optimizer of `config`."""
    short, train = ConfigContainer(), config.train
    own = typed_copy(config)
    short.model, short.optimizer, short.peft, short.dist = own.model, own.optimizer, own.peft, own.dist
    short.mixed_precision = own.mixed_precision
    short.run.default_callbacks, short.run.check_memory = False, False
    short.logger.console = "quiet"
    micro = train.micro_batch_size or 1
    short.train.micro_batch_size = micro
    short.train.global_batch_size = micro * (2 if accumulates(config, 1) else 1)
    short.train.train_iters, short.train.tf32 = STEPS, train.tf32
    short.train.deterministic, short.train.torch_compile = train.deterministic, train.torch_compile
    short.scheduler.lr_decay_style, short.optimizer.min_lr = "constant", None
    short.optimizer.decoupled_min_lr, short.optimizer.lr = None, config.optimizer.lr or 1e-4
    short.validation.eval_iters = 0
    directory.mkdir(exist_ok=True)
    text = directory / "text.txt"
    length = STEPS * short.train.global_batch_size * config.model.seq_length + 1
    text.write_bytes(bytes(random.Random(0).choices(b"abcdefghijklmnopqrstuvwxyz \n", k=length)))
    short.dataset = DatasetConfig(
        paths=[str(text)], seq_length=config.model.seq_length, cache_dir=str(directory / "tokens"), split="1,0,0"
    )
    short.checkpoint = CheckpointConfig()
    if config.peft.peft_scheme is not None:
        given = config.checkpoint.pretrained_checkpoint
        if (given is None or not Path(given).exists()) and config.model.hf_config is not None:
            raise ConfigError("LoRA starts from weights: pass --hf-model a directory that has them (*.safetensors).")
        if given is None or not Path(given).exists():
            given = str(_write_weights(config, directory / "weights"))
        short.checkpoint.pretrained_checkpoint, short.checkpoint.finetune = given, True
    return short


def _tiny(config: ConfigContainer) -> ConfigContainer:
    """The same with a model of no size to speak of."""
    tiny = typed_copy(config)
    tiny.model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=512, seq_length=64)
    tiny.checkpoint.pretrained_checkpoint = None
    return tiny


def _write_weights(config: ConfigContainer, directory: Path) -> Path:
    """Weights of 0 in bfloat16, which LoRA starts from; no page of memory is used for them."""
    with torch.device("meta"):
        model = Transformer(config.model)
    shapes = architecture_of(config.model).to_hf(model.state_dict())
    directory.mkdir()
    tensors = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in shapes.items()}
    write_weights(tensors, directory, MAX_SHARD_BYTES)
    (directory / "config.json").write_text(json.dumps(hf_config_dict(config.model, dtype="bfloat16")))
    return directory


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
