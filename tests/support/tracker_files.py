"""What a run's directory holds, as the readers of its formats see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as TensorBoardsReader

from onstep.record import read_records


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard's own reader shows them."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def steps_by_tag(directory: Path) -> dict[str, list[int]]:
    """The steps of each tag as TensorBoard shows them, of scalars, texts and histograms."""
    events = TensorBoardsReader(str(directory), size_guidance={"tensors": 0})
    events.Reload()
    steps = {tag: [event.step for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    return {tag: found for tag, found in steps.items() if found}


def texts(directory: Path) -> list[str]:
    """The tags of a directory's texts."""
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return list(reader.Tags()["tensors"])


def metrics_log_values(path: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric of the metrics log, in order."""
    return [(record["global_step"], record[name]) for record in read_records(path) if name in record]


def table(path: Path) -> Any:
    """A CSV file as pandas reads it."""
    import pandas

    return pandas.read_csv(path)


def num_files(directory: Path) -> int:
    """How many event files there are."""
    return len(list(directory.glob("events.out.tfevents.*")))


def age(directory: Path) -> None:
    """Give the event files in a directory and below it names of a minute ago, when an earlier run made them."""
    for path in directory.rglob("events.out.tfevents.*"):
        *head, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*head, str(int(second) - 60), rest])))
