"""What the ranks of the tests of the norm loggers run: `job_*(settings)`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from onstep import Callback, CallbackManager, TrainerCallback
from onstep.callbacks import GradNormLogger, JsonLogger, ParameterNormLogger, WeightNormLogger
from onstep.config import ConfigContainer
from onstep.distributed import open_world
from onstep.metrics.norms.named_parameters import named_parameters
from onstep.metrics.norms.parameter_norms import (
    gradient_norms,
    local_norms,
    parameter_norms,
    report_l2_norm_grad,
)
from onstep.metrics.norms.spectral_norms import SpectralNorms
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, train
from tests.support.jobs import resume_jobs
from tests.support.jobs.resume_jobs import RANK


class Asking(TrainerCallback):
    """Asks for an evaluation that no interval foresees."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            control.should_evaluate = True


def with_loggers(settings: dict[str, Any]) -> Any:
    manager, counting = observed(settings)
    manager.add([WeightNormLogger(), GradNormLogger(), ParameterNormLogger(power_iter_steps=2), Asking()])
    return manager, counting


observed = resume_jobs.observed


def job_trainer(settings: dict[str, Any]) -> None:
    if settings.get("has_loggers", True):
        resume_jobs.observed = with_loggers
    resume_jobs.job_trainer(settings)


def job_pretrain(settings: dict[str, Any]) -> None:
    resume_jobs.observed = with_loggers
    resume_jobs.job_pretrain(settings)


def write(result: dict[str, Any]) -> None:
    Path(f"rank-{RANK}.json").write_text(json.dumps(result))


def exact(tensor: Tensor) -> float:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return float(tensor.detach().double().norm())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Widths that two ranks cannot halve, a parameter of one element, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(13, 7), nn.Sequential(Block(7), Block(7))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def sharded_model(**options: Any) -> Model:
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def job_sharded_norms(settings: dict[str, Any]) -> None:
    """Norms of an FSDP2 model before, in and after an evaluation; its weights gathered give the truth."""
    dist.init_process_group("gloo")
    model, plain = sharded_model(), Model()
    tokens = torch.arange(12).reshape(2, 6) % 13
    model(tokens).square().mean().backward()
    plain(tokens).square().mean().backward()
    spectral = SpectralNorms()
    result: dict[str, Any] = {
        "plain": parameter_norms(plain),
        "sharded": parameter_norms(model),
        "plain_grad": gradient_norms(plain),
        "sharded_grad": gradient_norms(model),
        "report": report_l2_norm_grad(model)["l2_norm/grad/global"],
        "plain_spectral": SpectralNorms().measure(plain),
        "sharded_spectral": spectral.measure(model),
    }
    result["again"] = spectral.measure(model)
    mixed = sharded_model(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        mixed(tokens)
    result["gathered"] = f"{type(mixed.embed.weight).__name__} of {mixed.embed.weight.dtype}"
    result["after_evaluation"] = parameter_norms(mixed)
    with torch.no_grad():
        mixed(tokens)
    result["spectral_after_evaluation"] = SpectralNorms().measure(mixed)
    write(result)
    dist.destroy_process_group()


def job_dtensors(settings: dict[str, Any]) -> None:
    """Tensors split every way over a mesh of two ranks, with values that would overflow as squares."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    generator = torch.Generator().manual_seed(1)

    def parameter(*placements: Any, rows: int = 6, factor: float = 1.0, dtype: Any = torch.float32) -> nn.Parameter:
        values = (torch.randn(rows, 5, generator=generator, dtype=torch.float64) * factor).to(dtype)
        return nn.Parameter(distribute_tensor(values, mesh, placements))

    partial = DTensor.from_local(torch.full((2, 2), 1.0 + RANK), mesh, [Replicate(), Partial()])
    model = nn.ParameterDict(
        {
            "columns": parameter(Replicate(), Shard(0)),
            "rows": parameter(Replicate(), Shard(1)),
            "both": parameter(Shard(0), Shard(1)),
            "strided": parameter(Shard(0), Shard(0)),
            "replicated": parameter(Replicate(), Replicate()),
            "uneven": parameter(Replicate(), Shard(0), rows=1),
            "huge": parameter(Replicate(), Shard(0), factor=1e300, dtype=torch.float64),
            "tiny": parameter(Replicate(), Shard(0), factor=1e-300, dtype=torch.float64),
            "partial": nn.Parameter(partial),
            "plain": torch.full((3,), 2.0),
        }
    )
    model["columns"].grad = DTensor.from_local(torch.ones(6, 5), mesh, [Replicate(), Partial()])
    model["replicated"].grad = DTensor.from_local(torch.ones(6, 5), mesh, [Replicate(), Partial()])
    if RANK == 0:  # the other rank has no gradient of it
        model["both"].grad = distribute_tensor(torch.ones(6, 5), mesh, [Shard(0), Shard(1)], src_data_rank=None)
    vector = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)]))
    bad = nn.ParameterDict({"matrix": parameter(Replicate(), Shard(0), rows=2), "vector": vector})
    with torch.no_grad():
        for one in bad.values():
            one.to_local()[:] = 1.0 if RANK else float("nan")
    scaled = ("huge", "tiny")
    write(
        {
            "norms": parameter_norms(model),
            "exact": {
                name: exact(one / 1e300) * 1e300 if name == "huge" else exact(one * 1e300) / 1e300
                for name, one in named_parameters(model).items()
                if name in scaled
            }
            | {name: exact(one) for name, one in named_parameters(model).items() if name not in scaled},
            "gradients": gradient_norms(model),
            "spectral": SpectralNorms().measure(model),
            "decomposed": {
                name: float(torch.linalg.matrix_norm(_whole(one).double(), 2))
                for name, one in model.items()
                if one.dim() == 2 and name not in scaled
            },
            "bad": [
                str(norm) for norms in (parameter_norms(bad), SpectralNorms().measure(bad)) for norm in norms.values()
            ],
            "largest": local_norms({"empty": torch.zeros(0)}, float("inf")).values.tolist(),
        }
    )
    dist.destroy_process_group()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class Probe(Callback):
    """Computes from gathered tensors what the loggers must record."""

    def __init__(self) -> None:
        self.gradients: dict[str, float] = {}
        self.expected: list[dict[str, Any]] = []
        self.logged: list[float] = []

    def on_pre_optimizer_step(self, context: Any) -> None:
        self.gradients = {name: exact(one.grad) for name, one in named_parameters(context.model).items()}

    def on_eval_end(self, context: Any) -> None:
        for module in (*context.model[0].blocks, context.model[0]):
            if hasattr(module, "reshard"):
                module.reshard()
        norms = {name: exact(one) for name, one in named_parameters(context.model).items()}
        self.expected.append({"step": context.state.train_state.step, "norms": norms, "grad_norms": self.gradients})

    def on_log(self, context: Any) -> None:
        if "weight_norm" in context.logs:
            self.logged.append(context.logs["weight_norm"])


def step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    logits = model(batch["tokens"])
    return logits.flatten(0, 1), lambda output: (nn.functional.cross_entropy(output, batch["labels"].flatten()), {})


def job_sharded_run(settings: dict[str, Any]) -> None:
    """A training of an FSDP2 model by the loop, with all norm loggers."""
    config = ConfigContainer()
    config.dist.device = "cpu"
    config.train.train_iters, config.train.micro_batch_size, config.train.global_batch_size = 4, 2, 4
    config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 1, 2, 1
    config.model.seq_length = 6
    world = open_world(config.dist)
    state = GlobalState(config, world)
    state.args = SimpleNamespace(output_dir=".", logging_dir="logs")
    state.info.rank = RANK
    model = sharded_model()
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    manager, probe = CallbackManager(), Probe()
    manager.add([probe, JsonLogger(), WeightNormLogger(), GradNormLogger(), ParameterNormLogger()])

    def batches() -> Any:
        generator = torch.Generator().manual_seed(RANK)
        while True:
            tokens = torch.randint(0, 13, (2, 6), generator=generator)
            yield {"tokens": tokens, "labels": tokens.roll(-1, 1)}

    train(step, [model], optimizer, None, batches(), batches(), state, callback_manager=manager)
    write({"expected": probe.expected, "logged": probe.logged})
    world.close()
