"""Proves that a resumed run equals the uninterrupted one, by a hash chain over each step's data, RNG and results."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import Tensor, nn

from onstep.checkpoint import RngState
from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.distributed import World
from onstep.record import MetricsLog, align, leading_records
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.protocols import StateDict, UserOptimizer
from onstep.training.stages.job import Job
from onstep.training.stages.record import learning_rate
from onstep.training.verification.fingerprint import hexadecimal, local_sums, placed_parameters

logger: logging.Logger = logging.getLogger(__name__)

Value = TypeVar("Value")

ITEMS = ("samples", "rng", "learning_rate", "loss", "weights")
"""Fields of a step's record besides its number and the chain, in the order in which differences are searched."""
CHAIN = "certificate/chain.json"
"""The trajectory hash, in the directory of a run."""
_NONE = -1
"""The bits of a NaN that no computation returns, for None."""


class HashChain:
    """The hash chain of a run. Each step's record is chained to the previous one and appended to `path` by rank 0.

    It reads the loss and a fingerprint of the weights from the device at every step: it is meant for proofs, not for
    speed. Resuming truncates the file to the steps that the checkpoint covers.

    Args:
        path: of the file; None for no file.
        world: the ranks; each of them extends its own copy of the chain.
    """

    def __init__(self, path: Path | None, world: World) -> None:
        self._path = path if world.is_main else None
        self._world = world
        self._rng = RngState(world.device)
        self.chain = ""
        """The hash over all steps so far, in hexadecimal, the same on all ranks; empty before the first."""
        self._num_records = 0
        self._metrics_log: MetricsLog | None = None

    def extend(
        self, step: int, sample_ids: object, optimizer: UserOptimizer, loss: Tensor, model: Sequence[nn.Module]
    ) -> StateDict:
        """Add the step that just ended and return its record. Collective: one sum.

        What differs between the ranks is a list in the record, with an item for each rank.
        """
        parameters, starts = placed_parameters(model)
        weights = local_sums(parameters, self._world, starts)
        rate = learning_rate(optimizer)
        mine = (
            _word(_digest(json.dumps(sample_ids).encode())),
            _word(self._rng_digest()),
            _NONE if rate is None else _bits(rate),
            _bits(float(loss)),
            weights.plain,
            weights.sharded,
            weights.boxes,
        )
        counted, of_ranks = self._exchanged(weights.counted, mine)
        samples, rng, rates, losses, plain, sharded, boxes = zip(*of_ranks, strict=True)
        record: StateDict = {
            "step": step,
            "samples": _common([hexadecimal(one) for one in samples]),
            "rng": _common([hexadecimal(one) for one in rng]),
            "learning_rate": _common([_hexadecimal_float(one) for one in rates]),
            "loss": _common([_hexadecimal_float(one) for one in losses]),
            "weights": hexadecimal(counted),
        }
        if len(set(plain)) > 1 or len(set(zip(sharded, boxes, strict=True))) > len(set(boxes)):  # replicas differ
            record["weights"] = [hexadecimal(sum(sums)) for sums in zip(plain, sharded, strict=True)]
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

    def _exchanged(self, counted: int, mine: Sequence[int]) -> tuple[int, list[list[int]]]:
        """The sum of `counted`, modulo 2^64, and the integers of each rank, by one sum over the ranks."""
        world = self._world
        sent = torch.zeros(1 + world.size * len(mine), dtype=torch.int64)
        of_ranks = sent[1:].view(world.size, len(mine))
        sent[0], of_ranks[world.rank] = counted, torch.tensor(mine)
        world.reduce(sent, dist.ReduceOp.SUM, "sum of fingerprints", world.control_group)
        return int(sent[0]), of_ranks.tolist()

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
    """Records the trajectory hash of a run, in its directory if it has one."""

    name = "certificate"
    reads_weights = True
    when = "checkpoint.certify"
    collective = True
    has_state = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        run = host.run
        path = None if run.run_dir is None else run.run_dir.path / CHAIN
        self.hash_chain = HashChain(path, run.world)

    @property
    def stateful(self) -> HashChain:
        return self.hash_chain

    def session(self) -> AbstractContextManager[object]:
        return closing(self.hash_chain)

    def begin(self) -> None:
        run = self.host.run
        if self.hash_chain.chain or run.run_dir is None or not run.world.is_main:
            return
        earlier = _chains_of_ranks(run.run_dir.path)
        if earlier and run.train_state.step:
            logger.warning(
                "the trajectory hash begins after step %d: the earlier steps have a hash for each rank, by an older "
                "version of Onstep, which %s keeps",
                run.train_state.step,
                earlier[0].parent,
            )

    def after_count(self, step: Step) -> None:
        job = self.host
        self.hash_chain.extend(step.number, step.sample_ids, job.optimizer, step.total.value(), job.model)


def _leaves(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)) and not all(isinstance(one, int) for one in value):
        for one in value:
            yield from _leaves(one)
    else:
        yield value.tobytes() if hasattr(value, "tobytes") else value


def _digest(text: bytes) -> str:
    return blake3(text).hexdigest(length=16)


def _word(digest: str) -> int:
    """The first 64 bits of a digest."""
    return int.from_bytes(bytes.fromhex(digest)[:8], "little", signed=True)


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def _hexadecimal_float(bits: int) -> str | None:
    return None if bits == _NONE else float(struct.unpack("<d", struct.pack("<q", bits))[0]).hex()


def _common(of_ranks: list[Value]) -> Value | list[Value]:
    """The value that all ranks have, or those of the ranks."""
    return of_ranks[0] if len(set(of_ranks)) == 1 else of_ranks


def hash_chains(run: Path) -> dict[int | None, Path]:
    """The files of a run's trajectory hash: one, under None, or those by rank that versions before 0.8 wrote."""
    if (run / CHAIN).exists():
        return {None: run / CHAIN}
    return {int(path.stem[5:]): path for path in _chains_of_ranks(run)}


def _chains_of_ranks(run: Path) -> list[Path]:
    found = (run / CHAIN).parent.glob("rank_*.json")
    return sorted(path for path in found if path.stem[5:].isdigit())
