"""Sums up a simulation, as numbers, JSON and text."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onstep.analysis.text_tables import table
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.measures import Measures, RoundRecord, SiteCounts
from onstep.diloco.simulator.scenario import Scenario, Site
from onstep.diloco.simulator.units import bytes_text, duration_text, percent_text
from onstep.diloco.sizes import server_disk, server_memory


@dataclass(frozen=True)
class Spread:
    """Seconds of rounds."""

    median: float
    p90: float
    longest: float


@dataclass(frozen=True)
class SiteReport:
    """The bytes and counts of a site, summed over its workers."""

    workers: int
    bytes_up: int
    bytes_down: int
    steps: int
    counted_share: float
    """Share of its steps that is in committed rounds."""
    idle_share: float
    """Share of the time for which its workers were alive and did not train."""
    failures: int
    outages: int
    lost_requests: int


@dataclass(frozen=True)
class Report:
    """The result of a simulation; `rounds` has the details, which everything else sums up."""

    is_finished: bool
    """Whether all rounds were committed before the time was over."""
    seconds: float
    num_rounds: int
    round_seconds: Spread | None
    """Of each fragment, from commit to commit; None without any round."""
    contributors: float
    """Mean number of a round."""
    lossy_lines: dict[str, str]
    """Of each site that loses packets, its congestion control, and what that makes of them."""
    server_memory: int
    """Bytes that the server needs, beyond Python itself."""
    server_disk: int
    """Bytes of disk that it needs, with what it keeps by default."""
    rounds_without_quorum: int
    """Rounds that waited because fewer workers than the quorum were connected."""
    staleness: dict[int, int]
    """Number of contributions by their staleness in versions."""
    dropped: int
    """Submissions that were too late."""
    repeats: int
    """Submissions that arrived again after they had counted."""
    evictions: int
    server_failures: int
    steps: int
    """Optimizer steps of all workers."""
    counted_share: float
    """Share of them that is in committed rounds."""
    killed_share: float
    """Share of them that was lost with workers that were killed before a submission."""
    outdated_share: float
    """Share of them that workers gave up, as they began from a version that was too old."""
    idle_share: float
    efficiency: float
    """Counted steps per second, relative to the same workers without failures and communication."""
    bytes_up: int
    bytes_down: int
    bytes_saved_factor: float
    """How many times more bytes the workers would send with a gradient in fp32 at each step."""
    trace: str
    """Hash of all rounds; equal for equal simulations."""
    events: int
    sites: dict[str, SiteReport]
    rounds: Sequence[RoundRecord]

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self)

    def text(self) -> str:
        """Lines and a table for a terminal."""
        return "\n".join([*_summary(self), "", *_site_table(self)])


def make_report(scenario: Scenario, measures: Measures, counts: Counter[str], clock: Clock) -> Report:
    """The report of a simulation that is over."""
    fragments, records = scenario.settings.num_fragments, measures.rounds
    total = sum(measures.sites.values(), SiteCounts())
    of_all = _site_report(scenario.total_workers, total, fragments)
    ideal = sum(site.workers / site.step_seconds for site in scenario.sites.values()) * clock.now
    return Report(
        is_finished=len(records) >= scenario.total_rounds,
        seconds=clock.now,
        num_rounds=len(records),
        round_seconds=_spread([one.seconds for one in records]),
        contributors=_share(sum(one.contributors for one in records), len(records)),
        lossy_lines={name: _loss_text(site) for name, site in scenario.sites.items() if site.packet_loss},
        server_memory=server_memory(scenario.parameters, scenario.settings.codec),
        server_disk=server_disk(scenario.parameters, scenario.settings.codec, scenario.total_workers),
        rounds_without_quorum=sum(one.lacked_quorum for one in records),
        staleness=dict(sorted(measures.staleness.items())),
        dropped=counts["dropped"],
        repeats=counts["repeats"],
        evictions=counts["evictions"],
        server_failures=measures.server_failures,
        steps=of_all.steps,
        counted_share=of_all.counted_share,
        killed_share=_share(total.killed_steps / fragments, total.steps),
        outdated_share=_share(total.outdated_steps / fragments, total.steps),
        idle_share=of_all.idle_share,
        efficiency=_share(total.counted_steps / fragments, ideal),
        bytes_up=of_all.bytes_up,
        bytes_down=of_all.bytes_down,
        bytes_saved_factor=_share(4.0 * scenario.parameters * total.steps, total.bytes_up),
        trace=_trace(records),
        events=clock.events,
        sites={
            name: _site_report(scenario.sites[name].workers, one, fragments) for name, one in measures.sites.items()
        },
        rounds=records,
    )


def _site_report(workers: int, one: SiteCounts, fragments: int) -> SiteReport:
    return SiteReport(
        workers=workers,
        bytes_up=one.bytes_up,
        bytes_down=one.bytes_down,
        steps=one.steps,
        counted_share=_share(one.counted_steps / fragments, one.steps),
        idle_share=1.0 - _share(one.training_seconds, one.alive_seconds),
        failures=one.failures,
        outages=one.outages,
        lost_requests=one.lost_requests,
    )


def _loss_text(site: Site) -> str:
    control, limit = site.congestion_control.upper(), site.connection_limit
    if math.isinf(limit):
        return f"{control}, which packet loss does not limit"
    return f"{control}, which packet loss limits to {8e-6 * limit:.1f} Mbit/s for each connection"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(seconds: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return Spread(ordered[(len(ordered) - 1) // 2], ordered[(len(ordered) - 1) * 9 // 10], ordered[-1])


def _trace(records: Sequence[RoundRecord]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in records:
        digest.update(f"{one.fragment} {one.version} {one.committed_at!r} {one.contributors} {one.steps}\n".encode())
    return digest.hexdigest()


def _summary(report: Report) -> list[str]:
    spread = report.round_seconds
    rounds = f"{report.num_rounds:,} rounds in {duration_text(report.seconds)}"
    if spread is not None:
        rounds += f"; a round: median {duration_text(spread.median)}, 90 % below {duration_text(spread.p90)}"
        rounds += f", longest {duration_text(spread.longest)}"
    late = ", ".join(f"{count:,} by {behind}" for behind, count in report.staleness.items() if behind) or "none"
    lines = [
        rounds,
        f"contributors: {report.contributors:.1f} a round; late: {late}; dropped as too late: {report.dropped:,}",
        f"rounds that waited for a quorum: {report.rounds_without_quorum:,}; evictions: {report.evictions:,}",
        f"steps: {report.steps:,}, {percent_text(report.counted_share)} in committed rounds, "
        f"{percent_text(report.killed_share)} lost with killed workers, {percent_text(report.outdated_share)} too old",
        f"bytes: {bytes_text(report.bytes_up)} up, {bytes_text(report.bytes_down)} down, "
        f"{report.bytes_saved_factor:,.0f} times fewer than a gradient at each step",
        *(f"the connections of {name} have {text}" for name, text in report.lossy_lines.items()),
        f"server: {bytes_text(report.server_memory)} of memory, {bytes_text(report.server_disk)} of disk",
        f"efficiency: {percent_text(report.efficiency)} of the steps without failures and communication; "
        f"idle {percent_text(report.idle_share)}",
    ]
    return lines if report.is_finished else ["The time was over before all rounds were done.", *lines]


def _site_table(report: Report) -> list[str]:
    rows = [["site", "workers", "up", "down", "steps", "counted", "idle", "killed", "outages", "lost requests"]]
    rows += [
        [
            name,
            f"{one.workers:,}",
            bytes_text(one.bytes_up),
            bytes_text(one.bytes_down),
            f"{one.steps:,}",
            percent_text(one.counted_share),
            percent_text(one.idle_share),
            f"{one.failures:,}",
            f"{one.outages:,}",
            f"{one.lost_requests:,}",
        ]
        for name, one in report.sites.items()
    ]
    return table(rows, "<>>>>>>>>>", shrink=0)
