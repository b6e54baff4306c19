"""Pins the data that a run trains on: datasets on the Hub to commits, files behind URLs to the versions there now."""

from __future__ import annotations

from onstep.config import ConfigContainer
from onstep.data.corpus.hub_names import hub_name, pinned
from onstep.data.urls.local_copy import Listing, has_urls, pin
from onstep.data.urls.objects import stored_files
from onstep.distributed import World, on_main
from onstep.errors import DataError
from onstep.training.runs.claims import may_be_replaced, named_dir
from onstep.training.runs.hub import recorded_revisions


def pin_datasets(config: ConfigContainer, world: World) -> dict[str, str]:
    """The commits of the datasets on the Hub, by their names in `dataset.paths`, which then has them. Collective.

    A run that continues keeps the commits that it started on, wherever its branches and tags point by now. Of files
    behind URLs, all ranks read the versions that rank 0 finds.

    Raises:
        DataError: for a revision that the Hub does not have; on all ranks alike.
    """
    data, (commits, listing) = config.dataset, on_main(world, lambda: (_commits(config), _listing(config)))
    pin(data, listing)
    data.paths = [f"{path.partition('@')[0]}@{commits[path]}" if path in commits else path for path in data.paths]
    return {f"datasets/{path}": commit for path, commit in commits.items()}


def _listing(config: ConfigContainer) -> Listing | None:
    """The versions there now; None where they cannot be found, which only a run that is not finished minds."""
    try:
        return stored_files(config.dataset) if has_urls(config.dataset) else None
    except DataError:
        return None


def _commits(config: ConfigContainer) -> dict[str, str]:
    kind = config.dataset.kind
    reads_rows = kind in ("huggingface", "chat", "stream")
    paths = [path for path in config.dataset.paths if hub_name(path) is not None] if reads_rows else []
    directory = named_dir(config) if paths and config.run.name is not None else None
    is_continued = directory is not None and directory.run_json.exists() and not may_be_replaced(directory)
    recorded = recorded_revisions(directory) if directory is not None and is_continued else {}
    found = {
        path: recorded.get(f"datasets/{path}") or pinned(path, requires_hub=kind == "stream").partition("@")[2]
        for path in paths
    }
    return {path: commit for path, commit in found.items() if commit}
