"""Refuses, before seconds of importing torch, a run that cannot start: for its values, its callbacks or its files."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from onstep.analysis.logs.run_status import run_record
from onstep.cli.config import can_be_imported, check_callback_name, load_callback, python_file
from onstep.cli.runs import RUNS, names_beside, not_found, run_names
from onstep.config import ConfigContainer, resolve
from onstep.config.checks.run import check_finetune, check_run, loads_own
from onstep.config.checks.single_values import check_values
from onstep.config.suggestions import nearest
from onstep.console.level import Level
from onstep.console.messages import show_messages
from onstep.errors import DataError, MissingWeightsError
from onstep.files.bounded_reading import integer_from_environment
from onstep.metrics.memory.fitting import check_memory
from onstep.stores.urls import is_url

logger = logging.getLogger(__name__)


def check_start(config: ConfigContainer, callbacks: Sequence[str], imports: Sequence[str]) -> None:
    """Refuse what can be refused without torch, and name the run after its recipe.

    Args:
        config: the run's configuration; that of pretrained weights is not known yet.
        callbacks: as `module:attribute`.
        imports: the files that are to be imported first.

    Raises:
        OnstepError: naming the value, the rule and the remedy.
    """
    for path in imports:
        python_file(path)
    check_values(config)
    if config.run.name is None:
        config.run.name = config.run.recipe or "run"
    check_run(config)
    check_finetune(config)
    _check_size(config)
    for name in callbacks:
        _check_callback(name, imports)
    directory = config.run.local_output_dir / config.run.name
    record = {} if config.run.fresh else run_record(directory)
    _check_weights(config, record)
    _check_data(config, record)


def _check_size(config: ConfigContainer) -> None:
    """Refuse a model that this machine cannot hold, unless its sizes are those of the weights to start from."""
    checkpoint = config.checkpoint
    if config.run.check_memory and checkpoint.pretrained_checkpoint is None and not checkpoint.finetune:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run gives them
            check_memory(resolve(config, integer_from_environment("WORLD_SIZE", 1)))


def _check_callback(name: str, imports: Sequence[str]) -> None:
    """Refuse a callback without a module, or whose module cannot be found, which an imported file may change."""
    check_callback_name(name)
    if not imports and not can_be_imported(name.partition(":")[0]):
        load_callback(name)  # raises


_MODEL = "a Hugging Face directory, a run or a checkpoint"
_CHECKPOINT = "a run, a checkpoint or a directory of checkpoints"


def _check_weights(config: ConfigContainer, record: Mapping[str, Any]) -> None:
    """Refuse weights and checkpoints to start from that do not exist; an existing run may have started from them."""
    checkpoint = config.checkpoint
    weights, load = checkpoint.pretrained_checkpoint, checkpoint.load
    if weights is not None and not _is_there("pretrained_checkpoint", weights, record):
        raise _missing("pretrained_checkpoint", weights, _MODEL, not_found(weights, run_names(), ""))
    if load is not None and not _is_there("load", load, record) and not _is_own(config, load):
        hint = nearest(Path(load).name, names_beside(load), cutoff=0.6)
        raise _missing("load", load, _MODEL if checkpoint.finetune else _CHECKPOINT, hint)


def _missing(name: str, path: str, wanted: str, hint: str) -> MissingWeightsError:
    return MissingWeightsError(
        f"checkpoint.{name}={path} does not exist, and neither does the run {RUNS / path}; pass {wanted}.{hint}"
    )


def _is_there(name: str, path: str, record: Mapping[str, Any]) -> bool:
    """Whether there is something at a path, or the run of a record has started from it, and continues without it."""
    place, stored = Path(path).absolute(), _section(record, "checkpoint").get(name)
    started = str(record.get("started_from")) if name == "load" else ""
    return (
        is_url(path)  # which is read when the run starts
        or os.path.exists(os.path.expanduser(path))
        or (isinstance(stored, str) and Path(stored).absolute() == place)
        or started.partition(" step ")[0] == str(place)
    )


def _is_own(config: ConfigContainer, load: str) -> bool:
    """Whether a path is where the run saves, which is missing at its first start."""
    own = config.run.local_output_dir / str(config.run.name)
    return loads_own(config) or Path(load).resolve() == own.resolve()


def _check_data(config: ConfigContainer, record: Mapping[str, Any]) -> None:
    """Refuse files that cannot be trained on; a run that exists may be finished, and reads none of its own then."""
    data = config.dataset
    is_stored = config.checkpoint.on_config_change == "keep" or _section(record, "dataset").get("paths") == data.paths
    if not data.paths or (record and is_stored):
        return
    from onstep.data.corpus.input_files import check_first_files
    from onstep.data.corpus.text_files import unread_notes  # here, since these import numpy
    from onstep.data.urls.local_copy import has_urls, listing_of

    if has_urls(data):
        listing_of(data)  # which are downloaded when the run starts
        return
    try:
        check_first_files(data)
    except DataError:
        if notes := unread_notes(data.paths, only_records=data.kind == "chat"):
            show_messages(cast(Level, config.logger.console), is_main=is_main())
            logger.warning("dataset.paths: %s", "; ".join(notes))
        raise


def _section(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the configuration in a run.json; empty if there is none."""
    config = record.get("config")
    section = config.get(name) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def is_main() -> bool:
    """Whether this process prints what concerns all ranks."""
    return os.environ.get("RANK", "0") == "0"
