"""A small run that is mirrored, without training."""

from __future__ import annotations

from pathlib import Path

from onstep.mirror.attach import Place
from onstep.mirror.mirror import Mirror
from tests.support.small_checkpoints import write_checkpoint


def place_of(url: str, machine: Path, seconds: float = 0.3, limit_bytes: float | None = None) -> Place:
    return Place(url, machine / "run", machine / ".mirrored", seconds, limit_bytes)


def commit(mirror: Mirror, step: int, word: str = "", size: int = 0) -> None:
    """Write a log and a checkpoint of a step, as training would."""
    mirror.directory.mkdir(parents=True, exist_ok=True)
    (mirror.directory / "run.json").write_text('{"config": {}}')
    with (mirror.directory / "record.jsonl").open("a") as log:
        log.write(f"{step}\n")
    content = {"model/model.safetensors": f"weights of {step} {word}".encode() * 50 + bytes(size)}
    write_checkpoint(mirror.root, step, content)
