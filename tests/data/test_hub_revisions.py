"""Datasets on the Hub are taken at the commit of a revision, which is recorded; a run continues on the same commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records
from onstep.training.runs.run_dir import RunDir
from tests.support.small_hub import SmallHub, small_hub
from tests.support.train_command import SMALL

pytest.importorskip("datasets")

pytestmark = pytest.mark.process

PROGRAM = """
import contextlib, io, json, sys
from onstep.cli.main import main

def trainer(name, revision):
    import datasets, torch
    from onstep import Trainer, TrainingArguments

    class Model(torch.nn.Linear):
        def forward(self, x, labels):
            return {"loss": super().forward(x[:, None].float()).mean()}

    rows = datasets.load_dataset("me/rows", revision=revision, split="train")
    rows = rows.map(lambda row: {"x": len(row["text"]), "labels": 1}, remove_columns="text")
    Trainer(Model(1, 1), TrainingArguments(name, max_steps=1, report_to="none"), train_dataset=rows).train()
    return 0

for line in sys.stdin:
    words, said = json.loads(line), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = trainer(*words[1:]) if words[0] == "Trainer" else main(words)
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


class Shell:
    """A process that trains as it is told, one run after another; `huggingface_hub` reads its settings at import."""

    def __init__(self, process: subprocess.Popen[str], directory: Path) -> None:
        self._process, self._directory = process, directory

    def do(self, *words: str) -> tuple[int, str]:
        """The exit code of a command, and what it said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(words), file=self._process.stdin, flush=True)
        code, said = json.loads(self._process.stdout.readline())
        return code, said

    def train(self, path: str, name: str, *words: str, kind: str = "huggingface") -> tuple[int, str]:
        """`onstep train` on a dataset on the Hub, for four steps."""
        data = [f"dataset.kind={kind}", f"dataset.paths=[{path}]", "dataset.cache_dir=tokens"]
        return self.do(
            "train", *SMALL, *data, "train.train_iters=4", "logger.log_interval=1", f"run.name={name}", *words
        )

    def record(self, place: str) -> dict[str, Any]:
        """The run.json of a run."""
        return RunDir(self._directory / place).read()

    def losses(self, name: str) -> list[float]:
        records = read_records(self._directory / "runs" / name / "trainer_logs.json")
        return [record["loss"] for record in records if "loss" in record]


@contextmanager
def shell(hub: SmallHub, directory: Path) -> Iterator[Shell]:
    """A process for which the Hub is the given one."""
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(directory / "hf")}
    argv, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(argv, cwd=directory, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield Shell(process, directory)
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.slow
def test_a_run_continues_on_the_commit_that_it_started_on(tmp_path: Path) -> None:
    with small_hub() as hub, shell(hub, tmp_path) as one:
        old = hub.commit("old", "main", "v1")
        assert one.train("me/rows@main", "moved", "train.exit_interval=2")[0] == 0
        assert one.train("me/rows@main", "stream", "train.exit_interval=2", kind="stream")[0] == 0
        new = hub.commit("new", "main")
        code, said = one.train("me/rows@main", "moved", "train.exit_interval=null")
        assert (code, "HTTP Request" in said) == (0, False), said
        assert one.train("me/rows@main", "stream", "train.exit_interval=null", kind="stream")[0] == 0
        assert one.train("me/rows@v1", "stream-of-tag", kind="stream")[0] == 0
        assert one.losses("stream") == one.losses("stream-of-tag")
        for name, path in (("tag", "me/rows@v1"), ("newest", "me/rows")):
            assert one.train(path, name)[0] == 0
        assert one.losses("moved") == one.losses("tag") != one.losses("newest")
        assert one.do("Trainer", "out", "v1")[0] == 0

        code, said = one.train("me/rows@main", "tag")
        assert (code, f"me/rows@{old}" in said, f"me/rows@{new}" in said) == (1, True, True), said
        code, said = one.train("me/rows@v2", "nothing")
        assert (code, "cannot find revision 'v2' of the dataset 'me/rows'" in said) == (1, True), said
        assert one.train("me/rows@v1", "paused", "train.exit_interval=2")[0] == 0
        hub.is_down = True
        for number, path in enumerate(("me/rows", "me/rows@main", f"me/rows@{old}")):
            code, said = one.train(path, f"unread-{number}", kind="stream")
            assert (code, "the Hub does not answer" in said) == (1, True), said
        for commit in (new, old):  # of which one is not the newest in the cache
            code, said = one.train(f"me/rows@{commit}", f"down-{commit}")
            assert code == 0, said
        assert one.losses(f"down-{old}") == one.losses("tag")
        assert one.losses(f"down-{new}") == one.losses("newest")
        code, said = one.train("me/rows@v1", "paused", "train.exit_interval=null")
        assert (code, one.losses("paused")) == (0, one.losses("tag")), said
        code, said = one.train("me/rows@" + 40 * "0", "missing")
        assert (code, f"has 0 copies of commit {40 * '0'}" in said, old in said, new in said) == (1, *3 * [True]), said
        recorded = {
            place: one.record(place)["hub_revisions"]
            for place in ("runs/moved", "runs/stream", "runs/tag", "runs/newest", "out")
        }
    assert recorded == {
        "runs/moved": {"datasets/me/rows@main": old},
        "runs/stream": {"datasets/me/rows@main": old},
        "runs/tag": {"datasets/me/rows@v1": old},
        "runs/newest": {"datasets/me/rows": new},
        "out": {"datasets/me/rows": old},
    }
