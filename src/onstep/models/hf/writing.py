"""Writes models of Onstep as directories for `from_pretrained`: weights under names of `transformers`, and the rest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.files.durability import replace_durably
from onstep.models.deferred import gathered
from onstep.models.heads import replicated_layers
from onstep.models.hf.directory import CONFIG_FILE, architecture_of, hf_config_dict
from onstep.models.hf.weight_files import MAX_SHARD_BYTES, write_weights
from onstep.models.transformer import Transformer


def to_hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names; tied ones once, as the embedding.

    They share memory with the model if `transformers` stores them in the same layout.

    Args:
        model: the model whose weights are renamed.

    Raises:
        ConfigError: for a model that no `transformers` architecture computes, or one with a value head.
    """
    architecture = architecture_of(model.config)
    check_heads(model, architecture.class_name)
    return architecture.to_hf(model.state_dict())


def deferred_hf_weights(model: Transformer) -> dict[str, Tensor]:
    """The same, with those deferred that are sharded over ranks."""
    architecture = architecture_of(model.config)
    check_heads(model, architecture.class_name)
    return architecture.to_hf({name: gathered(tensor) for name, tensor in model.state_dict().items()})


def hf_obstacle(model: Transformer) -> str | None:
    """The reason why `transformers` cannot open `model`, with a remedy; None if it can."""
    try:
        check_heads(model, architecture_of(model.config).class_name)
    except ConfigError as error:
        return str(error)
    return None


def check_heads(model: nn.Module, class_name: str) -> None:
    """Refuse a model with a layer that has no counterpart in `transformers`' language models.

    Raises:
        ConfigError: naming the layer.
    """
    for name, layer in replicated_layers(model).items():
        raise ConfigError(
            f"the model's {name!r} is a value head ({type(layer).__name__}), which transformers' {class_name} does "
            f"not have; keep the model in Onstep checkpoints, or restore its language-model head."
        )


def save_hf(
    model: Transformer,
    directory: str | Path,
    *,
    tokenizer_files: Sequence[str | Path] = (),
    eos_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    writes: bool = True,
) -> None:
    """Write `model` to `directory`, created if needed, for `AutoModelForCausalLM.from_pretrained`.

    Each file is replaced atomically: a kill leaves either the old or the new one. Call it from one process, or, if the
    weights are sharded, on all ranks: they are gathered one at a time. Tied weights are stored once.

    Args:
        model: the model.
        directory: the directory.
        tokenizer_files: files to copy next to the weights (`tokenizer.json`, `tokenizer_config.json`, ...).
        eos_id: token at which `transformers` ends generated text; None for none.
        max_shard_bytes: size of a file of weights, in bytes, beyond which they are split into several with an index.
        writes: whether this rank writes; the others join in gathering the weights.

    Raises:
        ConfigError: for a model that no `transformers` architecture computes, or one with a value head.
    """
    target = Path(directory)
    types = sorted({str(one.dtype).removeprefix("torch.") for one in model.parameters()})
    dtype = types[0] if len(types) == 1 else "float32"
    config = hf_config_dict(model.config, eos_id=eos_id, dtype=dtype)
    write_weights(deferred_hf_weights(model), target, max_shard_bytes, writes=writes)
    if not writes:
        return
    replace_durably(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    for file in tokenizer_files:
        shutil.copy(file, target)
