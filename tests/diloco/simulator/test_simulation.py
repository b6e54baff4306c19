"""Whole simulations: against times computed by hand, and against what the protocol promises."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.diloco.simulator.reading import from_values
from onstep.diloco.simulator.report import Report
from onstep.diloco.simulator.simulation import simulate

MEGABYTE_MODEL = 250_000
"""Parameters of which fp32 needs a megabyte."""


def run(**values: Any) -> Report:
    return simulate(
        from_values({"parameters": MEGABYTE_MODEL, "codec": "fp32", "sync_every": 10, "rounds": 20} | values)
    )


def site(workers: int = 1, **values: Any) -> dict[str, Any]:
    return {"workers": workers, "upload_mbit": 8, "download_mbit": 8, "round_trip_ms": 100} | values


def rounds_of(report: Report) -> list[float]:
    return [round(one.seconds, 6) for one in report.rounds]


def check_accounts(report: Report) -> None:
    """Each version of a fragment once and in order, and no step counted twice."""
    versions: dict[int, int] = {}
    for one in report.rounds:
        assert one.version == versions.get(one.fragment, 0) + 1
        versions[one.fragment] = one.version
    assert report.counted_share + report.killed_share + report.outdated_share <= 1.0 + 1e-9


def test_a_round_is_training_upload_outer_step_and_download() -> None:
    report = run(sites={"a": site(), "b": site()}, server={"round_seconds": 0.5})
    # 10 steps of 1 s, 1 MB up at 1 MB/s, half a round trip, the outer step, 1 MB down, half a round trip
    assert rounds_of(report)[1:] == [12.6] * 19
    assert (report.steps, report.counted_share) == (400, 1.0)
    assert report.bytes_up == 20 * 2 * 1_000_000
    assert report.idle_share == pytest.approx(2.6 / 12.6, abs=0.01)


def test_workers_of_a_site_share_its_line() -> None:
    report = run(sites={"a": site(2)}, server={"round_seconds": 0.5})
    assert rounds_of(report)[1:] == [14.6] * 19


def test_all_sites_share_the_line_of_the_server() -> None:
    free = {"a": site(upload_mbit=None, download_mbit=None), "b": site(upload_mbit=None, download_mbit=None)}
    report = run(sites=free, server={"round_seconds": 0.5, "upload_mbit": 8, "download_mbit": 16})
    assert rounds_of(report)[1:] == [13.6] * 19  # 2 MB at 2 MB/s to the server, 2 MB at 1 MB/s from it


def test_a_codec_shortens_what_is_sent_in_both_directions() -> None:
    exact, small = (run(sites={"a": site(2)}, codec=codec) for codec in ("fp32", "int8"))
    assert exact.bytes_up / small.bytes_up == pytest.approx(4 / (1 + 4 / 128), rel=1e-3)
    assert small.round_seconds.median < exact.round_seconds.median - 2.5  # type: ignore[union-attr]
    assert small.bytes_down < exact.bytes_down / 3


def test_a_straggler_delays_a_round_only_until_the_learned_deadline_and_counts_late() -> None:
    sites = {"fast": site(4), "slow": site(1, step_seconds=5.0)}
    report = run(sites=sites, rounds=60, max_staleness=5)
    check_accounts(report)
    late = sum(count for behind, count in report.staleness.items() if behind)
    assert late > 5
    assert report.rounds[-1].seconds < 40.0  # the straggler needs 50 s a round
    assert report.sites["slow"].counted_share > 0.8


def test_a_submission_that_is_too_late_is_dropped_and_its_steps_are_named_as_too_old() -> None:
    sites = {"fast": site(4), "slow": site(1, step_seconds=2.0, step_jitter=2.0)}
    report = run(sites=sites, rounds=100, max_staleness=0)
    check_accounts(report)
    assert report.dropped > 3
    assert set(report.staleness) == {0}
    assert report.outdated_share == pytest.approx(1 - report.counted_share, abs=0.01)


def test_slower_workers_that_take_fewer_steps_arrive_with_the_others() -> None:
    sites = {"fast": site(3), "slow": site(1, step_seconds=2.0)}
    waiting, adapted = (run(sites=sites, rounds=40, dylu=dylu) for dylu in (False, True))
    assert adapted.round_seconds.median < waiting.round_seconds.median - 5.0  # type: ignore[union-attr]
    assert adapted.idle_share < waiting.idle_share


def test_killed_workers_are_evicted_and_only_what_they_had_not_submitted_is_lost() -> None:
    churn = {"hours_between_failures": 0.2, "minutes_away": 5}
    report = run(sites={"a": site(6, **churn)}, rounds=200, heartbeat_timeout=60)
    check_accounts(report)
    assert report.is_finished
    assert report.sites["a"].failures > 10
    assert report.evictions > 5
    assert 0.0 < report.killed_share < 0.05
    assert report.counted_share > 0.9


def test_a_site_that_is_cut_off_trains_on_and_the_majority_does_not_wait_for_it() -> None:
    sites = {"hub": site(3), "far": site(1, hours_between_outages=0.3, outage_minutes=5)}
    report = run(sites=sites, rounds=300, heartbeat_timeout=60, max_staleness=50)
    check_accounts(report)
    assert report.sites["far"].outages > 3
    assert report.rounds_without_quorum == 0
    assert report.sites["far"].counted_share > 0.9  # what it learned meanwhile is not lost
    assert max(report.staleness) > 3


def test_without_a_quorum_nothing_is_committed_until_it_is_back() -> None:
    sites = {"big": site(3, hours_between_outages=0.3, outage_minutes=10), "small": site(2)}
    report = run(sites=sites, rounds=200, heartbeat_timeout=60, max_staleness=50)
    check_accounts(report)
    assert report.is_finished
    assert report.rounds_without_quorum > 0
    assert min(one.contributors for one in report.rounds) >= 3


def test_a_killed_server_continues_from_what_it_committed() -> None:
    server = {"hours_between_failures": 0.1, "minutes_away": 2, "round_seconds": 5}
    report = run(sites={"a": site(4)}, rounds=150, server=server)
    check_accounts(report)
    assert report.is_finished
    assert report.server_failures > 3
    assert report.counted_share > 0.95  # what it had not committed is sent again


def test_lost_requests_and_replies_are_repeated_and_count_once() -> None:
    report = run(sites={"a": site(4, request_loss=0.2)}, rounds=100)
    check_accounts(report)
    assert report.is_finished
    assert report.sites["a"].lost_requests > 50
    assert report.repeats > 5
    assert report.counted_share > 0.99


def test_in_async_mode_nobody_waits_for_a_slow_worker() -> None:
    sites = {"fast": site(3), "slow": site(1, step_seconds=10.0)}
    report = run(sites=sites, mode="async", rounds=20)
    check_accounts(report)
    assert report.num_rounds == 80
    assert report.contributors == 1.0
    assert report.round_seconds.median < 6.0  # type: ignore[union-attr]
    assert max(report.staleness) > 10


def test_fragments_in_flight_hide_the_network() -> None:
    together, streamed = (run(sites={"a": site(2)}, num_fragments=fragments) for fragments in (1, 5))
    check_accounts(streamed)
    assert streamed.num_rounds == 100
    assert together.idle_share > 0.2
    assert streamed.idle_share < 0.05
    assert streamed.bytes_up == pytest.approx(together.bytes_up, rel=0.1)


def test_a_scenario_gives_the_same_report_again_and_another_seed_another() -> None:
    sites = {"a": site(5, step_jitter=0.5, hours_between_failures=0.5, request_loss=0.05, packet_loss=0.001)}
    first, again, other = (run(sites=sites, rounds=50, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.trace != other.trace


def test_a_simulation_ends_when_its_time_is_over() -> None:
    report = run(sites={"a": site(2)}, rounds=1000, hours=0.05)
    assert (report.is_finished, report.seconds) == (False, 180.0)
    assert report.text().startswith("The time was over before all rounds were done.")


def test_a_report_is_json_and_text() -> None:
    import json

    report = run(sites={"a": site(2)})
    values = json.loads(json.dumps(report.as_dict()))
    assert values["num_rounds"] == 20
    assert values["sites"]["a"]["workers"] == 2
    assert "20 rounds in 4.7 min" in report.text()


def test_the_report_names_the_congestion_control_that_packet_loss_limits() -> None:
    lines = [("cubic", "limits to 1.4 Mbit/s for each connection"), ("bbr", "does not limit")]
    rounds = {}
    for control, text in lines:
        line = site(
            2, upload_mbit=10, download_mbit=10, round_trip_ms=100, packet_loss=0.01, congestion_control=control
        )
        report = simulate(from_values({"sites": {"a": line}, "parameters": 1_000_000, "sync_every": 5, "rounds": 5}))
        assert f"the connections of a have {control.upper()}, which packet loss {text}" in report.text()
        rounds[control] = report.round_seconds
    assert rounds["cubic"].median > 2 * rounds["bbr"].median  # type: ignore[union-attr]


def test_a_fixed_overlap_waits_only_for_what_its_steps_do_not_hide() -> None:
    def idle(**settings: Any) -> float:
        line = site(1, upload_mbit=10, download_mbit=10, round_trip_ms=100, step_seconds=0.1)
        run = {
            "sites": {"a": line, "b": line},
            "parameters": 1_000_000,
            "codec": "int8",
            "sync_every": 40,
            "rounds": 50,
        }
        return simulate(from_values({**run, **settings})).idle_share

    waits = {overlap: idle(overlap_steps=overlap) for overlap in (1, 20, 40)}
    assert idle() > waits[1] > 3 * waits[40]
    assert waits[20] == pytest.approx(waits[40], abs=0.01)
