"""Where the time of a run went: every second is charged to one account, and some of them counted."""

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


class CountedSeconds:
    """Sums the seconds of steps, and takes back those of steps that a rollback has undone.

    Args:
        start_step: completed steps when the process began; going back to it undoes everything.
    """

    def __init__(self, start_step: int) -> None:
        self.total = 0.0
        """Seconds of all steps that count so far."""
        self.in_interval = 0.0
        """The part of them since the last `next_interval`."""
        self._steps = self._counted_steps = 0
        self._at_step = {start_step: 0.0}

    def add_step(self, seconds: float, is_applied: bool) -> None:
        """A step took `seconds`; one whose update was left out does not count."""
        self._steps += 1
        if is_applied:
            self._counted_steps += 1
            self._add(seconds)

    def add_wait(self, seconds: float) -> None:
        """The device took `seconds` more for the steps of this interval; counts as far as they do."""
        if self._steps:
            self._add(seconds * self._counted_steps / self._steps)

    def mark(self, step: int) -> None:
        """Training may come back to here: a checkpoint is taken."""
        self._at_step[step] = self.total

    def go_back(self, step: int) -> None:
        """What came after `step` is undone; a step without a mark stands for the nearest mark before it."""
        marks = [marked for marked in self._at_step if marked <= step]
        kept = self._at_step[max(marks)] if marks else 0.0
        undone, self.total = self.total - kept, kept
        self.in_interval = max(0.0, self.in_interval - undone)
        self._at_step = {marked: seconds for marked, seconds in self._at_step.items() if marked <= step}

    def next_interval(self) -> None:
        """Begin a new interval; what was counted stays counted."""
        self.in_interval = 0.0
        self._steps = self._counted_steps = 0

    def _add(self, seconds: float) -> None:
        self.total += seconds
        self.in_interval += seconds
