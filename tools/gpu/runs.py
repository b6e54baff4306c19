"""Programs about whole runs: saves, reports, loss scales, ranks, memory, generation, LoRA."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, GIB, IS_CUDA, Regression, arguments, job, peak_bytes, rows, say, shape
from torch import nn

from onstep import Callback, Trainer, pretrain
from onstep.config.sections.peft import PeftConfig
from onstep.models import build_transformer
from onstep.models.generation.generate import generate
from onstep.training.setup.lora import add_lora


def saves(words: list[str]) -> int:
    """A run with asynchronous saves that is killed during its third one continues."""
    directory = Path("saves")
    command = [sys.executable, "-m", "onstep", "train", *words, f"run.output_dir={directory}", "run.name=killed"]
    command += ["train.train_iters=30", "checkpoint.save_interval=5", "checkpoint.async_save=true"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    folder, peak = directory / "killed" / "checkpoints", 0
    while run.poll() is None and len([one for one in folder.glob("*") if any(map(str.isdigit, one.name))]) < 3:
        peak = max(peak, resident_bytes(run.pid))
        time.sleep(0.01)
    was_running = run.poll() is None
    run.send_signal(signal.SIGKILL)
    said, _ = run.communicate()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    steps = json.loads((directory / "killed" / "run.json").read_text()).get("step")
    if again.returncode or steps != 30:
        print(said[-2000:], again.stdout[-2000:], again.stderr[-2000:])
    text = f"{'killed' if was_running else 'ended before it was killed'}, then continued to step {steps}; resident "
    return say(f"{text}{peak / GIB:.2f} GiB at most", ok=steps == 30 and not again.returncode)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, pinned buffers included; 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def reports(words: list[str]) -> int:
    """A metric that is reported with its graph does not keep it: memory after each of 20 steps."""
    sizes: list[int] = []

    def forward_step(data_iterator: Any, model: nn.Module) -> Any:
        batch = next(data_iterator)
        logits = model(batch["tokens"])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        sharpness = (logits.float().softmax(-1) ** 2).sum(-1).mean()
        return loss, lambda value: (value, {"sharpness": sharpness})

    class Measures(Callback):
        def on_train_step_end(self, context: Any) -> None:
            sizes.append(torch.cuda.memory_allocated() if IS_CUDA else 0)

    pretrain(job(words), forward_step, callbacks=[Measures()])
    growth = sizes[-1] / sizes[3] if IS_CUDA else 1.0
    return say(f"memory after step 20 is {growth:.3f} times that after step 4", ok=growth < 1.05)


def overflow(words: list[str]) -> int:
    """fp16 with too large a loss scale halves it, skips, and never has a weight that is not finite."""
    scale = ("mixed_precision=fp16_mixed", "optimizer.initial_loss_scale=1.6777216e7", "logger.log_interval=1")
    scales: list[float] = []

    class Scales(Callback):
        def on_log(self, context: Any) -> None:
            if "loss_scale" in context.logs:
                scales.append(context.logs["loss_scale"])

    state = pretrain(job([*words, *scale]), callbacks=[Scales()])
    final = [one["loss"] for one in state.trainer_state.log_history if "loss" in one][-1]
    skipped = sum(one.get("skipped_steps", 0) for one in state.trainer_state.log_history)
    text = f"loss scale from {scales[0]:g} to {scales[-1]:g}, {skipped} steps skipped"
    return say(f"{text}, final loss {final:.3f}", ok=math.isfinite(final) and scales[-1] <= 2.0**24)


class FailsLate(Callback):
    """Raises on rank 1 at step 5."""

    def on_train_step_end(self, context: Any) -> None:
        """Raise."""
        if context.trainer_state.global_step == 4 and os.environ.get("RANK") == "1":
            raise ValueError("raised on rank 1 at step 5")


def rank(words: list[str]) -> int:
    """One rank of a run, for torchrun; with `fails`, rank 1 raises."""
    fails = "fails" in words
    config = job([word for word in words if word != "fails"], "logger.log_interval=5")
    pretrain(config, callbacks=[FailsLate()] if fails else None)
    return say("ended")


def ranks(words: list[str]) -> int:
    """Two ranks on one device over gloo train like one rank; and a rank that raises ends both within a minute."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(Path(__file__).with_name("programs.py")),
        "rank",
    ]
    device = f"dist.device={'cuda:0' if IS_CUDA else 'cpu'}"
    base = [*words, "train.global_batch_size=4", "train.micro_batch_size=2", device, "dist.distributed_backend=gloo"]
    whole = subprocess.run([*launch, *base], capture_output=True, text=True, check=False)
    start = time.monotonic()
    failing = [*launch, *base, "fails", "ft.watchdog_seconds=null"]
    broken = subprocess.run(failing, capture_output=True, text=True, check=False, timeout=240)
    seconds, shown = time.monotonic() - start, "raised on rank 1 at step 5" in broken.stdout + broken.stderr
    if whole.returncode or not shown:
        print(whole.stderr[-2000:], broken.stderr[-2000:])
    text = f"two ranks ended with {whole.returncode}; the failing pair ended after {seconds:.0f} s with its traceback"
    return say(f"{text}: {shown}", ok=not whole.returncode and bool(broken.returncode) and shown)


def peaks(words: list[str]) -> int:
    """`train_mem_gpu_peaked_delta` is the same however often the Trainer logs."""
    found = []
    for every in (1, 100):
        options = {"skip_memory_metrics": False, "logging_strategy": "steps", "logging_steps": every}
        trainer = Trainer(Regression(), arguments(**options), train_dataset=rows(160), default_callbacks=False)
        metrics = trainer.train().metrics
        found.append(metrics.get("train_mem_gpu_peaked_delta", 0))
        del trainer
    text = f"train_mem_gpu_peaked_delta {found[0]:,} with logging_steps=1 and {found[1]:,} with 100"
    return say(text, ok=abs(found[0] - found[1]) <= 0.02 * max(1, *found))


def tokens(words: list[str]) -> int:
    """Tokens per second of generation, beside GPT-2 of transformers where that is installed."""
    tiny = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    sizes: dict[str, Any] = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12} if IS_CUDA else tiny
    number = 128 if IS_CUDA else 16
    config = shape(**sizes, vocab_size=50_257, seq_length=1024)
    model = build_transformer(config, seed=0).to(DEVICE)
    prompt = torch.randint(50_257, (1, 16), device=DEVICE)
    found = {"onstep": rate(lambda: generate(model, prompt, max_new_tokens=number, temperature=0), number)}
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ModuleNotFoundError:
        return say(f"{found['onstep']:.0f} tokens per second; transformers is not installed")
    published = GPT2Config(
        n_layer=sizes["num_layers"], n_embd=sizes["hidden_size"], n_head=sizes["num_attention_heads"], eos_token_id=None
    )
    theirs: Any = GPT2LMHeadModel(published)
    theirs.to(DEVICE).eval()
    options = {"max_new_tokens": number, "min_new_tokens": number, "do_sample": False, "pad_token_id": 0}
    found["transformers"] = rate(lambda: theirs.generate(prompt, **options), number)
    return say(", ".join(f"{name} {value:.0f}" for name, value in found.items()) + " tokens per second")


def rate(work: Callable[[], object], number: int) -> float:
    """Tokens per second of the second of two calls."""
    for _ in range(2):
        start = time.perf_counter()
        work()
        if IS_CUDA:
            torch.cuda.synchronize()
    return number / (time.perf_counter() - start)


def lora(words: list[str]) -> int:
    """Peak of a step of LoRA on frozen bf16 weights of the size of Llama-2 7B, which are random."""
    big: dict[str, Any] = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11_008, "num_attention_heads": 32}
    small: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    has_room = IS_CUDA and torch.cuda.get_device_properties(0).total_memory > 38 * GIB
    length = 1024 if has_room else 64
    config = shape(**(big if has_room else small), vocab_size=32_000, seq_length=length)
    network = build_transformer(config, seed=0).to(torch.bfloat16)
    add_lora(network, PeftConfig(peft_scheme="lora"), seed=0)
    network.to(DEVICE)
    ids = torch.randint(32_000, (1, length), device=DEVICE)
    peak = peak_bytes(lambda: network(ids, ids, reduction="sum").backward())
    count = sum(one.numel() for one in network.parameters())
    return say(f"{count / 1e9:.2f}e9 weights, {length} tokens: peak {peak / GIB:.2f} GiB")


def diloco(words: list[str]) -> int:
    """Two DiLoCo workers on one device: three rounds of 10 steps."""
    command = [sys.executable, "-m", "onstep", "diloco"]
    model = [word for word in words if word.startswith("model.")] or ["model.num_layers=2", "model.hidden_size=64"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = [*command, "server", "-m", "tiny_gpt", *model, "-n", "2", "-o", "diloco-server", "--sync-every", "10"]
    serving = subprocess.Popen([*server, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        wait_for(port, serving)
        joining = [*command, "worker", "--server", f"127.0.0.1:{port}", "--worker-id"]
        training = [*model, *words, "train.train_iters=30", "run.output_dir=diloco-runs"]
        workers = [
            subprocess.Popen(
                [*joining, name, "train", f"run.name={name}", *training],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in ("a", "b")
        ]
        said = [worker.communicate(timeout=240)[0] for worker in workers]
        codes = [worker.returncode for worker in workers]
        status = [*command, "status", "--server", f"127.0.0.1:{port}"]
        shown = subprocess.run(status, capture_output=True, text=True, check=False).stdout.splitlines()
    finally:
        serving.terminate()
        serving.wait()
    if any(codes):
        print(*(one[-1500:] for one in said), sep="\n---\n")
    is_done = codes == [0, 0] and "round 3" in (shown or [""])[0]
    return say(f"workers ended with {codes}; {(shown or ['no status'])[0]}", ok=is_done)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers, or has ended."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
