"""The metrics of a worker, under the names that dashboards know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SAVED = (
    "sync_count",
    "total_sync_time",
    "sync_retries",
    "reconnections",
    "dropped",
    "lost_steps",
    "dylu_adjustments",
    "fragment_syncs",
    "total_send_bytes",
    "total_recv_bytes",
)


@dataclass
class SyncMetrics:
    """Counts so far, on rank 0; sizes in bytes, times in seconds."""

    sync_count: int = 0
    """Completed cycles of `sync_every` steps."""
    last_sync_time: float = 0.0
    """How long training waited for the last result."""
    total_sync_time: float = 0.0
    last_send_bytes: int = 0
    last_recv_bytes: int = 0
    total_send_bytes: int = 0
    total_recv_bytes: int = 0
    sync_retries: int = 0
    """Submissions whose result was not known in time."""
    reconnections: int = 0
    dropped: int = 0
    """Submissions that did not count."""
    lost_steps: int = 0
    """Steps of the first fragment that were given up, as they began from a version that had become too old."""
    dylu_adjustments: int = 0
    fragment_syncs: int = 0
    contributors: int = 0
    """Workers whose submissions the newest version contains."""
    version: int = 0
    """Newest version that the model was given."""
    quantization_error: float = 0.0
    """Norm of the codec's error in the last submission, relative to it; the next one includes the error."""

    def state_dict(self) -> dict[str, Any]:
        """The counts that a resumed worker continues."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counts; unknown ones are ignored."""
        for name in _SAVED:
            setattr(self, name, type(getattr(self, name))(state.get(name, 0)))

    def logs(self) -> dict[str, float]:
        """The values to log; the caller adds others."""
        logs = {
            "sync_count": self.sync_count,
            "last_sync_time": self.last_sync_time,
            "total_sync_time": self.total_sync_time,
            "last_send_mb": self.last_send_bytes / 1e6,
            "last_recv_mb": self.last_recv_bytes / 1e6,
            "total_send_mb": self.total_send_bytes / 1e6,
            "total_recv_mb": self.total_recv_bytes / 1e6,
            "quantization_error": self.quantization_error,
            "version": self.version,
            "contributors": self.contributors,
        }
        names = ("sync_retries", "reconnections", "dropped", "lost_steps")
        rare = {name: getattr(self, name) for name in names}
        logs.update({name: count for name, count in rare.items() if count})
        return {f"diloco/{name}": value for name, value in logs.items()}
