"""Defines the records of rejected results, and compares and simulates them."""

from __future__ import annotations

import math
import platform
import random
from dataclasses import dataclass, fields
from enum import Enum, StrEnum

import torch
from torch import Tensor

from onstep.distributed import World
from onstep.errors import OnstepError
from onstep.training.protocols import StateDict

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
"""Restart the same command on another device: it recomputes the step."""
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
"""A result was wrong, and the fault has been located as far as possible."""


class RerunMode(StrEnum):
    """The machine's behavior."""

    DISABLED = "disabled"
    """Nothing is rerun: a rejected result raises at once if fatal, and otherwise logs a warning."""
    VALIDATE_RESULTS = "validate_results"
    """A step with a rejected result is rerun."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """Every step runs twice, and the differences are counted."""


class RerunState(Enum):
    """The state of the machine."""

    NOT_RUNNING_YET = "not_running_yet"
    INITIAL_RUN = "initial_run"
    RERUNNING_IN_PLACE = "rerunning_in_place"
    """The first rerun; also after it, if the second result was different."""
    WILL_RERUN_FROM_CHECKPOINT = "will_rerun_from_checkpoint"
    RERUNNING_FROM_CHECKPOINT = "rerunning_from_checkpoint"
    """After a restart on another device."""
    RERUNNING_AGAIN_FROM_CHECKPOINT = "rerunning_again_from_checkpoint"
    """After a restart on the same device, which gives no new information."""


class UnexpectedResultError(OnstepError, RuntimeError):
    """A result was rejected while reruns are disabled."""


class RerunDiagnostic(StrEnum):
    """The conclusion about a rejected result."""

    CORRECT_RESULT = "correct_result"
    """Another device computes the same result: not a hardware fault."""
    TRANSIENT_ERROR = "transient_error"
    """The same device computes a different result the second time."""
    PERSISTENT_ERROR = "persistent_error"
    """The same device computes the same result again, another device a different one."""


@dataclass
class Rejection:
    """A rejected result, as plain values: it is saved in checkpoints and exchanged between ranks."""

    rank: int
    device: str
    """Identity of the device: machine and accelerator."""
    iteration: int
    """Number of steps done before the one that computed it."""
    call: int
    """Index of the validation within the step on this rank."""
    value: object
    message: str
    fatal: bool
    injected: bool = False
    """Simulated."""
    difference: float | None = None
    """How far the second result was from this one; None until it is known."""
    is_reproduced: bool | None = None
    place: str = ""
    """The rank with its coordinates, if it has any."""

    @classmethod
    def from_dict(cls, values: StateDict) -> Rejection:
        """Build a rejection from these values; unknown keys, from a later version, are ignored."""
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})

    def __str__(self) -> str:
        origin = " (simulated)" if self.injected else ""
        value = self.value.item() if isinstance(self.value, Tensor) and self.value.numel() == 1 else self.value
        return (
            f"{(self.place or f'rank {self.rank}').capitalize()}, device {self.device}, iteration {self.iteration}: "
            f"Unexpected result {value} (message='{self.message}'){origin}"
        )


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of a rerun."""

    kind: RerunDiagnostic
    rejection: Rejection

    def __str__(self) -> str:
        explanation = {
            RerunDiagnostic.CORRECT_RESULT: "another device computed the same result, so the result is correct and "
            "the machine is not at fault; check data, model and hyperparameters",
            RerunDiagnostic.TRANSIENT_ERROR: "the same device computed a different result the second time: a transient "
            "error (or a nondeterministic computation)",
            RerunDiagnostic.PERSISTENT_ERROR: f"another device computed a different result, so {self.rejection.device} "
            f"has a persistent fault; take it out of service",
        }[self.kind]
        return f"{self.rejection}: {explanation}."


@dataclass
class DifferenceStats:
    """Relative differences between two runs of the same computation."""

    count: int = 0
    num_different: int = 0
    total: float = 0.0
    largest: float = 0.0

    def add(self, difference: float) -> None:
        """Count one pair of results."""
        self.count += 1
        self.num_different += int(difference != 0)
        self.total += difference
        self.largest = max(self.largest, difference)

    def __str__(self) -> str:
        mean = self.total / self.count if self.count else 0.0
        return f"{self.num_different} of {self.count} differ, mean {mean:.3g}, largest {self.largest:.3g}"


class RerunErrorInjector:
    """Simulates errors at a share `error_injection_rate` of validations (0: never), to rehearse the response.

    One error at a time: no other is simulated until the first is diagnosed. It draws from a separate generator, so the
    run's random numbers are the same as without it.
    """

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic | str = RerunDiagnostic.TRANSIENT_ERROR,
        *,
        seed: int = 0,
    ) -> None:
        self.rate = error_injection_rate
        self.kind = RerunDiagnostic(error_injection_type)
        self.is_active = False
        self._random = random.Random(seed)

    def maybe_inject(self) -> bool:
        """Whether to treat the result being validated as unexpected."""
        if self.rate < 1 or self.is_active or self._random.randrange(self.rate) != 0:
            return False
        self.is_active = True
        return True

    def maybe_miscompare(self, difference: float, *, on_other_device: bool) -> float:
        """The difference that the simulated error would show, instead of the true one."""
        is_persistent = self.kind is RerunDiagnostic.PERSISTENT_ERROR and on_other_device
        return math.inf if self.kind is RerunDiagnostic.TRANSIENT_ERROR or is_persistent else difference

    def state_dict(self) -> StateDict:
        """The simulated error, if one is active, and the state of the generator."""
        return {"is_active": self.is_active, "random": self._random.getstate()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a state that `state_dict` returned."""
        self.is_active = bool(state_dict["is_active"])
        version, words, gauss = state_dict["random"]
        self._random.setstate((version, tuple(words), gauss))


def relative_difference(first: object, second: object) -> float:
    """|a - b| / max(|a|, |b|), the largest over all elements; NaN equals NaN, infinity equals the same infinity.

    Accepts numbers or tensors of the same shape; infinity if only one of the two is finite, or if the shapes differ.
    """
    a, b = (torch.as_tensor(one).detach().to("cpu", torch.float64) for one in (first, second))
    if a.shape != b.shape:
        return math.inf
    same = (a == b) | (a.isnan() & b.isnan())
    relative = (a - b).abs() / torch.maximum(a.abs(), b.abs())
    relative = torch.where(same, 0.0, relative.nan_to_num(nan=math.inf, posinf=math.inf))
    return float(relative.max()) if relative.numel() else 0.0


def plain(result: object) -> object:
    """A result in a form that can be kept: a tensor as a copy on the host, anything else unchanged."""
    return result.detach().cpu().clone() if isinstance(result, Tensor) else result


def device_identity(world: World) -> str:
    """The hardware that this rank computes on: the machine, and the accelerator's own id if it has one."""
    host = platform.node() or "unknown host"
    if world.device.type != "cuda":
        return f"{host}/{world.device}"
    properties = torch.cuda.get_device_properties(world.device)
    return f"{host}/{getattr(properties, 'uuid', world.device)}"
