"""Which classes of a script derive from exchanged ones, however they are imported, and which methods they override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from onstep.explain.explaining import Explanation, explain_script

Explain = Callable[..., Explanation]


@pytest.fixture
def explain(tmp_path: Path) -> Explain:
    """Explains a script, beside which are other files."""

    def explained(script: str, files: Mapping[str, str] = {}) -> Explanation:
        for name, text in {"script.py": script, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return explain_script(tmp_path / "script.py")

    return explained


def overrides_of(explanation: Explanation) -> dict[str, str]:
    return {f"{row.owner.removeprefix('__main__.')}.{row.name}": row.outcome for row in explanation.overrides}


COMPUTE_LOSS = "def compute_loss(self, model, inputs): return super().compute_loss(model, inputs)"


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("import transformers as t", "t.Trainer"),
        ("import transformers", "transformers.trainer.Trainer"),
        ("from transformers import Trainer as T", "T"),
        ("from transformers.trainer_seq2seq import Seq2SeqTrainer", "Seq2SeqTrainer"),
        ("try:\n    from transformers import Trainer\nexcept ImportError:\n    Trainer = object", "Trainer"),
        ("if True:\n    from missing import Trainer\nelse:\n    from transformers import Trainer", "Trainer"),
        ("import transformers\nBase = transformers.Trainer", "Base"),
        ("from transformers import Trainer\nfrom typing import Generic", "Trainer, Generic[int]"),
        ("from transformers.trainer import *", "Trainer"),
    ],
)
def test_a_trainer_is_found_however_it_is_imported(explain: Explain, imports: str, base: str) -> None:
    found = explain(f"{imports}\nclass Mine({base}):\n    {COMPUTE_LOSS}\n")
    assert overrides_of(found) == {"Mine.compute_loss": "honoured"}


def test_a_class_that_is_no_trainer_is_left_out(explain: Explain) -> None:
    other = "class Trainer:\n    def compute_loss(self): ...\n"
    found = explain(f"{other}class Mine(Trainer):\n    {COMPUTE_LOSS}\nfrom torch import nn\nclass M(nn.Module): ...")
    assert found.classes == found.overrides == []


def test_methods_are_honoured_refused_or_never_called_and_ones_own_are_no_overrides(explain: Explain) -> None:
    found = explain(
        "from transformers import Trainer\n"
        "class Mine(Trainer):\n"
        "    def __init__(self, *args): super().__init__(*args)\n"
        "    def training_step(self, model, inputs): ...\n"
        "    def _run_epoch(self): ...\n"
        "    def _tune_save_checkpoint(self, checkpoint_dir): ...\n"
        "    async def evaluate(self): ...\n"
        "    def my_own(self): ...\n"
        "    if True:\n"
        "        def log(self, logs): ...\n"
    )
    assert overrides_of(found) == {
        "Mine.training_step": "honoured",
        "Mine._run_epoch": "refused",
        "Mine._tune_save_checkpoint": "never",
        "Mine.evaluate": "honoured",
        "Mine.log": "honoured",
    }
    rows = {row.name: row for row in found.overrides}
    assert rows["_run_epoch"].when
    assert "training_step" in rows["_run_epoch"].instead
    assert rows["_run_epoch"].line == 5


def test_a_mixin_counts_once_with_the_class_that_uses_it(explain: Explain) -> None:
    found = explain(
        "from transformers import Trainer\n"
        "class Loading:\n    def _load_rng_state(self, checkpoint): ...\n"
        "class First(Loading, Trainer): ...\n"
        "class Second(Loading, Trainer): ...\n"
    )
    assert [one.name for one in found.classes] == ["__main__.Loading", "__main__.First", "__main__.Second"]
    assert [row.name for row in found.overrides] == ["_load_rng_state"]


def test_functions_assigned_to_an_object_or_a_class_are_overrides(explain: Explain) -> None:
    found = explain(
        "import transformers\n"
        "from transformers import Trainer, TrainingArguments\n"
        "def no_clipping(*args): ...\n"
        "Trainer._run_epoch = no_clipping\n"
        "setattr(transformers.Trainer, 'create_scheduler', no_clipping)\n"
        "transformers.trainer.get_model_param_count = no_clipping\n"
        "def main():\n"
        "    trainer = Trainer(args=TrainingArguments('out'))\n"
        "    trainer.create_optimizer = no_clipping\n"
        "class Mine(Trainer):\n"
        "    def __init__(self):\n"
        "        self._save = no_clipping\n"
    )
    assert overrides_of(found) == {"__main__.create_optimizer": "honoured", "Mine._save": "honoured"}
    assert [(row.name, row.outcome) for row in found.assigned] == [
        ("Trainer._run_epoch", "refused"),
        ("Trainer.create_scheduler", "honoured"),
        ("transformers.trainer.get_model_param_count", "never"),
    ]


def test_a_parameter_named_trainer_is_the_class_and_sources_that_are_edited_are_listed(explain: Explain) -> None:
    found = explain(
        "import inspect\nimport patches\nfrom transformers import Trainer\n"
        "text = inspect.getsource(Trainer.evaluation_loop)\n"
        "Trainer.my_own = 1\n",
        {"patches.py": "def patch(Trainer):\n    Trainer.__init__ = Trainer.compute_loss = lambda self: None\n"},
    )
    assert [(row.name, row.verb, row.outcome) for row in found.assigned] == [
        ("Trainer.evaluation_loop", "source", "never"),
        ("Trainer.__init__", "assign", "honoured"),
        ("Trainer.compute_loss", "assign", "honoured"),
    ]


def test_a_data_collator_is_listed_and_remains_that_of_transformers(explain: Explain) -> None:
    found = explain(
        "from transformers import DataCollatorWithPadding\n"
        "class Pad(DataCollatorWithPadding):\n    def __call__(self, features): ...\n"
    )
    assert [(one.name, one.kind) for one in found.classes] == [("__main__.Pad", "collator")]
    assert found.overrides == []


def test_a_callback_and_arguments_are_classes_of_a_trainer_too(explain: Explain) -> None:
    found = explain(
        "from dataclasses import dataclass\n"
        "from transformers import TrainerCallback, TrainingArguments\n"
        "class Stop(TrainerCallback):\n"
        "    def on_step_end(self, args, state, control, **kwargs): ...\n"
        "    def on_my_event(self): ...\n"
        "@dataclass\n"
        "class Mine(TrainingArguments):\n"
        "    learning_rate: float = 1.0\n"
        "    margin: float = 0.5\n"
        "    def __post_init__(self): super().__post_init__()\n"
    )
    assert overrides_of(found) == {"Stop.on_step_end": "honoured", "Mine.__post_init__": "honoured"}
    assert [one.kind for one in found.classes] == ["callback", "args"]
    assert [row.name for row in found.attributes if row.verb == "set"] == ["args.learning_rate"]


RELATIVE = {
    "library/__init__.py": "from .trainers import *\nfrom .trainers.first import Helper",
    "library/trainers/__init__.py": "from .first import FirstTrainer\n__all__ = ['FirstTrainer']",
    "library/trainers/first.py": "from ..base import Base\nclass Helper: ...\n"
    "class FirstTrainer(Base):\n    def evaluate(self): ...\n",
    "library/base.py": f"from transformers import Trainer\nclass Base(Trainer):\n    {COMPUTE_LOSS}\n",
    "library/unused.py": "from transformers import Trainer\nclass Unused(Trainer):\n    def log(self): ...\n",
}
LAZY = {
    **RELATIVE,
    "library/__init__.py": "from typing import TYPE_CHECKING\n"
    "from transformers.utils import _LazyModule\n"
    "_import_structure = {'trainers': ['FirstTrainer']}\n"
    "_import_structure['unused'] = ['Unused']\n"
    "if TYPE_CHECKING:\n    from .trainers import FirstTrainer\n    from .unused import Unused\n"
    "else:\n    import sys\n"
    "    sys.modules[__name__] = _LazyModule(__name__, __file__, _import_structure)\n",
}
LAZY_WITHOUT_TYPES = {
    **RELATIVE,
    "library/__init__.py": "import importlib\n"
    "_HOMES = {'FirstTrainer': 'library.trainers.first', 'Unused': '.unused'}\n"
    "def __getattr__(name): return getattr(importlib.import_module(_HOMES[name]), name)\n",
}


@pytest.mark.parametrize("files", [RELATIVE, LAZY, LAZY_WITHOUT_TYPES])
def test_the_classes_of_imported_libraries_are_found(explain: Explain, files: Mapping[str, str]) -> None:
    script = "from library import FirstTrainer\nclass Mine(FirstTrainer):\n    def _save(self): ...\n"
    assert overrides_of(explain(script, files)) == {
        "Mine._save": "honoured",
        "library.trainers.first.FirstTrainer.evaluate": "honoured",
        "library.base.Base.compute_loss": "honoured",
    }


def test_bases_that_are_not_found_are_named(explain: Explain) -> None:
    found = explain("from transformers import Trainer\nfrom nowhere import Mixin\nclass Mine(Mixin, Trainer): ...")
    assert found.not_found == ["nowhere.Mixin"]


def test_imports_in_a_circle_end(explain: Explain) -> None:
    files = {"one.py": "from two import Trainer", "two.py": "from one import Trainer"}
    assert explain("from one import Trainer\nclass Mine(Trainer): ...", files).classes == []
