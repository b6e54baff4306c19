"""Proof that a resumed run is the uninterrupted one: a hash chain over what every step took, drew, used and left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from onstep.checkpoint import RngState
from onstep.checkpoint.tensor_file import bytes_of
from onstep.journal import Journal, align
from onstep.training.feature import Feature
from onstep.training.job import Job
from onstep.training.log_step import learning_rate
from onstep.training.seams import StateDict
from onstep.training.step import Step

ITEMS = ("samples", "rng", "learning_rate", "loss", "weights")
"""What a step's record holds beside its number and the chain, in the order in which differences are looked for."""

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**31 - 1


class Certificate:
    """This rank's hash chain. Each step's record is chained to the one before and appended to `path`.

    It reads the loss and a fingerprint of the weights at every step, so a device is waited for; it is meant for proofs,
    not for speed. Resuming cuts the file to what the checkpoint covers.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self._path = path
        self._rng = RngState(device)
        self._chain = ""
        self._num_records = 0
        self._journal: Journal | None = None

    @property
    def chain(self) -> str:
        """The hash over all steps so far, as hexadecimal digits; empty before the first."""
        return self._chain

    def extend(
        self, step: int, sample_ids: Any, optimizer: Any, loss: Tensor, model: Iterable[nn.Module]
    ) -> dict[str, Any]:
        """Add the step that just ended; returns its record."""
        record: dict[str, Any] = {
            "step": step,
            "samples": _digest(json.dumps(sample_ids).encode()),
            "rng": self._rng_digest(),
            "learning_rate": _exact(learning_rate(optimizer)),
            "loss": _exact(float(loss)),
            "weights": fingerprint(parameter for chunk in model for parameter in chunk.parameters()),
        }
        self._chain = _digest((self._chain + json.dumps(record)).encode())
        record["chain"] = self._chain
        self._num_records += 1
        if self._path is not None:
            self._opened(self._path).append(record)
        return record

    def state_dict(self) -> StateDict:
        """The chain and its length."""
        return {"chain": self._chain, "num_records": self._num_records}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the chain; later records of an interrupted process are kept aside."""
        self.close()
        self._chain, self._num_records = state_dict["chain"], state_dict["num_records"]
        if self._path is not None and self._path.exists():
            align(self._path, num_records=self._num_records)

    def close(self) -> None:
        """Let go of the file; doing it twice is harmless."""
        journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()

    def _opened(self, path: Path) -> Journal:
        if self._journal is None:
            if path.exists() and self._num_records == 1:  # a run that starts anew
                align(path, num_records=0)
            self._journal = Journal.open(path)
        return self._journal

    def _rng_digest(self) -> str:
        hasher = blake3()
        for value in _leaves(self._rng.state_dict()):
            hasher.update(bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
        return hasher.hexdigest(length=8)


class TrajectoryHash(Feature[Job]):
    """Keeps this rank's certificate, in the run's folder if it has one."""

    name = "certificate"
    when = "checkpoint.certify"
    per_rank = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return host.run.cfg.checkpoint.certify

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        run = host.run
        path = None
        if run.run_folder is not None:
            path = run.run_folder.path / "certificate" / f"rank_{run.world.rank}.json"
        self.certificate = Certificate(path, run.world.device)

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.certificate.close()

    def after_count(self, step: Step) -> None:
        job = self.host
        self.certificate.extend(step.number, step.sample_ids, job.optimizer, step.total.value(), job.model)

    def state_dict(self) -> StateDict:
        """The chain and its length."""
        return self.certificate.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the chain."""
        self.certificate.load_state_dict(state_dict)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A digest of the tensors' bits that differs, but for chance, where any bit does; one read of a device."""
    hasher, sums = blake3(), []
    for tensor in tensors:
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


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)) and not all(isinstance(one, int) for one in value):
        for one in value:
            yield from _leaves(one)
    elif hasattr(value, "tobytes"):
        yield value.tobytes()
    else:
        yield value


def _exact(value: float | None) -> str | None:
    return None if value is None else float(value).hex()


def _digest(text: bytes) -> str:
    return blake3(text).hexdigest(length=16)
