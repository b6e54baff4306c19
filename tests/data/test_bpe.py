"""A BPE is learned from the corpus once, the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig, TokenizerConfig
from onstep.data import build_datasets, build_tokenizer, learn_bpe, tokenizer_in_run, tokenizer_source
from onstep.errors import DataError, MissingExtraError
from tests.support.waiting import PATIENCE

pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat\nthe dog sat on the log\n" * 20


def config_of(directory: Path, text: str = TEXT, **options: Any) -> DatasetConfig:
    (directory / "in").mkdir(exist_ok=True)
    (directory / "in" / "a.txt").write_text(text)
    return DatasetConfig(paths=[str(directory / "in")], cache_dir=str(directory / "cache"), **options)


def learn(config: DatasetConfig, size: int | None = 270) -> Any:
    return learn_bpe(tokenizer_source(config), size, config.cache_dir, show_progress=False)


def test_it_has_the_size_and_end_token_asked_for_and_takes_any_text(tmp_path: Path) -> None:
    tokenizer = learn(config_of(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (270, 0)
    for text in ("the cat", "  \tnéver\n\nseen: \U0001f600 \x00", "<|endoftext|>"[1:]):
        assert tokenizer.decode(tokenizer.encode_text(text)) == text
    assert len(tokenizer.encode_text(" the cat sat on the mat")) < 15
    assert len(tokenizer.encode_text("xyz")) == 3


def test_the_same_corpus_is_learned_from_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = learn(config)
    written = first.path.stat().st_mtime_ns
    again = learn(config)
    assert (again.path, again.fingerprint) == (first.path, first.fingerprint)
    assert first.path.stat().st_mtime_ns == written


def test_another_corpus_or_size_is_another_tokenizer(tmp_path: Path) -> None:
    learned = [learn(config_of(tmp_path)), learn(config_of(tmp_path), 265), learn(config_of(tmp_path, TEXT + "more"))]
    assert len({tokenizer.path for tokenizer in learned}) == 3
    assert learned[1].vocab_size == 265


def test_a_broken_file_is_learned_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    whole = learn(config).path.read_bytes()
    path = learn(config).path
    path.write_bytes(whole[: len(whole) // 2])
    assert learn(config).path.read_bytes() == whole


SCRIPT = """
import sys
from pathlib import Path
from onstep.config import DatasetConfig
from onstep.data import learn_bpe, tokenizer_source
config = DatasetConfig(paths=[sys.argv[1]], cache_dir=sys.argv[2])
print(learn_bpe(tokenizer_source(config), 400, config.cache_dir, show_progress=False).fingerprint)
"""


@pytest.mark.process
def test_processes_at_once_and_apart_learn_the_same(tmp_path: Path) -> None:
    config = config_of(tmp_path, "".join(f"word{i % 37} of {i % 11} and {i}\n" for i in range(2000)))

    def start(cache: str, threads: str) -> Any:
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", SCRIPT, config.paths[0], str(tmp_path / cache)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    started = [start("one", "1"), start("one", "2")]
    fingerprints = {process.communicate(timeout=PATIENCE)[0].strip() for process in started}
    assert fingerprints == {learn(config, 400).fingerprint}


def test_sequences_of_its_tokens_are_made_like_of_any(tmp_path: Path) -> None:
    config = config_of(tmp_path, split="1", seq_length=8)
    tokenizer = learn(config)
    train, _, _ = build_datasets(config, tokenizer, show_progress=False)
    tokens = train.token_file.read(0, len(train.token_file)).tolist()
    assert tokens == [*tokenizer.encode_text(TEXT), 0]


def test_it_is_learned_from_the_texts_of_chats_and_datasets(tmp_path: Path) -> None:
    record = {
        "messages": [{"role": "user", "content": "zqzqzqzq " * 9}, {"role": "assistant", "content": "kvkvkv " * 9}]
    }
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "zqzqzqzq kvkvkv " * 9}) + "\n")
    for kind, name in (("chat", "chat"), ("huggingface", "rows")):
        config = DatasetConfig(kind=kind, paths=[str(tmp_path / f"{name}.jsonl")], cache_dir=str(tmp_path))
        tokenizer = learn(config)
        assert len(tokenizer.encode_text(" zqzqzqzq kvkvkv")) <= 3
        assert len(tokenizer.encode_text("messages")) == 8  # keys are no text


def test_a_corpus_that_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    (tmp_path / "half.jsonl").write_text('{"text": "a\\ud83d"}\n')
    with pytest.raises(DataError, match=r"half.jsonl:1 is not UTF-8: .*an unpaired surrogate.*; fix the record"):
        learn(DatasetConfig(paths=[str(tmp_path / "half.jsonl")], cache_dir=str(tmp_path)))
    with pytest.raises(DataError, match="bytes is not UTF-8: byte 0xff at offset 2"):
        learn(DatasetConfig(paths=[str(tmp_path / "bytes")], cache_dir=str(tmp_path)))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"no text in .*empty\.txt"):
        learn(DatasetConfig(paths=[str(tmp_path / "empty.txt")], cache_dir=str(tmp_path)))
    with pytest.raises(DataError, match="vocab_size=256 must be >= 257"):
        learn(config_of(tmp_path), 256)
    with pytest.raises(DataError, match="holds token ids, on which a tokenizer"):
        tokenizer_source(DatasetConfig(kind="megatron", paths=["x"]))


def test_a_saved_one_is_opened_by_transformers_and_by_us(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = learn(config_of(tmp_path))
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    assert {path.name for path in tokenizer.save(run)} == {"tokenizer.json", "tokenizer_config.json"}
    theirs = transformers.AutoTokenizer.from_pretrained(str(run))
    text = "the cat sat\non a log"
    assert theirs(text)["input_ids"] == tokenizer.encode_text(text)
    assert theirs.eos_token == "<|endoftext|>"
    for place in (run, run / "model"):
        opened = build_tokenizer(tokenizer_in_run(TokenizerConfig(tokenizer_type="bpe"), place))
        assert opened.fingerprint == tokenizer.fingerprint


def test_a_run_that_lost_its_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("of another run, in a directory above")
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").touch()
    with pytest.raises(DataError, match=r"its directory has no tokenizer\.json"):
        tokenizer_in_run(TokenizerConfig(tokenizer_type="bpe"), run)
    given = TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model="x.json")
    assert tokenizer_in_run(given, run) is given


@pytest.mark.parametrize("text", ["a" * 3_000_000, " " * 1_000_000], ids=["word", "space"])
def test_an_endless_line_does_not_hold_it_up(tmp_path: Path, text: str) -> None:
    tokenizer = learn(config_of(tmp_path, text))
    assert tokenizer.decode(tokenizer.encode_text(text[:9000])) == text[:9000]


def test_pieces_of_a_long_document_are_those_of_whole_lines(tmp_path: Path) -> None:
    text = "".join(f"zeile ä {number} {'x' * (number % 50)}\n" for number in range(50_000))
    assert len(text) > 1 << 20
    whole = learn(config_of(tmp_path, text))
    halves = tmp_path / "halves.jsonl"
    cut = text.index("\n", 1 << 20) + 1
    halves.write_text("".join(json.dumps({"text": half}) + "\n" for half in (text[:cut], text[cut:])))
    parts = learn(DatasetConfig(paths=[str(halves)], cache_dir=str(tmp_path)))
    assert whole.path.read_text() == parts.path.read_text()


def test_a_byte_that_is_not_text_is_named_in_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x\n" * (1 << 20) + b"\xff")
    with pytest.raises(DataError, match="long is not UTF-8: byte 0xff at offset 2097152"):
        learn(DatasetConfig(paths=[str(tmp_path / "long")], cache_dir=str(tmp_path)))


def test_a_missing_library_gives_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[hf\]'"):
        learn(config_of(tmp_path))
