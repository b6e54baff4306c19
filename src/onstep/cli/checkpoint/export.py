"""`onstep checkpoint export`: the weights of a checkpoint for other programs."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from onstep.analysis.text_tables import printable
from onstep.checkpoint import CheckpointInfo, FileStore, ModelState, write_tensors
from onstep.checkpoint.loading import read_weights
from onstep.checkpoint.states import mismatches
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.checkpoint.storage.store import TEMPORARY
from onstep.config import ConfigContainer, from_dict
from onstep.config.parts import TokenizerConfig
from onstep.data import Tokenizer, build_tokenizer, tokenizer_in_run
from onstep.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from onstep.models import Transformer, save_hf
from onstep.models.transformer import empty_transformer
from onstep.training.setup.lora import merged_state_dict

_EXPORTED = (".json", ".safetensors", ".txt", ".model", ".jinja", ".md")
"""Ends of the names of files in a Hugging Face directory; a folder with anything else in it is never replaced."""


def export_safetensors(info: CheckpointInfo, out: Path, *, force: bool) -> list[str]:
    """Write the weights as one safetensors file, tied ones once; gives what there is to say about it.

    The names that tied weights lost stand in the file's metadata, each with the name that it is stored under, as
    `safetensors.torch.save_model` has it, so that `safetensors.torch.load_model` fills the whole model.

    Raises:
        CheckpointError: when `out` is in the way, or the checkpoint has no weights in one piece.
    """
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder; give the name of a file, such as {out / 'model.safetensors'}.")
    _check_target(out, force)
    tensors, tied = read_weights(info)
    store = FileStore()

    def write(temporary: Path) -> None:
        with store.open(temporary) as file:
            write_tensors(file, tensors, {"format": "pt", **tied})

    _put_in_place(store, out, write)
    return [f"{len(tensors)} tensors", *(f"{name} is stored as {kept}" for name, kept in tied.items())]


def export_hf(info: CheckpointInfo, out: Path, *, force: bool) -> list[str]:
    """Write a folder that `transformers` opens, with the tokenizer's files; gives what there is to say about it.

    Raises:
        CheckpointError: when `out` is in the way, or the weights are not those of the stored configuration's model.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; give the name of a folder, or --format safetensors.")
    _check_target(out, force)
    config = _stored_config(info)
    model = _model(info, config)
    tokenizer, notes = _tokenizer(config.tokenizer, info.path)
    store = FileStore()

    def write(temporary: Path) -> None:
        save_hf(model, temporary, eos_id=None if tokenizer is None else tokenizer.eos_id)
        if tokenizer is not None:
            tokenizer.save(temporary)
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        store.sync_folder(temporary)

    _put_in_place(store, out, write)
    return [f"{model.num_parameters():,} parameters", *notes]


def _stored_config(info: CheckpointInfo) -> ConfigContainer:
    if not info.manifest.config:
        raise CheckpointError(f"{info.path} holds no configuration; {_INSTEAD}")
    try:
        return from_dict(info.manifest.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{info.path} has a configuration that this version of Onstep cannot read ({error}); {_INSTEAD}"
        ) from error


_INSTEAD = "export its weights with --format safetensors."


def _model(info: CheckpointInfo, config: ConfigContainer) -> Transformer:
    tensors, tied = read_weights(info)
    state = {**tensors, **{name: tensors[kept] for name, kept in tied.items()}}
    if config.peft.peft_scheme is not None:
        state = merged_state_dict(state, config.peft.alpha / config.peft.dim)
    problems = _why_not(config, state)
    if problems:
        raise CheckpointError(
            f"{info.path} does not hold Onstep's own Transformer as its configuration describes it ({problems}), so no "
            f"config.json of transformers can be written for it. A model of your own: {_INSTEAD} One of transformers: "
            f"load that file into it and call its save_pretrained."
        )
    model = empty_transformer(config.model).to(state["embedding.weight"].dtype)
    ModelState([model]).load_state_dict(state)
    return model


def _why_not(config: ConfigContainer, state: dict[str, Tensor]) -> str:
    """Why the weights are not the configured model's; '' if they are."""
    if config.model.vocab_size is None:
        return "its configuration names no model.vocab_size"
    try:
        model = empty_transformer(config.model)
    except ConfigError as error:
        return str(error)
    weights = model.state_dict()
    expected = {name: tensor.to(state[name].dtype) if name in state else tensor for name, tensor in weights.items()}
    return printable("; ".join(mismatches(expected, state)))


def _tokenizer(config: TokenizerConfig, checkpoint: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of the run that the checkpoint is of, and what to say about it."""
    try:
        tokenizer = build_tokenizer(tokenizer_in_run(config, checkpoint))
    except (DataError, MissingExtraError) as error:
        return None, [f"without the tokenizer: {error}"]
    source = getattr(tokenizer, "path", None)
    return tokenizer, [
        f"the tokenizer {config.tokenizer_type!r} has no files" if source is None else f"with the tokenizer of {source}"
    ]


def _check_target(out: Path, force: bool) -> None:
    if any((parent / MANIFEST).exists() for parent in (out.resolve(), *out.resolve().parents)):
        raise CheckpointError(f"{out} lies in a checkpoint, where nothing else belongs; choose another place.")
    if not os.path.lexists(out):
        return
    if not force:
        raise CheckpointError(f"{out} exists; choose another name, or replace it with --force.")
    if out.is_dir() and not out.is_symlink():
        foreign = sorted(path.name for path in out.iterdir() if path.is_dir() or path.suffix not in _EXPORTED)
        if foreign or (any(out.iterdir()) and not (out / "config.json").is_file()):
            why = f"it holds {', '.join(foreign[:5])}" if foreign else "it has no config.json"
            raise CheckpointError(f"{out} is no earlier export ({why}), so --force does not replace it; remove it.")


def _put_in_place(store: FileStore, out: Path, write: Callable[[Path], None]) -> None:
    """Make a file or folder beside `out`, durable, and give it its name; a failure leaves `out` as it was."""
    store.make_root(out.parent)
    temporary = out.with_name(f"{TEMPORARY}{out.name}-{secrets.token_hex(4)}")
    replaced = out.with_name(f"{temporary.name}-replaced")
    try:
        write(temporary)
        if out.is_dir() and not out.is_symlink():  # a folder cannot be renamed over one that is not empty
            store.rename(out, replaced)
        store.rename(temporary, out)
        store.sync_folder(out.parent)
    finally:
        _remove(temporary)
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
