"""Every field of the installed `transformers.TrainingArguments`: another value has an effect, or is refused by name.

The table has one row for each. A field that is new in `transformers` fails here until it has one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

from onstep import ExportableState, Trainer, TrainerCallback, TrainingArguments
from onstep.config import args_to_config
from onstep.errors import ConfigError, DataError
from onstep.trackers.report_to import reporting_trackers
from tests.support.forked_processes import Processes
from tests.support.hub_server import TOKEN, HubServer, hub_server, using
from tests.support.observed_runs import NotedRegression, arguments, described, observe
from tests.support.small_models import regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


@dataclass(frozen=True)
class Changes:
    """With `value` a run differs in `seen` (of `observe`); `also` are the arguments of both runs."""

    value: Any
    seen: str
    also: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False


@dataclass(frozen=True)
class Holds:
    """With `value`, `holds(run)` is true of the run, and without it is not."""

    value: Any
    holds: Callable[[dict[str, Any]], bool]
    also: dict[str, Any] = field(default_factory=dict)
    tokens: bool = False


@dataclass(frozen=True)
class OnArguments:
    """The effect is on the arguments themselves, which scripts and the launcher read: `holds(args)`."""

    value: Any
    holds: Callable[[TrainingArguments], bool]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OnRanks:
    """Concerns several ranks: on each of two, `seen` (of `job_arguments`) becomes `found`."""

    value: Any
    seen: str
    found: Any


@dataclass(frozen=True)
class ToTracker:
    """Reaches the constructor of `tracker` as its `option`."""

    value: Any
    tracker: str
    option: str


@dataclass(frozen=True)
class Shown:
    """A function of this file, which is called with a directory, shows the effect."""

    shows: Callable[[Path], None]


@dataclass(frozen=True)
class AlwaysSo:
    """What the argument asks for holds for every run, for the reason given; `shows(directory, value)` sees it."""

    values: tuple[Any, Any]
    reason: str
    shows: Callable[[Path, Any], None]


@dataclass(frozen=True)
class Requires:
    """Has an effect only with a package or a GPU that tests lack; here the refusal names it, before any step."""

    value: Any
    what: str
    also: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """`value` is refused with the field's name and `reason`, a regular expression, before any step."""

    value: Any
    reason: str
    environment: dict[str, str] = field(default_factory=dict)


Row = Changes | Holds | OnArguments | OnRanks | ToTracker | Shown | AlwaysSo | Requires | Refused

SAVES = {"save_strategy": "steps", "save_steps": 2}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
RANDOM = {"train_sampling_strategy": "random"}
EPOCHS = {"num_train_epochs": 2}
WORKERS = {"dataloader_num_workers": 1}
WORST = {**SAVES, **EVALUATES, "load_best_model_at_end": True, "greater_is_better": True}
SECOND_OF_NODE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
TWO_RANKS = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
LAUNCHED_WITH_SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FIRST_OF_SECOND_NODE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}


def shows_use_cpu(directory: Path) -> None:
    with mock.patch("torch.cuda.is_available", return_value=True):
        devices = [arguments(directory, use_cpu=value).device.type for value in (True, False)]
    assert devices == ["cpu", "cuda"]


def shows_fitting_batches(directory: Path) -> None:
    class Small(NotedRegression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if len(x) > 2:
                raise RuntimeError("CUDA out of memory")
            return super().forward(x, labels)

    options = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 2}
    with pytest.raises(RuntimeError, match="out of memory"):
        observe(directory / "plain", model=Small(), **options)
    found = observe(directory / "mine", model=Small(), auto_find_batch_size=True, **options)
    assert {len(batch) for batch in found["order"]} == {2}


def shows_released_memory(directory: Path) -> None:
    with mock.patch("torch.cuda.empty_cache") as release, mock.patch("torch.cuda.is_available", return_value=True):
        model = NotedRegression()
        model.register_forward_hook(lambda *_: noted.append(release.call_count))
        noted: list[int] = []
        observe(directory, model=model, torch_empty_cache_steps=1)
    assert noted[-1] > noted[0]


def shows_nan_in_the_log(directory: Path) -> None:
    rows = regression_rows(12)
    rows[5]["x"] = rows[5]["x"] * math.nan
    skips = {"config_overrides": {"train.on_nonfinite": "skip"}, "logging_steps": 3}
    plain, mine = (
        observe(directory / str(value), rows=rows, logging_nan_inf_filter=value, **skips) for value in (True, False)
    )
    # the skipped step has a record of its own in both, without a learning rate
    means = [[loss for loss, rate in zip(run["losses"], run["rates"], strict=True) if rate] for run in (plain, mine)]
    assert [[math.isnan(loss) for loss in losses] for losses in means] == [[False, False], [True, False]]


def shows_unused_columns(directory: Path) -> None:
    rows = [{**row, "name": torch.tensor(number)} for number, row in enumerate(regression_rows(12))]
    observe(directory / "plain", rows=rows)
    with pytest.raises(DataError, match=r"the micro-batch has 'name', which .* does not accept"):
        observe(directory / "mine", rows=rows, remove_unused_columns=False)


def shows_length_column(directory: Path) -> None:
    import datasets

    sizes = torch.tensor([3, 1, 2] * 4)
    rows = [{**row, "size": int(size)} for row, size in zip(regression_rows(12), sizes, strict=True)]
    table = datasets.Dataset.from_list(rows).with_format("torch")

    class WithSizes(NotedRegression):
        def forward(self, x: Tensor, labels: Tensor | None = None, size: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(x, labels)

    options = {"train_sampling_strategy": "group_by_length", "length_column_name": "size"}
    found = observe(directory, model=WithSizes(), rows=table, per_device_train_batch_size=4, **options)
    by_x = {round(float(row["x"][0]), 4): row["size"] for row in rows}
    read = [[by_x[x] for x in batch] for batch in found["order"]]
    assert read == [sorted(batch, reverse=True) for batch in read]
    assert read[0][0] == 3


def shows_start_of_workers(directory: Path) -> None:
    """Without starting them, which would need seconds."""
    args = arguments(directory, dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    loader = Trainer(NotedRegression(), args, train_dataset=regression_rows(4)).get_train_dataloader()
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def shows_predictions_off_the_device(directory: Path, value: Any) -> None:
    assert observe(directory, eval_accumulation_steps=value)["given_to_metrics"]["on_cpu"]


def shows_save_at_signal(directory: Path, value: Any) -> None:
    class Struck(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ending:
        observe(directory, partial(Trainer, callbacks=[Struck()]), enable_jit_checkpoint=value)
    assert ending.value.code == 75
    assert (directory / "out" / "checkpoint-3").is_dir()


def is_named_as_idle(name: str, value: Any, directory: Path) -> None:
    """Without `push_to_hub` it has no effect, and a run says so, as it says what its effect requires."""
    lines = [line for _, line in observe(directory, **{name: value})["log_lines"]]
    assert any(f"{name}={value!r} (requires push_to_hub=True)" in line for line in lines)


def uploaded(directory: Path, token: str | None = TOKEN, **options: Any) -> HubServer:
    with hub_server() as hub, using(hub, token):
        observe(directory, push_to_hub=True, config_overrides={"run.save_weights": True}, **options)
    return hub


def shows_upload(directory: Path) -> None:
    assert set(uploaded(directory / "named", hub_model_id="me/mine").repositories) == {"me/mine"}
    assert set(uploaded(directory / "other").repositories) == {"me/out"}


def shows_token(directory: Path) -> None:
    with pytest.raises(ConfigError, match="HTTP 401"):
        uploaded(directory / "without", token=None)
    assert uploaded(directory, token=None, hub_token=TOKEN).commits("me/out")


def shows_private_branch(directory: Path) -> None:
    hub = uploaded(directory, hub_private_repo=True, hub_revision="dev")
    assert hub.private == {"me/out"}
    assert (len(hub.commits("me/out", "dev")), hub.commits("me/out")) == (1, [])


def shows_restored_callbacks(directory: Path, value: Any) -> None:
    """Attributes are always restored; what the constructor got is restored on request."""

    class Counting(TrainerCallback, ExportableState):
        count = 0

        def __init__(self, limit: int) -> None:
            self.limit = limit

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.count += 1

        def state(self) -> dict[str, Any]:
            return {"args": {"limit": self.limit}, "attributes": {"count": self.count}}

    first, again = Counting(3), Counting(5)
    observe(directory, partial(Trainer, callbacks=[first]), **SAVES)
    checkpoint = str(directory / "out" / "checkpoint-4")
    options = {"resume_from_checkpoint": checkpoint, "restore_callback_states_from_checkpoint": value}
    observe(directory, partial(Trainer, callbacks=[again]), **SAVES, **options)
    assert again.count == first.count == 6
    assert again.limit == (3 if value else 5)


def shows_resuming(directory: Path) -> None:
    first = observe(directory, **SAVES)
    again = observe(directory, **SAVES, resume_from_checkpoint=str(directory / "out" / "checkpoint-4"))
    assert len(first["order"]) == 6
    assert len(again["order"]) == 2
    assert again["losses"] == first["losses"]


def _is_reentrant(run: dict[str, Any]) -> bool:
    """Whether the layers recompute with the option that was passed on."""
    function = run["trainer"].model.model.layers[0]._gradient_checkpointing_func
    return function.keywords.get("use_reentrant") is True


FIELDS: dict[str, Row] = {
    # length
    "output_dir": Holds("elsewhere", lambda run: Path("elsewhere").is_dir()),
    "per_device_train_batch_size": Changes(4, "order"),
    "num_train_epochs": Changes(2.0, "steps"),
    "max_steps": Changes(3, "steps"),
    "gradient_accumulation_steps": Changes(2, "steps"),
    "seed": Changes(1, "order", RANDOM),
    "data_seed": Changes(1, "order", RANDOM),
    # optimizer and schedule
    "learning_rate": Changes(0.01, "losses"),
    "lr_scheduler_type": Changes("cosine", "rates"),
    "lr_scheduler_kwargs": Changes({"num_cycles": 1.0}, "rates", {"lr_scheduler_type": "cosine"}),
    "warmup_steps": Changes(2, "rates"),
    "optim": Changes("sgd", "optimizer"),
    "optim_args": Changes("momentum=0.5", "losses", {"optim": "sgd"}),
    "optim_target_modules": Requires("all-linear", "galore", {"optim": "galore_adamw"}),
    "weight_decay": Changes(0.5, "weights"),
    "adam_beta1": Changes(0.5, "losses"),
    "adam_beta2": Changes(0.5, "losses"),
    "adam_epsilon": Changes(1.0, "losses"),
    "max_grad_norm": Changes(0.01, "losses", {"optim": "sgd"}),
    "average_tokens_across_devices": Refused(False, "tokens of all ranks"),
    "label_smoothing_factor": Changes(0.2, "losses", tokens=True),
    "neftune_noise_alpha": Changes(5.0, "losses", tokens=True),
    # precision and memory
    "bf16": Changes(True, "dtypes"),
    "fp16": Changes(True, "dtypes"),
    "bf16_full_eval": Changes(True, "eval_dtypes", tokens=True),
    "fp16_full_eval": Changes(True, "eval_dtypes", tokens=True),
    "tf32": Requires(True, "GPU"),
    "activation_checkpointing": Holds(True, lambda run: run["trainer"].model.is_activation_checkpointing, tokens=True),
    "activation_checkpointing_kwargs": Holds(
        {"use_reentrant": True}, _is_reentrant, {"activation_checkpointing": True}, tokens=True
    ),
    "gradient_checkpointing": Holds(True, lambda run: run["trainer"].model.is_activation_checkpointing, tokens=True),
    "gradient_checkpointing_kwargs": Holds(
        {"use_reentrant": True}, _is_reentrant, {"gradient_checkpointing": True}, tokens=True
    ),
    "torch_compile": Changes(True, "compiled"),
    "torch_compile_backend": Changes("eager", "compiled", {"torch_compile": True}),
    "torch_compile_mode": Changes("reduce-overhead", "compiled", {"torch_compile": True}),
    "use_liger_kernel": Requires(True, "liger-kernel"),
    "liger_kernel_config": Requires({"rope": True}, "liger-kernel", {"use_liger_kernel": True}),
    "use_cache": Holds(True, lambda run: run["trainer"].model.config.use_cache, tokens=True),
    "torch_empty_cache_steps": Shown(shows_released_memory),
    "auto_find_batch_size": Shown(shows_fitting_batches),
    "use_cpu": Shown(shows_use_cpu),
    "full_determinism": Changes(True, "deterministic"),
    "debug": Changes("underflow_overflow", "hooks"),
    # logs
    "logging_strategy": Changes("epoch", "logged_steps"),
    "logging_steps": Changes(3, "logged_steps"),
    "logging_first_step": Changes(True, "logged_steps", {"logging_steps": 3}),
    "log_on_each_node": OnArguments(False, lambda args: not args.should_log, FIRST_OF_SECOND_NODE),
    "logging_nan_inf_filter": Shown(shows_nan_in_the_log),
    "include_num_input_tokens_seen": Changes("all", "names", tokens=True),
    "log_level": OnArguments("debug", lambda args: args.get_process_log_level() == logging.DEBUG),
    "log_level_replica": OnArguments(
        "error", lambda args: args.get_process_log_level() == logging.ERROR, SECOND_OF_NODE
    ),
    "disable_tqdm": Changes(False, "printed"),
    "report_to": Changes("csv", "files"),
    "run_name": ToTracker("mine", "wandb", "run_name"),
    "project": ToTracker("mine", "wandb", "project"),
    "trackio_space_id": ToTracker("me/space", "trackio", "space_id"),
    "trackio_bucket_id": ToTracker("me/bucket", "trackio", "bucket_id"),
    "trackio_static_space_id": Refused("me/space", "trackio freeze"),
    "skip_memory_metrics": Changes(False, "train_metrics"),
    # evaluation
    "eval_strategy": Changes("epoch", "evaluated_steps"),
    "eval_steps": Changes(3, "evaluated_steps", {"eval_strategy": "steps"}),
    "eval_delay": Changes(4, "evaluated_steps", EVALUATES),
    "per_device_eval_batch_size": Changes(2, "eval_order"),
    "prediction_loss_only": Changes(True, "eval_names"),
    "eval_on_start": Changes(True, "evaluated_steps", EVALUATES),
    "eval_do_concat_batches": Changes(False, "given_to_metrics"),
    "eval_use_gather_object": OnRanks(True, "objects", [2, 2]),
    "eval_accumulation_steps": AlwaysSo(
        (None, 1), "predictions are moved off the device after every batch", shows_predictions_off_the_device
    ),
    "include_for_metrics": Changes(["inputs", "loss"], "given_to_metrics"),
    "batch_eval_metrics": Changes(True, "given_to_metrics"),
    # checkpoints
    "save_strategy": Changes("epoch", "checkpoints", EPOCHS),
    "save_steps": Changes(3, "checkpoints", {"save_strategy": "steps"}),
    "save_total_limit": Changes(1, "checkpoints", SAVES),
    "save_only_model": Changes(True, "files", SAVES),
    # on one machine it makes no difference
    "save_on_each_node": Refused(True, "storage that all machines share", FIRST_OF_SECOND_NODE),
    "enable_jit_checkpoint": AlwaysSo((False, True), "a signal always saves before the run ends", shows_save_at_signal),
    "load_best_model_at_end": Changes(True, "weights", {**WORST, "load_best_model_at_end": False}),
    "metric_for_best_model": Changes("count", "best", WORST),
    "greater_is_better": Changes(False, "best", {**WORST, "metric_for_best_model": "loss"}),
    "resume_from_checkpoint": Shown(shows_resuming),
    "ignore_data_skip": Refused(True, "continues at the very sample"),
    "restore_callback_states_from_checkpoint": AlwaysSo(
        (False, True), "a run that continues restores the attributes of its callbacks", shows_restored_callbacks
    ),
    "push_to_hub": Shown(shows_upload),
    "hub_model_id": Shown(shows_upload),
    "hub_token": Shown(shows_token),
    "hub_private_repo": Shown(shows_private_branch),
    "hub_revision": Shown(shows_private_branch),
    "hub_strategy": Shown(partial(is_named_as_idle, "hub_strategy", "end")),  # with push_to_hub: test_trainer_hub.py
    "hub_always_push": Shown(partial(is_named_as_idle, "hub_always_push", True)),
    # data
    "dataloader_drop_last": Changes(True, "steps", {"per_device_train_batch_size": 5}),
    "dataloader_num_workers": Changes(1, "loader"),
    "dataloader_pin_memory": Changes(False, "loader", {"use_cpu": False}),
    "dataloader_persistent_workers": Changes(True, "loader", WORKERS),
    "dataloader_prefetch_factor": Changes(4, "loader", WORKERS),
    "dataloader_multiprocessing_context": Shown(shows_start_of_workers),
    "dataloader_in_order": Refused(False, "in their order"),
    "remove_unused_columns": Shown(shows_unused_columns),
    "label_names": Changes(["labels", "x"], "given_to_metrics"),
    "train_sampling_strategy": Changes("random", "order"),
    "length_column_name": Shown(shows_length_column),
    "accelerator_config": Changes({"use_seedable_sampler": False}, "order", RANDOM),
    # ranks
    "parallelism_config": OnArguments({"dp_shard_size": 2}, lambda args: args.parallel_sizes.dp_shard == 2, TWO_RANKS),
    "ddp_find_unused_parameters": OnRanks(True, "find_unused_parameters", True),
    "ddp_bucket_cap_mb": OnRanks(3, "bucket_cap_mb", 3),
    "ddp_broadcast_buffers": OnRanks(True, "sync_buffers", True),
    "ddp_static_graph": OnRanks(True, "static_graph", True),
    "ddp_backend": OnRanks("gloo", "backend", "gloo"),
    "ddp_timeout": OnRanks(77, "ddp_timeout", 77.0),
    "fsdp": OnArguments("full_shard", lambda args: args.parallel_sizes.dp_shard == 2, TWO_RANKS),
    "fsdp_config": OnArguments(
        {"cpu_offload": True}, lambda args: args_to_config(args).fsdp.cpu_offload, TWO_RANKS | LAUNCHED_WITH_SHARDS
    ),
    "deepspeed": Refused("zero3.json", "sharded by torch's fully_shard"),
    # read by scripts and launchers alone, in `transformers` too
    "do_train": OnArguments(True, lambda args: args.do_train),
    "do_eval": OnArguments(True, lambda args: args.do_eval),
    "do_predict": OnArguments(True, lambda args: args.do_predict),
    "local_rank": OnArguments(3, lambda args: args.local_rank == 3),
}


def seen(run: dict[str, Any], name: str) -> Any:
    return described(run["trainer"].optimizer) if name == "optimizer" else run[name]


Plain = Callable[[dict[str, Any], bool], dict[str, Any]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Trains with the arguments that both runs of a row have, once for all rows that have the same."""
    runs: dict[tuple[str, bool], dict[str, Any]] = {}

    def trained(also: dict[str, Any], tokens: bool) -> dict[str, Any]:
        key = repr(also), tokens
        if key not in runs:
            runs[key] = observe(tmp_path_factory.mktemp("plain"), tokens=tokens, **also)
        return runs[key]

    return trained


@pytest.mark.parametrize("name", [name for name, row in FIELDS.items() if not isinstance(row, OnRanks)])
def test_an_argument_has_its_effect_or_is_refused(
    name: str, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    match FIELDS[name]:
        case Refused(value, reason, environment):
            for key, text in environment.items():
                monkeypatch.setenv(key, text)
            with pytest.raises(ConfigError, match=rf"(?s)\b{name}\b.*{reason}"):
                arguments(tmp_path, **{name: value})
        case Requires(value, what, also):
            model = NotedRegression()
            with pytest.raises(ConfigError, match=rf"(?s){what}"):
                observe(tmp_path, model=model, **{**also, name: value})
            assert not model.seen[True]
        case Shown(shows):
            shows(tmp_path)
        case AlwaysSo(values, _, shows):
            for value in values:
                shows(tmp_path / str(value), value)
        case ToTracker(value, tracker, option):
            with mock.patch("onstep.trackers.report_to.make_tracker") as made:
                reporting_trackers(args_to_config(arguments(tmp_path, report_to=tracker, **{name: value})))
            assert made.call_args.kwargs[option] == value
        case OnArguments(value, holds, environment):
            for key, text in environment.items():
                monkeypatch.setenv(key, text)
            assert holds(arguments(tmp_path, **{name: value}))
            assert not holds(arguments(tmp_path))
        case Holds(value, holds, also, tokens):
            assert not holds(plain(also, tokens))
            assert holds(observe(tmp_path / "mine", tokens=tokens, **{**also, name: value}))
        case Changes(value, what, also, tokens):
            mine = observe(tmp_path / "mine", tokens=tokens, **{**also, name: value})
            assert seen(plain(also, tokens), what) != seen(mine, what)


@pytest.mark.parametrize(
    "name", [n for n, row in FIELDS.items() if isinstance(row, Refused) and isinstance(row.value, str)]
)
def test_what_is_refused_is_refused_on_a_command_line_for_the_same_reason(name: str, tmp_path: Path) -> None:
    row = FIELDS[name]
    assert isinstance(row, Refused)
    parser = transformers.HfArgumentParser(TrainingArguments)
    with pytest.raises(ConfigError, match=rf"(?s)\b{name}\b.*{row.reason}"):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), f"--{name}", row.value])


@pytest.mark.distributed
def test_arguments_for_ranks_reach_torch(processes: Processes, tmp_path: Path) -> None:
    rows = {name: row for name, row in FIELDS.items() if isinstance(row, OnRanks)}
    settings = {name: row.value for name, row in rows.items()}
    for rank in processes.results("tests.support.jobs.argument_jobs", "arguments", tmp_path / "set", settings):
        assert {name: rank[row.seen] for name, row in rows.items()} == {name: row.found for name, row in rows.items()}
    plain = processes.results("tests.support.jobs.argument_jobs", "arguments", tmp_path / "plain")[0]
    same = {name for name, row in rows.items() if plain[row.seen] == row.found}
    assert same <= {"ddp_backend"}, "gloo is the only backend of the CPU"


def test_every_field_has_a_row() -> None:
    assert set(FIELDS) == {each.name for each in dataclasses.fields(transformers.TrainingArguments)}


def test_the_parser_accepts_what_that_of_transformers_accepts() -> None:
    """The same options, with and without a value: `--gradient_checkpointing`, `--no_remove_unused_columns`."""
    parsers = [transformers.HfArgumentParser(cls) for cls in (transformers.TrainingArguments, TrainingArguments)]
    theirs, ours = (
        {text: action for action in parser._actions for text in action.option_strings} for parser in parsers
    )
    assert set(theirs) <= set(ours)
    differing = {
        text for text, action in theirs.items() if (action.nargs, action.const) != (ours[text].nargs, ours[text].const)
    }
    assert not differing


def test_the_page_names_what_is_refused() -> None:
    page = Path(__file__).parents[2].joinpath("docs/coming-from/hugging-face.md").read_text()
    refused = [name for name, row in FIELDS.items() if isinstance(row, Refused)]
    assert not [name for name in refused if not re.search(rf"`{name}(=\w+)?`", page)]


def test_the_counts() -> None:
    counts = Counter(type(row).__name__ for row in FIELDS.values())
    refused, elsewhere = counts["Refused"], counts["Requires"]
    honoured = len(FIELDS) - refused - elsewhere
    print(
        f"{len(FIELDS)} arguments: {honoured} honoured, {elsewhere} with a package or GPU, {refused} refused; {counts}"
    )
