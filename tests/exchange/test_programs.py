"""`onstep run` runs a program as Python does."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.exchange.conftest import Start

LOOKS = """
import json, pickle, sys
class Own: ...
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "file": __file__,
        "package": __package__, "spec": getattr(__spec__, "name", None),
        "pickled": type(pickle.loads(pickle.dumps(Own()))) is Own, "names": sorted(globals()),
    }))
"""


@pytest.mark.parametrize("words", [["package/script.py"], ["-m", "package.script"], ["-m", "package"], ["package"]])
def test_a_program_sees_what_it_sees_in_python(start: Start, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    for name in ("script", "__main__"):
        (tmp_path / "package" / f"{name}.py").write_text(LOOKS)
    given = [*words, "--lr", "-m", "1"]
    plain, run = start(*given), start("-m", "onstep.run", *given)
    assert json.loads(run.stdout) == json.loads(plain.stdout), run.stderr


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(7)",
        "def fails():\n    raise ValueError('of the script')\nfails()",
        "import onstep\nonstep.TrainingArguments(learning_rate='x')",
        "1 +",
        "import atexit\natexit.register(print, 'at exit')\nraise KeyboardInterrupt",
        "import sys\nsys.excepthook = lambda kind, error, tb: print(error, tb.tb_frame.f_code.co_filename)\n1 / 0",
        "raise OSError('disk')",
    ],
)
def test_a_program_ends_as_in_python(start: Start, tmp_path: Path, source: str) -> None:
    (tmp_path / "script.py").write_text(source)
    plain, run = start("script.py"), start("-m", "onstep.run", "script.py")
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout)
    assert run.stderr.partition("\n")[2] == plain.stderr


def test_a_program_that_does_not_exist_is_refused_in_one_line(start: Start) -> None:
    refusals = {
        ("none.py",): "error: none.py: the file does not exist; give a script",
        ("-m", "none.such"): "error: there is no module none.such to run",
        ("-m", "json"): "error: json is a package without a module __main__ to run; give one of its modules.",
        **dict.fromkeys([(), ("",), ("-m", "")], "error: give the script to run, onstep run SCRIPT.py [ARGS], or"),
    }
    for words, said in refusals.items():
        done = start("-m", "onstep.run", *words)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(said)
        assert "Traceback" not in done.stderr


SPAWNS = """
import multiprocessing, subprocess, sys
from transformers import TrainerCallback
class Own(TrainerCallback): ...
def look(one):
    print("spawned", type(one).__name__, TrainerCallback.__module__, flush=True)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=look, args=(Own(),))
    child.start()
    child.join()
    words = "import sitecustomize, transformers; print(transformers.TrainerCallback.__module__, sitecustomize.MARK)"
    subprocess.run([sys.executable, "-c", words], check=True)
"""


def test_processes_that_a_program_starts_make_the_exchange_too(start: Start, tmp_path: Path) -> None:
    (tmp_path / "installed" / "sitecustomize.py").write_text("MARK = 'and the next'\n")
    (tmp_path / "script.py").write_text(SPAWNS)
    done = start("-m", "onstep.run", "script.py")
    callback = "onstep.events.callback"
    assert done.stdout.splitlines() == [f"spawned Own {callback}", f"{callback} and the next"], done.stderr
    assert done.stderr.count("Onstep's") == 1


def test_an_interrupt_ends_a_program_by_its_signal(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    assert start("-m", "onstep.run", "script.py").returncode == -signal.SIGINT


TRAINS = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.body(x), labels)}
torch.manual_seed(0)
rows = [{"x": torch.randn(4), "labels": number % 3} for number in range(16)]
args = TrainingArguments(
    output_dir="out", max_steps=4, save_steps=2, logging_steps=1, report_to="none", disable_tqdm=True
)
Trainer(Net(), args, train_dataset=rows).train()
"""


@pytest.mark.process
@pytest.mark.slow
def test_an_unmodified_script_trains_and_its_run_is_rewound(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    done = start("-m", "onstep", "run", "script.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "checkpoint-4").is_dir()
    done = start("-m", "onstep", "rewind", "out", "4", "--json", "-m", "script")
    assert json.loads(done.stdout)["comparison"]["is_equal"], done.stderr
