"""Which log the words of a command line name."""

from __future__ import annotations

from pathlib import Path

from onstep.analysis.log_files import FILE_NAME, FOREIGN_FILE_NAME, find_foreign_log, find_log_files
from onstep.errors import ConfigError


def find_log(words: str | None) -> Path:
    """The log that a path or a name stands for.

    A file is the log itself; a run's folder holds it; of a folder of runs, and without words, it is the newest one; a
    name that is no path here is looked for below `runs/`. A checkpoint of Hugging Face's Trainer, or the folder of its
    checkpoints, stands for the `trainer_state.json` of the newest.

    Raises:
        ConfigError: when there is none, with near names.
    """
    if words is None:
        return _newest(Path())
    path = Path(words)
    for candidate in (path, Path("runs") / path):
        if (candidate / FILE_NAME).is_file():
            return candidate / FILE_NAME
        if candidate.is_file():
            return candidate
    if path.is_dir():
        if not find_log_files(path) and (foreign := find_foreign_log(path)) is not None:
            return foreign
        return _newest(path)
    from onstep.config.part import nearest  # costs more than reading a short log

    known = sorted(log.parent.name for log in find_log_files(Path()))
    there = f" Here are logs of {', '.join(known[:10])}." if known else " Here are no logs of runs."
    raise ConfigError(f"there is no log {words!r}.{nearest(path.name, known)}{there}")


def _newest(folder: Path) -> Path:
    logs = find_log_files(folder)
    if not logs:
        raise ConfigError(
            f"no logs found in {folder.absolute()}: runs have theirs in runs/<run>/{FILE_NAME} or "
            f"output_models/<model>/runs/<run>/{FILE_NAME}, and Hugging Face's Trainer has it in "
            f"checkpoint-<step>/{FOREIGN_FILE_NAME}; give the path of a log or a run."
        )
    return logs[0]
