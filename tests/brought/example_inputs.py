"""Writes what the examples read: tiny random models with dropout, tokenizers, texts, rows and images."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.scripts.harness.inputs import ANIMALS, GOOD, PEOPLE, VOCABULARY, write_inputs

KINDS = ("round", "square")
MARKS = {"bos_token_id": VOCABULARY.index("<s>"), "eos_token_id": VOCABULARY.index("</s>")}
SIZE: dict[str, Any] = {"vocab_size": len(VOCABULARY), "pad_token_id": VOCABULARY.index("[PAD]")}


def write_example_inputs(directory: Path) -> None:
    """Write all of them to `directory`; the same bytes every time."""
    directory.mkdir()
    write_inputs(directory)
    _write_models(directory)
    _write_translations(directory)
    _write_images(directory)


def _write_models(directory: Path) -> None:
    import torch
    import transformers as t

    tokens = len(VOCABULARY)
    depth = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = {**SIZE, **depth, "max_position_embeddings": 64, "initializer_range": 0.2}
    models: dict[str, tuple[Any, Any, str]] = {
        "gpt2": (
            t.GPT2LMHeadModel,
            t.GPT2Config(vocab_size=tokens, n_embd=16, n_layer=2, n_head=2, n_positions=64, **MARKS),
            "causal",
        ),
        "bert": (
            t.BertForMaskedLM,
            t.BertConfig(**bert),
            "encoder",
        ),
        "still": (
            t.BertForMaskedLM,
            t.BertConfig(**bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            "encoder",
        ),
        "xlnet": (
            t.XLNetLMHeadModel,
            t.XLNetConfig(
                vocab_size=tokens, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0, pad_token_id=0, **MARKS
            ),
            "encoder",
        ),
        "t5": (
            t.T5ForConditionalGeneration,
            t.T5Config(
                **SIZE,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                eos_token_id=MARKS["eos_token_id"],
                decoder_start_token_id=SIZE["pad_token_id"],
            ),
            "seq2seq",
        ),
        "bart": (
            t.BartForConditionalGeneration,
            t.BartConfig(
                **SIZE,
                **MARKS,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                max_position_embeddings=64,
                decoder_start_token_id=MARKS["eos_token_id"],
                forced_eos_token_id=MARKS["eos_token_id"],
                init_std=0.2,
            ),
            "seq2seq",
        ),
    }
    for number, (name, (cls, config, tokenizer)) in enumerate(models.items()):
        torch.manual_seed(number)
        cls(config).save_pretrained(directory / name)
        t.AutoTokenizer.from_pretrained(directory / tokenizer).save_pretrained(directory / name)
    torch.manual_seed(99)
    config = t.ViTConfig(**depth, image_size=8, patch_size=4)
    t.ViTForImageClassification(config).save_pretrained(directory / "vit")
    size = {"height": 8, "width": 8}
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))


def _write_translations(directory: Path) -> None:
    draw = random.Random(29)
    for part, count in (("train", 48), ("validation", 16), ("test", 8)):
        rows = [{"translation": _translation(draw)} for _ in range(count)]
        (directory / f"translations_{part}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _translation(draw: random.Random) -> dict[str, str]:
    person, animal, word = (draw.choice(words) for words in (PEOPLE, ANIMALS, GOOD))
    return {"en": f"{person} sees the {word} {animal} .", "xx": f"the {animal} {word} {person} sees ."}


def _write_images(directory: Path) -> None:
    import torch
    from PIL import Image

    generator = torch.Generator().manual_seed(29)
    for part, count in (("train", 24), ("validation", 8)):
        for number in range(count):
            kind = number % 2
            values = torch.randint(0, 128, (12, 10 + number % 3, 3), generator=generator)
            values[3:9, 3:8, kind] += 100
            path = directory / "images" / part / KINDS[kind] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values.to(torch.uint8).numpy()).save(path)
