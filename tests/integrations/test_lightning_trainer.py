"""A LightningModule on Onstep's loop, without Lightning: hooks, schedulers, logs, refusals, kill and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from onstep import TrainerCallback, TrainingArguments
from onstep.errors import ConfigError
from onstep.integrations.lightning import LightningDataModule, LightningModule, LightningTrainer
from onstep.integrations.lightning.definitions import CALLED, REFUSED
from tests.support.forked_processes import Processes
from tests.support.lightning_modules import configured, loaders, net_of

JOBS = "tests.support.jobs.lightning_jobs"
Net = net_of(LightningModule)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(**changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {"num_train_epochs": 2, "eval_strategy": "epoch", "logging_steps": 1, "max_grad_norm": 0}
    return TrainingArguments("run", save_strategy="no", use_cpu=True, **{**given, **changes})


def trained(module: Any, *data: Any, **changes: Any) -> LightningTrainer:
    torch.manual_seed(0)
    trainer = LightningTrainer(module, arguments(**changes), *(data or loaders()), default_callbacks=False)
    trainer.train()
    return trainer


def logged(trainer: LightningTrainer, name: str) -> list[float]:
    return [one[name] for one in trainer.state.log_history if name in one]


def test_weights_and_metrics_are_those_of_a_loop_by_hand(in_tmp: Path) -> None:
    torch.manual_seed(1)
    module, (train, validation) = Net("none"), loaders()
    by_hand = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
    by_hand.load_state_dict(module.layers.state_dict())
    trainer = trained(module, train, validation)
    optimizer, losses = torch.optim.AdamW(by_hand.parameters(), lr=0.05), []

    def loss_of(batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(by_hand(batch[0]).squeeze(-1), batch[1])

    for _ in range(2):
        for batch in train:
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    for ours, theirs in zip(module.layers.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert logged(trainer, "train_loss_step") == losses
    assert logged(trainer, "train_loss_epoch") == pytest.approx([sum(losses[:12]) / 12, sum(losses[12:]) / 12])
    with torch.no_grad():
        parts = [(loss_of(batch).item(), len(batch[0])) for batch in validation]
    assert logged(trainer, "val_loss")[-1] == pytest.approx(sum(a * b for a, b in parts) / 18)
    assert logged(trainer, "val_worst")[-1] == max(loss for loss, _ in parts)
    assert logged(trainer, "val_batches") == [5.0, 5.0]
    assert trainer.evaluate()["val_loss"] == logged(trainer, "val_loss")[-2]


class Calls(LightningModule):
    """Notes which of its methods are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.calls: list[str] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.calls.append("training_step")
        return self.layer(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls.append("validation_step")

    def configure_optimizers(self) -> Any:
        return configured("step", torch.optim.SGD(self.parameters(), lr=0.1), 4)


def noting(name: str) -> Any:
    def hook(self: Any, *args: Any) -> Any:
        self.calls.append(name)
        return args[0] if name == "on_after_batch_transfer" else None

    return hook


NOTED = [one for one in CALLED if one not in ("training_step", "validation_step", "on_load_checkpoint")]
AllHooks = type("AllHooks", (Calls,), {name: noting(name) for name in NOTED})


def test_hooks_are_called_in_the_order_of_lightning(in_tmp: Path) -> None:
    module: Any = AllHooks()
    trained(module, DataLoader(torch.ones(4, 1), 2), DataLoader(torch.ones(2, 1), 2), num_train_epochs=1)
    assert set(NOTED) <= {*module.calls, "on_save_checkpoint"}  # saved at the end alone
    batch = ["on_after_batch_transfer", "on_train_batch_start", "training_step", "on_before_zero_grad"]
    batch += ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "lr_scheduler_step"]
    validation = ["on_validation_start", "on_validation_epoch_start", "on_after_batch_transfer"]
    validation += ["on_validation_batch_start", "validation_step", "on_validation_batch_end"]
    expected = ["on_fit_start", "on_train_start", "on_train_epoch_start"]
    expected += 2 * [*batch, "on_train_batch_end"]
    expected += [*validation, "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"]
    assert [one for one in module.calls if one != "on_save_checkpoint"] == [*expected, "on_train_end", "on_fit_end"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_nothing_would_call_is_refused_with_what_to_do(name: str) -> None:
    kind = type("Defines", (Calls,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=f"Defines defines {name}, which LightningTrainer does not call"):
        LightningTrainer(kind())


def test_the_page_names_every_hook_that_is_called_or_refused() -> None:
    page = Path(__file__).parents[2].joinpath("docs/coming-from/lightning.md").read_text()
    assert not [name for name in (*CALLED, *REFUSED) if f"`{name}`" not in page]


def test_what_cannot_be_trained_is_refused_by_what_it_is(in_tmp: Path) -> None:
    manual: Any = type("Manual", (Calls,), {"automatic_optimization": False})
    with pytest.raises(ConfigError, match="sets automatic_optimization=False"):
        LightningTrainer(manual())
    with pytest.raises(ConfigError, match="Linear defines no training_step and no configure_optimizers"):
        LightningTrainer(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="pass an instance of a LightningModule"):
        LightningTrainer(Calls)
    theirs = type("ModelCheckpoint", (), {"__module__": "lightning.pytorch.callbacks"})
    with pytest.raises(ConfigError, match="ModelCheckpoint is a callback of Lightning"):
        LightningTrainer(Calls(), callbacks=[theirs()])
    with pytest.raises(ConfigError, match="no training data; pass train_dataloaders or a datamodule"):
        LightningTrainer(Calls(), arguments(eval_strategy="no")).train()
    with pytest.raises(ConfigError, match="eval_strategy='epoch' requires a validation_step and a loader for it"):
        LightningTrainer(Calls(), arguments(), loaders()[0]).train()
    with pytest.raises(ConfigError, match="gives a dict of loaders; return one"):
        LightningTrainer(Calls(), arguments(eval_strategy="no"), {"a": loaders()[0]}).train()
    with pytest.raises(ConfigError, match="pass one of them"):
        LightningTrainer(Calls(), None, loaders()[0], datamodule=LightningDataModule())
    with pytest.raises(ConfigError, match="LightningTrainer trains and validates; pass the module"):
        LightningTrainer(Calls()).predict([])


FORMS = {
    "2 optimizers": lambda a, b: [a, b],
    "NoneType without an optimizer": lambda a, b: None,
    "returned LBFGS": lambda a, b: torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]),
    "without a monitor": lambda a, b: ([a], [torch.optim.lr_scheduler.ReduceLROnPlateau(a)]),
    "the keys warmup": lambda a, b: {"optimizer": a, "lr_scheduler": {"scheduler": b, "warmup": 1}},
    "interval='batch'": lambda a, b: configured_with(a, interval="batch"),
    "frequency=0": lambda a, b: configured_with(a, frequency=0),
}


def configured_with(optimizer: Any, **keys: Any) -> Any:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **keys}}


@pytest.mark.parametrize("said", FORMS)
def test_what_configure_optimizers_may_not_return_is_named(said: str, in_tmp: Path) -> None:
    class Other(Calls):
        def configure_optimizers(self) -> Any:
            return FORMS[said](*(torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)))

    with pytest.raises(ConfigError, match=said):
        trained(Other(), eval_strategy="no")


def test_a_plateau_scheduler_whose_metric_is_not_logged_is_named(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="ReduceLROnPlateau follows 'val_loss', which was not logged"):
        trained(Net("plateau"), eval_strategy="no")


def test_what_is_logged_twice_or_is_no_number_is_named(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Logs(Calls):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.log("loss", 1.0)
            self.log("shape", self.value)
            return super().training_step(batch)

    module: Any = Logs()
    module.value = torch.ones(2)
    batches: Any = DataLoader(torch.ones(4, 1), 2)
    with pytest.raises(ConfigError, match=r"self.log\('shape'\) was given a tensor of shape \(2,\)"):
        trained(module, batches, eval_strategy="no")
    module.value = 2
    trainer = trained(module, batches, eval_strategy="no")
    assert "self.log('loss') is not recorded, since the record has its own 'loss'" in caplog.text
    assert logged(trainer, "shape") == [2.0, 2.0, 2.0, 2.0]


class Data(LightningDataModule):
    """Two loaders for validation, made in `setup`."""

    def __init__(self, size: int) -> None:
        self.save_hyperparameters()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.train, self.validation = loaders(batch=self.hparams.size)

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return [self.validation, self.train]

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown")


def test_a_data_module_is_set_up_once_and_its_loaders_are_told_apart(in_tmp: Path) -> None:
    data = Data(size=8)
    trainer = LightningTrainer(Net("none"), arguments(), datamodule=data, default_callbacks=False)
    trainer.train()
    assert data.calls == ["prepare", "fit", "teardown"]
    assert data.trainer.num_training_batches == 6
    assert trainer.state.global_step == 12
    found = trainer.state.log_history[-2]
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= found.keys() | logged_names(trainer)


def logged_names(trainer: LightningTrainer) -> set[str]:
    return {name for one in trainer.state.log_history for name in one}


def test_the_trainer_of_a_module_has_lightnings_names(in_tmp: Path) -> None:
    class Asks(Net):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            my = self.trainer
            self.seen = [my.current_epoch, my.global_step, my.max_epochs, my.max_steps, my.num_training_batches]
            self.rates = [self.optimizers().param_groups[0]["lr"], *self.lr_schedulers().get_last_lr()]
            my.should_stop = True

    module = Asks("lists")
    trainer = trained(module, num_train_epochs=5)
    assert module.seen == [0, 12, 5, -1, 12]
    assert module.rates == [0.025, 0.025]
    assert trainer.state.global_step == 12
    with pytest.raises(AttributeError, match=r"self\.trainer has no fit_loop under Onstep's"):
        _ = module.trainer.fit_loop
    assert dict(module.hparams) == {"schedule": "lists", "lr": 0.05, "dropout": 0.0}


def test_hooks_at_the_end_of_an_epoch_find_its_own_values(in_tmp: Path) -> None:
    class Reads(Net):  # type: ignore[misc, valid-type]
        def on_train_epoch_end(self) -> None:
            self.log("train_seen", self.trainer.callback_metrics["train_loss_epoch"])

        def on_validation_epoch_end(self) -> None:
            self.log("val_seen", self.trainer.callback_metrics["val_loss"])

    trainer = trained(Reads())
    assert len(logged(trainer, "val_seen")) == 2
    assert logged(trainer, "val_seen") == pytest.approx(logged(trainer, "val_loss"), abs=1e-6)
    assert logged(trainer, "train_seen") == pytest.approx(logged(trainer, "train_loss_epoch"), abs=1e-6)


def test_a_validation_value_of_steps_and_epochs_has_both_of_lightnings_names(in_tmp: Path) -> None:
    class Both(Calls):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("seen", float(batch_idx), on_step=True, on_epoch=True)
            self.log("once", float(batch_idx), on_epoch=True)

    batches: Any = DataLoader(torch.ones(4, 1), 2)
    metrics = trained(Both(), batches, batches).model.trainer.callback_metrics
    assert metrics["seen"] == metrics["seen_epoch"] == 0.5
    assert "once_epoch" not in metrics
    metrics = trained(Both(), batches, [batches, batches]).model.trainer.callback_metrics
    assert metrics["seen/dataloader_idx_1"] == metrics["seen_epoch/dataloader_idx_1"] == 0.5


def test_the_best_weights_by_a_logged_metric_come_back(in_tmp: Path) -> None:
    class Best(TrainerCallback):
        weights: torch.Tensor

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, model: Any, **kwargs: Any) -> None:
            if state.best_metric is None or metrics["val_loss"] < state.best_metric:
                self.weights = model.layers[0].weight.detach().clone()

    args = arguments(num_train_epochs=4, metric_for_best_model="val_loss", load_best_model_at_end=True)
    args.save_strategy = "epoch"
    best, module = Best(), Net("none", lr=0.4)
    trainer = LightningTrainer(module, args, *loaders(), callbacks=[best], default_callbacks=False)
    trainer.train()
    assert trainer.state.best_metric == min(logged(trainer, "val_loss"))
    torch.testing.assert_close(module.layers[0].weight, best.weights, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["plateau", pytest.param("step", marks=pytest.mark.slow)])
def test_a_killed_training_ends_as_the_one_that_nobody_touched(
    processes: Processes, tmp_path: Path, schedule: str
) -> None:
    settings: dict[str, Any] = {"schedule": schedule}
    [whole] = processes.results(JOBS, "train", tmp_path / "whole", settings, ranks=1)
    for step in (5, 12, 30):
        assert processes.run(JOBS, "train", tmp_path / "killed", {**settings, "kills_at": step}) == [-9]
    [killed] = processes.results(JOBS, "train", tmp_path / "killed", settings, ranks=1)
    assert killed == {**whole, "first": 30}
    assert [one["seen"] for one in whole["log"] if "seen" in one] == [12.0, 24.0, 36.0]
    assert len([one for one in whole["log"] if "val_loss_seen" in one]) == 3


@pytest.mark.distributed
def test_two_ranks_train_as_one_and_resume_as_one(processes: Processes, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"schedule": "plateau", "dropout": 0.0, "shuffles": False}
    [one] = processes.results(JOBS, "train", tmp_path / "one", {**settings, "batch": 8}, ranks=1)
    two = processes.results(JOBS, "train", tmp_path / "two", settings, ranks=2)
    assert two[0]["weights"] == two[1]["weights"] == pytest.approx(one["weights"], abs=1e-6)
    for ours, theirs in zip(two[0]["log"], one["log"], strict=True):
        names = {"loss", "train_loss_step", "train_loss_epoch", "val_loss"} & ours.keys()
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-6)
    assert -9 in processes.run(JOBS, "train", tmp_path / "killed", {**settings, "kills_at": 8}, ranks=2)
    killed = processes.results(JOBS, "train", tmp_path / "killed", settings, ranks=2)
    assert killed == [{**one, "first": 8} for one in two]
