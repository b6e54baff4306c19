"""One function a loop: trains GPT-2 in bf16, compiled, for the clock's steps, each as its users write it.

All train the same model with autocast over float32 weights and fused AdamW, clip at 1 and follow a schedule. Rows that
log do so every 10 steps, as nanoGPT and torchtitan do; the others never read the device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from onstep import Callback, TrainerCallback, pretrain
from onstep import Trainer as OnstepTrainer
from onstep import TrainingArguments as OnstepArguments
from onstep.config import ConfigContainer, ModelConfig
from onstep.metrics.flops import num_floating_point_operations
from onstep.models import Transformer, build_transformer
from onstep.recipes import RECIPES
from plain_loop import cosine_lr, mean_loss, plain_adamw

LR, MIN_LR, WARMUP, DECAY, BETAS, CLIP, LOG_INTERVAL = 6e-4, 6e-5, 5, 0.1, (0.9, 0.95), 1.0, 10
NEVER = 1_000_000
PROFILED_STEPS = 10


@dataclass(frozen=True)
class Workload:
    """What every row trains."""

    config: ModelConfig
    micro_batch: int
    device: torch.device
    backend: str
    """Of `torch.compile`."""
    warmup: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batch * self.config.seq_length

    @property
    def flops(self) -> float:
        """Model FLOPs of a step."""
        return num_floating_point_operations(self.config, self.micro_batch)

    def model(self) -> Transformer:
        """A new model on the device."""
        return build_transformer(self.config, seed=1).to(self.device).train()

    def batches(self, *, pinned: bool) -> Iterator[dict[str, Tensor]]:
        """Batches on the host, as a loader makes them; eight in turn."""
        made = []
        generator, length = torch.Generator().manual_seed(0), self.config.seq_length
        for _ in range(8):
            size = (self.micro_batch, length + 1)
            rows = torch.randint(self.config.vocab_size or 0, size, generator=generator)
            batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
            pins = pinned and self.device.type == "cuda"
            made.append({name: one.pin_memory() if pins else one for name, one in batch.items()})
        while True:
            yield from made


class Clock:
    """Seconds of `steps` steps after `warmup`; with `profiled`, what the host waited for in them instead.

    The device is synchronized where the measured steps begin and where they end, nowhere else.
    """

    def __init__(self, workload: Workload, *, profiled: bool = False) -> None:
        self.first = workload.warmup
        self.steps = PROFILED_STEPS if profiled else workload.steps
        self.seconds = 0.0
        self.peak_bytes = 0
        self.profile: Any = None
        self._device, self._profiled, self._count, self._start = workload.device, profiled, 0, 0.0

    @property
    def run_steps(self) -> int:
        """Steps that a run must make."""
        return self.first + self.steps + 1

    def mark(self) -> None:
        """A step begins."""
        if self._count == self.first:
            self._synchronize()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            if self._profiled:
                self._start_profile()
            self._start = time.perf_counter()
        elif self._count == self.first + self.steps:
            if self._profiled:
                self.profile.stop()
            self._synchronize()
            self.seconds = (time.perf_counter() - self._start) / self.steps
            if self._device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._count += 1

    def _start_profile(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(activities=activities)
        self.profile.start()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


Row = Callable[[Workload, Clock, str], None]
"""Trains a new model for `clock.run_steps` steps and marks each; the text is an empty directory."""


def autocast(workload: Workload) -> torch.autocast:
    """bf16 for what is computed in it."""
    return torch.autocast(workload.device.type, dtype=torch.bfloat16)


def moved(batch: dict[str, Tensor], device: torch.device, *, non_blocking: bool) -> dict[str, Tensor]:
    """The batch on the device."""
    return {name: one.to(device, non_blocking=non_blocking) for name, one in batch.items()}


def rate_of(step: int, steps: int) -> float:
    """The schedule of all rows that compute it themselves."""
    return cosine_lr(step, lr=LR, min_lr=MIN_LR, warmup=WARMUP, steps=max(steps, WARMUP + 1))


def bare(workload: Workload, clock: Clock, directory: str) -> None:
    """The best plain loop: compiled, pinned batches, nothing is read from the device."""
    model, batches = workload.model(), workload.batches(pinned=True)
    model.compile(backend=workload.backend)
    optimizer, parameters = plain_adamw(model, LR, DECAY, BETAS), list(model.parameters())
    for step in range(clock.run_steps):
        clock.mark()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, clock.run_steps)
        batch = moved(next(batches), workload.device, non_blocking=True)
        optimizer.zero_grad()
        with autocast(workload):
            loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()


def nanogpt(workload: Workload, clock: Clock, directory: str) -> None:
    """nanoGPT's `train.py`: the next batch is fetched while the GPU works; a scaler that is off; a log every 10 steps.

    Source: https://github.com/karpathy/nanoGPT, train.py.
    """
    model, batches = workload.model(), workload.batches(pinned=True)
    model.compile(backend=workload.backend)
    optimizer, parameters = plain_adamw(model, LR, DECAY, BETAS), list(model.parameters())
    scaler = torch.amp.GradScaler(workload.device.type, enabled=False)
    batch = moved(next(batches), workload.device, non_blocking=True)
    for step in range(clock.run_steps):
        clock.mark()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, clock.run_steps)
        with autocast(workload):
            loss = mean_loss(model, batch)
        batch = moved(next(batches), workload.device, non_blocking=True)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_INTERVAL == 0:
            print(f"iter {step}: loss {loss.item():.4f}")


def torchtitan(workload: Workload, clock: Clock, directory: str) -> None:
    """torchtitan's style: blocks and loss compiled apart, garbage collected every 50 steps, a log every 10 steps.

    Batches come from pageable memory. Source: https://github.com/pytorch/torchtitan, train.py and its `parallelize`.
    """
    model, batches = workload.model(), workload.batches(pinned=False)
    for block in model.layers:
        block.compile(backend=workload.backend)
    loss_of = torch.compile(mean_of_logits, backend=workload.backend)
    optimizer, parameters = plain_adamw(model, LR, DECAY, BETAS), list(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: rate_of(step, clock.run_steps) / LR)
    gc.disable()
    try:
        for step in range(clock.run_steps):
            clock.mark()
            if step % 50 == 1:
                gc.collect(1)
            optimizer.zero_grad()
            batch = moved(next(batches), workload.device, non_blocking=False)
            with autocast(workload):
                logits = model(batch["tokens"])
                loss = loss_of(logits, batch["labels"])
            del logits
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
            optimizer.step()
            scheduler.step()
            if step % LOG_INTERVAL == 0:
                print(f"step {step}: loss {loss.item():.4f} grad_norm {norm.item():.4f}")
    finally:
        gc.enable()


def mean_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan's loss."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Marks(Callback):
    """Marks the steps of `pretrain`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_step_start(self, context: Any) -> None:
        """Mark."""
        self._clock.mark()


class TrainerMarks(TrainerCallback):
    """Marks the steps of `onstep.Trainer`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark."""
        self._clock.mark()


def onstep_pretrain(workload: Workload, clock: Clock, directory: str, *, log_interval: int = NEVER) -> None:
    """`onstep.pretrain` with the recipe's optimizer, on text."""
    config: ConfigContainer = RECIPES["gpt2_124m"]()
    config.model = workload.config
    config.dataset.seq_length = workload.config.seq_length
    train = config.train
    train.micro_batch_size = train.global_batch_size = workload.micro_batch
    train.train_iters, train.torch_compile, train.torch_compile_backend = clock.run_steps, True, workload.backend
    config.scheduler.lr_warmup_iters, config.mixed_precision = WARMUP, "bf16_mixed"
    config.validation.eval_interval, config.validation.eval_iters = None, 0
    config.logger.log_interval, config.dist.device = log_interval, str(workload.device)
    config.checkpoint.save_interval, config.run.save_weights, config.run.name = None, False, None
    pretrain(config, callbacks=[Marks(clock)])


def onstep_pretrain_logging(workload: Workload, clock: Clock, directory: str) -> None:
    """`onstep.pretrain` that logs every 10 steps."""
    onstep_pretrain(workload, clock, directory, log_interval=LOG_INTERVAL)


class WithLoss(nn.Module):
    """The model as a `Trainer` expects it."""

    def __init__(self, inner: Transformer) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean loss."""
        return {"loss": self.inner(input_ids, labels, reduction="sum") / labels.numel()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of random tokens in memory."""

    def __init__(self, workload: Workload, size: int) -> None:
        length, generator = workload.config.seq_length, torch.Generator().manual_seed(0)
        self._rows = torch.randint(workload.config.vocab_size or 0, (64, length + 1), generator=generator)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index % 64]
        return {"input_ids": row[:-1], "labels": row[1:]}


def arguments_of(workload: Workload, clock: Clock, directory: str, *, logs: bool) -> dict[str, Any]:
    """What both classes named `TrainingArguments` are given."""
    return {
        "output_dir": directory,
        "max_steps": clock.run_steps,
        "per_device_train_batch_size": workload.micro_batch,
        "learning_rate": LR,
        "warmup_steps": WARMUP,
        "weight_decay": DECAY,
        "lr_scheduler_type": "cosine",
        "bf16": True,
        "torch_compile": True,
        "torch_compile_backend": workload.backend,
        "optim": "adamw_torch_fused",
        "logging_strategy": "steps" if logs else "no",
        "logging_steps": LOG_INTERVAL,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": workload.device.type == "cpu",
    }


def onstep_trainer(workload: Workload, clock: Clock, directory: str) -> None:
    """`onstep.Trainer` with its own optimizer and loaders."""
    arguments = OnstepArguments(**arguments_of(workload, clock, directory, logs=False))
    data = Rows(workload, workload.micro_batch * clock.run_steps)
    model = WithLoss(workload.model())
    OnstepTrainer(
        model, arguments, train_dataset=data, callbacks=[TrainerMarks(clock)], default_callbacks=False
    ).train()


def hugging_face(workload: Workload, clock: Clock, directory: str) -> None:
    """Hugging Face's `Trainer` with its own optimizer and loaders, logging every 10 steps."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    def mark(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clock.mark()

    marks = type("Marks", (TrainerCallback,), {"on_step_begin": mark})
    arguments = TrainingArguments(**arguments_of(workload, clock, directory, logs=True))
    data = Rows(workload, workload.micro_batch * clock.run_steps)
    Trainer(model=WithLoss(workload.model()), args=arguments, train_dataset=data, callbacks=[marks()]).train()


BARE = "bare compiled loop"
ROWS: dict[str, Row] = {
    BARE: bare,
    "onstep pretrain": onstep_pretrain,
    "onstep Trainer": onstep_trainer,
    "onstep pretrain, log every 10": onstep_pretrain_logging,
    "nanoGPT's loop, log every 10": nanogpt,
    "torchtitan's style, log every 10": torchtitan,
    "Hugging Face's Trainer, log every 10": hugging_face,
}
"""All rows; those of Onstep that never log are held to the bare one."""
