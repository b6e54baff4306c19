"""Reads a file behind an http(s) URL by ranges, and continues where a connection breaks."""

from __future__ import annotations

import io
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import cast

_TIMEOUT_SECONDS = 60.0
_PAUSES_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further attempt to read at a place."""
_WORTH_REPEATING = frozenset({408, 425, 429})
_SKIPPED_AT_ONCE = 1 << 20


class RemoteFile(io.RawIOBase):
    """A file behind a URL.

    A connection that fails or ends early is opened again at the place reached, several times with growing pauses. A
    server without ranges sends the file from the start, of which the part before the place is discarded.

    Args:
        wait: sleeps for a number of seconds.

    Raises:
        OSError: if the file cannot be read, or has changed since it was opened.
    """

    def __init__(self, url: str, wait: Callable[[float], None] = time.sleep) -> None:
        super().__init__()
        self.name = url
        self.size: int | None = None
        """Number of bytes; None if the server does not tell."""
        self._wait = wait
        self._at = 0
        self._version: tuple[int | None, str | None] | None = None
        self._response: HTTPResponse | None = None
        self._attempt(lambda: None)

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, of which the next read asks; `tell` calls it, too."""
        if whence == io.SEEK_END and self.size is None:
            raise OSError("the server does not tell its size, which this format requires")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size or 0}[whence]
        if start + offset != self._at:
            self._at = start + offset
            self._drop()
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into `buffer`; the number of bytes, 0 at the end of the file."""
        if self.size is not None and self._at >= self.size:
            return 0
        return self._attempt(lambda: self._receive(buffer))

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        super().close()

    def _receive(self, buffer: memoryview) -> int:
        assert self._response is not None
        count = self._response.readinto(buffer)
        if not count and self.size is not None:
            raise OSError(f"the connection ended at byte {self._at:,} of {self.size:,}")
        self._at += count
        return count

    def _attempt(self, action: Callable[[], int | None]) -> int:
        """The result of an action on an open connection, repeated after errors that may pass."""
        for pause in (*_PAUSES_SECONDS, None):
            try:
                if self._response is None:
                    self._connect()
                return action() or 0
            except (OSError, HTTPException) as error:
                self._drop()
                code = error.code if isinstance(error, urllib.error.HTTPError) else 500
                if pause is None or (code < 500 and code not in _WORTH_REPEATING):
                    raise OSError(f"{type(error).__name__}: {error}") from error
                self._wait(pause)
        raise AssertionError("the last attempt returns or raises")

    def _connect(self) -> None:
        request = urllib.request.Request(self.name, headers={"Range": f"bytes={self._at}-"})
        response = cast(HTTPResponse, urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS))
        self._response = response
        has_range = response.status == 206
        whole = response.headers.get("Content-Range", "").rpartition("/")[2] if has_range else response.length
        size = int(whole) if whole not in ("", "*", None) else None
        version = size, response.headers.get("ETag")
        if self._version not in (None, version):
            raise urllib.error.HTTPError(self.name, 412, "it has changed while it was read", response.headers, None)
        self._version, self.size = version, size
        left = 0 if has_range else self._at
        while left:
            skipped = len(response.read(min(left, _SKIPPED_AT_ONCE)))
            if not skipped:
                raise OSError(f"the connection ended {left:,} bytes before byte {self._at:,}")
            left -= skipped

    def _drop(self) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.close()
