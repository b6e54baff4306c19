"""`train.deterministic`: what it sets for the time of a run, what it refuses, and that nothing built in needs more."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from onstep.cli.verify_resume import advice, varies
from onstep.config import ConfigContainer, resolve
from onstep.config.differences import changes
from onstep.config.section import ChangeClass
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.models import Transformer
from onstep.models.generation.context_window import token_losses
from onstep.models.generation.generate import generate
from onstep.training import pretrain
from onstep.training.lifecycle.determinism import CUBLAS, only_deterministic
from onstep.training.verification.comparison import Difference
from tests.support.refused_operations import RefusesAsCuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def settings() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return *flags, cudnn.deterministic, cudnn.benchmark, filled, os.environ.get(CUBLAS)


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CUBLAS, "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)


def test_everything_is_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = settings()
        with only_deterministic(CPU):
            assert settings() == (True, False, True, False, False, ":4096:8")
        assert settings() == before
        assert before[:2] == (True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_setting_of_cublas_is_kept_if_it_is_deterministic_and_refused_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS, ":16:8")
    with only_deterministic(CPU):
        assert os.environ[CUBLAS] == ":16:8"
    assert os.environ[CUBLAS] == ":16:8"
    monkeypatch.setenv(CUBLAS, ":0:0")
    with pytest.raises(ConfigError, match="got ':0:0'; unset it"), only_deterministic(CPU):
        pass
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_process_whose_cublas_started_otherwise_is_told_what_to_set() -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError(f"not deterministic because it uses CuBLAS ... you must set {CUBLAS}=:4096:8")

    before = settings()
    with pytest.raises(ConfigError, match=f"start it with {CUBLAS}=:4096:8"), only_deterministic(GPU, refuse):
        pass
    assert settings() == before


def test_another_error_of_the_gpu_is_shown_as_it_is() -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert")

    with pytest.raises(RuntimeError, match="device-side assert"), only_deterministic(GPU, fail):
        pass


@pytest.mark.parametrize(("certify", "chosen", "expected"), [(True, None, True), (True, False, False)])
def test_it_holds_during_a_certified_run_unless_it_is_off(
    tiny_config: ConfigContainer, certify: bool, chosen: bool | None, expected: bool
) -> None:
    seen: set[bool] = set()
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: seen.add(torch.are_deterministic_algorithms_enabled()))
    tiny_config.checkpoint.certify, tiny_config.train.deterministic = certify, chosen
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 4, None
    pretrain(tiny_config, callbacks=manager)
    assert seen == {expected}
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_such_an_algorithm_names_the_key() -> None:
    with pytest.raises(RuntimeError) as caught, only_deterministic(CPU):
        torch.empty(2).put_(torch.tensor([0]), torch.ones(1))
    assert "set train.deterministic=false" in caught.value.__notes__[0]


def test_a_change_is_one_of_the_trajectory(tiny_config: ConfigContainer) -> None:
    stored, current = resolve(tiny_config), resolve(tiny_config)
    assert stored.train.deterministic is False
    current.train.deterministic = True
    [change] = changes(stored, current)
    assert (change.key, change.kind) == ("train.deterministic", ChangeClass.TRAJECTORY)


def test_a_stored_argument_of_an_earlier_version_is_the_key(tiny_config: ConfigContainer) -> None:
    stored = resolve(tiny_config).to_dict()
    del stored["train"]["deterministic"]
    stored["trainer"] = {"full_determinism": True}
    tiny_config.train.deterministic = True
    assert not [one for one in changes(stored, resolve(tiny_config)) if one.kind is not ChangeClass.SAFE]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_moe_experts": 4}, {"mtp_num_layers": 1}, {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0}],
    ids=["dense", "experts", "multi-token", "capacity"],
)
def test_training_uses_no_operation_that_a_gpu_would_refuse(
    tiny_config: ConfigContainer, options: dict[str, Any]
) -> None:
    for name, value in options.items():
        setattr(tiny_config.model, name, value)
    tiny_config.train.train_iters, tiny_config.train.deterministic = 4, True
    tiny_config.dataset.reset_attention_mask = True
    with RefusesAsCuda():
        state = pretrain(tiny_config)
    assert state.train_state.step == 4


def test_generation_and_scoring_use_none_either(tiny_config: ConfigContainer) -> None:
    config = resolve(tiny_config)
    config.model.vocab_size = 300
    model = Transformer(config.model)
    tokens = torch.randint(300, (2, 9))
    with RefusesAsCuda(), torch.no_grad():
        generate(model, tokens, max_new_tokens=4, top_p=0.8, top_k=20, repetition_penalty=1.2)
        assert token_losses(model, tokens).shape == (2, 8)


def test_the_emulation_refuses() -> None:
    losses = nn.CrossEntropyLoss()
    with RefusesAsCuda():
        for work in (lambda: torch.ones(3).cumsum(0), lambda: losses(torch.ones(2, 3, 4), torch.ones(2, 4).long())):
            with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                work()


@pytest.mark.parametrize(("item", "is_of_kernels"), [("loss", True), ("weights", True), ("samples", False)])
def test_a_difference_without_it_on_a_gpu_is_never_put_on_the_users_code(
    tiny_config: ConfigContainer, item: str, is_of_kernels: bool
) -> None:
    tiny_config.train.deterministic, tiny_config.dist.device = False, "cuda"
    said = advice(tiny_config, None, [], Difference(item, "a", "b", 3, 0))
    assert ("neither an error in the resume nor one in your code" in said) is is_of_kernels
    assert varies(tiny_config)


@pytest.mark.parametrize(("device", "deterministic"), [("cpu", False), ("cuda", None), ("cuda", True)])
def test_elsewhere_two_runs_are_to_be_equal(
    tiny_config: ConfigContainer, device: str, deterministic: bool | None
) -> None:
    tiny_config.train.deterministic, tiny_config.dist.device = deterministic, device
    assert not varies(tiny_config)
