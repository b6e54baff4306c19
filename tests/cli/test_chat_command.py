"""`onstep chat` in a terminal or a pipe: turns, commands, and conversations longer than the context."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from onstep.cli.generation.chat import PlainTalk, TemplateTalk, converse
from onstep.cli.generation.trained import open_trained
from onstep.cli.main import main
from onstep.data import ByteTokenizer, PlainTemplate, template_for
from tests.support.chat_directory import chat_directory

TINY = [
    "train.train_iters=1",
    "scheduler.lr_warmup_iters=0",
    "train.global_batch_size=2",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.seq_length=64",
    "dataset.seq_length=64",
    "dataset.cache_dir=cache",
    "validation.eval_interval=null",
    "validation.eval_on_start=false",
    "checkpoint.save_interval=null",
    "dist.device=cpu",
    "run.name=mine",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_conversation_has_turns_until_it_is_quit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_directory(Path("theirs"))
    type_lines(monkeypatch, "row your boat", "", "/what", "and again", "/quit", "never read")
    assert main(["chat", "theirs", "--max-new-tokens=5", "--seed=1", "--system=Be short."]) == 0
    said = capsys.readouterr().out
    assert said.startswith("/reset forgets the conversation, /quit (or the end of the input) ends it.\n")
    assert "there is no command /what" in said
    assert "never read" not in said
    assert "has no chat template" not in said
    assert len(said.splitlines()) >= 4  # the commands, the two answers, the unknown command


def test_an_answer_depends_on_what_was_said_and_a_reset_forgets_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_directory(Path("theirs"))

    def last_answer(*lines: str) -> str:
        type_lines(monkeypatch, *lines)
        assert main(["chat", "theirs", "--max-new-tokens=4", "--temperature=0"]) == 0
        return capsys.readouterr().out.split("ends it.\n")[1].removesuffix("\n")

    alone = last_answer("row")
    assert last_answer("boat, boat", "/reset", "row").endswith(alone)
    assert not last_answer("boat, boat", "row").endswith(alone)


def test_a_model_without_a_template_says_so_and_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.txt").write_text("row, row, row your boat\n" * 100)
    assert main(["train", "--recipe", "tiny_gpt", "dataset.paths=[a.txt]", *TINY]) == 0
    capsys.readouterr()
    type_lines(monkeypatch, "row", "boat")
    assert main(["chat", "mine", "--max-new-tokens=100", "--seed=1", "--system=Hi"]) == 0
    said = capsys.readouterr()
    assert "runs/mine has no chat template: it continues your text instead of answering." in said.out
    assert "--system has no effect without a chat template" in said.err


def test_a_run_that_was_trained_on_conversations_has_their_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n'
    Path("chat.jsonl").write_text(turn * 40)
    words = ["dataset.kind=chat", "dataset.paths=[chat.jsonl]"]
    assert main(["train", "--recipe", "tiny_gpt", *words, *TINY]) == 0
    capsys.readouterr()
    type_lines(monkeypatch, "2+2?")
    assert main(["chat", "mine", "--max-new-tokens=3"]) == 0
    assert "has no chat template" not in capsys.readouterr().out


def test_turns_that_do_not_fit_are_left_out_from_the_oldest() -> None:
    tokenizer = ByteTokenizer()
    talk = TemplateTalk(PlainTemplate(tokenizer), length=100, system="Be short.")
    asked = ""
    for number in range(6):
        asked = tokenizer.decode(talk.ask(f"question {number}"))
        talk.hear(f"answer {number}")
    assert asked.startswith("<|system|>\nBe short.\n<|user|>\nquestion ")
    assert asked.endswith("<|user|>\nquestion 5\n<|assistant|>\n")
    assert "question 0" not in asked
    assert len(asked) <= 75
    assert "question 7" in tokenizer.decode(talk.ask("question 7" * 50))  # the window of the model cuts it


def test_what_a_template_refuses_is_not_part_of_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}"
    template += "{{ m.content }}<|im_end|>{% endfor %}"
    chat_directory(Path("theirs"), template)
    talk = TemplateTalk(template_for(open_trained("theirs").tokenizer), length=64)
    lines = iter(["bad words", "good words"])
    answered: list[list[int]] = []

    def answer(ids: list[int], number: int) -> io.StringIO:
        answered.append(ids)
        return io.StringIO("fine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda prompt: next(lines, "/quit"))
        converse(talk, answer, is_terminal=False)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "error: the conversation: the tokenizer's chat template rejects the messages: no" in said
    assert said.endswith("fine\n")
    assert len(answered) == 1


def test_a_text_that_is_continued_has_everything_so_far() -> None:
    talk = PlainTalk(lambda text: list(text.encode()))
    talk.ask("row, ")
    talk.hear("row")
    assert bytes(talk.ask("your")) == b"row, row\nyour"
    talk.reset()
    assert bytes(talk.ask("boat")) == b"boat"


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "nothing"]) == 1
    assert "there is no run 'nothing'" in capsys.readouterr().err
