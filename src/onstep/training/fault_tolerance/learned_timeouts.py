"""Times the sections of a run and learns their time limits, without `nvidia-resiliency-ext`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from onstep.config.suggestions import shown
from onstep.distributed import World
from onstep.processes.heartbeat import HEARTBEAT

SAFETY_FACTOR = 5.0
"""A learned limit is this multiple of the longest time seen, on any rank and in any start of the run."""
SHORTEST_LIMIT_SECONDS = 60.0
"""Minimum of a learned limit: a machine may be busy with something else for some seconds."""
LONGEST_LIMIT_SECONDS = 366 * 86400.0
"""Maximum of a limit that is loaded; timers of the system hold no more than a few centuries."""
OUT_OF_SECTION = "out_of_section"


class LearnedTimeouts:
    """Measures the sections of this rank, and stores the limits learned for all ranks in `limits`.

    Its methods have the names of `nvidia_resiliency_ext.fault_tolerance.RankMonitorClient`, which it replaces.

    Args:
        world: the ranks that learn together.
        limits: seconds by section; read by the watchdog.
    """

    def __init__(
        self,
        world: World,
        limits: dict[str, float],
        *,
        safety_factor: float = SAFETY_FACTOR,
        shortest_seconds: float = SHORTEST_LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.longest: dict[str, float] = {}
        """Seconds of the longest section of each name so far."""
        self._world = world
        self._factor, self._shortest = safety_factor, shortest_seconds
        self._clock = clock
        self._open: dict[str, float] = {}
        self._outside_since: float | None = None

    def init_workload_monitoring(self) -> None:
        """Begin."""
        self._outside_since = self._clock()

    def shutdown_workload_monitoring(self) -> None:
        """Discard open sections."""
        self._open.clear()
        self._outside_since = HEARTBEAT.section = None

    def start_section(self, section: str) -> None:
        """Begin a section."""
        now = self._clock()
        if self._outside_since is not None:
            self._see(OUT_OF_SECTION, now - self._outside_since)
        self._open[section], self._outside_since = now, None
        HEARTBEAT.section = section
        HEARTBEAT.beats += 1

    def end_section(self, section: str) -> None:
        """End a section; does nothing if it is not open."""
        began, now = self._open.pop(section, None), self._clock()
        if began is None:
            return
        self._see(section, now - began)
        HEARTBEAT.section = next(reversed(self._open), None)
        HEARTBEAT.beats += 1
        if not self._open:
            self._outside_since = now

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Learn the limits of some sections, or of all sections seen. Collective.

        Args:
            selected_sections: their names; None means all.
            calc_out_of_section: also learn how long the run may be between two sections.
            skip_if_not_ready: kept for compatibility: the limit of a section that was not seen never changes.
        """
        if self._outside_since is not None:
            self._see(OUT_OF_SECTION, self._clock() - self._outside_since)
        for longest in self._world.gather(self.longest):
            for name, seconds in longest.items():
                self._see(name, seconds)
        names = set(self.longest) - {OUT_OF_SECTION} if selected_sections is None else set(selected_sections)
        if calc_out_of_section:
            names.add(OUT_OF_SECTION)
        for name in names & set(self.longest):
            self.limits[name] = max(self._shortest, self._factor * self.longest[name])
        return True

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The learned limits: seconds by section."""
        return {"limits": dict(self.limits), "longest": {name: self.longest[name] for name in self.limits}}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the limits of an earlier start; none is set below the minimum.

        Raises:
            ValueError: for anything but finite seconds by name, and for a limit without the time it was learned from.
        """
        limits, longest = (_seconds_by_name(state.get(key)) for key in ("limits", "longest"))
        if unknown := sorted(set(limits) - set(longest)):
            raise ValueError(f"expected seconds of the section {shown(unknown[0])} in 'longest', got none")
        self.limits.update({name: max(self._shortest, seconds) for name, seconds in limits.items()})
        self.longest.update(longest)

    def _see(self, name: str, seconds: float) -> None:
        self.longest[name] = max(seconds, self.longest.get(name, 0.0))


def _seconds_by_name(content: object) -> dict[str, float]:
    if not isinstance(content, dict):
        raise ValueError(f"expected seconds by section, got {shown(content)}")
    for name, seconds in content.items():
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not isinstance(name, str) or not is_number or not 0 <= seconds <= LONGEST_LIMIT_SECONDS:
            raise ValueError(
                f"expected seconds of the section {shown(name)} from 0 to {LONGEST_LIMIT_SECONDS:.0f}, got "
                f"{shown(seconds)}"
            )
    return {name: float(seconds) for name, seconds in content.items()}
