"""TensorBoard's event files, read with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as TensorBoardsReader


def steps_by_tag(folder: Path) -> dict[str, list[int]]:
    """The steps of each tag as TensorBoard shows them, of scalars, texts and histograms."""
    events = TensorBoardsReader(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    steps = {tag: [event.step for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    return {tag: found for tag, found in steps.items() if found}


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Steps and values of a chart."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def num_files(folder: Path) -> int:
    """How many event files there are."""
    return len(list(folder.glob("events.out.tfevents.*")))


def age(folder: Path) -> None:
    """Give the event files in a folder and below it names of a minute ago, when an earlier run made them."""
    for path in folder.rglob("events.out.tfevents.*"):
        *head, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*head, str(int(second) - 60), rest])))
