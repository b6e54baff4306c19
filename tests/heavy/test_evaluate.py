"""`onstep evaluate`: lm-eval's numbers for runs, checkpoints, directories and GGUF files, offline, kept in the run."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from onstep import Trainer, TrainingArguments, pretrain
from onstep.analysis.logs.task_results import FILE_NAME, evaluations_of_run
from onstep.cli.main import main
from onstep.config import ConfigContainer, apply_overrides
from tests.support.small_configs import small_pretrain_config

transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.tasks")

Capture = pytest.CaptureFixture[str]

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
  - metric: brier_score
metadata:
  version: 2.0
"""
BPE = ("tokenizer.tokenizer_type=bpe", "tokenizer.vocab_size=300")
GROUP = "group: both\ntask: [first, second]\naggregate_metric_list:\n  - metric: acc\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with two tasks and their data, without network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [{"question": f"def f{i}(x):", "choices": [" return", "x", " a: 1"], "answer": i % 3} for i in range(9)]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("own").mkdir()
    for name in ("first", "second"):
        Path(f"own/{name}.yaml").write_text(CHOICE.format(name=name))
    Path("own/both.yaml").write_text(GROUP)


def run(corpus: Path, cache: Path, *words: str) -> Path:
    """A run of four steps with a checkpoint at each second one."""
    config: ConfigContainer = small_pretrain_config(corpus, cache)
    config.run.name, config.run.output_dir = "mine", "runs"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 4, 2, 2
    config.checkpoint.save_interval, config.validation.eval_interval = 2, None
    apply_overrides(config, ["scheduler.lr_warmup_iters=0", "optimizer.lr=0.05", "logger.log_interval=1", *BPE, *words])
    pretrain(config)
    return Path("runs/mine")


def evaluated(capsys: Capture, *words: str) -> dict[str, dict[str, float]]:
    """The metrics by task that the command prints."""
    capsys.readouterr()
    assert main(["evaluate", *words, "--include-path", "own", "--device", "cpu", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    return {name: one["metrics"] for name, one in content["tasks"].items()}


def lm_evals(directory: str | Path, *words: str) -> dict[str, dict[str, float]]:
    """The metrics by task that the command `lm_eval --model hf` writes."""
    from lm_eval.__main__ import cli_evaluate

    arguments = ["--model", "hf", "--model_args", f"pretrained={directory}", "--include_path", "own", "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        without = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
        patch.setattr(lm_eval.tasks, "TaskManager", without)  # reading the files of all its own tasks takes seconds
        patch.setattr(sys, "argv", ["lm_eval", *arguments, "--output_path", "theirs.json", *words])
        cli_evaluate()
    [file] = Path().glob("theirs*.json")
    results = json.loads(file.read_text())["results"]
    file.unlink()
    return {
        name: {key.removesuffix(",none"): one for key, one in values.items() if key.endswith(",none") and one != "N/A"}
        for name, values in results.items()
    }


def test_the_numbers_are_those_of_lm_eval_on_the_exported_directory(
    corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    directory = run(corpus, token_cache)
    theirs = lm_evals(directory / "model", "--tasks", "first")
    assert evaluated(capsys, "mine", "--tasks", "first") == theirs
    assert main(["checkpoint", "export", "mine@2", "exported"]) == 0
    options = ("--tasks", "first,second", "--limit", "5")
    earlier = evaluated(capsys, "mine@2", *options)
    assert earlier == lm_evals("exported", *options) == evaluated(capsys, "exported", *options)
    assert earlier["first"] != theirs["first"]
    assert main(["checkpoint", "export", "mine", "mine.gguf"]) == 0
    assert evaluated(capsys, "mine.gguf", "--tasks", "first") == theirs

    found = evaluations_of_run(directory)
    assert [(one.step, one.weights, [*one.tasks]) for one in found] == [
        (4, "model", ["first"]),
        (2, "checkpoint-2", ["first", "second"]),
    ]
    assert dict(found[0].tasks["first"].metrics) == theirs["first"]
    assert main(["why", "mine"]) == main(["why", "mine", "--step", "2"]) == 0
    said = capsys.readouterr().out
    accuracy = f"acc {theirs['first']['acc']:.4f} \u00b1 {theirs['first']['acc_stderr']:.4f}"
    assert said.count("step 4: tasks evaluated of model") == 1
    assert said.count("step 2: tasks evaluated of checkpoint-2") == 2
    assert f"first: {accuracy}, acc_norm" in said
    assert "(5 questions, limited by 5, 0-shot, lm-eval 0." in said
    assert main(["logs", "report", "mine", "--output", "report.html"]) == 0
    page = Path("report.html").read_text()
    assert "<h2>Tasks</h2>" in page
    assert accuracy in page


def test_groups_patterns_and_files_are_evaluated_and_a_resume_keeps_the_results(
    corpus: Path, token_cache: Path, capsys: Capture
) -> None:
    directory = run(corpus, token_cache)
    assert {*evaluated(capsys, "mine", "--tasks", "both")} == {"both", "first", "second"}
    assert {*evaluated(capsys, "mine", "--tasks", "fir*")} == {"first"}
    assert {*evaluated(capsys, "mine", "--tasks", "own/second.yaml")} == {"second"}
    kept = (directory / FILE_NAME).read_text()
    assert main(["train", str(directory), "train.train_iters=6", "--on-config-change", "apply"]) == 0
    assert (directory / FILE_NAME).read_text() == kept
    assert len(evaluations_of_run(directory)) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it
def test_a_trainers_model_and_its_adapter_are_evaluated(corpus: Path, token_cache: Path, capsys: Capture) -> None:
    peft = pytest.importorskip("peft")
    source = run(corpus, token_cache) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    for name in ("whole", "adapter"):
        model = transformers.AutoModelForCausalLM.from_pretrained(source)
        if name == "adapter":
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False))
        arguments = TrainingArguments(f"runs/{name}", max_steps=2, save_steps=1, learning_rate=0.1, use_cpu=True)
        Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer).train()
        found = evaluated(capsys, f"{name}@2", "--tasks", "first")
        checkpoint = f"runs/{name}/checkpoint-2"
        assert found == lm_evals(checkpoint if name == "whole" else f"{source},peft={checkpoint}", "--tasks", "first")
        assert [one.step for one in evaluations_of_run(Path("runs", name))] == [2]


@pytest.mark.parametrize("form", ["function", "class", "metric", "mistyped", "template"])
def test_code_of_a_task_is_only_executed_if_it_is_trusted(
    corpus: Path, token_cache: Path, capsys: Capture, form: str
) -> None:
    run(corpus, token_cache)
    shell = "{{ cycler.__init__.__globals__.os.system('touch executed') }}"
    text, said = {
        "function": ("process_docs: !function code.same\n", "own executes the Python function code.same (!function)"),
        "class": ("class: !function code.Task\n", "own executes the Python function code.Task (!function)"),
        "metric": ("metric_list:\n  - metric: own/code.py\n", "the metric 'own/code.py' is none of lm-eval's"),
        "mistyped": ("metric_list:\n  - metric: acc_nrom\n", "if you want it to run. Did you mean 'acc_norm'?"),
        "template": (f'doc_to_text: "{shell}"\n', "cannot be loaded (SecurityError: "),
    }[form]
    Path("own/code.py").write_text("open('executed', 'w').close()\nclass Task: pass\ndef same(rows): return rows\n")
    Path("own/coded.yaml").write_text(f"include: first.yaml\ntask: coded\n{text}")
    words = ["evaluate", "mine", "--tasks", "coded", "--include-path", "own", "--device", "cpu"]
    assert main(words) == 1
    assert said in capsys.readouterr().err
    assert not Path("executed").exists()
    if form == "function":
        assert main([*words, "--trust-task-code"]) == 0
        assert Path("executed").exists()


BAD = (
    (("mine", "--tasks", "firts"), "there is no task 'firts' in lm-eval or below own. Did you mean 'first'?"),
    (("mine", "--tasks", "broken"), "the tasks broken cannot be loaded"),
    (
        ("mine", "--tasks", "damaged"),
        "the tasks own/damaged.yaml cannot be loaded (ParserError: while parsing a flow sequence in",
    ),
    (("mine", "--tasks", "unnamed"), "the tasks own/deep/unnamed.yaml cannot be loaded (ParserError: "),
    (("mine", "--tasks", ","), "no task is named"),
    (("mine", "--tasks", "first", "--include-path", "none"), "--include-path none is not a directory"),
    (("mine", "--tasks", "first", "--limit", "0"), "--limit must be > 0, got 0"),
    (("mine", "--tasks", "first", "--batch-size", "x"), "--batch-size must be an integer >= 1 or auto, got 'x'"),
    (("mime", "--tasks", "first"), "there is no run, checkpoint, Hugging Face directory or GGUF file 'mime'. Did"),
    (("bad.gguf", "--tasks", "first"), "bad.gguf is not a complete GGUF file"),
    (("own/first.yaml", "--tasks", "first"), "own/first.yaml is a file; name a run"),
    (("bare", "--tasks", "first"), "bare has no tokenizer"),
    (("mine@7", "--tasks", "first"), "no checkpoint of step 7"),
)


def test_bad_input_is_refused_in_one_line(
    corpus: Path, token_cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, token_cache)
    Path("own/broken.yaml").write_text(CHOICE.format(name="broken").replace("questions.jsonl", "absent.jsonl"))
    damaged = CHOICE.format(name="damaged").replace("dataset_path: json", "dataset_path: [")
    Path("own/damaged.yaml").write_text(damaged)
    Path("own/deep").mkdir()
    Path("own/deep/unnamed.yaml").write_text(damaged.replace("task: damaged", ""))
    Path("bad.gguf").write_bytes(b"GGUF")
    Path("bare").mkdir()
    Path("bare/config.json").write_text("{}")
    original = lm_eval.tasks.TaskManager  # without lm-eval's own tasks, whose files take seconds to read
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path, include_defaults: original(None, include_path, False)
    )
    for words, said in BAD:
        capsys.readouterr()
        assert main(["evaluate", *words, "--include-path", "own", "--device", "cpu"]) == 1, words
        [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
        assert said in line
    assert not Path("runs/mine", FILE_NAME).exists()
