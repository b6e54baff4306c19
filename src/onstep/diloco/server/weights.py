"""Writes the parameters as checkpoints for other programs: `checkpoints/checkpoint-<rounds>/model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onstep.checkpoint import CheckpointManager, Retention, SaveRequest, SharingPattern, StateComponent
from onstep.distributed import World


class WeightFiles:
    """The checkpoints of one server.

    Args:
        directory: where they go.
        run_id: recorded in them.
        most_recent: how many are kept; -1 for all.
    """

    def __init__(self, directory: Path, run_id: str, most_recent: int) -> None:
        self._retention = Retention(most_recent_k=most_recent)
        self._directory = directory
        self._run_id = run_id
        self._saved: tuple[int, Path] | None = None

    def save(self, num_rounds: int, parameters: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint, named after the number of rounds, unless the last one is of the same; returns its path.

        Raises:
            CheckpointError: if the disk refuses; earlier checkpoints are as before.
        """
        if self._saved is not None and self._saved[0] == num_rounds:
            return self._saved[1]
        manager = CheckpointManager(self._directory, World(), run_id=self._run_id, retention=self._retention)
        model = StateComponent("model", _Weights(parameters), SharingPattern.GLOBAL, at_root=True)
        try:
            manager.save(SaveRequest(step=num_rounds, components=[model], config={}))
        finally:
            manager.close()
        self._saved = num_rounds, self._directory / f"checkpoint-{num_rounds}"
        return self._saved[1]


class _Weights:
    """A state dict, as a component of a checkpoint."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return dict(self._parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("it is only written")
