"""`onstep generate` continues a text with whatever weights a run has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.main import main
from tests.support.small_weights import llama

SMALL = [
    "train.train_iters=1",
    "scheduler.lr_warmup_iters=0",
    "train.global_batch_size=2",
    "model.seq_length=16",
    "dataset.seq_length=16",
    "dataset.paths=[a.txt]",
    "dataset.cache_dir=cache",
    "validation.eval_interval=null",
    "validation.eval_on_start=false",
    "checkpoint.save_interval=1",
    "dist.device=cpu",
    "run.name=run",
]
GENERATE = ["generate", "runs/run"]
ASKED = ["--max-new-tokens=6", "--temperature=0"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("row, row, row your boat\n" * 40)


def test_a_run_without_final_weights_is_continued_from_its_newest_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--recipe", "tiny_moe", "model.num_layers=1", *SMALL]) == 0
    capsys.readouterr()
    assert main([*GENERATE, "row", *ASKED]) == 0
    of_model = capsys.readouterr().out
    shutil.rmtree("runs/run/model")  # which every finished run of the recipe has
    assert main([*GENERATE, "row", *ASKED]) == 0
    assert capsys.readouterr().out == of_model
    shutil.rmtree("runs/run/checkpoints")
    assert main([*GENERATE, "row", *ASKED]) == 1
    assert "runs/run has no weights: there is neither runs/run/model nor a checkpoint" in capsys.readouterr().err
    assert main(["generate", "runs", "row"]) == 1
    assert "runs is not a run" in capsys.readouterr().err


def test_learned_positions_cut_what_is_added_and_refuse_a_prompt_that_fills_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model.num_layers=1", "model.position_embedding_type=learned_absolute"]
    gpt2 = ["model.normalization=LayerNorm", "model.gated_linear_unit=false", "model.activation_func=gelu_tanh"]
    assert main(["train", "--recipe", "tiny_gpt", *words, *gpt2, *SMALL]) == 0
    capsys.readouterr()
    assert main([*GENERATE, "row, row, ", "--seed=1"]) == 0
    said = capsys.readouterr()
    assert "--max-new-tokens 200 is reduced to 6: the model has 16 learned positions" in said.err
    assert main([*GENERATE, "row, row, row your boat", "--seed=1"]) == 1
    said = capsys.readouterr()
    assert "the prompt has 23 tokens, but the model has 16 learned positions" in said.err
    assert "shorten the prompt to 15" in said.err
    assert main([*GENERATE, "row, row", "--max-new-tokens=8", "--seed=1"]) == 0
    assert "cut" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"config": "cut', "[]", "{}", '{"config": 3}', '{"config": ' + "[" * 5000, "\ufeff"])
def test_a_damaged_record_is_an_error_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert main(["generate", str(tmp_path)]) == 1
    assert "run.json is not the record of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "32"}, "config.json has hidden_size = '32', which must be an integer from 1"),
        ({"intermediate_size": 10**9}, "GB in float32), but the weights in runs/run/model have"),
        ({"model_type": {}}, "config.json has model_type {}; only llama"),
    ],
)
def test_a_damaged_config_json_is_an_error_with_a_remedy(
    capsys: pytest.CaptureFixture[str], values: dict[str, Any], words: str
) -> None:
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/run.json").write_text('{"config": {}}')
    llama(Path("runs/run/model"))
    path = Path("runs/run/model/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    assert main([*GENERATE, "row", *ASKED]) == 1
    assert words in capsys.readouterr().err
