"""What the ranks of the tests of `fsdp` in TrainingArguments run: `job_*(settings)`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from onstep import Trainer, TrainingArguments
from onstep.distributed.shards import is_sharded
from onstep.errors import OnstepError


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 67, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, num_key_value_heads=1, tie_word_embeddings=True, **sizes))


def trainer_of(name: str, of: type[Trainer] = Trainer, **values: Any) -> Trainer:
    values = {"max_steps": 4, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, **values}
    args = TrainingArguments(
        name, per_device_train_batch_size=2, use_cpu=True, report_to="none", disable_tqdm=True, **values
    )
    return of(model=llama(), args=args, train_dataset=Rows())


def losses_of(trainer: Trainer) -> list[float]:
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def norm_of(weights: dict[str, torch.Tensor]) -> float:
    return float(sum(one.double().norm() for name, one in weights.items() if name != "lm_head.weight"))


def _without_embedding(model: Any) -> Any:
    """As `from_pretrained` gives it to other ranks than the first for weights that no file has."""
    model.get_input_embeddings().weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    model.tie_weights()
    return model


def job_train(settings: dict[str, Any]) -> dict[str, Any]:
    """A script for Hugging Face's Trainer, with these arguments, and what it asks the accelerator afterwards."""
    trainer = trainer_of(settings.get("name", "run"), **settings["arguments"])
    if settings.get("lacks") and trainer.args.process_index == 1:
        trainer.model = _without_embedding(trainer.model)
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    accelerator, model = trainer.accelerator, trainer.model
    assert model is not None
    weights = accelerator.get_state_dict(model)
    mesh = accelerator.torch_device_mesh
    found = {
        "losses": losses_of(trainer),
        "is_fsdp_enabled": trainer.is_fsdp_enabled,
        "is_sharded": all(is_sharded([one]) for one in model.parameters()),
        "mesh": None if mesh is None else [mesh["dp_replicate"].size(), mesh["dp_shard"].size()],
        "kind": accelerator.distributed_type,
        "sizes": getattr(accelerator.parallelism_config, "dp_shard_size", None),
        "num_weights": len(weights),
        "norm": norm_of(weights),
        "is_checkpointed": model.is_gradient_checkpointing,
        "frees": None if (plugin := accelerator.fsdp_plugin) is None else plugin.reshard_after_forward,
    }
    trainer.save_model("saved")
    inner = accelerator.unwrap_model(model)
    inner.save_pretrained(
        "own", is_main_process=accelerator.is_main_process, state_dict=weights, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        places = ["saved", "own", *map(str, settings.get("loads", ()))]
        found["loaded"] = [norm_of(LlamaForCausalLM.from_pretrained(place).state_dict()) for place in places]
    return found


class Waiting(Trainer):
    """Saves as a user might who thinks that all ranks do."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        dist.barrier()


def job_waiting(settings: dict[str, Any]) -> dict[str, str]:
    """How a run ends whose `_save` waits for the other ranks."""
    try:
        trainer_of("run", of=Waiting, **settings["arguments"]).train()
    except OnstepError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "none"}
