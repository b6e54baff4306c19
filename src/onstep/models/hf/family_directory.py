"""Reads, builds and writes models of `transformers` whose family Onstep does not implement itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from onstep.config import ModelConfig
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, MissingExtraError, OnstepError
from onstep.models.deferred import DeferredTensor, gathered
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.values import short
from onstep.models.hf.weight_files import MAX_SHARD_BYTES, read_object, weight_files, write_weights

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
GENERATION = "generation_config"
"""The entry of `model.hf_config` with the directory's `generation_config.json`."""
MAX_SHARD_SIZE = "5GB"
NO_LIMIT = 1 << 20
"""Length of a sequence where `config.json` has no limit of positions."""
_SHOWN = 5


def family_config(directory: str | Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """The configuration of a directory whose model is one of `transformers`, from `config.json` alone.

    Args:
        trust_remote_code: whether code in the directory may run (`model.trust_remote_code`).

    Raises:
        ConfigError: if `transformers` has no causal language model for it, or the weights are quantized.
        MissingExtraError: if `transformers` is not installed.
    """
    target = Path(directory)
    content = read_object(target / CONFIG_FILE)
    if (target / GENERATION_FILE).is_file():
        content[GENERATION] = read_object(target / GENERATION_FILE)
    config = ModelConfig(hf_model=str(target), hf_config=content, trust_remote_code=trust_remote_code)
    text = their_config(config).get_text_config()
    config.hf_model = None
    config.vocab_size = text.vocab_size
    config.seq_length = getattr(text, "max_position_embeddings", None) or NO_LIMIT
    return config


def their_config(config: ModelConfig) -> Any:
    """The `PreTrainedConfig` of `model.hf_config`. Raises like `family_config`."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError as error:
        raise MissingExtraError(
            "a model of a family that Onstep does not implement requires transformers: pip install 'onstep[hf]'"
        ) from error
    content = {name: value for name, value in (config.hf_config or {}).items() if name != GENERATION}
    kind = content.get("model_type")
    if content.get("quantization_config"):
        method = short(content["quantization_config"].get("quant_method"))
        raise ConfigError(
            f"config.json has a quantization_config ({method}): its weights are quantized, and training starts from "
            f"unquantized ones; pass the directory of the original model, with peft.base_quantization for QLoRA."
        )
    if config.trust_remote_code and "AutoModelForCausalLM" in (content.get("auto_map") or {}):
        if config.hf_model is None:
            raise ConfigError("model.trust_remote_code=true runs code of model.hf_model; set it to the directory.")
        return AutoConfig.from_pretrained(config.hf_model, trust_remote_code=True, local_files_only=True)
    if not isinstance(kind, str) or kind not in CAUSAL:
        _refuse(content, list(CAUSAL), __version__)
    try:
        return CONFIG_MAPPING[kind].from_dict(content)
    except Exception as error:  # transformers validates with errors of its own
        raise ConfigError(
            f"config.json does not describe a model of type {kind}: {one_line(error)}; correct it, or copy it again."
        ) from error


def _refuse(content: Mapping[str, Any], known: list[str], version: str) -> NoReturn:
    kind = content.get("model_type")
    remedy = "Upgrade transformers, or pass the model to onstep.Trainer."
    if "AutoModelForCausalLM" in (content.get("auto_map") or {}):
        remedy = "If you have read the code in the directory, let it run: model.trust_remote_code=true."
    hint = nearest(kind, known) if isinstance(kind, str) else ""
    raise ConfigError(
        f"config.json has model_type {short(kind)}, for which transformers {version} has no causal language "
        f"model.{hint} {remedy}"
    )


def build_causal_lm(
    config: ModelConfig, seed: int | None = None, *, is_empty: bool = False, dtype: torch.dtype = torch.float32
) -> CausalLM:
    """A new model on the CPU, with weights as `transformers` initializes them.

    Args:
        dtype: the type of its weights.
        is_empty: do not initialize the weights, for a caller that fills them all.
        seed: determines the weights; torch's global RNG is not changed. None draws from the global RNG.

    Raises:
        ConfigError: as `family_config`.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    theirs = their_config(config)
    initial = no_init_weights() if is_empty else nullcontext()
    with _quiet(), initial, torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(theirs, dtype=dtype, trust_remote_code=config.trust_remote_code)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, ZeroDivisionError) as error:
            raise ConfigError(
                f"transformers cannot build the model of config.json: {one_line(error)}; correct its sizes."
            ) from error
    if is_empty:
        model.tie_weights()  # which the initialization does otherwise
    if (generation := (config.hf_config or {}).get(GENERATION)) is not None:
        model.generation_config = GenerationConfig.from_dict(generation)
    return _for_text(CausalLM(config, model))


def load_causal_lm(
    directory: str | Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    quantization: Any = None,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """The model of a directory with its weights, in `dtype` on the CPU; safetensors only, never pickles.

    Args:
        quantization: a `quantization_config` of transformers, which quantizes layers as they are read.
        device: where they are quantized and stay.

    Raises:
        ConfigError: as `family_config`.
        OnstepError: if the weights are missing, damaged, or those of another model.
    """
    from transformers import AutoModelForCausalLM

    target, theirs = Path(directory), their_config(config)
    quantized = {} if quantization is None else {"quantization_config": quantization, "device_map": {"": str(device)}}
    weight_files(target)  # which refuses a directory without safetensors
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            auto: Any = AutoModelForCausalLM
            model, found = auto.from_pretrained(
                str(target),
                config=theirs,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                **quantized,
            )
        except Exception as error:
            raise OnstepError(
                f"transformers cannot load the weights in {target}: {one_line(error)}; save or copy the model again."
            ) from error
    problems = {"missing": found["missing_keys"], "with a different shape": found["mismatched_keys"]}
    said = [f"{len(names)} {what} ({_first(names)})" for what, names in problems.items() if names]
    if said:
        raise OnstepError(
            f"the weights in {target} do not match its config.json: {'; '.join(said)}. Use the configuration that the "
            f"weights were saved with."
        )
    return _for_text(CausalLM(config, model))


def save_causal_lm(model: CausalLM, directory: str | Path, *, writes: bool = True) -> None:
    """Write a directory for `AutoModelForCausalLM.from_pretrained`, in shards of at most 5 GB.

    It is written beside `directory` and renamed, so a kill leaves either the old or the new one; files that are not
    the model's, such as a tokenizer's, are written afterwards. Call it from one process, or, if the weights are
    sharded, on all ranks: they are gathered one at a time.

    Args:
        model: the model.
        directory: the directory.
        writes: whether this rank writes; the others join in gathering the weights.
    """
    target = Path(directory)
    partial, old = target.with_name(f"{target.name}.partial"), target.with_name(f"{target.name}.old")
    if writes:
        for one in (partial, old):
            shutil.rmtree(one, ignore_errors=True)
    save_pretrained(model.model, partial, writes=writes)
    if not writes:
        return
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def save_pretrained(theirs: Any, directory: Path, *, writes: bool = True) -> None:
    """Call `save_pretrained` of a model of `transformers`; its weights may be deferred, or sharded over ranks.

    Collective if they are sharded. The weights are then written one at a time, in the format that it would write.
    """
    state = {name: gathered(tensor) for name, tensor in theirs.state_dict().items()}
    with _quiet():
        if not any(isinstance(tensor, DeferredTensor) for tensor in state.values()):
            if writes:
                theirs.save_pretrained(directory, max_shard_size=MAX_SHARD_SIZE, safe_serialization=True)
            return
        from transformers.core_model_loading import revert_weight_conversion

        left_out = {*(getattr(theirs, "all_tied_weights_keys", None) or ()), *(theirs._keys_to_ignore_on_save or ())}
        kept = {name: tensor for name, tensor in state.items() if name not in left_out}
        weights = revert_weight_conversion(theirs, kept)
        if writes:
            try:
                theirs.save_pretrained(directory, state_dict={})  # all but the weights
            except Exception:
                write_weights(weights, directory, MAX_SHARD_BYTES, writes=False)  # which other ranks wait for
                raise
        write_weights(weights, directory, MAX_SHARD_BYTES, writes=writes)


def _for_text(model: CausalLM) -> CausalLM:
    """Freeze what text does not pass through, such as the vision tower of a multimodal model."""
    theirs = model.model
    if theirs.config.get_text_config() is theirs.config:
        return model
    used = [theirs.get_decoder(), theirs.get_input_embeddings(), theirs.get_output_embeddings()]
    kept = {id(one) for module in used if module is not None for one in module.parameters()}
    for parameter in theirs.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and warnings of `transformers`: what matters is raised."""
    from transformers import utils

    logging: Any = utils.logging
    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def _first(names: Any) -> str:
    listed = sorted(str(one) for one in names)
    return ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")
