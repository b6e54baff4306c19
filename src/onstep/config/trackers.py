"""Where metrics are reported to: the names that `report_to` takes."""

from __future__ import annotations

from collections.abc import Sequence

from onstep.config.part import nearest
from onstep.errors import ConfigError

TRACKERS = ("csv", "tensorboard", "wandb", "mlflow", "comet", "trackio")

ALL = "all"
"""Every tracker whose package is installed."""

ALIASES = {"comet_ml": "comet"}
"""Hugging Face's names that are others here."""

DEFAULT_PROJECT = "huggingface"
"""`TrainingArguments.project` unless it is set: the tracker's own default then."""


def tracker_list(report_to: str | Sequence[str] | None, field: str) -> list[str]:
    """`report_to` as a list of trackers without repetitions: [] for none, ["all"] for all that are installed.

    Raises:
        ConfigError: naming the field, the unknown name and the nearest known one.
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in given))
    for name in names:
        if name not in (*TRACKERS, ALL, "none"):
            known = ", ".join(TRACKERS)
            hint = nearest(str(name), [*TRACKERS, *ALIASES, ALL])
            raise ConfigError(f"{field}={name!r} is no tracker; use 'none', 'all' or some of {known}.{hint}")
    if "none" in names and len(names) > 1:
        raise ConfigError(f"{field}={names!r} has 'none' beside trackers; drop one or the other.")
    if ALL in names:
        return [ALL]
    return [] if names == ["none"] else names
