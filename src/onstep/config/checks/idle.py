"""Finds settings that have no effect in combination with the others; a run names them in one line.

A combination that is certainly a mistake is refused elsewhere (`Option.only_with`, `checks.model`). Those of
`Option.needs` are ones that a recipe with a few overrides reaches too, so the run continues. Keys that only several
ranks or a GPU use declare no condition, since one configuration serves many machines, nor do keys that a callback can
use at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from onstep.config.checks.conditions import holds
from onstep.config.container import ConfigContainer
from onstep.config.hf.argument import STYLES
from onstep.config.hf.optimizers import NATIVE
from onstep.config.keys import KEYS
from onstep.config.sections.model import ModelConfig
from onstep.config.suggestions import WIDTH, shown

_OF_TRAINER = (
    "label_names",
    "remove_unused_columns",
    "include_for_metrics",
    "prediction_loss_only",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "batch_eval_metrics",
    "bf16_full_eval",
    "fp16_full_eval",
)
"""Entries of `trainer` that change what is computed."""

_READ_BY_TRAINER = {
    *(f"model.{name}" for name in ("seq_length", "ffn_hidden_size", "num_query_groups", "kv_channels")),
    *(f"model.{name}" for name in ("recompute_granularity", "recompute_interval", "offload_activations")),
    *(f"model.{name}" for name in ("chunked_loss", "fused_linear_loss")),
    *(f"dataset.{name}" for name in ("seq_length", "shuffle", "num_workers", "pin_memory", "persistent_workers")),
    *(f"dataset.{name}" for name in ("prefetch_factor", "multiprocessing_context")),
}
"""Lengths, with which tokens are counted; sizes that are filled in; what saves memory; how any dataset is read."""

_GIVEN_TO_TRAINER = tuple(
    key for key in KEYS if key.startswith(("model.", "dataset.", "tokenizer.")) and key not in _READ_BY_TRAINER
)

_DERIVED: dict[str, Callable[[ConfigContainer], float | None]] = {
    "optimizer.min_lr": lambda config: 0,
    "validation.eval_global_batch_size": lambda config: config.train.global_batch_size,
}
"""What `resolve` fills in where these keys are unset."""


def idle_settings(
    config: ConfigContainer, recipes: Sequence[ConfigContainer] = (), *, has_trackers: bool = False
) -> list[tuple[str, list[str]]]:
    """What is set and has no effect, as pairs of the unmet condition and `key=value`, each key once.

    Args:
        recipes: the recipe that `config` was made from, as it is and for a run of this length: nobody has set these.
        has_trackers: whether a callback has trackers of its own, which may use any key of `logger`.
    """
    found: dict[str, list[str]] = {}
    for key, value in _changed(config, KEYS, recipes):
        if has_trackers and key.startswith("logger."):
            continue
        unmet = next((need for need in KEYS[key].needs if not holds(need, config)), None)
        if unmet is not None:
            found.setdefault(unmet, []).append(_setting(key, value))
    return list(found.items())


def idle_without_trainer(config: ConfigContainer) -> list[tuple[str, list[str]]]:
    """The entries of `trainer` that only the Trainer reads."""
    names = [name for name in _OF_TRAINER if name in config.trainer]
    names += ["optim"] if config.trainer.get("optim", "sgd") not in NATIVE else []
    schedule = config.trainer.get("lr_scheduler_type")
    names += ["lr_scheduler_type"] if schedule and STYLES.get(schedule) != config.scheduler.lr_decay_style else []
    found = [_setting(f"trainer.{name}", config.trainer[name]) for name in names]
    return [("onstep.Trainer, which alone reads them", found)] if found else []


def idle_in_trainer(config: ConfigContainer, model: ModelConfig | None) -> list[tuple[str, list[str]]]:
    """The settings of model, data and tokenizer, which a Trainer is given; unless the given `model` has the same."""
    built = {} if model is None else {f"model.{name}": getattr(model, name) for name in model.field_names()}
    changed = _changed(config, _GIVEN_TO_TRAINER)
    found = [_setting(key, value) for key, value in changed if key not in built or built[key] != value]
    return [("onstep.pretrain; a Trainer uses the model and the datasets that it is given", found)] if found else []


def idle_line(found: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """One line that names the settings of `idle_settings`; None for none."""
    parts = [f"{', '.join(settings)} (requires {need})" for need, settings in found]
    return f"settings without effect: {'; '.join(parts)}" if parts else None


def _setting(key: str, value: Any) -> str:
    """A key with its value, which is quoted where it would not be read as one word, and cut where it is long."""
    text = str(value)
    return f"{key}={text if text.isprintable() and len(text) <= WIDTH else shown(value)}"


def _changed(
    config: ConfigContainer, keys: Iterable[str], recipes: Sequence[ConfigContainer] = ()
) -> Iterator[tuple[str, Any]]:
    for key in keys:
        value, default = KEYS[key].get(config), KEYS[key].default
        is_unset = value == default or (key in _DERIVED and value == _DERIVED[key](config))
        if not is_unset and all(value != KEYS[key].get(recipe) for recipe in recipes):
            yield key, value
