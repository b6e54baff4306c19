"""Tokenizers: bytes, a `tokenizer.json`, a local `transformers` directory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from onstep.config import DatasetConfig, TokenizerConfig
from onstep.data import build_datasets, build_tokenizer, learn_bpe, tokenizer_source
from onstep.errors import DataError, MissingExtraError

WORDS = {"<|endoftext|>": 0, "the": 1, "cat": 2, "sat": 3, "[UNK]": 9}


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # Would add tokens to every text, which is not wanted in a corpus.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A the", special_tokens=[("the", 1)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def tokenizer_dir(tokenizer_file: Path, tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "pretrained"
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>", unk_token="[UNK]"
    ).save_pretrained(directory)
    return directory


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """The file of a BPE that is learned from a few words."""
    (tmp_path / "words.txt").write_text("the cat sat, 123 times " * 20)
    source = tokenizer_source(DatasetConfig(paths=[str(tmp_path / "words.txt")]))
    return learn_bpe(source, 270, tmp_path / "cache", show_progress=False).path


def test_bytes_take_anything_and_give_it_back() -> None:
    tokenizer = build_tokenizer(TokenizerConfig())
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert np.asarray(tokenizer.encode(b"a\xff")).tolist() == [97, 255]
    assert tokenizer.encode_text("ü") == [0xC3, 0xBC]
    assert tokenizer.decode([*tokenizer.encode_text("grün"), 256]) == "grün"
    assert tokenizer.decode([97, 0xFF, 98]) == "a\ufffdb"


def test_a_tokenizers_file_is_used_without_special_tokens(tokenizer_file: Path) -> None:
    config = TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tokenizer_file))
    tokenizer = build_tokenizer(config)
    assert tokenizer.encode_text("the cat sat flat") == [1, 2, 3, 9]
    assert list(tokenizer.encode(b"cat sat")) == [2, 3]
    assert tokenizer.decode([1, 2]) == "the cat"
    assert tokenizer.eos_id == 0
    assert tokenizer.vocab_size == 10  # ids have gaps: 5 entries, the largest is 9
    with pytest.raises(UnicodeDecodeError):
        tokenizer.encode(b"cat \xff")


def test_a_local_transformers_tokenizer_is_used_without_special_tokens(tokenizer_dir: Path) -> None:
    config = TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(tokenizer_dir))
    tokenizer = build_tokenizer(config)
    assert tokenizer.encode_text("the cat sat flat") == [1, 2, 3, 9]
    assert list(tokenizer.encode(b"cat sat")) == [2, 3]
    assert tokenizer.decode([1, 2, 0]) == "the cat"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (0, 10)


@pytest.mark.parametrize("kind", ["tokenizers", "huggingface"])
def test_a_special_token_in_a_text_is_text_and_in_a_prompt_the_token(kind: str, learned: Path, tmp_path: Path) -> None:
    model = learned
    if kind == "huggingface":
        model = tmp_path / "folder"
        model.mkdir()
        build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(learned))).save(model)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))
    text = "a<|endoftext|>b"
    assert 0 not in tokenizer.encode(text.encode())
    assert tokenizer.decode([int(token) for token in tokenizer.encode(text.encode())]) == text
    assert tokenizer.encode_text(text)[1] == 0
    assert tokenizer.encode_content(text) == list(tokenizer.encode(text.encode()))
    assert tokenizer.fingerprint.startswith(f"{kind} 2-")  # token files of before it was so are not taken


@pytest.mark.parametrize("kind", ["tokenizers", "huggingface"])
def test_the_fingerprint_follows_the_content(kind: str, tokenizer_file: Path, tokenizer_dir: Path) -> None:
    model = tokenizer_file if kind == "tokenizers" else tokenizer_dir
    config = TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model))
    first = build_tokenizer(config).fingerprint
    assert build_tokenizer(config).fingerprint == first
    path = model if model.is_file() else model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["dog"] = 4
    path.write_text(json.dumps(content))
    assert build_tokenizer(config).fingerprint != first


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("byte", None, "unknown tokenizer_type 'byte'. Did you mean 'bytes'"),
        ("hugingface", "x", "Did you mean 'huggingface'"),
        ("bytes", "x.json", "does not use tokenizer_model, got 'x.json'"),
        ("tokenizers", None, "requires tokenizer_model"),
        ("huggingface", None, "requires tokenizer_model"),
        ("tokenizers", "missing.json", "cannot read tokenizer file .*missing.json': No such file"),
        ("tokenizers", ".", "is a directory; give its tokenizer.json"),
        ("tokenizers", "bad.json", "bad.json is not a tokenizer"),
        ("huggingface", "missing", "is not a directory"),
        ("huggingface", ".", "does not contain a tokenizer that transformers can load"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_remedy(
    tmp_path: Path, kind: str, model: str | None, message: str
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    path = model if model is None or kind == "bytes" else str(tmp_path / model)
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=path))


def test_a_directory_cannot_bring_code_along(tokenizer_dir: Path) -> None:
    marker = tokenizer_dir / "ran"
    (tokenizer_dir / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    path = tokenizer_dir / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="trust_remote_code"):
        build_tokenizer(TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(tokenizer_dir)))
    assert not marker.exists()


def altered(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes, "model": {**content["model"], **changes.get("model", {})}}))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab": {**WORDS, "the": 2**32 - 1}}, "gives 'the' the id 4294967295; .* below 4194304"),
        ({"vocab": {}}, "empty vocabulary"),
        ({"vocab": {"the": -1}}, "is not a tokenizer of the `tokenizers` library"),
        ({"vocab": ["the"]}, "is not a tokenizer of the `tokenizers` library"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tokenizer_file: Path, model: dict[str, object], message: str) -> None:
    altered(tokenizer_file, model=model)
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tokenizer_file)))


def test_a_tokenizer_that_fails_on_a_document_says_where(tokenizer_file: Path, tmp_path: Path) -> None:
    altered(tokenizer_file, model={"unk_token": "<missing>"})
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tokenizer_file)))
    with pytest.raises(DataError, match=r"cannot encode this text: .*Missing"):
        tokenizer.encode_text("a mat")
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat"}\n{"text": "a mat"}\n')
    config = DatasetConfig(paths=[str(tmp_path / "rows.jsonl")], cache_dir=str(tmp_path), split="1", seq_length=1)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the tokenizer .* cannot encode this text"):
        build_datasets(config, tokenizer, show_progress=False)


def test_a_panic_of_the_library_is_an_error_with_its_words(tokenizer_file: Path) -> None:
    regex = {"type": "Split", "pattern": {"Regex": r"(a+a+)+b"}, "behavior": "Isolated", "invert": False}
    altered(tokenizer_file, pre_tokenizer=regex)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tokenizer_file)))
    with pytest.raises(DataError, match=r"cannot encode this text: PanicException: .*retry-limit"):
        tokenizer.encode(b"a" * 64)


TIMES_EIGHT = {"type": "Replace", "pattern": {"String": "t"}, "content": "t" * 8}


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}, "the normalizer of .* 1,000,000 times as long"),
        ("normalizer", {"type": "Sequence", "normalizers": [TIMES_EIGHT] * 4}, "4,096 times as long, and at most 1000"),
        (
            "normalizer",
            {"type": "Precompiled", "precompiled_charsmap": "/////wAA"},
            "its precompiled_charsmap claims 4,294,967,295 b",
        ),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "is not a tokenizer of .*PanicException"),
        ("decoder", {"type": "Sequence", "decoders": [TIMES_EIGHT] * 4}, "the decoder of .* 4,096 times as long"),
    ],
)
def test_a_part_that_could_fill_the_memory_is_refused(
    tokenizer_file: Path, name: str, part: dict[str, object], message: str
) -> None:
    altered(tokenizer_file, **{name: part})
    with pytest.raises(DataError, match=message):
        build_tokenizer(TokenizerConfig(tokenizer_type="tokenizers", tokenizer_model=str(tokenizer_file)))


@pytest.mark.parametrize("kind", ["tokenizers", "huggingface"])
def test_a_huge_file_is_refused_before_it_is_read(kind: str, tokenizer_file: Path, tokenizer_dir: Path) -> None:
    path = tokenizer_file if kind == "tokenizers" else tokenizer_dir / "tokenizer.json"
    os.truncate(path, 8 << 30)
    model = tokenizer_file if kind == "tokenizers" else tokenizer_dir
    with pytest.raises(DataError, match="has 8,589,934,592 bytes, and at most 67,108,864 are read"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"eos_token": ["</s>"]}),
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": "text"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"extra_special_tokens": 1}),
        ("tokenizer_config.json", {"tokenizer_class": 5.0}),
        ("tokenizer_config.json", None),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": [{"id": "x"}]}),
        ("tokenizer.json", {"added_tokens": ["text"]}),
        ("tokenizer.json", None),
    ],
)
def test_a_directory_with_values_of_wrong_kinds_is_refused(
    tokenizer_dir: Path, name: str, changes: dict[str, object] | None
) -> None:
    path = tokenizer_dir / name
    path.write_text("[" * 100_000 if changes is None else json.dumps({**json.loads(path.read_text()), **changes}))
    says = {
        "tokenizer.json": r"tokenizer\.json is not a tokenizer of the `tokenizers` library; give a tokenizer\.json: ",
        "tokenizer_config.json": r"transformers can load; restore it or give another: \w*(Error|Exception): ",
    }
    with pytest.raises(DataError, match=says[name]):
        build_tokenizer(TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(tokenizer_dir)))


@pytest.mark.parametrize(("kind", "library"), [("tokenizers", "tokenizers"), ("huggingface", "transformers")])
def test_a_missing_library_gives_the_install_line(
    kind: str, library: str, tokenizer_file: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    model = tokenizer_file if kind == "tokenizers" else tokenizer_dir
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[hf\]'"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(model)))
