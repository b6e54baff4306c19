"""A chat template is somebody else's program: whatever it does ends soon, in bounded memory, and with an error."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig
from onstep.data import TokenizerTemplate, learn_bpe, template_for, tokenizer_source
from onstep.data.chat.limited_process import LimitedProcess, Limits
from onstep.data.corpus.tokenizers import HuggingFaceTokenizer
from onstep.errors import DataError

transformers = pytest.importorskip("transformers")

TALK = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is what?"}]
FAST = Limits(cpu_seconds=0.5, memory_bytes=256 << 20)
TIME = r"a\.jsonl:3: the tokenizer's chat template needs more than 0\.5 seconds of CPU time .*, the limit"
MEMORY = r"a\.jsonl:3: the tokenizer's chat template needs more than 256 MiB of memory .*, the limit"
SIZE = r"yields [0-9,]+ characters for one conversation; the limit is 8,388,608"
LOOP = "{% for i in range(99999) %}"
GROWING = "{% set ns = namespace(a=['x' * 99]) %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer directory of transformers."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "a.txt").write_text("What is it? It is what it is.\nassistant user\n" * 30)
    source = tokenizer_source(DatasetConfig(paths=[str(path / "a.txt")]))
    learn_bpe(source, 320, path / "cache", show_progress=False).save(path)
    return path


def template_of(directory: Path, text: Any) -> TokenizerTemplate:
    tokenizer = HuggingFaceTokenizer(directory)
    tokenizer.library_tokenizer.chat_template = text
    return TokenizerTemplate(tokenizer, FAST)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}", TIME, id="nested loops"),
        pytest.param(f"{LOOP}{LOOP}a{{% endfor %}}{{% endfor %}}", f"{TIME}|{MEMORY}", id="endless output"),
        pytest.param("{{ 10 ** (10 ** 9) }}", TIME, id="a power"),
        pytest.param("{{ ('a' * 30000 + 'b') in 'a' * 200000000 }}", f"{TIME}|{MEMORY}", id="a search"),
        pytest.param("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError", id="recursion"),
        pytest.param("{{ 'x' * 10 ** 10 }}", MEMORY, id="a long string"),
        pytest.param("{{ ('x' * 10 ** 7) }}", SIZE, id="long output"),
        pytest.param(
            "{{ raise_exception('x' * 10 ** 7) }}",
            r"rejects the messages: x{200}\.\.\. \(10,000,000 characters\); fix",
            id="long error",
        ),
        pytest.param("{{ [0] * 10 ** 10 }}", MEMORY, id="a long list"),
        pytest.param("{{ 'x' | center(10 ** 10) }}", MEMORY, id="center"),
        pytest.param("{{ '%1000000000d' % 1 }}", MEMORY, id="width of %"),
        pytest.param("{{ '{:>1000000000}'.format('x') }}", MEMORY, id="width of format"),
        pytest.param("{{ messages | tojson(indent=10 ** 10) }}", MEMORY, id="indent"),
        pytest.param("{{ 'x'.ljust(10 ** 10) }}", MEMORY, id="ljust"),
        pytest.param(GROWING + LOOP + "{% set ns.a = ns.a + ns.a %}{% endfor %}", f"{MEMORY}|{TIME}", id="namespace"),
        pytest.param("{{ range(10 ** 9) | list }}", "OverflowError: Range too big", id="range"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError: division by zero", id="division"),
        pytest.param("{{ a.b.c }}", "'a' is undefined", id="undefined"),
        pytest.param("{% for %}", "Expected an expression, got 'end of statement block'", id="syntax"),
        pytest.param("{{ " + "(" * 5000 + ")" * 5000 + " }}", "rejects the messages", id="deep brackets"),
        pytest.param("{{ '\\ud800' }}", "surrogates not allowed", id="surrogate"),
        pytest.param("{{ strftime_now('%' * 10 ** 9) }}", "a.jsonl:3: the tokenizer's chat template", id="date"),
    ],
)
def test_whatever_a_template_does_ends_with_an_error_that_has_the_limit(directory: Path, text: str, words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=words) as caught:
        template_of(directory, text).encode(TALK, "a.jsonl:3")
    assert str(caught.value).startswith("a.jsonl:3: ")
    assert len(str(caught.value)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_marked_answers_have_the_limits_too(directory: Path) -> None:
    with pytest.raises(DataError, match=TIME):
        template_of(
            directory, f"{{% generation %}}{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}{{% endgeneration %}}"
        ).encode(TALK, "a.jsonl:3")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"rag": "a", "tool_use": "b"}, "multiple chat templates with no default"),
        ({"default": ["a"]}, "must be a string, got list"),
        (5, "must be a string, got int"),
    ],
)
def test_a_template_that_is_not_one_text_is_refused(directory: Path, template: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        template_of(directory, template)


def test_of_several_templates_the_default_is_used(directory: Path) -> None:
    template = template_of(directory, {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "rag": "a"})
    assert template.encode(TALK, "here").trained.any()


def test_after_an_error_the_next_conversation_is_rendered(directory: Path) -> None:
    loop = "{% if m.content == 'loop' %}" + LOOP * 2 + "{% endfor %}{% endfor %}{% endif %}"
    template = template_of(directory, "{% for m in messages %}" + loop + "{{ m.content }}{% endfor %}")
    expected = template.encode(TALK, "here")
    for _ in range(2):
        with pytest.raises(DataError, match=TIME):
            template.encode([{"role": "user", "content": "loop"}], "a.jsonl:3")
    assert template.encode(TALK, "here").ids.tolist() == expected.ids.tolist()


def test_threads_and_forked_children_render_too(directory: Path) -> None:
    template = template_of(directory, "{% for m in messages %}{{ m.content }}{% endfor %}")
    talks = [[{"role": "user", "content": f"number {number}"}] for number in range(20)]
    expected = [template.encode(talk, "here").ids.tolist() for talk in talks]
    found: dict[int, list[int]] = {}

    def encode(numbers: range) -> None:
        found.update({number: template.encode(talks[number], "here").ids.tolist() for number in numbers})

    threads = [threading.Thread(target=encode, args=(range(first, 20, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(20)] == expected
    child = os.fork()
    if child == 0:
        is_same = [template.encode(talk, "here").ids.tolist() for talk in talks] == expected
        os._exit(0 if is_same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.encode(talks[0], "here").ids.tolist() == expected[0]


def test_the_process_ends_with_its_owner() -> None:
    process = LimitedProcess(lambda _: os.getpid(), FAST, "it")
    child = process.call(None)
    assert child != os.getpid()
    assert process.call(None) == child
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_process_that_dies_is_an_error_and_is_replaced() -> None:
    process = LimitedProcess(lambda code: os._exit(code) if code else "alive", FAST, "it")
    assert process.call(0) == "alive"
    with pytest.raises(DataError, match=r"it ended its process \(wait status 768\)"):
        process.call(3)
    assert process.call(0) == "alive"


def test_a_text_with_many_special_tokens_is_encoded_in_bounded_time(directory: Path) -> None:
    tokenizer = HuggingFaceTokenizer(directory)
    tokenizer.library_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "<|endoftext|>" * 10_001}]
    with pytest.raises(DataError, match=r"a\.jsonl:3: .* more than 10,000, the limit"):
        template_for(tokenizer).encode(talk, "a.jsonl:3")


def test_a_process_that_dies_is_an_error_where_children_are_collected_by_somebody_else() -> None:
    process = LimitedProcess(lambda code: os._exit(code) if code else "alive", FAST, "it")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as after `trap '' CHLD` in a shell
    try:
        with pytest.raises(DataError, match=r"it ended its process; it may need more than 0\.5 seconds of CPU time"):
            process.call(7)
        assert process.call(0) == "alive"
    finally:
        signal.signal(signal.SIGCHLD, before)
