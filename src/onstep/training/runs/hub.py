"""Finds which revisions of models and datasets on the Hugging Face Hub a run uses, for run.json."""

from __future__ import annotations

import re

from onstep.training.runs.run_dir import RunDir

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/*", re.DOTALL)
"""Where huggingface_hub keeps a downloaded model."""


def hub_revisions(place: str | None) -> dict[str, str]:
    """The commit of a model by its name, for a directory in the cache of huggingface_hub; {} for any other place."""
    found = _SNAPSHOT.fullmatch(str(place))
    return {} if found is None else {found[1].replace("--", "/"): found[2]}


def recorded_revisions(directory: RunDir) -> dict[str, str]:
    """The commits in the run.json of a directory; {} if there is none."""
    recorded = directory.read().get("hub_revisions") if directory.run_json.exists() else None
    return dict(recorded) if isinstance(recorded, dict) else {}
