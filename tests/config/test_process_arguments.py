"""The properties and methods of `TrainingArguments` beside those of `transformers`."""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import Trainer, TrainingArguments
from onstep.config.hf.process import REFUSED_ATTRIBUTES, ParallelMode
from onstep.errors import ConfigError
from tests.support import torchrun
from tests.support.forked_processes import Processes, output_of
from tests.support.small_models import Regression, arguments, regression_rows


def theirs(**values: Any) -> Any:
    return transformers.TrainingArguments("out", use_cpu=True, report_to="none", **values)


def test_every_property_and_method_of_transformers_is_here_or_refused() -> None:
    public = {
        name
        for name, one in inspect.getmembers(transformers.TrainingArguments)
        if not name.startswith("_") and (callable(one) or isinstance(one, property))
    }
    public |= {name for name in vars(theirs()) if not name.startswith("_")} | {"_n_gpu", "_setup_devices"}
    args = TrainingArguments("out", use_cpu=True)

    missing = sorted(name for name in public if not hasattr(args, name))

    assert [name for name in missing if name not in REFUSED_ATTRIBUTES] == []
    for name in missing:
        with pytest.raises(AttributeError, match=f"TrainingArguments has no {name}: ."):
            getattr(args, name)
    methods = {name for name in public if callable(getattr(transformers.TrainingArguments, name, None))}
    for name in sorted(methods):
        own = inspect.signature(getattr(TrainingArguments, name)).parameters
        reference = inspect.signature(getattr(transformers.TrainingArguments, name)).parameters
        assert [(one.name, one.default) for one in own.values()] == [
            (one.name, one.default) for one in reference.values()
        ], name


def test_the_properties_of_a_process_are_those_of_transformers() -> None:
    ours, reference = TrainingArguments("out", use_cpu=True, ddp_timeout=60), theirs(ddp_timeout=60)

    for name in (
        *("device", "n_gpu", "_n_gpu", "_setup_devices", "world_size", "process_index", "local_process_index"),
        *("should_log", "should_save", "train_batch_size", "eval_batch_size", "ddp_timeout_delta"),
        *("place_model_on_device",),
    ):
        assert getattr(ours, name) == getattr(reference, name), name
    assert isinstance(ours.device, torch.device)
    assert ours.parallel_mode.value == reference.parallel_mode.value == ParallelMode.NOT_PARALLEL.value
    assert {one.name: one.value for one in ParallelMode} == {
        one.name: one.value for one in transformers.training_args.ParallelMode
    }
    assert ours.framework == "pt"
    with ours.main_process_first(desc="nothing"):
        pass


def test_a_process_has_at_most_one_gpu() -> None:
    args = TrainingArguments("out", use_cpu=True)
    args._n_gpu = 1  # as scripts do against DataParallel

    with pytest.raises(ConfigError, match=r"_n_gpu=2 must be 0 or 1.*torchrun --nproc-per-node 2"):
        args._n_gpu = 2


@pytest.mark.parametrize("level", ["passive", "debug", "info", "warning", "error", "critical"])
def test_the_log_level_of_a_process_is_that_of_transformers(level: str) -> None:
    assert (
        TrainingArguments("out", log_level=level).get_process_log_level()
        == theirs(log_level=level).get_process_log_level()
    )


def test_the_log_level_of_another_rank_is_that_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    args = TrainingArguments("out", log_level="info")

    assert args.get_process_log_level() == logging.WARNING
    assert args.parallel_mode is ParallelMode.DISTRIBUTED


def test_the_sanitized_dictionary_is_flat() -> None:
    ours = TrainingArguments("out", use_cpu=True, label_names=["y"]).to_sanitized_dict()
    reference = theirs(label_names=["y"]).to_sanitized_dict()

    assert {type(value) for value in ours.values()} <= {bool, int, float, str}
    for name in ("label_names", "learning_rate", "train_batch_size", "eval_batch_size", "lr_scheduler_kwargs"):
        assert ours[name] == reference[name]
    json.dumps(ours)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("set_training", {"learning_rate": 1e-4, "batch_size": 4, "num_epochs": 2, "max_steps": 5, "seed": 1}),
    ("set_training", {}),
    ("set_evaluate", {"strategy": "steps", "steps": 10, "batch_size": 3, "delay": 2, "loss_only": True}),
    ("set_evaluate", {"strategy": transformers.IntervalStrategy.EPOCH}),
    ("set_testing", {"batch_size": 3, "loss_only": True}),
    ("set_save", {"strategy": "epoch", "total_limit": 2}),
    ("set_logging", {"steps": 7, "first_step": True, "level": "info", "replica_level": "warning"}),
    ("set_optimizer", {"name": "sgd", "beta1": 0.8, "weight_decay": 0.1}),
    ("set_lr_scheduler", {"name": "cosine", "warmup_steps": 0.05, "num_epochs": 2}),
    ("set_dataloader", {"train_batch_size": 2, "eval_batch_size": 3, "drop_last": True, "sampler_seed": 7}),
]


@pytest.mark.parametrize(("method", "values"), SETTINGS)
def test_set_methods_set_the_fields_that_those_of_transformers_set(method: str, values: dict[str, Any]) -> None:
    def changed(args: Any) -> tuple[set[str], dict[str, Any]]:
        before = args.to_dict()
        assert getattr(args, method)(**values) is args
        after = args.to_dict()
        return {name for name, value in after.items() if before[name] != value}, after

    (ours, own), (theirs_too, reference) = changed(TrainingArguments("out", use_cpu=True)), changed(theirs())

    for name in (ours | theirs_too) - {"dataloader_pin_memory"}:  # which theirs unset before, without a GPU
        assert (own[name] or None) == (reference[name] or None) or (own[name], reference[name]) == ([], "none"), name
    assert ours or values == {}


def test_set_methods_check_what_they_set() -> None:
    args = TrainingArguments("out")

    with pytest.raises(ConfigError, match=r"logging_steps=0 must be > 0"):
        args.set_logging(steps=0, replica_level="warning")
    pushing = TrainingArguments("out").set_push_to_hub("me/model", "end", "secret", True, True, "dev")
    values = (pushing.hub_strategy, pushing.hub_token, pushing.hub_private_repo, pushing.hub_always_push)
    assert (pushing.push_to_hub, pushing.hub_model_id, pushing.hub_revision) == (True, "me/model", "dev")
    assert values == ("end", "secret", True, True)
    with pytest.raises(ConfigError, match="hub_strategy='steps' is not supported; use one of 'end', 'every_save'"):
        TrainingArguments("out").set_push_to_hub("me/model", "steps")


def test_the_annotations_of_a_subclass_need_not_be_known_elsewhere() -> None:
    Lengths = list[int]

    @dataclass
    class Own(TrainingArguments):
        lengths: Lengths | None = None

    assert Own("out", lengths=[3]).lengths == [3]
    with pytest.raises(ConfigError, match="max_steps"):
        Own("out", max_steps="many")  # type: ignore[arg-type]


def test_a_model_stays_where_it_is_if_a_subclass_says_so(tmp_path: Path) -> None:
    class Stays(Regression):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("moved")

    @dataclass
    class Own(TrainingArguments):
        @property
        def place_model_on_device(self) -> bool:
            return False

    own = Own(**arguments(tmp_path, max_steps=1).to_dict())
    assert Trainer(Stays(), own, train_dataset=regression_rows(8), default_callbacks=False).train().global_step == 1
    with pytest.raises(AssertionError, match="moved"):
        Trainer(Stays(), arguments(tmp_path / "b"), train_dataset=regression_rows(8), default_callbacks=False).train()


SCRIPT = """
import sys
import time

HAS_ACCELERATE = "accelerate.state" in sys.modules  # whose state joins the process group
from pathlib import Path
from onstep import Trainer, TrainerCallback, TrainingArguments

out = Path.cwd()
args = TrainingArguments(str(out / "run"), use_cpu=True, max_steps=2, save_strategy="no", ddp_timeout=60)


def note(name):
    with args.main_process_first(local=name != "all", desc=name):
        with open(out / f"{name}.txt", "a") as file:
            if args.process_index == 0:
                time.sleep(0.3)
            file.write(str(args.process_index))


note("before")
note("all")
import torch
from tests.support.small_models import Regression, regression_rows


class Within(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        note("within")


assert torch.distributed.is_initialized() == HAS_ACCELERATE
Trainer(Regression(), args, train_dataset=regression_rows(), callbacks=[Within()], default_callbacks=False).train()
note("after")
"""


@pytest.mark.parametrize("store", [pytest.param("agent", marks=pytest.mark.slow), "own"])
def test_the_main_process_goes_first_before_and_during_a_run(processes: Processes, tmp_path: Path, store: str) -> None:
    """Ranks that torchrun starts find a store of their agent; others make one."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    if store == "own":
        codes = processes.run("tests.support.jobs.script_jobs", "script", tmp_path, {"script": str(script)}, ranks=2)
        assert codes == [0, 0], output_of(tmp_path)
    else:
        root = str(Path(__file__).parents[2])
        code, said = torchrun.finish([str(script)], tmp_path, PYTHONPATH=f"{root}:{root}/src")
        assert code == 0, said

    for name in ("before", "all", "within", "after"):
        assert (tmp_path / f"{name}.txt").read_text() == "01", name
