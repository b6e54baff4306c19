"""What stands in `GlobalState` for the detector of stragglers where it is off."""

from __future__ import annotations


class NoStragglerTimer:
    """Stands in for the detector where it is off: a context manager that does nothing."""

    enabled = False

    def __call__(self, bdata: bool = False) -> NoStragglerTimer:
        return self

    def __enter__(self) -> NoStragglerTimer:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def start(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""

    def leave_out(self, seconds: float) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """False."""
        return False

    def close(self) -> None:
        """Nothing."""
