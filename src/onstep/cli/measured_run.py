"""Makes from a configuration the short run whose memory `onstep memory --measure` measures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from onstep.config import CheckpointConfig, ConfigContainer, DatasetConfig, ModelConfig
from onstep.config.keys import typed_copy
from onstep.errors import ConfigError
from onstep.metrics.memory.estimate import accumulates
from onstep.models import Transformer, hf_config_dict
from onstep.models.hf.directory import architecture_of
from onstep.models.hf.weight_files import MAX_SHARD_BYTES, write_weights

STEPS = 2


def short_run(config: ConfigContainer, directory: Path) -> ConfigContainer:
    """A run of two steps on random tokens, with the model, the batch, the precision and the optimizer of `config`.

    Args:
        config: resolved.
        directory: where its data is written, and for LoRA without pretrained weights, weights of 0.

    Raises:
        ConfigError: for a model that cannot be written as pretrained weights, which LoRA starts from.
    """
    short, train = ConfigContainer(), config.train
    own = typed_copy(config)
    short.model, short.optimizer, short.peft, short.dist = own.model, own.optimizer, own.peft, own.dist
    short.mixed_precision = own.mixed_precision
    short.ddp.use_distributed_optimizer = own.ddp.use_distributed_optimizer
    short.ddp.fp8_param_gather = own.ddp.fp8_param_gather
    short.run.default_callbacks, short.run.check_memory = False, False
    short.logger.console = "quiet"
    micro = train.micro_batch_size or 1
    short.train.micro_batch_size = micro
    short.train.global_batch_size = micro * (2 if accumulates(config, 1) else 1)
    short.train.train_iters, short.train.tf32 = STEPS, train.tf32
    short.train.deterministic, short.train.torch_compile = train.deterministic, train.torch_compile
    short.scheduler.lr_decay_style, short.optimizer.min_lr = "constant", None
    short.optimizer.decoupled_min_lr, short.optimizer.lr = None, config.optimizer.lr or 1e-4
    short.validation.eval_iters = 0
    directory.mkdir(exist_ok=True)
    text = directory / "text.txt"
    length = STEPS * short.train.global_batch_size * config.model.seq_length + 1
    text.write_bytes(bytes(random.Random(0).choices(b"abcdefghijklmnopqrstuvwxyz \n", k=length)))
    short.dataset = DatasetConfig(
        paths=[str(text)], seq_length=config.model.seq_length, cache_dir=str(directory / "tokens"), split="1,0,0"
    )
    short.checkpoint = CheckpointConfig()
    if config.peft.peft_scheme is not None:
        given = config.checkpoint.pretrained_checkpoint
        if (given is None or not Path(given).exists()) and config.model.hf_config is not None:
            raise ConfigError("LoRA starts from weights: pass --hf-model a directory that has them (*.safetensors).")
        if given is None or not Path(given).exists():
            given = str(_write_weights(config, directory / "weights"))
        short.checkpoint.pretrained_checkpoint, short.checkpoint.finetune = given, True
    return short


def tiny(config: ConfigContainer) -> ConfigContainer:
    """The same with a model of no size to speak of."""
    small = typed_copy(config)
    small.model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=512, seq_length=64)
    small.checkpoint.pretrained_checkpoint = None
    return small


def _write_weights(config: ConfigContainer, directory: Path) -> Path:
    """Weights of 0 in bfloat16, which LoRA starts from; no page of memory is used for them."""
    with torch.device("meta"):
        model = Transformer(config.model)
    shapes = architecture_of(config.model).to_hf(model.state_dict())
    directory.mkdir()
    tensors = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in shapes.items()}
    write_weights(tensors, directory, MAX_SHARD_BYTES)
    (directory / "config.json").write_text(json.dumps(hf_config_dict(config.model, dtype="bfloat16")))
    return directory
