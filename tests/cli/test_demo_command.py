"""`onstep demo` trains, shows what it learned, and goes on where it was."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from onstep.analysis.logs.samples_log import newest_by_step, read_samples
from onstep.cli.demo.ending import next_commands, sample_lines
from onstep.cli.demo.held_out import held_out_loss
from onstep.cli.generation.trained import open_trained
from onstep.cli.main import main
from onstep.cli.train_ending import try_it

SMALL = [
    "train.train_iters=4",
    "train.global_batch_size=2",
    "scheduler.lr_warmup_iters=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.seq_length=16",
    "dataset.seq_length=16",
    "dataset.paths=[a.py]",
    "dataset.cache_dir=cache",
    "tokenizer.vocab_size=270",
    "validation.eval_interval=2",
    "validation.eval_iters=1",
    "logger.log_interval=1",
    "dist.device=cpu",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("a.py").write_text("def row(boat):\n    return boat\n" * 60)


def demo(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["demo", *SMALL, *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_the_demo_shows_samples_side_by_side_the_loss_per_byte_and_what_to_try(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = demo(capsys)
    heads = re.findall(r"^step 0 +│ step 2 +│ step 4$", said, re.MULTILINE)
    assert len(heads) == 1
    assert len(re.findall(r"^    def read\(self.*│     def read\(self.*│     def read\(self", said, re.MULTILINE)) == 1
    found = re.search(r"On held-out text: ([\d.]+) nats per byte \(([\d.]+) per token of ([\d.]+) bytes", said)
    assert found is not None
    assert float(found[1]) == pytest.approx(float(found[2]) / float(found[3]), rel=0.05)
    assert 'onstep generate demo "import"' in said
    assert "Training loss" not in said  # no curve for a pipe
    assert all(len(line) <= 80 for line in said[said.index("What it writes") :].splitlines()[:20])
    samples = newest_by_step(read_samples(Path("runs/demo/text_samples.jsonl")))
    assert [*samples] == [0, 2, 4]
    assert {len(texts) for texts in samples.values()} == {2}


def test_a_finished_demo_says_so_and_shows_its_end_again(capsys: pytest.CaptureFixture[str]) -> None:
    first = demo(capsys)
    log = Path("runs/demo/trainer_logs.json").read_bytes()
    again = demo(capsys)
    start = "What it writes"
    assert again[again.index(start) :] == first[first.index(start) :]
    assert "runs/demo is finished" in again
    assert Path("runs/demo/trainer_logs.json").read_bytes() == log


def test_an_interrupted_demo_continues(capsys: pytest.CaptureFixture[str]) -> None:
    demo(capsys, "train.exit_interval=3")
    assert json.loads(Path("runs/demo/run.json").read_text())["step"] == 3
    assert re.search("step 0 +│ step 2 +│ step 4", demo(capsys, "train.exit_interval=100"))
    assert json.loads(Path("runs/demo/run.json").read_text())["status"] == "completed"


def test_the_loss_per_byte_is_that_of_the_whole_split_unless_limited(capsys: pytest.CaptureFixture[str]) -> None:
    demo(capsys)
    trained = open_trained("demo")
    whole, part = held_out_loss(trained), held_out_loss(trained, 1)
    assert whole is not None
    assert part is not None
    assert part.num_tokens == 16 < whole.num_tokens
    assert 0.03 * Path("a.py").stat().st_size < whole.num_bytes < 0.06 * Path("a.py").stat().st_size  # 5%
    assert whole.nats_per_byte == pytest.approx(part.nats / part.num_bytes, rel=0.2)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_samples_have_the_width_of_the_terminal_and_control_characters_do_not_reach_it(width: int) -> None:
    text = "\x1b[2J" + "é\t\n" + "long " * 40
    samples = {step: {"def": f"{text}{step}", "class": "A:"} for step in (0, 5, 10, 15, 20)}
    lines = sample_lines(samples, width)
    assert all(len(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "\t" not in "".join(lines)
    assert any(re.fullmatch(r"step 0 +│ step 10 +│ step 20", line) for line in lines)
    assert len(lines) <= 1 + 2 + 5 * len(samples[0]), "the end of the demo fits on a screen"
    assert sample_lines(samples, 40) == []


def test_samples_of_a_single_step_are_not_compared() -> None:
    assert sample_lines({0: {"def": "x"}}, 80) == []
    assert sample_lines({}, 80) == []
    two = sample_lines({0: {"def": "x"}, 9: {"def": "y", "new": "z"}}, 80)
    assert sum("│" in line for line in two) == 2
    assert "new" not in "".join(two)


@pytest.mark.parametrize("name", ["demo", "a b'ü$(x)*", "/somewhere/my runs/demo"])
def test_a_shell_reads_the_name_of_the_run_in_the_next_commands(name: str) -> None:
    commands = [shlex.split(line, comments=True) for line in next_commands(name)]
    assert all(name in words for words in commands if words[:2] != ["onstep", "train"])
    assert shlex.split(try_it(Path(name), "text")) == ["onstep", "generate", name, "def "]


def test_a_run_on_conversations_is_talked_with() -> None:
    assert try_it(Path("runs/mine"), "chat") == "onstep chat runs/mine"


def test_the_next_commands_fit_a_terminal() -> None:
    assert all(len(line) <= 78 for line in next_commands("demo"))
