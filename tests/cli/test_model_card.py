"""The model card of a run: in its final weights and in exports, made from run.json and the record."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from onstep import Trainer, TrainingArguments, pretrain
from onstep.analysis.logs.task_results import TaskResult, append_evaluation
from onstep.analysis.reports.model_card import card_of_run
from onstep.cli.main import main
from onstep.config import apply_overrides
from tests.support.small_configs import small_pretrain_config

hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def run(corpus: Path, token_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps, with results of tasks for its checkpoint of step 2 and for its final weights."""
    monkeypatch.chdir(tmp_path)
    config = small_pretrain_config(corpus, token_cache)
    config.run.name, config.run.output_dir = "mine", "runs"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 4, 2, 2
    apply_overrides(config, ["checkpoint.save_interval=2", "validation.eval_interval=2", "logger.log_interval=1"])
    pretrain(config)
    for step, value in ((2, 0.25), (4, 0.5)):
        result = TaskResult({"acc": value, "acc_stderr": 0.125}, 8, 0, 1.0, None, "0.4.13")
        append_evaluation(Path("runs/mine"), step, "model", {"facts": result})
    return Path("runs/mine")


def test_the_card_has_the_facts_of_the_run_and_the_hub_reads_it(run: Path) -> None:
    assert main(["checkpoint", "export", "mine", "published"]) == 0
    card = hub.ModelCard.load("published/README.md", ignore_metadata_errors=False)
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["onstep"]
    assert card.data.model_name == "published"
    found = [(one.dataset_type, one.metric_type, one.metric_value) for one in card.data.eval_results]
    assert found == [("facts", "acc", 0.5), ("facts", "acc_stderr", 0.125)]
    assert hub.metadata_load("published/README.md")["model-index"][0]["name"] == "published"
    again = hub.ModelCard(str(card), ignore_metadata_errors=False)  # as it would write the card
    assert again.data.to_dict() == card.data.to_dict()

    content = json.loads((run / "run.json").read_text())
    log = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    facts = [
        "Trained from scratch with Onstep.",
        f"- digest of data: {content['identity']['data']}",
        "- tokenizer: bytes-257",
        *(f"- {name}: {version}" for name, version in content["versions"].items()),
        "- optimizer.lr: 0.003",
        "- train.train_iters: 4",
        f"- train_loss: {next(one['train_loss'] for one in log if 'train_loss' in one):.6g}",
        *(f"| {one['eval_loss']:.6g} |" for one in log if "eval_loss" in one),
        "| facts | 0 | 8 | acc 0.5000 \u00b1 0.1250 | 0.4.13 |",
    ]
    for fact in facts:
        assert fact in card.text, fact
    assert "corpus" in card.text
    assert str(Path.cwd().parent) not in card.text  # paths are published by their names only
    assert "runs" not in card.text


def test_the_card_of_a_checkpoint_says_nothing_of_later_steps(run: Path) -> None:
    assert main(["checkpoint", "export", "mine@2", "earlier"]) == 0
    text = Path("earlier/README.md").read_text()
    assert "- step: 2" in text
    assert "acc 0.2500" in text
    assert "acc 0.5000" not in text
    assert "\n| 2 | " in text
    assert "\n| 4 | " not in text


def test_the_card_shows_no_way_to_the_data_and_takes_no_dataset_for_the_base(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    secret = "https://me:password@host/inner/part-{0..3}.jsonl.gz?signature=secret"
    content["config"]["dataset"]["paths"] = [secret, "inner/project/own.jsonl", "owner/texts"]
    content["hub_revisions"] = {"datasets/owner/texts": "a" * 40}
    (run / "run.json").write_text(json.dumps(content))
    text = card_of_run(run)
    assert "- files: part-{0..3}.jsonl.gz, own.jsonl, owner/texts\n" in text
    assert not [word for word in ("password", "secret", "inner", "base_model", "Fine-tuned") if word in text]
    content["hub_revisions"] |= {"owner/model": "b" * 40}
    (run / "run.json").write_text(json.dumps(content))
    text = card_of_run(run)
    assert "base_model: owner/model\n" in text
    assert f"Fine-tuned from `owner/model` (revision {'b' * 40}) with" in text
    data = text.partition("## Data")[2].partition("##")[0]
    assert ("- datasets/owner/texts: revision aaa" in data, "owner/model" in data) == (True, False)


def test_results_of_a_part_of_the_questions_are_not_in_the_head(run: Path) -> None:
    quick = TaskResult({"acc": 1.0}, 2, 0, 1.0, 2, "0.4.13")
    append_evaluation(run, 4, "model", {"facts": quick, "others": quick})
    card = hub.ModelCard(card_of_run(run, step=4), ignore_metadata_errors=False)
    assert {one.dataset_type: one.metric_value for one in card.data.eval_results if one.metric_type == "acc"} == {
        "facts": 0.5
    }
    full, parts = card.text.partition("## Tasks\n")[2].partition("## Settings")[0].split("## Tasks, a part")
    assert "| facts | 0 | 8 | acc 0.5000" in full
    assert "others" not in full
    assert "| others | 0 | 2 |" in parts
    assert "facts" not in parts


def test_results_of_weights_that_were_trained_again_are_not_claimed(run: Path) -> None:
    record = run / "record.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    again = [line | {"timestamp": time.time() + 60} if line["global_step"] >= 3 else line for line in lines]
    record.write_text("".join(f"{json.dumps(line)}\n" for line in again))
    assert "acc 0.2500" in card_of_run(run, step=2)
    assert "acc 0.5000" not in card_of_run(run, step=4)


def test_the_final_weights_have_a_card(run: Path) -> None:
    text = (run / "model/README.md").read_text()
    hub.ModelCard(text, ignore_metadata_errors=False)
    assert "- step: 4" in text
    assert "## Tasks" not in text  # they were evaluated later


def test_the_card_of_a_trainers_checkpoint_claims_nothing_that_the_script_knows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, num_key_value_heads=2, **sizes))
    arguments = TrainingArguments("out", max_steps=2, save_steps=1, logging_steps=1, learning_rate=0.01, use_cpu=True)
    Trainer(model, arguments, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 4).train()
    assert main(["checkpoint", "export", "out@1", "published"]) == 0
    text = hub.ModelCard.load("published/README.md", ignore_metadata_errors=False).text
    assert "Trained with Onstep." in text
    assert "- digest of train data: values-" in text
    assert "- optimizer.lr: 0.01" in text
    assert "- model." not in text
    assert "- kind: " not in text
