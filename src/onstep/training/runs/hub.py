"""Finds which revision of a model on the Hugging Face Hub a run starts from, for run.json."""

from __future__ import annotations

import re

_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/*", re.DOTALL)
"""Where huggingface_hub keeps a downloaded model."""


def hub_revisions(place: str | None) -> dict[str, str]:
    """The commit of a model by its name, for a directory in the cache of huggingface_hub; {} for any other place."""
    found = _SNAPSHOT.fullmatch(str(place))
    return {} if found is None else {found[1].replace("--", "/"): found[2]}
