"""Where the time of a run went: every second is charged to one account, so the accounts sum to the wall time."""

from __future__ import annotations

from collections.abc import Callable


class TimeLedger:
    """Charges all time that passes to the account that is open, less the time that callbacks took.

    The accounts sum to the time between `start` and the last `enter`, `recharge` or `balance`, exactly: no second is
    measured twice and none is left out.

    Args:
        accounts: names of the accounts; the first is the one that time goes to unless another is entered.
        reading: now, in seconds, and the seconds that callbacks took until now; of one look at one clock.
    """

    CALLBACKS = "callbacks"

    def __init__(self, accounts: tuple[str, ...], reading: Callable[[], tuple[float, float]]) -> None:
        self._reading = reading
        self._default = self.account = accounts[0]
        self._seconds: dict[str, float] = dict.fromkeys((*accounts, self.CALLBACKS), 0.0)
        self._last, self._last_callbacks = reading()

    def enter(self, account: str | None = None) -> None:
        """Charge what has passed to the open account, and open another one (None: the first)."""
        self._charge()
        self.account = account or self._default
        assert self.account in self._seconds

    def recharge(self, account: str) -> None:
        """What has passed since the last entry belongs to `account`: only now it is known. It is the open one now."""
        self.account = account
        self._charge()

    def of(self, *accounts: str) -> float:
        """Seconds charged to some accounts so far; what has passed since the last entry is not in it yet."""
        return sum(self._seconds[account] for account in accounts)

    def balance(self) -> dict[str, float]:
        """Seconds of every account since the start, up to now."""
        self._charge()
        return dict(self._seconds)

    def _charge(self) -> None:
        now, callbacks = self._reading()
        in_callbacks = callbacks - self._last_callbacks
        self._seconds[self.CALLBACKS] += in_callbacks
        self._seconds[self.account] += now - self._last - in_callbacks
        self._last, self._last_callbacks = now, callbacks
