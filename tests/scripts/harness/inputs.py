"""Writes what the scripts read: a tokenizer, models of a few thousand numbers, and data files of a few dozen rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ANIMALS = ("cat", "dog", "bird", "fish", "horse", "mouse")
PEOPLE = ("anna", "ben", "clara", "david")
PLACES = ("paris", "rome", "oslo")
VERBS = ("sees", "likes", "finds", "fears")
GOOD, BAD = ("bright", "lovely", "calm"), ("dull", "awful", "loud")
OTHER = ("the", "a", "in", "and", "is", "was", "who", "where", "what", "?", ".", "describe", "name", "answer", ":")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<image>")
VOCABULARY = (*SPECIAL, *OTHER, *ANIMALS, *PEOPLE, *PLACES, *VERBS, *GOOD, *BAD)
TAGS = ("O", "B-PER", "B-LOC")


def write_inputs(directory: Path) -> None:
    """Write all of them to `directory`; the same bytes every time."""
    _write_tokenizers(directory)
    _write_models(directory)
    _write_data(directory)


def _write_tokenizers(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    index = {word: number for number, word in enumerate(VOCABULARY)}
    templates = {
        "encoder": TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", index["[CLS]"]), ("[SEP]", index["[SEP]"])],
        ),
        "causal": None,
        "seq2seq": TemplateProcessing(single="$A </s>", special_tokens=[("</s>", index["</s>"])]),
    }
    marks = {"bos_token": "<s>", "eos_token": "</s>"}
    sides = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    for kind, template in templates.items():
        words = Tokenizer(WordLevel(index, unk_token="[UNK]"))
        words.pre_tokenizer = WhitespaceSplit()
        if template is not None:
            words.post_processor = template
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words,
            pad_token="[PAD]",
            unk_token="[UNK]",
            model_max_length=32,
            additional_special_tokens=["<image>"],
            **(sides if kind == "encoder" else marks),
        )
        tokenizer.save_pretrained(directory / kind)


def _write_models(directory: Path) -> None:
    import torch
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        CLIPVisionConfig,
        LlamaConfig,
        LlamaForCausalLM,
        LlavaConfig,
        LlavaForConditionalGeneration,
        T5Config,
        T5ForConditionalGeneration,
    )

    size: dict[str, Any] = {"vocab_size": len(VOCABULARY), "pad_token_id": VOCABULARY.index("[PAD]")}
    depth = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"bos_token_id": VOCABULARY.index("<s>"), "eos_token_id": VOCABULARY.index("</s>")}
    text = LlamaConfig(**size, **depth, **marks, max_position_embeddings=64)
    sight = CLIPVisionConfig(**depth, image_size=8, patch_size=4, projection_dim=16)
    models = {
        "causal": (LlamaForCausalLM, text),
        "encoder": (
            BertForMaskedLM,
            BertConfig(
                **size,
                **depth,
                max_position_embeddings=64,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.2,
            ),
        ),
        "seq2seq": (
            T5ForConditionalGeneration,
            T5Config(
                **size,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=2,
                num_heads=2,
                dropout_rate=0.0,
                eos_token_id=marks["eos_token_id"],
                decoder_start_token_id=size["pad_token_id"],
            ),
        ),
        "llava": (
            LlavaForConditionalGeneration,
            LlavaConfig(
                vision_config=sight,
                text_config=text,
                image_token_id=VOCABULARY.index("<image>"),
                image_seq_length=4,
            ),
        ),
    }
    for number, (kind, (cls, config)) in enumerate(models.items()):
        torch.manual_seed(number)
        cls(config).save_pretrained(directory / kind)


def _write_data(directory: Path) -> None:
    import numpy as np

    draw = random.Random(14)
    sentences = [_sentence(draw) for _ in range(160)]
    (directory / "corpus_train.txt").write_text("\n".join(sentences[:128]) + "\n")
    (directory / "corpus_validation.txt").write_text("\n".join(sentences[128:]) + "\n")
    kinds = {"reviews": _review, "tags": _tagged, "questions": _question, "summaries": _summary}
    for kind, make in kinds.items():
        for split, count in (("train", 48), ("validation", 16), ("test", 8)):
            rows = [make(draw, f"{split}-{number}") for number in range(count)]
            (directory / f"{kind}_{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    instructions = [_instruction(draw) for _ in range(48)]
    (directory / "instructions.json").write_text(json.dumps(instructions))
    pictures = [{"image": number, "text": _picture_text(draw, number)} for number in range(32)]
    (directory / "pictures.json").write_text(json.dumps(pictures))
    pixels = np.random.default_rng(14).standard_normal((32, 3, 8, 8), dtype=np.float32)
    np.save(directory / "pictures.npy", pixels + np.arange(32, dtype=np.float32).reshape(-1, 1, 1, 1) % 3)


def _sentence(draw: random.Random) -> str:
    return f"{draw.choice(PEOPLE)} {draw.choice(VERBS)} the {draw.choice(ANIMALS)} in {draw.choice(PLACES)} ."


def _review(draw: random.Random, name: str) -> dict[str, Any]:
    label = draw.randrange(2)
    word = draw.choice((BAD, GOOD)[label])
    tail = draw.choice(("", f" and the {draw.choice(ANIMALS)} is {word}"))
    return {"sentence": f"the {draw.choice(ANIMALS)} was {word}{tail} .", "label": ("negative", "positive")[label]}


def _tagged(draw: random.Random, name: str) -> dict[str, Any]:
    tokens = _sentence(draw).split()
    if draw.random() < 0.5:
        tokens = [*tokens[:-1], "and", *_sentence(draw).split()]
    tags = [1 if token in PEOPLE else 2 if token in PLACES else 0 for token in tokens]
    return {"id": name, "tokens": tokens, "ner_tags": [TAGS[tag] for tag in tags]}


def _question(draw: random.Random, name: str) -> dict[str, Any]:
    context = _sentence(draw)
    words = context.split()
    question, answer = draw.choice((("who is in the", words[0]), ("where is the", words[5])))
    return {
        "id": name,
        "question": f"{question} {words[3]} ?",
        "context": context,
        "answers": {"text": [answer], "answer_start": [context.index(answer)]},
    }


def _summary(draw: random.Random, name: str) -> dict[str, Any]:
    first, second = _sentence(draw), _sentence(draw)
    words = first.split()
    return {"document": f"{first} {second}", "summary": f"{words[0]} {words[1]} {words[3]}"}


def _instruction(draw: random.Random) -> dict[str, str]:
    animal = draw.choice(ANIMALS)
    if draw.random() < 0.5:
        return {"instruction": "name the place .", "input": _sentence(draw), "output": f"the {animal} is in rome ."}
    return {"instruction": f"describe the {animal} .", "input": "", "output": f"the {animal} is calm and bright ."}


def _picture_text(draw: random.Random, number: int) -> str:
    extra = f" in {draw.choice(PLACES)}" if number % 2 else ""
    return f"what is the {ANIMALS[number % 3]} ? the {ANIMALS[number % 3]} is calm{extra} ."
