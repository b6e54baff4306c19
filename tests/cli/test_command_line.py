"""The command line as a user meets it: real processes, real files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.cli.main import main
from tests.support import torchrun
from tests.support.forked_processes import Processes
from tests.support.shell import Shell

SMALL = [
    "dataset.split=80,10,10",
    "dataset.seq_length=32",
    "model.seq_length=32",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "train.global_batch_size=4",
    "train.train_iters=6",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_on_start=false",
    "validation.eval_interval=3",
    "validation.eval_iters=2",
    "logger.log_interval=2",
    "dist.device=cpu",
]


@pytest.fixture
def shell(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> Shell:
    return Shell(processes, tmp_path, (*SMALL, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}"))


def test_train_leaves_a_run_that_generate_continues_from(shell: Shell) -> None:
    done = shell.onstep("train", *shell.small)
    assert done.returncode == 0, done.stderr
    run = shell.directory / "runs" / "tiny_gpt"
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
    records = json.loads((run / "trainer_logs.json").read_text())
    assert [record["global_step"] for record in records if "loss" in record] == [2, 4, 6]
    assert [record["global_step"] for record in records if "eval_loss" in record] == [3, 6, 6]
    assert sum("test_loss" in record for record in records) == 1
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "model" / "model.safetensors").exists()
    assert {" eval ", " test "} <= {row for row in (" eval ", " test ") if row in done.stdout}
    assert "runs/tiny_gpt" in done.stdout

    text = shell.onstep("generate", "runs/tiny_gpt", "def ", "--max-new-tokens", "20", "--seed", "1")
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("def ")
    assert (
        shell.onstep("generate", "runs/tiny_gpt", "def ", "--max-new-tokens", "20", "--seed", "1").stdout == text.stdout
    )

    again = shell.onstep("train", *shell.small)
    assert again.returncode == 0
    assert "is finished" in again.stdout
    assert "run.fresh=true" in again.stdout
    assert "run.name=" in again.stdout

    other = shell.onstep("train", *shell.small, "optimizer.lr=1e-3")
    assert other.returncode == 1
    assert "optimizer.lr" in other.stderr
    assert json.loads((run / "trainer_logs.json").read_text()) == records

    fresh = shell.onstep("train", *shell.small, "optimizer.lr=1e-3", "run.fresh=true")
    assert fresh.returncode == 0, fresh.stderr
    assert json.loads((shell.directory / "runs" / "tiny_gpt-2" / "run.json").read_text())["status"] == "completed"


@pytest.mark.process
def test_train_under_torchrun_gives_the_losses_of_one_process(shell: Shell) -> None:
    assert shell.onstep("train", *shell.small, "run.name=one").returncode == 0
    words = ["-m", "onstep", "train", *shell.small, "run.name=two"]
    code, said = torchrun.finish_forked(shell.processes, words, shell.directory)
    assert code == 0, said

    def losses(name: str) -> list[float]:
        records = json.loads((shell.directory / "runs" / name / "trainer_logs.json").read_text())
        return [record[key] for record in records for key in ("loss", "eval_loss", "test_loss") if key in record]

    assert losses("two") == pytest.approx(losses("one"), rel=1e-5)  # float32 gradients summed over ranks
    assert said.count("Finished at step") == 1


def test_the_users_own_callback_is_brought_by_import(shell: Shell) -> None:
    (shell.directory / "my.py").write_text(
        "from onstep import Callback\n"
        "class Mine(Callback):\n"
        "    def on_train_end(self, context):\n"
        "        print('mine was called at step', context.state.train_state.step)\n"
    )
    done = shell.onstep("train", *shell.small, "--import", "my.py", "callbacks=[my:Mine]")
    assert done.returncode == 0, done.stderr
    assert "mine was called at step 6" in done.stdout


def test_a_configuration_file_is_read_and_never_imports_code(shell: Shell) -> None:
    shown = shell.onstep("config", "show", *shell.small)
    assert shown.returncode == 0, shown.stderr
    (shell.directory / "mine.yaml").write_text(shown.stdout)
    done = shell.onstep("train", "mine.yaml", "run.name=mine")
    assert done.returncode == 0, done.stderr
    assert json.loads((shell.directory / "runs" / "mine" / "run.json").read_text())["step"] == 6

    (shell.directory / "bad.yaml").write_text("callbacks: ['os:system']\n")
    refused = shell.onstep("train", "bad.yaml")
    assert refused.returncode == 1
    assert "never imports code" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lrr=1"], "optimizer.lr"),
        (["train.train_iters=many"], "train.train_iters"),
        (["nonsense"], "key=value"),
        (["dataset.paths=[/nowhere/at/all]"], "/nowhere/at/all"),
        (["train.global_batch_size=5", "train.micro_batch_size=2"], "train.global_batch_size=5"),
        (["run.output_dir=/dev/null/runs"], "/dev/null/runs"),
        (["dataset.cache_dir=/proc"], "cannot write token files to '/proc'"),
        (["callbacks=[nowhere:Thing]"], "nowhere"),
        (["callbacks=["], "callbacks='[' lacks a bracket"),
        (["--recipe", ""], "a recipe is named by text such as tiny_gpt, got ''"),
        (["run.name=''"], "run.name='' must be a path of at most"),
        (["dist.distributed_backend=nccl", "dist.device=null"], "requires GPUs and NCCL"),
        (["train.torch_compile=true", "train.torch_compile_backend=nope"], "torch_compile_backend='nope' is not known"),
        (["dataset.seq_length=9000000", "model.seq_length=9000000"], "9000000"),
        (["model.num_moe_experts=1000000000"], "model.num_moe_experts=1000000000"),
    ],
)
def test_bad_input_is_refused_before_training_with_help(shell: Shell, words: list[str], said: str) -> None:
    done = shell.onstep("train", *shell.small, *words)
    assert done.returncode == 1
    assert re.sub(r"\Amemory: .*\n", "", done.stderr).startswith("error: "), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (shell.directory / "runs" / "tiny_gpt" / "trainer_logs.json").exists()


def test_help_imports_neither_torch_nor_typer() -> None:
    code = (
        "import sys; from onstep.cli.main import main; main(['--help']);"
        "sys.exit(bool({'torch', 'typer', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train" in done.stdout


def test_importing_onstep_does_not_import_torch() -> None:
    code = "import sys, onstep; from onstep import Callback, CallbackManager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_command_names_the_nearest(shell: Shell) -> None:
    done = shell.onstep("trian")
    assert done.returncode == 1
    assert "'train'" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--lr", "1"], "has no option --lr; values are written as KEY=VALUE. Did you mean optimizer.lr=1?"),
        (["train", "--max_steps=3"], "Did you mean train.train_iters=3?"),
        (["finetune", "--config", "x.yaml"], "name the file without an option: onstep finetune x.yaml"),
        (["train", "--recipie", "demo"], "Did you mean '--recipe'?"),
        (["verify-resume", "--dir", "x"], "has no option --dir. Did you mean '--directory'?"),
        (["config", "show", "--optimizer.lr=2"], "Did you mean optimizer.lr=2?"),
        (["train", "qwen25_50m"], "nor a run or a recipe. Did you mean 'qwen25_500m'?"),
        (["train", "--recipe", "demo", "tiny_gpt"], "--recipe demo and tiny_gpt both name a recipe"),
        (["train", "x.yaml"], "the configuration file 'x.yaml' does not exist"),
        (["finetune", "mine"], "'mine' is not a recipe; to fine-tune its weights, write checkpoint.pretrained_check"),
        (["finetune", "mone"], "no configuration file 'mone' and no run 'runs/mone'"),
    ],
)
def test_a_mistyped_word_is_answered_with_what_to_write(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/mine/checkpoint-2").mkdir(parents=True)
    assert main(words) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["train", "finetune", "logs", "logs plot", "plot heatmap", "control save", "memory"])
def test_each_command_has_the_short_form_of_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "-h"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: onstep {words}")


FULL = b"error: cannot write to standard output: No space left on device\n"
CLOSED = b"error: standard output is closed; redirect it, for example to a file or /dev/null.\n"


@pytest.mark.process
@pytest.mark.parametrize("words", ["-h", "train -h", "recipes list", "config defaults --all"])
def test_a_closed_pipe_ends_a_command_quietly(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "onstep", *words.split()], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "output", "said"),
    [
        ("-h", ">/dev/full", FULL),
        ("train -h", ">/dev/full", FULL),
        ("recipes list", ">/dev/full", FULL),
        ("train train.train_iters=1", ">/dev/full", FULL),
        ("-h", ">&-", CLOSED),
        ("recipes list", ">&-", CLOSED),
        ("config defaults", ">&-", CLOSED),
    ],
)
def test_output_that_cannot_be_written_ends_a_command_with_one_line(
    words: str, output: str, said: bytes, tmp_path: Path
) -> None:
    command = f'"{sys.executable}" -m onstep {words} {output}'
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (1, said)
    assert b"Traceback" not in done.stderr


def test_a_run_without_standard_output_trains(shell: Shell) -> None:
    errors = shell.directory / "errors.txt"
    process = shell.start("train", *shell.small, "run.name=daemon", stdout=None, stderr=errors)
    assert process.wait() == 0, errors.read_text()
    assert json.loads((shell.directory / "runs" / "daemon" / "run.json").read_text())["step"] == 6


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate a --max-new-tokens x", "'--max-new-tokens': … got 'x'; onstep generate --help"),
        ("memory tiny_gpt --gpu-gb=0", "'--gpu-gb': … got '0'; onstep memory --help"),
        ("generate", "Missing argument 'name'; onstep generate --help"),
        ("checkpoint lst", "No such command 'lst'. Did you mean 'list'? onstep checkpoint --help"),
        ("generate d.gguf", "d.gguf is a GGUF file, … llama-cli -m d.gguf"),
    ],
)
def test_wrong_words_are_answered_in_one_line(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == (1 if "gguf" in words else 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for part in expected.split("…"):
        assert part.strip() in line
