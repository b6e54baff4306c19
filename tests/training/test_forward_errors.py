"""Frequent mistakes in data, losses and forward steps are errors that say what to change, through every door."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as BCE
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from onstep import EarlyStoppingCallback, Trainer, TrainingArguments
from onstep.data import EvalLoader
from onstep.errors import ConfigError, DataError
from onstep.training import evaluate
from tests.support.small_runs import TinyModel, eval_loader, loader, run, small_state

NO_GRADIENT = r"does not require a gradient.*\.detach\(\)"
ONE_ELEMENT = r"of shape \({},\) and torch.float32; it must be a floating-point tensor of one element: .*\.mean\(\)"


def batch_of(data_iterator: Any) -> Any:
    return next(data_iterator)


def only_a_loss(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator))


def no_return(data_iterator: Any, model: nn.Module) -> Any:
    model(**batch_of(data_iterator))


def no_return_of_the_loss(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator)), lambda loss: None


def detached(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator)).detach(), lambda loss: loss


def a_number(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator)), lambda loss: (loss.item(), {})


def one_per_token(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator), reduction="none"), lambda losses: (losses, {})


def three_micro_batches(data_iterator: Any, model: nn.Module) -> Any:
    first = next(data_iterator)
    for _ in range(2):
        next(data_iterator)
    return model(**first), lambda loss: loss


def another_key(data_iterator: Any, model: nn.Module) -> Any:
    batch = batch_of(data_iterator)
    return model(batch["tokens"], batch["name"]), lambda loss: loss


def without_labels(data_iterator: Any, model: nn.Module) -> Any:
    batch = batch_of(data_iterator)
    batch.pop("labels")
    return model(**batch), lambda loss: loss


def labels_out_of_range(data_iterator: Any, model: nn.Module) -> Any:
    batch = batch_of(data_iterator)
    return model(batch["tokens"], batch["labels"].clamp_(min=0).add_(16)), lambda loss: loss


def without_next(data_iterator: Any, model: nn.Module) -> Any:
    return model(data_iterator["tokens"]), lambda loss: loss


def swapped(model: Any, data_iterator: Any) -> Any:
    return model(**next(data_iterator)), lambda loss: loss


def loss_of_nothing(data_iterator: Any, model: nn.Module) -> Any:
    return model(**next(data_iterator)), lambda: None


def only_a_batch(batch: Any) -> Any:
    return None


def reports_a_list(data_iterator: Any, model: nn.Module) -> Any:
    return model(**next(data_iterator)), lambda loss: (loss, [1, 2])


def reports_a_string(data_iterator: Any, model: nn.Module) -> Any:
    return model(**next(data_iterator)), lambda loss: (loss, {"name": "x"})


def ids_out_of_range(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    batch["tokens"] = batch["tokens"] * 0 + 99
    return model(**batch), lambda loss: loss


REPORT = "report of a loss function must be a dict of means"
MISTAKES: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (only_a_loss, ConfigError, r"the forward step returned a Tensor of shape \(\) .* must return \(output, loss func"),
    (no_return, ConfigError, r"the forward step returned None; it must return \(output, loss function\)"),
    (a_number, ConfigError, "the loss is a float; it must be a floating-point tensor of one element"),
    (one_per_token, ConfigError, ONE_ELEMENT.format(24)),
    (three_micro_batches, ConfigError, "the forward step raised StopIteration: .* one micro-batch for each call"),
    (another_key, DataError, "lacks the key 'name'; it has tokens, labels. The default collator drops strings"),
    (without_labels, DataError, r"lacks 'labels', required by TinyModel.forward; it has tokens"),
    (
        only_a_batch,
        ConfigError,
        r"function of \(data_iterator, model\), but only_a_batch has the arguments \(batch\): too",
    ),
    ("gpt", ConfigError, r"must be a function of \(data_iterator, model\), got a str; .*callbacks=\[...\], by"),  # type: ignore[list-item]
    (reports_a_list, ConfigError, f"{REPORT}, .*got a list of 2"),
    (reports_a_string, ConfigError, f"{REPORT}, .*got a str for 'name'"),
    (ids_out_of_range, DataError, r"embedding \S+ has \d+ rows, so .* was given 99 to 99 in 'tokens': do the token"),
    (labels_out_of_range, DataError, r"out of bounds.* labels of this micro-batch are 16 to \d+; .* -100"),
]


@pytest.mark.parametrize(
    ("step", "kind", "message"), MISTAKES, ids=[str(getattr(one[0], "__name__", one[0])) for one in MISTAKES]
)
def test_a_mistake_in_a_forward_step_is_explained(step: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(small_state(), step=step)
    with pytest.raises(kind, match=message):
        evaluate(small_state(), step, eval_loader(), [TinyModel()], None, ConfigError)


@pytest.mark.parametrize(
    ("step", "kind", "hint"),
    [
        (without_next, TypeError, r"read the micro-batch by next\(data_iterator\)"),
        (swapped, TypeError, r"called with \(data_iterator, model\), in this order"),
        (loss_of_nothing, TypeError, "a loss function is called with the output"),
    ],
)
def test_an_error_of_a_forward_step_says_where_and_on_what(step: Any, kind: type[Exception], hint: str) -> None:
    contents = r"on the micro-batch tokens int64 \(\d+, \d+\), labels int64 \(\d+, \d+\); .*" + hint
    with pytest.raises(kind) as failure:
        run(small_state(), step=step)
    assert re.search("raised in step 1, " + contents, "".join(failure.value.__notes__))
    with pytest.raises(kind) as failure:
        evaluate(small_state(), step, eval_loader(), [TinyModel()], None, None)
    assert re.search("raised in an evaluation after step 0, " + contents, "".join(failure.value.__notes__))


def test_a_large_micro_batch_is_described_in_few_words(args: TrainingArguments) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {f"{index:050}": torch.ones(2) for index in range(20)} | {"other": object()}

    with pytest.raises(TypeError) as failure:
        Trainer(Classifier(), args, train_dataset=Rows(same), data_collator=collate).train()
    (note,) = failure.value.__notes__
    assert note.endswith(" float32 (2,) and 13 more")
    assert len(note) < 600


def test_a_loss_without_a_gradient_is_explained_and_evaluated() -> None:
    with pytest.raises(ConfigError, match=NO_GRADIENT):
        run(small_state(), step=detached)
    with pytest.raises(TypeError, match=r"The loss function returned None; it must return \(loss_sum"):
        run(small_state(), step=no_return_of_the_loss)
    assert evaluate(small_state(), detached, eval_loader(), [TinyModel()], None, None)[0]


NO_PARAMETER = r"no parameter has a gradient after the first backward pass, so nothing would be trained: .*backward\(\)"


def made_anew(data_iterator: Any, model: nn.Module) -> Any:
    return model(**batch_of(data_iterator)), lambda loss: torch.tensor(loss.item(), requires_grad=True)


def test_a_loss_that_is_not_connected_to_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=NO_PARAMETER):
        run(small_state(), step=made_anew)


class Rows:
    """Eight samples of a classification, with what `change` makes of each."""

    def __init__(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self.change = change

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.change({"x": torch.full((3,), float(index)), "labels": index % 2})


class Classifier(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Any] = cross_entropy) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(3, 2), loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.layer(x)
        return {"loss": None if labels is None else self.loss(logits, labels), "logits": logits}


class Named(Classifier):
    def forward(self, x: Tensor, name: Tensor, labels: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(x, labels)


def eval_loader_of() -> Iterator[Any]:
    yield {}


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row


OF_DATA: list[tuple[str, nn.Module, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    (
        "strings",
        Named(),
        lambda row: {**row, "name": "a"},
        DataError,
        "lacks 'name', required by Named.forward.*strings",
    ),
    (
        "float64",
        Classifier(),
        lambda row: {**row, "x": row["x"].double()},
        DataError,
        "'x' is torch.float64.*weights are",
    ),
    (
        "integers",
        Classifier(),
        lambda row: {**row, "x": row["x"].long()},
        DataError,
        r"'x' is torch.int64.*\.to\(torch",
    ),
    (
        "integers beside a number to predict",
        Classifier(),
        lambda row: {"x": row["x"].long(), "labels": 1.0},
        DataError,
        r"'x' is torch.int64.*\.to\(torch",
    ),
    (
        "float ids",
        Classifier(),
        lambda row: {**row, "labels": 1.0},
        DataError,
        r"'labels' is torch.float32.*\.long\(\)",
    ),
    (
        "ids of 32 bits",
        Classifier(),
        lambda row: {**row, "labels": np.int32(1)},
        DataError,
        r"'labels' is torch.int32.*\.long\(\)",
    ),
    (
        "names of classes",
        Classifier(),
        lambda row: {**row, "labels": "cat"},
        ConfigError,
        "'loss' is None.*strings are dropped",
    ),
    ("no return", Classifier(), lambda row: None, DataError, "a sample is None"),
    ("objects", Classifier(), lambda row: (object(),), DataError, "samples of type tuple cannot be collated"),
    ("losses", Classifier(lambda *a: cross_entropy(*a, reduction="none")), same, ConfigError, ONE_ELEMENT.format(4)),
    (
        "number",
        Classifier(lambda *a: cross_entropy(*a).item()),
        same,
        ConfigError,
        "that Classifier returned is a float",
    ),
]


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=4, use_cpu=True
    )


@pytest.mark.parametrize(
    ("model", "change", "kind", "message"), [row[1:] for row in OF_DATA], ids=[name for name, *_ in OF_DATA]
)
def test_a_mistake_in_samples_or_the_loss_of_a_trainer_is_explained(
    args: TrainingArguments, model: nn.Module, change: Any, kind: type[Exception], message: str
) -> None:
    trainer = Trainer(model, args, train_dataset=Rows(change), eval_dataset=Rows(change))
    with pytest.raises(kind, match=message):
        trainer.train()
    if "names" not in message and "'loss' is None" not in message:
        with pytest.raises(kind, match=message):
            trainer.evaluate()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda outputs, labels, **_: None, "compute_loss returned None"),
        (lambda outputs, labels, **_: cross_entropy(outputs["logits"], labels).detach(), NO_GRADIENT),
        (
            lambda outputs, labels, **_: cross_entropy(outputs["logits"], labels, reduction="none"),
            ONE_ELEMENT.format(4),
        ),
    ],
    ids=["None", "detached", "one per sample"],
)
def test_a_mistake_in_a_loss_function_is_explained(args: TrainingArguments, compute: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(Classifier(), args, train_dataset=Rows(same), compute_loss_func=compute).train()


@pytest.mark.parametrize("metrics", [0.5, None], ids=["a number", "None"])
def test_metrics_that_are_not_a_dict_are_refused(args: TrainingArguments, metrics: Any) -> None:
    trainer = Trainer(Classifier(), args, eval_dataset=Rows(same), compute_metrics=lambda _: metrics)
    with pytest.raises(ConfigError, match=r"compute_metrics must return a dict of metrics by name, got (a float|None)"):
        trainer.evaluate()


def test_metrics_without_names_or_predictions_are_named(
    args: TrainingArguments, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(Classifier(), args, eval_dataset=Rows(same), compute_metrics=lambda _: {0: 1.0})
    with pytest.raises(ConfigError, match="compute_metrics must return metrics by name, got the key 0, a int"):
        trainer.evaluate()
    trainer = Trainer(
        Classifier(),
        args,
        eval_dataset=Rows(same),
        compute_metrics=lambda _: {"accuracy": 1.0},
        preprocess_logits_for_metrics=lambda logits, labels: None,
    )
    assert "eval_accuracy" not in trainer.evaluate()
    assert "not called: preprocess_logits_for_metrics has returned no predictions" in caplog.text


class LengthOnly(Dataset[Any]):
    def __len__(self) -> int:
        return 8


NOT_REGISTERED = type("Listed", (nn.Module,), {"forward": lambda self, x: x})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": Classifier}, r"got the class Classifier itself; pass an instance of it, Classifier\(...\)"),
        ({"data_collator": "padding"}, "data_collator must be a function or another callable object, got 'padding'"),
        ({"data_collator": Rows}, "data_collator must be .*, got the class Rows itself; pass an instance"),
        ({"compute_metrics": "accuracy"}, "compute_metrics must be .*, got 'accuracy'; pass a function of an EvalPred"),
        ({"compute_metrics": {"a": 1}}, "compute_metrics must be a function .*, got {'a': 1}"),
        (
            {"data_collator": lambda: None},
            r"data_collator is called with 1 positional argument, got .*<lambda>\(\); pass",
        ),
        (
            {"compute_metrics": lambda logits, labels: {}},
            r"called with 1 .*\(logits, labels\); pass a function",
        ),
        (
            {"preprocess_logits_for_metrics": lambda logits: logits},
            r"called with 2 .*\(logits\); pass a function",
        ),
        ({"compute_loss_func": lambda outputs: 0}, r"compute_loss_func is called with 2 .*<lambda>\(outputs\); pass"),
        ({"model": None, "model_init": Classifier()}, "got a model, Classifier; pass it as model"),
        ({"model": None, "model_init": lambda a, b: None}, r"model_init is called with 0 or 1 .*<lambda>\(a, b\)"),
        ({"optimizers": ([1, 2], None)}, "must be one object or a factory, got .* several parameter groups"),
        ({"train_dataset": LengthOnly()}, r"a LengthOnly is not a dataset: it must have __getitem__\(index\)"),
        ({"optimizers": torch.optim.SGD([torch.ones(1)])}, r"must be a pair \(optimizer, scheduler\), got a SGD; pass"),
        ({"optimizers": ("adam", None)}, r"the optimizer in optimizers .* got 'adam'; .*TrainingArguments\(optim="),
        ({"optimizers": (None, torch.optim.SGD([torch.ones(1)]))}, r"in this order, got \(NoneType, SGD\)"),
        ({"model": NOT_REGISTERED()}, r"got none in 1 chunk\(s\); .* nn.ModuleList or nn.ModuleDict, which register"),
        ({"train_dataset": Rows}, r"must be a dataset, got the class or function Rows; pass Rows\(...\)"),
        ({"train_dataset": eval_loader_of}, r"got the class or function eval_loader_of; pass eval_loader_of\(...\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_another_kind_is_refused(args: TrainingArguments, given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"model": Classifier(), "train_dataset": Rows(same)} | given
    with pytest.raises((ConfigError, DataError), match=message):
        Trainer(args=args, **arguments).train()


def test_a_negative_patience_is_refused() -> None:
    with pytest.raises(ConfigError, match="early_stopping_patience must be an integer >= 0, got -1"):
        EarlyStoppingCallback(-1)


def fails_at_5(row: dict[str, Any]) -> Any:
    return [row][0 if int(row["x"][0]) != 5 else 1]


def test_a_sample_that_fails_is_named(args: TrainingArguments) -> None:
    for workers in (0, 1):
        args.dataloader_num_workers = workers
        with pytest.raises(IndexError) as failure:
            Trainer(Classifier(), args, train_dataset=Rows(fails_at_5), eval_dataset=Rows(fails_at_5)).evaluate()
        said = str(failure.value) + "".join(getattr(failure.value, "__notes__", ()))
        assert "raised by the sample at index 5 of the Rows, whose length is 8" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: None if row["x"][0] == 5 else row, "a sample is None, at index 5 of the Rows; the dataset must"),
        (lambda row: {**row, "x": object()}, "'x' has values of type object, of which no tensor .*convert them to num"),
        (lambda row: {**row, "x": np.array(["a"])}, "'x' has arrays of dtype <U1, of which no tensor can be made"),
        (lambda row: {**row, "x": np.array([None])}, "'x' has arrays of dtype object, of which no tensor"),
        (lambda row: {**row, "x": [["a"]]}, "'x' has values of type str, of which no tensor"),
    ],
    ids=["None", "object", "strings", "objects", "lists"],
)
def test_a_value_that_is_no_tensor_is_named(args: TrainingArguments, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Trainer(Classifier(), args, eval_dataset=Rows(change)).evaluate()


@pytest.mark.parametrize("dataset", ["wikitext", {"x": [[1.0]], "labels": [0]}], ids=["name", "columns"])
def test_what_is_no_dataset_is_refused(args: TrainingArguments, dataset: Any) -> None:
    with pytest.raises(DataError, match=r"train_dataset must be a dataset of samples, got a (str|dict)"):
        Trainer(Classifier(), args, train_dataset=dataset).train()


class OnlyALength:
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("dataset", [OnlyALength(), object()], ids=["a length", "an object"])
def test_what_cannot_be_read_is_refused(args: TrainingArguments, dataset: Any) -> None:
    trainer = Trainer(Classifier(), args, train_dataset=dataset, eval_dataset=dataset)
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match=r"is not a dataset: it must have __getitem__\(index\) and __len__\(\), or"):
            method()


@pytest.mark.filterwarnings("ignore:Got pickle error")  # of torch
def test_data_that_spawned_workers_cannot_be_given_is_named(args: TrainingArguments) -> None:
    args.dataloader_num_workers, args.dataloader_multiprocessing_context = 1, "spawn"
    trainer = Trainer(Classifier(), args, train_dataset=Rows(lambda row: row), eval_dataset=Rows(lambda row: row))
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match=r"cannot be handed to worker processes.*<lambda>.*top level of a module"):
            method()


def test_weights_on_the_device_meta_are_refused(args: TrainingArguments) -> None:
    part = Classifier()
    part.layer.bias = nn.Parameter(torch.empty(2, device="meta"))
    for model, name in ((Classifier().to("meta"), "layer.weight"), (part, "layer.bias")):
        trainer = Trainer(model, args, train_dataset=Rows(same), eval_dataset=Rows(same))
        for method in (trainer.train, trainer.evaluate):
            with pytest.raises(ConfigError, match=rf"{name} is on the device 'meta', so it has no values; .*to_empty"):
                method()
    tiny = TinyModel().to("meta")
    with pytest.raises(ConfigError, match="is on the device 'meta'"):
        run(small_state(), model=tiny, optimizer=torch.optim.SGD(tiny.parameters(), lr=0.1))


@pytest.mark.parametrize("argument", ["compute_metrics", "preprocess_logits_for_metrics", "per batch"])
def test_a_stop_iteration_of_a_metric_function_is_named(args: TrainingArguments, argument: str) -> None:
    def exhausted(*values: Any, compute_result: bool = True) -> Any:
        return next(iter([]))

    args.batch_eval_metrics = argument == "per batch"
    functions: dict[str, Any] = {"compute_metrics": lambda _: {}}
    functions |= {"compute_metrics" if args.batch_eval_metrics else argument: exhausted}
    with pytest.raises(ConfigError, match=r"the metric function .*exhausted raised StopIteration"):
        Trainer(Classifier(), args, eval_dataset=Rows(same), **functions).evaluate()


def test_metrics_of_several_values_are_named(args: TrainingArguments, caplog: pytest.LogCaptureFixture) -> None:
    class Logging(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, **further: Any) -> Any:
            self.log({"of heads": torch.ones(2)})
            return super().compute_loss(model, inputs, **further)

    metrics = {"per class": torch.ones(3), "mean": torch.tensor(0.5)}
    trainer = Logging(
        Classifier(), args, train_dataset=Rows(same), eval_dataset=Rows(same), compute_metrics=lambda _: metrics
    )
    trainer.train()
    assert trainer.evaluate()["eval_mean"] == 0.5
    named = [line for line in caplog.messages if "which trackers leave out" in line]
    assert [line.partition(", which")[0] for line in named] == [
        "the metric 'of heads' is a Tensor of shape (2,)",
        "the metric 'eval_per class' is a Tensor of shape (3,)",
    ]


class Backward(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        outputs = super().forward(x, labels)
        outputs["loss"].backward()
        return outputs


def test_a_backward_pass_in_the_model_is_named(args: TrainingArguments) -> None:
    with pytest.raises(ConfigError, match=r"runs the backward pass of the returned loss itself: remove \.backward\(\)"):
        Trainer(Backward(), args, train_dataset=Rows(same)).train()


class Positions(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(2, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        return super().forward(x + self.positions(torch.arange(x.shape[1])).sum(), labels)


class Words(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        return super().forward(self.words(x).sum(1), labels)


@pytest.mark.parametrize(
    ("model", "ids", "message"),
    [
        (Words(), torch.tensor([0, 8]), r"words.weight has 8 rows, .* 0 to 7, but was given 0 to 8 in 'x': do the tok"),
        (Words(), torch.tensor([0, -100]), r"was given -100 to 0 in 'x': negative values, such as -100, belong only"),
        (Words(), torch.tensor([0.0, 1.0]), r"In the micro-batch, 'x' are floating-point\. .*\.long\(\)"),
        (Positions(), torch.ones(3), r"positions.weight has 2 rows, .*positions of sequences of length 3. Trunc.*to 2"),
    ],
    ids=["vocabulary", "negative", "floats", "positions"],
)
def test_ids_that_an_embedding_lacks_are_named(
    args: TrainingArguments, model: nn.Module, ids: Tensor, message: str
) -> None:
    trainer = Trainer(
        model, args, train_dataset=Rows(lambda row: {**row, "x": ids}), eval_dataset=Rows(lambda row: {**row, "x": ids})
    )
    for method in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match=message):
            method()


class InPlace(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        self.layer.weight.add_(1)
        return super().forward(x, labels)


@pytest.mark.parametrize(
    ("model", "change", "note"),
    [
        (
            Classifier(),
            lambda row: {**row, "x": torch.ones(5)},
            r"micro-batch x float32 \(4, 5\), labels int64 \(4,\); the shapes and the sizes",
        ),
        (InPlace(), same, r"changes a weight in place: do that under torch.no_grad\(\)"),
        (Classifier(), lambda row: {**row, "labels": torch.tensor([0, 1])}, r"labels int64 \(4, 2\); .*\.argmax\(-1\)"),
        (Classifier(BCE), lambda row: {**row, "labels": 1.0}, r"labels float32 \(4,\); for class ids, .*\.long\(\)"),
        (Classifier(lambda logits, labels: BCE(logits[:, 0], labels)), same, r"floating-point targets.*\.float\(\)"),
    ],
    ids=["width", "in place", "one-hot", "floats", "class ids"],
)
def test_an_error_of_torch_is_noted_with_what_helps(
    args: TrainingArguments, model: nn.Module, change: Any, note: str
) -> None:
    with pytest.raises((RuntimeError, ValueError)) as failure:
        Trainer(model, args, train_dataset=Rows(change)).train()
    assert re.search(note, "".join(failure.value.__notes__))


class OwnStep(Trainer):
    """Does in `training_step` what `also` does, after its loss."""

    def __init__(self, *args: Any, also: Callable[[Any, Tensor], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self.also = also

    def training_step(self, model: nn.Module, inputs: Any, *further: Any) -> Any:
        loss = self.compute_loss(model, inputs)
        self.also(self, loss)
        return loss.detach()


def cleared(trainer: Any, loss: Tensor) -> None:
    loss.backward()
    trainer.model.zero_grad()


def stepped(trainer: Any, loss: Tensor) -> None:
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def test_a_training_step_that_leaves_no_gradients_is_refused_unless_it_updates_itself(args: TrainingArguments) -> None:
    for also in (lambda trainer, loss: None, cleared):
        with pytest.raises(ConfigError, match=NO_PARAMETER):
            OwnStep(Classifier(), args, train_dataset=Rows(same), also=also).train()
    model = Classifier(lambda logits, labels: cross_entropy(logits, labels).detach().requires_grad_())
    with pytest.raises(ConfigError, match=NO_PARAMETER):
        Trainer(model, args, train_dataset=Rows(same)).train()
    OwnStep(Classifier(), args, train_dataset=Rows(same), also=stepped).train()


def test_a_collator_that_returns_nothing_is_named(args: TrainingArguments) -> None:
    def collate(samples: list[Any]) -> None:
        torch.stack([sample["x"] for sample in samples])

    with pytest.raises(DataError, match=r"the micro-batch is None; does the collator return it\?"):
        Trainer(Classifier(), args, train_dataset=Rows(same), data_collator=collate).train()


@pytest.mark.parametrize(("value", "what"), [("x", "strings"), (None, "only None")])
def test_a_column_that_is_dropped_is_named_in_each_training(
    args: TrainingArguments, caplog: pytest.LogCaptureFixture, value: str | None, what: str
) -> None:
    class Titled(Classifier):
        def forward(self, x: Tensor, title: Any = None, labels: Any = None) -> dict[str, Any]:  # type: ignore[override]
            return super().forward(x, labels)

    rows = Rows(lambda row: {**row, "title": value})
    loader = EvalLoader(rows, micro_batch_size=4)
    assert [sorted(batch) for batch in loader] == [["labels", "x"]] * 2
    for number in (1, 2, 3):
        assert caplog.text.count(f"'title' of the samples holds {what}, which the default collator drops") == number
        Trainer(Titled(), args, train_dataset=rows).train(resume_from_checkpoint=False)


@pytest.mark.parametrize("wrap", [tuple, list, lambda entries: entries[0]], ids=["tuple", "list", "tensor"])
def test_inputs_of_another_dtype_in_a_tuple_or_alone_are_explained(wrap: Callable[[Any], Any]) -> None:
    def forward(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        return model(batch if isinstance(batch, Tensor) else batch[0]).mean(), lambda loss: loss

    batches = iter([wrap([torch.ones(24, 3, dtype=torch.float64), torch.ones(24, dtype=torch.long)])])
    expected = r"in the micro-batch (element 0|the tensor) is torch.float64, the weights are torch.float32; convert it"
    with pytest.raises(DataError, match=expected):
        run(small_state(), step=forward, data=batches, model=nn.Linear(3, 2))


class Misspelt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def foward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(x))


def test_a_model_without_forward_is_named() -> None:
    def forward(data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator)).mean(), lambda loss: loss

    with pytest.raises(ConfigError, match=r"Misspelt has no method forward, .* define it.*foward"):
        run(small_state(), step=forward, model=Misspelt())


def test_a_state_that_has_done_its_steps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state, model = small_state(train_iters=2), TinyModel()
    run(state, model=model)
    assert "nothing is trained" not in caplog.text
    run(state, model=model)
    assert "nothing is trained: the state has done its 2 steps; make a new GlobalState" in caplog.text


def test_a_loss_that_a_model_leaves_none_is_named(args: TrainingArguments) -> None:
    with pytest.raises(ConfigError, match=r"returned a mapping with loss, logits whose 'loss' is None\. It received x"):
        Trainer(Classifier(lambda logits, labels: None), args, train_dataset=Rows(same)).train()


def test_other_errors_of_a_forward_step_are_left_as_they_are() -> None:
    def fails(data_iterator: Iterator[Any], model: nn.Module) -> Any:
        return next(data_iterator)["tokens"].float() @ torch.ones(5), lambda loss: loss

    with pytest.raises(RuntimeError, match="size mismatch") as failure:
        run(small_state(), step=fails, data=loader())
    assert not isinstance(failure.value, DataError)


@pytest.mark.parametrize("place", ["weights", "training"])
def test_inference_mode_is_named(args: TrainingArguments, place: str) -> None:
    with torch.inference_mode(place == "weights"):
        model = Classifier()
    with torch.inference_mode(place == "training"), pytest.raises(ConfigError, match=r"torch.inference_mode\(\)"):
        Trainer(model, args, train_dataset=Rows(same)).train()


@pytest.mark.parametrize(
    "hidden",
    [
        [nn.Linear(2, 2), nn.Linear(2, 2)],
        (nn.Linear(2, 2),),
        {"a": [[nn.Linear(2, 2)]]},
        [nn.Parameter(torch.zeros(2))],
        torch.zeros(2, requires_grad=True),
    ],
    ids=["list", "tuple", "nested", "parameters", "tensor"],
)
def test_weights_that_are_not_registered_are_named(
    args: TrainingArguments, caplog: pytest.LogCaptureFixture, hidden: Any
) -> None:
    model = Classifier()
    model.extra = hidden
    model.known = [*model.children(), torch.zeros(2), model.layer.weight]  # type: ignore[assignment]
    Trainer(model, args, train_dataset=Rows(same)).train()
    assert "extra: these attributes hold weights that are not registered" in caplog.text
    assert "known" not in caplog.text


class InPlace(Classifier):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        squashed = torch.tanh(outputs["loss"])
        squashed += 1
        return {"loss": squashed}


def test_a_backward_pass_without_its_values_names_operations_in_place(args: TrainingArguments) -> None:
    with pytest.raises(RuntimeError, match="inplace operation") as error:
        Trainer(InPlace(), args, train_dataset=Rows(same)).train()
    assert "write x = x + 1 there" in error.value.__notes__[0]


def test_a_column_that_forward_lacks_is_named(args: TrainingArguments) -> None:
    class NoLabels(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    with pytest.raises(DataError, match=r"'labels', which NoLabels.forward does not accept: .*compute_loss_func"):
        Trainer(NoLabels(3, 2), args, train_dataset=Rows(same)).train()


def test_an_error_in_a_users_function_names_it_and_what_it_received(args: TrainingArguments) -> None:
    args.eval_strategy, args.eval_steps = "steps", 1

    def metrics(prediction: Any) -> dict[str, float]:
        return {"a": prediction.predictions.argmax(5)}

    for options in ({"compute_metrics": metrics}, {"compute_loss_func": nn.CrossEntropyLoss()}):
        trainer = Trainer(Classifier(), args, train_dataset=Rows(same), eval_dataset=Rows(same), **options)
        with pytest.raises((ValueError, TypeError)) as error:
            trainer.train()
        notes = " ".join(error.value.__notes__)
        assert re.search(r"metric function .*, called with float32|compute_loss_func, called with the out", notes)


TABLE = {"cat": 0}


@pytest.mark.parametrize(
    ("read", "is_explained"),
    [
        (lambda batch: batch["name"], True),
        (lambda batch: batch.pop("name"), True),
        (lambda batch: {key: value + 0 for key, value in batch.items()}["name"], False),  # not a variable
        (lambda batch: dict(batch)["name"], False),
        (lambda batch: [batch[key] for key in ("labels", "name")], True),
        (lambda batch: UserDict(batch)["name"], True),
        (lambda batch: TABLE["name"], False),
        (lambda batch: TABLE.pop("name"), False),
        (lambda batch: {"cat": 1}["name"], False),
        (lambda batch: nn.ModuleDict({"cat": nn.Linear(1, 1)})["name"], False),
        (lambda batch: [].pop(TABLE["name"]), False),
    ],
)
def test_a_missing_key_is_explained_only_where_it_was_looked_up_in_the_batch(
    read: Callable[[Any], Any], is_explained: bool
) -> None:
    def step(data_iterator: Iterator[Any], model: nn.Module) -> Any:
        batch = next(data_iterator)
        read(batch)
        return model(**batch), lambda loss: loss

    with pytest.raises(DataError if is_explained else KeyError, match="name") as failure:
        run(small_state(), step=step, data=loader())
    assert isinstance(failure.value, DataError) is is_explained
