"""The trackers of a run (W&B, TensorBoard, MLflow, ...) and the metric names they show, as configured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import iter_modules

from onstep.config.suggestions import nearest, shown
from onstep.errors import ConfigError

_SERVICES = Path(__file__).parents[1] / "trackers" / "services"
_MODULES = (module.name for module in iter_modules([str(_SERVICES)]))
TRACKERS = tuple(sorted(name.removesuffix("_tracker") for name in _MODULES if name.endswith("_tracker")))
"""The names of the modules with a tracker each; everything else about a tracker is in its class."""

ALL = "all"
"""Every tracker whose package is installed."""

ALIASES = {"comet_ml": "comet"}
"""Hugging Face's names that differ here."""

BRIDGE_FIELDS = {
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet": "comet_project",
}
"""The fields of `logger` that enable a tracker with Megatron Bridge's tags, where `report_to` does not name it."""

NAMES = ("hf", "bridge")
"""The values of `report_names`: Hugging Face's names, Megatron Bridge's tags."""

DEFAULT_PROJECT = "huggingface"
"""The default of `TrainingArguments.project`, which stands for the tracker's own default."""


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
            raise ConfigError(f"{field}={shown(name)} is not a tracker; use 'none', 'all' or some of {known}.{hint}")
    if "none" in names and len(names) > 1:
        raise ConfigError(f"{field}={shown(names)} combines 'none' with trackers; drop one or the other.")
    if ALL in names:
        return [ALL]
    return [] if names == ["none"] else names


def name_list(report_names: str | Sequence[str] | None, field: str = "logger.report_names") -> tuple[str, ...] | None:
    """`report_names` without repetitions; None where it is not set.

    Raises:
        ConfigError: for an unknown name, and for an empty list.
    """
    if report_names is None:
        return None
    names = tuple(dict.fromkeys([report_names] if isinstance(report_names, str) else report_names))
    if not names or not set(names) <= set(NAMES):
        raise ConfigError(
            f"{field}={shown(list(names))} must be some of {', '.join(NAMES)}; unset, trackers of "
            f"logger.report_to show hf, those of logger.{BRIDGE_FIELDS['wandb']} and its siblings bridge."
        )
    return names
