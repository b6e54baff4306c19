"""Streams: each record once, from any position, on any number of ranks; what is held out; files that cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.config import DatasetConfig
from onstep.data import ByteTokenizer, StreamLoader, build_datasets
from onstep.data.corpus.input_files import check_first_files
from onstep.data.corpus.remote_file import RemoteFile
from onstep.data.streams.line_file import LineFile
from onstep.data.streams.parquet_file import ParquetFile
from onstep.data.streams.record_stream import RecordStream, WindowTask
from onstep.errors import DataError
from tests.support.file_server import file_server

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LENGTH = 16
"""Tokens of a sequence, which is one record of 15 bytes and its end token."""
BATCH = 6


def texts(count: int, start: int = 0) -> list[str]:
    return [f"{number:015d}" for number in range(start, start + count)]


def lines(records: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in records)


def write_gz(path: Path, records: Sequence[str]) -> None:
    path.write_bytes(gzip.compress(lines(records)))


def write_zst(path: Path, records: Sequence[str]) -> None:
    raw = lines(records)
    path.write_bytes(b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in (raw[:999], raw[999:])))


def write_parquet(path: Path, records: Sequence[str]) -> None:
    pq.write_table(
        pa.table({"text": records, "id": list(range(len(records)))}), path, row_group_size=7 * len(path.name)
    )


WRITERS: dict[str, Callable[[Path, Sequence[str]], Any]] = {
    "jsonl": lambda path, records: path.write_bytes(lines(records)),
    "jsonl.gz": write_gz,
    "jsonl.zst": write_zst,
    "parquet": write_parquet,
}


def config_of(*paths: object, **keys: Any) -> DatasetConfig:
    given = {"seq_length": LENGTH, "stream_window_bytes": 700, "split": "100", **keys}
    return DatasetConfig(kind="stream", paths=[str(path) for path in paths], **given)


def loader_of(config: DatasetConfig, rank: int = 0, world_size: int = 1, **reading: Any) -> StreamLoader:
    train, _, _ = build_datasets(config, ByteTokenizer(), show_progress=False)
    sizes = {"micro_batch_size": 1, "global_batch_size": BATCH, "rank": rank, "world_size": world_size}
    return StreamLoader(train, **{"seed": 1, **sizes, **reading})


def read(ranks: Sequence[StreamLoader], num_steps: int = 1000) -> list[int]:
    """The numbers of the records of some steps, in the order of the samples."""
    found = []
    for _ in range(num_steps):
        steps = [rank.read(BATCH // len(ranks)) for rank in ranks]
        if steps[0] is None:
            break
        rows = [step.micro_batches[at]["tokens"] for at in range(len(steps[0].micro_batches)) for step in steps if step]
        found += [int(bytes(row[:15].tolist())) for batch in rows for row in batch]
    return found


def read_into(found: list[int], loader: StreamLoader) -> None:
    """Read step by step, so that what is read before an error is kept."""
    for _ in range(1000):
        found += read([loader], 1)


def files(tmp_path: Path, suffix: str, counts: Sequence[int] = (120, 90, 84)) -> list[Path]:
    paths, start = [], 0
    for number, count in enumerate(counts):
        paths.append(tmp_path / f"{'x' * number}part.{suffix}")
        WRITERS[suffix](paths[-1], texts(count, start))
        start += count
    return paths


@pytest.mark.parametrize("suffix", WRITERS)
def test_each_record_once_however_often_and_on_how_many_ranks_it_is_resumed(tmp_path: Path, suffix: str) -> None:
    config = config_of(*files(tmp_path, suffix))
    whole = read([loader_of(config)])
    assert sorted(whole) == list(range(294))
    assert whole != sorted(whole)
    got, state, choose = [], None, random.Random(1)
    while state is None or state["epoch"] == 0:
        world_size = choose.choice([1, 2, 3])
        ranks = [loader_of(config, rank, world_size) for rank in range(world_size)]
        for rank in ranks if state else ():
            rank.load_state_dict(state)
            rank.seek(state["epoch"], state["samples_in_epoch"])
        got += read(ranks, choose.randint(1, 9))
        states = [rank.state_dict() for rank in ranks]
        assert all(one == states[0] for one in states)
        state = json.loads(json.dumps(states[0]))
    assert got == whole


def test_workers_read_the_same(tmp_path: Path) -> None:
    config = config_of(*files(tmp_path, "parquet"), *files(tmp_path, "jsonl", (30,)))
    assert read([loader_of(config, num_workers=2)]) == read([loader_of(config)])


def test_the_order_depends_on_seed_and_pass(tmp_path: Path) -> None:
    config = config_of(*files(tmp_path, "jsonl"))
    loader = loader_of(config)
    orders = [read([loader]), read([loader]), read([loader_of(config, seed=2)])]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    loader = loader_of(replace(config, paths=config.paths[:1]))
    assert read([loader]) != read([loader])
    assert read([loader_of(config, shuffle=False)]) == sorted(orders[0])


def test_a_position_without_its_place_is_reached_by_reading_again(tmp_path: Path) -> None:
    config = config_of(*files(tmp_path, "jsonl"))
    loader = loader_of(config)
    loader.seek(0, 5 * BATCH)
    assert read([loader]) == read([loader_of(config)])[5 * BATCH :]


def test_epochs_of_some_tokens_go_on_in_the_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(*files(tmp_path, "jsonl"), stream_epoch_tokens=LENGTH * 150)
    loader = loader_of(config)
    assert (loader.num_samples, loader.steps_per_epoch(BATCH)) == (150, 25)
    epochs = [read([loader]), read([loader])]
    assert [len(epoch) for epoch in epochs] == [150, 150]
    assert sorted(epochs[0] + epochs[1][:144]) == list(range(294))
    state = loader.state_dict()
    after = loader_of(config)
    after.load_state_dict(state)
    assert state["epoch"] == 2
    assert read([after], 3) == read([loader], 3)
    assert caplog.records == []  # nothing is read again to find a place


def test_no_token_of_a_window_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["abc", "d" * 40, "", "ef"]))
    train, _, _ = build_datasets(config_of(path), ByteTokenizer(), show_progress=False)
    loader = StreamLoader(train, micro_batch_size=1, global_batch_size=1, shuffle=False)
    steps = [loader.read(1) for _ in range(4)]
    batches = [step.micro_batches[0] for step in steps if step]
    labels = torch.cat([batch["labels"][0] for batch in batches])
    assert steps[3] is None
    assert labels[labels >= 0].tolist() == [*b"bc", 256, *b"d" * 40, 256, *b"ef", 256]


def test_documents_are_marked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["abc", "defgh", "i" * 20]))
    config = config_of(path, reset_attention_mask=True, shuffle=False)
    train, _, _ = build_datasets(config, ByteTokenizer(), show_progress=False)
    batch = StreamLoader(train, micro_batch_size=1, global_batch_size=1, shuffle=False).read(1).micro_batches[0]
    assert batch["document_ids"][0].tolist() == [0] * 4 + [1] * 6 + [2] * 6
    assert batch["position_ids"][0].tolist() == [*range(4), *range(6), *range(6)]


def test_chats_are_those_of_the_kind_chat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "response": "x" * n}) + "\n" for n in range(1, 20)))
    config = config_of(path, stream_of="chat", seq_length=128, stream_window_bytes=1 << 20, shuffle=False)
    train, _, _ = build_datasets(config, ByteTokenizer(), show_progress=False)
    loader = StreamLoader(train, micro_batch_size=1, global_batch_size=1, shuffle=False)
    chat = replace(config, kind="chat", stream_of="text", stream_window_bytes=4 << 20, cache_dir=str(tmp_path / "c"))
    packed, _, _ = build_datasets(chat, ByteTokenizer(), show_progress=False)
    for number in range(len(packed)):
        batch, expected = loader.read(1).micro_batches[0], packed.get_batch([number])
        assert batch.keys() == expected.keys()
        assert all(batch[key].equal(expected[key]) for key in batch)
    assert loader.read(1) is None
    caplog.clear()
    short = loader_of(replace(config, seq_length=40, stream_window_bytes=100))
    while short.read(BATCH):
        pass
    [told] = [record.message for record in caplog.records]  # of many windows
    assert re.fullmatch(r"in a window .*, of \d conversations, \d are longer than seq_length=40 and .* in others", told)


def test_held_out_records_are_not_trained_on(tmp_path: Path) -> None:
    config = config_of(*files(tmp_path, "parquet"), split="80,10,10")
    train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    loader = StreamLoader(train, micro_batch_size=1, global_batch_size=BATCH, drop_last=False)
    seen = read([loader])
    held = [int(bytes(valid[n]["tokens"][:15].tolist())) for n in range(len(valid))]
    held += [int(bytes(test[n]["tokens"][:15].tolist())) for n in range(len(test))]
    assert min(len(valid), len(test)) > 10
    assert sorted({*seen, *held}) == list(range(294))
    assert not set(seen) & set(held)


def test_no_more_of_a_stream_is_read_for_validation_than_its_samples_require(tmp_path: Path) -> None:
    good, bad = files(tmp_path, "jsonl", (120,))[0], tmp_path / "bad.jsonl"
    bad.write_bytes(lines(texts(1, 120)) + b"not a record\n" * 9)
    config = config_of(good, bad, split="50,50", stream_validation_samples=5)
    _, valid, _ = build_datasets(config, ByteTokenizer(), show_progress=False)
    assert len(valid) >= 5


def test_a_stream_that_is_being_read_can_be_sent_to_another_process(tmp_path: Path) -> None:
    config = config_of(*files(tmp_path, "jsonl.gz"))
    train, _, _ = build_datasets(config, ByteTokenizer(), show_progress=False)
    task = WindowTask(file=0, window=0, order=None)
    with closing(train):
        first = train[task]
        with closing(pickle.loads(pickle.dumps(train))) as sent:
            assert repr(sent[task].samples[0]) == repr(first.samples[0])


def test_validation_on_other_files_and_on_those_of_a_directory(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows" / "data").mkdir(parents=True)
    write_parquet(tmp_path / "rows" / "data" / "train-00000-of-00001.parquet", texts(30))
    write_parquet(tmp_path / "rows" / "data" / "validation-00000-of-00001.parquet", texts(9, 500))
    (other,) = files(tmp_path, "jsonl.gz", (5,))
    config = config_of(tmp_path / "rows", split="90,10")
    for given, count in ((config, 9), (replace(config, stream_validation_paths=[str(other)]), 5)):
        train, valid, _ = build_datasets(given, ByteTokenizer(), show_progress=False)
        assert len(valid) == count
        assert len(read([StreamLoader(train, micro_batch_size=1, global_batch_size=BATCH)])) == 30


def test_a_server_is_asked_for_what_is_needed_and_again_when_it_breaks(tmp_path: Path) -> None:
    contents = {f"/{n:02d}.jsonl": lines(texts(100, 100 * n)) for n in range(3)}
    with file_server(contents.get, breaks_after=1500) as served:
        config = config_of(f"{served.url}/{{00..02}}.jsonl", stream_window_bytes=1000)
        loader = loader_of(config)
        first = read([loader], 40)
        state, resumed = loader.state_dict(), (loader_of(config, 0, 2), loader_of(config, 1, 2))
        del served.ranges[:]
        for rank in resumed:
            rank.load_state_dict(state)
        rest = read(resumed)
        assert sorted(first + rest) == list(range(300))
        assert len({path for path, _ in served.ranges}) == 1  # those of the first 240 records are not read again
    with file_server(contents.get, has_ranges=False) as served:
        config = config_of(f"{served.url}/01.jsonl", stream_window_bytes=1000)
        assert sorted(read([loader_of(config, drop_last=False)])) == list(range(100, 200))


def test_row_groups_before_the_place_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    unread = [random.Random(number).randbytes(150).hex() for number in range(3000)]
    pq.write_table(pa.table({"unread": unread, "text": texts(3000)}), path, row_group_size=100)
    content = path.read_bytes()
    with file_server(lambda _: content) as served:
        config = config_of(f"{served.url}/a.parquet", stream_window_bytes=1500)
        loader, again = loader_of(config), loader_of(config)
        first = read([loader], 480)
        again.load_state_dict(loader.state_dict())
        del served.ranges[:]
        assert sorted(first + read([again])) == list(range(3000))
    assert min(start for _, start in served.ranges if start) > 0.8 * len(content)


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    waited: list[float] = []
    with (
        file_server(lambda path: lines(texts(100)), breaks_after=0) as served,
        pytest.raises(OSError, match="byte 0 of"),
    ):
        RemoteFile(f"{served.url}/a.jsonl", waited.append).read(10)
    assert len(waited) == 7
    with (
        file_server(lambda path: None) as served,
        pytest.raises(DataError, match=r"cannot read http.*404.*start the run"),
    ):
        loader_of(config_of(f"{served.url}/a.jsonl"))


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4 + 5])


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_file_that_ends_early_or_is_gone_is_named_and_loses_nothing(tmp_path: Path, suffix: str) -> None:
    first, second, _ = files(tmp_path, suffix)
    config = config_of(first, second)
    whole = read([loader_of(config, shuffle=False)])
    content = second.read_bytes()
    for harm in (cut, os.unlink):
        loader = loader_of(config, shuffle=False)
        harm(second)
        got: list[int] = []
        with pytest.raises(DataError, match=rf"{second}") as caught:
            read_into(got, loader)
        assert "\n" not in str(caught.value)
        second.write_bytes(content)
        resumed = loader_of(config, shuffle=False)
        resumed.load_state_dict(loader.state_dict())
        assert got + read([resumed]) == whole


def test_rows_that_cannot_be_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(texts(30)) + b'{"text": 3}\n{"tex\n' + lines(texts(6, 30)))
    with pytest.raises(DataError, match=r"a\.jsonl, byte 840: 'text' must be a string, got int; set dataset.text_key"):
        read([loader_of(config_of(path), shuffle=False)], 9)
    assert sorted(read([loader_of(config_of(path, stream_skip_damaged=True))])) == list(range(36))
    assert [record.message.count("is left out") for record in caplog.records] == [1, 1]
    rows = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "text": [None]}), rows)
    with pytest.raises(DataError, match=r"a\.parquet, row 1: 'text' must be a string, got NoneType"):
        loader_of(config_of(rows))
    (good,) = files(tmp_path, "parquet", (9,))
    with pytest.raises(DataError, match=r"a\.parquet, row 1"):  # before the first file is trained on
        loader_of(config_of(good, rows))
    with pytest.raises(DataError, match=r"a\.parquet has no column 'x' \(its columns: 'body', 'text'\); set"):
        loader_of(config_of(rows, text_key="x"))


def test_a_directory_that_does_not_exist_is_named_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "pile").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("data/pyle", "./data/pyle", str(tmp_path / "data" / "pyle")):
        for use in (loader_of, check_first_files):
            with pytest.raises(DataError, match=r"does not exist .* Did you mean '(\S*/)?data/pile'\?"):
                use(DatasetConfig(kind="stream", paths=[path], seq_length=LENGTH))
    for path in ("data/pyle@main", "pyle"):
        check_first_files(DatasetConfig(kind="stream", paths=[path], seq_length=LENGTH))


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.csv", "a stream cannot read .*a.csv"), ("none.jsonl", "does not exist"), ("*.parquet", "matches no file")],
)
def test_paths_that_are_no_stream(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=message):
        loader_of(config_of(tmp_path / name))


def test_blank_lines_are_passed_over_and_a_line_that_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(texts(1)) + b"\n  \n" + lines(texts(1, 1)))
    with closing(LineFile(str(path), 1 << 20)) as file:
        rows, is_last = file.window(0)
    assert (len(rows), is_last) == (2, True)
    monkeypatch.setattr("onstep.data.streams.line_file.MAX_RECORD_BYTES", 20)
    with (
        closing(LineFile(str(path), 1 << 20)) as file,
        pytest.raises(DataError, match=r"a\.jsonl, byte 0: a line of more than 20 bytes"),
    ):
        file.window(0)


def test_rows_of_later_row_groups_are_named_by_their_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts(40)}), path, row_group_size=10)
    places: list[str] = []
    number, is_last = 0, False
    with closing(ParquetFile(str(path), 1, lambda names, name: names)) as file:
        while not is_last:
            rows, is_last = file.window(number)
            places += [place for place, _ in rows]
            number += 1
    assert places == [f"{path}, row {row}" for row in range(1, 41)]


def test_of_a_parquet_file_only_the_chosen_columns_are_read_and_counted(tmp_path: Path) -> None:
    windows = []
    for name, others in (("alone", {}), ("among", {"text2": ["x" * 999] * 40, "id": list(range(40))})):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": texts(40), **others}), path, row_group_size=10, compression="none")
        with closing(ParquetFile(str(path), 400, lambda names, name: ["text"])) as file:
            windows.append([[row for _, row in file.window(number)[0]] for number in range(4)])
    assert windows[0] == windows[1]
    assert [row for rows in windows[0] for row in rows] == [{"text": text} for text in texts(40)]


def test_a_parquet_file_is_read_from_a_window_on_also_after_an_error_and_after_it_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts(30)}), path, row_group_size=10, use_dictionary=False)
    damaged = pq.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as raw:
        raw.seek(damaged.data_page_offset)
        raw.write(b"\xff" * damaged.total_compressed_size)
    with closing(ParquetFile(str(path), 1, lambda names, name: names)) as file:

        def text(number: int) -> str:
            ((_, row),) = file.window(number)[0]
            return str(row["text"])

        found = [text(0)]
        with pytest.raises(DataError, match=r"a\.parquet"):
            file.window(15)
        found += [text(1), text(29)]
        file.close()
        assert [*found, text(2), text(28)] == [texts(30)[row] for row in (0, 1, 29, 2, 28)]
        file.close()
        assert text(29) == texts(30)[29]


def test_the_position_of_other_windows_is_not_that_of_the_stream(tmp_path: Path) -> None:
    names = [str(path) for path in files(tmp_path, "jsonl", (3,))]
    first, second = (RecordStream(names, None, size).fingerprint for size in (1000, 2000))  # type: ignore[arg-type]
    assert first != second
