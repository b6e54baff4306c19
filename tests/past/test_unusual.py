"""What is said to be unusual about samples: text and content that was seen before, at whatever position."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import onstep
from onstep.past.passages import Passages
from tests.past.test_rewind_trainer import make, rows


def test_text_that_was_seen_at_another_position_is_found() -> None:
    chance = np.random.default_rng(0)
    text = chance.integers(0, 256, 400)
    passages = Passages()
    passages.add(text[:200], 3, 7)
    passages.add(text[200:], 4, 8)
    share, words = passages.shared(text[150:280], None, 9)
    assert share > 0.6
    assert words == "a sample of step 4 (index 8)"
    assert passages.shared(chance.integers(0, 256, 130), None, 9)[0] == 0
    assert passages.shared(text[:200], 7, 9)[0] == 0  # itself, in an epoch before


def test_a_row_that_is_there_twice_is_named_and_one_of_an_epoch_before_is_not(tmp_path: Path) -> None:
    data = rows(12)
    data.append(dict(data[5]))
    make(tmp_path / "out", data=data, max_steps=9, save_steps=20).train()
    with make(tmp_path / "out", data=data).rewind(7) as past:
        noted = {one.index: one.unusual for _ in range(2) for one in (past.samples(), past.next())[0]}
    same = {index for index, notes in noted.items() if any("same content" in note for note in notes)}
    assert same
    assert same == {5, 12} & set(noted)


def test_steps_after_the_first_one_that_is_held_are_compared_too(run: Path) -> None:
    with onstep.rewind(run, 5) as past:
        past.next().next().finish_step()
        assert past.comparison.steps == [4, 5, 6, 7]
        assert past.comparison.is_equal
