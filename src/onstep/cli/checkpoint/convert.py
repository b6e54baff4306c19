"""`onstep checkpoint convert`: writes the tensors of a directory of torch.distributed.checkpoint as safetensors."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import torch

from onstep.checkpoint import FileStore
from onstep.checkpoint.dcp.directory import open_dcp
from onstep.checkpoint.format.stored_tensors import StoredTensor
from onstep.cli.checkpoint.placing import check_file, check_target, put_in_place
from onstep.cli.checkpoint.torchtitan_names import is_of_torchtitan, of_transformers
from onstep.config.suggestions import listed
from onstep.errors import CheckpointError
from onstep.models.deferred import deferred
from onstep.models.hf.weight_files import INDEX_FILE, MAX_SHARD_BYTES, write_file, write_weights

_SHOWN = 5
_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
"""The files of a Hugging Face directory that weights need beside them."""


def convert(
    directory: Path,
    out: Path,
    *,
    prefix: str = "",
    tensors_only: bool = False,
    dtype: torch.dtype | None = None,
    config_from: Path | None = None,
    force: bool = False,
) -> list[str]:
    """Write a file, or a directory with files of at most 5 GB, with one tensor in memory at a time; returns notes.

    Args:
        directory: the directory of torch.distributed.checkpoint.
        out: the `.safetensors` file or the directory to write.
        prefix: what the names of the wanted tensors begin with, which is left out of the names written.
        tensors_only: whether values that are only in pickles are left out.
        dtype: the type of the written tensors that are numbers; None is their own.
        config_from: a Hugging Face directory whose configuration and tokenizer are copied to `out`.
        force: whether an earlier export is replaced.

    Raises:
        CheckpointError: if there is nothing to write, something is only in a pickle, or `out` cannot be written.
    """
    is_file = out.suffix == ".safetensors"
    if is_file:
        check_file(out, "model.safetensors", force)
        if config_from is not None:
            raise CheckpointError(f"--config-from needs a directory to copy to, got the file {out}; name a directory.")
    else:
        check_target(out, force)
    found = open_dcp(directory)
    wanted = {name.removeprefix(prefix): one for name, one in found.tensors.items() if name.startswith(prefix)}
    pickled = [name for name in found.pickled if name.startswith(prefix)]
    if not wanted:
        raise CheckpointError(
            f"{directory} has no tensor whose name begins with {prefix!r}; {_parts(found.tensors)}, so choose one of "
            f"these with --prefix."
        )
    if pickled and not tensors_only:
        raise CheckpointError(
            f"{directory} has {len(pickled)} values that are pickles, which are not read as they can run code: "
            f"{listed(pickled, _SHOWN)}. Leave them out with --tensors-only, or choose a part with --prefix "
            f"({_parts(found.tensors)})."
        )
    tensors = {name: deferred(one.shape, one.dtype, one.read) for name, one in wanted.items()}
    if dtype is not None:
        tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    beside = [] if config_from is None else _files_beside(config_from)
    of_torchtitan = is_of_torchtitan(tensors)
    if of_torchtitan and config_from is not None:
        tensors = of_transformers(tensors, config_from / "config.json")
    store = FileStore()

    def write(temporary: Path) -> None:
        if is_file:
            with store.open(temporary) as file:
                write_file(file.write, tensors, {})
            return
        write_weights(tensors, temporary, MAX_SHARD_BYTES)
        for path in beside:
            shutil.copyfile(path, temporary / path.name)
        for path in temporary.iterdir():
            store.adopt(path)
        store.sync_dir(temporary)

    put_in_place(store, out, write)
    notes = [f"{len(tensors)} tensors"]
    if beside:
        notes.append(f"with {listed([path.name for path in beside], _SHOWN)} of {config_from}")
    if of_torchtitan:
        notes.append(
            "with the names of torchtitan's llama; --config-from DIR gives them those of transformers"
            if config_from is None
            else "torchtitan's llama as that of transformers"
        )
    others = len(found.tensors) - len(tensors)
    if others:
        which = (
            f" whose names do not begin with {prefix}" if len(tensors) == len(wanted) else " that are not the model's"
        )
        notes.append(f"without {others} tensors{which}")
    if pickled:
        notes.append(f"without what is only in pickles: {listed(pickled, _SHOWN)}")
    return notes


def _parts(tensors: dict[str, StoredTensor]) -> str:
    """What the names of tensors begin with, and how many do."""
    counts = Counter(name.partition(".")[0] + "." for name in tensors if "." in name)
    return ", ".join(f"{count} begin with {part}" for part, count in counts.most_common(_SHOWN)) or "no name has parts"


def _files_beside(directory: Path) -> list[Path]:
    paths = sorted({path for name in _BESIDE for path in directory.glob(name) if path.name != INDEX_FILE})
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; give a directory of Hugging Face with --config-from.")
    return [path for path in paths if path.is_file()]
