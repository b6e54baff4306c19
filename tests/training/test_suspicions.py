"""A rank that seems to hang is asked first, and one that has moved since is not to blame."""

from __future__ import annotations

from onstep.training.watchdog.diagnosis import FailureDiagnosis, Suspicion, suspecting_rank, suspicion_of
from onstep.training.watchdog.rank_report import RankReport

HUNG = FailureDiagnosis("hung", 1)


def asked(
    one: RankReport, known: Suspicion | None = None, diagnosis: FailureDiagnosis | None = HUNG, now: float = 5.0
) -> object:
    return suspicion_of(diagnosis, {0: RankReport(0), 1: one}, 0, known, now)


def test_a_rank_that_can_answer_is_asked() -> None:
    assert asked(RankReport(1, beats=40)) == Suspicion(1, 40, 5.0)


def test_the_time_to_answer_runs_from_the_first_question() -> None:
    first = Suspicion(1, 40, 2.0)
    assert asked(RankReport(1, beats=40), first) == first
    assert asked(RankReport(1, beats=41), first) == Suspicion(1, 41, 5.0), "it stands elsewhere now"


def test_one_that_is_silent_or_stopped_is_not_asked_nor_the_judge_nor_one_that_failed() -> None:
    assert asked(RankReport(1, silence=3.0)) is None
    assert asked(RankReport(1, silence=1.0)) is not None, "a busy machine is late too"
    assert asked(RankReport(1, is_stopped=True)) is None
    assert asked(RankReport(1), diagnosis=FailureDiagnosis("hung", 0)) is None
    assert asked(RankReport(1), diagnosis=FailureDiagnosis("raised", 1)) is None
    assert asked(RankReport(1), Suspicion(1, 0, 1.0), diagnosis=None) is None


def test_the_accused_agrees_only_if_it_has_not_moved() -> None:
    leader = RankReport(0, suspects=1, suspected_beats=40)
    assert suspecting_rank(RankReport(1, beats=40), {0: leader}) == 0
    assert suspecting_rank(RankReport(1, beats=41), {0: leader}) is None
    assert suspecting_rank(RankReport(2, beats=40), {0: leader}) is None, "another one is meant"


def test_an_old_accusation_does_not_count() -> None:
    leader = RankReport(0, suspects=1, suspected_beats=40, silence=3.0)
    assert suspecting_rank(RankReport(1, beats=40), {0: leader}) is None
