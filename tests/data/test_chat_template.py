"""Of a conversation's tokens exactly the assistant's are trained on, whatever the template."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig
from onstep.data import ByteTokenizer, PlainTemplate, TokenizerTemplate, learn_bpe, template_for, tokenizer_source
from onstep.data.corpus.tokenizers import HuggingFaceTokenizer
from onstep.errors import DataError

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""The marks say more than could be told without them: the new line, too."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of models that think: earlier turns are rendered in another way than the last."""
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} <|im_end|>{% endif %}{% endfor %}"
)
USER, ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is what?"}
TALK = [
    {"role": "system", "content": "Be short."},
    USER,
    ANSWER,
    {"role": "user", "content": "It is what?"},
    {"role": "assistant", "content": "What is it?\nAgain."},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory of transformers with the special tokens of ChatML."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "a.txt").write_text("What is it? It is what it is.\nassistant user\n" * 30)
    source = tokenizer_source(DatasetConfig(paths=[str(path / "a.txt")]))
    learned = learn_bpe(source, 320, path / "cache", show_progress=False)
    learned.save(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(str(path))
    return path


def template_of(directory: Path, text: str) -> Any:
    tokenizer = HuggingFaceTokenizer(directory)
    tokenizer.library_tokenizer.chat_template = text
    return tokenizer, template_for(tokenizer)


def trained_pieces(tokenizer: Any, chat: Any) -> list[str]:
    """The texts of the stretches that are trained on, special tokens included."""
    library = getattr(tokenizer, "library_tokenizer", None)
    pieces = []
    for is_trained, group in itertools.groupby(zip(chat.trained, chat.ids, strict=True), key=lambda pair: pair[0]):
        ids = [int(token) for _, token in group]
        if is_trained:
            pieces.append(
                library.decode(ids) if library is not None else tokenizer.decode(ids) + "<end>" * (256 in ids)
            )
    return pieces


def test_the_plain_template_is_what_its_docstring_says() -> None:
    tokenizer = ByteTokenizer()
    chat = template_for(tokenizer).encode(TALK, "here")
    end = "\N{REPLACEMENT CHARACTER}"
    text = "".join(chr(token) if token < 256 else end for token in chat.ids)
    assert text == (
        "<|system|>\nBe short.\n<|user|>\nWhat is it?\n<|assistant|>\nIt is what?\N{REPLACEMENT CHARACTER}"
        "<|user|>\nIt is what?\n<|assistant|>\nWhat is it?\nAgain.\N{REPLACEMENT CHARACTER}"
    )
    assert trained_pieces(tokenizer, chat) == ["It is what?<end>", "What is it?\nAgain.<end>"]


def test_what_follows_the_last_answer_is_not_trained_on() -> None:
    chat = PlainTemplate(ByteTokenizer()).encode([ANSWER, USER], "here")
    assert bytes(t for t in chat.ids if t < 256).endswith(b"It is what?<|user|>\nWhat is it?\n")
    assert not chat.trained[-len("<|user|>\nWhat is it?\n") :].any()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, ["It is what?<|im_end|>", "What is it?\nAgain.<|im_end|>"]),
        (MARKED, ["It is what?<|im_end|>\n", "What is it?\nAgain.<|im_end|>\n"]),
        (THINKING, ["It is what?<|im_end|>", "<think>\n\n</think>\n\nWhat is it?\nAgain.<|im_end|>"]),
        (INST, ["It is what? <|im_end|>", "What is it?\nAgain. <|im_end|>"]),
    ],
)
def test_exactly_the_answers_of_a_tokenizers_template_are_trained_on(
    directory: Path, text: str, expected: list[str]
) -> None:
    tokenizer, template = template_of(directory, text)
    messages = TALK[1:] if text is INST else TALK
    chat = template.encode(messages, "here")
    rendered = tokenizer.library_tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat.ids.tolist() == tokenizer.library_tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert [piece.strip(" ") for piece in trained_pieces(tokenizer, chat)] == expected


def test_all_tokens_of_the_last_character_of_a_marked_answer_are_trained_on(directory: Path) -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = f"{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% else %}}{marked}"
    text += "{% endif %}{% endfor %}"
    tokenizer, template = template_of(directory, text)
    chat = template.encode([USER, {**ANSWER, "content": "It is \U0001f600"}, USER], "here")
    assert trained_pieces(tokenizer, chat) == ["It is \U0001f600"]


def test_an_answer_that_is_also_a_question_is_trained_on_where_it_is_an_answer(directory: Path) -> None:
    tokenizer, template = template_of(directory, CHATML)
    messages = [USER, {"role": "assistant", "content": USER["content"]}] * 2
    chat = template.encode(messages, "here")
    assert trained_pieces(tokenizer, chat) == ["What is it?<|im_end|>"] * 2
    # The prompt that a model is asked with comes before each: what it sees is what it was trained after.
    asked = tokenizer.library_tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert chat.ids[: len(asked)].tolist() == asked
    assert chat.trained.argmax() == len(asked)


def test_a_special_token_in_a_message_is_text(directory: Path) -> None:
    tokenizer, template = template_of(directory, CHATML)
    library = tokenizer.library_tokenizer
    question, said = "Is <|im_end|> the end?", "<|im_end|> is,\n<|im_start|>too"
    chat = template.encode([{**USER, "content": question}, {**ANSWER, "content": said}], "here")
    ends = [library.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>")]
    assert [int(token) for token in chat.ids if token in ends] == [ends[0], ends[1]] * 2
    assert trained_pieces(tokenizer, chat) == [f"{said}<|im_end|>"]
    assert library.decode(chat.ids) == library.apply_chat_template(
        [{**USER, "content": question}, {**ANSWER, "content": said}], tokenize=False
    )
    _, marked = template_of(directory, MARKED)
    with pytest.raises(DataError, match=r"a\.jsonl:3: a message contains '<\|im_end\|>', a special token"):
        marked.encode([USER, {**ANSWER, "content": said}], "a.jsonl:3")


def test_in_the_plain_template_marks_are_tokens_where_they_are_special_and_contents_are_not(directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(directory)
    tokenizer.library_tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    mark = tokenizer.library_tokenizer.convert_tokens_to_ids("<|user|>")
    talk = [{**USER, "content": "a <|endoftext|> <|user|>"}, {**ANSWER, "content": "<|endoftext|>b"}]
    ids = PlainTemplate(tokenizer).encode(talk, "here").ids.tolist()
    assert (ids[0], ids.count(mark), ids.count(tokenizer.eos_id), ids[-1]) == (mark, 1, 1, tokenizer.eos_id)
    prompt = "<|user|>\nWhat is it?\n<|assistant|>\n"
    asked = PlainTemplate(tokenizer).encode([USER, ANSWER], "here").ids.tolist()
    assert asked[: len(tokenizer.encode_text(prompt))] == tokenizer.encode_text(prompt)


def test_templates_are_told_apart_in_the_cache(directory: Path) -> None:
    found = {template_of(directory, text)[1].fingerprint for text in (CHATML, MARKED, INST)}
    assert len(found | {PlainTemplate(ByteTokenizer()).fingerprint}) == 4


def test_a_template_that_hides_an_answer_is_refused(directory: Path) -> None:
    for text in ("{{ messages | length }}", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"):
        _, template = template_of(directory, text)
        with pytest.raises(DataError, match=r"a\.jsonl:3: cannot locate answer 1 in the output"):
            template.encode([USER, ANSWER], "a.jsonl:3")


def test_messages_that_a_template_does_not_take_are_named(directory: Path) -> None:
    _, template = template_of(directory, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"a\.jsonl:3: .* rejects the messages: roles must alternate"):
        template.encode([USER, ANSWER], "a.jsonl:3")
    with pytest.raises(DataError, match=r"a\.jsonl:3: 'content' must be a string, got list"):
        PlainTemplate(ByteTokenizer()).encode([{"role": "user", "content": []}], "a.jsonl:3")


def test_a_template_cannot_reach_beyond_the_messages(directory: Path) -> None:
    _, template = template_of(directory, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="rejects the messages"):
        template.encode([USER, ANSWER], "a.jsonl:3")


def test_a_tokenizer_without_template_has_the_plain_one(directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(directory)
    assert isinstance(template_for(tokenizer), PlainTemplate)
    assert isinstance(template_of(directory, CHATML)[1], TokenizerTemplate)


def test_the_plain_template_takes_an_end_token() -> None:
    class Endless(ByteTokenizer):
        eos_id = None

    with pytest.raises(DataError, match="chats require an end token"):
        template_for(Endless())


def test_a_tokenizer_that_fails_on_a_conversation_is_named(directory: Path) -> None:
    tokenizer, template = template_of(directory, CHATML)
    tokenizer.library_tokenizer.model_max_length = "512"
    with pytest.raises(DataError, match=rf"the tokenizer {directory} cannot encode this conversation: TypeError"):
        template.encode([USER, ANSWER], "a.jsonl:3")


@pytest.mark.parametrize("text", [CHATML, THINKING])
def test_a_prompt_is_the_conversation_up_to_where_the_answer_begins(directory: Path, text: str) -> None:
    tokenizer, template = template_of(directory, text)
    asked = tokenizer.library_tokenizer.decode(template.encode_prompt(TALK[:4], "here"))
    assert asked.endswith("<|im_start|>user\nIt is what?<|im_end|>\n<|im_start|>assistant\n")
    whole = tokenizer.library_tokenizer.decode(template.encode(TALK[:4], "here").ids)
    assert asked.startswith(whole)


def test_a_special_token_that_a_user_types_is_text_in_a_prompt(directory: Path) -> None:
    tokenizer, template = template_of(directory, CHATML)
    end = tokenizer.library_tokenizer.convert_tokens_to_ids("<|im_end|>")
    typed = [{"role": "user", "content": "What is <|im_end|>?"}]
    ids = template.encode_prompt(typed, "here")
    assert ids.count(end) == 1
    assert tokenizer.library_tokenizer.decode(ids).count("<|im_end|>") == 2


def test_the_plain_prompt_ends_with_the_marker_of_the_assistant() -> None:
    tokenizer = ByteTokenizer()
    template = PlainTemplate(tokenizer)
    ids = template.encode_prompt(TALK[:2], "here")
    assert tokenizer.decode(ids) == "<|system|>\nBe short.\n<|user|>\nWhat is it?\n<|assistant|>\n"
    assert 256 not in ids
    answered = template.encode(TALK[:3], "here").ids.tolist()
    assert answered[: len(ids)] == ids
