"""Compares what a repeated run logs with the record of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onstep.files.json_values import encode
from onstep.past.place import Plan
from onstep.record import Record, without_wall_clock
from onstep.training.runs.provenance import provenance

_OTHER = ("kind", "global_step", "epoch", "timestamp")
_CODE = "the code"


@dataclass(frozen=True)
class Deviation:
    """The first logged value that is not the record's."""

    step: int
    """The step of the value."""
    key: str
    """The name of the value."""
    recorded: object
    """The value in the record."""
    repeated: object
    """The value of the repeated run."""

    def __str__(self) -> str:
        return f"{self.key} of step {self.step} was {self.recorded!r} and is {self.repeated!r}"


@dataclass
class Comparison:
    """The logged values of the repeated steps beside those of the record."""

    plan: Plan
    """How the steps are repeated."""
    num_ranks: int = 1
    """The number of ranks of the repeated run."""
    lines: dict[int, Record] = field(default_factory=dict, repr=False)
    """What the repeated run has logged, by step."""
    differences: list[str] = field(default_factory=list)
    """What else is known to differ from the run, such as the code of a script."""

    def hear(self, kind: str, step: int, data: Mapping[str, Any]) -> None:
        """Keep a line of the repeated run's record, in the form in which a file has it.

        Args:
            kind: the kind of the line.
            step: its step.
            data: its fields by name.
        """
        if kind == "log":
            self.lines[step] = {**self.lines.get(step, {}), **json.loads(encode(dict(data)))}

    def go_back(self, to_step: int) -> None:
        """Forget what a rollback undoes.

        Args:
            to_step: the step that the run goes back to.
        """
        self.lines = {step: line for step, line in self.lines.items() if step <= to_step}

    @property
    def _recorded(self) -> dict[int, Record]:
        found: dict[int, Record] = {}
        for one in self.plan.records:
            step = one.get("global_step", 0)
            if one.get("kind") == "log" and step in self.lines:
                found[step] = {**found.get(step, {}), **one}
        return found

    @property
    def num_values(self) -> int:
        """How many logged values were compared."""
        return sum(len(self._shared(step, line)) for step, line in self._recorded.items())

    @property
    def steps(self) -> list[int]:
        """The steps at which something was compared."""
        return sorted(self._recorded)

    @property
    def deviation(self) -> Deviation | None:
        """The first value that is not the record's; None if all are equal to the bit."""
        for step, line in sorted(self._recorded.items()):
            for key in self._shared(step, line):
                if line[key] != self.lines[step][key] and not _are_nan(line[key], self.lines[step][key]):
                    return Deviation(step, key, line[key], self.lines[step][key])
        return None

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and all of it is equal to the bit."""
        return bool(self.steps) and self.deviation is None

    @property
    def causes(self) -> list[str]:
        """What differs from the process that trained these steps, in words."""
        before = {**self.plan.run_json, **self.plan.run_json.get("continued_with", {})}
        now = provenance()
        found = [*self.differences]
        if any(
            one.get("diloco/sync_count") for one in self.plan.records if one.get("global_step", 0) <= self.plan.step
        ):
            found.append("the run took over averages of several sites (DiLoCo), which are not repeated")
        if self.plan.num_ranks != self.num_ranks:
            found.append(f"the run had {self.plan.num_ranks} ranks, this has {self.num_ranks}")
        for part, words in (
            ("versions", "{0} was {1} and is {2}"),
            ("machine", "the machine's {0} was {1} and is {2}"),
        ):
            old, new = before.get(part, {}), now.get(part, {})
            found += [
                words.format(name, old.get(name, "unknown"), new.get(name, "missing"))
                for name in old
                if old.get(name) != new.get(name)
            ]
        old, new = before.get("code", {}), now.get("code", {})
        if old and old.get("revision") != new.get("revision"):
            found.append(f"{_CODE} was at {old.get('revision', '')[:12]} and is at {new.get('revision', 'none')[:12]}")
        elif old.get("dirty") or new.get("dirty"):
            found.append(f"{_CODE} had changes that are not committed, or has some now")
        return found

    @property
    def summary(self) -> str:
        """One line: equal to the bit, or from which step on not and why."""
        if not self.steps:
            return "not compared: the run logged nothing between the checkpoint and this step"
        if (deviation := self.deviation) is None:
            first, last = self.steps[0], self.steps[-1]
            at = f"step {first}" if first == last else f"steps {first} to {last}"
            others = "; ".join(one for one in self.causes if not one.startswith(_CODE))
            although = f", although {others}" if others else ""
            return f"equal to the bit: {self.num_values} logged values of {at}{although}"
        causes = "; ".join(self.causes) or "nothing that is recorded differs: a kernel or the code of the run may"
        return f"not to the bit from step {deviation.step} on ({deviation}): {causes}"

    def _shared(self, step: int, line: Record) -> list[str]:
        mine = without_wall_clock(self.lines[step])
        return [key for key in without_wall_clock(line) if key in mine and key not in _OTHER]


def _are_nan(one: object, other: object) -> bool:
    return one != one and other != other
