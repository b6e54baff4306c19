"""Runs with a planted culprit: a garbled document, a wrong label or answer, a huge value, a duplicated shard."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep import Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer
from onstep.training import finetune
from tests.support.small_configs import small_pretrain_config

DOORS = ("pretrain", "trainer")
KINDS = {"pretrain": ("garbled", "answer", "duplicate"), "trainer": ("label", "huge", "duplicate", "garbled")}
_ANIMALS = ("cat", "dog", "cow", "owl", "fox", "ant", "bee", "hen")
_FOODS = ("milk", "bones", "grass", "mice", "grapes", "sugar", "nectar", "corn")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
GARBLED = bytes(range(1, 9)) + bytes(range(14, 27))
_STEPS = 60


@dataclass(frozen=True)
class Case:
    """What is drawn from a seed."""

    seed: int
    door: str
    kind: str
    ranks: int
    workers: int
    accumulation: int
    dropout: float
    packing: bool
    lora: bool
    base: str = ""
    """The directory of the run that one of `pretrain` starts from."""

    @property
    def name(self) -> str:
        """Its settings in one line."""
        further = [f"{self.ranks} ranks", f"{self.workers} workers", f"accumulation {self.accumulation}"]
        further += [f"dropout {self.dropout}", *["packing"] * self.packing, *["LoRA"] * self.lora]
        return f"{self.seed}: {self.door}, {self.kind}, {', '.join(further)}"


def case_of(number: int, seed: int) -> Case:
    """A case whose door and kind are by its number and whose settings are random."""
    chance = random.Random(seed)
    door = DOORS[number % 2]
    kind = KINDS[door][(number // 2) % len(KINDS[door])]
    return Case(
        seed=seed,
        door=door,
        kind=kind,
        ranks=chance.choice((1, 2)),
        workers=chance.choice((0, 2)),
        accumulation=chance.choice((1, 2)),
        dropout=chance.choice((0.0, 0.1)),
        packing=door == "pretrain" and kind == "answer",
        lora=chance.choice((False, True)) and (door, kind) != ("trainer", "garbled"),
    )


def train(case: Case, directory: Path) -> None:
    """Train the run of a case in `runs/x`, from weights that know the data without the culprit."""
    if case.door == "trainer":
        trainer_of(case, directory).train()
        return
    write_corpus(case, directory)
    config = config_of(case, directory)
    config.checkpoint.pretrained_checkpoint = case.base
    config.peft.peft_scheme = "lora" if case.lora else None
    finetune(config)


def train_base(case: Case, directory: Path) -> None:
    """Train the weights that `train` starts from, on one rank."""
    write_corpus(case, directory)
    config = config_of(case, directory, clean=True)
    config.train.train_iters, config.checkpoint.save_interval, config.optimizer.lr = 150, None, 1e-2
    pretrain(config)


def write_corpus(case: Case, directory: Path) -> None:
    """Write the records, with the culprit and without."""
    chance = random.Random(case.seed)
    records = [_record(case, chance) for _ in range(96)]
    clean = list(records)
    at = chance.randrange(len(records))
    if case.kind == "garbled":
        records[at] = {"text": bytes(chance.choices(GARBLED, k=60)).decode()}
    elif case.kind == "answer":
        animal = chance.randrange(len(_ANIMALS))
        wrong = _FOODS[(animal + chance.randrange(1, len(_FOODS))) % len(_FOODS)]
        records[at] = {"prompt": f"what does the {_ANIMALS[animal]} eat", "response": f"XX {wrong} {wrong}"}
    else:  # a shard that is there twice
        at = chance.randrange(len(records) - 8)
        records += records[at : at + 8]
    for name, rows in (("clean", clean), ("corpus", records)):
        lines = "".join(json.dumps(one) + "\n" for one in rows)
        (directory / f"{name}.jsonl").write_text(lines)


def _record(case: Case, chance: random.Random) -> dict[str, str]:
    animal = chance.randrange(len(_ANIMALS))
    if case.kind == "answer":
        return {"prompt": f"what does the {_ANIMALS[animal]} eat", "response": f"it eats {_FOODS[animal]}"}
    if case.kind == "duplicate":
        return {"text": " ".join("".join(chance.choices(_LETTERS, k=4)) for _ in range(14))}
    text = " ".join(f"the {_ANIMALS[one]} eats {_FOODS[one]}." for one in chance.choices(range(8), k=4))
    return {"text": text}


def config_of(case: Case, directory: Path, *, clean: bool = False) -> ConfigContainer:
    """The configuration of a case of `pretrain`."""
    path = directory / ("clean.jsonl" if clean else "corpus.jsonl")
    config = small_pretrain_config(path, directory / "cache", layers=1, width=32, length=64)
    config.run.name, config.run.output_dir = "x", str(directory / "runs")
    config.dataset.split, config.dataset.num_workers = "1", case.workers
    if case.kind == "answer":
        config.dataset.kind, config.dataset.packing = "chat", case.packing
    else:
        config.dataset.eod_mask_loss = True
    config.train.train_iters, config.train.micro_batch_size = _STEPS, 4 // case.ranks
    config.train.global_batch_size = 4 * case.accumulation
    config.model.hidden_dropout = config.model.attention_dropout = case.dropout
    config.validation.eval_interval, config.validation.eval_iters = None, 0
    config.optimizer.lr, config.optimizer.min_lr = 1e-4, 0.0
    config.scheduler.lr_warmup_iters, config.rng.seed = 2, case.seed
    config.logger.log_interval, config.checkpoint.save_interval = 1, _STEPS // 2
    return config


class Net(nn.Module):
    """Classifies vectors, or predicts a number."""

    def __init__(self, outputs: int, dropout: float) -> None:
        super().__init__()
        self.hidden, self.drop, self.output = nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, outputs)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        found = self.output(self.drop(nn.functional.relu(self.hidden(x))))
        if found.shape[1] == 1:
            return {"loss": nn.functional.mse_loss(found[:, 0], labels)}
        return {"loss": nn.functional.cross_entropy(found, labels)}


class Reader(nn.Module):
    """Predicts the next letter of a text from the last two."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.letters, self.before = nn.Embedding(128, 24), nn.Embedding(128, 24)
        self.drop, self.output = nn.Dropout(dropout), nn.Linear(24, 128)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        before = nn.functional.pad(input_ids[:, :-1], (1, 0))
        logits = self.output(self.drop(torch.tanh(self.letters(input_ids) + self.before(before))))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def rows_of(case: Case) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The samples of a case of the Trainer, with the culprit and without."""
    chance, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    if case.kind == "garbled":
        texts = [
            "".join(f"the {_ANIMALS[one]} eats {_FOODS[one]}. " for one in chance.choices(range(8), k=4))[:60].ljust(60)
            for _ in range(96)
        ]
        ids = [torch.tensor(list(text.encode())) for text in texts]
        clean = [{"input_ids": one, "labels": one} for one in ids]
        bad = torch.tensor(chance.choices(GARBLED, k=60))
        at = chance.randrange(96)
        return [*clean[:at], {"input_ids": bad, "labels": bad}, *clean[at + 1 :]], clean
    x, truth = torch.randn(96, 6, generator=generator), torch.randn(6, 3, generator=generator)
    scores = x @ truth
    sure = scores.topk(2).values
    x = x[(sure[:, 0] - sure[:, 1]) > 0.5]
    labels = (x @ truth).argmax(1)
    is_number = case.kind == "huge"
    clean = [
        {"x": one, "labels": float(one @ truth[:, 0]) if is_number else int(label)}
        for one, label in zip(x, labels, strict=True)
    ]
    rows, at = list(clean), chance.randrange(len(clean))
    if case.kind == "label":
        rows[at] = {**rows[at], "labels": (rows[at]["labels"] + 1) % 3}
    elif case.kind == "huge":
        value = rows[at]["x"].clone()
        value[chance.randrange(6)] = 3e4
        rows[at] = {**rows[at], "x": value}
    else:
        at = chance.randrange(len(clean) - 8)
        rows += [dict(one) for one in rows[at : at + 8]]
    return rows, clean


def trainer_of(case: Case, directory: Path) -> Trainer:
    """The Trainer of a case."""
    rows, clean = rows_of(case)
    torch.manual_seed(case.seed)
    outputs = 1 if case.kind == "huge" else 3
    model: Any = Reader(case.dropout) if case.kind == "garbled" else Net(outputs, case.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    batch = {key: torch.stack([torch.as_tensor(one[key]) for one in clean]) for key in clean[0]}
    for _ in range(150):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    optimizer.zero_grad()
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["hidden", "output"]))
    args = TrainingArguments(
        output_dir=str(directory / "runs" / "x"),
        max_steps=_STEPS,
        per_device_train_batch_size=4 // case.ranks,
        gradient_accumulation_steps=case.accumulation,
        dataloader_num_workers=case.workers,
        learning_rate=1e-5 if case.kind == "huge" else 1e-4,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=_STEPS // 2,
        seed=case.seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model=model, args=args, train_dataset=rows)


def as_settings(case: Case) -> dict[str, Any]:
    """A case as JSON has it."""
    return asdict(case)
