"""What each rank of the distributed tests runs: `job_*(settings)`."""

from __future__ import annotations

import io
import os
import sys
from contextlib import closing, redirect_stderr, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onstep import Callback, CallbackManager, Trainer, TrainerCallback, TrainingArguments, pretrain
from onstep.config import ConfigContainer, DistributedDataParallelConfig, DistributedInitConfig
from onstep.distributed import data_parallel, no_sync, open_world
from onstep.errors import CollectiveAfterErrorError, NonFiniteError, RanksApartError
from onstep.events.context import unwrap
from onstep.training import forward_step
from tests.support.small_configs import small_pretrain_config

RANK = int(os.environ.get("RANK", "0"))


def config(settings: dict[str, Any]) -> ConfigContainer:
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=2, width=32)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 10, 8, 2
    config.validation.eval_interval, config.validation.eval_iters = 5, 2
    config.logger.log_interval = 5
    return config


def recorder(result: dict[str, Any]) -> CallbackManager:
    manager = CallbackManager()
    result |= {"losses": [], "sample_ids": [], "evaluation": []}

    def note(context: Any) -> None:
        result["losses"].append(next(iter(context.loss_dict.values())).item())
        result["sample_ids"] += context.sample_ids

    manager.register("on_train_step_end", note)
    manager.register("on_eval_end", lambda context: result["evaluation"].append(context.metrics["eval_loss"]))
    return manager


def job_pretrain(settings: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    pretrain(config(settings), callbacks=recorder(result))
    return result


def job_tracebacks(settings: dict[str, Any]) -> list[str]:
    """The last line of a traceback in a group, after one that an error has ended, in the next, and after it."""
    found = []

    def show() -> None:
        with redirect_stderr(io.StringIO()) as shown:
            error = ValueError("seen")
            sys.excepthook(type(error), error, None)
        found.append(shown.getvalue().strip())

    with suppress(KeyError), closing(open_world(DistributedInitConfig(device="cpu"))):
        show()
        raise KeyError
    show()
    hook = sys.excepthook
    with closing(open_world(DistributedInitConfig(device="cpu"))):
        show()
    assert sys.excepthook is hook
    sys.excepthook = sys.__excepthook__
    with closing(open_world(DistributedInitConfig(device="cpu"))):
        assert sys.excepthook is not sys.__excepthook__
    show()
    return found


class Regression(torch.utils.data.Dataset[Any]):
    """Ragged rows: their numbers of labels differ, so ranks and micro-batches weigh differently."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 16, (12,), generator=generator)
        labels = tokens.roll(-1).clone()
        labels[2 + index % 9 :] = -100
        return {"tokens": tokens, "labels": labels}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Any, labels: Any) -> dict[str, Any]:
        logits = self.out(self.embed(tokens))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def job_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    torch.manual_seed(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // world,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        use_cpu=True,
        per_device_eval_batch_size=3,
    )
    Trainer(
        TinyModel(),
        args,
        train_dataset=Regression(),
        eval_dataset=Regression(),
        callbacks=recorder(result),
        default_callbacks=False,
    ).train()
    return result


class Stopper(TrainerCallback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if RANK == 1 and state.global_step == 3:
            if self.how == "flag":
                control.should_training_stop = True
            else:
                getattr(control, self.how)("enough")
        return control


def job_stop(settings: dict[str, Any]) -> dict[str, Any]:
    notified: list[str] = []
    manager = CallbackManager()
    manager.add(Stopper(settings["how"]))
    for event in ("on_train_end", "on_run_end"):
        manager.register(event, lambda context: notified.append(context.event))
    state = pretrain(config(settings), callbacks=manager)
    return {"step": state.train_state.step, "stopped_by": str(state.ending.stopped_by), "told": notified}


def job_requests(settings: dict[str, Any]) -> dict[str, Any]:
    logged: list[int] = []
    evaluated: list[int] = []

    class Asker(Callback):
        def on_step_end(self, context: Any) -> None:
            if RANK == 1 and context.state.train_state.step == 2:
                context.control.log("on demand")
            if RANK == 0 and context.state.train_state.step == 4:
                context.control.evaluate("on demand")

        def on_log_step(self, context: Any) -> None:
            logged.append(context.state.train_state.step)

        def on_eval_end(self, context: Any) -> None:
            evaluated.append(context.state.train_state.step)

    wanted = config(settings)
    wanted.logger.log_interval, wanted.validation.eval_interval = 0, None
    wanted.validation.eval_after_training = False
    pretrain(wanted, callbacks=[Asker()])
    return {"logged": logged, "evaluated": evaluated}


def job_nan(settings: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"reason": None}
    before: dict[str, Any] = {}

    class Poison(Callback):
        def on_train_step_start(self, context: Any) -> None:
            before["weights"] = [p.detach().clone() for p in context.model[0].parameters()]
            if context.state.train_state.step == 2:
                result["bad_ids"] = context.sample_ids[1]
                before["poisoned"] = True

        def on_exception(self, context: Any) -> None:
            pairs = zip(before["weights"], context.model[0].parameters(), strict=True)
            result["weights_changed"] = any(not torch.equal(a, b) for a, b in pairs)

        def on_run_end(self, context: Any) -> None:
            result["reason"] = context.reason

    calls = [0]

    def poisoned(data_iterator: Any, model: Any) -> Any:
        loss, function = forward_step(data_iterator, model)
        calls[0] += 1
        second_of_third_step = calls[0] == 2 * 2 + 2
        return loss * (float("nan") if RANK == 1 and second_of_third_step else 1.0), function

    try:
        pretrain(config(settings), poisoned, callbacks=[Poison()])
    except NonFiniteError as error:
        result["error"] = str(error)
    return result


class Doubler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Any, labels: Any) -> Any:
        predicted = x * self.factor
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def job_predict(settings: dict[str, Any]) -> dict[str, Any]:
    rows = [{"x": float(i), "labels": float(i)} for i in range(7)]
    args = TrainingArguments(output_dir="run", per_device_eval_batch_size=2, use_cpu=True)
    output = Trainer(Doubler(), args, default_callbacks=False).predict(rows)
    return {"predictions": output.predictions.tolist(), "loss": output.metrics["test_loss"]}


def job_groups(settings: dict[str, Any]) -> dict[str, Any]:
    sums = []
    for _ in range(settings["times"]):
        world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
        world.close()
    return {"sums": sums}


def job_after_an_error(settings: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 alone meets the error; both agree before it, and after the context is entered again."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    try:
        with world.no_collectives_after_an_error():
            agreed = world.agree([RANK, 0, *[1 - RANK] * 150])
            if RANK == 1:
                raise {"error": ValueError, "exit": SystemExit}[settings["how"]]("rank 1 alone")
    except (ValueError, SystemExit):
        pass
    refused = {}
    for name, arguments in _COLLECTIVES.items():
        if RANK == 1 and settings["how"] == "error":
            try:
                getattr(world, name)(*arguments)
            except CollectiveAfterErrorError as error:
                refused[name] = str(error)
        elif settings["how"] == "exit":
            getattr(world, name)(*arguments)
    with world.no_collectives_after_an_error():
        agreed += world.agree([RANK])
    world.close()
    return {"refused": refused, "agreed": agreed}


def job_other_votes(settings: dict[str, Any]) -> str:
    """What rank 0 hears that agrees on two flags if rank 1 agrees on others, or sums something."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    others = {
        "flags": lambda: world.agree([0] * 3),
        "sum": lambda: dist.all_reduce(torch.zeros(1, dtype=torch.float64)),
    }
    try:
        return str(others[settings["other"]]() if RANK else world.agree([0, 0]))
    except RanksApartError as error:
        return str(error)
    finally:
        world.close()


_COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "agree": ([1],),
    "gather": ("item",),
    "gather_numbers": ([1.0],),
    "broadcast": (torch.ones(1), 0),
    "share": ("item",),
    "sum": (torch.ones(1),),
    "max": (torch.ones(1),),
    "barrier": (),
}


def job_buckets(settings: dict[str, Any]) -> dict[str, bool]:
    """Whether a wrapper that has taken steps gives the same bits as a new one, which is what a resumed process has."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Embedding(16, 64, sparse=settings.get("sparse", False)), *layers)
    model[1].requires_grad_(not settings.get("frozen", False))
    world, options = open_world(DistributedInitConfig(device="cpu")), DistributedDataParallelConfig(**settings["ddp"])

    def gradients(wrapped: nn.Module, batch: int) -> list[Any]:
        model.zero_grad()
        tokens = torch.randint(0, 16, (2, 8, 12), generator=torch.Generator().manual_seed(10 * batch + RANK))
        with no_sync([wrapped]):
            wrapped(tokens[0]).square().mean().backward()
        wrapped(tokens[1]).square().mean().backward()
        return [param.grad.to_dense().clone() for param in model.parameters() if param.grad is not None]

    [used] = data_parallel([model], world, options)
    first, *_, again = [gradients(used, batch) for batch in (7, 1, 2, 7)]
    del used
    [new] = data_parallel([model], world, options)
    others = gradients(new, 7)
    same = [torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, others, strict=True)]
    return {"same": all(same), "unwrapped": unwrap(new) is model}


class Gradients(Callback):
    """Notes whether all gradients are numbers of bfloat16, the losses, and the sum of the weights at the end."""

    def __init__(self) -> None:
        self.are_rounded: list[bool] = []
        self.losses: list[float] = []
        self.weights = 0.0

    def on_pre_optimizer_step(self, context: Any) -> None:
        grads = [p.grad for chunk in context.model for p in chunk.parameters() if p.grad is not None]
        self.are_rounded.append(all(torch.equal(grad, grad.bfloat16().float()) for grad in grads))

    def on_train_step_end(self, context: Any) -> None:
        self.losses.append(next(iter(context.loss_dict.values())).item())

    def on_train_end(self, context: Any) -> None:
        self.weights = sum(p.double().sum().item() for chunk in context.model for p in chunk.parameters())


def job_reduced(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Trains with clipping off through both doors, with gradients averaged in float32 or in bfloat16."""
    of_pretrain, of_trainer = Gradients(), Gradients()
    small = config(settings)
    small.ddp.grad_reduce_in_bf16, small.optimizer.clip_grad = settings["in_bf16"], None
    small.train.global_batch_size = 4  # one micro-batch on each rank
    pretrain(small, callbacks=[of_pretrain])
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=2,
        max_steps=8,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        use_cpu=True,
        config_overrides={"ddp.grad_reduce_in_bf16": settings["in_bf16"]},
    )
    Trainer(TinyModel(), args, train_dataset=Regression(), callbacks=[of_trainer], default_callbacks=False).train()
    doors = {"pretrain": of_pretrain, "trainer": of_trainer}
    return {
        "is_rounded": all(of_pretrain.are_rounded),
        "losses": {name: one.losses for name, one in doors.items()},
        "weights": {name: one.weights for name, one in doors.items()},
    }
