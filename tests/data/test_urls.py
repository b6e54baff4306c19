"""What the URLs of `dataset.paths` name is downloaded once, and reads as the same files in a local directory do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.main import main
from onstep.config import DatasetConfig, TokenizerConfig
from onstep.data import build_datasets, build_tokenizer, write_indexed_dataset
from onstep.data.corpus.input_files import dataset_files
from onstep.data.corpus.text_files import find_files, find_records
from onstep.data.urls.local_copy import input_files, local_copy, url_cache
from onstep.data.urls.objects import stored_files
from onstep.errors import DataError

MARKED = "marked-password"
FILES = {
    "corpus/a.txt": "some text. " * 60,
    "corpus/b.md": "more text. " * 40,
    "corpus/deep/er/c.txt": "deep text. " * 50,
    "corpus/deep/d.jsonl": '{"text": "a record"}\n' * 30,
    "corpus/[1] ü.txt": "odd names. " * 20,
    "corpus/.hidden/e.txt": "hidden",
    "corpus/.f.txt": "hidden",
    "corpus/g.gz": "not text",
    "corpus/run/.run.lock": "",
    "corpus/run/record.jsonl": '{"kind": "start"}\n',
    "other/h.txt": "text elsewhere. " * 30,
}
PATHS = [
    ["corpus"],
    ["corpus/"],
    ["corpus/a.txt"],
    ["corpus/[1] ü.txt", "corpus/b.md"],
    ["corpus/*.txt"],
    ["corpus/**/*.txt"],
    ["corpus/d*"],
    ["corpus/deep", "corpus", "other/h.txt"],
    ["*/*.txt"],
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "store"


def config_of(store: Path, paths: list[str], *, url: bool = True, **further: Any) -> DatasetConfig:
    base = f"file://{store}" if url else str(store)
    return DatasetConfig(paths=[f"{base}/{path}" for path in paths], cache_dir=str(store.parent / "cache"), **further)


@pytest.mark.parametrize("paths", PATHS, ids=" ".join)
def test_a_url_names_the_files_that_the_same_local_path_names(store: Path, paths: list[str]) -> None:
    local = find_files(config_of(store, paths, url=False).paths)
    copy = local_copy(config_of(store, paths))
    assert [copy.url_of(path) for path in find_files(copy.config.paths)] == [f"file://{path}" for path in local]
    assert copy.tags.keys() >= {f"file://{path}" for path in local}
    assert not any("hidden" in url or url.endswith((".gz", "record.jsonl")) for url in copy.tags)


def test_records_are_found_as_in_a_local_directory(store: Path) -> None:
    local = find_records(config_of(store, ["corpus"], url=False).paths)
    copy = local_copy(config_of(store, ["corpus"], kind="chat"))
    assert [copy.url_of(path) for path in find_records(copy.config.paths)] == [f"file://{path}" for path in local]


def test_the_same_files_have_the_same_digest_and_tokens_and_are_recorded_by_url(store: Path) -> None:
    here = config_of(store, ["corpus", "other"], url=False, seq_length=16, split="1")
    there = config_of(store, ["corpus", "other"], seq_length=16, split="1")
    local, found = dataset_files(here), input_files(there)
    assert local is not None
    assert found is not None
    assert found.digest == local.digest
    assert found.files == {f"file://{store}/{name}": digest for name, digest in local.files.items()}
    assert found.tags.keys() == found.files.keys()
    tokenizer = build_tokenizer(TokenizerConfig())
    one, other = (build_datasets(config, tokenizer, show_progress=False)[0] for config in (here, there))
    assert len(one) == len(other) > 10
    assert all(one[at]["tokens"].tolist() == other[at]["tokens"].tolist() for at in range(len(one)))


def test_token_files_are_read_by_their_prefix(store: Path) -> None:
    write_indexed_dataset(store / "tokens", [[1, 2, 3, 4, 5, 6, 7, 8]] * 20, vocab_size=10)
    tokenizer = build_tokenizer(TokenizerConfig())
    for name in ("tokens", "tokens.bin"):
        config = config_of(store, [name], kind="megatron", seq_length=8, split="1")
        data = build_datasets(config, tokenizer, show_progress=False, vocab_size=10)[0]
        assert data[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    (store / "tokens.idx").unlink()
    with pytest.raises(DataError, match=r"file://.*/tokens\.idx is missing"):
        build_datasets(config, tokenizer, show_progress=False, vocab_size=10)


def test_a_version_is_downloaded_once_and_a_changed_file_is_another_one(store: Path) -> None:
    config = config_of(store, ["corpus/a.txt", "corpus/b.md"])
    before, cache = local_copy(config), url_cache(config)
    entries = cache.entries()
    assert [(one.url, one.size) for one in entries] == [
        (f"file://{store}/{name}", len(FILES[name])) for name in ("corpus/a.txt", "corpus/b.md")
    ]
    stamps = {path: path.stat().st_mtime_ns for path in cache.directory.rglob("*") if path.is_file()}
    assert local_copy(config) == before
    assert {path: path.stat().st_mtime_ns for path in cache.directory.rglob("*") if path.is_file()} == stamps
    (store / "corpus/a.txt").write_text("s0me text. " * 60)  # as many bytes
    after = local_copy(config)
    assert len(cache.entries()) == 3
    assert [Path(one.config.paths[0]).read_text()[:5] for one in (before, after)] == ["some ", "s0me "]
    assert before.config.paths[1] != after.config.paths[1]
    assert Path(before.config.paths[1]).samefile(after.config.paths[1])


def test_only_whole_files_are_used(store: Path) -> None:
    config = config_of(store, ["corpus/a.txt"])
    [path] = local_copy(config).config.paths
    content = Path(path).resolve()
    record = content.with_suffix(".json")
    for harm in (lambda: os.truncate(content, 5), record.unlink, lambda: record.write_text('{"url"'), content.unlink):
        harm()
        content.with_name(f"{content.name}.part").write_text("what a killed download has left")
        assert not url_cache(config).entries()
        assert local_copy(config).config.paths == [path]
        assert Path(path).read_text() == FILES["corpus/a.txt"]


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (
            ["file:///nowhere/corpus"],
            "file:///nowhere/corpus names no file that dataset.kind=text reads; check the URL",
        ),
        (["file:///nowhere/*.txt"], "names no file"),
        (["s3://bucket/../x"], "must not have '.' or '..' in its path"),
        ([f"s3://user:{MARKED}@bucket/x"], "must be a plain URL without credentials"),
        ([f"s3://bucket/x?X-Amz-Signature={MARKED}"], "must be a plain URL without credentials"),
        ([f"https://user:{MARKED}@host/x.txt?sig={MARKED}"], "is not the URL of an object store"),
        (["s3://bucket/x", "/data/y"], "the order of their files would depend on the machine"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line_without_secrets(
    paths: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONSTEP_CACHE", str(tmp_path / "cache"))
    assert main(["train", "tiny_gpt", f"dataset.paths={json.dumps(paths)}"]) == 1
    output = capsys.readouterr()
    assert said in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert MARKED not in output.out + output.err
    assert not any(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named(store: Path) -> None:
    config = config_of(store, ["corpus/a.txt"])
    (store.parent / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cannot write downloaded files to .* set dataset\.cache_dir or ONSTEP_CACHE"):
        local_copy(config)


def test_errors_in_the_data_name_its_url(store: Path) -> None:
    (store / "bad.jsonl").write_text('{"text": 3}\n')
    config = config_of(store, ["bad.jsonl"], seq_length=8)
    with pytest.raises(DataError) as raised:
        build_datasets(config, build_tokenizer(TokenizerConfig()), show_progress=False)
    assert f"file://{store}/bad.jsonl:1" in str(raised.value)
    assert "cache" not in str(raised.value)


def test_a_stream_and_local_paths_are_left_as_they_are(store: Path) -> None:
    for config in (config_of(store, ["corpus"], url=False), config_of(store, ["corpus/x.jsonl"], kind="stream")):
        assert local_copy(config).config is config
    assert stored_files(config_of(store, ["corpus/a.txt"]))[0].url == f"file://{store}/corpus/a.txt"


def test_the_cache_is_shown_and_emptied(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(store, ["corpus/a.txt"])
    local_copy(config)
    words = ["data", "cache", "--dir", str(config.cache_dir)]
    assert main([*words, "--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)["files"]
    assert (entry["url"], entry["size"]) == (f"file://{store}/corpus/a.txt", len(FILES["corpus/a.txt"]))
    (store.parent / "cache" / "0.tokens").write_text("the tokens of a run")
    assert main([*words, "--clear"]) == 0
    assert "1 file, 660 B, in " in capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("0 files, 0 B, in ")
    assert (store.parent / "cache" / "0.tokens").exists()
