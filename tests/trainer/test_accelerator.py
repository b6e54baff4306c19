"""`trainer.accelerator`, compared with the real `accelerate.Accelerator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from onstep import Trainer
from onstep.errors import ConfigError
from onstep.trainer.computing.accelerator import Accelerator
from tests.support.forked_processes import Processes
from tests.support.small_models import Regression, arguments, quiet, recorder, regression_rows


@pytest.fixture
def ours(tmp_path: Path) -> Accelerator:
    accelerator: Accelerator = quiet(Regression(), arguments(tmp_path)).accelerator
    return accelerator


@pytest.fixture
def theirs() -> accelerate.Accelerator:
    return accelerate.Accelerator(cpu=True)


def test_the_facts_of_one_process_are_those_of_accelerate(ours: Accelerator, theirs: accelerate.Accelerator) -> None:
    for name in (
        "device",
        "num_processes",
        "process_index",
        "local_process_index",
        "is_main_process",
        "is_local_main_process",
        "is_last_process",
        "use_distributed",
        "distributed_type",
        "mixed_precision",
        "gradient_accumulation_steps",
        "sync_gradients",
        "scaler",
        "optimizer_step_was_skipped",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.distributed_type == DistributedType.NO
    assert ours.distributed_type != DistributedType.DEEPSPEED
    for name in ("device", "num_processes", "process_index", "mixed_precision", "deepspeed_plugin", "fsdp_plugin"):
        assert getattr(ours.state, name) == getattr(theirs.state, name, None), name


def test_gathering_on_one_process_is_that_of_accelerate(ours: Accelerator, theirs: accelerate.Accelerator) -> None:
    data: Any
    for data in (torch.tensor(3.0), torch.arange(4.0), {"a": [torch.ones(2, 3), (torch.zeros(1),)]}):
        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            found, expected = getattr(ours, name)(data), getattr(theirs, name)(data)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert type(found) is type(expected)
    assert ours.gather_for_metrics(["a", 1]) == theirs.gather_for_metrics(["a", 1])
    for one in (ours, theirs):
        with pytest.raises(TypeError):
            one.reduce("text")


def test_models_optimizers_and_files(ours: Accelerator, theirs: accelerate.Accelerator, tmp_path: Path) -> None:
    model = Regression()
    optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(regression_rows(4))  # type: ignore[arg-type]
    assert ours.prepare(model, optimizer, loader) == (model, optimizer, loader)
    assert ours.prepare(loader) is loader
    assert ours.is_prepared(loader)
    assert not ours.is_prepared(DataLoader(regression_rows(4)))  # type: ignore[arg-type]
    compiled: Any = torch.compile(model, backend="eager")
    for one in (ours, theirs):
        assert one.unwrap_model(model) is model
        assert one.unwrap_model(compiled) is compiled
        assert one.unwrap_model(compiled, keep_torch_compile=False) is model
        assert one.free_memory(model, optimizer) == [None, None]
    assert list(ours.get_state_dict(compiled)) == ["layer.weight", "layer.bias"]
    ours.save(model.state_dict(), tmp_path / "a.bin")
    assert torch.equal(torch.load(tmp_path / "a.bin")["layer.bias"], model.layer.bias)
    ours.save(model.state_dict(), tmp_path / "a.safetensors", safe_serialization=True)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["layer.bias"], model.layer.bias)
    with ours.accumulate(model), ours.no_sync(model), ours.autocast(), ours.main_process_first():
        ours.backward(model(torch.ones(1, 3), torch.ones(1))["loss"])
    expected = torch.nn.utils.clip_grad_norm_(Regression().parameters(), 1.0)
    assert expected == 0.0
    norm = ours.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    total = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(total) == pytest.approx(0.1, rel=1e-4)
    ours.wait_for_everyone()


def test_print_and_on_main_process(ours: Accelerator, capsys: pytest.CaptureFixture[str]) -> None:
    ours.print("loss", 1)
    assert capsys.readouterr().out == "loss 1\n"
    assert ours.on_main_process(lambda x: x + 1)(1) == 2


def test_what_is_missing_says_so_and_what_to_do(ours: Accelerator) -> None:
    with pytest.raises(AttributeError, match="has no 'init_trackers'; set report_to in TrainingArguments"):
        _ = ours.init_trackers
    assert not hasattr(ours, "profile")
    assert getattr(ours, "deepspeed_engine_wrapped", None) is None


def test_it_logs_and_knows_the_precision_during_a_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(context: Any) -> None:
        accelerator = context.state.trainer.accelerator
        accelerator.log({"mine": 3.0})
        seen.append((accelerator.mixed_precision, accelerator.sync_gradients, accelerator.optimizer_step_was_skipped))
        with accelerator.autocast():
            seen.append(torch.get_autocast_dtype("cpu"))

    args = arguments(tmp_path, max_steps=1, bf16=True)
    trainer = quiet(Regression(), args, regression_rows(), callbacks=recorder("on_step_end", note))
    trainer.train()
    assert seen == [("bf16", True, False), torch.bfloat16]
    assert [record["mine"] for record in trainer.state.log_history if "mine" in record] == [3.0]


def test_an_override_extends_the_accelerator_and_may_not_replace_it(tmp_path: Path) -> None:
    class Extends(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.gather_function = self.accelerator.gather_for_metrics

    trainer = Extends(Regression(), arguments(tmp_path), default_callbacks=False)
    assert trainer.gather_function(3) == 3

    class Replaces(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = accelerate.Accelerator(cpu=True)

    with pytest.raises(ConfigError, match=r"must leave Onstep's own self\.accelerator.*call super\(\)"):
        Replaces(Regression(), arguments(tmp_path), default_callbacks=False)


@pytest.mark.distributed
def test_two_ranks_gather_and_reduce_as_accelerate_does(processes: Processes, tmp_path: Path) -> None:
    processes.load("accelerate")
    for rank, found in enumerate(processes.results("tests.support.jobs.accelerator_jobs", "compared", tmp_path)):
        assert found["ours"] == found["theirs"]
        assert found["rows"] == [0.0, 1.0, 2.0, 10.0]
        assert found["objects"] == ["a0", "b0", "a1", "b1"]
        assert found["type"] == "MULTI_CPU"
        assert found["first"] == ("nobody" if rank == 0 else "0")


def test_two_ranks_gather_each_sample_once(processes: Processes, tmp_path: Path) -> None:
    """The last global batch of 4 samples has 1, so the second rank repeats it."""
    for found in processes.results("tests.support.jobs.step_jobs", "gathered", tmp_path):
        assert found == {"train": [4, 4, 1], "eval": [4, 1]}


def test_where_a_step_is_and_what_is_not_known_of_it(ours: Accelerator, theirs: accelerate.Accelerator) -> None:
    for name in ("sync_gradients", "num_steps", "adjust_scheduler", "sync_with_dataloader", "plugin_kwargs"):
        assert getattr(ours.gradient_state, name) == getattr(theirs.gradient_state, name), name
    with pytest.raises(AttributeError, match=r"gradient_state is Onstep's and has no 'remainder'; .* trainer\.state"):
        _ = ours.gradient_state.remainder


def test_what_follows_from_the_run_cannot_be_set(ours: Accelerator) -> None:
    with pytest.raises(AttributeError, match="distributed_type cannot be set: it follows from the run; configure"):
        ours.state.distributed_type = "MULTI_GPU"  # type: ignore[misc]
    with pytest.raises(
        AttributeError, match=r"has no '_shared_state'; read the attributes of trainer\.accelerator\.state"
    ):
        _ = ours.state._shared_state


def test_the_arguments_of_the_accelerator_can_be_read_and_not_changed(tmp_path: Path) -> None:
    class Reads(Trainer):
        def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
            built = super()._build_accelerator_args(**kwargs)
            self.splits = built["dataloader_config"].split_batches
            return built

    class Splits(Reads):
        def _build_accelerator_args(self, **kwargs: object) -> dict[str, Any]:
            built = super()._build_accelerator_args(**kwargs)
            built["dataloader_config"].split_batches = True
            return built

    assert Reads(Regression(), arguments(tmp_path)).splits is False
    with pytest.raises(ConfigError, match=r"Splits._build_accelerator_args sets dataloader_config"):
        Splits(Regression(), arguments(tmp_path))
