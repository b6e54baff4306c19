"""Text for which a tokenizer has no tokens is named, not lost without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers

from onstep.config import ConfigContainer, TokenizerConfig
from onstep.data import Tokenizer, build_token_file, build_tokenizer
from onstep.training import pretrain

LETTERS = {letter: number for number, letter in enumerate("<abcdefghijklmnopqrstuvwxyz")}
LATIN, CYRILLIC = "a text of latin letters ", "и русский "


def tokenizer_file(directory: Path, model: models.Model) -> Path:
    library = LibraryTokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def tokenizer(directory: Path, model: models.Model) -> Tokenizer:
    path = tokenizer_file(directory, model)
    return build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(path)))


def build(directory: Path, model: models.Model, text: str) -> None:
    corpus = directory / "corpus.txt"
    corpus.write_text(text, encoding="utf-8")
    build_token_file([corpus], tokenizer(directory, model), directory / "cache", "text", show_progress=False)


def test_characters_that_a_tokenizer_drops_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, models.BPE(LETTERS, []), LATIN + CYRILLIC)
    assert "has no tokens for 8 of 34 characters (24 %)" in caplog.text
    assert "corpus.txt, which are dropped: 'и', 'й', 'к', 'р', 'с', ...; use a tokenizer" in caplog.text


def test_unknown_tokens_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path, models.WordLevel(LETTERS | {" ": 27}, unk_token="<"), LATIN + CYRILLIC)
    assert "8 of 34 tokens (24 %) of" in caplog.text
    assert "corpus.txt are the tokenizer's unknown token; use a tokenizer" in caplog.text


def test_a_tokenizer_of_words_is_not_judged_by_its_letters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = LibraryTokenizer(models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus.txt").write_text("the cat " * 100)
    words = build_tokenizer(
        TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tmp_path / "tokenizer.json"))
    )
    build_token_file([tmp_path / "corpus.txt"], words, tmp_path / "cache", "text", show_progress=False)
    assert caplog.text == ""


@pytest.mark.parametrize("rare", ["", "é"])
def test_a_rare_character_is_not_worth_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, rare: str) -> None:
    build(tmp_path, models.BPE(LETTERS, []), LATIN * 50 + rare)
    assert caplog.text == ""


def test_a_run_names_them(tiny_config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text((LATIN + CYRILLIC) * 100, encoding="utf-8")
    tiny_config.dataset.paths, tiny_config.train.train_iters = [str(corpus)], 3
    tiny_config.tokenizer.tokenizer_type = "tokenizers"
    tiny_config.tokenizer.tokenizer_model = str(tokenizer_file(tmp_path, models.BPE(LETTERS, [])))
    pretrain(tiny_config)
    assert "the tokenizer has no tokens for 800 of 3400 characters (24 %)" in caplog.text
