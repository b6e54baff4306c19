"""What the ranks of the tests of collectives on rank 0 alone run: `job_*(settings)`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from onstep import Callback, pretrain
from onstep.callbacks import TextgenCallback
from onstep.config import DistributedInitConfig, ModelConfig
from onstep.distributed import open_world
from onstep.distributed.shards import is_sharded
from onstep.errors import MainOnlyError, OnstepError
from onstep.models import build_transformer
from tests.support.small_configs import small_pretrain_config

WIDTH = 8


def _collectives() -> dict[str, Callable[[], object]]:
    """Each of them as a callback may call it, by the name that an error gives it and a number."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    sharded = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = DistributedDataParallel(nn.BatchNorm1d(WIDTH))
    weight, one, rows = distribute_tensor(torch.ones(size, 2), mesh, [Shard(0)]), torch.ones(1), torch.ones(2, WIDTH)
    return {
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "allreduce": lambda: dist.all_reduce(one),
        "allreduce async": lambda: dist.all_reduce(one, async_op=True),
        "allreduce of a sum": lambda: weight.sum().full_tensor(),
        "allgather_into_tensor_coalesced": weight.full_tensor,
        "allgather_base": lambda: sharded(rows),
        "broadcast": lambda: replicated(rows),
        "broadcast of objects": lambda: dist.broadcast_object_list([1], src=0),
        "allgather": lambda: dist.all_gather_object([None] * size, 1),
        "allgather of gather_object": lambda: dist.gather_object(1, [None] * size),
        "alltoall_base": lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
        "reduce": lambda: dist.reduce(one, 0),
        "send": lambda: dist.send(one, 1),
        "recv": lambda: dist.recv(one, 1),
        "new_group": lambda: dist.new_group([0]),
    }


def job_collectives(settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 gets for each of them alone, and what all ranks together get afterwards."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    collectives = _collectives()
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    refused, harmless = {}, []
    for name, call in collectives.items() if world.is_main else ():
        try:
            with world.main_only("the test", "leave it out"):
                call()
        except MainOnlyError as error:
            refused[name] = str(error)
    with world.main_only("the test"):
        dist.all_reduce(torch.ones(1), group=alone)
        dist.broadcast_object_list([1], src=world.rank, group=alone)
        dist.barrier(group=alone)
        own = dist.new_group([world.rank], use_local_synchronization=True)
        dist.barrier(group=own)
        layer = nn.Linear(WIDTH, 1)
        layer(torch.ones(2, WIDTH)).sum().backward()
        harmless.append(layer.weight.grad is not None)
    total = torch.ones(1)
    dist.all_reduce(total)
    whole: Any = collectives["allgather_into_tensor_coalesced"]()
    agreed = world.agree([world.rank, 0])
    dist.new_group(list(range(world.size)))
    world.close()
    return {"refused": refused, "harmless": harmless, "sum": total.item(), "whole": whole.shape[0], "agreed": agreed}


class MainOnly(Callback):
    """Calls a collective on rank 0 alone, as a user might."""

    ranks = "main"
    collective: str = "barrier"

    def meet(self, context: Any) -> None:
        if self.collective == "barrier":
            dist.barrier()
        else:
            context.state.world.sum(torch.ones(1))


def job_callback(settings: dict[str, Any]) -> dict[str, Any]:
    """How a run ends whose callback does it at an event."""
    config = small_pretrain_config(settings["corpus"], settings["cache"])
    config.train.train_iters = 2
    config.dist.distributed_timeout_minutes = 2
    seen: list[Any] = []

    class Watching(Callback):
        def on_step_end(self, context: Any) -> None:
            seen.append(context.step)

        def on_run_end(self, context: Any) -> None:
            seen.append(context.reason)

    options = settings.get("options", {})
    exporter: Any = type("Exporter", (MainOnly,), {settings["event"]: MainOnly.meet, **options})
    try:
        pretrain(config, callbacks=[exporter, Watching()])
    except OnstepError as error:
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "text": str(error), "notes": notes, "seen": seen}
    return {"error": None, "seen": seen}


class Letters:
    """A tokenizer whose tokens are the characters of a small alphabet."""

    eos_id = None

    def encode_text(self, text: str) -> list[int]:
        return [ord(one) - ord("a") for one in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(one + ord("a")) for one in ids)


class Texts:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append(text)

    def flush(self) -> None: ...


def _language_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "own":
        sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 26}
        return build_transformer(ModelConfig(**sizes), seed=0)
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=26, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def job_generate(settings: dict[str, Any]) -> dict[str, Any]:
    """The texts of a model and of its shards, and whether a training step finds the shards as they were."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    whole, sharded = _language_model(settings["kind"]), _language_model(settings["kind"])
    mesh = init_device_mesh("cpu", (world.size,))
    for block in next(module for module in sharded.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.arange(8)[None]
    found: dict[str, Any] = {"rank": world.rank}

    def loss(model: nn.Module) -> torch.Tensor:
        outputs: Any = model(ids)
        return getattr(outputs, "logits", outputs).square().mean()

    for name, model in (("whole", whole), ("sharded", sharded)):
        loss(model)
        writer = Texts()
        callback = TextgenCallback(writer, ["abc", "x"], max_new_tokens=8)
        if settings.get("fails_on") is not None:
            _fail_on(callback, settings["fails_on"], world.rank)
        state: Any = SimpleNamespace(global_step=2, is_world_process_zero=world.is_main, eval_steps=1)
        arguments: Any = SimpleNamespace(logging_dir=None, eval_strategy="steps")
        try:
            callback.on_evaluate(arguments, state, None, model, processing_class=Letters())
        except OnstepError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found[name] = writer.texts
        loss(model).backward()
        found[f"{name} norm"] = float(
            sum(one.full_tensor().norm() if is_sharded([one]) else one.norm() for one in _gradients(model))
        )
    found["is_sharded"] = all(is_sharded([one]) for one in sharded.parameters())
    world.close()
    return found


def _gradients(model: nn.Module) -> list[Any]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def _fail_on(callback: TextgenCallback, ranks: list[int], rank: int) -> None:
    """Let the generation fail at its beginning on these ranks."""
    if rank in ranks:
        callback.prompts = [None]  # type: ignore[list-item]
    else:
        callback.prompts = []
