"""Checkpoints that somebody made to do harm: commands and both doors refuse them, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from onstep import JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.checkpoint.format.codec import MAX_DOCUMENT_BYTES
from onstep.checkpoint.storage.manifest import MANIFEST, MAX_LEVELS
from onstep.cli.main import main
from onstep.config import ConfigContainer
from onstep.errors import OnstepError
from tests.support.small_configs import small_pretrain_config
from tests.support.small_models import Regression, regression_rows

Capture = pytest.CaptureFixture[str]
SPARSE_BYTES = 8 << 30


def config_of(runs: Path, corpus: Path, cache: Path) -> ConfigContainer:
    config = small_pretrain_config(corpus, cache)
    config.run.name, config.run.output_dir = "one", str(runs)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 3, 4, 4
    config.validation.eval_iters = 0
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 1, -1
    return config


def trainer_of(directory: Path) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(directory), max_steps=3, save_strategy="steps", save_steps=1, use_cpu=True, report_to=[]
    )
    return Trainer(Regression(), arguments, train_dataset=regression_rows(26), default_callbacks=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """A directory with runs/one of `pretrain` and runs/two of `Trainer`, of 3 steps each."""
    directory = tmp_path_factory.mktemp("trained")
    pretrain(config_of(directory / "runs", corpus, token_cache), callbacks=[JsonLogger()])
    trainer_of(directory / "runs" / "two").train()
    return directory


class Attacked:
    """Copies of both runs, interrupted after step 2, whose checkpoints a test changes."""

    def __init__(self, trained: Path, here: Path, corpus: Path, cache: Path, capture: Capture) -> None:
        self._capture, self._here = capture, here
        shutil.copytree(trained / "runs", here / "runs")
        self.config = config_of(here / "runs", corpus, cache)
        for run in self.runs:
            for step in (1, 3):
                shutil.rmtree(run / f"checkpoints/checkpoint-{step}", ignore_errors=True)
                shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)
            record = json.loads((run / "run.json").read_text())
            (run / "run.json").write_text(json.dumps({**record, "status": "paused"}))

    @property
    def runs(self) -> tuple[Path, Path]:
        return self._here / "runs/one", self._here / "runs/two"

    @property
    def checkpoints(self) -> list[Path]:
        found = [path for run in self.runs for path in run.rglob("checkpoint-2")]
        assert len(found) == 2
        return found

    def manifests(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the manifests as a forger does, with the right hash at their ends."""
        for path in self.checkpoints:
            content = json.loads((path / MANIFEST).read_text())
            del content["blake3"]
            change(content)
            body = json.dumps(content, indent=2).encode().removesuffix(b"\n}")
            seal = f',\n  "blake3": "{blake3(body).hexdigest()}"\n}}\n'
            (path / MANIFEST).write_bytes(body + seal.encode())

    def file(self, name: str, content: bytes) -> None:
        """Replace a file of both checkpoints, with the right hash in their manifests."""
        for path in self.checkpoints:
            (path / name).write_bytes(content)
        digest = {"size": len(content), "blake3": blake3(content).hexdigest()}
        self.manifests(lambda manifest: manifest["files"].update({name: digest}))

    def said(self, *words: str) -> tuple[int, str]:
        """Exit code and output of `onstep checkpoint` on the run of `pretrain`."""
        self._capture.readouterr()
        code = main(["checkpoint", words[0], str(self.runs[0]), *words[1:]])
        out, err = self._capture.readouterr()
        assert len(out) < 20_000
        assert len(err) < 5_000
        return code, out + err

    def resumed(self) -> list[str]:
        """How a resume through each door ends: its error, or an empty text."""
        trainer = trainer_of(self.runs[1])
        return [ending(lambda: pretrain(self.config)), ending(lambda: trainer.train(resume_from_checkpoint=True))]

    def tuned(self) -> list[str]:
        """How a fine-tuning of the weights of `pretrain` ends."""
        config = copy.deepcopy(self.config)
        config.run.name, config.checkpoint.pretrained_checkpoint = "tuned", str(self.checkpoints[0])
        return [ending(lambda: pretrain(config))]


def ending(work: Callable[[], Any]) -> str:
    """The error that the work ends with, or an empty text."""
    try:
        work()
    except OnstepError as error:
        return str(error)
    return ""


@pytest.fixture
def attacked(trained: Path, tmp_path: Path, corpus: Path, token_cache: Path, capsys: Capture) -> Attacked:
    return Attacked(trained, tmp_path, corpus, token_cache, capsys)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


@pytest.fixture
def emptied(tmp_path: Path) -> Iterator[None]:
    """Removes afterwards what Python's own functions cannot remove."""
    yield
    subprocess.run(["rm", "-rf", *map(str, tmp_path.iterdir())], check=True)


@pytest.mark.usefixtures("emptied")
def test_files_beside_a_checkpoint_are_named_and_not_read(attacked: Attacked) -> None:
    for path in attacked.checkpoints:
        sparse(path / "extra.safetensors")
        sparse(path / "model" / "extra.json")
        _make_deep(path, 1_500)
    code, text = attacked.said("verify")
    assert code == 0
    assert "extra files: extra.safetensors, model/extra.json; not in the manifest, never read" in text
    for words in (["list"], ["list", "--json"], ["export", str(attacked.runs[0] / "out.safetensors")]):
        assert attacked.said(*words)[0] == 0
    assert attacked.resumed() == ["", ""]


def _make_deep(path: Path, levels: int) -> None:
    """Directories inside each other, made and entered one by one since their path is longer than the system allows."""
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)


def test_a_file_larger_than_stated_is_refused_before_anything_is_hashed(attacked: Attacked) -> None:
    for path in attacked.checkpoints:
        sparse(path / "trainer" / "state.json")
    code, text = attacked.said("verify")
    assert code == 1
    assert f"has {SPARSE_BYTES} bytes, but its manifest lists" in text
    assert "damaged" in attacked.said("list")[1]
    assert ["none of the checkpoints" in text for text in attacked.resumed()] == [True, True]


def test_a_document_beyond_the_limit_is_refused_unread(attacked: Attacked) -> None:
    for path in attacked.checkpoints:
        with (path / "trainer" / "state.json").open("wb") as file:
            file.truncate(MAX_DOCUMENT_BYTES + 1)
    content = (attacked.checkpoints[0] / "trainer" / "state.json").read_bytes()
    digest = {"size": len(content), "blake3": blake3(content).hexdigest()}
    attacked.manifests(lambda manifest: manifest["files"].update({"trainer/state.json": digest}))
    assert [f"at most {MAX_DOCUMENT_BYTES:,} are read" in text for text in attacked.resumed()] == [True, True]


DOCUMENTS = {
    "deep lists": (b"[" * 500_000 + b"]" * 500_000, "levels deep"),
    "deep objects": (b'{"dict":' * 200_000 + b"1" + b"}" * 200_000, "levels deep"),
    "many values": (b"[" + b"[]," * 5_000_001 + b"[]]", "at most 10,000,000 are read"),
    "a long integer": (b'{"onstep_state":1,"state":' + b"9" * 1_000_000 + b"}", "digits"),
}


@pytest.mark.parametrize(("content", "message"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_hostile_document_is_refused_with_the_limit(attacked: Attacked, content: bytes, message: str) -> None:
    attacked.file("trainer/state.json", content)
    assert all(message in text for text in attacked.resumed()), attacked.resumed()
    attacked.file("model/state.json", content)
    code, text = attacked.said("export", str(attacked.runs[0] / "out.safetensors"))
    assert (code, message in text) == (1, True)
    code, text = attacked.said("diff", str(attacked.runs[0]))
    assert (code, message in text) == (2, True)


def test_paths_of_a_thousand_levels_are_refused(attacked: Attacked) -> None:
    digest = {"size": 1, "blake3": "0" * 64}
    files = {f"{'/'.join(['a'] * 2_000)}{number}": digest for number in range(2_000)}
    attacked.manifests(lambda manifest: manifest["files"].update(files))
    code, text = attacked.said("verify")
    assert (code, f"at most {MAX_LEVELS} are allowed" in text) == (1, True)


CONFIGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "a huge recipe": (("run", "recipe"), "A" * 1_000_000),
    "a huge name": (("run", "name"), "A" * 1_000_000),
    "a huge key": (("k" * 1_000_000,), 1),
    "many keys": (("train",), {f"key{number}": number for number in range(20_000)}),
    "a number of 250 digits": (("optimizer", "lr"), 10**250),
    "an integer of 250 digits": (("train", "train_iters"), 10**250),
    "a billion layers": (("model", "num_layers"), 10**9),
    "a wide model": (("model", "hidden_size"), 2**50),
    "a large vocabulary": (("model", "vocab_size"), 2**50),
    "no heads": (("model", "num_attention_heads"), 0),
    "a negative width": (("model", "hidden_size"), -2),
    "infinite rope": (("model", "rotary_base"), float("inf")),
    "an unknown activation": (("model", "activation_func"), "__class__"),
    "a tokenizer of another kind": (("tokenizer", "tokenizer_type"), {"a": 1}),
    "a section that is a list": (("model",), [1] * 1_000),
    "no rank": (("peft", "dim"), 0),
    "NUL": (("tokenizer", "tokenizer_model"), "a\0b"),
}


@pytest.mark.parametrize(("path", "value"), CONFIGS.values(), ids=CONFIGS)
def test_a_hostile_configuration_in_a_manifest_is_refused(
    attacked: Attacked, path: tuple[str, ...], value: Any
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        section = manifest["config"]
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = value

    original = attacked.runs[0].parent / "original"
    shutil.copytree(attacked.checkpoints[0], original)
    attacked.manifests(change)
    assert attacked.said("list")[0] == 0
    assert attacked.said("verify")[0] == 0
    assert attacked.said("diff", str(original))[0] in (0, 1)
    assert attacked.said("export", str(attacked.runs[0] / "out"), "--format", "hf")[0] in (0, 1)
    assert all(len(text) < 5_000 for text in attacked.resumed())
    assert all(len(text) < 5_000 for text in attacked.tuned())


RECORDS = {
    "deep lists": b"[" * 500_000,
    "a long integer": b'{"config": {}, "step": ' + b"9" * 100_000 + b"}",
    "a list": b"[]",
    "no configuration": b'{"config": 1}',
    "a wrong configuration": b'{"config": {"model": [], "optimizer": {"lr": 1e999}}, "run_id": {}}',
    "bytes": b"\xff\xfe",
    "nothing": b"",
    "unhashable values": b'{"config": {}, "status": {"a": []}, "step": [], "run_id": [], "started_at": "x"}',
}


@pytest.mark.parametrize("content", RECORDS.values(), ids=RECORDS)
def test_a_hostile_run_record_is_refused_or_ignored(attacked: Attacked, content: bytes) -> None:
    for run in attacked.runs:
        (run / "run.json").write_bytes(content)
    assert attacked.said("list")[0] == 0
    assert all(len(text) < 5_000 for text in attacked.resumed())


def test_a_huge_run_record_is_refused_unread(attacked: Attacked) -> None:
    for run in attacked.runs:
        sparse(run / "run.json")
    assert attacked.said("list")[0] == 0
    assert all("bytes, and at most" in text for text in attacked.resumed())


def test_hostile_pointers_and_locks_are_not_read(attacked: Attacked) -> None:
    for path in attacked.checkpoints:
        sparse(path.parent / "latest")
        os.mkfifo(path.parent / ".tmp-checkpoint-8-00000000.lock")
        (path.parent / ".tmp-checkpoint-8-00000000").mkdir()
        (path.parent / f"checkpoint-{'9' * 30}").mkdir()
    assert attacked.said("list")[0] == 0
    assert attacked.resumed() == ["", ""]
