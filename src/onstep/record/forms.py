"""Defines the two forms of a file of records: a JSON array with one record per line, and JSON lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Form:
    """The bytes around and between the records."""

    opening: bytes
    before_first: bytes
    between: bytes
    closing: bytes
    """After the last record."""

    def content(self, records: list[bytes]) -> bytes:
        """The whole file."""
        body = self.between.join(records)
        return self.opening + (self.before_first + body if records else b"") + self.end(bool(records))

    def end(self, has_records: bool) -> bytes:
        """What closes the file; JSON lines without a record are an empty file."""
        return self.closing if has_records or self.opening else b""

    def array(self, content: bytes) -> bytes:
        """The same records as an array; without its closing bracket where the content has no end."""
        if self.opening:
            return content
        body = content.rstrip(b"\n").replace(b"\n", ARRAY.between)
        return ARRAY.opening + body + (ARRAY.closing if content.endswith(b"\n") or not content else b"")


ARRAY = Form(opening=b"[", before_first=b"\n", between=b",\n", closing=b"\n]")
LINES = Form(opening=b"", before_first=b"", between=b"\n", closing=b"\n")


def form_of(path: Path) -> Form:
    """The form of a file, by its name."""
    return LINES if path.suffix == ".jsonl" else ARRAY
