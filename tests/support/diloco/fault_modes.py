"""The kinds of runs to which faults happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mode:
    """What is different from a synchronous, exact run with one fragment, whose workers start afresh."""

    is_async: bool = False
    num_fragments: int = 1
    overlap_steps: int | None = None
    """After which a result is merged; None as it arrives."""
    blend: float = 0.25
    """Share of the local parameters, with several fragments."""
    codec: str = "fp32"
    has_checkpoints: bool = False
    """Whether a worker saves its state every three steps, and starts from that."""

    @property
    def is_blended(self) -> bool:
        return self.num_fragments > 1

    @property
    def is_exact(self) -> bool:
        return self.codec == "fp32"

    @property
    def sync_every(self) -> int:
        """Steps of a cycle."""
        return 2 * self.num_fragments

    @property
    def dn_buffer_size(self) -> int:
        """Of the delayed Nesterov rule."""
        return 2 if self.is_async else 0

    def settings(self, num_workers: int, min_workers: int) -> dict[str, Any]:
        """Of the server."""
        return {
            "mode": "async" if self.is_async else "sync",
            "num_workers": num_workers,
            "min_workers": 1 if self.is_async else min_workers,
            "sync_every": self.sync_every,
            "num_fragments": self.num_fragments,
            "overlap_steps": self.overlap_steps,
            "blend": self.blend,
            "codec": self.codec,
        }


SYNC = Mode()
MODES = {
    "sync": SYNC,
    "sync with checkpoints": Mode(has_checkpoints=True),
    "int8": Mode(codec="int8"),
    "int8 with checkpoints": Mode(codec="int8", has_checkpoints=True),
    "streaming": Mode(num_fragments=2),
    "streaming int8 with checkpoints": Mode(num_fragments=2, codec="int8", has_checkpoints=True),
    "streaming with a fixed overlap": Mode(num_fragments=2, overlap_steps=3, codec="int8", has_checkpoints=True),
    "async": Mode(is_async=True),
    "async int8 with checkpoints": Mode(is_async=True, codec="int8", has_checkpoints=True),
}
