"""The exchange of names: what a script and the libraries that it imports get from `transformers`."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from onstep import TrainingArguments
from onstep.exchange.names import KEPT, NAMES, number_of_names
from tests.exchange.conftest import Start

PLACES = """
import json
import pickle
import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import *
import transformers.trainer_callback as home, transformers.integrations as integrations, library
first = TrainerCallback
print(json.dumps({
    "callback": TrainerCallback.__module__,
    "arguments": TrainingArguments.__module__,
    "is one": transformers.TrainerCallback is first is home.TrainerCallback,
    "of a library": issubclass(library.Own, first) and issubclass(integrations.WandbCallback, first),
    "further": Further.__module__,
}))
"""
EXPECTED = {
    "callback": "onstep.events.callback",
    "arguments": "onstep.config.hf.arguments",
    "is one": True,
    "of a library": True,
    "further": "transformers.trainer_callback",
}


def test_a_script_and_its_libraries_get_onsteps_names(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLACES)
    done = start("-m", "onstep.run", "script.py")
    assert json.loads(done.stdout) == EXPECTED, done.stderr
    said = f"onstep: Trainer, TrainingArguments, TrainerCallback and {number_of_names() - 3} more names of transformers"
    assert done.stderr == f"{said} are Onstep's.\n"


def test_the_same_by_an_import_even_after_that_of_transformers(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import transformers.trainer_callback\nimport onstep.as_transformers\n{PLACES}"
    )
    done = start("script.py", RANK="1")
    assert json.loads(done.stdout) == EXPECTED, done.stderr
    assert done.stderr == ""  # another rank says it


@pytest.mark.parametrize(
    ("imports", "named", "remedy"),
    [
        ("import library", "library.TrainerCallback", "above `import library`"),
        ("from transformers import TrainingArguments", "__main__.TrainingArguments", "above all other imports"),
    ],
)
def test_an_exchange_that_comes_too_late_is_refused(
    start: Start, tmp_path: Path, imports: str, named: str, remedy: str
) -> None:
    (tmp_path / "script.py").write_text(f"{imports}\nimport onstep.as_transformers\n")
    done = start("script.py")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert named in line
    assert remedy in line
    assert "onstep run" in line


def test_the_exchange_of_a_block_is_undone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, transformers.trainer_callback as home\n"
        "from onstep.exchange.install import exchanged\n"
        "with exchanged():\n"
        "    print(home.TrainerCallback.__module__, home.HELD.__module__)\n"
        "import transformers.training_args as arguments\n"
        "print(home.TrainerCallback.__module__, home.HELD.__module__, arguments.HELD.__module__)\n"
    )
    done = start("script.py")
    own = "transformers.trainer_callback"
    assert done.stdout.splitlines() == [
        "onstep.events.callback onstep.events.callback",
        f"{own} {own} transformers.training_args",
    ]


def test_every_public_name_of_the_modules_is_exchanged_or_listed_as_kept() -> None:
    for module in {**NAMES, **KEPT}:
        names = set(NAMES.get(module, {})), set(KEPT.get(module, "").split())
        assert names[0].isdisjoint(names[1])
        assert names[0] | names[1] == public_names(module), module


def test_every_replacement_exists() -> None:
    for place in (place for names in NAMES.values() for place in names.values()):
        home, _, name = place.partition(":")
        assert hasattr(importlib.import_module(home), name)


def public_names(module: str) -> set[str]:
    """The names that a module of transformers defines, without importing it."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name(f"{module.rpartition('.')[2]}.py").read_text())
    defined = {each.name for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    defined |= {target.id for each in assigned for target in each.targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("_") and name != "logger"}


REAL = """
import transformers
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK, EvalPrediction, TrainerCallback
assert transformers.Trainer is Trainer and Trainer.__module__ == "onstep.trainer.trainer"
assert issubclass(Seq2SeqTrainer, Trainer) and issubclass(TensorBoardCallback, transformers.TrainerCallback)
assert TrainerCallback is transformers.trainer_callback.TrainerCallback
assert {EvalPrediction.__module__, DEFAULT_PROGRESS_CALLBACK.__module__} == {
    "onstep.trainer.predictions", "onstep.console.progress"
}
optimizer, _ = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(optim="adafactor"))
assert optimizer is transformers.Adafactor
"""


@pytest.mark.process
@pytest.mark.slow
def test_transformers_itself_gives_onsteps_names(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REAL)
    words = [sys.executable, "-m", "onstep.run", "script.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pickled_arguments_of_transformers_become_onsteps() -> None:
    """As `training_args.bin` has them, which is unpickled after the exchange."""
    own = TrainingArguments("out", learning_rate=1e-3, eval_strategy="epoch")
    assert pickle.loads(pickle.dumps(own)) == own
    theirs = importlib.import_module("transformers").TrainingArguments("out", learning_rate=1e-3, eval_strategy="epoch")
    restored = TrainingArguments.__new__(TrainingArguments)
    restored.__setstate__(vars(theirs))
    restored.check()
    mine, given = own.to_dict(), restored.to_dict()
    assert {name: given[name] for name in mine if given[name] != mine[name]} == {
        "disable_tqdm": theirs.disable_tqdm,
        "mixed_precision": "no",
    }
    assert restored.eval_strategy == "epoch"
    assert type(restored.eval_strategy) is str
