"""A rank that seems to hang is asked first, and one that has moved since is not to blame."""

from __future__ import annotations

from onstep.training.watchdog.diagnosis import Accusation, Verdict, accusation_of, accuser_of
from onstep.training.watchdog.rank_report import RankRecord

HUNG = Verdict("hung", 1)


def asked(one: RankRecord, known: Accusation | None = None, verdict: Verdict | None = HUNG, now: float = 5.0) -> object:
    return accusation_of(verdict, {0: RankRecord(0), 1: one}, 0, known, now)


def test_a_rank_that_can_answer_is_asked() -> None:
    assert asked(RankRecord(1, beats=40)) == Accusation(1, 40, 5.0)


def test_the_time_to_answer_runs_from_the_first_question() -> None:
    first = Accusation(1, 40, 2.0)
    assert asked(RankRecord(1, beats=40), first) == first
    assert asked(RankRecord(1, beats=41), first) == Accusation(1, 41, 5.0), "it stands elsewhere now"


def test_one_that_is_silent_or_stopped_is_not_asked_nor_the_judge_nor_one_that_failed() -> None:
    assert asked(RankRecord(1, silence=3.0)) is None
    assert asked(RankRecord(1, is_stopped=True)) is None
    assert asked(RankRecord(1), verdict=Verdict("hung", 0)) is None
    assert asked(RankRecord(1), verdict=Verdict("raised", 1)) is None
    assert asked(RankRecord(1), Accusation(1, 0, 1.0), verdict=None) is None


def test_the_accused_agrees_only_if_it_has_not_moved() -> None:
    judge = RankRecord(0, accuses=1, accused_beats=40)
    assert accuser_of(RankRecord(1, beats=40), {0: judge}) == 0
    assert accuser_of(RankRecord(1, beats=41), {0: judge}) is None
    assert accuser_of(RankRecord(2, beats=40), {0: judge}) is None, "another one is meant"


def test_an_old_accusation_does_not_count() -> None:
    judge = RankRecord(0, accuses=1, accused_beats=40, silence=3.0)
    assert accuser_of(RankRecord(1, beats=40), {0: judge}) is None
