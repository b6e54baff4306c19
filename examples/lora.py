"""Fine-tune a model of Hugging Face on chats with LoRA, and load the adapter back with transformers.

    python examples/lora.py

To need no download, the base model is a tiny Llama that is made here; put any directory of Hugging Face in its place.
Requires `pip install 'onstep[peft]'`.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from onstep import JsonLogger, finetune
from onstep.config import apply_overrides
from onstep.recipes import any_finetune_config

BASE, CHATS = Path("runs/lora-base"), Path("runs/lora-chats.jsonl")


def make_base() -> None:
    """A Llama with random weights, whose tokens are bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=260, max_position_embeddings=64)).save_pretrained(BASE)


def make_chats() -> None:
    """Additions, asked and answered."""
    pairs = [(a, b) for a in range(20) for b in range(20)]
    chats = [{"prompt": f"What is {a} + {b}?", "response": f"It is {a + b}."} for a, b in pairs]
    CHATS.write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")


def main() -> None:
    make_base()
    make_chats()
    config = any_finetune_config(peft="lora")
    apply_overrides(
        config,
        [
            "run.name=lora",
            "run.fresh=true",
            f"checkpoint.pretrained_checkpoint={BASE}",
            f"dataset.paths=[{CHATS}]",
            "dataset.split=90,10,0",
            "dataset.seq_length=64",
            "model.seq_length=64",
            "train.num_epochs=4",
            "train.global_batch_size=16",
            "optimizer.lr=1e-2",
            "validation.eval_iters=2",
            "logger.log_interval=20",
            "mixed_precision=null",
            "dist.device=cpu",
        ],
    )
    state = finetune(config, callbacks=[JsonLogger()])
    losses = [record["loss"] for record in state.info.log_history if "loss" in record]
    print(f"loss on the answers: {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")

    adapter = sorted(Path("runs").glob("lora*/adapter"), key=lambda path: path.stat().st_mtime)[-1]
    adapted = AutoModelForCausalLM.from_pretrained(BASE)
    adapted.load_adapter(str(adapter))
    print(f"{adapter} loads into {type(adapted).__name__}")


if __name__ == "__main__":
    main()
