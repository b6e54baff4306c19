"""Megatron's .bin and .idx files are read as they are, and what is not theirs is refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.config import DatasetConfig
from onstep.data import (
    Boundaries,
    ByteTokenizer,
    IndexedFile,
    TokenDataset,
    build_datasets,
    split_documents,
    write_indexed_dataset,
)
from onstep.errors import DataError

MEGATRON_INDEX = bytes.fromhex(
    "4d4d49444944580000" + "0100000000000000" + "08" + "0300000000000000" + "0300000000000000"
    "03000000" + "01000000" + "02000000"
    "0000000000000000" + "0600000000000000" + "0800000000000000"
    "0000000000000000" + "0200000000000000" + "0300000000000000"
)
"""Written by the IndexedDatasetBuilder of megatron-core 0.16.1: sequences [1, 2, 3] and [4] are a document, [5, 6] is
another; uint16."""


def files_of(prefix: Path, index: bytes, tokens: bytes) -> Path:
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(tokens)
    return prefix


def megatron_files(directory: Path) -> Path:
    return files_of(directory / "corpus", MEGATRON_INDEX, np.arange(1, 7, dtype="<u2").tobytes())


def test_files_of_megatron_are_read_document_by_document(tmp_path: Path) -> None:
    file = IndexedFile(megatron_files(tmp_path))
    assert (len(file), file.num_documents, file.dtype) == (6, 2, np.dtype("<u2"))
    assert [file.document(number).tolist() for number in range(2)] == [[1, 2, 3, 4], [5, 6]]
    assert file.read(2, 5).tolist() == [3, 4, 5]


def test_prefix_and_either_file_name_the_pair(tmp_path: Path) -> None:
    prefix = megatron_files(tmp_path)
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert IndexedFile(path).tokens_path == tmp_path / "corpus.bin"


def test_what_is_written_reads_back_and_megatron_has_the_same_bytes(tmp_path: Path) -> None:
    written = write_indexed_dataset(tmp_path / "own", [[1, 2, 3], [], [5]], vocab_size=300, end_id=9)
    assert [written.document(number).tolist() for number in range(3)] == [[1, 2, 3, 9], [9], [5, 9]]
    index = (tmp_path / "own.idx").read_bytes()
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    lengths, pointers, documents = [4, 1, 2], [0, 8, 10], [0, 1, 2, 3]
    assert index == header + struct.pack("<3i3q4q", *lengths, *pointers, *documents)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    file = write_indexed_dataset(tmp_path / "own", [np.array([70_000, 1])], vocab_size=70_001)
    assert (file.dtype, file.read(0, 2).tolist()) == (np.dtype("<i4"), [70_000, 1])


def test_ids_outside_the_vocabulary_are_neither_written_nor_read(tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "own", [[1], [2]], vocab_size=5)
    with pytest.raises(DataError, match=r"document 1 has token ids from -1 to 4; .* vocab_size 5"):
        write_indexed_dataset(tmp_path / "own", [[1], [4, -1]], vocab_size=5)
    assert not (tmp_path / "own.idx").exists()  # the tokens are not those of the old index any more
    file = IndexedFile(megatron_files(tmp_path), vocab_size=6)
    assert file.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"token ids from 5 to 6 between tokens 4 and 6, but the model's vocab"):
        file.read(4, 6)


def test_sequences_in_another_order_are_read_by_their_pointers(tmp_path: Path) -> None:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 3)
    index = header + struct.pack("<3i3q3q", 2, 3, 1, 12, 0, 20, 0, 1, 3)
    file = IndexedFile(files_of(tmp_path / "p", index, np.arange(10, 16, dtype="<i4").tobytes()))
    assert [file.document(number).tolist() for number in range(2)] == [[13, 14], [10, 11, 12, 15]]
    for start in range(7):
        for stop in range(start, 7):
            assert file.read(start, stop).tolist() == [13, 14, 10, 11, 12, 15][start:stop]


def damaged(at: int, value: bytes) -> bytes:
    return MEGATRON_INDEX[:at] + value + MEGATRON_INDEX[at + len(value) :]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"PK\x03\x04 some zip file that is not an index", "is not a Megatron index: it must begin with MMIDIDX"),
        (MEGATRON_INDEX[:20], "truncated: it ends within the header"),
        (MEGATRON_INDEX[:-3], "has 91 bytes, but its header implies 94; it is truncated"),
        (MEGATRON_INDEX + b"\0\0\0", "holds more than text"),
        (damaged(9, b"\x02"), "version 2; only version 1"),
        (damaged(17, b"\x07"), "ids of type 7, which is not an integer type"),
        (damaged(34, b"\x09"), "sequences up to byte 18; it is truncated or belongs to another index"),
        (damaged(34, b"\xff\xff\xff\xff"), "damaged: it has impossible lengths"),
        (damaged(42, b"\x01"), "12 bytes, but its index lists 10; it belongs to another"),
        (damaged(46, b"\x01"), "damaged: it has impossible lengths"),
        (damaged(70, b"\x01"), "the document indices must begin at 0"),
        (damaged(78, b"\x09"), "the document indices must begin at 0, increase and end at 3"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, index: bytes, message: str) -> None:
    prefix = files_of(tmp_path / "corpus", index, np.arange(1, 7, dtype="<u2").tobytes())
    with pytest.raises(DataError, match=message):
        IndexedFile(prefix)


def index_of(lengths: list[int], pointers: list[int], documents: list[int]) -> bytes:
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(lengths), len(documents))
    parts = (lengths, "<i4"), (pointers, "<i8"), (documents, "<i8")
    return header + b"".join(np.array(values, dtype=dtype).tobytes() for values, dtype in parts)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (index_of([4, 2], [0, 2**63 - 2], [0, 1, 2]), "sequences up to byte 9223372036854775810; it is truncated"),
        (index_of([6], [0], [0, 2**62, 2**63 - 1, -(2**63), -(2**62), 0, 1]), "the document indices must begin at 0"),
        (index_of([], [], [0]), "has no sequences"),
        (damaged(18, b"\xff" * 8), "its header implies"),
    ],
)
def test_numbers_that_overflow_are_refused(tmp_path: Path, index: bytes, message: str) -> None:
    prefix = files_of(tmp_path / "corpus", index, np.arange(1, 7, dtype="<u2").tobytes())
    with pytest.raises(DataError, match=message):
        IndexedFile(prefix)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(b"", "positive multiple of 2"), (b"123", "positive multiple of 2"), (b"12", "up to byte 12")],
)
def test_tokens_that_are_cut_off_are_refused(tmp_path: Path, tokens: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        IndexedFile(files_of(tmp_path / "corpus", MEGATRON_INDEX, tokens))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    megatron_files(tmp_path)
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(DataError, match=r"corpus\.idx is missing"):
        IndexedFile(tmp_path / "corpus")


def test_it_travels_to_workers_by_its_path(tmp_path: Path) -> None:
    file = IndexedFile(megatron_files(tmp_path), vocab_size=7)
    travelled: IndexedFile = pickle.loads(pickle.dumps(file))
    assert travelled.read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert len(pickle.dumps(file)) < 1000


def test_splits_are_of_whole_documents_and_each_token_comes_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, size=rng.integers(1, 40)).tolist() for _ in range(40)]
    file = write_indexed_dataset(tmp_path / "own", documents, vocab_size=60, end_id=59)
    parts = split_documents(file, "60,20,20", 8)
    expected = [documents[:24], documents[24:32], documents[32:]]
    for part, own in zip(parts, expected, strict=True):
        assert part is not None
        stream = [token for document in own for token in [*document, 59]]
        batch = part.get_batch(range(len(part)))
        assert batch["tokens"].flatten().tolist() == stream[: len(part) * 8]
        assert batch["labels"].flatten().tolist() == stream[1 : len(part) * 8 + 1]
        assert len(part) == (len(stream) - 1) // 8


def test_a_range_without_a_sequence_names_the_split(tmp_path: Path) -> None:
    file = write_indexed_dataset(tmp_path / "own", [[1, 2, 3]] * 4, vocab_size=60)
    with pytest.raises(DataError, match=r"validation share of split '75,25' of 4 documents of .*own\.bin"):
        split_documents(file, "75,25", 8)


def config_of(*prefixes: Path, **options: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"split": "1", "seq_length": 4} | options
    return DatasetConfig(kind="megatron", paths=[str(prefix) for prefix in prefixes], **settings)


def test_a_configuration_reads_them_against_the_models_vocabulary(tmp_path: Path) -> None:
    write_indexed_dataset(tmp_path / "own", [range(250, 270)], vocab_size=300)
    train, _, _ = build_datasets(config_of(tmp_path / "own"), ByteTokenizer(), show_progress=False, vocab_size=300)
    assert train[3]["tokens"].tolist() == [262, 263, 264, 265]
    train, _, _ = build_datasets(config_of(tmp_path / "own"), ByteTokenizer(), show_progress=False)
    with pytest.raises(DataError, match="set the tokenizer that the files were made with"):
        train.get_batch([3])


def test_ends_of_documents_mask_the_loss_and_keep_attention_apart(tmp_path: Path) -> None:
    file = write_indexed_dataset(tmp_path / "own", [[1, 2], [3], [4, 5, 6], [7]], vocab_size=10, end_id=0)
    dataset = TokenDataset(file, 0, len(file), 10, Boundaries(0, masks_loss=True, resets_attention=True))
    batch = {key: value.tolist() for key, value in dataset[0].items()}
    assert batch == {
        "tokens": [1, 2, 0, 3, 0, 4, 5, 6, 0, 7],
        "labels": [2, 0, -100, 0, -100, 5, 6, 0, -100, 0],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2, 3, 0],
        "document_ids": [0, 0, 0, 1, 1, 2, 2, 2, 2, 3],
    }


def test_boundaries_take_an_end_token(tmp_path: Path) -> None:
    class Endless(ByteTokenizer):
        eos_id = None

    (tmp_path / "a.txt").write_text("some text " * 50)
    for option in ("eod_mask_loss", "reset_attention_mask"):
        settings: Any = {"paths": [str(tmp_path / "a.txt")], "seq_length": 8, "cache_dir": str(tmp_path), option: True}
        with pytest.raises(DataError, match="require an end token, and the tokenizer has none"):
            build_datasets(DatasetConfig(**settings), Endless(), show_progress=False)
        train, _, _ = build_datasets(DatasetConfig(**settings), ByteTokenizer(), show_progress=False)
        assert ("document_ids" in train[0]) == (option == "reset_attention_mask")


def test_megatrons_own_reader_reads_what_is_written(tmp_path: Path) -> None:
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write_indexed_dataset(tmp_path / "own", [[1, 2, 3], [5]], vocab_size=300, end_id=9)
    theirs = module.IndexedDataset(str(tmp_path / "own"))
    assert [theirs[number].tolist() for number in range(2)] == [[1, 2, 3, 9], [5, 9]]
    assert theirs.document_indices.tolist() == [0, 1, 2]
