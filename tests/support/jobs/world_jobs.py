"""What each rank does with the axes and the shares of samples of a world: `job_*(settings)`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep import CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.config.checks import parallel
from onstep.distributed import ParallelSizes, World, data_parallel, open_world
from onstep.optim import TrainingOptimizer
from onstep.trainer import session, shard_checks
from onstep.training import GlobalState, evaluate, train
from onstep.training.setup import model_and_data
from tests.support.jobs.rank_jobs import Regression, TinyModel, recorder
from tests.support.small_configs import small_pretrain_config
from tests.support.small_runs import LENGTH, RaggedRows, stack, sum_step
from tests.support.small_runs import TinyModel as RaggedModel


def opened(settings: dict[str, Any]) -> World:
    return open_world(DistributedInitConfig(device="cpu"), ParallelSizes(**settings["sizes"]))


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def job_shares(settings: dict[str, Any]) -> dict[str, Any]:
    """What the collectives over shares of samples give, each rank contributing its number plus 1."""
    with closing(opened(settings)) as world:
        own = torch.tensor([world.rank + 1.0])
        return {
            "data": [world.data.rank, world.data.size],
            "sum": world.data.sum(own.clone()).item(),
            "sum_losses": world.data.sum_losses(own.clone()).item(),
            "max": world.data.max(own.clone()).item(),
            "gathered": world.data.gather(world.rank),
            "numbers": world.data.gather_numbers([float(world.rank)]),
            "all": world.sum(own.clone()).item(),
            "place": world.place(),
            "groups": num_groups(),
        }


def job_axes(settings: dict[str, Any]) -> dict[str, Any]:
    """The ranks along each axis of both meshes, and the groups that exist before, with, and after them."""
    dist.init_process_group("gloo")
    with closing(opened(settings)) as world:
        before, meshes = num_groups(), (world.mesh, world.expert_mesh)
        along = {}
        for mesh in meshes:
            assert mesh.mesh_dim_names is not None
            for axis in mesh.mesh_dim_names:
                group = mesh.get_group(axis)
                total = torch.tensor([1])
                dist.all_reduce(total, group=group)
                assert group is world.group(axis)
                assert total.item() == mesh[axis].size()
                along[axis] = dist.get_process_group_ranks(group)
        along["mp"] = dist.get_process_group_ranks(world.group("pp", "tp"))
        hybrid = mesh_of_two(world)
        during = num_groups()
    after = num_groups()
    dist.destroy_process_group()
    return {"along": along, "hybrid": hybrid, "groups": [before, during, after]}


def job_reopened(settings: dict[str, Any]) -> list[float]:
    """The sum over shares of samples in three worlds of one process group, one after the other."""
    dist.init_process_group("gloo")
    sums = []
    for _ in range(3):
        with closing(opened(settings)) as world:
            assert world.mesh["tp"].size() == settings["sizes"]["tp"]
            sums.append(world.data.sum(torch.tensor([world.rank + 1.0])).item())
    dist.destroy_process_group()
    return sums


def mesh_of_two(world: World) -> list[list[int]]:
    """The slice of the mesh that FSDP2 takes for replicas of shards."""
    sliced: list[list[int]] = world.mesh["dp_replicate", "dp_shard"].mesh.tolist()
    return sliced


def divide(tp: int) -> None:
    """Give every run of this process ranks along tp, each `tp` of which have the same samples and the whole model.

    The model stays whole, so that the numbers are those of one rank to the bit.
    """

    def sizes(num_ranks: int) -> ParallelSizes:
        return ParallelSizes(dp_replicate=num_ranks // tp, tp=tp)

    ConfigContainer.parallel_sizes = lambda self, num_ranks: sizes(num_ranks)  # type: ignore[method-assign]
    there = TrainingArguments.parallel_sizes.fget
    assert there is not None
    TrainingArguments.parallel_sizes = property(lambda self: sizes(there(self).ranks))  # type: ignore[assignment,method-assign]
    parallel.check_tensor = shard_checks.check_tensors = shard_checks._check_optimizer = lambda *given: None  # type: ignore[assignment]
    model_and_data.is_divided = lambda config, world: False  # type: ignore[assignment]
    model_and_data.place = session.place = _placed_whole  # type: ignore[assignment]


def _placed_whole(chunks: Any, world: Any, config: Any, *, ddp: Any = None, **options: Any) -> Any:
    return data_parallel(chunks, world, config.ddp if ddp is None else ddp)


def job_pretrain(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, evaluate, save, and grow the batch, with dropout and experts."""
    if settings["tp"] > 1:
        divide(settings["tp"])
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=2, width=32)
    train, model = config.train, config.model
    train.train_iters, train.global_batch_size, train.micro_batch_size = 6, 8, 2
    train.rampup_batch_size = [4, 4, 8]
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 2, 6
    model.num_moe_experts, model.moe_router_topk, model.moe_router_load_balancing_type = 4, 2, "global_aux_loss"
    model.moe_aux_loss_coeff, model.hidden_dropout = 0.01, 0.1
    config.validation.eval_interval, config.validation.eval_iters = 3, 2
    config.logger.log_interval, config.run.output_dir, config.run.name = 2, settings["folder"], settings["name"]
    config.checkpoint.save_interval = 3
    result: dict[str, Any] = {"losses": [], "norms": [], "evaluations": [], "sample_ids": [], "logs": []}

    def note(context: Any) -> None:
        result["losses"].append(next(iter(context.loss_dict.values())).item())
        result["norms"].append(float(context.grad_norm))
        result["sample_ids"].append(context.sample_ids)

    manager = CallbackManager()
    manager.register("on_train_step_end", note)
    manager.register("on_log", lambda context: result["logs"].append(counted(context.logs)))
    manager.register("on_eval_end", lambda context: result["evaluations"].append(counted(context.metrics)))
    state = pretrain(config, callbacks=manager)
    progress = asdict(state.train_state)
    manifests = sorted(Path(settings["folder"], settings["name"]).rglob("manifest.json"))
    result["progress"] = {key: value for key, value in progress.items() if isinstance(value, (int, float, bool))}
    layouts = [json.loads(one.read_text())["layout"] for one in manifests]
    result["saved"] = [{key: one[key] for key in ("world_size", "num_microbatches")} for one in layouts]
    return result


def counted(logs: Mapping[str, Any]) -> dict[str, Any]:
    """What a log says of the training, without what it says of time and memory."""
    timed = ("second", "runtime", "time", "mem", "throughput", "tflops", "date")
    return {key: value for key, value in logs.items() if not any(word in key for word in timed)}


class Dropping(TinyModel):
    """A model whose ranks draw random numbers."""

    main_input_name = "tokens"

    def forward(self, tokens: Any, labels: Any, num_items_in_batch: Any = None) -> dict[str, Any]:
        logits = self.out(nn.functional.dropout(self.embed(tokens), 0.1, self.training))
        flat, reduction = logits.flatten(0, 1), "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(flat, labels.flatten(), reduction=reduction)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


class OfShares(Trainer):
    """Its loss is a share of the step's, which it averages itself as Hugging Face's examples do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        averages = num_items_in_batch is not None
        loss = outputs["loss"] * (self.accelerator.num_processes if averages else 1)
        return (loss, outputs) if return_outputs else loss


class OfSteps(Trainer):
    """Its steps, and what they read, are its own; its loss is a mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)

    def get_train_dataloader(self) -> Any:
        sampler = torch.utils.data.RandomSampler(self.train_dataset)
        return self.accelerator.prepare(torch.utils.data.DataLoader(self.train_dataset, batch_size=2, sampler=sampler))


def job_trainers(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Train, evaluate and predict through the Trainer, in three ways."""
    if settings["tp"] > 1:
        divide(settings["tp"])
    return [_trained(kind) for kind in (Trainer, OfShares, OfSteps)]


def _trained(kind: type[Trainer]) -> dict[str, Any]:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=f"run_{kind.__name__}",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="no",
        include_num_input_tokens_seen="all",
        use_cpu=True,
        per_device_eval_batch_size=3,
    )
    result: dict[str, Any] = {"norms": [], "logs": []}
    manager = recorder(result)
    manager.register("on_train_step_end", lambda context: result["norms"].append(float(context.grad_norm)))
    manager.register("on_log", lambda context: result["logs"].append(counted(context.logs)))
    rows = Regression()
    trainer = kind(Dropping(), args, train_dataset=rows, eval_dataset=rows, callbacks=manager, default_callbacks=False)
    trainer.train()
    result["evaluated"] = counted(trainer.evaluate())
    predicted = trainer.predict(rows)  # type: ignore[arg-type]
    result["predicted"] = [predicted.predictions.shape, float(predicted.predictions.sum()), counted(predicted.metrics)]
    accelerator, own = trainer.accelerator, torch.tensor([1.0])
    result["dealt"] = [batch["tokens"].tolist() for batch in trainer.get_train_dataloader()]
    result["gathered"] = accelerator.gather(own).tolist()
    result["reduced"] = [accelerator.reduce(own, how).tolist() for how in ("sum", "mean")]
    result["seen"] = [trainer.state.num_input_tokens_seen, trainer.state.global_step, trainer.state.total_flos]
    result["batch"] = [trainer.get_total_train_batch_size(args), args.world_size, accelerator.num_processes]
    return result


def job_by_hand(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` and `evaluate()` of iterators that each share of the samples has of its own."""
    result: dict[str, Any] = {"losses": []}
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: result["losses"].append(context.loss_dict["lm loss"].item()))
    sizes = ParallelSizes(dp_replicate=settings["data_ranks"], tp=settings["tp"])
    with closing(open_world(DistributedInitConfig(device="cpu"), sizes)) as world:
        config = ConfigContainer()
        config.train.train_iters, config.train.micro_batch_size = 4, 2
        config.train.global_batch_size = 4 * world.data.size
        config.model.seq_length, config.logger.log_interval, config.validation.eval_iters = LENGTH, 0, None
        state = GlobalState(config, world=world, num_microbatches=2)
        torch.manual_seed(0)
        [model] = data_parallel([RaggedModel()], world, config.ddp)
        optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        rows = RaggedRows(64)
        own = [stack([rows[2 * n], rows[2 * n + 1]]) for n in range(world.data.rank, 32, world.data.size)]
        train(sum_step, [model], optimizer, None, iter(own), None, state, callback_manager=manager)
        means = evaluate(state, sum_step, iter(own[: 3 + world.data.rank]), [model], None, config.model)[0]
        result["means"] = {key: float(value) for key, value in (means or {}).items()}
        result["seen"] = [state.train_state.consumed_train_samples, state.train_state.consumed_valid_samples]
    return result
