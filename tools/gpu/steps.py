"""Programs about single steps: waits, kernels, attention, compilation, determinism, what the GPU does meanwhile."""

from __future__ import annotations

import logging
import math
import statistics
import subprocess
import time
from typing import Any

import torch
from common import DEVICE, GIB, IS_CUDA, Losses, Regression, arguments, job, peak_bytes, rows, say, shape
from torch import nn
from torch._logging._internal import set_logs

from onstep import Callback, Trainer, TrainerCallback, pretrain
from onstep.models import build_transformer
from onstep.optim import TrainingOptimizer

FIRST_QUIET, LAST_QUIET = 12, 19


class RefusesWaits(Callback, TrainerCallback):
    """Makes every operation of torch that waits for the device raise, in quiet steps after the first ones."""

    def on_train_step_start(self, context: Any) -> None:
        """Refuse, or stop refusing."""
        self._at(context.trainer_state.global_step + 1)

    def _at(self, step: int) -> None:
        if IS_CUDA:
            torch.cuda.set_sync_debug_mode("error" if FIRST_QUIET <= step <= LAST_QUIET else "default")


def versions(words: list[str]) -> int:
    """What is installed, and on which device."""
    if not IS_CUDA:
        return say(f"torch {torch.__version__}, no GPU")
    driver = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.strip()
    capability, cudnn = torch.cuda.get_device_capability(), torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return say(f"torch {torch.__version__} for CUDA {torch.version.cuda}, {driver}, {capability}, cuDNN SDPA {cudnn}")


def sync(words: list[str]) -> int:
    """Quiet steps of `pretrain` do not wait for the device."""
    state = pretrain(job(words), callbacks=[RefusesWaits()])
    return say(f"{state.train_state.step} steps, none of {FIRST_QUIET} to {LAST_QUIET} waited")


def sync_trainer(words: list[str]) -> int:
    """Quiet steps of `Trainer` do not wait either: with its own optimizer, and with one as scripts write it."""
    for kind in ("its own optimizer", "AdamW(params)"):
        model = Regression().to(DEVICE)
        own = torch.optim.AdamW(model.parameters(), lr=1e-3) if kind == "AdamW(params)" else None
        Trainer(
            model,
            arguments(),
            train_dataset=rows(160),
            callbacks=[RefusesWaits()],
            optimizers=(own, None),
            default_callbacks=False,
        ).train()
    return say(f"20 steps with its own optimizer and with AdamW(params), none of {FIRST_QUIET} to {LAST_QUIET} waited")


def kernel(words: list[str]) -> int:
    """A bf16 loss and bf16 gradients train, whether or not torch has the kernel (pytorch#127176)."""
    one = torch.ones((), device=DEVICE)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([one.bfloat16()], one * 0, one)
        has = "has"
    except (NotImplementedError, RuntimeError):
        has = "lacks"
    model = nn.Linear(8, 8).to(DEVICE, torch.bfloat16)
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    for step in range(1, 4):
        optimizer.gate.begin_step(step)
        loss = model(torch.ones(2, 8, device=DEVICE, dtype=torch.bfloat16)).square().mean()
        optimizer.observe_loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return say(f"torch {has} the kernel for bfloat16; three steps with a bfloat16 loss were taken")


def attention(words: list[str]) -> int:
    """Packed attention with grouped queries: memory over that of half the length, 2 for linear and 4 for quadratic."""
    longest = 4096 if IS_CUDA else 128
    bare = {name: sdpa_bytes(name, longest) / GIB for name in ("mask and groups", "mask", "no mask")}
    peaks = [packed_bytes(length) for length in (longest // 2, longest)]
    growth = peaks[1] / peaks[0] if peaks[0] else math.nan
    shown = ", ".join(f"{name} {size:.2f}" for name, size in bare.items())
    text = f"torch's own SDPA in GiB at {longest}: {shown}; packed layer of Onstep grows by {growth:.2f}"
    return say(text, ok=not IS_CUDA or growth < 2.6)


def sdpa_bytes(kind: str, length: int) -> int:
    """Peak of one attention, forward and backward."""
    dtype = torch.bfloat16
    query = torch.randn(2, 16, length, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    key = torch.randn(2, 8, length, 64, device=DEVICE, dtype=dtype)
    mask = None if kind == "no mask" else torch.ones(2, 1, length, length, dtype=torch.bool, device=DEVICE).tril()
    is_grouped = kind != "mask"
    key = key if is_grouped else key.repeat_interleave(2, 1)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    return peak_bytes(
        lambda: attend(query, key, key, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped).sum().backward()
    )


def packed_bytes(length: int) -> int:
    """Peak of two layers with grouped queries on packed documents, above the weights."""
    heads = {"num_attention_heads": 16, "num_query_groups": 8}
    config = shape(num_layers=2, hidden_size=1024, **heads, vocab_size=256, seq_length=length)
    model = build_transformer(config, seed=0).to(DEVICE, torch.bfloat16).train()
    tokens = torch.randint(256, (1, length), device=DEVICE)
    documents = torch.arange(length, device=DEVICE)[None] // (length // 4)

    def step() -> None:
        model(tokens, tokens, reduction="sum", document_ids=documents).backward()

    step()  # the gradients' memory is there afterwards
    before = torch.cuda.memory_allocated() if IS_CUDA else 0
    return peak_bytes(step) - before


def graphs(words: list[str]) -> int:
    """The modes of torch.compile log the same losses as none, with one and with two micro-batches."""
    modes = ("default", "reduce-overhead", "max-autotune") if IS_CUDA else ("eager",)
    found, worst = [], 0.0
    for micro in (4, 2):
        batch = ("train.global_batch_size=4", f"train.micro_batch_size={micro}", "logger.log_interval=5")
        expected = losses_of([*batch, *words])
        for mode in modes:
            how = f"train.torch_compile_{'mode' if IS_CUDA else 'backend'}={mode}"
            losses = losses_of([*batch, "train.torch_compile=true", how, *words])
            difference = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
            worst = max(worst, difference)
            found.append(f"{mode}/{4 // micro} {difference:.1e}")
    return say(f"largest relative differences of logged losses: {', '.join(found)}", ok=worst < 0.01)


def losses_of(words: list[str]) -> list[float]:
    """The logged losses of a run."""
    torch.compiler.reset()
    seen = Losses()
    pretrain(job(words, "train.train_iters=40"), callbacks=[seen])
    return seen.losses


def recompiled(words: list[str]) -> int:
    """A compiled run compiles once: what torch reports as recompilations and graph breaks is counted."""
    counted: dict[str, int] = {"recompiles": 0, "graph_breaks": 0}

    class Counts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            counted["recompiles"] += text.startswith("Recompiling function")
            counted["graph_breaks"] += text.startswith("Graph break")

    set_logs(recompiles=True, graph_breaks=True)
    logging.getLogger("torch._dynamo").addHandler(Counts())
    backend = [] if IS_CUDA else ["train.torch_compile_backend=eager"]
    pretrain(job(["train.torch_compile=true", *backend, *words]))
    text = f"{counted['recompiles']} recompilations and {counted['graph_breaks']} graph breaks in 20 steps"
    return say(text, ok=counted == {"recompiles": 0, "graph_breaks": 0})


def price(words: list[str]) -> int:
    """What `train.deterministic` costs: the seconds of 40 steps with it over those without."""
    seconds: dict[str, float] = {}
    for chosen in ("false", "true", "false", "true"):
        seen = Losses()
        pretrain(job([f"train.deterministic={chosen}", *words], "train.train_iters=50"), callbacks=[seen])
        if IS_CUDA:
            torch.cuda.synchronize()
        seconds[chosen] = min(statistics.mean(seen.seconds), seconds.get(chosen, math.inf))
    return say(f"a step lasts {seconds['true'] / seconds['false']:.2f} times as long with train.deterministic=true")


def timeline(words: list[str]) -> int:
    """Ten quiet steps under the profiler: the share of time in which kernels ran, and copies from the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if IS_CUDA:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile: Any = torch.profiler.profile(activities=activities)
    marks: dict[int, float] = {}

    class Profiles(Callback):
        def on_train_step_start(self, context: Any) -> None:
            step = context.trainer_state.global_step
            if step in (8, 18):
                if IS_CUDA:
                    torch.cuda.synchronize()
                marks[step] = time.perf_counter()
                profile.start() if step == 8 else profile.stop()

    pretrain(job(words), callbacks=[Profiles()])
    events = profile.key_averages()
    busy = sum(event.self_device_time_total for event in events) / 1e6
    copies = sum(event.count for event in events if event.key.startswith("Memcpy DtoH"))
    profile.export_chrome_trace("timeline.json")
    seconds = marks[18] - marks[8]
    text = f"kernels ran in {busy / seconds:.0%} of {seconds:.2f} s, {copies} copies from the device in 10 steps"
    return say(f"{text}; the trace is timeline.json")
