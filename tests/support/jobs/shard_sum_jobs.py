"""What the ranks of the tests of norms, clipping and zeros over sharded gradients run: `job_*(settings)`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from onstep import CallbackManager
from onstep.config import ModelConfig, OptimizerConfig
from onstep.data import TrainLoader
from onstep.errors import NonFiniteError, ShardingError
from onstep.metrics import calc_params_l2_norm
from onstep.metrics.norms.parameter_norms import gradient_norms, total_norm
from onstep.models import build_transformer
from onstep.optim import (
    DeviceFiniteGate,
    ForeignOptimizer,
    TrainingOptimizer,
    build_optimizer,
    clip_grad_norm,
    count_zeros,
)
from onstep.training import GlobalState, train
from tests.support.exact_steps import OpCounter
from tests.support.jobs import sharding_jobs
from tests.support.small_runs import RaggedRows, sum_step

ROWS, LENGTH, VOCABULARY, WIDTH = 12, 8, 67, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """With sizes that 2, 3 or 4 ranks cannot divide, and gradients that have zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def tensor_parallel(model: Model, mesh: DeviceMesh, *, sequence: bool = False) -> Model:
    inside = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "head": ColwiseParallel(input_layouts=inside, output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(input_layouts=inside),
        "blocks.*.down": RowwiseParallel(output_layouts=inside),
    }
    norms = {"blocks.*.norm": SequenceParallel(), "norm": SequenceParallel()}
    return parallelize_module(model, mesh, plan | (norms if sequence else {}))


def sharded(how: str) -> tuple[Model, int, int]:
    """The model in a layout, and the rank and the number of ranks with different samples."""
    model, size, rank = Model(), dist.get_world_size(), dist.get_rank()
    layout, _, detail = how.partition(" ")
    if layout == "tp":
        return tensor_parallel(model, init_device_mesh("cpu", (size,)), sequence=detail == "sequence"), 0, 1
    shape = (size,) if layout == "fsdp" else (2, size // 2)
    names = {"fsdp": ("shard",), "hsdp": ("replicate", "shard"), "fsdpxtp": ("dp", "tp")}[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if layout == "fsdpxtp":
        tensor_parallel(model, mesh["tp"], sequence=detail == "sequence")
        mesh = mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return (model, rank, size) if layout != "fsdpxtp" else (model, mesh.get_local_rank(), mesh.size())


def backward(model: nn.Module, rank: int = 0, size: int = 1) -> None:
    tokens = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(size)[rank]
    (model(own).logsumexp(-1).sum() * size / tokens.numel() * 100).backward()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives of less than 16 numbers that are called in the context, but for flags, on which ranks agree."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        function = getattr(dist, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if name == "all_gather" else args[0]
            is_agreement = sys._getframe(1).f_code.co_qualname.startswith("World.agree.")
            if sent.numel() < 16 and not is_agreement:
                calls.append(name)
            return function(*args, **kwargs)

        return mock.patch.object(dist, name, called)

    with noting("all_reduce"), noting("all_gather"):
        yield calls


def job_norm(settings: dict[str, Any]) -> dict[str, Any]:
    """The norm, the clipped gradients and the zeros of a layout, beside those of one process in float64."""
    dist.init_process_group("gloo")
    plain = Model().double()
    backward(plain)
    model, rank, size = sharded(settings["how"])
    backward(model, rank, size)
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), log_num_zeros_in_grad=True
    )
    with counted() as calls:
        norm = optimizer.prepare()
    assert type(norm) is Tensor
    exact = torch.cat([one.grad.flatten() for one in plain.parameters()]).norm()
    gaps = [
        (whole(one.grad).double() - other.grad / exact).abs().max()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    by_name = total_norm(gradient_norms(model))
    params = [calc_params_l2_norm(model, None)]
    if settings["how"].startswith("tp"):  # as a run with tensor parallelism gives them
        model.pg_collection = SimpleNamespace(tp=dist.group.WORLD, mp=dist.group.WORLD)  # type: ignore[assignment]
        params.append(calc_params_l2_norm(model, None))
    before = [whole(one).detach().clone() for one in model.parameters()]
    assert [optimizer.apply() for _ in range(2)] == [True, True], "once by torch, once by our own lists"
    moved = [float((whole(one) - old).abs().mean()) for one, old in zip(model.parameters(), before, strict=True)]
    num_zeros = sum(int((one.grad == 0).sum()) for one in plain.parameters())
    return {
        "norm": float(norm),
        "bits": norm.numpy().tobytes().hex(),
        "exact": float(exact),
        "gap": float(max(gaps)),
        "calls": len(calls),
        "by_name": by_name,
        "params": params,
        "exact_params": float(torch.cat([one.detach().flatten() for one in plain.parameters()]).norm()),
        "zeros": [int(optimizer.num_zeros), num_zeros],  # type: ignore[arg-type]
        "moved": [min(moved), max(moved)],
        "kinds": sorted({type(one).__name__ for one in model.parameters()}),
    }


def job_quiet_norm(settings: dict[str, Any]) -> dict[str, Any]:
    """What reaches torch's dispatcher in a later step of a mix of plain parameters and DTensors on an accelerator."""
    dist.init_process_group("gloo")
    model, rank, size = sharded(settings["how"])
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), gate=DeviceFiniteGate(torch.device("cpu"))
    )
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, rank, size)
        with OpCounter() as counter:
            optimizer.prepare()
            optimizer.apply()
    return {"names": counter.names, "fused": optimizer.param_groups[0]["fused"]}


def job_clip(settings: dict[str, Any]) -> list[float]:
    """A mix of parameters clipped by `clip_grad_norm`: the norms before and after."""
    dist.init_process_group("gloo")
    model, rank, size = sharded(settings["how"])
    backward(model, rank, size)
    return [float(clip_grad_norm(model.parameters(), limit)) for limit in (1.0, float("inf"))]


def job_kernels(settings: dict[str, Any]) -> dict[str, float]:
    """Three clipped steps of optimizers with each kind of kernel over a mix, away from those over plain parameters."""
    dist.init_process_group("gloo")
    adamw, sgd = torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9, dampening=0.1)
    gaps = {}
    for name, make in {
        "adamw fused": partial(adamw, fused=True),
        "adamw foreach": partial(adamw, foreach=True),
        "adamw": adamw,
        "sgd fused": partial(sgd, fused=True),
        "sgd foreach": partial(sgd, foreach=True),
        "adagrad foreach": partial(torch.optim.Adagrad, foreach=True),
    }.items():
        models = [Model(), sharded("tp")[0]]
        optimizers = [TrainingOptimizer(make(model.parameters(), lr=1e-3)) for model in models]
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        gaps[name] = max(float((one - whole(other)).abs().max()) for one, other in pairs)
    return gaps


def job_collectives(settings: dict[str, Any]) -> dict[str, list[int]]:
    """The collectives of tensors in each quiet step of a training by the loop, of loss and norm together."""
    dist.init_process_group("gloo")
    config = sharding_jobs.given_config()
    model = sharding_jobs.wrapped(settings["how"], sharding_jobs.TinyModel())
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    state = GlobalState(cfg=config, num_microbatches=config.train.global_batch_size // (2 * dist.get_world_size()))
    sizes = {"micro_batch_size": 2, "global_batch_size": config.train.global_batch_size}
    loader = TrainLoader(RaggedRows(144), seed=1, rank=dist.get_rank(), world_size=dist.get_world_size(), **sizes)
    manager, of_steps = CallbackManager(), []

    def note(context: Any) -> None:
        of_steps.append(len(calls))
        calls.clear()

    manager.register("on_step_end", note)
    with counted() as calls:
        train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    return {"of_steps": of_steps}


def job_bad_shard_in_the_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """A training by the loop in which the last rank's shard of a gradient becomes NaN at the third step."""
    dist.init_process_group("gloo")
    config = sharding_jobs.given_config()
    config.train.on_nonfinite = settings["policy"]
    model = sharding_jobs.wrapped(settings["how"], sharding_jobs.TinyModel())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    state = GlobalState(cfg=config, num_microbatches=config.train.global_batch_size // (2 * ranks))
    sizes = {"micro_batch_size": 2, "global_batch_size": config.train.global_batch_size}
    loader = TrainLoader(RaggedRows(144), seed=1, rank=rank, world_size=ranks, **sizes)
    manager, skips = CallbackManager(), []

    def spoil(context: Any) -> None:
        if rank == ranks - 1 and state.train_state.step == 2:
            model.out.weight.grad.to_local().view(-1)[:1] = float("nan")

    manager.register("on_forward_backward_end", spoil)
    manager.register("on_step_end", lambda context: skips.append(state.train_state.num_skips))
    optimizer, error = torch.optim.AdamW(model.parameters(), lr=1e-2), ""
    try:
        train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    except NonFiniteError as raised:
        error = str(raised).partition(":")[0]
    return {"skips": skips, "error": error, "step": state.train_state.step}


def job_training(settings: dict[str, Any]) -> dict[str, Any]:
    """20 steps of a small transformer with clipping, in one process or sharded by hand: losses, norms and weights."""
    size, rank = settings.get("size", 1), 0
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": VOCABULARY, "seq_length": 8}
    model = build_transformer(ModelConfig(**sizes), seed=0)
    if size > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    optimizer = build_optimizer([model], OptimizerConfig(lr=1e-3, clip_grad=0.5))
    generator = torch.Generator().manual_seed(2)
    losses, norms = [], []
    for _ in range(20):
        tokens = torch.randint(0, VOCABULARY, (6, 9), generator=generator)
        own = tokens.chunk(size)[rank]
        optimizer.zero_grad()
        loss = model(own[:, :-1], own[:, 1:]).mean()
        loss.backward()
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        is_applied, norm, _ = optimizer.step()
        assert is_applied
        losses.append(float(total))
        norms.append(float(norm))  # type: ignore[arg-type]
    return {"losses": losses, "norms": norms}


def job_bad_shard(settings: dict[str, Any]) -> list[Any]:
    """Steps of which one has a NaN in the gradients of the last rank only: what each optimizer decides."""
    dist.init_process_group("gloo")
    model, rank, size = sharded(settings["how"])
    found: list[Any] = []
    for make in (_own, _foreign):
        optimizer = make(model)
        for step in range(3):
            optimizer.gate.begin_step(step)
            optimizer.zero_grad()
            backward(model, rank, size)
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                grad = model.norm.weight.grad if settings["where"] == "norm" else model.head.weight.grad
                part = grad.to_local() if isinstance(grad, DTensor) else grad
                part.view(-1)[:1] = float("nan")
            norm = optimizer.prepare()
            found.append([optimizer.apply(), str(float(norm)), optimizer.gate.first_bad_step])  # type: ignore[arg-type]
            if step == 1:
                optimizer.gate.reset()
    return found


def _own(model: nn.Module) -> TrainingOptimizer:
    return TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


class Megatron:
    """An optimizer of Megatron's convention that clips nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> tuple[bool, float | None, int | None]:
        self.steps += 1
        return True, None, None


def _foreign(model: nn.Module, **settings: Any) -> ForeignOptimizer:
    return ForeignOptimizer(Megatron(model), [model], device=torch.device("cpu"), **settings)  # type: ignore[arg-type]


def job_foreign(settings: dict[str, Any]) -> dict[str, Any]:
    """The norm that an optimizer of Megatron's convention is judged by, and a threshold between it and each shard's."""
    dist.init_process_group("gloo")
    plain = Model().double()
    backward(plain)
    exact = float(torch.cat([one.grad.flatten() for one in plain.parameters()]).norm())
    model, rank, size = sharded(settings["how"])
    applied = []
    for threshold in (0.99 * exact, 1.01 * exact):
        optimizer = _foreign(model, grad_norm_skip_threshold=threshold)
        optimizer.zero_grad()
        backward(model, rank, size)
        norm = optimizer.prepare(grad_scale=1.0)
        applied.append(optimizer.apply())
    return {"exact": exact, "norm": float(norm), "applied": applied}  # type: ignore[arg-type]


def job_several_meshes(settings: dict[str, Any]) -> dict[str, Any]:
    """Four ranks: parameters on meshes of four, of pairs, and whole; gradients missing on some ranks; marks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "shard"))
    generator = torch.Generator().manual_seed(3)
    truth = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64) * torch.arange(shape[1]).remainder(3)
        for name, shape in {"flat": (7, 5), "experts": (5, 6), "ep": (3, 4), "plain": (3, 3), "both": (6, 4)}.items()
    }
    truth["missing"] = torch.ones(8, 2, dtype=torch.float64)  # two rows on each rank
    where: dict[str, tuple[DeviceMesh, list[Any]]] = {
        "flat": (flat, [Shard(0)]),
        "experts": (square, [Shard(0), Shard(1)]),
        "ep": (square, [Shard(0), Replicate()]),
        "both": (square, [Shard(0), Shard(0)]),
        "missing": (flat, [Shard(0)]),
    }
    params = {}
    for name, grad in truth.items():
        values = grad.to(torch.float64 if settings["dtype"] == "double" else torch.float32)
        values = distribute_tensor(values, *where[name]) if name in where else values
        params[name] = nn.Parameter(torch.zeros_like(values))
        params[name].grad = values.clone()
    params["experts"].allreduce = False  # type: ignore[attr-defined]
    if rank in (1, 2):
        params["missing"].grad = None
    counted_truth = [*(one for name, one in truth.items() if name != "missing"), torch.ones(4, 2)]
    exact = torch.cat([one.double().flatten() for one in counted_truth]).norm()
    zeros = [int(count_zeros(params.values(), torch.device("cpu")))]
    params["flat"].shared = True  # type: ignore[attr-defined]
    zeros.append(int(count_zeros(params.values(), torch.device("cpu"))))
    expected = sum(int((one == 0).sum()) for one in counted_truth)
    optimizer = TrainingOptimizer(torch.optim.SGD(params.values(), lr=1.0, momentum=0.5, fused=True))
    with counted() as calls:
        norm = optimizer.prepare()
    assert norm is not None
    before = {name: whole(one.grad).clone() for name, one in params.items() if name != "missing"}
    optimizer.apply()
    optimizer.apply()
    moved = max(float((whole(params[name]) + 2.5 * grad).abs().max()) for name, grad in before.items())
    return {
        "norm": float(norm),
        "bits": norm.numpy().tobytes().hex(),
        "dtype": str(norm.dtype),
        "exact": float(exact),
        "zeros": zeros,
        "expected": [expected, expected - int((truth["flat"] == 0).sum())],
        "calls": len(calls),
        "moved": moved,
    }


def job_partial(settings: dict[str, Any]) -> dict[str, Any]:
    """A parameter whose ranks hold summands, and a gradient of such ranks."""
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    result: dict[str, Any] = {}
    param = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    for name, make in {"own": torch.optim.SGD, "foreign": None}.items():
        try:
            if make is not None:
                TrainingOptimizer(make([param], lr=0.1))
            else:
                _foreign(nn.ParameterDict({"summand": param})).prepare()
        except ShardingError as error:
            result[name] = str(error)
    for name, given in {"clipped": [param], "named": [("layers.0.norm", param)]}.items():
        try:
            clip_grad_norm(given, 1.0)
        except ShardingError as error:
            result[name] = str(error)
    other = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    other.grad = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Partial()])
    optimizer = TrainingOptimizer(torch.optim.SGD([other], lr=1.0, fused=True), clip_grad=None)
    result["norm"] = float(optimizer.prepare() or 0)
    optimizer.apply()
    result["value"] = whole(other).tolist()
    return result
