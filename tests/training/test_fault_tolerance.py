"""Sections of real runs, what is learned of them, and their client."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from onstep import Callback, pretrain
from onstep.config import ConfigContainer, FaultToleranceConfig, validate
from onstep.errors import ConfigError, MissingExtraError
from onstep.training.fault_tolerance.simulated_fault import plan_fault
from onstep.training.runs.stage import SectionLimits


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 18, 2
    tiny_config.checkpoint.save_interval = 6
    tiny_config.validation.eval_interval, tiny_config.validation.eval_iters = 9, 2
    tiny_config.run.save_weights = False
    tiny_config.ft.calc_ft_timeouts = True
    return tiny_config


def learned(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "run" / "checkpoints" / "ft_state.json").read_text())
    return content


def test_steps_are_learned_after_sixteen_and_saves_after_one(config: ConfigContainer, tmp_path: Path) -> None:
    seen = {}

    class Looks(Callback):
        def on_step_end(self, context: Any) -> None:
            path = tmp_path / "run" / "checkpoints" / "ft_state.json"
            seen[context.state.train_state.step] = set(learned(tmp_path)["limits"]) if path.exists() else set()

    state = pretrain(config, callbacks=[Looks()])
    assert seen[6] == set(), "nothing is saved before the end of the sixth step"
    assert seen[7] == {"checkpointing"}
    assert seen[18] == {"checkpointing"}
    assert set(learned(tmp_path)["limits"]) == {"checkpointing", "step"}, "no set-up: nothing was loaded"
    assert learned(tmp_path)["limits"]["step"] == max(60.0, 5 * learned(tmp_path)["longest"]["step"])
    assert state.rank_monitor_client is None


def test_a_start_that_loads_a_checkpoint_learns_the_rest_and_takes_up_what_is_known(
    config: ConfigContainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.train.exit_interval = 12
    pretrain(config)
    config.train.exit_interval, config.train.train_iters = None, 30
    config.checkpoint.on_config_change = "apply"
    path = tmp_path / "run" / "checkpoints" / "ft_state.json"
    before = learned(tmp_path)
    before["longest"]["checkpointing"] = before["limits"]["checkpointing"] = 1000.0
    path.write_text(json.dumps(before))
    limits = {}

    class Looks(Callback):
        def on_init_end(self, context: Any) -> None:
            limits["at start"] = dict(context.state.features.room(SectionLimits))

    pretrain(config, callbacks=[Looks()])
    assert limits["at start"]["checkpointing"] == 1000.0
    assert set(learned(tmp_path)["limits"]) == {"setup", "step", "checkpointing", "out_of_section"}
    assert learned(tmp_path)["limits"]["checkpointing"] == 5000.0
    assert capsys.readouterr().out.count("FT: closed.") == 2


def test_asynchronous_saves_do_not_tell_how_long_a_save_takes(config: ConfigContainer, tmp_path: Path) -> None:
    config.checkpoint.async_save = True
    pretrain(config)
    assert set(learned(tmp_path)["limits"]) == {"step"}


BROKEN = {
    "nothing": "",
    "half": "{",
    "a list": "[]",
    "no limits": '{"limits": 3}',
    "null": '{"limits": {"step": null}, "longest": {}}',
    "beyond floats": '{"limits": {"step": 1' + "0" * 290 + '}, "longest": {"step": 1e999}}',
    "longer than timers": '{"limits": {"step": 1e300}, "longest": {"step": 1e300}}',
    "a long integer": '{"limits": {"step": ' + "9" * 100_000 + "}}",
    "deep": "[" * 200_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_state_file_is_left_out_with_a_warning(
    config: ConfigContainer, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    config.train.train_iters = 3
    config.checkpoint.save = str(tmp_path / "saves")
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "ft_state.json").write_text(content)
    state = pretrain(config)
    assert state.train_state.step == 3
    assert "from scratch" in caplog.text
    assert len(caplog.text) < 10_000
    assert set(json.loads((tmp_path / "saves" / "ft_state.json").read_text())["limits"]) == {"checkpointing"}


def test_a_huge_state_file_is_left_out_unread(
    config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.train.train_iters, config.checkpoint.save = 3, str(tmp_path / "saves")
    (tmp_path / "saves").mkdir()
    with (tmp_path / "saves" / "ft_state.json").open("wb") as file:
        file.truncate(8 << 30)
    pretrain(config)
    assert "bytes, and at most" in caplog.text


class StandIn:
    """The client of `nvidia-resiliency-ext`, by the names of version 0.4.1; checks the order of calls as that does."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.open: set[str] = set()
        self.is_initialized = False
        StandIn.made.append(self)

    def init_workload_monitoring(self) -> None:
        assert not self.is_initialized
        self.is_initialized = True

    def shutdown_workload_monitoring(self) -> None:
        self.is_initialized = False

    def start_section(self, section: str) -> None:
        assert self.is_initialized
        assert section not in self.open
        self.open.add(section)
        self.calls.append(f"+{section}")

    def end_section(self, section: str) -> None:
        self.open.remove(section)
        self.calls.append(f"-{section}")

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        assert self.is_initialized
        self.calls.append((tuple(selected_sections or ()), calc_out_of_section))
        return True

    def state_dict(self) -> Mapping[str, Any]:
        return {"current_timeouts": {"section": {"step": 3.0}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls.append(dict(state))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("nvidia_resiliency_ext")
    module = types.ModuleType("nvidia_resiliency_ext.fault_tolerance")
    module.RankMonitorClient = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", package)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", module)
    monkeypatch.setattr(StandIn, "made", [])


@pytest.mark.usefixtures("installed")
def test_the_package_gets_the_sections_in_order(
    config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "somewhere")
    config.ft.enable_ft_package = True
    config.train.train_iters, config.checkpoint.save_interval = 3, 2
    config.validation.eval_interval, config.validation.eval_iters = 3, 2
    config.validation.eval_after_training = config.validation.eval_on_start = False
    pretrain(config)
    (client,) = StandIn.made
    step, save = ["+step", "-step"], ["+checkpointing", "-checkpointing", (("checkpointing",), False)]
    evaluation = step  # the first of its two batches is not timed
    closing = [(("checkpointing",), False)]
    assert client.calls == ["+setup", "-setup", *step, *save, *step, *evaluation, *save, *closing]
    assert not client.open
    assert not client.is_initialized
    assert learned(tmp_path) == {"current_timeouts": {"section": {"step": 3.0}}}
    config.train.train_iters, config.checkpoint.on_config_change = 4, "apply"
    pretrain(config)
    assert StandIn.made[1].calls[0] == {"current_timeouts": {"section": {"step": 3.0}}}


@pytest.mark.usefixtures("installed")
def test_an_error_disconnects_without_a_collective(config: ConfigContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "somewhere")
    config.ft.enable_ft_package = True

    class Fails(Callback):
        def on_step_end(self, context: Any) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        pretrain(config, callbacks=[Fails()])
    assert StandIn.made[0].calls == ["+setup", "-setup"]
    assert not StandIn.made[0].is_initialized


@pytest.mark.usefixtures("installed")
def test_without_its_launcher_the_package_is_refused(config: ConfigContainer) -> None:
    config.ft.enable_ft_package = True
    with pytest.raises(ConfigError, match="ft_launcher"):
        pretrain(config)


def test_without_the_package_the_error_says_how_to_install_it(
    config: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    config.ft.enable_ft_package = True
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[resiliency\]'"):
        pretrain(config)


def test_the_stand_in_has_the_names_of_the_package() -> None:
    theirs = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient
    for name in (one for one in vars(StandIn) if not one.startswith("_") and one != "made"):
        assert callable(getattr(theirs, name))


def test_a_fault_comes_between_the_delay_and_a_fifth_more_of_it() -> None:
    plans = [plan_fault(FaultToleranceConfig(simulated_fault_base_delay=10.0), 4, random.Random(i)) for i in range(300)]
    assert {rank for rank, _, _ in plans} == {0, 1, 2, 3}
    assert {kind for _, kind, _ in plans} == {"rank_killed", "rank_hung"}
    delays = [delay for _, _, delay in plans]
    assert 10.0 <= min(delays) < 10.2
    assert 11.8 < max(delays) <= 12.0
    chosen = FaultToleranceConfig(simulated_fault_rank=2, simulated_fault_type="rank_hung")
    assert plan_fault(chosen, 4, random.Random(0))[:2] == (2, "rank_hung")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulated_fault_rank": 2}, "ft.simulated_fault_rank=2 must be one of the ranks 0 to 1"),
        ({"watchdog_seconds": 0.5}, "ft.watchdog_seconds=0.5 must be at least 1"),
        ({"watchdog_seconds": None}, "ft.calc_ft_timeouts=True learns the limits of a watchdog"),
        ({"simulated_fault_type": "fire"}, "simulated_fault_type"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    config: ConfigContainer, changes: dict[str, Any], message: str
) -> None:
    config.train.micro_batch_size = 2
    for name, value in changes.items():
        setattr(config.ft, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config, 2)


@pytest.mark.parametrize("name", ["calc_ft_timeouts", "enable_ft_package"])
def test_learned_limits_need_a_directory(config: ConfigContainer, name: str) -> None:
    config.ft.calc_ft_timeouts = False
    setattr(config.ft, name, True)
    config.run.name = None
    config.run.save_weights = False
    with pytest.raises(ConfigError, match=f"ft.{name}=True keeps ft_state.json next to the checkpoints"):
        validate(config)
