"""What the ranks of the tests of pipelines run: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import Callback, CallbackManager, pretrain
from onstep.callbacks import EMA, ProfilerCallback
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.data import EvalLoader, TrainLoader
from onstep.distributed import open_world
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import held_part, whole
from onstep.errors import CheckpointError, ReplicaMismatchError
from onstep.events.context import unwrap
from onstep.models import generate
from onstep.models.hf.any_directory import build_model
from onstep.training import GlobalState, evaluate, train
from onstep.training.compute.step import LastStep
from onstep.training.experts.experts import Experts
from onstep.training.experts.moe_log import step_losses
from onstep.training.setup.final_weights import whole_of_stages
from onstep.training.setup.model_and_data import cut_into_stages
from onstep.training.setup.placement import place
from onstep.training.verification.fingerprint import fingerprint, placed_parameters
from tests.support.saved_bytes import SavedBytes
from tests.support.small_configs import small_pretrain_config

VOCABULARY, LENGTH, ROWS = 67, 12, 12
LEARNING_RATE = 1e-3
"""AdamW's default. Without a warm-up, 3e-3 enlarges a small change of these weights 1,100 times in 20 steps (where
embeddings are tied; 1e-3: 0.5 times), so that one process differs from itself by 4e-5 with other micro-batches."""


class Ragged(torch.utils.data.Dataset[Any]):
    """Rows of tokens with 1 to 9 labels each; of every twelve, the last three have none."""

    def __len__(self) -> int:
        return 100 * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.roll(-1).clone()
        labels[0 if index % ROWS >= ROWS * 3 // 4 else 1 + index % 9 :] = -100
        return {"tokens": tokens, "labels": labels}


class Curve(Callback):
    """Losses, norms and zeros of each step, and the events of the last one, on this rank."""

    ranks = "all"

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.own: list[float] = []
        self.norms: list[float] = []
        self.zeros: list[int] = []
        self.micro_losses: list[list[float | None]] = []
        self.logits: list[float] = []
        self.experts: list[float] = []

    def on_train_step_start(self, context: Any) -> None:
        self.micro_losses.append([])

    def on_forward_backward_end(self, context: Any) -> None:
        self.micro_losses[-1].append(None if context.loss is None else float(context.loss))

    def on_train_step_end(self, context: Any) -> None:
        step = context.state.features.room(LastStep).step
        self.losses.append(float(step.total.value()))
        self.own.append(float(step.loss))
        self.norms.append(-1.0 if context.grad_norm is None else float(context.grad_norm))  # of an overflow
        self.logits += [] if step.max_attention_logit is None else [float(step.max_attention_logit)]
        self.experts += [float(loss) for loss in step_losses(context.state.features.find(Experts)).values()]
        self.zeros.append(-1 if step.num_zeros is None else int(step.num_zeros))


def _loss_in_the_step(data_iterator: Any, model: nn.Module) -> Any:
    """Computes the loss itself, so that only the end of the step on other stages keeps it from failing there."""
    batch = next(data_iterator)
    labels = batch["labels"]
    found = model(batch["tokens"])
    logits = found if isinstance(found, Tensor) else found.logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, lambda loss: (loss, labels.ne(-100).sum(), {"seen": (labels.ne(-100).sum(), torch.tensor(1.0))})


def _mean_in_the_loss_function(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    labels = batch["labels"]

    def mean(logits: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return cross_entropy(wide.flatten(0, 1), labels.flatten())

    return model(batch["tokens"]), mean


def _deaf(data_iterator: Any, model: nn.Module) -> Any:
    return model(torch.zeros(3, LENGTH, dtype=torch.int64)), lambda logits: logits.mean()


def _cut(data_iterator: Any, model: nn.Module) -> Any:
    return model(next(data_iterator)["tokens"][:, :-1]), lambda logits: logits.mean()


def _absent(data_iterator: Any, model: nn.Module) -> Any:
    next(data_iterator)
    return torch.zeros((), requires_grad=True), lambda loss: loss


def _reading(data_iterator: Any, model: nn.Module) -> Any:
    output, mean = _mean_in_the_loss_function(data_iterator, model)
    penalized = "layers.0.attention.key.weight"
    return output, lambda logits: mean(logits) + dict(model.named_parameters())[penalized].square().sum()


CHOICES: dict[str, Callable[[nn.Module], Iterable[Tensor]]] = {
    "trained": lambda model: (one for one in model.parameters() if one.requires_grad),
    "named": lambda model: (one for name, one in model.named_parameters() if name.endswith("query.weight")),
    "norms": lambda model: (one.weight for one in model.modules() if "Norm" in type(one).__name__),
}
"""Weights that a loss has a penalty on."""


def _decaying(data_iterator: Any, model: nn.Module, choice: str) -> Any:
    """Adds a penalty on weights that all stages have."""
    output, mean = _mean_in_the_loss_function(data_iterator, model)
    return output, lambda logits: mean(logits) + sum(one.square().sum() for one in CHOICES[choice](model))


def _outlined(data_iterator: Any, model: nn.Module) -> Any:
    """Adds a weight of which this rank has an outline, as a Trainer's model has of other stages."""
    output, mean = _mean_in_the_loss_function(data_iterator, model)
    return output, lambda logits: mean(logits) + torch.zeros((), device="meta")


_KEPT: list[Tensor] = []


def _hooked(data_iterator: Any, model: nn.Module) -> Any:
    """Adds a loss of what hooks keep of each layer."""
    _KEPT.clear()
    layers = [module for name, module in model.named_modules() if name.startswith("layers.") and name.count(".") == 1]

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        _KEPT.append(output.square().mean())

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        output, mean = _mean_in_the_loss_function(data_iterator, model)
    finally:
        for handle in handles:
            handle.remove()
    return output, lambda logits: mean(logits) + sum(_KEPT)


_BORROWED: dict[bytes, Tensor] = {}


def _borrowing(data_iterator: Any, model: nn.Module, detaches: bool = False) -> Any:
    """Adds to the loss what the first layer has computed, which the last stage of a V has on its rank."""
    batch = next(data_iterator)
    labels, name = batch["labels"], batch["tokens"].numpy().tobytes()

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        _BORROWED[name] = output.detach() if detaches else output
        handle.remove()

    for layer in [module for path, module in model.named_modules() if path == "layers.0"]:
        handle = layer.register_forward_hook(keep)

    def loss(logits: Tensor) -> Any:
        own = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return own + _BORROWED.pop(name).square().sum(), labels.ne(-100).sum(), {}

    return model(batch["tokens"]), loss


def _penalized(data_iterator: Any, model: nn.Module, how: str) -> Any:
    """Adds to the loss a norm of weights as a rank has them, or of whole ones; or multiplies activations by one."""
    output, mean = _mean_in_the_loss_function(data_iterator, model)
    names = ("layers.0.attention.key.weight", "final_norm.weight")

    def loss(logits: Tensor) -> Tensor:
        given = [model.get_parameter(name) for name in names]
        weights = [whole(one) if how == "whole" else one for one in given]
        if how == "product":
            return mean(logits) + (logits[..., :32] @ weights[0].T).mean()
        return mean(logits) + sum((one.square().sum() for one in weights), torch.zeros(()))

    return output, loss


def _failing(data_iterator: Any, model: nn.Module) -> Any:
    def fails(logits: Tensor) -> Tensor:
        raise RuntimeError("no metadata in this batch")

    return model(next(data_iterator)["tokens"]), fails


def _uneven(data_iterator: Any, model: nn.Module) -> Any:
    """Calls each stage with tokens of its own."""
    batch = next(data_iterator)
    changed = {**batch, "tokens": batch["tokens"].roll(int(os.environ["RANK"]), 0)}
    return _mean_in_the_loss_function(iter([changed]), model)


STEPS: dict[str, Callable[..., Any]] = {
    "sum": _loss_in_the_step,
    "mean": _mean_in_the_loss_function,
    "deaf": _deaf,
    "cut": _cut,
    "absent": _absent,
    "reading": _reading,
    "failing": _failing,
    "uneven": _uneven,
    "outlined": _outlined,
    **{f"decaying {choice}": partial(_decaying, choice=choice) for choice in CHOICES},
    "hooked": _hooked,
    "borrowing": _borrowing,
    "penalized": partial(_penalized, how="part"),
    "penalized whole": partial(_penalized, how="whole"),
    "product": partial(_penalized, how="product"),
    "detaching": partial(_borrowing, detaches=True),
}


def config_of(keys: list[str], steps: int) -> ConfigContainer:
    """Four layers, two optimizer groups, clipping, and zeros counted."""
    config = ConfigContainer(model=ModelConfig(vocab_size=VOCABULARY, seq_length=LENGTH))
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 4, 32, 4
    config.dist.device, config.dataset.seq_length = "cpu", LENGTH
    config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = ROWS, 3, steps
    config.logger.log_interval, config.validation.eval_iters, config.optimizer.lr = 0, None, LEARNING_RATE
    config.optimizer.log_num_zeros_in_grad = True
    apply_overrides(config, keys)
    return config


def family_of(kind: str, vocab_size: int = VOCABULARY, length: int = LENGTH, **changed: Any) -> ModelConfig:
    """A model of transformers of the same size."""
    content = {"model_type": kind, "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48}
    content |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    content |= {"num_local_experts": 4, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    return ModelConfig(hf_config={**content, **changed}, vocab_size=vocab_size, seq_length=length)


def optimizer_of(model: list[nn.Module]) -> torch.optim.Optimizer:
    """AdamW of two groups; vectors have no weight decay and a third of the rate."""
    trained = list(dict.fromkeys(one for chunk in model for one in chunk.parameters() if one.requires_grad))
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim > 1]},
        {"params": [one for one in trained if one.ndim < 2], "lr": LEARNING_RATE / 3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def divided(
    config: ConfigContainer, ranks: int, *, dtype: str = "float32", seed: int = 0, bare: bool = False
) -> tuple[list[nn.Module], GlobalState, TrainLoader]:
    """This rank's chunks of the model, on the layout of the configuration, and its rows; bare is without ours."""
    world = open_world(config.dist, config.parallel_sizes(ranks))
    whole: Any = build_model(config.model, seed=seed)
    whole = whole.model if bare else whole
    chunks = [whole.to(getattr(torch, dtype))]
    if world.sizes.pp > 1:
        chunks = cut_into_stages(chunks, config, world)
    chunks = place(chunks, world, config)
    micro = config.train.micro_batch_size or 1
    loader = TrainLoader(
        Ragged(),
        micro_batch_size=micro,
        global_batch_size=ROWS,
        rank=world.data.rank,
        world_size=world.data.size,
        shuffle=False,
    )
    return chunks, GlobalState(config, num_microbatches=ROWS // micro // world.data.size, world=world), loader


def run_row(keys: list[str], options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train, by `train()`; what this rank found."""
    config = config_of(keys, steps)
    if "family" in options:
        config.model = family_of(options["family"], **options.get("changed", {}))
    dtype = options.get("dtype", "float32")
    chunks, state, loader = divided(config, options.get("ranks", 1), dtype=dtype, bare=options.get("bare", False))
    curve, manager = Curve(), CallbackManager()
    manager.add(curve)
    if "traced" in options:
        plain: dict[str, Any] = dict.fromkeys(("with_stack", "with_flops", "record_shapes"), False)
        manager.add(ProfilerCallback(0, 1, options["traced"], warmup_steps=0, **plain))
    step = STEPS[options.get("step", "sum")]
    apart = [one for chunk in chunks for one in (*chunk.parameters(), *chunk.buffers())]
    saved = SavedBytes(apart if options.get("saved") else [])
    with saved if options.get("saved") else nullcontext():
        train(step, chunks, optimizer_of(chunks), None, loader, None, state, callback_manager=manager)
    found = {name: vars(curve)[name] for name in ("losses", "own", "norms", "zeros", "micro_losses")}
    found["saved"] = saved.peak
    last = whole_of_stages(chunks, state.world) if is_staged(chunks) else chunks[0]
    found["weights"] = (
        [] if last is None else [float(one.detach().double().square().sum()) for one in last.parameters()]
    )
    state.world.close()
    return found


def job_rows(settings: dict[str, Any]) -> list[Any]:
    """The rows `[keys, options]`, one after the other."""
    return [run_row(keys, options, settings["steps"]) for keys, options in settings["rows"]]


def _telling(data_iterator: Any, model: nn.Module) -> Any:
    """Besides losses, the likeliest first tokens."""
    batch = next(data_iterator)
    logits, labels = model(batch["tokens"]), batch["labels"]

    def told(logits: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return logits[:, 0].argmax(-1).tolist()
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.ne(-100).sum(), {}

    return logits, told


def job_collected(settings: dict[str, Any]) -> list[Any]:
    """For each row of keys: the loss of 31 rows, what is collected besides, and what a function of the user makes."""
    return [_collected(keys, settings["ranks"]) for keys in settings["rows"]]


def _collected(keys: list[str], ranks: int) -> list[Any]:
    config = config_of(keys, 1)
    chunks, state, _ = divided(config, ranks)
    data, micro = state.world.data, config.train.micro_batch_size or 1
    rows = torch.utils.data.Subset(Ragged(), range(31))
    loader = EvalLoader(
        rows,
        micro_batch_size=micro,
        num_microbatches=ROWS // micro // data.size,
        rank=data.rank,
        world_size=data.size,
    )
    prompt = torch.arange(1, 5)[None]
    found: list[Any] = []
    for ways in (
        {"process_non_loss_data_func": print},
        {"non_loss_data_func": lambda model: generate(model[0], prompt, max_new_tokens=4, temperature=0).tolist()},
    ):
        given: dict[str, Any] = {"process_non_loss_data_func": None, "config": config.model, **ways}
        means, collected, _ = evaluate(state, _telling, loader, chunks, **given)
        assert means is not None
        found += [collected, *(float(mean) for mean in means.values())]
    state.world.close()
    return found


class Halts(Callback):
    """Stops a run as if it were preempted after some step; or dies there, in the middle of the passes of the next."""

    ranks = "all"

    def __init__(self, at: int, *, dies: bool) -> None:
        self.at, self.dies, self.step = at, dies, 0

    def on_train_step_start(self, context: Any) -> None:
        self.step += 1

    def on_forward_backward_end(self, context: Any) -> None:
        if self.dies and self.step == self.at + 1 and int(os.environ.get("RANK", "0")) == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Drifts(Callback):
    """Changes one bit of a weight on one rank when a step begins; the fingerprints of the first and last weights."""

    ranks = "all"

    def __init__(self, step: int, rank: int, name: str) -> None:
        self.step, self.rank, self.name = step, rank, name
        self.prints: list[str] = []

    def on_train_start(self, context: Any) -> None:
        self._print(context)

    def on_train_end(self, context: Any) -> None:
        self._print(context)

    def _print(self, context: Any) -> None:
        parameters, starts = placed_parameters(context.model)
        self.prints.append(fingerprint(parameters, context.state.world, starts))

    def on_train_step_start(self, context: Any) -> None:
        state = context.state
        if (state.train_state.step, state.world.rank) == (self.step, self.rank):
            named = dict(named for chunk in context.model for named in unwrap(chunk).named_parameters())
            held_part(named[self.name]).view(torch.int32).view(-1)[3] ^= 1


def job_pretrains(settings: dict[str, Any]) -> list[Any]:
    """Several of `job_pretrain`, in the same processes."""
    return [job_pretrain(one) for one in settings["runs"]]


def job_pretrain(settings: dict[str, Any]) -> Any:
    """`pretrain` on a small text, with saves and evaluations; the losses, norms and evaluations."""
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=4, length=16)
    config.tokenizer.tokenizer_type, config.model.vocab_size = "bytes", 261
    if "family" in settings:
        config.model = family_of(settings["family"], 261, 16, tie_word_embeddings=True)
    config.train.global_batch_size, config.train.micro_batch_size = 8, 2
    config.validation.eval_interval, config.validation.eval_iters = 3, 2
    config.logger.log_interval, config.checkpoint.save_interval = 1, settings.get("save", 2)
    config.run.output_dir, config.run.name = settings["output"], settings["name"]
    apply_overrides(config, [f"train.train_iters={settings['steps']}", *settings["keys"]])
    curve, evaluated, drifts = Curve(), Evaluated(), Drifts(*settings.get("drifts", (-1, 0, "")))
    callbacks: list[Any] = [curve, evaluated, drifts, EMA(0.5, apply_at_end=settings.get("exports_average", False))]
    if "dies" in settings:
        callbacks.append(Halts(settings["dies"], dies=True))
    try:
        with suppress(SystemExit):  # of train.exit_interval
            pretrain(config, callbacks=callbacks)
    except (ReplicaMismatchError, CheckpointError) as error:
        return {"error": str(error)}
    found = {"losses": curve.losses, "norms": curve.norms, "evaluated": evaluated.found}
    return {**found, "prints": drifts.prints}


class Evaluated(Callback):
    """The metrics of each evaluation, on this rank."""

    ranks = "all"

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_eval_end(self, context: Any) -> None:
        self.found.append(float(context.metrics["eval_loss"]))
