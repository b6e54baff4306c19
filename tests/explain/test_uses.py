"""Which attributes of a Trainer and what belongs to it a script reads or sets, and whether Onstep has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.explain.explaining import Explanation, explain_script


def explained(directory: Path, script: str) -> Explanation:
    (directory / "script.py").write_text(script)
    return explain_script(directory / "script.py")


def uses(explanation: Explanation) -> set[tuple[str, str, str]]:
    return {(row.verb, row.name, row.outcome) for row in explanation.attributes}


def test_attributes_of_the_trainer_and_of_what_it_leads_to(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        "from transformers import Trainer\n"
        "class Mine(Trainer):\n"
        "    def training_step(self, model, inputs):\n"
        "        self.mine = self.state.global_step + self.args.train_batch_size\n"
        "        args, accelerator = self.args, self.accelerator\n"
        "        accelerator.backward(args.my_own * self.mine + self.other)\n"
        "        self.label_names = ['labels']\n"
        "        return getattr(self.control, 'should_save'), hasattr(self.args, 'seed')\n",
    )
    assert {(verb, name) for verb, name, _ in uses(found)} == {
        ("read", "trainer.state"),
        ("read", "state.global_step"),
        ("read", "trainer.args"),
        ("read", "args.train_batch_size"),
        ("read", "trainer.accelerator"),
        ("read", "accelerator.backward"),
        ("set", "trainer.label_names"),
        ("read", "trainer.control"),
        ("read", "control.should_save"),
        ("ask", "args.seed"),
    }


def test_what_a_class_defines_itself_is_not_asked_of_onstep(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        "from transformers import Trainer\n"
        "class Base(Trainer):\n"
        "    def _nested_gather(self, tensors): ...\n"
        "    def compute_loss(self, *args): return self._nested_gather(args)\n"
        "class Mine(Base):\n"
        "    def evaluate(self): return self.compute_loss()\n"
        "    def log(self, logs): return super().log(logs)\n",
    )
    assert uses(found) == {("super", "trainer.log", "honoured")}


def test_variables_have_the_kind_of_their_annotation_constructor_or_parser(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "class Data: ...\n"
        "def by_annotation(args: 'TrainingArguments | None'): return args.seed\n"
        "def by_name(training_args): return training_args.bf16\n"
        "def hidden(trainer): return trainer.model\n"
        "def main():\n"
        "    parser = HfArgumentParser((Data, TrainingArguments))\n"
        "    data, given = parser.parse_args_into_dataclasses()\n"
        "    trainer = Trainer(args=given)\n"
        "    trainer.train(resume_from_checkpoint=given.resume_from_checkpoint)\n"
        "    return data.fp16\n",
    )
    assert {(verb, name) for verb, name, _ in uses(found)} == {
        ("read", "args.seed"),
        ("read", "args.bf16"),
        ("pass", "trainer.args"),
        ("read", "trainer.train"),
        ("read", "args.resume_from_checkpoint"),
    }


def test_a_callback_uses_what_its_events_pass_in_any_names(tmp_path: Path) -> None:
    found = explained(
        tmp_path,
        "from transformers import TrainerCallback\n"
        "class Mine(TrainerCallback):\n"
        "    def on_step_end(self, a, s, c, **kwargs):\n"
        "        c.should_save = a.save_steps < s.global_step\n",
    )
    assert uses(found) == {
        ("set", "control.should_save", "honoured"),
        ("read", "args.save_steps", "honoured"),
        ("read", "state.global_step", "honoured"),
    }


@pytest.mark.parametrize("name", ["global_step", "epoch"])
def test_what_a_run_counts_itself_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    found = explained(
        tmp_path,
        "from transformers import TrainerCallback\n"
        "class Mine(TrainerCallback):\n"
        f"    def on_step_end(self, args, state, control, **kwargs): state.{name} = 1\n",
    )
    (row,) = found.attributes
    assert (row.outcome, row.when) == ("refused", "during a run")
    assert f"state.my_{name}" in row.instead


def test_the_script_is_not_run_and_torch_not_imported(tmp_path: Path) -> None:
    found = explained(tmp_path, "from transformers import Trainer\nraise SystemExit('run')\nclass Mine(Trainer): ...")
    assert [one.name for one in found.classes] == ["__main__.Mine"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("self.accelerator.save_state()", "a callback can set control.should_save"),
        ("self.accelerator.state.distributed_type = 'NO'", "configure with TrainingArguments"),
        ("self.accelerator.gradient_state.remainder", "trainer.state"),
        ("self.args.hf_deepspeed_config", "there is no DeepSpeed"),
        ("self._memory_tracker", "skip_memory_metrics=False"),
    ],
)
def test_what_onstep_does_not_have_is_refused_with_a_remedy(tmp_path: Path, code: str, remedy: str) -> None:
    found = explained(
        tmp_path, f"from transformers import Trainer\nclass Mine(Trainer):\n    def mine(self):\n        {code}\n"
    )
    (row,) = [row for row in found.attributes if row.outcome != "honoured"]
    assert row.outcome == "refused"
    assert remedy in row.instead
