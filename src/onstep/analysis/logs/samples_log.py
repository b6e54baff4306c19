"""Appends what a model wrote during training to `text_samples.jsonl`, and reads such files, even damaged ones."""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onstep.analysis.logs.lines import BLANK, FileSource
from onstep.analysis.logs.record_file import decoded

FILE_NAME = "text_samples.jsonl"
"""Its place is next to the metrics log."""
MOST_SAMPLES = 10_000
"""Number of samples that are read from a file: the last ones."""


@dataclass(frozen=True)
class TextSample:
    """What a model wrote after a prompt at some step of its training."""

    timestamp: float
    """Unix time, in seconds."""
    step: int
    prompt: str
    text: str
    """What the model added, without the prompt."""


def append_samples(path: Path, samples: Iterable[TextSample]) -> None:
    """Append a line for each sample, in one write.

    Raises:
        OSError: if the file cannot be written, or is not a regular file.
    """
    lines = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples)
    # without O_NONBLOCK, the opening of a pipe would wait for its reader
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        is_torn = status.st_size > 0 and os.pread(descriptor, 1, status.st_size - 1) != b"\n"
        file.write(("\n" * is_torn + lines).encode())


def read_samples(path: Path) -> list[TextSample]:
    """The samples in a file, in order; none if it is missing. Damaged and foreign lines are skipped.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    if not path.is_file():
        return []
    found: deque[TextSample] = deque(maxlen=MOST_SAMPLES)
    for piece in FileSource(path).pieces():
        for line in [] if piece.is_too_long else piece.lines:
            if line.strip(BLANK) and (sample := _sample(line)) is not None:
                found.append(sample)
    return list(found)


def newest_by_step(samples: Iterable[TextSample]) -> dict[int, dict[str, str]]:
    """The text after each prompt, by step in ascending order.

    Of several samples of a prompt at a step, which a resumed run leaves behind, the last one counts.
    """
    by_step: dict[int, dict[str, str]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, {})[sample.prompt] = sample.text
    return dict(sorted(by_step.items()))


def set_samples_aside(path: Path) -> None:
    """Rename a file of samples to `text_samples.<n>.jsonl`, so that a run can start from scratch."""
    if path.is_file():
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def _sample(line: bytes) -> TextSample | None:
    record = decoded(line)
    if not isinstance(record, dict):
        return None
    timestamp: Any = record.get("timestamp")
    step: Any = record.get("step")
    prompt, text = record.get("prompt"), record.get("text")
    is_time = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool) and math.isfinite(timestamp)
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63
    if not (is_time and is_step and isinstance(prompt, str) and isinstance(text, str)):
        return None
    return TextSample(float(timestamp), step, prompt, text)
