"""Defines the requests of workers and the replies of a server.

A run's parameters are divided into fragments (one, unless streaming), and each fragment has versions: 0 is what the
server started with, and every outer step on the fragment makes the next one. A round leads from one version of a
fragment to the next. Tensors travel beside these messages, as the body of a submission or of a reply.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

PROTOCOL_VERSION = 2
"""Incremented by every incompatible change."""
STALENESS = {"sync": 1, "async": 8}
"""Rounds by which a submission may be late, by default, in each mode."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the model as it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in safetensors: F32, BF16, F64, ..."""


def averaged_dtype(dtype: str) -> str:
    """The dtype in which a parameter is averaged: a worker may train in bfloat16 what another trains in float32."""
    return "F64" if dtype == "F64" else "F32"


def first_difference(ours: Sequence[ParameterSpec], theirs: Sequence[ParameterSpec]) -> str | None:
    """First parameter, by name, in which two models differ, with what each has; None if there is none."""
    left, right = ({spec.name: spec for spec in specs} for specs in (ours, theirs))
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if one is None or other is None or fingerprint([one]) != fingerprint([other]):
            return f"{name}: {_described(left.get(name))} at the server, {_described(right.get(name))} at the worker"
    return None


def _described(spec: ParameterSpec | None) -> str:
    return f"{spec.dtype}{list(spec.shape)}" if spec else "missing"


def fingerprint(specs: Sequence[ParameterSpec]) -> str:
    """A hash that is equal for models whose parameters have the same names, shapes and averaging dtypes."""
    text = json.dumps(sorted([spec.name, list(spec.shape), averaged_dtype(spec.dtype)] for spec in specs))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run, decided by the server and sent at registration."""

    mode: Literal["sync", "async"] = "sync"
    num_workers: int = 1
    min_workers: int = 1
    """The quorum: a round never commits with fewer contributors. Asynchronous mode has no quorum."""
    sync_every: int = 500
    """Optimizer steps between two submissions of the same fragment."""
    num_fragments: int = 1
    codec: str = "fp32"
    """Of updates that the server sends, and of submissions from workers that choose none."""
    dylu: bool = False
    """Whether slower workers are asked to do fewer steps a round."""
    blend: float = 0.5
    """Share of the local parameters in the merge after a fragment that was in flight (alpha of Streaming DiLoCo)."""
    overlap_steps: int | None = None
    """Steps of a worker between a submission and the merge of its result (tau of Streaming DiLoCo). None: until
    the result is there, at most until the next submission; and none with one fragment that is not eager."""
    eager: bool = False
    """Whether a worker applies its own pseudo-gradient at once, and the average once it is there (Eager Updates)."""
    max_staleness: int = STALENESS["sync"]
    """A submission that is late by more rounds than this is dropped, and its worker starts over."""
    heartbeat_timeout: float = 120.0
    """Seconds of silence after which a worker is evicted; 0 for never."""
    initial_deadline: float = 600.0
    """Seconds that a round with a quorum waits for the other workers before any round has been observed."""
    patience: float = 2.0
    """A round lasts at most this many times as long as it took to reach the quorum, plus a little slack; at least 1."""

    @property
    def is_overlapped(self) -> bool:
        """Whether training continues while a fragment is in flight."""
        return self.num_fragments > 1 or self.overlap_steps is not None or self.eager

    @classmethod
    def with_quorum(
        cls, num_workers: int, mode: Literal["sync", "async"] = "sync", min_workers: int | None = None, **others: Any
    ) -> Settings:
        """The settings whose quorum is more than half of the expected workers, unless it is given.

        In asynchronous mode, work may be older by default: that of a slow worker is old without any absence.
        """
        quorum = 1 if mode == "async" else num_workers // 2 + 1
        if mode in STALENESS:  # who reads the settings refuses any other
            others.setdefault("max_staleness", STALENESS[mode])
        return cls(mode, num_workers, quorum if min_workers is None else min_workers, **others)


@dataclass(frozen=True, slots=True)
class Register:
    """Join the run, or rejoin it."""

    worker_id: str
    session: str
    """Random, new for every start of a worker. The newest session of an id replaces the one before it, whose requests
    are then refused."""
    fingerprint: str
    protocol_version: int = PROTOCOL_VERSION
    hostname: str = ""
    sync_every: int | None = None
    num_fragments: int | None = None
    """If given, it must be the server's."""
    step: int = 0
    """Optimizer steps that this worker has taken."""
    offer: int = 0
    """Number from the answer to an earlier registration, to accept it; 0 to ask."""
    resumes_at: int | None = None
    """First sequence number of fragment 0 after the restored state; None for a worker without one."""
    details: dict[str, object] = field(default_factory=dict)
    """What else the worker says of itself, for the status: JSON-safe."""
    kept_steps: int = 0
    """Those of `step` that an earlier session could not submit, and this one will."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The worker is a member."""

    run_id: str
    settings: Settings
    versions: tuple[int, ...]
    """Newest version of each fragment."""
    slot: int
    """The worker's share of the data: samples `i` with `i % num_slots == slot`; the same when it comes back."""
    num_slots: int
    step: int
    """Optimizer steps of the run so far: where a joiner's learning-rate schedule continues."""
    next_sequences: tuple[int, ...] = ()
    """First sequence number of each fragment that is unknown to the server."""
    offer: int = 0
    """If not 0, nothing has changed yet, because the id has another session: register again with this number to replace
    it. (A delayed registration of a process that is dead by now is never followed by a second one.)"""
    slot_steps: int = 0
    """Optimizer steps submitted from this share of the data so far: where its data continues."""
    command_number: int = 0
    """Number of the newest command for workers: earlier ones are not for a session that begins now."""
    has_share: bool = True
    """Whether the share is this worker's alone; False if all shares are taken, so that another worker has it, too."""
    outer_lr: float = 0.0
    """Of the outer optimizer, for eager updates; 0 without them."""
    outer_momentum: float = 0.0
    incumbent: dict[str, object] = field(default_factory=dict)
    """With an offer, the session that has the id, if it is registered: `machine`, `pid`, `started_at` and
    `silent_seconds`."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A pseudo-gradient of one fragment; its tensors are the body. Sent again, it counts once."""

    worker_id: str
    session: str
    sequence: int
    """Numbers the submissions of a worker and fragment, through all its sessions: 0, 1, 2, ..."""
    fragment: int
    base_version: int
    """The version that the oldest work in it began from; the worker's parameters were subtracted from those of this
    version, or of a later one."""
    tokens: int
    """Tokens (or samples, or steps: the same unit for all workers) behind it, its weight in the average; > 0."""
    steps: int
    """Optimizer steps that led to it."""
    codec: str = "fp32"
    loss: float | None = None
    """Mean over its tokens; None if the worker does not know it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The submission counts, or counted already if it was sent again."""

    version: int
    """The version that contains or will contain it."""
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class Dropped:
    """The submission is valid and does not count; the worker continues from the newest version."""

    reason: str
    version: int
    """Newest version of the fragment."""
    is_anew: bool = False
    """Whether the worker gives up its own progress, and continues from the newest version as it is."""


@dataclass(frozen=True, slots=True)
class Await:
    """Ask for a version of a fragment that might not exist yet. Repeated until the answer is Ready."""

    worker_id: str
    session: str
    fragment: int
    version: int
    """The oldest version that will do."""
    have_version: int | None = None
    """The version that the worker has, so that an update may be sent; None for whole parameters."""
    sequence: int | None = None
    """Sequence number of the submission that the worker waits for. If given, Ready means that it was counted."""
    wait: float = 0.0
    """Seconds that the server may take before it answers NotYet."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The newest version of a fragment; its tensors are the body."""

    fragment: int
    version: int
    kind: Literal["update", "full"]
    """Whether the body is to be added to the version before, or is the parameters themselves."""
    codec: str = "fp32"
    digest: str = ""
    """Hash of the version's parameters, equal on all workers."""
    num_contributors: int = 0
    """Workers whose submissions the version contains."""
    command_number: int = 0
    """Number of the newest command for workers: one that has an older one asks for it at once, by a heartbeat."""
    outer_lr: float | None = None
    """Of the outer optimizer now, for eager updates; None without them."""
    outer_momentum: float | None = None


@dataclass(frozen=True, slots=True)
class NotYet:
    """The version does not exist yet."""

    version: int
    """Newest version of the fragment."""
    is_pending: bool = True
    """Whether the submission that was asked about is in a round. If not, the server that accepted it died before the
    round was committed: send it again."""
    missing: tuple[str, ...] = ()
    """Some of the registered workers without a submission in the round, by name."""
    num_arrived: int = 0
    """Workers with one."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker is alive."""

    worker_id: str
    session: str
    steps_per_second: float = 0.0
    step: int = 0
    command_number: int = 0
    """Number of the newest command that this worker has received."""
    lost_steps: int = 0
    """Steps that this session has given up and not submitted, because they began from a version that was too old."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The server knows that the worker is alive."""

    versions: tuple[int, ...]
    num_registered: int
    recommended_sync_every: int | None = None
    command_number: int = 0
    """Number of the newest command for workers."""
    commands: tuple[str, ...] = ()
    """The newest commands, those that the worker has not received: the last has the number `command_number`."""


@dataclass(frozen=True, slots=True)
class Deregister:
    """Leave the run."""

    worker_id: str
    session: str
    step: int | None = None
    """Optimizer steps that this worker has taken; None if it does not say."""
    lost_steps: int = 0
    """As in `Heartbeat`."""
    reason: str = ""
    """Why it leaves, in words."""


@dataclass(frozen=True, slots=True)
class Left:
    """The worker is not a member."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The request is refused; repeating it will not help, except with status 503."""

    status: int
    """Of HTTP: 400 malformed, 401 token, 404 unknown worker (register again), 409 another worker has the id, or another
    session replaced this one, 413 too large, 422 another model or invalid tensors, 503 not now."""
    error: str
    details: dict[str, object] = field(default_factory=dict)


Request = Register | Submit | Await | Heartbeat | Deregister
Reply = Registered | Accepted | Dropped | Ready | NotYet | Beat | Left | Refused
