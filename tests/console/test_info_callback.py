"""What is printed at the start of training."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from onstep.callbacks import InfoCallback


def model(tied: bool) -> nn.Module:
    body = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(8, 4))
    if tied:
        body[1].weight = body[0].weight
    body[2].bias.requires_grad = False
    return body


def printed(capsys: pytest.CaptureFixture[str], callback: InfoCallback, args: Any, state: Any, **kwargs: Any) -> str:
    callback.on_train_begin(args=args, state=state, control=None, **kwargs)
    return capsys.readouterr().out


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(InfoCallback).parameters.values()
    assert {parameter.name: parameter.default for parameter in parameters} == {"verbose": False, "brief": False}


def test_in_brief_it_prints_two_lines(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    state = make_state(max_steps=30, steps_per_epoch=20, num_processes=2, train_batch_size=4)
    assert printed(capsys, InfoCallback(brief=True), args, state, model=model(tied=False)) == (
        "model: 836 parameters, 400 in embeddings, 832 of them trained\n"
        "training: 30 steps of 16 samples, 1.5 epochs of 320 samples\n"
    )
    stage = model(tied=False)
    stage.whole_shapes = {"0.weight": (50, 8), "1.weight": (2000, 8)}  # type: ignore[assignment]
    said = printed(capsys, InfoCallback(brief=True), args, state, model=[stage])
    assert said.startswith("model: 836 of 16.4K parameters on this rank, 400 in embeddings, 832 of them trained\n")
    bare = SimpleNamespace(is_world_process_zero=True, max_steps=-1)
    assert printed(capsys, InfoCallback(brief=True), SimpleNamespace(), bare, model=None) == ""


def test_info_block(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    state = make_state(max_steps=30, steps_per_epoch=20, num_processes=2, train_batch_size=4)
    assert printed(capsys, InfoCallback(), args, state, model=model(tied=False)) == (
        "[INFO|info_logger] total_examples: 320\n"
        "[INFO|info_logger] total_train_samples: 480\n"
        "[INFO|info_logger] per_device_train_batch_size: 4\n"
        "[INFO|info_logger] actual_per_device_batch_size: 4\n"
        "[INFO|info_logger] total_train_batch_size: 16\n"
        "[INFO|info_logger] max_steps: 30\n"
        "[INFO|info_logger] total_parameters: 836\n"
        "[INFO|info_logger] trainable_parameters: 832\n"
        "[INFO|info_logger] embedding_parameters: 400\n"
        "[INFO|info_logger] non_embedding_parameters: 436\n"
        "[INFO|info_logger] tied_embeddings: False\n"
    )


def test_counts_of_the_trainer_go_before_those_of_whole_batches(
    capsys: pytest.CaptureFixture[str], args: Any, make_state: Any
) -> None:
    state = make_state(max_steps=30, steps_per_epoch=20, num_processes=2, num_examples=313, num_train_samples=471)
    text = printed(capsys, InfoCallback(), args, state)
    assert "total_examples: 313\n[INFO|info_logger] total_train_samples: 471\n" in text


def test_tied_parameters_count_once(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    text = printed(capsys, InfoCallback(), args, make_state(), model=[model(tied=True)])
    assert "total_parameters: 436\n" in text
    assert " embedding_parameters: 400\n" in text
    assert "non_embedding_parameters: 36\n" in text
    assert "tied_embeddings: True\n" in text


def test_large_counts_have_units(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    assert "total_parameters: 1M\n" in printed(capsys, InfoCallback(), args, make_state(), model=nn.Linear(1000, 1000))


def test_what_the_trainer_does_not_know_is_unavailable(capsys: pytest.CaptureFixture[str], args: Any) -> None:
    bare = SimpleNamespace(is_world_process_zero=True, max_steps=-1)
    text = printed(capsys, InfoCallback(), args, bare, model=None)
    for key in ("total_examples", "total_train_samples", "actual_per_device_batch_size", "total_parameters"):
        assert f"{key}: Unavailable\n" in text
    assert "per_device_train_batch_size: 4\n" in text


def test_verbose_adds_a_debug_block(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    args.note = "x" * 90
    text = printed(
        capsys, InfoCallback(verbose=True), args, make_state(), model=model(tied=False), lr_scheduler="the scheduler"
    )
    assert text.count("[INFO|info_logger]") == 11
    assert "[DEBUG|info_logger] lr_scheduler: 'the scheduler'\n" in text
    assert "[DEBUG|info_logger] optimizer: None\n" in text
    assert "lr_schedulerr" not in text
    assert "[DEBUG|info_logger] args:\n{" in text
    assert "}\n\n[DEBUG|info_logger] state:" in text
    assert "(0): Embedding(50, 8)" in text


def test_secrets_that_arguments_mask_stay_masked(capsys: pytest.CaptureFixture[str], make_state: Any) -> None:
    class Masking:
        hub_token = "secret"
        per_device_train_batch_size = 1
        gradient_accumulation_steps = 1

        def to_dict(self) -> dict[str, str]:
            return {"hub_token": "<HUB_TOKEN>"}

    text = printed(capsys, InfoCallback(verbose=True), Masking(), make_state())
    assert "<HUB_TOKEN>" in text
    assert "secret" not in text


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str], args: Any, make_state: Any) -> None:
    assert printed(capsys, InfoCallback(verbose=True), args, make_state(rank=1)) == ""


def test_two_instances_print_each_their_own_once(
    capsys: pytest.CaptureFixture[str], args: Any, make_state: Any
) -> None:
    InfoCallback()
    assert printed(capsys, InfoCallback(), args, make_state()).count("max_steps") == 1
