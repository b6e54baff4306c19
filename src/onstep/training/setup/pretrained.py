"""Finds and loads the pretrained weights that a run starts from, and fills its model section from them."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from onstep.checkpoint import CheckpointInfo, checkpoints, read_manifest, resolve
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.config import ConfigContainer, ModelConfig, TokenizerConfig, from_dict
from onstep.config.checks.run import check_finetune, loads_own
from onstep.config.checks.single_values import check_values
from onstep.config.derived import fill
from onstep.config.keys import typed_copy
from onstep.data import tokenizer_in_run
from onstep.data.corpus.tokenizer_files import tokenizer_in_dir
from onstep.distributed import World, on_main
from onstep.errors import ConfigError, MissingWeightsError, RunExistsError
from onstep.mirror.copies import trained_copy
from onstep.models.hf.any_directory import LanguageModel, config_of_directory, load_directory
from onstep.models.quantized_layers import check_installed
from onstep.stores.urls import is_url
from onstep.training.runs.identity import changed_tokenizer
from onstep.training.runs.run_dir import RunDir
from onstep.training.setup.checkpoint_models import model_of
from onstep.training.setup.quantized_base import quantized_directory, quantized_model, weights_by_layer

logger = logging.getLogger(__name__)

OF_TRAINING = frozenset(
    {
        "hf_model",
        "trust_remote_code",
        "chunked_loss",
        "seq_length",
        "make_vocab_size_divisible_by",
        "init_method_std",
        "attention_dropout",
        "hidden_dropout",
        "recompute_granularity",
        "recompute_interval",
        "offload_activations",
        "fused_linear_loss",
        "log_max_attention_logit",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_grouped_gemm",
        "moe_per_layer_logging",
        "mtp_loss_scaling_factor",
    }
)
"""Settings that a run may choose freely: how a model is trained, not which model it is."""


def fill_model(
    config: ConfigContainer, model: ModelConfig, tokenizer: TokenizerConfig | None, where: str
) -> ConfigContainer:
    """A copy of `config` with the model of pretrained weights, and their tokenizer if the configuration names none.

    Args:
        config: its model values apply if they are not the defaults, and must then match the weights.
        model: the model of the weights.
        tokenizer: the tokenizer of the weights, if known.
        where: the weights or the `config.json`, in words for messages.

    Raises:
        ConfigError: naming the first value that differs from that of the weights.
    """
    config = typed_copy(config)
    if model.position_embedding_type == "learned_absolute" and config.model.seq_length != model.seq_length:
        raise ConfigError(
            f"model.seq_length={config.model.seq_length} must be {model.seq_length}: {where} has that "
            f"many learned positions; set model.seq_length and dataset.seq_length."
        )
    theirs, default = _filled(config, model), ModelConfig()
    has = "has" if where.endswith(CONFIG_FILE) else "have"
    ours = _filled(config, config.model)
    taken = []
    compared = [field.name for field in fields(ModelConfig) if field.name not in OF_TRAINING]
    if model.hf_config is not None:  # any other option is refused by the checks
        compared = ["hf_config", "vocab_size"]
    for name in compared:
        own, of_weights = getattr(config.model, name), getattr(theirs, name)
        if own == getattr(default, name):
            if own != of_weights:
                setattr(config.model, name, of_weights)
                taken.append(_taken(name, of_weights))
        elif not _same(getattr(ours, name), of_weights):
            raise ConfigError(
                f"model.{name}={own} does not match {where}, which {has} {of_weights}; leave it out, or "
                f"set it to its default, to use that."
            )
    config.model.hf_model = config.model.hf_model or model.hf_model
    origin = f"as configured; {where} {'comes' if has == 'has' else 'come'} without one"
    if tokenizer is not None and config.tokenizer == TokenizerConfig():
        config.tokenizer, origin = tokenizer, f"that of {where}"
    elif tokenizer is not None and _named(config.tokenizer) == _named(tokenizer):
        origin = f"that of {where}"
    elif tokenizer is not None:
        origin = f"as configured, not that of {where} ({_named(tokenizer)})"
    logger.info("tokenizer: %s, %s", _named(config.tokenizer), origin)
    if taken:
        logger.info("model taken from %s: %s", where.removeprefix("the weights in "), ", ".join(taken))
    return config


def _taken(name: str, value: object) -> str:
    if name == "hf_config" and isinstance(value, dict):
        return f"the class of transformers for model_type {value.get('model_type')}"
    return f"{name}={value}"


def _named(tokenizer: TokenizerConfig) -> str:
    path = tokenizer.tokenizer_model
    return tokenizer.tokenizer_type if path is None else f"{tokenizer.tokenizer_type} {path}"


def _filled(config: ConfigContainer, model: ModelConfig) -> ModelConfig:
    """`model` with its derived sizes."""
    whole = typed_copy(config)
    whole.model = model
    return fill(whole, 1).model


def _same(own: object, theirs: object) -> bool:
    if isinstance(own, float) and isinstance(theirs, float):
        return math.isclose(own, theirs, rel_tol=1e-9)  # written in another precision
    return bool(own == theirs)


CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class PretrainedSource:
    """Pretrained weights, located but not read."""

    path: Path
    """A Hugging Face directory, a checkpoint, or a directory of checkpoints."""
    is_hugging_face: bool
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    """The tokenizer of the weights, if the source records it."""
    step: int | None = None
    """The step to load from a directory of checkpoints; None is the newest."""
    recorded: object = None
    """Digests of what the weights were trained with, as their run recorded them."""


def pretrained_path(config: ConfigContainer) -> tuple[Path, int | None] | None:
    """The pretrained weights that the configuration names to start from, and their step; None if it names none."""
    checkpoint = config.checkpoint
    if checkpoint.pretrained_checkpoint is not None:
        return _local(checkpoint.pretrained_checkpoint), None
    if checkpoint.finetune and checkpoint.load is not None and not loads_own(config):
        return _local(checkpoint.load), checkpoint.ckpt_step
    return None


def _local(place: str) -> Path:
    """A directory, or the local copy of what a URL names."""
    return trained_copy(place) if is_url(place) else Path(os.path.expanduser(place))


def find_pretrained(config: ConfigContainer) -> PretrainedSource | None:
    """The pretrained weights that the configuration names; None if it names none.

    A directory with a `config.json` is a Hugging Face model; of a run, the final weights are used, else its newest
    checkpoint.

    Raises:
        MissingWeightsError: if nothing exists there.
        ConfigError: for a model that the built-in transformer cannot represent.
    """
    named = pretrained_path(config)
    if named is None:
        return None
    path, step = named
    if not path.exists():
        raise MissingWeightsError(
            f"{_key(config)}={path} does not exist; pass a Hugging Face directory, a run or a checkpoint."
        )
    run = RunDir(path) if (path / "run.json").is_file() else None
    directory = path if run is None or (path / CONFIG_FILE).is_file() else run.model
    if (run is not None and step is not None) or not (directory / CONFIG_FILE).is_file():
        return _of_checkpoints(path, step, config)
    tokenizer, recorded = None, None
    if run is not None and run.layout == "onstep":
        record = run.read()
        tokenizer = tokenizer_in_run(from_dict(record["config"]).tokenizer, path)
        recorded = record.get("identity")
    model = config_of_directory(directory, trust_remote_code=config.model.trust_remote_code)
    return PretrainedSource(directory, True, model, tokenizer or tokenizer_in_dir(directory), recorded=recorded)


def find_model(config: ConfigContainer) -> PretrainedSource | None:
    """The pretrained weights that the configuration names, else the model of `model.hf_model`; None if it names none.

    Raises:
        MissingWeightsError: if nothing exists there.
        ConfigError: for a model that neither Onstep nor `transformers` has.
    """
    return find_pretrained(config) or _of_architecture(config)


def fill_from_pretrained(config: ConfigContainer) -> ConfigContainer:
    """A copy with the model and tokenizer of the pretrained weights that it names; unchanged if it names none.

    A model value left at its default is taken from the weights; any other must match them. A tokenizer left at its
    default is theirs too. If the weights are gone, a run with its own checkpoints keeps the values that it was started
    with.

    Raises:
        ConfigError: naming the first value that differs from that of the weights, or the violated rule.
        MissingWeightsError: if the weights do not exist.
    """
    config = typed_copy(config)
    if config.checkpoint.finetune and config.checkpoint.load is None:
        config.checkpoint.pretrained_checkpoint = config.checkpoint.pretrained_checkpoint or config.model.hf_model
    check_finetune(config)
    if config.peft.base_quantization is not None:
        check_installed(config.peft.base_quantization)
    try:
        source = find_model(config)
    except MissingWeightsError:
        stored = _started_with(config)
        if stored is None:
            raise
        source = PretrainedSource(Path(), False, stored.model, stored.tokenizer)
    if source is None:
        return config
    _check_one_model(config)
    is_new = pretrained_path(config) is None
    where = f"{source.path / CONFIG_FILE}" if is_new else f"the weights in {source.path}"
    config = fill_model(config, source.model, source.tokenizer, where)
    if config.tokenizer == source.tokenizer and (note := changed_tokenizer(config.tokenizer, source.recorded)):
        logger.warning("%s: %s", source.path, note)
    return config


def _check_one_model(config: ConfigContainer) -> None:
    named, weights = config.model.hf_model, config.checkpoint.pretrained_checkpoint
    if named is None or weights is None or config.model.hf_config is not None:
        return
    if Path(named).expanduser().resolve() != Path(weights).expanduser().resolve():
        raise ConfigError(
            f"model.hf_model={named} and checkpoint.pretrained_checkpoint={weights} name two models; drop one of them: "
            f"the model is that of its weights."
        )


def _of_architecture(config: ConfigContainer) -> PretrainedSource | None:
    """The model and the tokenizer of `model.hf_model`, whose weights are not used; None without."""
    if config.model.hf_model is None:
        return None
    directory = Path(os.path.expanduser(config.model.hf_model))
    if not (directory / CONFIG_FILE).is_file():
        raise MissingWeightsError(
            f"model.hf_model={config.model.hf_model} has no {CONFIG_FILE}; pass the directory of a Hugging Face model."
        )
    model = config_of_directory(directory, trust_remote_code=config.model.trust_remote_code)
    return PretrainedSource(directory, True, model, tokenizer_in_dir(directory))


def load_pretrained(
    source: PretrainedSource, config: ModelConfig, world: World, dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """A model of `config` with the pretrained weights, in `dtype` on the CPU. Collective.

    Raises:
        CheckpointError: for a checkpoint that is incomplete, or holds another model's weights.
        OnstepError: for a Hugging Face directory with the same problem.
    """
    if source.is_hugging_face:
        return load_directory(source.path, config, dtype)
    return model_of(checked(source, world), config, dtype)


def load_quantized(source: PretrainedSource, config: ConfigContainer, world: World) -> LanguageModel:
    """The same with the layers' weights as `peft.base_quantization` says; see `quantized_model`. Collective."""
    if source.is_hugging_face:
        return quantized_directory(source.path, config, world.device)
    info = checked(source, world)
    return quantized_model(config, weights_by_layer(info), str(info.path), world.device)


def checked(source: PretrainedSource, world: World) -> CheckpointInfo:
    """The checkpoint of a source, of which every file was compared with the manifest. Collective.

    Args:
        source: pretrained weights in a checkpoint.
        world: the ranks of the run.
    """
    return on_main(world, lambda: resolve(source.path, step=source.step))


def _of_checkpoints(path: Path, step: int | None, config: ConfigContainer) -> PretrainedSource:
    """The configuration stored in the newest manifest; the checkpoint's completeness is checked when it is read."""
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
    else:
        root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = [one for one in checkpoints(root) if step is None or one.step == step]
        if not found:
            wanted = "" if step is None else f" of step {step}"
            raise MissingWeightsError(
                f"{_key(config)}={path} holds neither {CONFIG_FILE} (a Hugging Face directory) nor a "
                f"checkpoint{wanted} "
                f"of Onstep; pass one of these."
            )
        manifest = found[0].manifest
    if not manifest.config:
        raise ConfigError(
            f"{path} has no configuration, so its model is unknown; export its weights and load them into your "
            f"own model."
        )
    stored = from_dict(manifest.config)
    check_values(stored.model, "model.")
    return PretrainedSource(
        path, False, stored.model, tokenizer_in_run(stored.tokenizer, path), step, manifest.extra.get("identity")
    )


def _stored_config(run: Path) -> ConfigContainer:
    return from_dict(RunDir(run).read()["config"])


def _started_with(config: ConfigContainer) -> ConfigContainer | None:
    """The stored configuration of a run that continues from its own checkpoints; None without any."""
    if config.run.name is None or config.run.fresh:
        return None
    directory = RunDir(config.run.local_output_dir / config.run.name)
    if not directory.has_checkpoints:
        return None
    try:
        stored = _stored_config(directory.path)
    except (RunExistsError, ConfigError):  # claiming the directory will report what is wrong with it
        return None
    is_same = pretrained_path(stored) == pretrained_path(config)
    return stored if is_same else None


def _key(config: ConfigContainer) -> str:
    is_named = config.checkpoint.pretrained_checkpoint is not None
    return "checkpoint.pretrained_checkpoint" if is_named else "checkpoint.load"
