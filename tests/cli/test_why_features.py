"""`onstep why --features`: the table of features as a user reads it, with or without a configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onstep import CallbackManager, pretrain
from onstep.cli.main import main
from onstep.cli.why_features import PARTS, Row, feature_lines, wishes
from onstep.config import ConfigContainer, apply_overrides, resolve
from onstep.events import CallbackContext
from onstep.trainer.feature import TrainerFeature
from onstep.trainer.loop_methods import LoopMethods
from onstep.training.features import FEATURES, TRAINING
from tests.support.forked_processes import Processes
from tests.support.shell import Shell

NAMES = [kind.name for kinds, _ in PARTS.values() for kind in kinds]


def listed(lines: list[str]) -> dict[str, str]:
    """What stands behind the number of each feature, by its name."""
    rows = [match for line in lines if (match := re.match(r" +\d+  (?:(on|off|model) +)?(\w+)  ", line))]
    return {match[2]: match[1] or "" for match in rows}


def test_the_command_lists_every_feature_in_the_order_of_the_table(processes: Processes, tmp_path: Path) -> None:
    done = Shell(processes, tmp_path).onstep("why", "--features")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(listed(done.stdout.splitlines())) == NAMES
    assert set(listed(done.stdout.splitlines()).values()) == {""}
    assert "TRAINING: opened by train()" in done.stdout
    lines = done.stdout.splitlines()
    [place] = [number for number, line in enumerate(lines) if "  certificate  " in line]
    assert lines[place].endswith("  checkpoint.certify")
    assert lines[place + 1].strip() == "session, begin, after_count; state same on all ranks; collective"


def test_the_parts_are_the_whole_table() -> None:
    kinds = [kind for kinds, _ in PARTS.values() for kind in kinds]
    of_trainer = [TrainerFeature, LoopMethods]
    assert kinds == [*FEATURES[: kinds.index(TrainerFeature)], *of_trainer, *TRAINING]
    assert [kind for kind in kinds if kind not in of_trainer] == list(FEATURES)


def test_a_row_says_what_its_class_overrides() -> None:
    rows = {kind.name: Row.of(kind) for kind in FEATURES}
    gate = rows["anomalies"]
    assert (gate.wraps, gate.state, gate.is_collective) == (("compute",), "same on all ranks", True)
    assert {"admits", "settle", "before_rollback"} <= set(gate.hooks)
    assert "session" not in gate.hooks
    assert rows["memory_release"].wraps == ("score",)
    assert rows["device_sync"] == Row("device_sync", "train.train_sync_interval", ("after_iteration",), (), "", False)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.exit_signal_handler=false", "ft.watchdog_seconds=null"],
        ["train.manual_gc=true", "checkpoint.certify=true", "logger.timing_log_level=1", "env_vars={A_NAME: value}"],
        ["straggler.log_straggler=true", "train.empty_unused_memory_level=1", "logger.logging_level=30"],
        ["rerun_state_machine.rerun_mode=validate_results", "train.check_weight_hash_across_dp_replicas_interval=2"],
        ["model.log_max_attention_logit=true", "train.step_batch_size_schedule='0:4 8:8'", "train.global_batch_size=8"],
        ["model.num_moe_experts=2"],
    ],
)
def test_the_answers_are_those_of_a_run(words: list[str], tiny_config: ConfigContainer) -> None:
    built: list[str] = []
    manager = CallbackManager()

    def note(context: CallbackContext) -> None:
        built.extend(one.name for one in context.state.features.built)

    manager.register("on_train_start", note)
    tiny_config.train.train_iters, tiny_config.validation.eval_iters = 2, 0
    apply_overrides(tiny_config, ["scheduler.lr_warmup_iters=0", *words])
    answers = wishes(resolve(tiny_config))
    pretrain(tiny_config, callbacks=manager)
    assert list(answers) == NAMES
    for name, answer in answers.items():
        if name != "training_log":  # no callback of this run shows progress
            assert answer == "model" or (answer == "on") is (name in built), name
    assert sum(answer == "model" for answer in answers.values()) <= 5


def captured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert main(["why", "--features", *words]) == 0
    return listed(capsys.readouterr().out.splitlines())


def test_words_and_a_file_of_a_configuration_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {manual_gc: true}\n", encoding="utf-8")
    for words in (["train.manual_gc=true"], [str(file)]):
        answers = captured(capsys, *words)
        assert (answers["manual_gc"], answers["device_sync"], answers["experts"]) == ("on", "off", "model")
    assert captured(capsys, str(file), "train.manual_gc=false")["manual_gc"] == "off"


def test_a_run_is_answered_by_the_configuration_that_it_was_started_with(
    tiny_config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_config.run.name, tiny_config.train.manual_gc = "swept", True
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 1, 0
    pretrain(tiny_config)
    capsys.readouterr()
    assert captured(capsys, "swept") == captured(capsys, "runs/swept")
    assert captured(capsys, "swept")["manual_gc"] == "on"
    assert captured(capsys, "swept")["record"] == "on"
    assert captured(capsys, "run.name=null")["record"] == "off"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["why"], 2, "expected one run, got none"),
        (["why", "one", "two"], 2, "expected one run, got one two"),
        (["why", "--features", "--step", "3"], 2, "drop it, or drop --features"),
        (["why", "--features", "nowhere"], 1, "there is no run 'nowhere'"),
        (["why", "--features", "train.manual_cg=true"], 1, "manual_gc"),
        (["why", "--features", "broken"], 1, "broken has no run.json with a configuration"),
    ],
)
def test_what_cannot_be_answered_says_what_to_write(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.json").write_text("{}", encoding="utf-8")
    assert main(words) == code
    assert says in " ".join(capsys.readouterr().err.split())


def test_without_a_configuration_nothing_is_answered() -> None:
    assert set(listed(list(feature_lines())).values()) == {""}


def waits(*words: str) -> dict[str, str]:
    """The answers about waits, by the first words of each."""
    config = ConfigContainer()
    apply_overrides(config, list(words))
    lines = list(feature_lines(config))
    [first] = [number for number, line in enumerate(lines, 1) if line.startswith("WAITS: ")]
    rows = [line.split() for line in lines[first::2]]
    return {" ".join(row[1:4]): row[0] for row in rows}


def test_it_lists_what_the_host_waits_for() -> None:
    asked = waits()
    assert [key for key, answer in asked.items() if answer == "on"] == []
    assert [key for key, answer in asked.items() if answer == "script"] == [
        "an optimizer of",
        "an optimizer that",
        "a model of",
    ]
    for word, key in [
        ("train.on_nonfinite=skip", "train.on_nonfinite"),
        ("anomaly.on_spike=skip", "train.on_nonfinite"),
        ("optimizer.grad_norm_skip_threshold=5", "optimizer.grad_norm_skip_threshold"),
        ("mixed_precision=fp16_mixed", "mixed_precision"),
        ("rerun_state_machine.rerun_mode=validate_results", "rerun_state_machine"),
        ("logger.timing_log_level=1", "logger.timing_log_level"),
        ("train.train_sync_interval=5", "train.train_sync_interval"),
    ]:
        [only] = [one for one, answer in waits(word).items() if answer == "on"]
        assert only.startswith(key)
    assert waits("model.num_moe_experts=4")["experts in float32"] == "model"
    assert waits("model.num_moe_experts=4", "mixed_precision=bf16_mixed")["experts in float32"] == "off"
    assert "on" not in waits("optimizer.grad_norm_skip_threshold=.inf").values()
