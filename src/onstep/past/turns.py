"""Alternates between the thread that trains and the thread that looks: one of them runs, the other one waits."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Closed(SystemExit):
    """Ends the training at the place where it is held; nothing has failed."""


class Turns:
    """A training in a thread of its own, which is held at places of the loop while its caller looks.

    The training runs only while the caller waits for it, so neither needs a lock on what they share.
    """

    def __init__(self) -> None:
        self._to_train, self._to_look = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._error: BaseException | None = None
        self.place = ""
        """Where the training is held; empty while it runs, and once it has ended."""

    @property
    def is_held(self) -> bool:
        """Whether the training waits for its caller."""
        return bool(self.place)

    def start(self, train: Callable[[], object]) -> None:
        """Start the training, and wait until it is held or has ended.

        Raises:
            BaseException: what ended the training.
        """

        def work() -> None:
            try:
                train()
            except Closed:
                pass
            except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
                self._error = error
            finally:
                self.place = ""
                self._to_look.release()

        self._thread = threading.Thread(target=work, name="onstep-rewind", daemon=True)
        self._thread.start()
        self._wait()

    def hold(self, place: str) -> None:
        """In the training's thread: wait until the caller lets it continue.

        Raises:
            Closed: if the caller has seen enough.
        """
        self.place = place
        self._to_look.release()
        self._to_train.acquire()
        self.place = ""
        self.check()

    def check(self) -> None:
        """In the training's thread: end it if the caller has given up.

        Raises:
            Closed: then.
        """
        if self._is_closing:
            raise Closed(0)

    def go_on(self) -> None:
        """Let the training continue, and wait until it is held again or has ended.

        Raises:
            BaseException: what ended the training.
        """
        self._to_train.release()
        self._wait()

    def close(self) -> None:
        """End the training at the place where it is held, and wait for its thread."""
        self._is_closing = True
        if self._thread is not None and self._thread.is_alive():
            self._to_train.release()
            self._thread.join()

    def _wait(self) -> None:
        try:
            self._to_look.acquire()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if self._error is not None:
            error, self._error = self._error, None
            raise error
