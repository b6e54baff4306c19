"""Every method of the installed `transformers.Trainer`: an override of it has its effect, or is refused by name.

The table has one row for each. A method that is new in `transformers` fails here until it has one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import InfoCallback, Trainer
from onstep.errors import ConfigError
from onstep.trainer import overrides
from tests.support.forked_processes import Processes
from tests.support.hub_server import hub_server, using
from tests.support.observed_runs import NotedRegression, arguments, described, observe
from tests.support.small_models import Regression, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

Override = Callable[..., Any]
"""A user's method, as a function of what it overrides, the Trainer (None for a static method) and its arguments."""


@dataclass(frozen=True)
class Changes:
    """The run calls the override, and what the override does shows in `seen` (of `observe`)."""

    seen: str
    override: Override
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Called:
    """The run calls the override, which calls `super()`: an effect of its own is whatever the user writes there."""

    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ForScripts:
    """Only scripts and overrides call it, in `transformers` too; `holds(trainer)` calls it after a run."""

    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Refused:
    """A training that would need it is refused before it starts; the message has the method's name and `remedy`.

    The class can be constructed and, where `options` are what needs it, trained without them.
    """

    remedy: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unneeded:
    """No run needs it here: a class that overrides it trains, and it is never called."""


@dataclass(frozen=True)
class RefusedCall:
    """Only scripts call it, and `call(trainer)` is refused with `remedy`."""

    call: Callable[[Any], Any]
    remedy: str


@dataclass(frozen=True)
class Uploads:
    """A run with `push_to_hub` calls the override, which calls `super()`; another one does not."""


@dataclass(frozen=True)
class Continued:
    """A run that continues from a checkpoint calls the override, which calls `super()`; another one does not."""


Row = Continued | Changes | Called | ForScripts | Refused | RefusedCall | Unneeded | Uploads


def _doubled(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    return (2 * result[0], result[1]) if isinstance(result, tuple) else 2 * result


def _reversed_loader(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    rows = regression_rows(12)[::-1]
    return torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=transformers.default_data_collator)


def _reversed_sampler(original: Any, trainer: Any, dataset: Any = None) -> Any:
    dataset = trainer.train_dataset if dataset is None else dataset
    return list(range(len(dataset)))[::-1]


def _plain_sgd(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    return trainer.optimizer


def _constant(original: Any, trainer: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    optimizer = trainer.optimizer if optimizer is None else optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    return trainer.lr_scheduler


def _both(original: Any, trainer: Any, num_training_steps: int) -> None:
    _plain_sgd(original, trainer)
    _constant(original, trainer, num_training_steps, trainer.optimizer)


def _another_loss(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return torch.tensor(7.0)


def _negated(original: Any, trainer: Any, inputs: Any) -> Any:
    return {key: -value for key, value in original(inputs).items()}


def _perfect(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return {**original(*args, **kwargs), "eval_loss": 0.0}


def _noted(original: Any, trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
    original({**logs, "mine": 1.0}, *args, **kwargs)


def _marked(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    Path(trainer.args.output_dir).mkdir(exist_ok=True)
    Path(trainer.args.output_dir, "mine.txt").write_text("mine")
    return result


def _sgd_by_name(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.optim.SGD, {"lr": 0.01}


def _negating_collator(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    collate = original(*args, **kwargs)
    return lambda samples: {key: -value for key, value in collate(samples).items()}


def table_of_rows() -> Any:
    """The rows as a `datasets.Dataset`."""
    import datasets

    rows = [{key: value.tolist() for key, value in row.items()} for row in regression_rows(12)]
    return datasets.Dataset.from_list(rows).with_format("torch")


def _negated_table(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs).map(lambda row: {"x": -row["x"]})


def _negated_tensor(original: Any, trainer: Any, data: Any) -> Any:
    prepared = original(data)
    return -prepared if isinstance(prepared, torch.Tensor) else prepared


class Doubling(torch.nn.Module):
    """A wrapper that doubles a model's loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **inputs: Any) -> Any:
        outputs = self.module(**inputs)
        return {**outputs, "loss": 2 * outputs["loss"]}


def _doubling_wrapper(original: Any, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    return Doubling(original(model, *args, **kwargs))


def _in_bfloat16(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _more_in_output(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(*args, **kwargs)
    output.metrics["eval_mine"] = 1.0
    return output


def _doubled_prediction(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    loss, logits, labels = original(*args, **kwargs)
    return 2 * loss, logits, labels


def _negated_samples(original: Any, trainer: Any, iterator: Any, num_batches: int, device: Any) -> Any:
    samples, num_items = original(iterator, num_batches, device)
    return [{key: -value for key, value in one.items()} for one in samples], num_items


def _in_another_context(original: Any, trainer: Any, model: Any, inputs: Any) -> Any:
    context, inputs = original(model, inputs)
    return context, {key: -value for key, value in inputs.items()}


def _clipped_to_nothing(original: Any, trainer: Any, model: Any) -> Any:
    norm = original(model)
    for parameter in model.parameters():
        parameter.grad.zero_()
    return norm


def _counted_as_seven(original: Any, trainer: Any, inputs: Any) -> None:
    trainer.state.num_input_tokens_seen += 7


def _has_group(trainer: Any) -> bool:
    weight = next(trainer.model.parameters())
    groups = trainer.get_optimizer_group()
    return len(groups) == 2 and any(one is weight for one in trainer.get_optimizer_group(weight)["params"])


def _leaves(name: str, call: Callable[[Any], None]) -> Callable[[Any], bool]:
    """Whether the call leaves a file in `output_dir`."""

    def holds(trainer: Any) -> bool:
        path = Path(trainer.args.output_dir, name)
        path.unlink(missing_ok=True)
        call(trainer)
        return path.exists()

    return holds


SAVES = {"save_strategy": "steps", "save_steps": 3}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 3}
BEST = {**SAVES, **EVALUATES, "load_best_model_at_end": True, "save_total_limit": 1}


def _pushed(trainer: Any) -> bool:
    with hub_server() as hub, using(hub):
        return bool(trainer.push_to_hub().oid == hub.commits("me/out")[-1].oid)


METHODS: dict[str, Row] = {
    # data
    "get_train_dataloader": Changes("order", _reversed_loader),
    "get_eval_dataloader": Changes("eval_order", _reversed_loader),
    "get_test_dataloader": Changes("eval_order", _reversed_loader),
    "_get_dataloader": Changes("order", _reversed_loader),
    "_get_train_sampler": Changes("order", _reversed_sampler),
    "_get_eval_sampler": Changes("eval_order", _reversed_sampler),
    "_get_collator_with_removed_columns": Changes("order", _negating_collator),
    "_remove_unused_columns": Changes("order", _negated_table, {"rows": table_of_rows()}),
    "_set_signature_columns_if_needed": Called(),
    "num_examples": Called(),
    "get_total_train_batch_size": Changes("sizes", lambda original, trainer, args: 77),
    "get_batch_samples": Changes("order", _negated_samples),
    # optimizer and schedule
    "create_optimizer": Changes("optimizer", _plain_sgd),
    "create_scheduler": Changes("rates", _constant),
    "create_optimizer_and_scheduler": Changes("optimizer", _both),
    "get_optimizer_cls_and_kwargs": Changes("optimizer", _sgd_by_name),
    "get_decay_parameter_names": Changes("optimizer", lambda original, trainer, model: [], {"weight_decay": 0.5}),
    "get_learning_rates": ForScripts(lambda trainer: trainer.get_learning_rates() == [0.0, 0.0]),
    "get_num_trainable_parameters": ForScripts(lambda trainer: trainer.get_num_trainable_parameters() == 4),
    "get_optimizer_group": ForScripts(_has_group),
    "_get_learning_rate": Changes("rates", lambda original, trainer: 7.0),
    # the model
    "call_model_init": Changes("losses", lambda original, trainer: Regression(seed=1), {"model_init": NotedRegression}),
    "create_accelerator_and_postprocess": Called(),
    "_move_model_to_device": Called(),
    "_wrap_model": Changes("losses", _doubling_wrapper),
    # a step
    "train": ForScripts(lambda trainer: trainer.train().global_step == 6),
    "training_step": Changes("losses", _another_loss),
    "compute_loss": Changes("losses", _doubled),
    "compute_loss_context_manager": Changes("dtypes", _in_bfloat16),
    "autocast_smart_context_manager": Changes("dtypes", _in_bfloat16),
    "_prepare_input": Changes("order", _negated_tensor),
    "_prepare_inputs": Changes("order", _negated),
    "_get_num_items_in_batch": Changes("losses", lambda original, trainer, *args: torch.tensor(1000), {"tokens": True}),
    "_clip_grad_norm": Changes("losses", _clipped_to_nothing),
    "_get_grad_norm": Changes("norms", lambda original, trainer, model, grad_norm=None: 7.0),
    "_inner_training_loop": Changes("files", _marked),
    "_run_epoch": Refused("training_step"),
    "_maybe_log_save_evaluate": Changes("names", lambda original, trainer, *args, **kwargs: None),
    "_track_num_input_tokens": Changes("input_tokens", _counted_as_seven),
    **dict.fromkeys(
        (
            "_defer_fsdp_gradient_reduction",
            "_has_mixed_mesh_grads",
            "_mixed_mesh_grad_norm",
            "_sync_replicated_trainable_parameters",
        ),
        Unneeded(),
    ),
    "_finalize_training": Changes("files", _marked),
    "_init_training_state": Refused("on_train_begin"),
    "_prepare_for_training": Refused("create_optimizer"),
    "_validate_args": Called(),
    "set_initial_training_values": Refused("max_steps"),
    "_prepare_context_parallel_inputs": Changes("order", _in_another_context),
    "_build_accelerator_args": Called(),
    "_update_auto_batch_size": Called({"auto_find_batch_size": True}),
    # evaluation
    "evaluate": Changes("best", _perfect, BEST),
    "_evaluate": Changes("evaluated_steps", lambda original, trainer, *args, **kwargs: {}, EVALUATES),
    "evaluation_loop": Changes("eval_names", _more_in_output),
    "predict": ForScripts(lambda trainer: len(trainer.predict(trainer.eval_dataset).predictions) == 6),
    "prediction_step": Changes("eval_loss", _doubled_prediction),
    "_determine_best_metric": Changes("best", lambda original, trainer, *args, **kwargs: False, BEST),
    # saving
    "save_model": Changes("files", _marked),
    "_save": Changes("files", _marked, SAVES),
    "_save_checkpoint": Changes("files", _marked, SAVES),
    "save_state": ForScripts(_leaves("trainer_state.json", lambda trainer: trainer.save_state())),
    "_get_output_dir": Called(SAVES),
    **dict.fromkeys(("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"), Called(SAVES)),
    "_load_best_model": Called(BEST),
    **dict.fromkeys(
        (
            "_issue_warnings_after_load",
            "_load_callback_state",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_load_rng_state",
            "_load_scaler",
        ),
        Continued(),
    ),
    # reports
    "log": Changes("names", _noted),
    "floating_point_ops": Changes("total_flos", lambda original, trainer, inputs: 1000),
    "store_flos": Changes("total_flos", lambda original, trainer: None, {"tokens": True}),
    "log_metrics": ForScripts(lambda trainer: trainer.log_metrics("train", {"train_loss": 1.0}) is None),
    "metrics_format": ForScripts(
        lambda trainer: trainer.metrics_format({"train_runtime": 61.0}) == {"train_runtime": "0:01:01.00"}
    ),
    "save_metrics": ForScripts(
        _leaves("all_results.json", lambda trainer: trainer.save_metrics("train", {"train_loss": 1.0}))
    ),
    "create_model_card": ForScripts(_leaves("README.md", lambda trainer: trainer.create_model_card())),
    "is_local_process_zero": ForScripts(lambda trainer: trainer.is_local_process_zero()),
    "is_world_process_zero": ForScripts(lambda trainer: trainer.is_world_process_zero()),
    "add_callback": ForScripts(lambda trainer: trainer.add_callback(transformers.TrainerCallback) is None),
    "pop_callback": ForScripts(lambda trainer: trainer.pop_callback(InfoCallback) is not None),
    "remove_callback": ForScripts(lambda trainer: trainer.remove_callback(InfoCallback) is None),
    "end": ForScripts(lambda trainer: trainer.end() is None),
    "get_cp_size": ForScripts(lambda trainer: trainer.get_cp_size() == 1),
    "get_sp_size": ForScripts(lambda trainer: trainer.get_sp_size() == 1),
    "get_tp_size": ForScripts(lambda trainer: trainer.get_tp_size() == 1),
    # the Hub and searches
    "init_hf_repo": Uploads(),
    "push_to_hub": ForScripts(_pushed),
    "hyperparameter_search": RefusedCall(lambda trainer: trainer.hyperparameter_search(), "requires model_init"),
    "_push_from_checkpoint": Uploads(),
    "_finish_current_push": Called(),
    "_hp_search_setup": Called(),
    "_report_to_hp_search": Called(EVALUATES),
    "_tune_save_checkpoint": Unneeded(),
}


KINDS: dict[type, str] = {Refused: "refused", Unneeded: "unneeded"}


def methods_of_transformers() -> list[str]:
    """Its methods, public or with one underscore, with what it has from its bases."""
    return [
        name
        for name, value in vars(transformers.Trainer).items()
        if not name.startswith("__") and (callable(value) or isinstance(value, (staticmethod, classmethod, property)))
    ]


def subclass(name: str, override: Override, calls: list[str]) -> type[Trainer]:
    """A user's class that overrides one method."""
    is_static = isinstance(vars(transformers.Trainer).get(name), staticmethod)

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if is_static:
            return override(getattr(Trainer, name), None, *args, **kwargs)
        trainer, *others = args
        return override(getattr(super(cls, trainer), name), trainer, *others, **kwargs)

    cls: type[Trainer] = type("Mine", (Trainer,), {name: staticmethod(method) if is_static else method})
    return cls


def unchanged(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def assigned(name: str, override: Override, calls: list[str]) -> Callable[..., Trainer]:
    """Makes a Trainer one method of which is replaced on the object, as libraries do that patch a Trainer."""

    def make(*args: Any, **kwargs: Any) -> Trainer:
        trainer = Trainer(*args, **kwargs)
        original = getattr(trainer, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return override(original, trainer, *args, **kwargs)

        setattr(trainer, name, method)
        return trainer

    return make


def seen(run: dict[str, Any], name: str) -> Any:
    return described(run["trainer"].optimizer) if name == "optimizer" else run[name]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], str], Any]:
    """What is seen of a run without overrides, by its options."""
    runs: dict[str, dict[str, Any]] = {}

    def plain(options: dict[str, Any], name: str) -> Any:
        if repr(options) not in runs:
            runs[repr(options)] = observe(tmp_path_factory.mktemp("plain"), **options)
        return seen(runs[repr(options)], name)

    return plain


@pytest.mark.parametrize("name", METHODS)
def test_an_override_has_its_effect_or_is_refused(
    name: str, plain_run: Callable[[dict[str, Any], str], Any], tmp_path: Path
) -> None:
    calls: list[str] = []
    match METHODS[name]:
        case Refused(remedy, options):
            cls = subclass(name, unchanged, calls)
            trainer = cls(NotedRegression(), arguments(tmp_path, **options), train_dataset=regression_rows(4))
            with pytest.raises(ConfigError, match=rf"(?s)\b{name}\b.*{remedy}"):
                trainer.train()
            assert not (tmp_path / "run").exists()
            if options:
                observe(tmp_path / "otherwise", cls)
        case Continued():
            cls = subclass(name, unchanged, calls)
            options = {**SAVES, "max_steps": 6}
            observe(tmp_path, cls, **options)
            assert not calls
            rows, checkpoint = regression_rows(12), str(tmp_path / "out/checkpoint-3")
            trainer = cls(NotedRegression(), arguments(tmp_path, **options), train_dataset=rows)
            trainer.train(resume_from_checkpoint=checkpoint)
            assert calls
            assert trainer.state.global_step == 6
        case Uploads():
            observe(tmp_path / "without", subclass(name, unchanged, calls), **SAVES)
            assert not calls
            with hub_server() as hub, using(hub):
                observe(tmp_path / "with", subclass(name, unchanged, calls), push_to_hub=True, **SAVES)
            assert calls
            assert hub.commits("me/out")
        case Unneeded():
            observe(tmp_path, subclass(name, unchanged, calls))
            assert not calls
        case RefusedCall(call, remedy):
            trainer = subclass("compute_loss", unchanged, calls)(NotedRegression(), arguments(tmp_path))
            with pytest.raises(ConfigError, match=rf"(?s)\b{name}\b.*{remedy}"):
                call(trainer)
        case ForScripts(holds):
            trainer = observe(tmp_path, subclass(name, unchanged, calls))["trainer"]
            calls.clear()
            assert holds(trainer)
            assert calls
        case Called(options):
            observe(tmp_path, subclass(name, unchanged, calls), **options)
            assert calls
        case Changes(what, override, options):
            mine = observe(tmp_path, subclass(name, override, calls), **options)
            assert calls
            assert seen(mine, what) != plain_run(options, what)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if isinstance(row, Changes)])
def test_a_method_assigned_to_the_object_has_its_effect_too(
    name: str, plain_run: Callable[[dict[str, Any], str], Any], tmp_path: Path
) -> None:
    row, calls = METHODS[name], list[str]()
    assert isinstance(row, Changes)
    mine = observe(tmp_path, assigned(name, row.override, calls), **row.options)
    assert calls
    assert seen(mine, row.seen) != plain_run(row.options, row.seen)


@pytest.mark.distributed
def test_the_weights_are_saved_by_the_first_rank_alone(processes: Processes, tmp_path: Path) -> None:
    """As in `transformers`: `_save_checkpoint` is called on every rank, `_save` where `args.should_save`."""
    first, second = processes.results("tests.support.jobs.argument_jobs", "saves", tmp_path)
    assert first["_save_checkpoint"] == second["_save_checkpoint"] == 2
    assert first["_save"] >= 2
    assert second["_save"] == 0


def test_every_method_has_a_row() -> None:
    assert set(METHODS) == set(methods_of_transformers())


def test_the_page_names_what_is_refused() -> None:
    page = Path(__file__).parents[2].joinpath("docs/coming-from/hugging-face.md").read_text()
    refused = [name for name, row in METHODS.items() if isinstance(row, (Refused, RefusedCall))]
    assert not [name for name in refused if f"`{name}`" not in page]


def test_the_counts() -> None:
    counts = Counter(type(row).__name__ for row in METHODS.values())
    honoured, refused = counts["Changes"] + counts["Called"], counts["Refused"] + counts["RefusedCall"]
    print(f"{len(METHODS)} methods: {honoured} honoured, {counts['ForScripts']} for scripts, {refused} refused")


def test_the_table_of_overrides_says_what_the_run_does() -> None:
    for name in METHODS:
        assert overrides.METHODS[name].kind == KINDS.get(type(METHODS[name]), "called")


def test_a_method_that_is_called_has_the_parameters_of_transformers() -> None:
    for name, method in overrides.METHODS.items():
        if not method.called or name not in vars(transformers.Trainer) or isinstance(METHODS[name], RefusedCall):
            continue
        expected, own = (
            [one for one in inspect.signature(getattr(kind, name)).parameters if one != "self"]
            for kind in (transformers.Trainer, Trainer)
        )
        assert own[: len(expected)] == expected, name
