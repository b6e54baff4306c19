"""Keeps what a model wrote during training, in the record of the run and in `text_samples.jsonl`, and reads both."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onstep.analysis.logs.log_tail import LogTail
from onstep.analysis.logs.record_file import objects_in
from onstep.record import Record
from onstep.record.kinds import FILE_NAME as RECORD
from onstep.record.names import rename_aside

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


def keep_samples(state: Any, directory: Path | None, texts: Iterable[tuple[str, str]]) -> None:
    """Keep pairs of prompt and text of the last step, on rank 0.

    Each is a line in the record of the run, if there is one, and in `text_samples.jsonl`.

    Args:
        state: the `TrainerState`; that of Hugging Face's own Trainer has no record.
        directory: that of `text_samples.jsonl`; None writes no file.

    Raises:
        OSError: if the file cannot be written.
    """
    now = time.time()
    samples = [TextSample(now, state.global_step, prompt, text) for prompt, text in texts]
    if (append := getattr(state, "append_to_record", None)) is not None:
        for sample in samples:
            append("sample", {"prompt": sample.prompt, "text": sample.text})
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        append_samples(directory / FILE_NAME, samples)


def append_samples(path: Path, samples: Iterable[TextSample]) -> None:
    """Append a line for each sample, in one write.

    Raises:
        OSError: if the file cannot be written, or is not a regular file.
    """
    append_lines(path, (json.dumps(asdict(sample)) for sample in samples))


def append_lines(path: Path, texts: Iterable[str]) -> None:
    """Append lines to a file that others may be appending to, in one write.

    Raises:
        OSError: if the file cannot be written, or is not a regular file.
    """
    lines = "".join(f"{text}\n" for text in texts)
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
    return list(deque(filter(None, map(sample_of, objects_in(path))), maxlen=MOST_SAMPLES))


def samples_of_run(directory: Path) -> list[TextSample]:
    """The samples in the directory of a run, in order, without those of steps that a resume or a rollback abandoned.

    They are those in its record. `text_samples.jsonl` has those from before the record begins, as in a run that a
    version before 0.5 began.

    Raises:
        OSError: if a file exists and cannot be read.
    """
    in_file, lines = read_samples(directory / FILE_NAME), objects_in(directory / RECORD)
    first = next(lines, None)
    if first is None:
        return in_file
    begins_at = first.get("global_step")
    earlier = [sample for sample in in_file if begins_at and sample.step <= begins_at]
    return [*earlier, *deque(filter(None, map(sample_of, lines)), maxlen=MOST_SAMPLES)]


def follow_samples(directory: Path) -> LogTail:
    """Follows the samples of a run: in its record, or in `text_samples.jsonl` if it has none.

    Raises:
        FileNotFoundError: if it has neither.
    """
    record = directory / RECORD
    return LogTail(record if record.is_file() else directory / FILE_NAME, lambda line: sample_of(line) is not None)


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
        rename_aside(path, "")


def sample_of(line: Record) -> TextSample | None:
    """The sample in a line of a record or of `text_samples.jsonl`; None if it holds something else."""
    is_in_record = line.get("kind") == "sample"
    timestamp: Any = line.get("timestamp")
    step: Any = line.get("global_step" if is_in_record else "step")
    prompt, text = line.get("prompt"), line.get("text")
    is_time = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool) and math.isfinite(timestamp)
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63
    if not (is_time and is_step and isinstance(prompt, str) and isinstance(text, str)):
        return None
    return TextSample(float(timestamp), step, prompt, text)
