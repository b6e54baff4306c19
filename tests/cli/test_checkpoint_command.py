"""`onstep checkpoint` on real runs, and on checkpoints that something happened to."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from onstep import JsonLogger, Trainer, TrainingArguments, pretrain
from onstep.checkpoint import FileDigest, FileStore, SaveTransaction, encode_state, newest_verified, read_manifest
from onstep.checkpoint.format.codec import document_to_bytes
from onstep.checkpoint.format.tensor_file import write_tensors
from onstep.checkpoint.storage.manifest import ComponentEntry, Manifest
from onstep.cli.main import main
from onstep.config import ConfigContainer, apply_overrides
from onstep.models import load_hf
from onstep.recipes import tiny_gpt_pretrain_config
from tests.support.forked_processes import Processes
from tests.support.shell import Shell
from tests.support.small_configs import small_pretrain_config

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def small_run(runs: Path, name: str, corpus: Path, cache: Path, *words: str) -> ConfigContainer:
    config = small_pretrain_config(corpus, cache)
    config.run.name, config.run.output_dir = name, str(runs)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 6, 4, 4
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.logger.log_interval = 2
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 2, -1
    apply_overrides(config, list(words))
    return config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """A directory with runs/one, and its twin runs/two: the same configuration under another name."""
    directory = tmp_path_factory.mktemp("trained")
    for name in ("one", "two"):
        pretrain(small_run(directory / "runs", name, corpus, token_cache), callbacks=[JsonLogger()])
    return directory


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The working directory of a test: a copy of both runs, for it to damage."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


class Said:
    """What a command printed, and its exit code."""

    def __init__(self, capture: Capture, *words: str) -> None:
        capture.readouterr()
        self.code = main(["checkpoint", *words])
        self.out, self.err = capture.readouterr()
        self.lines = self.out.splitlines()

    def line(self, *parts: str) -> str:
        """The one line that has all of the parts."""
        found = [line for line in self.lines if all(part in line for part in parts)]
        assert len(found) == 1, self.out
        return found[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def write_states(
    root: Path, step: int, states: Mapping[str, Any], pattern: str = "replicated", **manifest: Any
) -> Path:
    """A checkpoint of states by their path without an ending: `model`, or `rng/rank_0`."""
    store = FileStore()
    transaction = SaveTransaction(store, root, step)
    transaction.prepare()
    digests: dict[str, FileDigest] = {}
    files: dict[str, list[str]] = {}
    for label, state in states.items():
        key, is_only = label.partition("/")[0], "/" not in label
        names = (
            (f"{key}/{key}.safetensors", f"{key}/state.json") if is_only else (f"{label}.safetensors", f"{label}.json")
        )
        store.make_dir(transaction.directory / key)
        tensors, document = encode_state(state)
        if tensors:
            with store.open(transaction.directory / names[0]) as file:
                write_tensors(file, tensors)
            digests[names[0]] = file.digest
        digests[names[1]] = store.write_file(transaction.directory / names[1], document_to_bytes(document))
        files.setdefault(key, []).extend(name for name in names if name in digests)
    components = {
        key: ComponentEntry(pattern, list(range(len(files[key]) // 2)), names, sum(digests[one].size for one in names))
        for key, names in files.items()
    }
    content = {"run_id": "hand", "created_at": "2026-01-01T00:00:00", "world_size": 1, **manifest}
    return transaction.commit(Manifest(step=step, components=components, files=digests, **content))


class TestList:
    def test_the_table_marks_the_best_and_the_one_to_resume_from(self, here: Path, capsys: Capture) -> None:
        said = Said(capsys, "list", "one")
        assert said.code == 0
        rows = [line.split() for line in said.lines[3:6]]
        assert rows[0][:2] == ["->", "6"]
        assert [row[0] for row in rows[1:]] == ["4", "2"]
        losses = {
            step: read_manifest(here / f"runs/one/checkpoints/checkpoint-{step}").metrics["eval_loss"]
            for step in (2, 4, 6)
        }
        best = min(losses, key=lambda step: losses[step])
        assert f"loss {losses[best]:.4g}"[:9] in said.line(" * ", "complete")
        assert said.line("*", "complete").lstrip("-> ").startswith(str(best))

    def test_it_finds_runs_directories_and_checkpoints_alike(self, here: Path, capsys: Capture) -> None:
        tables = [
            Said(capsys, "list", name).lines[1:]
            for name in ("one", "runs/one", "runs/one/checkpoints", str(here / "runs/one/checkpoints/checkpoint-2"))
        ]
        assert all(table == tables[0] for table in tables)

    def test_a_run_that_saves_elsewhere_is_found_by_its_record(self, here: Path, capsys: Capture) -> None:
        (here / "runs/one/checkpoints").rename(here / "elsewhere")
        record = json.loads((here / "runs/one/run.json").read_text())
        record["config"]["checkpoint"]["save"] = str(here / "elsewhere")
        (here / "runs/one/run.json").write_text(json.dumps(record))
        assert Said(capsys, "list", "one").lines[0].startswith(str(here / "elsewhere"))

    def test_damage_and_leftovers_are_told_apart(self, here: Path, capsys: Capture) -> None:
        root = here / "runs/one/checkpoints"
        flip(root / "checkpoint-6/model/model.safetensors")
        (root / "checkpoint-4/rng/rank_0.json").unlink()
        (root / ".tmp-checkpoint-8-00000000").mkdir()
        (root / ".tmp-checkpoint-9-00000001").mkdir()
        (root / ".trash-checkpoint-1-00000002").mkdir()
        (root / ".superseded-checkpoint-3-00000003").mkdir()
        (root / "checkpoint-7").mkdir()
        (root / "checkpoint-2-copy").mkdir()
        with (root / ".tmp-checkpoint-9-00000001.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            listed = json.loads(Said(capsys, "list", "one", "--json").out)
            table = Said(capsys, "list", "one")
        states = {record["step"]: record["state"] for record in listed["checkpoints"]}
        assert states == {
            9: "being saved",
            8: "unfinished",
            7: "damaged",
            6: "damaged",
            4: "damaged",
            3: "damaged",
            2: "complete",
            1: "half deleted",
        }
        expected = newest_verified(root, report=lambda line: None)
        assert expected is not None
        assert listed["resumes_from"] == "runs/one/checkpoints/checkpoint-2"
        assert expected.step == 2
        assert "BLAKE3" in table.line("step 6:")
        assert "rank_0.json is missing" in table.line("step 4:")
        assert table.line("->", "complete").split()[1] == "2"

    def test_quick_looks_at_sizes_only(self, here: Path, capsys: Capture) -> None:
        flip(here / "runs/one/checkpoints/checkpoint-6/model/model.safetensors")
        with (here / "runs/one/checkpoints/checkpoint-4/model/model.safetensors").open("ab") as file:
            file.write(b"more")
        said = Said(capsys, "list", "one", "--quick")
        assert "its manifest lists" in said.line("step 4:")
        assert said.line("->", "complete").split()[1] == "6"
        assert "not hashed" in said.out

    def test_a_checkpoint_moved_aside_for_one_that_never_came_is_what_a_resume_takes(
        self, here: Path, capsys: Capture
    ) -> None:
        root = here / "runs/one/checkpoints"
        (root / "checkpoint-6").rename(root / ".superseded-checkpoint-6-0123abcd")
        listed = json.loads(Said(capsys, "list", "one", "--json").out)
        found = newest_verified(root)
        assert found is not None
        assert Path(listed["resumes_from"]).name == found.path.name == ".superseded-checkpoint-6-0123abcd"

    def test_branches_that_were_left_are_named(self, here: Path, capsys: Capture) -> None:
        root = here / "runs/one/checkpoints"
        (root / "aside/branch-1").mkdir(parents=True)
        (root / "checkpoint-6").rename(root / "aside/branch-1/checkpoint-6")
        assert "(steps 6)" in Said(capsys, "list", "one").line("branch-1")

    def test_nothing_there_is_said(self, here: Path, capsys: Capture) -> None:
        (here / "empty").mkdir()
        said = Said(capsys, "list", "empty")
        assert (said.code, said.out.strip()) == (0, "empty has no checkpoints.")

    @pytest.mark.parametrize("typed", ["oen", "runs/oen", "runs/oen@4"])
    def test_a_mistyped_name_is_answered_with_the_nearest(self, here: Path, capsys: Capture, typed: str) -> None:
        said = Said(capsys, "list", typed)
        assert said.code == 1
        assert "Did you mean 'one'?" in said.err

    @pytest.mark.parametrize("width", [80, 120])
    def test_lines_stay_within_the_terminal(self, here: Path, capsys: Capture, monkeypatch: Patch, width: int) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        for words in (("list", "one"), ("diff", "one@2", "one@6"), ("diff", "one@2", "one@6", "--all")):
            table = [line for line in Said(capsys, *words).lines if line.startswith(("->", "  "))]
            assert table
            assert max(map(len, table)) <= width

    def test_what_a_manifest_says_cannot_move_the_cursor(self, tmp_path: Path, capsys: Capture) -> None:
        root = tmp_path / "checkpoints"
        write_states(
            root, 1, {"model": {}}, created_at="\x1b[2J\x1b[31m", metrics={"\x1bloss\n": 1.0}, run_id="\x1b[1m"
        )
        write_states(root, 2, {"mo_del": {"\x1b[1mname": 1}})
        assert "\x1b" not in Said(capsys, "list", str(root)).out
        assert "\x1b" not in Said(capsys, "diff", f"{root}@1", f"{root}@2").out


class TestVerify:
    def test_each_bad_file_is_named(self, here: Path, capsys: Capture) -> None:
        directory = here / "runs/one/checkpoints/checkpoint-6"
        flip(directory / "model/model.safetensors")
        (directory / "rng/rank_0.json").unlink()
        (directory / "stranger.txt").write_text("hello")
        said = Said(capsys, "verify", "one")
        assert said.code == 1
        assert "BAD, 2 of" in said.lines[0]
        assert "BLAKE3" in said.line("model.safetensors")
        assert "is missing" in said.line("rank_0.json")
        assert "stranger.txt" in said.line("not in the manifest")

    def test_the_newest_is_checked_not_the_newest_good_one(self, here: Path, capsys: Capture) -> None:
        assert Said(capsys, "verify", "one").code == 0
        (here / "runs/one/checkpoints/checkpoint-6/manifest.json").write_bytes(b"{}")
        said = Said(capsys, "verify", "one")
        assert said.code == 1
        assert "does not end with its own hash" in said.out
        assert Said(capsys, "verify", "one@4").code == 0

    def test_all_are_checked_where_that_is_asked_for(self, here: Path, capsys: Capture) -> None:
        flip(here / "runs/one/checkpoints/checkpoint-2/optimizer/optimizer.safetensors")
        assert Said(capsys, "verify", "one").code == 0
        said = Said(capsys, "verify", "one", "--all")
        assert said.code == 1
        assert ["good" in line for line in said.lines if line.startswith("runs/")] == [True, True, False]

    def test_a_renamed_checkpoint_is_bad(self, here: Path, capsys: Capture) -> None:
        root = here / "runs/one/checkpoints"
        (root / "checkpoint-6").rename(root / "checkpoint-60")
        said = Said(capsys, "verify", "one")
        assert said.code == 1
        assert "the directory was renamed" in said.out

    def test_a_pickle_in_place_of_a_file_is_bad_and_not_loaded(self, here: Path, capsys: Capture) -> None:
        import pickle

        class Harmful:
            def __reduce__(self) -> Any:
                return (os.mkdir, (str(here / "harm"),))

        for name in ("model/model.safetensors", "model/state.json", "manifest.json"):
            (here / "runs/one/checkpoints/checkpoint-6" / name).write_bytes(pickle.dumps(Harmful()))
            for words in (("list", "one"), ("verify", "one"), ("diff", "one@6", "one@4"), ("export", "one@6", "out")):
                Said(capsys, *words)
            assert Said(capsys, "verify", "one").code == 1
        assert not (here / "harm").exists()
        assert not (here / "out").exists()

    def test_a_step_that_is_not_there_is_an_error_with_those_that_are(self, here: Path, capsys: Capture) -> None:
        said = Said(capsys, "verify", "one@5")
        assert said.code == 1
        assert "6, 4, 2" in said.err


class TestDiff:
    def test_twins_are_equal_whatever_the_clock_and_their_names(self, here: Path, capsys: Capture) -> None:
        said = Said(capsys, "diff", "one", "two")
        assert said.code == 0, said.out
        assert said.line("run.name", "one", "two", "safe")
        assert "The checkpoints are equal. Not counted:" in said.lines[-1]
        assert "_runtime" in Said(capsys, "diff", "one", "two", "--all").out

    def test_two_steps_differ_in_weights_and_counters(self, here: Path, capsys: Capture) -> None:
        said = Said(capsys, "diff", "runs/one@2", "runs/one@6", "--all")
        assert said.code == 1
        assert said.lines[-1].startswith("The checkpoints differ.")
        assert said.line("train_state.step:").endswith("2 -> 6")
        before, after = (
            load_file(here / f"runs/one/checkpoints/checkpoint-{step}/model/model.safetensors") for step in (2, 6)
        )
        name = "layers.0.attention.query.weight"
        row = said.line("model", name).split()
        gap = (before[name].double() - after[name].double()).abs()
        norms = [tensor[name].double().norm().item() for tensor in (before, after)]
        relative = gap.norm().item() / max(norms)
        assert row[2:] == ["16x16", *(f"{one:.3g}" for one in (gap.max().item(), relative, *norms))]
        assert "different" in said.line("model", "replicated")
        assert "the same" in said.line("configuration")

    def test_one_bit_of_one_weight_is_found(self, tmp_path: Path, capsys: Capture) -> None:
        weight = torch.randn(40, 30)
        other = weight.clone()
        other[7, 7] = torch.nextafter(other[7, 7], torch.tensor(9.0))
        for step, value in enumerate((weight, other)):
            write_states(tmp_path, step, {"model": {"w": value, "twin": torch.ones(3)}})
        said = Said(capsys, "diff", f"{tmp_path}@0", f"{tmp_path}@1")
        assert said.code == 1
        assert "1 of 2 differ" in said.line("tensors:")
        assert "40x30" in said.line("model w")
        assert "twin" not in said.out

    def test_shapes_dtypes_nan_and_missing_tensors_are_shown(self, tmp_path: Path, capsys: Capture) -> None:
        old = {"shape": torch.ones(2), "type": torch.ones(2), "nan": torch.ones(2), "gone": torch.ones(2)}
        new = {"shape": torch.ones(3), "type": torch.ones(2).half(), "nan": torch.tensor([1.0, torch.nan])}
        infinite = torch.tensor([torch.inf, torch.nan, 2.0])
        empty = torch.ones(0, 2)
        write_states(tmp_path, 1, {"model": {**old, "inf": infinite, "zero": torch.tensor([0.0]), "empty": empty}})
        new["inf"], new["zero"] = infinite + torch.tensor([0, 0, 1.0]), torch.tensor([-0.0])
        write_states(tmp_path, 2, {"model": {**new, "new": torch.ones(2), "empty": empty.double()}})
        said = Said(capsys, "diff", f"{tmp_path}@1", f"{tmp_path}@2")
        assert said.code == 1
        assert "2 / 3" in said.line("model shape")
        assert "2 float32 / float16" in said.line("model type")
        assert "nan" in said.line("model nan", "2").removeprefix("  model nan")
        assert "2 / missing" in said.line("model gone")
        assert "missing / 2" in said.line("model new")
        assert said.line("model inf").split()[3] == "1"
        assert said.line("model zero").split()[3] == "0", "the sign of zero is a difference of bits"
        assert "0x2 float32 / float64" in said.line("model empty")

    def test_tied_tensors_count_once(self, tmp_path: Path, capsys: Capture) -> None:
        for step in (1, 2):
            tied = torch.full((4,), float(step))
            write_states(tmp_path, step, {"model": {"embedding": tied, "head": tied}})
        said = Said(capsys, "diff", f"{tmp_path}@1", f"{tmp_path}@2")
        assert "tensors: 1 of 1 differ" in said.out

    def test_plain_values_are_compared_by_type_and_to_the_bit(self, tmp_path: Path, capsys: Capture) -> None:
        import numpy as np

        same = {"nan": float("nan"), "list": [1, 2], "set": {3, 4}, "array": np.arange(5)}
        old = {
            **same,
            "zero": 0.0,
            "one": 1,
            "many": [1, 2, 3],
            "nested": [{"a": 1}],
            "numbers": np.arange(4),
            "lost": 1,
        }
        new = {**same, "zero": -0.0, "one": True, "many": [1, 2, 4], "nested": [{"a": 2}, {"a": 3}], "come": {"in": 5}}
        old["typed"], new["typed"] = torch.tensor(3), 3
        write_states(tmp_path, 1, {"trainer": old})
        write_states(tmp_path, 2, {"trainer": {**new, "numbers": np.arange(4.0)}})
        said = Said(capsys, "diff", f"{tmp_path}@1", f"{tmp_path}@2", "--all")
        assert said.code == 1
        changed = {line.split()[1].rstrip(":"): line.partition(": ")[2] for line in said.lines if " -> " in line}
        assert changed == {
            "zero": "0.0 -> -0.0",
            "one": "1 -> True",
            "many": "[1, 2, 3] -> [1, 2, 4]",
            "nested": "1 items -> 2 items",
            "nested.0.a": "1 -> 2",
            "numbers": "array (4,) of int64 -> array (4,) of float64",
            "lost": "1 -> missing",
            "typed": "torch.int64 3 -> int 3",
            "come.in": "missing -> 5",
        }

    def test_values_that_are_alike_but_for_an_index_are_one_line(self, tmp_path: Path, capsys: Capture) -> None:
        for step in (1, 2):
            write_states(tmp_path, step, {"optimizer": {"state": {i: {"step": torch.tensor(step)} for i in range(9)}}})
        said = Said(capsys, "diff", f"{tmp_path}@1", f"{tmp_path}@2")
        assert said.line("optimizer state.*.step: 1 -> 2").endswith("(9 times)")

    def test_an_optimizer_state_by_number_is_compared_by_name(self, tmp_path: Path, capsys: Capture) -> None:
        for step, names in enumerate(([0, 1], ["b", "a"])):
            state = {name: {"exp_avg": torch.full((3,), 1.0 + step * index)} for index, name in enumerate(names)}
            write_states(
                tmp_path, step, {"optimizer": {"state": state, "param_groups": [{"params": names, "lr": 1.0}]}}
            )
        said = Said(capsys, "diff", f"{tmp_path}@0", f"{tmp_path}@1")
        assert "tensors: 1 of 2 differ" in said.out
        assert said.line("optimizer state.a.exp_avg").split()[3] == "1"
        assert "params" not in said.out

    def test_other_components_ranks_and_patterns_differ(self, tmp_path: Path, capsys: Capture) -> None:
        write_states(tmp_path, 1, {"rng/rank_0": {"x": 1}, "rng/rank_1": {"x": 2}, "gone": {}}, "per_rank")
        write_states(tmp_path, 2, {"rng/rank_0": {"x": 1}, "gone": {}, "come": {}}, "per_rank")
        said = Said(capsys, "diff", f"{tmp_path}@1", f"{tmp_path}@2")
        assert said.code == 1
        assert "rng/rank_1: present -> missing" in said.out
        assert said.line("come", "per_rank").endswith("only in B")
        assert said.line("gone", "per_rank").endswith("equal")
        write_states(tmp_path, 3, {"rng/rank_0": {"x": 1}, "gone": {}, "come": {}}, "replicated")
        assert Said(capsys, "diff", f"{tmp_path}@2", f"{tmp_path}@3").code == 1

    def test_only_keys_that_move_the_trajectory_make_configurations_different(
        self, tmp_path: Path, capsys: Capture
    ) -> None:
        changed = [("run", "name", "x"), ("logger", "log_interval", 7), ("optimizer", "lr", 0.5), ("logger", "odd", 1)]
        for step, (part, key, value) in enumerate(changed):
            config = tiny_gpt_pretrain_config().to_dict()
            config[part][key] = value
            write_states(tmp_path, step, {"model": {}}, config=config)
        assert Said(capsys, "diff", f"{tmp_path}@0", f"{tmp_path}@1").code == 0
        said = Said(capsys, "diff", f"{tmp_path}@0", f"{tmp_path}@2")
        assert said.code == 1
        assert "changes the trajectory" in said.line("optimizer.lr")
        unknown = Said(capsys, "diff", f"{tmp_path}@0", f"{tmp_path}@3")
        assert unknown.code == 1
        assert "odd" in unknown.line("configuration:")

    @pytest.mark.parametrize("words", [("one", "oen"), ("one@5", "one"), ("one@4", "runs/one/run.json")])
    def test_what_cannot_be_compared_has_an_exit_code_of_its_own(
        self, here: Path, capsys: Capture, words: tuple[str, str]
    ) -> None:
        said = Said(capsys, "diff", *words)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("error: ")

    def test_a_damaged_checkpoint_is_not_compared(self, here: Path, capsys: Capture) -> None:
        flip(here / "runs/one/checkpoints/checkpoint-6/model/model.safetensors")
        said = Said(capsys, "diff", "one@6", "one@4")
        assert said.code == 2
        assert "BLAKE3" in said.err


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.embedding(x)).square().mean()}


@pytest.fixture
def own_model(tmp_path: Path) -> tuple[Path, Tied]:
    """A run of the Trainer with a user's model."""
    model = Tied()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "own"), max_steps=2, per_device_train_batch_size=2, save_steps=1, use_cpu=True
    )
    rows = [{"x": torch.tensor(i % 7)} for i in range(8)]
    Trainer(model=model, args=arguments, train_dataset=rows, default_callbacks=False).train()
    return tmp_path / "own", model


class TestExport:
    def test_transformers_opens_it_and_gives_the_logits_of_our_model(self, here: Path, capsys: Capture) -> None:
        transformers = pytest.importorskip("transformers")
        assert Said(capsys, "export", "one", "out").code == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(here / "out").eval()
        ours = load_hf(here / "runs/one/model").eval()
        tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
        assert theirs.config.eos_token_id == 256

    def test_it_takes_the_step_that_is_asked_for(self, here: Path, capsys: Capture) -> None:
        for choice in ("2", "6"):
            assert Said(capsys, "export", f"one@{choice}", f"{choice}.safetensors").code == 0
            source = here / f"runs/one/checkpoints/checkpoint-{choice}/model/model.safetensors"
            exported, stored = load_file(here / f"{choice}.safetensors"), load_file(source)
            assert exported.keys() == stored.keys()
            assert all(torch.equal(exported[name], stored[name]) for name in stored)

    @pytest.mark.parametrize(
        ("out", "refused", "offered"),
        [
            ("out.BIN", ".bin files", "out"),
            ("there/out.onnx", ".onnx files", "there/out"),
            ("out-1.5.tar.gz", ".tar.gz files", "out-1.5"),
            ("out.bin.safetensors/", ".bin.safetensors directories", "out"),
        ],
    )
    def test_a_format_that_cannot_be_written_is_refused(
        self, here: Path, capsys: Capture, out: str, refused: str, offered: str
    ) -> None:
        said = Said(capsys, "export", "one", out)
        assert said.code == 1
        assert f"cannot write {refused}, got {out}" in said.err
        assert f"name {offered}, or pass --format hf to keep the name" in said.err
        assert not (here / out).exists()

    def test_a_dot_in_the_name_of_a_directory_is_no_ending(self, here: Path, capsys: Capture) -> None:
        for words in (("mine-1.5",), ("mine.final", "--format", "hf")):
            assert Said(capsys, "export", "one", *words).code == 0
            assert (here / words[0] / "model.safetensors").is_file()

    def test_an_ending_in_capitals_names_a_file_too(self, here: Path, capsys: Capture) -> None:
        assert Said(capsys, "export", "one", "out.SAFETENSORS").code == 0
        assert load_file(here / "out.SAFETENSORS")

    def test_it_takes_the_best_one(self, here: Path, capsys: Capture) -> None:
        root = here / "checkpoints"
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 0.5)):
            model = {"w": torch.tensor([float(step)])}
            path = write_states(root, step, {"model": model}, metrics={"eval_loss": loss})
        flip(path / "model/state.json")
        assert Said(capsys, "export", f"{root}@best", "best.safetensors").code == 0
        assert load_file(here / "best.safetensors")["w"].item() == 2.0, "the very best is damaged"

    def test_a_damaged_newest_one_is_skipped(self, here: Path, capsys: Capture) -> None:
        flip(here / "runs/one/checkpoints/checkpoint-6/model/model.safetensors")
        assert "checkpoint-4" in Said(capsys, "export", "one", "out").out

    def test_an_existing_place_is_left_alone_without_force(self, here: Path, capsys: Capture) -> None:
        for out in ("out", "out.safetensors"):
            assert Said(capsys, "export", "one@2", out).code == 0
        before = {path: path.read_bytes() for path in (here / "out/model.safetensors", here / "out.safetensors")}
        for out in ("out", "out.safetensors"):
            said = Said(capsys, "export", "one", out)
            assert said.code == 1
            assert "--force" in said.err
        assert all(path.read_bytes() == content for path, content in before.items())
        for out in ("out", "out.safetensors"):
            assert Said(capsys, "export", "one", out, "--force").code == 0
        assert all(path.read_bytes() != content for path, content in before.items())
        assert not [path for path in here.iterdir() if path.name.startswith(".")]

    def test_force_replaces_nothing_but_an_export(self, here: Path, capsys: Capture) -> None:
        (here / "mine").mkdir()
        (here / "mine/thesis.txt").write_text("years of work")
        for out in ("mine", "runs", "runs/one", "runs/one/checkpoints/checkpoint-4"):
            assert Said(capsys, "export", "one", out, "--force").code == 1
        weights = here / "runs/one/checkpoints/checkpoint-4/model/model.safetensors"
        assert Said(capsys, "export", "one", str(weights), "--force").code == 1
        assert (here / "mine/thesis.txt").exists()
        assert Said(capsys, "verify", "one", "--all").code == 0

    def test_a_failure_in_between_leaves_what_was_there(self, here: Path, capsys: Capture, monkeypatch: Patch) -> None:
        assert Said(capsys, "export", "one@2", "out").code == 0
        before = (here / "out/model.safetensors").read_bytes()
        rename = os.rename

        def refuse_last(source: Any, target: Any) -> None:
            if Path(target).name == "out" and not str(source).endswith("-replaced"):
                raise OSError(28, "No space left on device")
            rename(source, target)

        monkeypatch.setattr(os, "rename", refuse_last)
        said = Said(capsys, "export", "one", "out", "--force")
        assert said.code == 1
        assert "No space left" in said.err
        assert (here / "out/model.safetensors").read_bytes() == before
        assert not [path for path in here.iterdir() if path.name.startswith(".")]

    def test_the_weights_of_a_users_own_model_are_loaded_by_safetensors(
        self, own_model: tuple[Path, Tied], tmp_path: Path, capsys: Capture
    ) -> None:
        run, model = own_model
        said = Said(capsys, "export", str(run), str(tmp_path / "own.safetensors"))
        assert said.code == 0
        assert "head.weight is stored as embedding.weight" in said.out
        assert list(load_file(tmp_path / "own.safetensors")) == ["embedding.weight"]
        with safe_open(tmp_path / "own.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        fresh = Tied()
        load_model(fresh, tmp_path / "own.safetensors")
        assert torch.equal(fresh.head.weight, model.head.weight)

    def test_hf_says_why_it_cannot_take_a_users_own_model(
        self, own_model: tuple[Path, Tied], tmp_path: Path, capsys: Capture
    ) -> None:
        said = Said(capsys, "export", str(own_model[0]), str(tmp_path / "out"))
        assert said.code == 1
        assert "does not contain the Onstep Transformer" in said.err
        assert "--format safetensors" in said.err
        assert not (tmp_path / "out").exists()

    def test_weights_of_another_size_than_the_configuration_are_refused(self, here: Path, capsys: Capture) -> None:
        manifest = read_manifest(here / "runs/one/checkpoints/checkpoint-6")
        config = {**manifest.config, "model": {**manifest.config["model"], "hidden_size": 32, "num_layers": 2}}
        weights = load_file(here / "runs/one/checkpoints/checkpoint-6/model/model.safetensors")
        path = write_states(here / "checkpoints", 6, {"model": weights}, config=config)
        said = Said(capsys, "export", str(path), "out")
        assert said.code == 1
        assert "shape" in said.err
        assert "missing layers.1." in said.err

    def test_low_precision_weights_stay_as_they_are(self, here: Path, capsys: Capture) -> None:
        source = here / "runs/one/checkpoints/checkpoint-6"
        weights = {name: one.bfloat16() for name, one in load_file(source / "model/model.safetensors").items()}
        path = write_states(here / "checkpoints", 6, {"model": weights}, config=read_manifest(source).config)
        assert Said(capsys, "export", str(path), "out").code == 0
        assert {one.dtype for one in load_file(here / "out/model.safetensors").values()} == {torch.bfloat16}
        assert json.loads((here / "out/config.json").read_text())["dtype"] == "bfloat16"

    def test_a_checkpoint_without_weights_in_one_piece_is_refused(self, tmp_path: Path, capsys: Capture) -> None:
        write_states(tmp_path, 1, {"trainer": {"step": 1}})
        write_states(
            tmp_path, 2, {"model/rank_0": {"w": torch.ones(1)}, "model/rank_1": {"w": torch.ones(1)}}, "per_rank"
        )
        for step, why in (("1", "no component 'model'"), ("2", "2 states")):
            said = Said(capsys, "export", f"{tmp_path}@{step}", str(tmp_path / "out.safetensors"))
            assert said.code == 1
            assert why in said.err

    @pytest.mark.parametrize("kind", ["tokenizers", "huggingface"])
    def test_the_tokenizer_comes_along(
        self, tmp_path: Path, corpus: Path, token_cache: Path, capsys: Capture, kind: str
    ) -> None:
        transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
        words = {"<|endoftext|>": 0, "[UNK]": 1, "def": 2, "return": 3, "import": 4}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<|endoftext|>"])
        source = tmp_path / "words.json"
        tokenizer.save(str(source))
        if kind == "huggingface":
            fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source), eos_token="<|endoftext|>")
            source = tmp_path / "words"
            fast.save_pretrained(source)
        words_of_run = (
            f"tokenizer.tokenizer_type={kind}",
            f"tokenizer.tokenizer_model={source}",
            "train.train_iters=3",
        )
        pretrain(small_run(tmp_path, kind, corpus, token_cache, *words_of_run))
        assert Said(capsys, "export", str(tmp_path / kind), str(tmp_path / "out")).code == 0
        opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert opened("import def").input_ids == [4, 2]
        assert opened.eos_token_id == 0
        assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 0

        shutil.rmtree(source) if source.is_dir() else source.unlink()
        said = Said(capsys, "export", str(tmp_path / kind), str(tmp_path / "without"))
        assert said.code == 0
        assert "without the tokenizer" in said.out


def test_as_a_process_it_has_the_exit_codes_that_scripts_rely_on(processes: Processes, here: Path) -> None:
    flip(here / "runs/two/checkpoints/checkpoint-6/model/model.safetensors")
    shell = Shell(processes, here)
    verified = shell.onstep("checkpoint", "verify", "two")
    assert verified.returncode == 1
    assert "model.safetensors does not have the BLAKE3 hash" in verified.stdout
    assert verified.stderr == ""
    assert shell.onstep("checkpoint", "diff", "one@2", "two@4").returncode == 1


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from onstep.cli.main import main; code = main(['checkpoint', '--help']);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("list", "verify", "diff", "export", "PATH@STEP"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers draws a bar when it loads weights."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    yield
    del os.environ["HF_HUB_DISABLE_PROGRESS_BARS"]
