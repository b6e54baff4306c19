"""Datasets of the `datasets` library become sequences; their own evaluation splits are used; nothing of theirs runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig
from onstep.data import ByteTokenizer, build_datasets
from onstep.errors import DataError, MissingExtraError

datasets = pytest.importorskip("datasets")

TEXTS = ["first text", "second", "", "the third text of the rows"]
STREAM = [token for text in TEXTS if text for token in [*text.encode(), 256]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def config_of(tmp_path: Path, *paths: Path | str, **options: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"split": "1", "seq_length": 4, "cache_dir": str(tmp_path / "cache")} | options
    return DatasetConfig(kind="huggingface", paths=[str(path) for path in paths], **settings)


def build(config: DatasetConfig) -> Any:
    return build_datasets(config, ByteTokenizer(), show_progress=False)


def stream(dataset: Any) -> list[int]:
    tokens: list[int] = dataset.token_file.read(0, len(dataset.token_file)).tolist()
    return tokens


def rows(texts: list[str]) -> Any:
    return datasets.Dataset.from_dict({"text": texts, "other": list(range(len(texts)))})


def write_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps([{"text": text, "n": 1} for text in TEXTS]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif path.suffix == ".parquet":
        rows(TEXTS).to_parquet(path)
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        # The library reads an empty field as no text at all.
        path.write_text(f"text{separator}n\n" + "".join(f"{text}{separator}1\n" for text in TEXTS if text))
    return path


def test_a_saved_dataset_is_read_row_by_row(tmp_path: Path) -> None:
    rows(TEXTS).save_to_disk(tmp_path / "saved")
    train, valid, test = build(config_of(tmp_path, tmp_path / "saved"))
    assert stream(train) == STREAM
    assert (valid, test) == (None, None)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet", "csv", "tsv"])
def test_files_and_directories_of_each_form_give_the_same(tmp_path: Path, suffix: str) -> None:
    file = write_file(tmp_path / "in" / f"data.{suffix}")
    for path in (file, tmp_path / "in", f"{tmp_path}/in/*.{suffix}"):
        assert stream(build(config_of(tmp_path, path))[0]) == STREAM


def test_several_paths_follow_each_other(tmp_path: Path) -> None:
    first, second = write_file(tmp_path / "a.json"), write_file(tmp_path / "b.parquet")
    assert stream(build(config_of(tmp_path, first, second))[0]) == STREAM * 2


def test_own_validation_and_test_splits_are_used_where_a_share_is_asked_for(tmp_path: Path) -> None:
    own = {"train": rows(TEXTS * 5), "validation": rows(["own validation"]), "test": rows(["own test"])}
    datasets.DatasetDict(own).save_to_disk(tmp_path / "saved")
    train, valid, test = build(config_of(tmp_path, tmp_path / "saved", split="80,10,10"))
    assert (train.start, train.end) == (0, len(STREAM) * 5)
    assert stream(valid) == [*b"own validation", 256]
    assert stream(test) == [*b"own test", 256]
    train, valid, test = build(config_of(tmp_path, tmp_path / "saved", split="1"))
    assert (train.end, valid, test) == (len(STREAM) * 5, None, None)


def test_a_split_divides_what_the_dataset_has_not(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": rows(TEXTS * 5), "dev": rows(["own validation"])}).save_to_disk(tmp_path / "saved")
    train, valid, test = build(config_of(tmp_path, tmp_path / "saved", split="80,10,10"))
    assert stream(valid) == [*b"own validation", 256]
    assert (train.start, train.end, test.end) == (0, test.start, len(STREAM) * 5)
    assert test.end - test.start == 23  # a tenth of 225, up to where a token is cut


def test_names_of_files_in_a_directory_tell_the_splits(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "deep/valid_1.jsonl", ".hidden/train.jsonl", "latest.jsonl"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}))
    train, valid, _ = build(config_of(tmp_path, tmp_path / "in", split="90,10"))
    # "latest" is no "test".
    assert bytes(t for t in stream(train) if t < 256) == b"latest.jsonltrain-00000.jsonl"
    assert bytes(t for t in stream(valid) if t < 256) == b"deep/valid_1.jsonl"


def test_another_split_can_be_trained_on(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": rows(["no"]), "extra": rows(TEXTS)}).save_to_disk(tmp_path / "saved")
    assert stream(build(config_of(tmp_path, tmp_path / "saved", hf_split="extra"))[0]) == STREAM
    own = {"train": rows(["no"]), "validation": rows(TEXTS * 5)}
    datasets.DatasetDict(own).save_to_disk(tmp_path / "other")
    train, valid, _ = build(config_of(tmp_path, tmp_path / "other", hf_split="validation", split="80,20"))
    assert valid.start == train.end  # not trained on and evaluated on at once
    with pytest.raises(DataError, match=r"has no split 'nope'; set dataset.hf_split to one of \['train', 'extra'\]"):
        build(config_of(tmp_path, tmp_path / "saved", hf_split="nope"))


def test_tokens_are_cached_by_fingerprint_and_column(tmp_path: Path) -> None:
    rows(TEXTS).save_to_disk(tmp_path / "saved")
    other = rows(TEXTS[::-1]).add_column("body", ["b" * 9] * 4)
    other.save_to_disk(tmp_path / "other")

    def path_of(name: str, **options: Any) -> Path:
        path: Path = build(config_of(tmp_path, tmp_path / name, **options))[0].token_file.path
        return path

    first = path_of("saved")
    written = first.stat().st_mtime_ns
    assert (path_of("saved"), first.stat().st_mtime_ns) == (first, written)
    assert len({first, path_of("other"), path_of("other", text_key="body")}) == 3


def test_a_missing_column_and_a_row_without_text_are_named(tmp_path: Path) -> None:
    rows(TEXTS).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no column 'body' \(its columns: 'text', 'other'\); set dataset.text_key"):
        build(config_of(tmp_path, tmp_path / "saved", text_key="body"))
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "gap")
    with pytest.raises(DataError, match=r"gap:2: column 'text' must hold strings, got NoneType"):
        build(config_of(tmp_path, tmp_path / "gap"))


@pytest.mark.parametrize("name", ["data.pkl", "data.py", "data.bin"])
def test_files_that_would_be_run_or_are_unknown_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path / "in", tmp_path / "in" / name):
        with pytest.raises(DataError, match=r"must contain files of a single kind of \.json"):
            build(config_of(tmp_path, path))


def test_a_loading_script_is_not_run(tmp_path: Path) -> None:
    directory = tmp_path / "scripted"
    directory.mkdir()
    proof = tmp_path / "it-ran"
    (directory / "scripted.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    (directory / "data.jsonl").write_text('{"text": "some text"}\n')
    assert stream(build(config_of(tmp_path, directory))[0]) == [*b"some text", 256]
    assert not proof.exists()


def test_a_broken_file_and_a_missing_path_are_data_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"cannot load the dataset .*bad\.parquet"):
        build(config_of(tmp_path, tmp_path / "bad.parquet"))
    with pytest.raises(DataError, match="does not exist"):
        build(config_of(tmp_path, tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", {"_format_type": None, "_data_files": 7}),
        ("state.json", {"_data_files": [{"filename": ["x"]}], "_fingerprint": "f", "_format_type": None}),
        ("state.json", []),
        ("dataset_info.json", {"features": "text"}),
        ("dataset_info.json", {"features": {"text": 3}}),
    ],
)
def test_a_saved_dataset_with_values_of_wrong_kinds_is_a_data_error(tmp_path: Path, name: str, content: object) -> None:
    rows(["one", "two"]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"cannot load the dataset '.*saved': .*Error: .*; check its files"):
        build(config_of(tmp_path, tmp_path / "saved"))


def test_a_name_on_the_hub_without_a_network_says_so(tmp_path: Path) -> None:
    assert datasets.config.HF_HUB_OFFLINE, "as the environment of the tests says"
    with pytest.raises(DataError, match=r"cannot load the dataset 'nobody/nothing'.*the Hub requires network access"):
        build(config_of(tmp_path, "nobody/nothing"))


def test_a_hub_that_does_not_answer_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = []

    def load_dataset(*_: object, **__: object) -> None:
        asks.append(not datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'nobody/nothing'.*not in the cache.*the Hub does not answer"):
        build(config_of(tmp_path, "nobody/nothing"))
    assert (asks, datasets.config.HF_HUB_OFFLINE) == ([False], False)


def test_a_missing_library_gives_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[datasets\]'"):
        build(config_of(tmp_path, tmp_path / "x"))
