"""An unmodified script on several ranks, under `torchrun` and `accelerate launch`: the numbers of transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.distributed]
SCRIPT = """
import json
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.ids = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(count))
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}

class Steps(TrainerCallback):
    count = 0
    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

if __name__ == "__main__":
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    args = TrainingArguments(
        sys.argv[1], max_steps=5, logging_steps=1, save_steps=5, eval_strategy="steps", eval_steps=5, use_cpu=True,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        train_sampling_strategy="sequential", report_to="none", disable_tqdm=True,
    )
    steps = Steps()
    Trainer(model, args, train_dataset=Rows(72), eval_dataset=Rows(12), callbacks=[steps]).train()
    assert steps.count == 5
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node={ranks}"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes={ranks}", "--main_process_port=0"]

SHARDS = ["--use_fsdp", "--fsdp_version=2", "--fsdp_state_dict_type=FULL_STATE_DICT"]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param(TORCHRUN, 2, id="torchrun"),
        pytest.param(TORCHRUN, 3, id="torchrun on three ranks"),
        pytest.param(ACCELERATE, 2, id="accelerate launch"),
        pytest.param([*ACCELERATE[:1], *SHARDS, *ACCELERATE[2:]], 2, id="accelerate launch with shards"),
    ],
)
def test_losses_and_weights_are_those_of_transformers(tmp_path: Path, launcher: list[str], ranks: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", *(word.format(ranks=ranks) for word in launcher)]
    launch(tmp_path, [*words, "script.py", "theirs"])
    said = launch(tmp_path, [*words, "-m", "onstep.run", "script.py", "own"])
    assert said.count("names of transformers are Onstep's") == 1
    theirs, own = (records(tmp_path / name) for name in ("theirs", "own"))
    assert [sorted(record) for record in own] == [sorted(record) for record in theirs]
    for mine, given in zip(own, theirs, strict=True):
        assert mine == pytest.approx(given, abs=1e-6)
    weights = [load_file(tmp_path / name / "checkpoint-5" / "model.safetensors") for name in ("theirs", "own")]
    assert max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]) < 1e-6


def launch(directory: Path, words: list[str]) -> str:
    """Run a command to its end; what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def records(output: Path) -> list[dict[str, Any]]:
    """The logged steps and evaluations of a run, without times."""
    history = json.loads((output / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]
    wanted = ("loss", "eval_loss", "learning_rate", "grad_norm", "step", "epoch")
    measured = [record for record in history if "loss" in record or "eval_loss" in record]
    return [{name: record[name] for name in wanted if name in record} for record in measured]
