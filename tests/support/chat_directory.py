"""A small Hugging Face directory with a chat template."""

from __future__ import annotations

from pathlib import Path

import transformers

from onstep.config import DatasetConfig, ModelConfig
from onstep.data import learn_bpe, tokenizer_source
from onstep.models import build_transformer, save_hf

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_directory(directory: Path, template: str | None = CHATML, length: int = 64) -> None:
    """Write a model with random weights and a tokenizer into a new directory."""
    directory.mkdir(parents=True)
    text = directory / "text.txt"
    text.write_text("row, row, row your boat\nassistant user system\n" * 40)
    source = tokenizer_source(DatasetConfig(paths=[str(text)]))
    learn_bpe(source, 300, directory / "cache", show_progress=False).save(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(directory))
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 320}
    save_hf(build_transformer(ModelConfig(**sizes, seq_length=length, init_method_std=0.3), seed=0), directory)
