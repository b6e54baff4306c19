"""Replays a worker's journal: which steps are in the model, which were submitted, and what every merge must give."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.diloco.fault_jobs import STEP
from tests.support.diloco.fault_modes import Mode

Line = dict[str, Any]
Key = tuple[str, int, int]
"""Session, fragment and sequence number of a submission."""


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor, what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9, msg=lambda text: f"{what}: {text}")


@dataclass(frozen=True)
class Submission:
    """What a worker sent, and the numbers of the steps that it has."""

    line: Line
    steps: tuple[int, ...]
    feedback_of: Key | None = None
    """The submission whose loss by a codec is in this one."""
    is_anew: bool = False
    """Whether the worker had started over, so that it had no loss to send."""


@dataclass
class Part:
    """A fragment in the worker's model."""

    entries: Tensor
    base: Tensor
    steps: list[int] = field(default_factory=list)
    """Trained since the base."""
    pending: Submission | None = None
    lossy: tuple[Key, ...] = ()
    """Submissions of which the next one may have what a codec lost: the last, or what is in that if it is undone."""
    is_anew: bool = False
    """Whether the worker has started over since its last submission."""


class Ledger:
    """One worker in all its processes.

    Args:
        counted: the committed submissions of the worker.
        parameters: of each committed version, by fragment and number.
    """

    def __init__(self, index: int, mode: Mode, counted: set[Key], parameters: Mapping[tuple[int, int], Tensor]) -> None:
        self.index, self.mode = index, mode
        self.submissions: dict[Key, Submission] = {}
        self.seen: Counter[str] = Counter()
        self.samples: dict[int, tuple[int, int]] = {}
        """Of each step: the share, and the number in it."""
        self.given_up: set[int] = set()
        """Steps that the worker has said are lost."""
        self._counted, self._parameters = counted, parameters
        self._parts: dict[int, Part] = {}
        self._saved: dict[str, dict[int, Part]] = {}
        self._restored: dict[int, Part] = {}
        self._senders: dict[Key, list[Key]] = {}
        """Of a submission that several sessions have sent: what each has called it."""
        self._kinds: dict[str, Callable[[Line], None]] = {
            "incarnation": self._begin,
            "opened": self._open,
            "step": self._step,
            "submitted": self._submit,
            "merged": self._merge,
            "saving": self._save,
            "entries": self._end,
        }

    def replay(self, lines: Iterable[Line]) -> None:
        """Go through the journal, and check every line of it."""
        for line in lines:
            work = self._kinds.get(next(iter(line)))
            if work is not None:
                work(line)

    def left(self) -> set[int]:
        """Steps that are in the model at the end and in no version."""
        found: set[int] = set()
        for fragment, part in self._parts.items():
            pending = part.pending
            is_counted = pending is not None and _key(pending.line, fragment) in self._counted
            found.update(part.steps[len(pending.steps) :] if pending is not None and is_counted else part.steps)
        return found

    def _begin(self, line: Line) -> None:
        self._parts, self._restored = {}, {}
        if line["restored"] is not None:
            self.seen["restored"] += 1
            self._restored = copy.deepcopy(self._saved[line["restored"]])
            self.seen["restored with a pending submission"] += any(one.pending for one in self._restored.values())

    def _open(self, line: Line) -> None:
        base = tensor(line["base"])
        self._check_version(line["opened"], line["at"], base)
        restored = self._restored.get(line["opened"])
        part = Part(base.clone(), base, lossy=restored.lossy if restored else ())
        if line["kept"] == "all":
            assert restored is not None
            self.seen["restored progress kept"] += 1
            part, restored.pending = restored, None
            assert_close(part.base, base, "kept progress is of another version")
        elif line["kept"] == "in flight":
            assert restored is not None
            self.seen["restored in flight"] += 1
            part = self._sent_again(restored, line)
        self._parts[line["opened"]] = part

    def _sent_again(self, part: Part, line: Line) -> Part:
        """Its submission is that of the new session, unless the server has got it from an old one.

        That may be another than the one that made the checkpoint, if several started from it.
        """
        pending = part.pending
        assert pending is not None
        before = _key(pending.line, line["opened"])
        after = line["session"], *before[1:]
        senders = self._senders.setdefault(before, [before])
        known = next((key for key in senders if key in self._counted), None)
        if known is None:
            self.submissions[after] = replace(pending, line={**pending.line, "session": line["session"]})
            self._senders[after] = senders
            senders.append(after)
        sent = known or after
        part.pending = self.submissions[sent]
        part.lossy = tuple(sent if key == before else key for key in part.lossy)
        return part

    def _step(self, line: Line) -> None:
        self.seen["steps"] += 1
        self.samples[self.seen["steps"]] = tuple(line["sample"])
        for part in self._parts.values():
            part.entries[self.index] += STEP
            part.steps.append(self.seen["steps"])

    def _submit(self, line: Line) -> None:
        part = self._parts[line["submitted"]]
        assert_close(tensor(line["local"]), part.entries, f"submitted {line}")
        assert line["tokens"] == line["steps"] == len(part.steps), f"{len(part.steps)} steps: {line}"
        source, key = self._feedback_of(part, line["residual_before"]), _key(line, line["submitted"])
        part.pending = self.submissions[key] = Submission(line, tuple(part.steps), source, part.is_anew)
        part.is_anew = False
        part.lossy = (key,) if source is None else (key, source)

    def _feedback_of(self, part: Part, residual: Any) -> Key | None:
        if residual is None:
            return None
        return next(key for key in part.lossy if self.submissions[key].line["residual"] == residual)

    def _merge(self, line: Line) -> None:
        part, base = self._parts[line["merged"]], tensor(line["base"])
        pending = part.pending
        assert pending is not None
        self._check_version(line["merged"], line["at"], base)
        is_counted = _key(pending.line, line["merged"]) in self._counted
        assert line["is_counted"] == is_counted, f"the worker was told something else than what is committed: {line}"
        if line["now"] is None:
            assert len(part.steps) == len(pending.steps), "steps since the submission are forgotten"
        else:
            assert_close(tensor(line["now"]), part.entries, f"before {line}")
        part.entries, part.base = self._merged(part, pending, base, line), base
        assert_close(tensor(line["result"]), part.entries, f"merged {line}")
        part.steps = part.steps[len(pending.steps) :] if is_counted else part.steps
        if line["is_anew"]:
            self.given_up.update(part.steps)
            part.steps, part.is_anew = [], True
        part.pending = None
        self.seen["merges" if is_counted else "merges of dropped submissions"] += 1

    def _merged(self, part: Part, pending: Submission, base: Tensor, line: Line) -> Tensor:
        """Source of the blending: Douillard et al. 2025, algorithm 2, line 16."""
        if line["is_anew"]:
            return base.clone()
        if not line["is_counted"]:
            return base + part.entries - part.base
        if self.mode.is_blended and line["now"] is not None and not line["is_late"]:
            self.seen["blended merges"] += 1
            return self.mode.blend * part.entries + (1 - self.mode.blend) * base
        return base + part.entries - tensor(pending.line["local"])

    def _save(self, line: Line) -> None:
        assert all(
            self._parts[fragment].pending for fragment in line["pending"]
        )  # some are known by now, and not merged
        self._saved[line["saving"]] = copy.deepcopy(self._parts)

    def _end(self, line: Line) -> None:
        for fragment, part in self._parts.items():
            assert_close(tensor(line["entries"][fragment]), part.entries, "at the end")

    def _check_version(self, fragment: int, version: int, base: Tensor) -> None:
        """Every worker has of every version what the server has."""
        assert torch.equal(base, self._parameters[fragment, version]), (fragment, version)


def _key(line: Line, fragment: int) -> Key:
    return line["session"], fragment, line["sequence"]
