"""Every kind of data from the command line, and what its run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onstep.data import write_indexed_dataset
from tests.support.forked_processes import Processes
from tests.support.shell import Shell

SMALL = [
    "dataset.seq_length=32",
    "model.seq_length=32",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "train.global_batch_size=4",
    "train.train_iters=4",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_on_start=false",
    "validation.eval_iters=2",
    "logger.log_interval=2",
    "dataset.cache_dir=cache",
    "dist.device=cpu",
]


@pytest.fixture
def shell(processes: Processes, tmp_path: Path) -> Shell:
    return Shell(processes, tmp_path)


def onstep(shell: Shell, *words: str) -> str:
    done = shell.onstep(*words, HF_HOME=str(shell.directory / "hf"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(directory: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((directory / "runs" / "tiny_gpt" / "trainer_logs.json").read_text())
    return found


def test_chats_with_a_learned_tokenizer_train_and_answer(shell: Shell, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    rows = [{"prompt": f"Say {number}", "response": f"{number}, said"} for number in range(300)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["dataset.kind=chat", "dataset.paths=[chat.jsonl]", "tokenizer.tokenizer_type=bpe"]
    onstep(shell, "train", *SMALL, *words, "tokenizer.vocab_size=280")
    assert any("loss" in record for record in records(tmp_path))
    assert any("eval_loss" in record for record in records(tmp_path))
    run = tmp_path / "runs" / "tiny_gpt"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(run / "model"))
    ours = (run / "tokenizer.json").read_text()
    assert json.loads(ours)["model"]["type"] == "BPE"
    assert tokenizer.decode(tokenizer("Say 7, said")["input_ids"]) == "Say 7, said"
    (tmp_path / "chat.jsonl").unlink()  # the run has all that it takes
    prompt = "<|user|>\nSay 3\n<|assistant|>\n"
    answer = onstep(shell, "generate", str(run), prompt, "--max-new-tokens=3", "--seed=1")
    assert answer.startswith(prompt)
    onstep(shell, "checkpoint", "export", str(run), "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == ours


@pytest.mark.slow
def test_megatrons_files_and_datasets_train(shell: Shell, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_indexed_dataset(tmp_path / "corpus", [range(200)] * 20, vocab_size=257, end_id=256)
    datasets.Dataset.from_dict({"body": ["some text of a row " * 5] * 40}).save_to_disk(tmp_path / "rows")
    onstep(shell, "train", *SMALL, "dataset.kind=megatron", "dataset.paths=[corpus]", "dataset.split=80,20")
    assert any("eval_loss" in record for record in records(tmp_path))
    words = ["dataset.kind=huggingface", "dataset.paths=[rows]", "dataset.text_key=body", "run.name=rows"]
    onstep(shell, "train", *SMALL, *words, "dataset.reset_attention_mask=true")
    assert json.loads((tmp_path / "runs" / "rows" / "run.json").read_text())["status"] == "completed"
