"""A directory of weights keeps the ids that they were trained on, here and in `transformers`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from onstep.config import DatasetConfig
from onstep.data import ByteTokenizer, build_tokenizer, learn_bpe, tokenizer_source
from onstep.data.corpus.tokenizer_files import keep_ids_in_transformers, tokenizer_in_dir
from onstep.data.corpus.tokenizers import TokenizersTokenizer

transformers = pytest.importorskip("transformers")

TEXT = "In 1969, 12345 + 67 = ?  don't! cafe\u0301 caf\u00e9\n\n\tand  spaces   \r\n#@"


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> TokenizersTokenizer:
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.txt").write_text("In 1969 12345 67 cafe\u0301 caf\u00e9 and  spaces don't " * 30, encoding="utf-8")
    source = tokenizer_source(DatasetConfig(paths=[str(directory / "a.txt")]))
    return learn_bpe(source, 300, directory / "cache", show_progress=False)


def model_dir(directory: Path, model_type: str) -> Path:
    directory.mkdir()
    transformers.AutoConfig.for_model(model_type).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt2"])
def test_transformers_gives_the_ids_that_were_trained_on(
    model_type: str, learned: TokenizersTokenizer, tmp_path: Path
) -> None:
    directory = model_dir(tmp_path / "model", model_type)
    learned.save(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == learned.encode_content(TEXT)
    assert theirs.eos_token_id == learned.eos_id


def test_a_copied_directory_keeps_its_ids_here(learned: TokenizersTokenizer, tmp_path: Path) -> None:
    learned.save(model_dir(tmp_path / "model", "qwen2"))
    copy = Path(shutil.copytree(tmp_path / "model", tmp_path / "copy"))
    found = tokenizer_in_dir(copy)
    assert found is not None
    assert (found.tokenizer_type, found.tokenizer_model) == ("tokenizers", str(copy / "tokenizer.json"))
    assert build_tokenizer(found).encode_text(TEXT) == learned.encode_text(TEXT)


def test_a_chat_template_that_is_added_to_our_tokenizer_is_read(learned: TokenizersTokenizer, tmp_path: Path) -> None:
    learned.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = tokenizer_in_dir(tmp_path)
    assert found is not None
    assert (found.tokenizer_type, found.tokenizer_model) == ("huggingface", str(tmp_path))


def test_a_directory_of_others_is_read_by_transformers(learned: TokenizersTokenizer, tmp_path: Path) -> None:
    assert tokenizer_in_dir(tmp_path) is None
    learned.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    found = tokenizer_in_dir(tmp_path)
    assert found is not None
    assert (found.tokenizer_type, found.tokenizer_model) == ("huggingface", str(tmp_path))


def test_ids_that_cannot_be_kept_are_reported(
    learned: TokenizersTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_dir(tmp_path / "model", "llama")
    learned.save(directory)
    before = (directory / "tokenizer_config.json").read_text()
    keep_ids_in_transformers(directory, lambda text: [1, 2])
    assert "AutoTokenizer yields different token ids" in caplog.text
    assert json.loads((directory / "tokenizer_config.json").read_text()) == json.loads(before)


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "gpt2"])
def test_transformers_reads_the_bytes_of_a_text_as_its_ids(tmp_path: Path, model_type: str | None) -> None:
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = "".join(map(chr, range(1, 300))) + " a  \u4f60\u597d \U0001f600\r\n\tend "
    assert theirs(text).input_ids == ours.encode_text(text)
    assert theirs.decode(ours.encode_text(text)) == text
    assert theirs.eos_token_id == len(theirs) - 1 == ours.eos_id
