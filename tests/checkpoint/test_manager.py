"""Saves and loads of one process: all or nothing, on disk and in what they tell."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.checkpoint import (
    CheckpointManager,
    FileStore,
    ModelState,
    Operation,
    Retention,
    SavedCheckpoint,
    SaveRequest,
    SharingPattern,
    StateComponent,
    verify,
)
from onstep.checkpoint.catalog.discovery import verify_shown
from onstep.distributed import World
from onstep.errors import CheckpointError, ConfigError
from tests.support.small_checkpoints import Box, newest

GLOBAL, PER_RANK, REPLICATED = SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.REPLICATED


class Refusing(Box):
    """Fails at both ends."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("betas")


def box(key: str = "box", stateful: Box | None = None, required: bool = True, **content: Any) -> StateComponent:
    return StateComponent(key, stateful or Box(**content), GLOBAL, required=required)


def request(step: int, *components: StateComponent, **options: Any) -> SaveRequest:
    return SaveRequest(step, list(components) or [box(value=step)], {"train": {"lr": 0.1}}, **options)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root)) if root.exists() else []


def failing_store(fails: Callable[[Operation], bool]) -> FileStore:
    """A full disk for some operations."""

    def on_operation(operation: Operation) -> None:
        if fails(operation):
            raise OSError(errno.ENOSPC, "No space left on device")

    return FileStore(on_operation)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + 1))).square().sum().backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def make_training(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[StateComponent]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = [
        StateComponent("model", ModelState([model]), REPLICATED),
        StateComponent("optimizer", optimizer, REPLICATED),
    ]
    return model, optimizer, parts


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    model, optimizer, parts = make_training(seed=0)
    train(model, optimizer, 3)
    manager.save(SaveRequest(3, parts, {}))
    train(model, optimizer, 3)

    resumed, resumed_optimizer, resumed_parts = make_training(seed=1)
    report = manager.load(newest(manager), resumed_parts)
    train(resumed, resumed_optimizer, 3)
    assert torch.equal(weights(resumed), weights(model))
    assert (report.missing, report.unexpected, report.other_ranks) == ([], [], False)


def test_a_blocking_save_is_durable_when_it_returns_and_reported_once(tmp_path: Path) -> None:
    captured: list[tuple[SavedCheckpoint, str]] = []

    def note(saved: SavedCheckpoint) -> None:
        verify(saved.path)
        captured.append((saved, (tmp_path / "latest").read_text().strip()))

    manager = CheckpointManager(tmp_path, World(), run_id="run-1", on_durable=note)
    manager.save(request(7, metrics={"eval_loss": 0.0}, layout={"data": 1}, extra={"note": "x"}))
    assert captured == [
        (SavedCheckpoint(7, tmp_path / "checkpoint-7", {"eval_loss": 0.0}, {"note": "x"}), "checkpoint-7")
    ]
    assert not manager.is_saving
    manifest = verify(tmp_path / "checkpoint-7")
    assert (manifest.step, manifest.run_id, manifest.world_size) == (7, "run-1", 1)
    assert (manifest.config, manifest.layout, manifest.extra) == ({"train": {"lr": 0.1}}, {"data": 1}, {"note": "x"})
    assert manifest.versions["torch"] == torch.__version__
    assert names(tmp_path) == ["checkpoint-7", "latest"]


def test_two_components_of_one_key_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    with pytest.raises(ConfigError, match="2 components have the key 'box'"):
        manager.save(request(1, box(value=1), box(value=2)))
    assert names(tmp_path) == []


def test_a_group_that_the_run_does_not_have_is_a_config_error_even_for_an_optional_component(tmp_path: Path) -> None:
    part = StateComponent("p", Box(a=1), SharingPattern.PER_GROUP, process_group_name="pipeline", required=False)
    with pytest.raises(ConfigError, match=r"'pipeline' must be a group of this run \(data\)"):
        CheckpointManager(tmp_path, World(), groups={"data": None}).save(request(1, part))
    assert names(tmp_path) == []


@pytest.mark.parametrize("bad", [Refusing(), Box(value=object())], ids=["raises", "cannot save"])
def test_an_optional_component_that_fails_costs_one_warning_only(
    bad: Box, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1, box(value=1), box("extra", bad, required=False)))
    assert len(caplog.records) == 1
    assert "'extra'" in caplog.text
    assert list(verify(tmp_path / "checkpoint-1").components) == ["box"]


@pytest.mark.parametrize("bad", [Refusing(), Box(value=object())], ids=["raises", "cannot save"])
def test_a_required_component_that_fails_fails_the_save_and_leaves_nothing(bad: Box, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1))
    with pytest.raises(CheckpointError, match=r"step 2 failed.*needed"):
        manager.save(request(2, box(value=1), box("needed", bad)))
    assert names(tmp_path) == ["checkpoint-1", "latest"]


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    is_full = False
    store = failing_store(lambda operation: is_full and operation.kind == "write")
    manager = CheckpointManager(tmp_path, World(), store=store)
    manager.save(request(1))
    is_full = True
    with pytest.raises(CheckpointError, match="No space left on device"):
        manager.save(request(2))
    assert names(tmp_path) == ["checkpoint-1", "latest"]
    assert newest(manager).step == 1


def test_after_a_failed_save_a_run_that_continues_saves_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = {2}
    captured: list[int] = []
    store = failing_store(
        lambda operation: operation.kind == "fsync" and f"-{min(failing, default=0)}-" in str(operation.path)
    )
    manager = CheckpointManager(
        tmp_path, World(), store=store, on_save_error="continue", on_durable=lambda saved: captured.append(saved.step)
    )
    for step in (1, 2, 3):
        manager.save(request(step))
    assert captured == [1, 3]
    assert len(caplog.records) == 1
    assert "step 2" in caplog.text
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3", "latest"]


def test_a_save_that_has_no_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    petabyte = torch.zeros(1).expand(2**48)
    store = failing_store(lambda operation: operation.kind == "write")  # or the test would fill the disk to tell
    manager = CheckpointManager(tmp_path / "checkpoints", World(), store=store)
    with pytest.raises(CheckpointError, match=r"bytes free, but the checkpoint needs 1182"):
        manager.save(request(1, box(value=petabyte)))
    assert names(tmp_path) == []


def test_load_reports_what_is_missing_and_unexpected_and_skips_what_it_is_told_to(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1, box("a", value=1), box("b", value=2), box("c", value=3), box("d", value=4)))
    a, b, new = Box(value=0), Box(value=0), Box(value=0)
    report = manager.load(newest(manager), [box("a", a), box("b", b), box("new", new, required=False)], skip={"b", "d"})
    assert (report.missing, report.unexpected) == (["new"], ["c"])
    assert (a.content, b.content, new.content) == ({"value": 1}, {"value": 0}, {"value": 0})


def test_a_load_names_the_ranks_whose_state_was_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, World())
    part = StateComponent("extra", Box(value=1), PER_RANK, required=False)
    manager.save(request(1, part))
    info = newest(manager)
    of_two = replace(info, manifest=replace(info.manifest, world_size=2))  # of which the second could not save its own
    manager.load(of_two, [part])
    assert "no state of 'extra' for ranks [1]" in caplog.text


def test_a_required_component_that_the_checkpoint_lacks_is_an_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1, box("a", value=1)))
    with pytest.raises(CheckpointError, match=r"'new' of .*checkpoint-1 failed: it is required"):
        manager.load(newest(manager), [box("new", value=1)])


def test_a_component_that_is_there_and_fails_to_load_is_an_error_even_if_it_is_optional(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1, box("optimizer", value=1)))
    with pytest.raises(CheckpointError, match=r"'optimizer' of .* KeyError: 'betas'"):
        manager.load(newest(manager), [box("optimizer", Refusing(), required=False)])


def test_the_newest_checkpoint_with_a_flipped_byte_is_refused_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path, World())
    for step in (1, 2, 3):
        manager.save(request(step, box(value=torch.ones(8))))
    damaged = tmp_path / "checkpoint-3" / "box" / "box.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert newest(manager).step == 2
    assert "checkpoint-3" in caplog.text
    assert manager.newest(max_step=1).step == 1  # type: ignore[union-attr]


def test_retention_is_applied_after_each_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World(), retention=Retention(most_recent_k=2, keep_best_n=1))
    for step, loss in ((1, 3.0), (2, 0.0), (3, 2.0), (4, 1.0), (5, 4.0)):
        manager.save(request(step, metrics={"loss": loss}))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-5", "latest"]


def test_what_a_run_killed_after_a_save_could_not_delete_is_deleted_when_it_continues(tmp_path: Path) -> None:
    def manager(run_id: str) -> CheckpointManager:
        return CheckpointManager(tmp_path, World(), run_id=run_id, retention=Retention(most_recent_k=1))

    for step, run_id in enumerate(["other", "other", "own", "own", "own"], start=1):
        CheckpointManager(tmp_path, World(), run_id=run_id).save(request(step))
    (tmp_path / "checkpoint-5" / "box" / "state.json").write_text("{}")
    everything = names(tmp_path)
    assert newest(manager("other")).step == 4
    assert manager("own").newest(max_step=4).step == 4  # type: ignore[union-attr]
    assert names(tmp_path) == everything
    assert newest(manager("own")).step == 4
    assert names(tmp_path) == [name for name in everything if name != "checkpoint-3"]


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    captured: list[int] = []
    store = failing_store(lambda operation: operation.kind == "rename" and operation.path.name == "checkpoint-1")
    manager = CheckpointManager(
        tmp_path,
        World(),
        store=store,
        retention=Retention(most_recent_k=1),
        on_durable=lambda saved: captured.append(saved.step),
    )
    manager.save(request(1))
    manager.save(request(2))
    assert captured == [1, 2]
    assert "could not be deleted" in caplog.text


def test_the_best_checkpoint_is_one_that_is_verified(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World(), retention=Retention(metric="accuracy"))
    assert manager.best() is None
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        manager.save(request(step, metrics={"accuracy": accuracy}))
    assert manager.best().step == 2  # type: ignore[union-attr]
    (tmp_path / "checkpoint-2" / "box" / "state.json").write_text("{}")
    assert manager.best().step == 3  # type: ignore[union-attr]


def test_the_checkpoints_of_a_branch_that_is_left_are_kept_aside(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    for _ in range(2):
        for step in (1, 2, 3):
            manager.save(request(step))
        manager.set_aside_newer(1)
    assert names(tmp_path) == ["aside", "checkpoint-1", "latest"]
    for branch in ("branch-1", "branch-2"):
        assert names(tmp_path / "aside" / branch) == ["checkpoint-2", "checkpoint-3"]
        assert verify(tmp_path / "aside" / branch / "checkpoint-3").step == 3
    manager.set_aside_newer(1)
    assert names(tmp_path / "aside") == ["branch-1", "branch-2"], "no branch is made for nothing"


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, World())
    manager.save(request(1, box(value="first")))
    manager.save(request(1, box(value="second")))
    found = Box()
    manager.load(newest(manager), [box(stateful=found)])
    assert found.content == {"value": "second"}
    assert names(tmp_path) == ["checkpoint-1", "latest"]


def test_what_a_dead_save_has_left_is_swept_at_the_start(tmp_path: Path) -> None:
    CheckpointManager(tmp_path, World()).save(request(1))
    debris = tmp_path / ".tmp-checkpoint-2-0123abcd" / "box"
    debris.mkdir(parents=True)
    (debris / "box.safetensors").write_bytes(b"half")
    CheckpointManager(tmp_path, World()).newest()
    assert names(tmp_path) == ["checkpoint-1", "latest"]


def test_a_large_checkpoint_is_verified_under_a_bar_and_a_small_one_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointManager(tmp_path, World()).save(request(1))
    assert verify_shown(tmp_path / "checkpoint-1").step == 1
    assert capsys.readouterr().err == ""
    assert verify_shown(tmp_path / "checkpoint-1", bar_bytes=1).step == 1
    assert "verifying checkpoint-1: 100%" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_model_of_a_checkpoint_is_read_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, _, parts = make_training(seed=0)
    CheckpointManager(tmp_path, World()).save(SaveRequest(3, parts, {}))
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "checkpoint-3" / "model")), no_dist=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
