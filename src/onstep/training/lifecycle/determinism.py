"""Makes torch compute with deterministic algorithms only for the time of a run: `train.deterministic`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch

from onstep.errors import ConfigError
from onstep.training.feature import Feature
from onstep.training.run import Run

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""The settings of cuBLAS by which products do not depend on its choice of a workspace. Source: NVIDIA's cuBLAS
documentation, "Results reproducibility"."""
VARIABLES = {CUBLAS: DETERMINISTIC_WORKSPACES[0], "FLASH_ATTENTION_DETERMINISTIC": "1"}
"""Environment variables by which libraries other than torch choose deterministic algorithms."""

_REFUSAL = "does not have a deterministic implementation"
"""In torch's error at an operation for which it has no deterministic algorithm."""


class Determinism(Feature[Run]):
    """Deterministic algorithms only: the same bits from the same numbers, in every process on the same hardware."""

    name = "deterministic"
    when = "train.deterministic"

    def session(self) -> AbstractContextManager[object]:
        return only_deterministic(self.host.world.device)


@contextmanager
def only_deterministic(
    device: torch.device, multiply: Callable[[torch.device], object] | None = None
) -> Iterator[None]:
    """Context in which torch uses deterministic algorithms only, or raises; afterwards all is as it was.

    Torch's strict mode makes the backward passes of flash and memory-efficient attention deterministic (`warn_only`
    does not), leaves out cuDNN's attention, and keeps inductor from choosing kernels by their time.

    Args:
        device: where the run computes.
        multiply: computes a product there, which tells whether cuBLAS was set in time; None is torch's own.

    Raises:
        ConfigError: if cuBLAS started in this process with another setting.
    """
    set_variables = _variables_to_set()
    cudnn: Any = torch.backends.cudnn
    memory: Any = import_module("torch.utils.deterministic")
    inductor: Any = import_module("torch._inductor.config")
    is_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.deterministic, cudnn.benchmark, inductor.deterministic, memory.fill_uninitialized_memory
    os.environ.update(set_variables)
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark = True, False
        memory.fill_uninitialized_memory = False  # what is read before it is written is an error of its own
        _check_products(device, multiply or _product)
        try:
            yield
        except RuntimeError as error:
            if _REFUSAL in str(error):
                error.add_note(
                    "train.deterministic=true allows no such operation: replace it, or set train.deterministic=false."
                )
            raise
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark, inductor.deterministic, filled = before
        memory.fill_uninitialized_memory = filled
        for name in set_variables:
            os.environ.pop(name, None)


def _variables_to_set() -> dict[str, str]:
    """The variables that the environment lacks.

    Raises:
        ConfigError: if it has a value of cuBLAS's that is not deterministic.
    """
    given = os.environ.get(CUBLAS)
    if given is not None and given not in DETERMINISTIC_WORKSPACES:
        raise ConfigError(
            f"train.deterministic=true requires ${CUBLAS} to be {' or '.join(DETERMINISTIC_WORKSPACES)}, got "
            f"{given!r}; unset it, or set train.deterministic=false."
        )
    return {name: value for name, value in VARIABLES.items() if name not in os.environ}


def _check_products(device: torch.device, multiply: Callable[[torch.device], object]) -> None:
    """Raise where torch refuses products, because cuBLAS has read its environment before this run (ConfigError)."""
    if device.type != "cuda":
        return
    try:
        multiply(device)
    except RuntimeError as error:
        if CUBLAS not in str(error):
            raise
        raise ConfigError(
            f"train.deterministic=true requires ${CUBLAS} before the first product on a GPU, and this process has "
            f"computed one without it; start it with {CUBLAS}={DETERMINISTIC_WORKSPACES[0]} in its environment, or "
            f"train before anything else computes on the GPU."
        ) from error


def _product(device: torch.device) -> object:
    return torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
