"""What a server does with its arguments where there is a saved run: the same continue it, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import SGD, Adam

from onstep.diloco.codec.specs import digest
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.store import Store
from onstep.errors import CheckpointError, ConfigError
from tests.support.diloco.raw_worker import RawWorker

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
TWO = Settings(num_workers=2, min_workers=1, sync_every=20, codec="int8", heartbeat_timeout=0.0)


def sgd(lr: float, momentum: float = 0.9, **more: Any) -> Callable[[list[Tensor]], SGD]:
    return lambda some: SGD(some, lr=lr, momentum=momentum, nesterov=True, **more)


def test_what_an_operator_changed_survives_a_restart_with_the_first_arguments(
    serve: Serve, worker: Worker, tmp_path: Path
) -> None:
    options = {"output_dir": tmp_path, "settings": TWO, "outer_optimizer_factory": sgd(0.7)}
    for _ in range(2):
        server = serve(**options)
        client = worker(server).client
        client.control("update_num_workers", {"num_workers": 3})
        client.control("update_optimizer", {"lr": 0.5, "momentum": 0.25})
        server.stop()
        again = serve(**options)
        found = worker(again).client.get_status()
        assert (found["num_workers"], found["outer_lr"], found["outer_momentum"]) == (3, 0.5, 0.25)
        assert again.settings.num_workers == 3
        again.stop()
    now = {"settings": replace(TWO, num_workers=3), "outer_optimizer_factory": sgd(0.5, 0.25)}
    assert worker(serve(output_dir=tmp_path, **now)).client.get_status()["outer_lr"] == 0.5  # what it has now


def test_a_changed_rate_is_what_the_next_round_is_made_with(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    options = {"output_dir": tmp_path, "settings": replace(TWO, num_workers=1, codec="fp32")}
    server = serve(**options)
    worker(server).client.control("update_optimizer", {"lr": 0.5, "momentum": 0.0})
    server.stop()
    one = worker(serve(**options))
    one.join()
    one.submit({name: torch.ones_like(each) for name, each in parameters.items()})
    assert torch.equal(one.get(1)[1]["head.bias"], parameters["head.bias"] - 0.5)


OTHER = {
    "sync_every": ({"settings": replace(TWO, sync_every=30)}, "sync_every is 20, got 30"),
    "num_workers": ({"settings": replace(TWO, num_workers=4)}, "num_workers is 2, got 4"),
    "codec": ({"settings": replace(TWO, codec="bf16")}, "codec is int8, got bf16"),
    "two": (
        {"settings": replace(TWO, codec="bf16", patience=3.0)},
        "codec is int8, got bf16; patience is 2.0, got 3.0",
    ),
    "rate": ({"outer_optimizer_factory": sgd(0.6)}, "outer lr is 0.7, got 0.6"),
    "decay": ({"outer_optimizer_factory": sgd(0.7, weight_decay=0.1)}, "outer weight_decay is 0, got 0.1"),
    "optimizer": ({"outer_optimizer_factory": lambda some: Adam(some, lr=0.7)}, "outer optimizer is SGD, got Adam"),
    "mode": ({"settings": replace(TWO, mode="async")}, "mode is sync, got async"),
}


@pytest.mark.parametrize(("options", "text"), OTHER.values(), ids=OTHER)
def test_other_arguments_are_refused_with_both_values_and_a_remedy(
    options: dict[str, Any], text: str, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    first = {"output_dir": tmp_path, "settings": TWO, "outer_optimizer_factory": sgd(0.7), "port": 0}
    DiLoCoServer(parameters, **first).stop()
    with pytest.raises(ConfigError, match=text) as refused:
        DiLoCoServer(parameters, **first | options)
    assert "another directory" in str(refused.value)
    can_change = "Adam" not in text and "mode" not in text
    assert ("--change-settings" in str(refused.value)) == can_change
    if can_change:
        DiLoCoServer(parameters, **first | options, change_settings=True).stop()
        DiLoCoServer(parameters, **first | options).stop()  # they are the run's now
        DiLoCoServer(parameters, **first).stop()  # and so are the first ones still, which change nothing
        with pytest.raises(ConfigError):
            DiLoCoServer(parameters, **first | {"settings": replace(TWO, blend=0.1)})
    else:
        with pytest.raises(ConfigError, match=text):
            DiLoCoServer(parameters, **first | options, change_settings=True)


def test_changed_settings_hold_until_they_are_changed_again(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    options = {"output_dir": tmp_path, "settings": replace(TWO, num_workers=1)}
    serve(**options).stop()
    changed = {"settings": replace(TWO, num_workers=1, codec="bf16"), "outer_optimizer_factory": sgd(0.5)}
    serve(output_dir=tmp_path, **changed, change_settings=True).stop()
    one = worker(serve(**options))
    assert one.join().settings.codec == "bf16"
    for number in range(2):
        one.submit({name: torch.ones_like(each) for name, each in parameters.items()}, number, number)
        ready = one.get(number + 1, have=number)[0]
    assert (ready.kind, ready.codec) == ("update", "bf16")
    assert one.client.get_status()["outer_lr"] == 0.5


def test_changes_are_what_the_run_is_started_with_from_then_on(serve: Serve, worker: Worker, tmp_path: Path) -> None:
    first = {"output_dir": tmp_path, "settings": TWO, "outer_optimizer_factory": sgd(0.7)}
    second = {**first, "settings": replace(TWO, codec="bf16", num_workers=4), "outer_optimizer_factory": sgd(0.5)}
    serve(**first).stop()
    serve(**second, change_settings=True).stop()
    server = serve(**second)
    worker(server).client.control("update_num_workers", {"num_workers": 5})
    server.stop()
    server = serve(**second)  # the same command again
    assert (server.settings.num_workers, server.settings.codec) == (5, "bf16")
    server.stop()
    server = serve(**first, change_settings=True)  # back to how it began
    found = worker(server).client.get_status()
    assert (found["num_workers"], found["codec"], found["outer_lr"]) == (2, "int8", 0.7)


def test_a_model_with_other_values_is_refused(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    options: dict[str, Any] = {"port": 0, "output_dir": tmp_path / "out"}
    save_file(parameters, tmp_path / "model.safetensors")
    DiLoCoServer(tmp_path / "model.safetensors", **options).stop()
    DiLoCoServer(parameters, **options).stop()  # the same values
    others = {name: one + 1 for name, one in parameters.items()}
    save_file(others, tmp_path / "other.safetensors")
    for given in (
        {"model": others},
        {"model": tmp_path / "other.safetensors"},
        {"model": parameters, "from_checkpoint": tmp_path / "other.safetensors"},
    ):
        with pytest.raises(ConfigError, match=r"model is parameters with hash .*, got .* another directory"):
            DiLoCoServer(**given, **options)
    save_file(others, tmp_path / "model.safetensors")  # the same path: the same command continues the run
    with pytest.raises(ConfigError, match="model is parameters"):
        DiLoCoServer(others, **options)
    server = DiLoCoServer(tmp_path / "model.safetensors", **options)
    server.stop()
    assert digest(server.get_global_params()) == digest(parameters)


def test_a_saved_run_continues_without_a_model(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    options = {"output_dir": tmp_path, "save_every_n_rounds": 0, "settings": replace(TWO, num_fragments=2)}
    server = serve(**options)
    run = server.run_id
    server.stop()
    again = DiLoCoServer(port=0, **options)
    again.stop()
    assert again.run_id == run
    assert digest(again.get_global_params()) == digest(parameters)
    with pytest.raises(CheckpointError):
        DiLoCoServer(port=0, output_dir=tmp_path / "nothing")


def test_a_server_that_was_killed_while_it_first_saved_starts_anew(
    parameters: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"port": 0, "output_dir": tmp_path, "settings": replace(TWO, num_fragments=2)}
    commit = Store.commit

    def killed(self: Store, fragment: int, *rest: Any) -> None:
        if fragment:
            raise KeyboardInterrupt
        commit(self, fragment, *rest)

    monkeypatch.setattr(Store, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        DiLoCoServer(parameters, **options)
    monkeypatch.undo()
    for _ in range(2):
        DiLoCoServer(parameters, **options).stop()


def test_an_operator_is_told_when_the_disk_refuses_a_change(
    serve: Serve, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(output_dir=tmp_path, settings=TWO, outer_optimizer_factory=lambda some: Adam(some, lr=0.7))
    client = worker(server).client

    def full(self: Store, rest: Any) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(Store, "save", full)
    with pytest.raises(ConnectionError, match=r"503.*No space"):
        client.control("update_num_workers", {"num_workers": 3})
    monkeypatch.undo()


def test_the_run_of_a_version_that_knew_several_servers_continues_if_it_had_one(serve: Serve, tmp_path: Path) -> None:
    serve(output_dir=tmp_path, settings=TWO).stop()
    for number in (1, 2):
        with closing(Store(tmp_path / "diloco")) as store:
            saved = store.load()
            assert saved is not None
            store.origin = {**saved.origin, "arguments": {**saved.origin["arguments"], "num_shares": number}}
            store.save({**saved.rest, "settings": {**saved.rest["settings"], "num_shares": number}})
        if number == 1:
            again = serve(output_dir=tmp_path, settings=TWO)
            assert again.settings == TWO
            again.stop()
        else:
            with pytest.raises(ConfigError, match=r"num_shares of the saved run must be 1, got 2; .* onstep 0\.5"):
                serve(output_dir=tmp_path, settings=TWO)


def test_a_run_whose_codec_is_gone_is_told_what_to_give(serve: Serve, tmp_path: Path) -> None:
    serve(output_dir=tmp_path, settings=TWO).stop()
    with closing(Store(tmp_path / "diloco")) as store:
        saved = store.load()
        assert saved is not None
        store.save({**saved.rest, "settings": {**saved.rest["settings"], "codec": "fp16"}})
    with pytest.raises(
        ConfigError, match=r"codec of the saved run must be one of fp32, .*, got 'fp16'; .*--change-settings"
    ):
        serve(output_dir=tmp_path, settings=TWO)
    again = serve(output_dir=tmp_path, settings=TWO, change_settings=True)
    assert again.settings.codec == TWO.codec
