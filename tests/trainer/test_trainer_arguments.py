"""Ours and Hugging Face's arguments, and what is refused before training starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.errors import CheckpointError, ConfigError, DataError
from tests.support.small_models import LogitsModel, Regression, Stream, arguments, quiet, ragged_rows, regression_rows


def hf_arguments(directory: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(str(directory / "run"), report_to="none", use_cpu=True, **options)


def test_hugging_faces_arguments_are_taken_over_field_by_field(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 3,
        "learning_rate": 0.02,
        "max_steps": 2,
        "weight_decay": 0.1,
        "lr_scheduler_type": transformers.SchedulerType.COSINE,
        "eval_strategy": transformers.trainer_utils.IntervalStrategy.STEPS,
        "eval_steps": 1,
        "logging_steps": 1,
        "label_names": ["labels"],
        "seed": 5,
    }
    seen: list[Any] = []

    class Args(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args)

    trainer = quiet(
        Regression(),
        hf_arguments(tmp_path, **options),
        regression_rows(),
        eval_dataset=regression_rows(),
        callbacks=[Args()],
    )
    assert isinstance(trainer.args, TrainingArguments)
    assert trainer.train().global_step == 2
    assert {name: getattr(trainer.args, name) for name in options} == {
        **options,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "steps",
    }
    (args,) = seen
    missing = [name for name in transformers.TrainingArguments.__dataclass_fields__ if not hasattr(args, name)]
    assert missing == []
    assert args.output_dir == str(tmp_path / "run")


def test_what_a_users_subclass_of_hugging_faces_arguments_adds_is_seen_by_callbacks(tmp_path: Path) -> None:
    @dataclass
    class Mine(transformers.TrainingArguments):
        temperature: float = 1.0

    seen: list[float] = []

    class Reads(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.temperature)

    args = Mine(str(tmp_path / "run"), use_cpu=True, report_to="none", max_steps=1, temperature=0.5)
    quiet(Regression(), args, regression_rows(), callbacks=[Reads]).train()
    assert seen == [0.5]


@pytest.mark.parametrize("options", [{"average_tokens_across_devices": False}, {"ignore_data_skip": True}])
def test_what_we_do_not_do_is_refused_in_hugging_faces_arguments_too(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        quiet(Regression(), hf_arguments(tmp_path, **options))


def test_a_field_of_a_later_transformers_is_refused_where_it_is_set(tmp_path: Path) -> None:
    later = type(
        "TrainingArguments", (transformers.TrainingArguments,), {"__annotations__": {"sparkle": bool}, "sparkle": False}
    )
    later.__module__ = "transformers.training_args"
    later = dataclass(later)
    quiet(Regression(), later(str(tmp_path / "a"), use_cpu=True, report_to="none"))
    with pytest.raises(ConfigError, match="sparkle=True is not supported"):
        quiet(Regression(), later(str(tmp_path / "a"), use_cpu=True, report_to="none", sparkle=True))


def test_the_arguments_that_the_user_gave_are_never_written_to(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, config_overrides={"run.fresh": True, "run.save_weights": False})
    before = args.to_dict()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").touch()
    seen: list[str] = []

    class Dir(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(args.output_dir)

    quiet(Regression(), args, regression_rows(), callbacks=[Dir]).train()
    assert seen == [str(tmp_path / "run-2")]
    assert args.to_dict() == before


def make(tmp_path: Path, **options: Any) -> Trainer:
    values: dict[str, Any] = {"model": Regression(), "args": arguments(tmp_path), "train_dataset": regression_rows()}
    return Trainer(**{**values, "default_callbacks": False, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_init": Regression}, "exactly one of model and model_init"),
        ({"model": None}, "exactly one of model and model_init"),
        ({"model": Regression}, "must be a torch.nn.Module, got the class Regression itself; .*model_init"),
        ({"model": None, "model_init": Regression()(torch.ones(1, 3))}, "model_init must be a function"),
        ({"args": ["output_dir"]}, "args must be .*TrainingArguments, got list"),
    ],
)
def test_the_constructor_refuses(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, **options)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


class Lazy(Regression):
    """Its layer has no shape before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.LazyLinear(1)


class Misspelled(torch.nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def foward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class OfLength(torch.utils.data.Dataset[Any]):
    """Its `__len__` returns whatever it is given."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> Any:
        return regression_rows()[0]


class NeedsOption(TrainerCallback):
    """Cannot be passed as a class."""

    def __init__(self, option: int) -> None:
        self.option = option


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_dataset": None}, "requires a train_dataset"),
        ({"train_dataset": Stream(regression_rows())}, "no length.*set max_steps"),
        ({"model": None, "model_init": lambda: 3}, "model_init must return a torch.nn.Module, got int"),
        ({"train_dataset": []}, "empty: it has 0 samples"),
        (
            {"train_dataset": [{"text": "a", "labels": 1}]},
            r"No column of the dataset \(text, labels\).*forward \(labels, x\)",
        ),
        (
            {"train_dataset": pandas.DataFrame({"x": [[1.0]] * 4, "labels": [1.0] * 4})},
            r"the DataFrame has no sample 0; .* frame\.to_dict\('records'\)",
        ),
        ({"train_dataset": OfLength(6.5)}, r"__len__ of the OfLength must return its number of samples, .*'float'"),
        ({"train_dataset": OfLength(-1)}, r"__len__ of the OfLength must return .*an int >= 0: .*return >= 0"),
        ({"model": Misspelled()}, r"Misspelled has no method forward, .* define it\. Did you mean 'foward'\?"),
        ({"model": Lazy()}, r"layer\.weight has no shape yet, .*call the model once with a batch"),
        ({"callbacks": [NeedsOption]}, r"NeedsOption cannot be .* 'option'; pass an instance, NeedsOption\(\.\.\.\)"),
        ({"optimizers": (adam(Regression()), None)}, "no parameter of Regression.*would train nothing"),
        ({"optimizers": (None, constant(adam(Regression())))}, "scheduler object belongs to an optimizer"),
        ({"optimizers": (adam, None), "optimizer_cls_and_kwargs": (torch.optim.Adam, {})}, "not both"),
        ({"model": None, "model_init": Regression, "optimizers": (adam(Regression()), None)}, "pass factories"),
        (
            {"optimizers": (torch.optim.SGD, torch.optim.lr_scheduler.ReduceLROnPlateau)},
            "ReduceLROnPlateau requires a metric",
        ),
    ],
)
def test_train_refuses_before_the_first_step(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    steps: list[int] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    given = options.get("optimizers")
    if given is not None and given[0] is adam:
        options = {**options, "optimizers": (lambda parameters: torch.optim.Adam(parameters), None)}
    with pytest.raises((ConfigError, DataError), match=message):
        make(tmp_path, **{"callbacks": [Steps], **options}).train()
    assert steps == []


def test_a_trainer_whose_init_calls_no_super_is_refused() -> None:
    class Forgets(Trainer):
        def __init__(self) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Forgets\.__init__ does not call super\(\)\.__init__"):
        Forgets().train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_strategy": "epoch"}, "eval_strategy='epoch' requires an eval_dataset"),
        ({"eval_on_start": True}, "eval_on_start=True requires an eval_dataset"),
        ({"eval_on_save": True}, "eval_on_save=True requires an eval_dataset"),
        (
            {"config_overrides": {"train.global_batch_size": 10}},
            r"config_overrides\['train.global_batch_size'\]=10 must be a multiple of per_device_train_batch_size "
            r"\* ranks = 4 \* 1 = 4; choose 8 or 12",
        ),
        (
            {"dataloader_drop_last": True, "gradient_accumulation_steps": 9},
            "12 samples, fewer than one global batch of 36",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make(tmp_path, args=arguments(tmp_path, **options)).train()


@pytest.mark.parametrize("as_argument", [True, False])
def test_a_mistyped_checkpoint_to_resume_from_is_an_error_and_never_a_fresh_start(
    tmp_path: Path, as_argument: bool
) -> None:
    mistyped = str(tmp_path / "chekpoint-5")
    steps: list[int] = []
    options = {"resume_from_checkpoint": mistyped} if as_argument else {}
    trainer = make(tmp_path, args=arguments(tmp_path, **options), callbacks=[counting(steps)])
    with pytest.raises(CheckpointError, match="chekpoint-5"):
        trainer.train(resume_from_checkpoint=None if as_argument else mistyped)
    assert steps == []


def test_a_directory_without_checkpoints_is_no_start_either(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    args = arguments(tmp_path, resume_from_checkpoint=str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match="empty"):
        make(tmp_path, args=args).train()


def test_what_is_no_path_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=5 must be the path of a checkpoint, True or None"):
        make(tmp_path).train(resume_from_checkpoint=5)


def counting(steps: list[int]) -> TrainerCallback:
    """A callback that notes each step that begins."""

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    return Steps()


def test_the_best_model_takes_saves_that_meet_evaluations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_best_model_at_end=True requires checkpoints of evaluated steps"):
        make(tmp_path, args=arguments(tmp_path, load_best_model_at_end=True))
    theirs = hf_arguments(tmp_path, load_best_model_at_end=True, eval_strategy="no", save_strategy="no")
    with pytest.raises(ConfigError, match="got eval_strategy='no' and save_strategy='no'"):
        quiet(Regression(), theirs)


def test_evaluation_alone_takes_arguments_that_choose_a_best_model(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        eval_strategy="steps",
        eval_steps=0.5,
        save_strategy="steps",
        save_steps=0.5,
        load_best_model_at_end=True,
        eval_on_save=True,
    )
    metrics = make(tmp_path, args=args, eval_dataset=regression_rows()).evaluate()
    assert metrics["eval_loss"] > 0


@pytest.mark.parametrize(
    ("cls", "rows", "message"),
    [
        (LogitsModel, ragged_rows(4), "LogitsModel returned no loss but a mapping with logits. It received input_ids"),
        (Regression, [{"x": torch.ones(3)}], "no loss but a mapping with logits. It received x"),
        (torch.nn.Linear, TensorDataset(torch.ones(4, 3)), r"Linear returned no loss but a Tensor of shape \(4, 2\)"),
    ],
)
def test_a_model_without_a_loss_is_named_with_what_it_gave(tmp_path: Path, cls: Any, rows: Any, message: str) -> None:
    model = cls(3, 2) if cls is torch.nn.Linear else cls()
    dropped = (
        [{key: value for key, value in row.items() if key != "labels"} for row in rows]
        if isinstance(rows, list)
        else rows
    )
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, model=model, train_dataset=dropped).train()


def test_a_trainer_may_train_again_into_its_own_directory(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    assert trainer.train().global_step == 3
    assert any((weights[key] != value).any() for key, value in trainer.model.state_dict().items())


def test_a_loader_with_batches_of_another_size_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(regression_rows(10), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch_size=2, and per_device_train_batch_size=4 .*make them the same"):
        make(tmp_path, train_dataset=loader).train()


def test_arguments_without_effect_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    idle: dict[str, Any] = {
        "max_steps": 1,
        "num_train_epochs": 7,
        "eval_steps": 5,
        "lr_scheduler_type": "constant",
        "warmup_steps": 3,
    }
    idle |= {"preserve_n_best": 2, "dataloader_persistent_workers": True}
    make(tmp_path, args=arguments(tmp_path, **idle)).train()
    [line] = [record.message for record in caplog.records if "without effect" in record.message]
    assert line == (
        "settings without effect: eval_steps=5 (requires an eval_strategy); num_train_epochs=7.0 (requires "
        "max_steps=-1, which else is the length); warmup_steps=3 (requires lr_scheduler_type='constant_with_warmup'); "
        "preserve_n_best=2 (requires preserve_best_model=True); dataloader_persistent_workers=True (requires "
        "dataloader_num_workers > 0)"
    )


@pytest.mark.parametrize("name", ["max_steps", "max_eval_steps"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_number_of_steps_that_would_mean_all_of_them_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value} must be at least 1, or -1"):
        TrainingArguments(**{name: value})


def test_a_loader_of_ready_batches_is_read_as_it_is(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sizes(TrainerCallback):
        def on_forward_backward_begin(self, micro_batch: Any, **kwargs: Any) -> None:
            seen.append(len(micro_batch["x"]))

    loader = DataLoader(regression_rows(10), batch_size=4)  # type: ignore[arg-type]
    output = make(tmp_path, train_dataset=loader, callbacks=[Sizes]).train()
    assert (output.global_step, seen) == (3, [4, 4, 2])


def test_the_tokenizer_may_be_passed_under_its_earlier_name(tmp_path: Path) -> None:
    tokenizer = object()
    trainer = Trainer(Regression(), arguments(tmp_path), train_dataset=regression_rows(4), tokenizer=tokenizer)
    assert trainer.processing_class is trainer.tokenizer is tokenizer
    with pytest.raises(ConfigError, match="processing_class alone"):
        Trainer(Regression(), arguments(tmp_path), processing_class=object(), tokenizer=tokenizer)
