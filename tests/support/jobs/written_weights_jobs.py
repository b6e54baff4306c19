"""What the ranks of the tests of weights that are written from shards run: `job_*(settings)`."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from onstep import Trainer, TrainingArguments
from onstep.checkpoint import CheckpointManager, ModelState, SaveRequest, SharingPattern, StateComponent
from onstep.config import ModelConfig, PeftConfig
from onstep.config.container import ConfigContainer
from onstep.distributed import World
from onstep.errors import CheckpointError
from onstep.models.hf.any_directory import build_model, save_directory
from onstep.training.checkpointing.optimizer_state import OptimizerState
from onstep.training.setup.final_weights import write_final_weights
from onstep.training.setup.lora import add_lora, merged_model, save_adapter
from tests.support.small_configs import GPT2
from tests.support.small_configs import SIZES as SMALL
from tests.support.small_models import Regression, causal_rows

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "tie_word_embeddings": True,
}
LORA = PeftConfig(peft_scheme="lora", dim=2)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {**SMALL, **GPT2},
    "lora": SMALL,
    "family": {"hf_config": MIXTRAL, "vocab_size": 67, "seq_length": 32},
}
"""The models, by name, with the fields of their configurations."""


def made(name: str) -> nn.Module:
    """A model, to be sharded over the ranks if there are several."""
    model = build_model(ModelConfig(**MODELS[name]), seed=1)
    if name == "lora":
        add_lora(model, LORA, seed=2)
        with torch.no_grad():
            for number, (_, parameter) in enumerate(model.named_parameters()):
                parameter.add_(0.01 * number)
    return _sharded(model)


def _sharded(model: nn.Module) -> nn.Module:
    if dist.is_initialized():
        blocks = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
        for block in blocks[0] if blocks else []:
            fully_shard(block)
        fully_shard(model)
    return model


def write(name: str, directory: str, *, writes: bool = True) -> None:
    """Write a model as a run writes its final weights."""
    model: Any = made(name)
    if name == "lora":
        save_adapter(model, LORA, f"{directory}/adapter", None, writes=writes)
        model = merged_model(model, LORA)
    save_directory(model, f"{directory}/model", writes=writes)


def save(name: str, world: World) -> None:
    """Save a model in shards, as a run does. Collective."""
    config = ConfigContainer()
    config.model = ModelConfig(**MODELS[name])
    config.peft = LORA if name == "lora" else config.peft
    component = StateComponent("model", ModelState([made(name)]), SharingPattern.SHARDED)
    manager = CheckpointManager(Path("saved", name), world)
    manager.save(SaveRequest(1, [component], config.to_dict()))
    manager.close()


def write_by_trainer(kind: type[Trainer], model: nn.Module, directory: str) -> None:
    """Write a model as the user of a Trainer does."""
    trainer = kind(model, TrainingArguments(output_dir=f"{directory}-run", report_to=[]))
    trainer.save_model(directory)


def train_adapter(directory: str) -> None:
    """Train the LoRA of a user's own `peft` model for two steps, with a checkpoint after the first."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    base = build_model(ModelConfig(**MODELS["family"]), seed=1).model
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4 // ranks, "max_steps": 2, "save_steps": 1}
    if ranks > 1:
        arguments["fsdp"] = "full_shard"
    args = TrainingArguments(output_dir=directory, use_cpu=True, disable_tqdm=True, report_to=[], **arguments)
    Trainer(model, args, train_dataset=causal_rows(8)).train()  # type: ignore[arg-type]


class WithOwnSave(Trainer):
    """Whose user writes the weights in another way."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        Path(output_dir).mkdir()
        torch.save({name: one.clone() for name, one in state_dict.items()}, Path(output_dir, "own.pt"))


def job_written(settings: dict[str, Any]) -> dict[str, Any]:
    """Write sharded models; an error that all ranks have is returned."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in MODELS:
        write(name, name, writes=rank == 0)
        save(name, World(rank=rank, size=dist.get_world_size()))
    plain = _sharded(Regression())
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9)
    with torch.no_grad():
        plain(torch.ones(2, 3))  # after which it holds whole weights, as after an evaluation
        names = OptimizerState(optimizer, [plain]).state_dict()["param_groups"][0]["params"]
        plain(torch.ones(2, 3))
    write_by_trainer(Trainer, plain, "plain")
    write_by_trainer(Trainer, made("family").model, "theirs")  # type: ignore[arg-type]
    train_adapter("adapted")
    write_by_trainer(WithOwnSave, _sharded(Regression()), "own")
    return {"error": _error_of_writing(rank), "names": names}


def _error_of_writing(rank: int) -> str:
    """The error on this rank where rank 0 cannot write."""
    config = ConfigContainer()
    never = SimpleNamespace(should_abort_without_save=False, decided=None)
    run: Any = SimpleNamespace(
        run_dir=SimpleNamespace(model=Path("full/model"), path=Path("full")),
        world=World(rank=rank, size=dist.get_world_size()),
        cfg=config,
        control=never,
        exits=never,
        checkpoints=None,
    )
    if rank == 0:
        Path("full").write_text("a file where the directory would be")
    dist.barrier()
    model: Any = made("llama")
    try:
        write_final_weights(run, lambda directory: save_directory(model, directory.model, writes=rank == 0), model)
    except CheckpointError as error:
        return str(error)
    return os.environ["RANK"]
