"""Digests of values and code are the same in every process, and differ where what is learned differs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onstep.training.runs.fingerprints import arrow_entries, digest_of, tensor_digest

SCRIPT = '''
{lines}
import torch
from onstep.training.runs.fingerprints import digest_of

SCALE = {scale}

def helper(x):
    """{doc}"""
    return x * SCALE if x in {{"a", "b", "c", "d"}} else x

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [{{"text": str(i), "labels": i % {classes}}} for i in range(100)]
        self.kinds = {{"one", "two", "three", "four"}}
        self.generator = torch.Generator()

    def __getitem__(self, index):
        return helper(self.rows[index])

print(digest_of(Rows()), digest_of(lambda x: helper(x) {operator} 1))
'''


def written(
    path: Path, lines: int = 0, scale: float = 1, doc: str = "One.", classes: int = 2, operator: str = "+"
) -> str:
    """The path of the script with these values in it."""
    text = SCRIPT.format(lines="\n" * lines, scale=scale, doc=doc, classes=classes, operator=operator)
    path.write_text(text, encoding="utf-8")
    return str(path)


def printed(*paths: str) -> list[list[str]]:
    """The digests of data and code that each script prints, all in one new process with its own hashes of text."""
    code = "import runpy, sys; [runpy.run_path(path, run_name='__main__') for path in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.process
def test_a_digest_is_that_of_another_process_and_of_other_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(written(tmp_path / "first.py"), run_name="__main__")
    first = capsys.readouterr().out.split()
    moved, with_operator, with_scale, with_classes = printed(
        written(tmp_path / "moved.py", lines=7, doc="Another\n    docstring."),
        written(tmp_path / "operator.py", operator="-"),
        written(tmp_path / "scale.py", scale=0.5),
        written(tmp_path / "classes.py", classes=3),
    )
    assert moved == first

    def same(changed: list[str]) -> list[bool]:
        return [one == before for one, before in zip(changed, first, strict=True)]

    assert same(with_operator) == [True, False]
    assert same(with_scale) == [False, False]
    assert same(with_classes) == [False, True]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [1, 2, 4]),
        (list(range(100_000)), [*range(99_999), 7]),
        ({"a": 1}, {"a": 1.5}),
        ({"a": [{"x": "text"}]}, {"a": [{"x": "texts"}]}),
        (np.zeros(5), np.zeros(6)),
        (np.zeros(5), np.zeros(5, np.float32)),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
        (nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)),
        ({"x", "y"}, {"x", "z"}),
        ([1, "a"], ["a", 1]),
    ],
)
def test_different_values_have_different_digests(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


def test_a_cycle_and_an_attribute_that_raises_are_no_obstacle() -> None:
    class Hostile:
        def __init__(self) -> None:
            self.itself = self

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert digest_of(Hostile()) == digest_of(Hostile())


def test_what_a_loss_refers_to_is_part_of_it() -> None:
    def made(weight: float) -> Any:
        return lambda outputs, labels: weight * outputs

    assert digest_of(made(0.5)) == digest_of(made(0.5)) != digest_of(made(0.6))


def test_the_random_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    digest_of([torch.randn(3) for _ in range(3)])
    torch.set_rng_state(before)
    digest_of({"data": np.ones(3), "model": nn.Linear(2, 2).requires_grad_(False)})
    tensor_digest(torch.ones(3), 8)
    torch.set_rng_state(before)
    value = digest_of(torch.ones(100))
    assert (torch.get_rng_state() == before).all(), value


def test_the_environment_is_not_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.environ.get

    def loss(outputs: Any) -> Any:
        return outputs if read("DEBUG") else outputs * len(os.environ)

    before = digest_of(loss)
    monkeypatch.setenv("SOME_JOB_ID", "2")
    assert digest_of(loss) == before


def test_columns_of_datasets_are_told_apart() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"row {index}" for index in range(50)], "label": [index % 2 for index in range(50)]}
    one = datasets.Dataset.from_dict(rows)
    flipped = datasets.Dataset.from_dict({**rows, "label": [1 - label for label in rows["label"]]})
    entries, others = arrow_entries(one), arrow_entries(flipped)
    assert [name for name in entries if entries[name] != others[name]] == ["label"]
    assert (
        arrow_entries(one.shuffle(seed=1)) == arrow_entries(one.shuffle(seed=1)) != arrow_entries(one.shuffle(seed=2))
    )
