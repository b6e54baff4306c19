"""A Trainer that an unmodified script gets by the name of `transformers`: its numbers are Hugging Face's."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn

from onstep.exchange.install import exchanged, is_installed
from tests.support.small_models import causal_rows, qwen

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


NAMES = ("theirs", "ours")


@contextmanager
def always_exchanged() -> Iterator[None]:
    """The exchange of names, though modules of other tests hold transformers' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onstep.exchange.install.refuse_if_in_use", lambda: None)
        with exchanged():
            assert is_installed()
            yield


class Dropped(nn.Module):
    """Predicts the next token behind a dropout of one half."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.dropout = nn.Embedding(64, 16), nn.Dropout(0.5)
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.dropout(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def history(
    directory: Path,
    name: str,
    *,
    own_loss: bool = False,
    own_weight: bool = False,
    prefix: str = "",
    model: Any = None,
    streamed: bool = False,
    **options: Any,
) -> list[dict[str, float]]:
    """The records of a training by the Trainer of `transformers`, exchanged or not."""
    with nullcontext() if name == "theirs" else always_exchanged():
        transformers = importlib.import_module("transformers")

        class Weighted(transformers.Trainer):  # type: ignore[misc, name-defined]
            weight = nn.Parameter(torch.full((64,), 3.0))

            def create_optimizer(self, model: Any = None) -> Any:
                self.optimizer = torch.optim.SGD([*self.model.parameters(), self.weight], lr=self.args.learning_rate)
                return self.optimizer

            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
                self.weight.grad = None  # transformers sets only the gradients of the model's weights to zero
                logits = model(inputs["input_ids"])["logits"] * self.weight
                loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
                return (loss, {"logits": logits}) if return_outputs else loss

        class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
                labels = inputs.pop("labels")
                logits = model(**inputs)["logits"]
                loss = logits[..., 0].mean(-1).sigmoid().log().mean() + labels.float().mean() * 0
                return (loss, {"logits": logits}) if return_outputs else loss

        args = getattr(transformers, f"{prefix}TrainingArguments")(
            str(directory / name),
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            learning_rate=0.05,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            train_sampling_strategy="sequential",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        rows = causal_rows(18)
        kind = Own if own_loss else Weighted if own_weight else getattr(transformers, f"{prefix}Trainer")
        train_rows = datasets.Dataset.from_list(rows[:12]).to_iterable_dataset() if streamed else rows[:13]
        trainer = kind((model or Dropped)(), args, train_dataset=train_rows, eval_dataset=rows[13:])
        trainer.train()
        return list(trainer.state.log_history)


def check_same(directory: Path, *keys: str, **options: Any) -> None:
    theirs, ours = (history(directory, name, **options) for name in NAMES)
    assert len(theirs) == len(ours) > 5
    for key in keys:
        expected = [record[key] for record in theirs if key in record]
        assert len(expected) >= 1, key
        assert [record[key] for record in ours if key in record] == pytest.approx(expected, abs=1e-6), key


def test_dropout_norms_and_evaluations_are_those_of_transformers(tmp_path: Path) -> None:
    """Rows and batches differ in their labels, and each iteration of a loader draws from torch's generator."""
    check_same(tmp_path, "loss", "grad_norm", "eval_loss", "learning_rate", "train_loss")


def test_batches_of_an_evaluation_weigh_the_same_in_a_seq2seq_trainer_as_in_transformers(tmp_path: Path) -> None:
    """The last batch is smaller than the others."""
    check_same(tmp_path, "loss", "eval_loss", prefix="Seq2Seq")


def test_weights_of_a_loss_are_not_clipped_with_those_of_the_model_as_in_transformers(tmp_path: Path) -> None:
    check_same(tmp_path, "loss", "grad_norm", "eval_loss", own_weight=True, max_grad_norm=0.05)


def test_operations_are_counted_by_input_tokens_as_in_transformers(tmp_path: Path) -> None:
    theirs, ours = (history(tmp_path, name, model=qwen)[-1] for name in NAMES)
    assert ours["total_flos"] == theirs["total_flos"] > 0


def test_epochs_that_end_within_a_step_are_counted_as_in_transformers(tmp_path: Path) -> None:
    """An epoch has seven micro-batches, so that its second step ends at 4/7."""
    check_same(tmp_path, "epoch", "loss", "eval_loss", model=qwen, gradient_accumulation_steps=2)


def test_epochs_of_data_without_a_length_are_counted_as_in_transformers(tmp_path: Path) -> None:
    """It is read as one epoch after the other, each of three steps; the run would be one epoch."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 8, "streamed": True}
    check_same(tmp_path, "epoch", "loss", "eval_loss", model=qwen, **options)


def test_a_loss_around_a_model_in_bfloat16_is_computed_in_float32_as_with_accelerate(tmp_path: Path) -> None:
    check_same(tmp_path, "loss", "grad_norm", "eval_loss", own_loss=True, bf16=True)


def test_a_trainer_of_onstep_itself_keeps_its_numbers(tmp_path: Path) -> None:
    from onstep import Trainer, TrainingArguments

    assert not Trainer(Dropped(), TrainingArguments(str(tmp_path))).follows_transformers


def test_counters_and_collected_metrics_of_a_subclass_come_back_on_resume(tmp_path: Path) -> None:
    """What `log` shows of them is the same after a kill between two records as without one."""
    whole, killed = (collected(tmp_path / name, dies=name == "killed") for name in ("whole", "killed"))
    assert killed is None
    assert collected(tmp_path / "killed") == whole
    assert whole is not None
    assert [record["seen"] for record in whole] == [4.0, 8.0, 12.0]
    assert [record["norm"] for record in whole] == [2.5, 6.5, 10.5]


class Killed(BaseException):
    """Ends a training as a signal does."""


def collected(directory: Path, *, dies: bool = False) -> list[dict[str, float]] | None:
    is_again = directory.exists()
    with always_exchanged():
        transformers = importlib.import_module("transformers")

        class Collecting(transformers.Trainer):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.seen, self.found = 0, {"train": defaultdict(list)}
                self.recent: deque[int] = deque(maxlen=2)

            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                self.seen += 1
                self.found["train"]["norm"].append(float(self.seen))
                self.recent.append(self.seen)
                if os.environ.get("DIES") and self.seen == 7:
                    raise Killed
                return super().compute_loss(model, inputs, *args, **kwargs)

            def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
                if "loss" in logs:
                    values = self.found["train"].pop("norm")
                    logs |= {"seen": float(self.seen), "norm": sum(values) / len(values)}
                    assert list(self.recent) == [self.seen - 1, self.seen]
                super().log(logs, start_time)

        args = transformers.TrainingArguments(
            str(directory),
            use_cpu=True,
            max_steps=12,
            per_device_train_batch_size=1,
            logging_steps=4,
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Collecting(Dropped(), args, train_dataset=causal_rows(12))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIES", "1" if dies else "")
            try:
                trainer.train()
            except Killed:
                return None
        assert trainer.global_state.is_resumed == is_again
        times = ("tok_per_sec",)
        records = [record for record in trainer.state.log_history if "loss" in record]
        return [{key: value for key, value in record.items() if key not in times} for record in records]
