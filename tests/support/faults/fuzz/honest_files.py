"""The files that the inputs start from, each as a program writes it; the same to the byte each time."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.faults.fuzz.changes import seal

TRAIN = (
    "train", "run.name=run", "dataset.paths=[corpus.txt]", "dataset.cache_dir=tokens", "dataset.split=80,10,10",
    "dataset.num_workers=0", "dataset.seq_length=32", "model.seq_length=32", "model.num_layers=1",
    "model.hidden_size=16", "model.num_attention_heads=2", "train.global_batch_size=4", "train.micro_batch_size=4",
    "scheduler.lr_warmup_iters=2", "scheduler.lr_decay_iters=20", "validation.eval_on_start=false",
    "validation.eval_interval=4", "validation.eval_iters=2", "logger.log_interval=1", "checkpoint.save_interval=3",
    "dist.device=cpu", "logger.report_to=[csv]",
    "logger.log_progress=true", "checkpoint.certify=true", "ft.watchdog_seconds=100", "ft.calc_ft_timeouts=true",
)  # fmt: skip
"""A run of a second, whose paths are relative, in a directory that has `corpus.txt`."""
STEPS = 6
SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}<s>{{ messages[0]['content'] }}\n{% endif %}"
    "{% for message in messages %}{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] + '\\n' + "
    "message['content'] | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATS = (
    (("system", "Be brief."), ("user", "What is 2 + 2?"), ("assistant", "4")),
    (("user", "Name a color."), ("assistant", "Blue, <|im_end|> or caf\u00e9.")),
    (("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")),
)


def make_all(directory: Path) -> None:
    """Write every set of honest files to a directory of its own. Changes clocks and ids of this process."""
    _stop_clocks()
    for name, make in MAKERS.items():
        (directory / name).mkdir(parents=True)
        make(directory / name)


def _stop_clocks() -> None:
    """Let each question for the time or an id have the same answer in every process."""
    ids, ticks = itertools.count(1), 0

    def clock() -> float:
        nonlocal ticks
        ticks += threading.current_thread() is threading.main_thread()  # others ask when they happen to
        return 1_700_000_000.0 + ticks / 1024

    time.time = clock
    time.perf_counter = time.monotonic = clock  # type: ignore[assignment]
    uuid.uuid4 = lambda: uuid.UUID(int=next(ids))


def _corpus(directory: Path) -> Path:
    path = directory / "corpus.txt"
    path.write_text(Path(textwrap.__file__).read_text(encoding="utf-8")[:9000], encoding="utf-8")
    return path


def _run(directory: Path) -> None:
    import contextlib
    import os

    from onstep.cli.main import main

    _corpus(directory)
    with contextlib.chdir(directory), open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        norms = "callbacks=[onstep.callbacks:ParameterNormLogger]"
        assert main([*TRAIN, norms, f"train.train_iters={STEPS}"]) == 0
    run = directory / "runs" / "run"
    (run / "loss.png").unlink(missing_ok=True)
    (run / ".run.lock").write_text("process 1 on vm\n")
    for path in (run / "checkpoints" / "progress.txt", run / "checkpoints" / "ft_state.json"):
        path.write_text(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "2026-01-01 00:00:00", path.read_text()))
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text(
            re.sub(r'"created_at": ".*"', '"created_at": "2026-01-01T00:00:00+00:00"', manifest.read_text())
        )
        seal(manifest.parent)
    with (run / "decisions.jsonl").open("a") as file:
        for flag, details in _DECISIONS.items():
            line = {"timestamp": 1.7e9, "step": 4, "flag": flag, "author": "a callback", "event": "on_step_end"}
            file.write(json.dumps({**line, "reason": "why not", "rank": 1, "details": details}) + "\n")
    with (run / "text_samples.jsonl").open("w") as file:
        for step in (0, 3, 6):
            for prompt in ("def", "class "):
                sample = {"timestamp": 1.7e9, "step": step, "prompt": prompt, "text": f"of\tstep\n{step}"}
                file.write(json.dumps(sample) + "\n")
    shutil.copytree(run / "checkpoints" / "checkpoint-6", directory / "copied" / "checkpoint-6")
    (directory / "other").mkdir()
    shutil.copy(run / "trainer_logs.json", directory / "other")


_DECISIONS: dict[str, dict[str, Any]] = {
    "skip": {"anomaly": "spike", "loss": 7.5, "grad_norm": 100.0, "sample_ids": list(range(20))},
    "rolled_back": {"to_step": 3, "bad_step": 4, "lr_factor": 0.5},
    "set": {"key": "optimizer.lr", "value": 1e-4},
    "rerun_exit": {"exit_code": 16, "checkpoint": True},
    "should_training_stop": {"anomaly": "nan", "loss": None, "grad_norm": None},
}


def _trainer_state(directory: Path) -> None:
    train = [
        {"epoch": step / 8, "grad_norm": 1.5 / step, "learning_rate": 1e-3 / step, "loss": 5.0 / step, "step": step}
        for step in range(1, 9)
    ]
    evaluation = {"epoch": 1.0, "eval_loss": 1.25, "eval_runtime": 0.5, "eval_samples_per_second": 20.0, "step": 8}
    state = {
        "best_global_step": None, "best_metric": None, "best_model_checkpoint": None, "epoch": 1.0, "eval_steps": 500,
        "global_step": 8, "is_hyper_param_search": False, "is_local_process_zero": True, "is_world_process_zero": True,
        "log_history": [*train, evaluation], "logging_steps": 1, "max_steps": 8, "num_input_tokens_seen": 0,
        "num_train_epochs": 1, "save_steps": 500, "total_flos": 123456789.0, "train_batch_size": 4, "trial_name": None,
        "stateful_callbacks": {"TrainerControl": {"args": {"should_save": True}, "attributes": {}}},
    }  # fmt: skip
    (directory / "other").mkdir()
    for path in (directory, directory / "other"):
        (path / "trainer_state.json").write_text(json.dumps(state, indent=2))


def _models(directory: Path) -> None:
    import torch
    import transformers as hf

    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 16
    grouped = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 24}
    moe = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    gpt2 = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped, rope_parameters=rope)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=8)),
        "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**grouped, **moe)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
    }
    for name, make in made.items():
        torch.manual_seed(1)
        make().save_pretrained(directory / name)
    _corpus(directory)
    _chats(directory)
    torch.manual_seed(1)
    made["llama"]().save_pretrained(directory / "sharded", max_shard_size="20KB")


def _tokenizers(directory: Path) -> None:
    import tokenizers
    import transformers as hf
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    texts = _corpus(directory).read_text().splitlines()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe: Any = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    bpe.post_processor = processors.TemplateProcessing("$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    letters = [chr(code) for code in range(32, 127)]
    words = ["[UNK]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), "the", "##ing"]
    word: Any = tokenizers.Tokenizer(models.WordPiece({one: id_ for id_, one in enumerate(words)}, unk_token="[UNK]"))
    word.normalizer, word.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    word.decoder = decoders.WordPiece()
    word.add_special_tokens(["[UNK]", "[SEP]"])
    word.enable_padding(pad_id=1, pad_token="[SEP]")
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in letters), ("the", -2.0), ("\u2581", -2.0)]
    one: Any = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    one.normalizer, one.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    one.add_special_tokens(["<unk>", "</s>"])
    one.enable_truncation(max_length=64)
    for name, made in {"bpe": bpe, "wordpiece": word, "unigram": one}.items():
        (directory / name).mkdir()
        made.save(str(directory / name / "tokenizer.json"))
    fast = hf.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory / "fast")
    fast.save_pretrained(directory / "template_in_config", save_jinja_files=False)
    (directory / "slow").mkdir()
    bpe.model.save(str(directory / "slow"))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (directory / "slow" / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _chats(directory: Path) -> None:
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in _CHATS] * 3
    asked: list[dict[str, Any]] = [
        {"prompt": f"Question {number}?", "response": f"Answer {number}."} for number in range(4)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [*lines, *asked])
    (directory / "chats.jsonl").write_text(text, encoding="utf-8")


def _texts(directory: Path) -> None:
    pieces = _corpus(directory).read_text().split("\n\n")
    lines = [json.dumps({"text": piece, "id": number}) for number, piece in enumerate(pieces)]
    (directory / "corpus.jsonl").write_text("\n".join(lines) + "\n")


def _indexed(directory: Path) -> None:
    from onstep.data import write_indexed_dataset

    documents = [[(7 * item + number) % 256 for item in range(20 + 13 * number)] for number in range(12)]
    write_indexed_dataset(directory / "docs", documents, vocab_size=257, end_id=256)


def _tokens(directory: Path) -> None:
    """A corpus and the cache of its tokens."""
    from onstep.data import ByteTokenizer, build_token_file

    build_token_file([_corpus(directory)], ByteTokenizer(), directory / "tokens", "text", show_progress=False)


def _configuration(directory: Path) -> None:
    from onstep.config.load import dump_yaml
    from onstep.recipes import get_recipe

    values = "".join(f"  {word.partition('.')[2].replace('=', ': ')}\n" for word in TRAIN if word.startswith("model."))
    optimizer = "optimizer:\n  lr: 1.0e-3\n  adam_beta2: 0.95\n  weight_decay: 0.1\n"
    more = "train:\n  train_iters: 100\n  global_batch_size: 8\ndataset:\n  seq_length: 32\n  paths: [a, b]\n"
    (directory / "small.yaml").write_text(f"run:\n  recipe: tiny_gpt\nmodel:\n{values}{optimizer}{more}")
    (directory / "all.yaml").write_text(dump_yaml(get_recipe("tiny_gpt")()))
    (directory / "words.txt").write_text("optimizer.lr=0.5")
    (directory / "prompts.yaml").write_text("- 'def '\n- |\n  class A:\n- \"x = \"\n")


MAKERS: dict[str, Callable[[Path], None]] = {
    "run": _run,
    "trainer_state": _trainer_state,
    "models": _models,
    "tokenizers": _tokenizers,
    "chats": _chats,
    "texts": _texts,
    "indexed": _indexed,
    "tokens": _tokens,
    "configuration": _configuration,
}


def copy(source: Path, target: Path) -> None:
    """A copy that an input may change."""
    shutil.copytree(source, target, dirs_exist_ok=True)
