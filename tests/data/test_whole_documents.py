"""Documents, prompts and messages are encoded whole and the same each time, whatever the tokenizer's file says."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, DatasetConfig, TokenizerConfig
from onstep.data import build_datasets, build_tokenizer, template_for
from onstep.errors import DataError
from onstep.training import pretrain
from tests.support.forked_processes import Processes
from tests.support.shell import Shell

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat\n" * 60


def learned(*, dropout: float | None = None) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.model.dropout = dropout
    return tokenizer


WHOLE = learned()
IDS = WHOLE.encode(TEXT, add_special_tokens=False).ids


def write(directory: Path, tokenizer: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    cutting = {"model_max_length": 8, "truncation_side": "left", "padding_side": "left"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **cutting}))
    return directory / "tokenizer.json"


def cut_and_padded(directory: Path, *, truncates: bool = True, pads: bool = True) -> Path:
    tokenizer = learned()
    if truncates:
        tokenizer.enable_truncation(8, direction="left")
    if pads:
        tokenizer.enable_padding(length=8192, pad_id=1, pad_token="<pad>", direction="left")
    return write(directory, tokenizer)


def config_of(kind: str, file: Path) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(file if kind == "tokenizers" else file.parent))


def lines_about(text: str, file: Path) -> list[str]:
    return [line for line in text.splitlines() if str(file) in line and "are switched off" in line]


@pytest.mark.parametrize("kind", ["tokenizers", "huggingface"])
@pytest.mark.parametrize("setting", [{"pads": False}, {"truncates": False}, {}], ids=["cut", "padded", "both"])
def test_documents_prompts_and_messages_are_whole(kind: str, setting: dict[str, bool], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = build_tokenizer(config_of(kind, cut_and_padded(tmp_path / "file", **setting)))
    assert list(tokenizer.encode(TEXT.encode())) == IDS
    assert tokenizer.encode_text(TEXT) == tokenizer.encode_content(TEXT) == IDS
    chat = template_for(tokenizer).encode([{"role": "user", "content": TEXT}], "here")
    assert WHOLE.decode(chat.ids.tolist()) == f"<|user|>\n{TEXT}\n"


def test_a_conversation_of_a_transformers_template_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = cut_and_padded(tmp_path / "file")
    (file.parent / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|endoftext|>{% endfor %}"
    )
    template = template_for(build_tokenizer(config_of("huggingface", file)))
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": TEXT}]
    chat = template.encode(messages, "here")
    assert WHOLE.decode(chat.ids.tolist()) == f"<user>{TEXT}<assistant>{TEXT}"
    assert WHOLE.decode(chat.ids[chat.trained].tolist()).endswith(TEXT)


def test_one_line_says_what_is_switched_off_and_only_where_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = cut_and_padded(tmp_path / "file")
    build_tokenizer(config_of("tokenizers", file))
    [line] = lines_about(caplog.text, file)
    assert "truncation to 8 tokens and padding to 8192 tokens are switched off: text is encoded whole" in line
    caplog.clear()
    build_tokenizer(config_of("tokenizers", file), warns=False)  # as ranks other than the main one do
    build_tokenizer(config_of("tokenizers", write(tmp_path / "plain", WHOLE)))
    assert not caplog.text


def test_the_command_trains_on_whole_documents_and_saves_such_a_tokenizer(processes: Processes, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    file = cut_and_padded(tmp_path / "file")
    (tmp_path / "a.txt").write_text(TEXT)
    done = Shell(processes, tmp_path).onstep("train", *SMALL, f"tokenizer.tokenizer_model={file}")
    assert done.returncode == 0, done.stderr
    assert len(lines_about(done.stdout + done.stderr, file)) == 1
    [manifest] = (tmp_path / "cache").glob("*.json")
    assert json.loads(manifest.read_text())["num_tokens"] == len(IDS) + 1
    saved = tmp_path / "runs" / "tiny_gpt" / "model"
    theirs = transformers.AutoTokenizer.from_pretrained(str(saved))
    assert theirs(TEXT)["input_ids"] == IDS
    assert (theirs.eos_token_id, theirs.pad_token_id) == (0, 1)
    assert tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json")).encode(TEXT).ids == IDS


SMALL = [
    "dataset.paths=[a.txt]",
    "dataset.split=1",
    "dataset.cache_dir=cache",
    "dataset.seq_length=32",
    "tokenizer.tokenizer_type=tokenizers",
    "model.seq_length=32",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "train.global_batch_size=2",
    "train.train_iters=2",
    "scheduler.lr_warmup_iters=1",
    "validation.eval_iters=0",
    "dist.device=cpu",
]


def test_pretrain_trains_on_whole_documents(
    tiny_config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    file = cut_and_padded(tmp_path / "file")
    config = tiny_config
    config.tokenizer = config_of("tokenizers", file)
    config.dataset.paths, config.dataset.cache_dir = [str(tmp_path / "a.txt")], str(tmp_path / "cache")
    config.dataset.split, config.validation.eval_iters, config.train.train_iters = "1", 0, 3
    config.run.output_dir = str(tmp_path / "runs")
    pretrain(config)
    assert len(lines_about(caplog.text, file)) == 1
    [manifest] = (tmp_path / "cache").glob("*.json")
    assert json.loads(manifest.read_text())["num_tokens"] == len(IDS) + 1


def test_a_tokenizer_that_cannot_be_used_ends_each_door_with_an_error(
    processes: Processes, tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1}, unk_token="[UNK]"))
    file = write(tmp_path / "file", tokenizer)
    (tmp_path / "a.txt").write_text("mat")
    done = Shell(processes, tmp_path).onstep("train", *SMALL, f"tokenizer.tokenizer_model={file}")
    assert done.returncode == 1
    assert "a.txt: the tokenizer " in done.stderr
    assert "cannot encode this text: Exception: WordLevel error: Missing [UNK] token" in done.stderr
    config = tiny_config
    config.tokenizer = config_of("tokenizers", file)
    config.dataset.paths, config.dataset.cache_dir = [str(tmp_path / "a.txt")], str(tmp_path / "cache")
    config.run.output_dir = str(tmp_path / "doors")
    with pytest.raises(DataError, match=r"a\.txt: the tokenizer .* cannot encode this text"):
        pretrain(config)


def test_tokens_that_were_cut_by_an_earlier_version_are_built_again(tmp_path: Path) -> None:
    plain, cut = write(tmp_path / "plain", WHOLE), cut_and_padded(tmp_path / "file")
    for file, is_as_before in ((plain, True), (cut, False)):
        before = f"tokenizers 2-{hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}"
        fingerprint = build_tokenizer(config_of("tokenizers", file)).fingerprint
        assert (fingerprint == before) == is_as_before


def test_a_bpe_with_dropout_gives_the_same_ids_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    for kind in ("tokenizers", "huggingface"):
        caplog.clear()
        file = write(tmp_path / kind, learned(dropout=0.5))
        tokenizer = build_tokenizer(config_of(kind, file))
        assert "dropout of 0.5 is switched off" in caplog.text
        assert {tuple(tokenizer.encode(TEXT.encode())) for _ in range(3)} == {tuple(IDS)}
        (tmp_path / "saved").mkdir()
        tokenizer.save(tmp_path / "saved")
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
        assert {tuple(theirs(TEXT)["input_ids"]) for _ in range(3)} == {tuple(IDS)}
        shutil.rmtree(tmp_path / "saved")


def test_sequences_are_made_of_whole_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer = build_tokenizer(config_of("tokenizers", cut_and_padded(tmp_path / "file")))
    data = DatasetConfig(paths=[str(tmp_path / "a.txt")], cache_dir=str(tmp_path), split="1", seq_length=8)
    train, _, _ = build_datasets(data, tokenizer, show_progress=False)
    assert train.token_file.tokens.tolist() == [*IDS, 0]
