"""The words for records that a metrics log has lost."""

from __future__ import annotations

import pytest

from onstep.record.gaps import describe_gap, gap_record


@pytest.mark.parametrize(
    ("number", "after_step", "words"),
    [
        (1, 3, "1 record after step 3, up to step 4 is missing"),
        (2, 2, "2 records after step 2, up to step 4 are missing"),
        (5, None, "5 records up to step 4 are missing"),
    ],
)
def test_a_gap_is_described_in_a_sentence(number: int, after_step: int | None, words: str) -> None:
    assert describe_gap(gap_record(number, after_step, 4)) == words
