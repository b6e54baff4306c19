"""`onstep checkpoint export`: writes the weights of a checkpoint in formats that other programs read."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from onstep.analysis.reports.model_card import CARD_FILE, card_of_run
from onstep.analysis.text_tables import printable
from onstep.checkpoint import CheckpointInfo, FileStore, SharingPattern
from onstep.checkpoint.loading import open_weights
from onstep.checkpoint.states import mismatches
from onstep.cli.checkpoint.gguf_vocabulary import gguf_vocabulary
from onstep.cli.checkpoint.placing import check_file, check_target, put_in_place
from onstep.config import ConfigContainer, TokenizerConfig, from_dict
from onstep.data import Tokenizer, build_tokenizer, tokenizer_in_run
from onstep.data.corpus.tokenizer_files import tokenizer_in_dir
from onstep.errors import CheckpointError, ConfigError, DataError, MissingExtraError
from onstep.models import Transformer, load_hf
from onstep.models.deferred import deferred
from onstep.models.hf.any_directory import LanguageModel, fill_deferred, save_directory
from onstep.models.hf.directory import deferred_from_hf, load_hf_config
from onstep.models.hf.gguf_file import check_gguf, write_gguf
from onstep.models.hf.gguf_types import DTYPES, check_gguf_file, check_type, import_gguf
from onstep.models.hf.weight_files import INDEX_FILE, MAX_SHARD_BYTES, WEIGHTS_FILE, write_file, write_weights
from onstep.training.runs.identity import changed_tokenizer
from onstep.training.setup.checkpoint_models import (
    cast_deferred,
    deferred_model_of,
    deferred_weights,
    empty_for,
    in_types_of,
)


def check_ending(out: str) -> None:
    """Check that a name does not ask for a format that cannot be written; `mine-1.5` is a name without an ending.

    Raises:
        ConfigError: for another ending than `.safetensors` and `.gguf`, or for one of them on a directory (`a.gguf/`).
    """
    name = Path(out)
    while name.suffix[1:2].isalpha():
        name = name.with_suffix("")
    ending = Path(out).name.lower().removeprefix(name.name.lower())
    if not ending or (ending.endswith((".safetensors", ".gguf")) and not out.endswith("/")):
        return
    kind = "directories" if out.endswith("/") else "files"
    raise ConfigError(
        f"cannot write {ending} {kind}, got {out}: the formats are a .safetensors file, a .gguf file and a Hugging "
        f"Face directory; name {name}, or pass --format hf to keep the name"
    )


def export_safetensors(info: CheckpointInfo, out: Path, *, force: bool, dtype: torch.dtype | None) -> list[str]:
    """Write the weights as one safetensors file, tied weights once; returns notes for the user.

    As in `safetensors.torch.save_model`, the file's metadata maps each dropped name of a tied weight to the name it is
    stored under, so `safetensors.torch.load_model` restores the whole model.

    Raises:
        CheckpointError: when `out` cannot be written or replaced, or the checkpoint has not one set of weights.
    """
    check_file(out, "model.safetensors", force)
    tensors, tied = _as_stored(info), open_weights(info).tied
    if dtype is not None:
        tensors = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
    store = FileStore()

    def write(temporary: Path) -> None:
        with store.open(temporary) as file:
            write_file(file.write, tensors, tied)

    put_in_place(store, out, write)
    return [f"{len(tensors)} tensors", *(f"{name} is stored as {kept}" for name, kept in tied.items())]


def export_gguf(
    info: CheckpointInfo, out: Path, *, force: bool, dtype: torch.dtype | None, quantization: str | None = None
) -> list[str]:
    """Write one GGUF file with the weights and the tokenizer; returns notes for the user.

    Args:
        quantization: the type of the matrices; None is that of `dtype`.

    Raises:
        CheckpointError: when `out` cannot be written or replaced, or the weights do not match the stored configuration.
        ConfigError: for a model that llama.cpp cannot compute.
        DataError: for a tokenizer that the file cannot hold.
        MissingExtraError: if the `gguf` package is not installed.
    """
    kind = None if quantization is None else check_type(quantization, str(out))
    import_gguf()
    check_file(out, "model.gguf", force)
    if _is_hf_directory(info):
        check_gguf(load_hf_config(info.path))
        tokenizer_config = tokenizer_in_dir(info.path)
        if tokenizer_config is None:
            raise CheckpointError(
                f"{info.path} has no tokenizer, which a GGUF file requires; pass processing_class to the Trainer, or "
                "export with --format hf, put the tokenizer's files there and use convert_hf_to_gguf.py of llama.cpp."
            )
        hf_config = load_hf_config(info.path)
        model = deferred_from_hf(hf_config, deferred_weights(info)) if is_in_shards(info) else load_hf(info.path)
    else:
        config = _stored_config(info)
        _check_family(config)
        tokenizer_config = tokenizer_in_run(config.tokenizer, info.path)
        model = _model(info, config)
        check_gguf(model.config)
    tokenizer = build_tokenizer(tokenizer_config)
    kind = kind or DTYPES[dtype or model.embedding.weight.dtype]
    vocabulary = gguf_vocabulary(tokenizer, model.embedding.num_embeddings)
    store, kinds = FileStore(), Counter[str]()

    def write(temporary: Path) -> None:
        kinds.update(write_gguf(model, temporary, name=out.stem, vocabulary=vocabulary, kind=kind))
        check_gguf_file(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())

    put_in_place(store, out, write)
    tensors = ", ".join(f"{number} tensors in {name}" for name, number in kinds.items())
    return [f"{model.num_parameters():,} parameters", tensors, f"with the tokenizer {tokenizer.fingerprint}"]


def export_hf(info: CheckpointInfo, out: Path, *, force: bool, dtype: torch.dtype | None) -> list[str]:
    """Write a directory that `transformers` can load, with the tokenizer's files; returns notes for the user.

    Raises:
        CheckpointError: when `out` cannot be written or replaced, or the weights do not match the stored configuration.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; name a directory, or use --format safetensors.")
    check_target(out, force)
    store = FileStore()
    if _is_hf_directory(info):
        if dtype is not None:
            raise CheckpointError(
                f"{info.path} holds the files of a transformers model, which are copied as they are; drop --dtype and "
                "pass dtype to from_pretrained."
            )
        ready = _top_files(info)

        def copy(temporary: Path) -> None:
            temporary.mkdir()
            for name in ready:
                shutil.copyfile(info.path / name, temporary / name)
                store.adopt(temporary / name)
            if is_in_shards(info):
                write_weights(_as_stored(info), temporary, MAX_SHARD_BYTES)
                for path in temporary.glob("model*"):
                    store.adopt(path)
            if CARD_FILE not in ready and (run := run_of(info)) is not None:
                (temporary / CARD_FILE).write_text(card_of_run(run, out.name, info.step), encoding="utf-8")
            store.sync_dir(temporary)

        put_in_place(store, out, copy)
        weights = ", and the weights of all ranks" if is_in_shards(info) else ""
        return [f"{len(ready)} files, as they are in the checkpoint{weights}"]
    config = _stored_config(info)
    model: LanguageModel
    if config.model.hf_config is None:
        model = _model(info, config)
        cast_deferred(model, dtype or model.embedding.weight.dtype)
    else:
        model = deferred_model_of(info, config.model)
        if dtype is not None:
            cast_deferred(model, dtype)
    tokenizer, notes = _tokenizer(config.tokenizer, info)
    run = run_of(info)

    def write(temporary: Path) -> None:
        save_directory(model, temporary, eos_id=None if tokenizer is None else tokenizer.eos_id)
        if tokenizer is not None:
            tokenizer.save(temporary)
        if run is not None:
            (temporary / CARD_FILE).write_text(card_of_run(run, out.name, info.step), encoding="utf-8")
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        store.sync_dir(temporary)

    put_in_place(store, out, write)
    return [f"{model.num_parameters():,} parameters", *notes]


def _check_family(config: ConfigContainer) -> None:
    """Refuse a GGUF file of a family whose names and layouts only llama.cpp's own converter knows."""
    if config.model.hf_config is not None:
        raise ConfigError(
            f"cannot write GGUF for a model of the type {config.model.hf_config.get('model_type')}: Onstep writes it "
            f"for its own families only; export with --format hf and use convert_hf_to_gguf.py of llama.cpp."
        )


def run_of(info: CheckpointInfo) -> Path | None:
    """The directory of the run that a checkpoint is in; None for a checkpoint elsewhere."""
    return next((one for one in info.path.absolute().parents if (one / "run.json").is_file()), None)


def _top_files(info: CheckpointInfo) -> list[str]:
    return [name for name in info.manifest.files if "/" not in name]


def _is_hf_directory(info: CheckpointInfo) -> bool:
    """Whether the checkpoint is that of a Trainer with a `transformers` model, which its own files describe."""
    names = set(_top_files(info))
    return "config.json" in names and (is_in_shards(info) or not names.isdisjoint((WEIGHTS_FILE, INDEX_FILE)))


def is_in_shards(info: CheckpointInfo) -> bool:
    """Whether several ranks have written parts of the weights."""
    entry = info.manifest.components.get("model")
    return entry is not None and entry.sharing_pattern == SharingPattern.SHARDED


def _as_stored(info: CheckpointInfo) -> dict[str, Tensor]:
    """The weights as they are in the checkpoint, tied ones once."""
    return {name: deferred(one.shape, one.dtype, one.read) for name, one in open_weights(info).tensors.items()}


def _stored_config(info: CheckpointInfo) -> ConfigContainer:
    if not info.manifest.config:
        raise CheckpointError(f"{info.path} contains no configuration; {_INSTEAD}")
    try:
        return from_dict(info.manifest.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{info.path} has a configuration that this version of Onstep cannot read ({error}); {_INSTEAD}"
        ) from error


_INSTEAD = "export its weights with --format safetensors."


def _model(info: CheckpointInfo, config: ConfigContainer) -> Transformer:
    """The model of a checkpoint, each of whose weights is read when it is written."""
    state = deferred_weights(info)
    problems = _why_not(config, state)
    if problems:
        raise CheckpointError(
            f"{info.path} does not contain the Onstep Transformer that its configuration describes ({problems}), so no "
            f"config.json for transformers can be written. For your own model, {_INSTEAD} For a transformers model, "
            f"load that file into it and call save_pretrained."
        )
    model = empty_for(config.model, state, device="meta")
    assert isinstance(model, Transformer)
    fill_deferred(model, in_types_of(model, state))
    return model


def _why_not(config: ConfigContainer, state: dict[str, Tensor]) -> str:
    """The reason why the weights do not fit the configured model; '' if they do."""
    if config.model.vocab_size is None:
        return "its configuration does not set model.vocab_size"
    try:
        model = empty_for(config.model, state, device="meta")
    except ConfigError as error:
        return str(error)
    weights = model.state_dict()
    expected = {name: tensor.to(state[name].dtype) if name in state else tensor for name, tensor in weights.items()}
    return printable("; ".join(mismatches(expected, state)))


def _tokenizer(config: TokenizerConfig, info: CheckpointInfo) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of the checkpoint's run, and notes about it."""
    try:
        config = tokenizer_in_run(config, info.path)
        tokenizer = build_tokenizer(config)
    except (DataError, MissingExtraError) as error:
        return None, [f"without the tokenizer: {error}"]
    source = getattr(tokenizer, "path", None)
    if source is None:
        return tokenizer, [f"with the tokenizer {tokenizer.fingerprint}"]
    changed = changed_tokenizer(config, info.manifest.extra.get("identity"))
    return tokenizer, [f"with the tokenizer from {source}", *([changed] if changed else [])]
