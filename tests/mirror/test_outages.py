"""While the store cannot be reached, training continues in bounded space; what is due is uploaded afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from onstep.checkpoint import Retention, checkpoints
from onstep.mirror import mirror as mirroring
from onstep.mirror.attach import attach
from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.stores.bucket import Bucket
from tests.support.faulty_proxy import Proxy, faulty_proxy
from tests.support.mirrored_places import commit, place_of
from tests.support.object_store import BUCKET, environment_of, s3_server
from tests.support.waiting import until

SIZE = 100_000


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with s3_server() as address, faulty_proxy(address) as proxy:
        for name, value in environment_of(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


def test_an_outage_is_survived_in_bounded_space(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "PAUSES_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(mirroring, "LOOK_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    mirror = attach(place_of(url, tmp_path, limit_bytes=2.5 * SIZE), Retention())
    mirror.start()
    commit(mirror, 1, size=SIZE)
    remote = RemoteCheckpoints(Bucket(url))
    until(lambda: [one.step for one in remote.all() if one.is_committed] == [1])
    proxy.is_dead = True
    for step in range(2, 8):
        commit(mirror, step, size=SIZE)
        until(lambda step=step: [info.step for info in checkpoints(mirror.root)] == [step, step - 1])
    until(lambda: "due is uploaded later" in caplog.text)
    assert caplog.text.count("due is uploaded later") == 1
    proxy.is_dead = False
    until(lambda: "can be reached again" in caplog.text)
    mirror.close()
    assert mirror.lost is None
    assert {one.step for one in remote.all() if one.is_committed} >= {1, 6, 7}
    assert all(one.is_committed for one in remote.all())


def test_the_end_of_a_run_says_what_is_not_uploaded(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirroring, "END_SECONDS", 0.1)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    mirror = attach(place_of(url, tmp_path), Retention())
    commit(mirror, 1)
    proxy.is_dead = True
    mirror.close()
    assert f"what is not there yet is in {mirror.directory}" in caplog.text
    assert mirror.unfinished is not None
    proxy.is_dead = False
    attach(place_of(url, tmp_path), Retention()).close()  # the same machine uploads it
    assert [one.step for one in RemoteCheckpoints(Bucket(url)).all() if one.is_committed] == [1]
