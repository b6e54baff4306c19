"""A run on data behind URLs continues on a machine with an empty cache, and is told of changes as with local data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from onstep.cli.main import main
from onstep.record import read_records
from tests.cli.test_train_changed_data import SMALL


def losses(run: Path) -> list[tuple[int, float]]:
    found = read_records(run / "record.jsonl")
    return [(one["global_step"], one["loss"]) for one in found if one["kind"] == "log" and "loss" in one]


@pytest.mark.slow
def test_a_run_on_urls_is_that_on_local_files_wherever_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "store" / "corpus"
    corpus.mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (corpus / name).write_text(f"{name}: " + "some text of the corpus. " * 200)
    small = [word for word in SMALL if not word.startswith(("dataset.cache_dir", "run.name"))]
    small += ["logger.log_interval=1", "dist.device=cpu"]
    url = f"dataset.paths=[file://{corpus}]"
    monkeypatch.setenv("ONSTEP_CACHE", "cache-0")
    assert main(["train", *small, "run.name=local", f"dataset.paths=[{corpus}]"]) == 0
    assert main(["train", *small, "run.name=url", url, "train.exit_interval=2"]) == 0
    monkeypatch.setenv("ONSTEP_CACHE", "cache-1")
    assert main(["train", *small, "run.name=url", url]) == 0
    runs = tmp_path / "runs"
    assert losses(runs / "url") == losses(runs / "local")
    assert len(losses(runs / "url")) == 4
    records = [json.loads((runs / name / "run.json").read_text()) for name in ("local", "url")]
    assert records[0]["identity"] == records[1]["identity"]
    data = json.loads((runs / "url" / "identity.json").read_text())["data"]
    assert data["files"].keys() == data["tags"].keys() == {f"file://{corpus}/{name}" for name in ("a.txt", "b.txt")}
    assert "cache-" not in (runs / "url" / "identity.json").read_text() + json.dumps(records[1]["config"]["dataset"])

    (corpus / "b.txt").write_text("b.txt: " + "some t3xt of the corpus. " * 200)
    capsys.readouterr()
    assert main(["train", *small, "run.name=url", url]) == 1
    said = capsys.readouterr().err
    assert f"file://{corpus}/b.txt was changed" in said
    assert "--on-config-change apply" in said
    shutil.rmtree(corpus)
    assert main(["train", *small, "run.name=url", url]) == 0
    assert "nothing left to do" in capsys.readouterr().out
