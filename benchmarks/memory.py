"""Bytes of a training by kind in each precision, estimated and measured on the CPU, and the memory of its process.

    MALLOC_MMAP_THRESHOLD_=65536 python benchmarks/memory.py [--recipe qwen25_500m] [--seq-length 64] [--modes lora,nf4]

Each mode is a process of its own, one after the other: the model is built, and trained for two steps on random tokens
(`onstep memory --measure`). `exact` are weights, masters, gradients and optimizer state together, `kept` the
activations when the backward pass begins, `peak` the most bytes of tensors that live at once: each measured over
estimated. `RSS` is what the resident memory of the process grows by in training, over the estimate of the peak.
Quantized modes require bitsandbytes. The default is a small model; `--recipe qwen25_500m` has half a billion weights
and requires 9 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

BF16 = "mixed_precision=bf16_mixed"
PURE = f"{BF16} optimizer.params_dtype=bfloat16 optimizer.main_params_dtype=bfloat16"
LORA = "peft.peft_scheme=lora checkpoint.pretrained_checkpoint=none"
MODES = {
    "float32": "mixed_precision=null",
    "bf16_mixed": BF16,
    "masters": f"{BF16} optimizer.params_dtype=bfloat16",
    "pure": PURE,
    "kahan": f"{PURE} optimizer.rounding=kahan",
    "lora": f"{BF16} {LORA}",
    "int8": f"{BF16} {LORA} peft.base_quantization=int8",
    "nf4": f"{BF16} {LORA} peft.base_quantization=nf4",
}
SMALL = "model.num_layers=4 model.hidden_size=256 model.num_attention_heads=4 model.vocab_size=4096"
HELD = ("weights, trained", "weights, frozen", "masters", "gradients", "optimizer state")


def measured(words: list[str]) -> dict[str, float]:
    """The ratios of one mode, and its estimate in MiB; in a process of its own."""
    from onstep.cli.config import configuration
    from onstep.cli.memory_measurement import measure
    from onstep.cli.recipes import sized
    from onstep.config import resolve

    config, _ = configuration(words, None)
    found = measure(sized(resolve(config, 1)))
    estimate, kinds = found.estimate.kinds, found.kinds
    grown = found.resident_training - found.resident_before
    return {
        "estimate": found.estimate.total / 2**20,
        "exact": sum(kinds[name] for name in HELD) / sum(estimate[name] for name in HELD),
        "kept": kinds["activations"] / estimate["activations"],
        "peak": found.total / found.estimate.total,
        "RSS": grown / found.estimate.total,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="a recipe; by default a small model")
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas")
    parser.add_argument("--words", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.words is not None:
        print(json.dumps(measured(args.words.split())))
        return
    start = args.recipe or f"tiny_gpt {SMALL}"
    fixed = "dist.device=cpu dataset.kind=text train.micro_batch_size=1 train.global_batch_size=1"
    length = f"model.seq_length={args.seq_length} dataset.seq_length={args.seq_length}"
    print(f"{'mode':12} {'recomputed':>10} {'estimate':>12} {'exact':>8} {'kept':>8} {'peak':>8} {'RSS':>8}")
    for mode in args.modes.split(","):
        for recomputed in ("null", "full"):
            words = f"{start} {fixed} {length} {MODES[mode]} model.recompute_granularity={recomputed}"
            environment = {"MALLOC_MMAP_THRESHOLD_": "65536", **os.environ}
            command = [sys.executable, __file__, "--words", words]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{mode:12} {recomputed:>10} {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            ratios = " ".join(f"{row[name]:8.4f}" for name in ("exact", "kept", "peak", "RSS"))
            print(f"{mode:12} {recomputed:>10} {row['estimate']:8,.1f} MiB {ratios}", flush=True)


if __name__ == "__main__":
    main()
