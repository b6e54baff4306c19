"""Commands read a run in an object store, and no command shows credentials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import Retention
from onstep.cli.main import main
from onstep.mirror.attach import attach
from onstep.record import read_records
from tests.support.mirrored_places import commit, place_of
from tests.support.train_command import SMALL

MARKED = "marked-password"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with checkpoints of steps 1 and 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/store/run"
    mirror = attach(place_of(url, tmp_path / "machine"), Retention())
    for step in (1, 2):
        commit(mirror, step)
        mirror.sync()
    mirror.close()
    return url


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    output = capsys.readouterr()
    return code, output.out + output.err


def test_checkpoints_of_a_store_are_listed_verified_and_compared(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(capsys, "checkpoint", "list", url, "--json")
    listed = json.loads(text)
    assert code == 0
    assert listed["root"] == f"{url}/checkpoints"
    assert [(one["step"], one["state"]) for one in listed["checkpoints"]] == [(2, "complete"), (1, "complete")]
    assert ask(capsys, "checkpoint", "verify", "--all", url)[0] == 0
    assert "checkpoint-1" in ask(capsys, "checkpoint", "verify", f"{url}@1")[1]
    assert ask(capsys, "checkpoint", "diff", f"{url}@1", f"{url}/checkpoints/checkpoint-1")[0] == 0
    assert ask(capsys, "checkpoint", "verify", url)[1].startswith(f"{url}/checkpoints/checkpoint-2: good")
    text = ask(capsys, "checkpoint", "diff", f"{url}@1", f"{url}@2")[1]
    assert text.startswith(f"A  {url}/checkpoints/checkpoint-1 ")
    code, text = ask(capsys, "why", url)
    assert (code, text.startswith(f"{url} ")) == (0, True)
    code, text = ask(capsys, "generate", f"{url}@1", "x")
    assert (code, f"onstep checkpoint export {url}@1 DIR." in text) == (1, True)
    code, text = ask(capsys, "checkpoint", "verify", f"{url}@7")
    assert code == 1
    assert "has no checkpoint of step 7; available steps: 2, 1." in text


def test_a_training_starts_from_a_step_of_a_run_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path, token_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store = f"file://{tmp_path}/store"
    data = [f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}", "checkpoint.save_interval=3"]
    words = ["train", *(word for word in SMALL if "save_interval" not in word), *data]
    code, said = ask(capsys, *words, "run.name=first", f"run.output_dir={store}")
    assert (code, f"into {store}/first;" in said) == (0, True)
    assert ask(capsys, *words, "run.name=second", f"checkpoint.load={store}/first@3")[0] == 0
    second = tmp_path / "runs" / "second"
    assert json.loads((second / "run.json").read_text())["started_from"] == f"{store}/first@3"
    own, other = (list(read_records(run / "record.jsonl")) for run in (second, tmp_path / "store" / "first"))
    assert [one["global_step"] for one in own if one["kind"] == "start"] == [0, 3]  # the first run's log goes before
    assert losses(own) == losses(other)


def losses(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(one["global_step"], one["loss"]) for one in records if one["kind"] == "log" and "loss" in one]


def test_the_runs_of_a_store_are_listed_and_forked_only_dry(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = url.removesuffix("/run")
    Path(url.removeprefix("file://"), "trainer_logs.json").write_text('[{"loss": 1.0, "step": 1}]')
    code, text = ask(capsys, "logs", "list", store, "--json")
    assert (code, [one["run"] for one in json.loads(text)]) == (0, ["run"])
    assert "has no runs; give the URL of a directory of runs" in ask(capsys, "logs", "list", f"{store}/nothing")[1]
    code, text = ask(capsys, "fork", f"{url}@1", "--name", "x")
    assert code == 1
    assert f"start one from its checkpoint: onstep train {url} run.name=NAME checkpoint.load={url}@1" in text


def test_damage_in_the_store_is_found(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    [file] = Path(url.removeprefix("file://")).glob("checkpoints/checkpoint-2-*/model/model.safetensors")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    code, text = ask(capsys, "checkpoint", "verify", url)
    assert code == 1
    assert "its content has changed" in text


@pytest.mark.parametrize(
    "words",
    [
        ("why", f"s3://user:{MARKED}@bucket/runs/x"),
        ("checkpoint", "list", f"s3://bucket/runs/x?X-Amz-Signature={MARKED}"),
        ("generate", f"gs://{MARKED}@bucket/x", "hello"),
        ("train", "tiny_gpt", f"run.output_dir=s3://user:{MARKED}@bucket/runs"),
        ("train", "tiny_gpt", f"checkpoint.load=az://user:{MARKED}@bucket/runs/x"),
        ("train", "tiny_gpt", f"run.output_dirr=s3://user:{MARKED}@bucket/runs"),
        ("train", "tiny_gpt", f"run.lease_seconds=s3://user:{MARKED}@bucket/runs"),
        ("config", "show", "tiny_gpt", f"run.output_dir=s3://user:{MARKED}@bucket/runs"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = ask(capsys, *words)
    assert code != 0
    assert MARKED not in text
    assert not any(MARKED.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
