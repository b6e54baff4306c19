"""Simulates variations of a scenario and puts them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onstep.analysis.text_tables import table
from onstep.diloco.simulator.reading import Variation
from onstep.diloco.simulator.report import Report
from onstep.diloco.simulator.simulation import simulate
from onstep.diloco.simulator.units import bytes_text, duration_text, percent_text


@dataclass(frozen=True)
class Compared:
    """A variation and what its simulation showed."""

    variation: Variation
    report: Report


def compare(variations: Sequence[Variation], on_round: Callable[[int], None] | None = None) -> list[Compared]:
    """Simulate all variations; failures and step times are the same in each, as far as the varied settings allow.

    Args:
        on_round: called after each committed round of any of them.
    """
    return [Compared(one, simulate(one.scenario, on_round)) for one in variations]


def comparison_text(compared: Sequence[Compared]) -> str:
    """A table with a row for each variation."""
    keys = list(compared[0].variation.choices) if compared else []
    heading = [*keys, "round", "90 % below", "up", "down", "efficiency", "idle", "counted", "late", "dropped"]
    rows = [[*map(str, one.variation.choices.values()), *_cells(one.report)] for one in compared]
    note = ["Before their rounds were done, the time was over in:"]
    note += [f"  {one.variation.label}" for one in compared if not one.report.is_finished]
    lines = table([heading, *rows], "<" * len(keys) + ">" * (len(heading) - len(keys)), indent="")
    return "\n".join(lines + (note if len(note) > 1 else []))


def _cells(report: Report) -> list[str]:
    spread = report.round_seconds
    late = sum(count for behind, count in report.staleness.items() if behind)
    return [
        "-" if spread is None else duration_text(spread.median),
        "-" if spread is None else duration_text(spread.p90),
        bytes_text(report.bytes_up),
        bytes_text(report.bytes_down),
        percent_text(report.efficiency),
        percent_text(report.idle_share),
        percent_text(report.counted_share),
        f"{late:,}",
        f"{report.dropped:,}",
    ]
