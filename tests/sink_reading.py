"""What a run's folder holds, as the readers of its formats see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep.metrics_log import read_records


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard's own reader shows them."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def texts(folder: Path) -> list[str]:
    """The tags of a folder's texts."""
    reader = EventAccumulator(str(folder))
    reader.Reload()
    return list(reader.Tags()["tensors"])


def journal_values(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric of the journal, in order."""
    return [(record["global_step"], record[name]) for record in read_records(path) if name in record]


def table(path: Path) -> Any:
    """A CSV file as pandas reads it."""
    import pandas

    return pandas.read_csv(path)
