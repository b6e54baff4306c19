"""A Trainer whose `output_dir` is in an object store: mirrored, and continued by an empty machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import TrainerCallback
from onstep.cli.main import main
from onstep.config import TrainingArguments, args_to_config, config_to_args
from onstep.errors import ConfigError
from onstep.mirror.copies import checkpoint_copies
from onstep.stores.bucket import Bucket
from tests.support.forked_processes import Processes, output_of
from tests.support.object_store import BUCKET, SECRET, environment_of, s3_server
from tests.support.small_models import Regression, arguments, quiet, regression_rows
from tests.support.whole_runs import check_same, left_by

JOBS = "tests.support.jobs.store_trainer_jobs"


class Fails(TrainerCallback):
    """Ends a run with an error after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise RuntimeError("the machine is lost")


def trainer_of(tmp_path: Path, url: str, *callbacks: TrainerCallback) -> Any:
    overrides = {"run.lease_seconds": 1.0}
    args = arguments(tmp_path, output_dir=url, logging_steps=1, save_steps=2, max_steps=6, config_overrides=overrides)
    return quiet(Regression(), args, regression_rows(24), callbacks=list(callbacks))


def names(url: str) -> set[str]:
    return {one.name for one in Bucket(url).list()}


def test_an_empty_machine_continues_and_what_is_written_afterwards_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/store/runs/mine"
    whole = quiet(Regression(), arguments(tmp_path, logging_steps=1, max_steps=6), regression_rows(24))
    whole.train()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    with pytest.raises(RuntimeError, match="the machine is lost"):
        trainer_of(tmp_path, url, Fails(5)).train()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    trainer = trainer_of(tmp_path, f"{url}/")
    outcome = trainer.train()
    assert outcome.global_step == 6
    torch.testing.assert_close(trainer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    shown = [
        {k: v for k, v in one.items() if k in ("loss", "step")} for one in whole.state.log_history if "loss" in one
    ]
    assert [{k: one[k] for k in ("loss", "step")} for one in trainer.state.log_history if "loss" in one] == shown
    local = tmp_path / f"second/onstep/stores/file{tmp_path}/store/runs/mine"
    assert trainer.global_state.args.output_dir == str(local)
    assert {path.name for path in local.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert {"model.safetensors", "run.json", "trainer_state.json"} <= names(url)
    trainer.save_metrics("eval", {"eval_loss": 0.5})
    trainer.save_model(trainer.args.output_dir)
    assert {"eval_results.json", "all_results.json"} <= names(url)
    with pytest.raises(
        ConfigError, match=r"output_dir=s3://bucket/elsewhere cannot be written; give a local directory"
    ):
        trainer.save_model("s3://bucket/elsewhere")
    assert not (tmp_path / "s3:").exists()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    assert main(["checkpoint", "list", url, "--json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [6, 4, 2]
    again = trainer_of(tmp_path, url)
    again.train(resume_from_checkpoint=f"{url}/checkpoint-2")
    assert [one["step"] for one in again.state.log_history if "loss" in one][2:] == [3, 4, 5, 6]
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)

    other = quiet(
        Regression(seed=3), arguments(tmp_path, output_dir=str(tmp_path / "other"), max_steps=6), regression_rows(24)
    )
    other.train(resume_from_checkpoint=f"{url}@4")
    torch.testing.assert_close(other.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_a_new_run_at_the_same_url_leaves_no_checkpoint_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store/run"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trainer_of(tmp_path, url).train()
    trainer = quiet(
        Regression(seed=1), arguments(tmp_path, output_dir=url, save_steps=3, max_steps=3), regression_rows(24)
    )
    trainer.train()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    copies = checkpoint_copies(url, every=True) / "checkpoints"
    assert [path.name for path in copies.glob("checkpoint-*")] == ["checkpoint-3"]
    run_id = json.loads((copies / "checkpoint-3" / "manifest.json").read_text())["run_id"]
    assert run_id == trainer.global_state.run_dir.run_id


def test_arguments_with_a_url_come_back_from_the_configuration() -> None:
    args = TrainingArguments(output_dir="s3://bucket/runs/mine", max_steps=3)
    config = args_to_config(args)
    assert (config.run.output_dir, config.run.name) == ("s3://bucket/runs", "mine")
    assert config_to_args(config).output_dir == "s3://bucket/runs/mine"
    assert args_to_config(config_to_args(config)) == config
    assert "output_dir" not in config.trainer
    with pytest.raises(ConfigError, match="is a bucket; name the directory of the run: s3://bucket/NAME"):
        args_to_config(TrainingArguments(output_dir="s3://bucket", max_steps=3))
    with pytest.raises(ConfigError, match="without credentials") as raised:
        args_to_config(TrainingArguments(output_dir="s3://user:marked@bucket/runs/x", max_steps=3))
    assert "marked" not in str(raised.value)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_machines_are_followed_by_empty_ones_bit_for_bit(
    processes: Processes, tmp_path: Path, corpus: Path, server: str, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    processes.load("transformers.trainer_callback", "transformers.models.qwen2.modeling_qwen2")
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}/run"

    def train(name: str, place: str, **settings: Any) -> tuple[list[int], Path]:
        cache = tmp_path / name / "cache"
        given = {
            "corpus": str(corpus),
            "environment": {**environment_of(server), "XDG_CACHE_HOME": str(cache)},
            "arguments": {"output_dir": place},
            "overrides": {"run.lease_seconds": 1.0},
            "attempt": 0,
        }
        codes = processes.run(JOBS, "train", tmp_path / name, given | settings, ranks=ranks)
        return codes, cache / f"onstep/stores/s3/{BUCKET}/{tmp_path.name}/{place.rpartition('/')[2]}"

    codes, directory = train("whole", f"{url}-whole")
    assert codes == [0] * ranks, output_of(tmp_path / "whole")
    whole = left_by(directory)
    for name, number in (("first", 5), ("second", 5)):
        strikes = [{"signal": "SIGKILL", "event": "on_step_end", "number": number}]
        codes, _ = train(name, url, strikes=strikes)
        assert -9 in codes, output_of(tmp_path / name)
    codes, directory = train("third", url)
    assert codes == [0] * ranks, output_of(tmp_path / "third")
    check_same(left_by(directory), whole)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
