"""One row of the table of layouts: a tiny model trained for some steps on this rank, with what was sent and held.

`run_row` is called on each rank of a row, with `$RANK` and `$WORLD_SIZE` set; one process is the row that the others
are compared with.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from layout_names import LENGTH, ROWS, VOCABULARY, Layout, Variant
from onstep import Callback, CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.data import TrainLoader
from onstep.distributed import World, open_world
from onstep.distributed.gradient_exchange import average_in
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import as_dtensor, local_part, whole
from onstep.models import vocabulary_loss
from onstep.models.generation.generate import generate, inner_transformer
from onstep.models.hf.causal_lm import inner_causal_lm
from onstep.models.transformer import build_transformer
from onstep.recipes import get_recipe
from onstep.training import GlobalState, train
from onstep.training.setup.final_weights import whole_of_stages
from onstep.training.setup.model_and_data import cut_into_stages
from onstep.training.setup.placement import place

_TEXT = Path(__file__).parents[1] / "LICENSE"
_BYTES = 261
"""The vocabulary of a text."""
_GENERATED = 8
"""Tokens that a model adds to a prompt."""
LEARNING_RATE = 1e-3
"""AdamW's default. Without a warm-up, 3e-3 enlarges small differences up to 1,100 times in 20 steps."""


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of tokens with 1 to 9 labels each; of those of a step, the last quarter may have none."""

    def __init__(self, has_empty_rank: bool, number: int = ROWS) -> None:
        self.has_empty_rank, self.number = has_empty_rank, number

    def __len__(self) -> int:
        return 100 * self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.roll(-1).clone()
        is_empty = self.has_empty_rank and index % self.number >= self.number * 3 // 4
        labels[0 if is_empty else 1 + index % 9 :] = -100
        return {"tokens": tokens, "labels": labels}


class Watch(Callback):
    """What a training comes to, and what this rank holds of it."""

    ranks = "all"
    reads_weights = False
    """But for the end of the training, when they are gathered, and where it replaces them."""

    def __init__(
        self, *, keeps_starts: bool = False, along: list[dict[str, Tensor]] | None = None, generates: bool = False
    ) -> None:
        self.starts: list[dict[str, Tensor]] | None = [] if keeps_starts else None
        """The weights with which each step began."""
        self._along, self._generates = along, generates
        self.reads_weights = along is not None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.sent: list[Counter[str]] = []
        """What has been sent by the end of each step."""
        self.held: dict[str, int] = {}
        """Bytes of parameters, masters of parameters in MXFP8, gradients and optimizer state."""
        self.shapes: list[tuple[list[int], bool, int]] = []
        """Of each parameter, whether it is trained, and the bytes of an element."""
        self.names: list[str] = []
        """Of each parameter."""
        self.values: dict[str, Tensor] = {}
        self.evaluated: list[float] = []
        """The loss of each evaluation."""
        self.tokens: list[list[int]] = []
        """What a language model adds to two prompts, its most likely tokens."""

    def on_train_step_start(self, context: Any) -> None:
        """Note the weights, or replace them by those of another run."""
        named = {_plain(name): one for chunk in context.model for name, one in chunk.named_parameters()}
        if self.starts is not None:
            self.starts.append({name: one.detach().clone() for name, one in named.items()})
        if self._along is not None:
            with torch.no_grad():
                for name, value in self._along[len(self.losses)].items():
                    named[name].copy_(_as(named[name], value))

    def on_train_step_end(self, context: Any) -> None:
        """Note the loss and the norm of a step, and the bytes of its gradients."""
        self.losses.append(float(next(iter(context.loss_dict.values()))))
        self.norms.append(float(context.grad_norm))
        self.sent.append(Counter(SENT))
        parameters = dict.fromkeys(one for chunk in context.model for one in chunk.parameters())
        self.held["gradients"] = _bytes([one.grad for one in parameters if one.grad is not None])

    def on_eval_end(self, context: Any) -> None:
        """Note the loss of an evaluation."""
        self.evaluated.append(float(context.metrics["eval_loss"]))

    def on_train_end(self, context: Any) -> None:
        """Gather the parameters, and generate. Collective."""
        model = context.model[0]
        is_able = inner_transformer(model) is not None or inner_causal_lm(model) is not None
        if self._generates and is_able:
            prompts = torch.tensor([[11, 12, 13], [14, 15, 16]])
            self.tokens = generate(model, prompts, max_new_tokens=_GENERATED, temperature=0).tolist()
        named = [(_plain(name), one) for chunk in context.model for name, one in chunk.named_parameters()]
        self.shapes = [(list(one.shape), one.requires_grad, one.element_size()) for _, one in named]
        self.names = [name for name, _ in named]
        self.held["parameters"] = _bytes([*dict.fromkeys(one for _, one in named)])
        if is_staged(context.model):
            gathered = whole_of_stages([*context.model], context.state.world)
            self.values = {} if gathered is None else {name: one.detach() for name, one in gathered.named_parameters()}
            model = gathered
        else:
            self.values = {name: whole(one.detach()) for name, one in named}
        biases = [] if model is None else [one for one in model.named_buffers() if one[0].endswith("expert_bias")]
        self.values |= {_plain(name): one.clone() for name, one in biases}  # which follow the loads of all steps
        if masters := getattr(model, "masters", None):
            self.held["masters"] = _bytes([*masters.values()])
        self.held["state"] = _bytes(
            [one for kept in context.optimizer.state.values() for one in kept.values() if one.ndim]
        )


def _plain(name: str) -> str:
    """The name of a parameter outside of DistributedDataParallel."""
    return name.removeprefix("module.")


def _as(parameter: Tensor, value: Tensor) -> Tensor:
    """The value, divided as the parameter is."""
    known = as_dtensor(parameter)
    return value if known is None else distribute_tensor(value, known.device_mesh, known.placements, src_data_rank=None)


class _InputIds(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        labels = row["tokens"].masked_fill(row["labels"].eq(-100), -100) if self.has_empty_rank else row["tokens"]
        return {"input_ids": row["tokens"], "labels": labels}


def _step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    tokens, labels = batch["tokens"], batch["labels"]
    found = model(tokens)
    logits = found if isinstance(found, Tensor) else found.logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, lambda loss: (loss, labels.ne(-100).sum(), {})


def _step_of_model(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    labels = batch["labels"]
    loss = model(batch["tokens"], labels, reduction="sum")
    return loss, lambda loss: (loss, labels.ne(-100).sum(), {})


def model_of(variant: Variant, config: ConfigContainer) -> nn.Module:
    """The model of a variant, with weights drawn from one seed."""
    if variant.model == "own":
        model: nn.Module = build_transformer(config.model, seed=0)
    else:
        model = _of_transformers(variant, config.model.num_layers)
    if variant.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        names = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)}
        targets = sorted(names - {"lm_head", "head", "output", "out"})
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    if variant.groups:
        next(model.parameters()).requires_grad_(False)
    return model.to(getattr(torch, variant.dtype))


def _of_transformers(variant: Variant, layers: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**_sizes(layers, VOCABULARY, variant.model), **variant.options}
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(variant.model, **sizes))  # type: ignore[no-untyped-call]
    return made


def _sizes(layers: int, vocabulary: int, kind: str = "llama") -> dict[str, Any]:
    """The sizes of a model of transformers."""
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return {**sizes, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    return {**sizes, "num_key_value_heads": 2, "max_position_embeddings": 32}


def config_of(layout: Layout, variant: Variant, steps: int) -> ConfigContainer:
    """The configuration of a row."""
    config = ConfigContainer() if variant.recipe is None else get_recipe(variant.recipe)()
    model = config.model
    model.vocab_size, model.seq_length, model.num_layers = VOCABULARY, LENGTH, 3
    if variant.on_page or layout.stage_ranks > 1:
        model.num_layers = 4
    model.hidden_size, model.num_attention_heads = 32, 4
    if variant.recipe is not None:
        _shrink(config)
    config.dist.device, config.dataset.seq_length = "cpu", LENGTH
    config.train.global_batch_size, config.train.train_iters = variant.rows, steps
    config.train.micro_batch_size = _micro_batch_of(layout, variant)
    config.logger.log_interval, config.validation.eval_iters, config.optimizer.lr = 0, None, LEARNING_RATE
    apply_overrides(config, [*layout.keys, *variant.keys])
    if variant.door == "pretrain":
        _of_text(config, variant, steps)
    return config


def _shrink(config: ConfigContainer) -> None:
    """Give the model of a recipe a small size, and the run float32 and a rate by which it learns in a few steps."""
    model = config.model
    model.ffn_hidden_size = 48
    if model.num_query_groups is not None:
        model.num_query_groups = 2
    if model.kv_channels is not None:
        model.kv_channels = 8
    config.mixed_precision, config.optimizer.min_lr, config.scheduler.lr_warmup_iters = None, 3e-4, 1


def _of_text(config: ConfigContainer, variant: Variant, steps: int) -> None:
    """Have `pretrain` read a text, and evaluate twice if it is a variant of the page."""
    data = config.dataset
    data.kind, data.paths, data.split, data.num_workers = "text", [str(_TEXT)], "100,0,0", 0
    config.tokenizer.tokenizer_type, config.model.vocab_size = "bytes", _BYTES
    config.run.save_weights, config.checkpoint.save = False, None
    if variant.model != "own":
        content = {"model_type": variant.model, **_sizes(config.model.num_layers, _BYTES, variant.model)}
        content |= variant.options
        config.model = ModelConfig(hf_config=content, vocab_size=_BYTES, seq_length=LENGTH)
    if variant.on_page:
        data.split = "80,20,0"
        config.validation.eval_interval, config.validation.eval_iters = max(1, steps // 2), 2
    if variant.packed:
        data.reset_attention_mask = data.reset_position_ids = True


def _micro_batch_of(layout: Layout, variant: Variant) -> int:
    return variant.rows // layout.data_ranks // variant.accumulation


def optimizer_of(model: list[nn.Module], variant: Variant) -> torch.optim.Optimizer:
    """AdamW; with two groups, biases and norms have no weight decay and half the rate."""
    trained = [*dict.fromkeys(one for chunk in model for one in chunk.parameters() if one.requires_grad)]
    if not variant.groups:
        return torch.optim.AdamW(trained, lr=LEARNING_RATE)
    vectors = [one for one in trained if one.ndim < 2]
    matrices = [one for one in trained if one.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "lr": LEARNING_RATE / 2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE)


def run_row(
    layout: Layout,
    variant: Variant,
    steps: int,
    *,
    parameters: str | None = None,
    starts: str | None = None,
    along: str | None = None,
) -> dict[str, Any]:
    """Train; what rank 0 found, with its whole parameters written to a file.

    Args:
        layout: how the ranks hold the model.
        variant: what is trained.
        steps: the number of steps.
        parameters: where rank 0 writes the parameters at the end; None writes none.
        starts: where rank 0 of a run without shards writes the parameters with which each step began.
        along: such a file, of a run whose parameters each step begins with; None continues with those it has.
    """
    config = config_of(layout, variant, steps)
    watch = Watch(
        keeps_starts=starts is not None,
        along=None if along is None else torch.load(along),
        generates=variant.on_page or variant.has_empty_rank,
    )
    directory = f"row-{next(_NUMBERS)}"  # the same on all ranks
    Path(directory).mkdir(exist_ok=True)
    if config.train.torch_compile:
        torch._inductor.config.fallback_random = True  # masks of dropout are drawn as without compilation
    tokens = _micro_batch_of(layout, variant) * LENGTH // variant.losses_of_micro_batch
    with counted(), patch.object(vocabulary_loss, "CHUNK_BYTES", tokens * 4 * VOCABULARY):
        _DOORS[variant.door](config, layout, variant, watch, directory)
    if os.environ.get("RANK", "0") == "0":
        for values, file in ((watch.values, parameters), (watch.starts, starts)):
            if file is not None:
                torch.save(values, file)
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "sent": watch.sent[_STEADY] - watch.sent[_STEADY - 1],
        "shapes": watch.shapes,
        "names": watch.names,
        "held": watch.held,
        "evaluated": watch.evaluated,
        "tokens": watch.tokens,
    }


def _by_hand(config: ConfigContainer, layout: Layout, variant: Variant, watch: Watch, directory: str) -> None:
    """`train()` of a model that is placed here."""
    world = open_world(config.dist, config.parallel_sizes(layout.ranks))
    try:
        _train_here(config, world, variant, watch)
    finally:
        world.close()


def _train_here(config: ConfigContainer, world: World, variant: Variant, watch: Watch) -> None:
    chunks = [model_of(variant, config)]
    model = place(cut_into_stages(chunks, config, world) if world.sizes.pp > 1 else chunks, world, config)
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.register_comm_hook(
                None, lambda state, bucket: _average(bucket)
            )  # torch wants no annotations that are text
    optimizer = optimizer_of(model, variant)
    state = GlobalState(config, num_microbatches=variant.accumulation, world=world)
    loader = TrainLoader(
        Rows(variant.has_empty_rank, variant.rows),
        micro_batch_size=config.train.micro_batch_size or 1,
        global_batch_size=variant.rows,
        rank=world.data.rank,
        world_size=world.data.size,
        shuffle=False,
    )
    manager = CallbackManager()
    manager.add(watch)
    torch.manual_seed(100 + world.data.rank)
    forward_step = _step if variant.loss == "step" else _step_of_model
    train(forward_step, model, optimizer, None, loader, None, state, callback_manager=manager)


def _average(bucket: Any) -> Any:
    """What DistributedDataParallel does by itself, where `counted` sees it."""
    return average_in(None, bucket.buffer(), dist.get_world_size())


def _pretrained(config: ConfigContainer, layout: Layout, variant: Variant, watch: Watch, directory: str) -> None:
    """`pretrain` on the text of the license, packed in documents of a few words each."""
    config.dataset.cache_dir = directory
    if variant.packed:
        config.dataset.paths = [_documents(directory)]
    pretrain(config, callbacks=[watch])


def _documents(directory: str) -> str:
    """A file with the text in documents of three words, several of which fit a row; each rank writes the same."""
    words = _TEXT.read_text().split()
    lines = [json.dumps({"text": " ".join(words[start : start + 3])}) for start in range(0, len(words), 3)]
    own, shared = Path(directory, f"{os.getpid()}.part"), Path(directory, "documents.jsonl")
    own.write_text("\n".join(lines))
    own.replace(shared)
    return str(shared)


def _by_trainer(config: ConfigContainer, layout: Layout, variant: Variant, watch: Watch, directory: str) -> None:
    """`Trainer` of a model of transformers."""
    keys = dict(map(_pair, layout.keys))
    evaluates: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": max(1, (config.train.train_iters or 2) // 2)}
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=config.train.train_iters or 0,
        per_device_train_batch_size=_micro_batch_of(layout, variant),
        gradient_accumulation_steps=variant.accumulation,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        config_overrides={"run.save_weights": False, **keys},
        per_device_eval_batch_size=2,
        **(evaluates if variant.on_page else {}),
    )
    data = _InputIds(variant.has_empty_rank, variant.rows)
    some = torch.utils.data.Subset(data, range(variant.rows)) if variant.on_page else None
    Trainer(model_of(variant, config), arguments, train_dataset=data, eval_dataset=some, callbacks=[watch]).train()


_DOORS = {"train": _by_hand, "pretrain": _pretrained, "Trainer": _by_trainer}


def _pair(override: str) -> tuple[str, Any]:
    key, _, value = override.partition("=")
    return key, yaml.safe_load(value)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(local_part(one).nbytes for one in tensors)


_COUNTED = {
    "all_gather_into_tensor": "gather",
    "all_gather_single": "gather",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_single": "scatter",
    "all_to_all_single": "scatter",
    "all_reduce": "reduce",
}
"""Functions of torch.distributed, and what they do."""
SENT: Counter[str] = Counter()
"""What this process has sent: bytes by kind, those of the whole tensor; of small sums their number.

Gradients that torch sums one by one, those of DTensors in shards, are of the kind `each`.
"""
_STEADY = 2
"""A step that does nothing else, from 0."""
_NUMBERS = count()
_SMALL = 512
"""Bytes of a sum that is not one of gradients: a loss, a norm, a flag."""


@contextmanager
def counted() -> Iterator[None]:
    """Counts in `SENT` while it is open."""
    kept: dict[str, Any] = {name: getattr(dist, name) for name in _COUNTED if hasattr(dist, name)}

    def counts(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        kind = _COUNTED[name]

        def called(*args: Any, **kwargs: Any) -> Any:
            size = max(one.nbytes for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
            if kind == "reduce" and size <= _SMALL:
                SENT["small"] += 1
            else:
                SENT["matrices" if args[2:] else kind] += size  # Muon's are exchanged with the sizes of their parts
            return own(*args, **kwargs)

        return called

    def passed_on(operations: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
        SENT["send"] += sum(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return passes(operations, *args, **kwargs)

    def summed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        SENT["each"] += tensor.nbytes
        return sums(tensor, *args, **kwargs)

    passes, sums = schedules._batch_p2p, _functional_collectives.all_reduce
    _functional_collectives.all_reduce = summed  # type: ignore[assignment]
    schedules._batch_p2p = passed_on  # type: ignore[assignment]
    for name, own in kept.items():
        setattr(dist, name, counts(name, own))
    try:
        yield
    finally:
        schedules._batch_p2p, _functional_collectives.all_reduce = passes, sums
        for name, own in kept.items():
            setattr(dist, name, own)
