"""What must hold after any fault, computed again from what the processes have written down."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onstep.diloco.outer import LEARNING_RATE, MOMENTUM
from tests.support.diloco.fault_jobs import STEP
from tests.support.diloco.fault_ledger import Key, Ledger, Line, Submission, assert_close, tensor
from tests.support.diloco.fault_modes import Mode

EIGHT_BITS = 127
"""The largest level of int8."""


@dataclass(frozen=True)
class Version:
    """A committed round: what was in it, and what the server had afterwards."""

    fragment: int
    number: int
    contributions: Sequence[Line]
    written: Line
    is_mean: bool = False


def committed(lines: Sequence[Line]) -> list[Version]:
    """The rounds that were committed, in order: of each version, the one that reached the disk."""
    found: dict[tuple[int, int], Version] = {}
    open_rounds: dict[int, Version] = {}

    def commit(fragment: int) -> None:
        version = open_rounds.pop(fragment)
        assert version.written, "a version was committed and never written"
        assert (fragment, version.number) not in found, "a version was committed twice"
        found[fragment, version.number] = version

    for line in lines:
        fragment = line.get("fragment", 0)
        if "closing" in line:
            open_rounds[fragment] = Version(fragment, line["closing"], line["contributions"], {}, line["is_mean"])
        elif "writing" in line:
            open_rounds[fragment].written.update(line)
        elif "persisted" in line:
            commit(fragment)
        elif "started" in line:  # after a kill: what has reached the disk by then counts
            for one in [one for one in open_rounds.values() if line["started"][one.fragment] >= one.number]:
                commit(one.fragment)
            open_rounds.clear()
    return [found[key] for key in sorted(found)]


@dataclass
class Check:
    """A run that has ended.

    - Of each version of a fragment, all workers have the parameters that the server wrote, bit for bit.
    - No submission and no step is in two versions, and no version is below the quorum.
    - A submission has what its worker trained since its base, and its weight is that of the rule; what int8 lost of it
      is in the next one, once.
    - The server's parameters are what the outer optimizer makes of the weighted averages.
    - What a worker continues from is the version and its progress since, added or blended; see `Ledger`.
    - No sample of the data is in two steps that count (in submissions of fragment 0, by which steps are counted).
    - The steps of a worker that are counted, and those that it still has, are all that it took. (Of a worker that was
      killed or left, some are lost.)
    """

    mode: Mode
    num_workers: int
    min_workers: int
    server: Sequence[Line]
    workers: Mapping[int, Sequence[Line]]
    lossy: frozenset[int] = frozenset()
    """Workers of which a process was killed or left: what they trained since their last submission is lost."""
    counts: Counter[str] = field(default_factory=Counter)
    _samples: set[tuple[int, int]] = field(default_factory=set)
    """Of the steps that count."""

    def run(self) -> Counter[str]:
        """Check everything; the counts."""
        versions = committed(self.server)
        self._check_rounds(versions)
        parameters = {(one.fragment, one.number): tensor(one.written["parameters"]) for one in versions}
        for fragment in range(self.mode.num_fragments):
            parameters[fragment, 0] = torch.zeros(self.num_workers, len(STEP), dtype=torch.float64)
            self._check_parameters([one for one in versions if one.fragment == fragment], parameters)
        self._check_end(parameters)
        self._check_digests(versions)
        for index in self.workers:
            self._check_worker(index, versions, parameters)
        self._check_losses()
        return self.counts

    def _check_losses(self) -> None:
        """The server names all lost steps but those that killed processes took after they had told it of their last."""
        end = next(line for line in reversed(self.server) if "ended" in line)
        named, lost = sum(end["lost"].values()), self.counts["steps_lost"]
        starts = [line["time"] for line in self.server if "started" in line]
        untold = sum(steps_untold(lines, starts) for lines in self.workers.values())
        self.counts.update({f"named: {reason}": steps for reason, steps in end["lost"].items()})
        self.counts.update(lost_steps_unnamed=lost - named, lost_steps_untold=untold)
        assert lost - named <= untold, f"{lost - named} lost steps without a name, of {untold} unknown to the server"

    def _check_rounds(self, versions: Sequence[Version]) -> None:
        for fragment in range(self.mode.num_fragments):
            numbers = [one.number for one in versions if one.fragment == fragment]
            assert numbers == list(range(1, len(numbers) + 1))
        identities = [
            (part["worker"], one.fragment, part["sequence"]) for one in versions for part in one.contributions
        ]
        assert len(set(identities)) == len(identities), "counted twice"
        for one in versions:
            quorum = 1 if self.mode.is_async else self.min_workers
            assert len({part["worker"] for part in one.contributions}) >= quorum, "a minority committed"
            if not self.mode.is_async:
                self._check_weights(one)
        self.counts.update(rounds=len(versions), contributions=len(identities))

    def _check_weights(self, version: Version) -> None:
        """Late work has at most the mean of the other workers' tokens, divided by its age."""
        tokens: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        for part in version.contributions:
            tokens[part["base"] < version.number - 1][part["worker"]] += part["tokens"]
        late, fresh = tokens[True], tokens[False]
        most = sum(fresh.values()) / len(fresh) if fresh else min(late.values(), default=0)
        for part in version.contributions:
            staleness = version.number - 1 - part["base"]
            share = min(1.0, most / late[part["worker"]]) if staleness else 1.0
            assert math.isclose(part["weight"], part["tokens"] * share / (1 + staleness)), part
            length = min(1.0, self.mode.sync_every / part["steps"]) if staleness else 1.0
            assert math.isclose(part["scale"], length), part
            self.counts["late contributions"] += staleness > 0

    def _check_parameters(self, versions: Sequence[Version], parameters: Mapping[tuple[int, int], Tensor]) -> None:
        """That of one fragment, after every version."""
        masters = torch.zeros(self.num_workers, len(STEP), dtype=torch.float64, requires_grad=True)
        outer = _DelayedNesterov(masters, self.mode.dn_buffer_size) if self.mode.is_async else _torchs(masters)
        for one in versions:
            before = masters.detach().clone()
            masters.grad = _average(one.contributions, one.is_mean)
            if one.is_mean:
                masters = (before - masters.grad).requires_grad_()
                outer = _torchs(masters)
                self.counts["means after an outage"] += 1
            else:
                outer.step()
            assert_close(tensor(one.written["masters"]), masters.detach(), f"version {one.number}")
            known = parameters[one.fragment, one.number - 1]
            missed = masters.detach() - known
            lost = masters.detach() - parameters[one.fragment, one.number]
            assert lost.abs().max() <= self._most_lost(missed), f"version {one.number}, from {before}"

    def _most_lost(self, wanted: Tensor) -> float:
        """By a codec, of any element: half a level, and what float32 loses of a scale."""
        return 1e-9 if self.mode.is_exact else float(wanted.abs().max()) * (0.5 / EIGHT_BITS + 1e-6)

    def _check_end(self, parameters: Mapping[tuple[int, int], Tensor]) -> None:
        end = next(line for line in reversed(self.server) if "ended" in line)
        for fragment, number in enumerate(end["ended"]):
            assert torch.equal(tensor(end["parameters"][fragment]), parameters[fragment, number])

    def _check_digests(self, versions: Sequence[Version]) -> None:
        digests: dict[tuple[int, int], set[str]] = defaultdict(set)
        for one in versions:
            digests[one.fragment, one.number].add(one.written["digest"])
        for lines in self.workers.values():
            for line in lines:
                for fragment, number in enumerate(line.get("versions", ())):
                    digests[fragment, number].add(line["digests"][fragment])
                    self.counts["compared_digests"] += 1
        differ = [key for key, some in digests.items() if len(some) > 1]
        assert not differ, f"workers or the server differ: {differ}"

    def _check_worker(
        self, index: int, versions: Sequence[Version], parameters: Mapping[tuple[int, int], Tensor]
    ) -> None:
        mine = [
            (_key(part, one.fragment), part)
            for one in versions
            for part in one.contributions
            if part["worker"] == f"w{index}"
        ]
        ledger = Ledger(index, self.mode, {key for key, _ in mine}, parameters)
        ledger.replay(self.workers[index])
        left, counted, whole = ledger.left(), set[int](), set[int]()
        for fragment in range(self.mode.num_fragments):
            parts = [(ledger.submissions[key], part) for key, part in mine if key[1] == fragment]
            numbers = [step for submission, _ in parts for step in submission.steps]
            assert len(set(numbers)) == len(numbers), f"w{index}: steps counted twice"
            assert index in self.lossy or set(numbers) | left | ledger.given_up == set(
                range(1, ledger.seen["steps"] + 1)
            ), "steps lost"
            counted.update(numbers)
            whole = set(numbers) if fragment == 0 else whole
            for submission, part in parts:
                self._check_difference(index, submission, part, parameters[fragment, submission.line["relative_to"]])
            self._check_feedback([submission for submission, _ in parts], is_complete=index not in self.lossy)
        samples = [ledger.samples[step] for step in sorted(whole)]
        twice = self._samples.intersection(samples)
        assert not twice, f"samples of w{index} that counted before: {sorted(twice)}"
        assert len(set(samples)) == len(samples), f"samples of w{index} counted twice"
        self._samples.update(samples)
        lost = len(set(ledger.samples) - whole - left)
        self.counts.update(ledger.seen | Counter(steps_counted=len(counted), steps_lost=lost))

    def _check_difference(self, index: int, submission: Submission, part: Line, base: Tensor) -> None:
        line, difference = submission.line, tensor(part["difference"])
        assert all(line[name] == part[name] for name in ("base", "tokens", "steps")), (line, part)
        wanted = base - tensor(line["local"])
        if not self.mode.is_blended:
            assert_close(wanted[index], -len(submission.steps) * STEP, f"w{index} submitted {line}")
        if self.mode.is_exact:
            assert_close(difference, wanted, f"w{index} submitted {line}")
            return
        wanted = wanted + _residual(line["residual_before"], wanted)
        lost = _residual(line["residual"], wanted)
        assert lost.abs().max() <= self._most_lost(wanted), line
        assert_close(difference + lost, wanted, f"w{index} submitted {line}")
        self.counts["residuals"] += 1

    def _check_feedback(self, submissions: Sequence[Submission], *, is_complete: bool) -> None:
        """What was lost of a counted submission is in one later counted submission at most; in the next one."""
        used = [one.feedback_of for one in submissions if one.feedback_of is not None]
        assert len(set(used)) == len(used), "what a codec lost was sent twice"
        counted = {(one.line["session"], one.line["submitted"], one.line["sequence"]) for one in submissions}
        assert counted.issuperset(used), "what was lost of work that is sent again was sent, too"
        if is_complete and submissions:
            lost = [
                None if after.is_anew else before.line["residual"] for before, after in itertools.pairwise(submissions)
            ]
            lost.insert(0, None)
            assert [one.line["residual_before"] for one in submissions] == lost, "what a codec lost was not sent"


def steps_untold(lines: Iterable[Line], starts: Sequence[float]) -> int:
    """Steps of a worker's ended processes after their last merge, and after their last heartbeat that the server knew.

    Args:
        lines: the worker's journal.
        starts: when the server was started; of what a heartbeat told it before, it may know nothing.
    """
    untold = steps = submitted = merged = 0
    beats = list[Line]()
    for line in lines:
        if line.get("opened") == 0:
            last_start = max(start for start in starts if start <= line["time"])
            told = max((beat["told"] for beat in beats if beat["time"] > last_start), default=0)
            untold += steps - max(told, merged)
            steps, submitted, merged, beats = 0, 0, 0, []
        elif "step" in line:
            steps += 1
        elif line.get("submitted") == 0:
            submitted = steps
        elif line.get("merged") == 0:
            merged = submitted
        elif "told" in line:
            beats.append(line)
    return untold


def _key(part: Line, fragment: int) -> Key:
    return part["session"], fragment, part["sequence"]


def _residual(values: Any, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if values is None else tensor(values)


def _average(contributions: Sequence[Line], is_mean: bool) -> Tensor:
    weights = tensor([part["weight"] for part in contributions])
    differences = tensor([part["difference"] for part in contributions])
    scales = tensor([1.0 if is_mean else part["scale"] for part in contributions])
    return torch.einsum("c,cij->ij", scales * weights / weights.sum(), differences)


def _torchs(parameter: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter], lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)


class _DelayedNesterov:
    """Liu et al. 2024, algorithm 3, with c = 0."""

    def __init__(self, parameter: Tensor, size: int) -> None:
        self._parameter, self._size = parameter, size
        self._momentum = torch.zeros_like(parameter.detach())
        self._received: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        gradient = self._parameter.grad
        assert gradient is not None
        self._received.append(gradient)
        self._parameter -= LEARNING_RATE / self._size * gradient
        if len(self._received) % self._size == 0:
            self._momentum = MOMENTUM * self._momentum + torch.stack(self._received[-self._size :]).mean(0)
            self._parameter -= LEARNING_RATE * MOMENTUM * self._momentum
