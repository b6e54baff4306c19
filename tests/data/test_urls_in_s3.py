"""Data in a bucket: downloaded once by any number of processes, whole or not at all, and never outside of the cache."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig
from onstep.data.urls.local_copy import local_copy, url_cache
from onstep.errors import DataError
from onstep.record import read_records, without_wall_clock
from onstep.stores.bucket import Bucket
from tests.support.faulty_proxy import Proxy, faulty_proxy
from tests.support.forked_processes import Processes, output_of
from tests.support.object_store import BUCKET, SECRET, environment_of, s3_server

JOBS = "tests.support.jobs.url_jobs"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)
    with faulty_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def url(proxy: Proxy, tmp_path: Path) -> str:
    """A directory of three files and of two markers of directories, as consoles make them."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    bucket = Bucket(url)
    for name in "abc":
        bucket.put(f"corpus/deep/{name}.txt", f"text of {name}. ".encode() * 100)
    for place in ("corpus/", "corpus/deep/"):
        address = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{tmp_path.name}/{place}"
        with urllib.request.urlopen(urllib.request.Request(address, b"", method="PUT")) as answer:
            assert answer.status == 200
    return url


def config_of(url: str, tmp_path: Path) -> DatasetConfig:
    return DatasetConfig(paths=[f"{url}/corpus"], cache_dir=str(tmp_path / "cache"))


def settings_of(url: str, tmp_path: Path, proxy: Proxy) -> dict[str, Any]:
    return {"paths": [f"{url}/corpus"], "cache": str(tmp_path / "cache"), "environment": environment_of(proxy.url)}


def downloads(proxy: Proxy) -> list[str]:
    return sorted(one for one in proxy.requests if one.startswith("GET") and "list-type" not in one)


def test_processes_that_want_the_same_files_download_each_once(
    processes: Processes, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    children = [
        child
        for name in ("one", "two", "three")
        for child in processes.start(JOBS, "copy", tmp_path / name, settings_of(url, tmp_path, proxy))
    ]
    assert [child.wait() for child in children] == [0, 0, 0], output_of(tmp_path / "one")
    assert len(downloads(proxy)) == 3, proxy.requests
    texts = [json.loads((tmp_path / name / "result-0.json").read_text()) for name in ("one", "two", "three")]
    assert texts == [{f"{url}/corpus/deep/{name}.txt": f"text of {name}. " * 100 for name in "abc"}] * 3
    assert [one.url for one in url_cache(config_of(url, tmp_path)).entries()] == sorted(texts[0])


def test_a_download_that_is_killed_at_any_request_leaves_nothing_that_is_used(
    processes: Processes, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    settings = settings_of(url, tmp_path, proxy)
    Bucket(url).put("corpus/large.txt", b"0123456789abcdef" * (5 * 2**17))  # of several ranges
    settings["environment"]["OMP_NUM_THREADS"] = "1"
    killed = 0
    for number in range(30):
        machine = tmp_path / f"machine-{number}"
        settings["cache"] = str(machine / "cache")
        proxy.requests.clear()
        proxy.strike = lambda machine=machine: strike(machine)
        proxy.decide = lambda index, method, path, at=number: "stop before" if index >= at else "pass"
        [code] = processes.run(JOBS, "copy", machine, settings)
        if code == 0:
            break
        killed += 1
        assert code == -9, output_of(machine)
        proxy.decide = lambda index, method, path: "pass"
        [texts] = processes.results(JOBS, "copy", machine, settings, ranks=1)
        assert len(texts) == 4
        assert all(text == (f"text of {url[-5]}. " * 100) for url, text in texts.items() if len(text) < 9999)
        assert texts[f"{url}/corpus/large.txt"] == "0123456789abcdef" * (5 * 2**17)
    assert killed >= 5


def strike(machine: Path) -> None:
    with suppress(ProcessLookupError):
        os.kill(int((machine / "pid").read_text()), signal.SIGKILL)


def test_a_file_that_is_replaced_while_it_is_downloaded_is_refused(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    def replaced(number: int, method: str, path: str) -> Any:
        if method == "GET" and path.endswith("b.txt"):
            bucket.put("corpus/deep/b.txt", b"new text of b. " * 100)
        return "pass"

    proxy.decide = replaced
    with pytest.raises(DataError) as raised:
        local_copy(config_of(url, tmp_path))
    assert f"dataset.paths: {url}/corpus/deep/b.txt cannot be read" in str(raised.value)
    assert "\n" not in str(raised.value)
    proxy.decide = lambda number, method, path: "pass"
    copy = local_copy(config_of(url, tmp_path))
    assert copy.view is not None
    assert (copy.view / f"s3/{BUCKET}/{tmp_path.name}/corpus/deep/b.txt").read_text() == "new text of b. " * 100


@pytest.mark.parametrize("name", ["../../../outside.txt", "/outside.txt", "a//outside.txt", "./outside.txt"])
def test_hostile_names_stay_in_the_cache(proxy: Proxy, url: str, tmp_path: Path, name: str) -> None:
    address = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/{tmp_path.name}/corpus/{name.replace('.', '%2E')}"
    with urllib.request.urlopen(urllib.request.Request(address, b"hostile", method="PUT")) as answer:
        assert answer.status == 200
    with suppress(DataError):
        local_copy(config_of(url, tmp_path))
    cache = (tmp_path / "cache").resolve()
    for path in tmp_path.rglob("*"):
        assert path.resolve() == cache or path.resolve().is_relative_to(cache), path
    assert not list(Path("/").glob("outside.txt"))


def test_a_bucket_that_refuses_is_said_in_one_line(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(url.replace(f"//{BUCKET}/", "//no-such-bucket/"), tmp_path)
    with pytest.raises(DataError) as raised:
        local_copy(config)
    said = str(raised.value)
    assert said.startswith(f"dataset.paths: s3://no-such-bucket/{tmp_path.name}/corpus cannot be read: ")
    assert "Check the URL, its permissions and the credentials in the environment" in said
    assert "\n" not in said
    assert SECRET not in said


@pytest.mark.slow
def test_two_ranks_on_empty_machines_continue_bit_for_bit_and_download_once(
    processes: Processes, proxy: Proxy, tmp_path: Path, corpus: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/corpus"
    for path in corpus.iterdir():
        Bucket(url).put(path.name, path.read_bytes())
    given = {"corpus": str(corpus), "paths": [url], "environment": environment_of(proxy.url)}
    whole = {**given, "cache": str(tmp_path / "cache-0")}
    assert processes.run(JOBS, "train", tmp_path / "whole", whole, ranks=2) == [0, 0], output_of(tmp_path / "whole")
    assert len(downloads(proxy)) == len(list(corpus.iterdir()))
    for number, until in ((1, 5), (2, None)):
        settings = {**given, "cache": str(tmp_path / f"cache-{number}"), "until": until}
        code = processes.run(JOBS, "train", tmp_path / "split", settings, ranks=2)
        assert code == [0, 0], output_of(tmp_path / "split")
    outcomes = [outcome(tmp_path / name / "runs" / "run") for name in ("whole", "split")]
    assert outcomes[0] == outcomes[1]
    identity = json.loads((tmp_path / "split/runs/run/identity.json").read_text())["data"]
    assert identity["files"].keys() == identity["tags"].keys() == {f"{url}/{one.name}" for one in corpus.iterdir()}
    Bucket(url).put("heapq.py", b"other content\n" * 900)
    settings = {**given, "cache": str(tmp_path / "cache-3")}
    assert processes.run(JOBS, "train", tmp_path / "split", settings, ranks=2) == [1, 1]
    assert f"{url}/heapq.py was changed" in output_of(tmp_path / "split")


def outcome(run: Path) -> dict[str, Any]:
    record = json.loads((run / "run.json").read_text())
    return {
        "certificate": json.loads((run / "certificate" / "chain.json").read_text()),
        "logs": [without_wall_clock(one) for one in read_records(run / "trainer_logs.json")],
        "identity": record["identity"],
        "status": record["status"],
    }
