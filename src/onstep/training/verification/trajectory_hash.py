"""Proves that a resumed run equals the uninterrupted one, by a hash chain over each step's data, RNG and results.

`first_difference` compares the chains of two runs, for `onstep verify-resume`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor, nn

from onstep.checkpoint import RngState
from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.distributed.shards import local_part
from onstep.record import MetricsLog, Record, align, leading_records, read_records, without_wall_clock
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict, UserOptimizer
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.job import Job
from onstep.training.stages.record import learning_rate

logger: logging.Logger = logging.getLogger(__name__)

ITEMS = ("samples", "rng", "learning_rate", "loss", "weights")
"""Fields of a step's record besides its number and the chain, in the order in which differences are searched."""
ABSENT = "nothing"
_NO_RECORD: Record = {}
_MODEL_CARD = "README.md"
"""Describes a run beside its weights, also by seconds, which differ between equal runs."""

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**31 - 1


class HashChain:
    """This rank's hash chain. Each step's record is chained to the previous one and appended to `path`.

    It reads the loss and a fingerprint of the weights from the device at every step: it is meant for proofs, not for
    speed. Resuming truncates the file to the steps that the checkpoint covers.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        self._rng = RngState(device)
        self.chain = ""
        """The hash over all steps so far, in hexadecimal; empty before the first."""
        self._num_records = 0
        self._metrics_log: MetricsLog | None = None

    def extend(
        self, step: int, sample_ids: object, optimizer: UserOptimizer, loss: Tensor, model: Iterable[nn.Module]
    ) -> StateDict:
        """Add the step that just ended and return its record."""
        record: StateDict = {
            "step": step,
            "samples": _digest(json.dumps(sample_ids).encode()),
            "rng": self._rng_digest(),
            "learning_rate": _exact(learning_rate(optimizer)),
            "loss": _exact(float(loss)),
            "weights": fingerprint(parameter for chunk in model for parameter in chunk.parameters()),
        }
        self.chain = _digest((self.chain + json.dumps(record)).encode())
        record["chain"] = self.chain
        self._num_records += 1
        if self._path is not None and self._metrics_log is None:
            if self._path.exists() and self._num_records == 1:  # a run that starts from scratch
                align(self._path, num_records=0)
            self._metrics_log = MetricsLog.open(self._path)
        if self._metrics_log is not None:
            self._metrics_log.append(record)
        return record

    def state_dict(self) -> StateDict:
        """The chain's current hash and its length."""
        return {"chain": self.chain, "num_records": self._num_records}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the chain; later records of an interrupted process are set aside."""
        self.close()
        self.chain, self._num_records = state_dict["chain"], state_dict["num_records"]
        if self._path is not None and self._path.exists():
            num_found = len(leading_records(self._path))
            if num_found < self._num_records:
                logger.warning(
                    "%s has lost %d of the %d records that the checkpoint covers, in a power failure or to an older "
                    "copy of the file; the chain of hashes is not affected",
                    self._path,
                    self._num_records - num_found,
                    self._num_records,
                )
            align(self._path, num_records=self._num_records)

    def make_durable(self) -> None:
        """Fsync the file."""
        if self._metrics_log is not None:
            self._metrics_log.sync()

    def close(self) -> None:
        """Close the file; calling it twice is harmless."""
        metrics_log, self._metrics_log = self._metrics_log, None
        if metrics_log is not None:
            metrics_log.close()

    def _rng_digest(self) -> str:
        hasher = blake3()
        for value in _leaves(self._rng.state_dict()):
            hasher.update(bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
        return hasher.hexdigest(length=8)


class TrajectoryHash(Feature[Job]):
    """Records this rank's trajectory hash, in the run's directory if it has one."""

    name = "certificate"
    when = "checkpoint.certify"
    per_rank = True
    has_state = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        run = host.run
        directory = None if run.run_dir is None else run.run_dir.path / "certificate"
        path = None if directory is None else directory / f"rank_{run.world.rank}.json"
        self.hash_chain = HashChain(path, run.world.device)

    @property
    def stateful(self) -> HashChain:
        return self.hash_chain

    def session(self) -> AbstractContextManager[object]:
        return closing(self.hash_chain)

    def after_count(self, step: Step) -> None:
        job = self.host
        self.hash_chain.extend(step.number, step.sample_ids, job.optimizer, step.total.value(), job.model)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of the tensors, or of this rank's shards of them; reads the device once.

    Any differing bit changes it, barring collisions.
    """
    hasher, sums = blake3(), []
    for tensor in map(local_part, tensors):
        if tensor.device.type == "cpu":
            hasher.update(bytes_of(tensor))
        else:
            sums.append(_sums(tensor))
    if sums:
        hasher.update(bytes_of(torch.stack(sums).cpu()))
    return hasher.hexdigest(length=8)


def _sums(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words, and the sum weighted by position, as integers on its device."""
    flat = tensor.detach().contiguous().view(_AS_INTEGER[tensor.element_size()]).flatten().to(torch.int64)
    weights = torch.arange(1, flat.numel() + 1, device=flat.device) % _MODULUS
    return torch.stack([flat.sum(), (flat * weights).sum()])


def _leaves(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)) and not all(isinstance(one, int) for one in value):
        for one in value:
            yield from _leaves(one)
    else:
        yield value.tobytes() if hasattr(value, "tobytes") else value


def _exact(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _digest(text: bytes) -> str:
    return blake3(text).hexdigest(length=16)


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    item: str
    """One of `ITEMS`, or a description of what else was compared."""
    left: str
    right: str
    step: int | None = None
    """None if it concerns the whole run."""
    rank: int | None = None
    """None if it does not belong to a single rank."""

    def __str__(self) -> str:
        places = (("step", self.step), ("rank", self.rank))
        where = ", ".join(f"{name} {number}" for name, number in places if number is not None)
        return f"{where}{': ' if where else ''}{self.item} differs, {self.left} and {self.right}"


def first_difference(left: Path, right: Path) -> Difference | None:
    """The first difference between the runs in two directories, both run with `checkpoint.certify`; None if equal.

    Compares the trajectory hashes of all ranks (earliest step first, then by rank), the final weights (not their
    model card, which tells seconds), and the metrics logs without their wall-clock fields.

    Raises:
        FileNotFoundError: if the first directory has no trajectory hash.
    """
    ours, theirs = hash_chains(left), hash_chains(right)
    if not ours:
        raise FileNotFoundError(f"{left} has no trajectory hash; run it with checkpoint.certify=true.")
    found = []
    for rank in sorted({*ours, *theirs}):
        records = (read_records(one[rank]) if rank in one else [] for one in (ours, theirs))
        difference = _difference_of_rank(rank, *records)
        if difference is not None:
            found.append(difference)
    if found:
        return min(found, key=lambda one: (one.step or 0, one.rank or 0))
    return _weights_difference(left, right) or _metrics_log_difference(left, right)


def hash_chains(run: Path) -> dict[int, Path]:
    """The trajectory hash files of a run, by rank."""
    found = (run / "certificate").glob("rank_*.json")
    return {int(path.stem.partition("_")[2]): path for path in sorted(found) if path.stem[5:].isdigit()}


def _difference_of_rank(rank: int, ours: list[Record], theirs: list[Record]) -> Difference | None:
    """The first step, and in it the first item, where two trajectory hashes differ."""
    for one, other in zip_longest(ours, theirs, fillvalue=_NO_RECORD):
        step = int((one or other)["step"])
        if not (one and other):
            left, right = (f"step {step}" if each else ABSENT for each in (one, other))
            return Difference("the number of steps", left, right, step, rank)
        for item in ("step", *ITEMS, "chain"):
            if one.get(item) != other.get(item):
                return Difference(
                    item, _value_text(item, one.get(item)), _value_text(item, other.get(item)), step, rank
                )
    return None


def _value_text(item: str, value: object) -> str:
    """A float in readable form next to its exact hexadecimal form; digests unchanged."""
    if item in ("loss", "learning_rate") and isinstance(value, str):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def _weights_difference(left: Path, right: Path) -> Difference | None:
    digests = [_digests(RunDir(run).model) for run in (left, right)]
    for name in sorted({*digests[0], *digests[1]}):
        ours, theirs = (one.get(name, ABSENT) for one in digests)
        if ours != theirs:
            return Difference(f"the final weights' file {name}", ours, theirs)
    return None


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.glob("*") if path.is_file() and path.name != _MODEL_CARD)
    return {path.name: blake3(path.read_bytes()).hexdigest(length=16) for path in files}


def _metrics_log_difference(left: Path, right: Path) -> Difference | None:
    metrics_logs = [RunDir(run).metrics_log for run in (left, right)]
    ours, theirs = ([without_wall_clock(one) for one in read_records(path)] for path in metrics_logs)
    for one, other in zip_longest(ours, theirs, fillvalue=_NO_RECORD):
        for key in one | other:
            texts = [json.dumps(each[key]) if key in each else ABSENT for each in (one, other)]
            if texts[0] != texts[1]:
                step = one.get("global_step", other.get("global_step"))
                return Difference(f"{key} in the metrics log", texts[0], texts[1], step)
    return None
