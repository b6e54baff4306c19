"""The world of a process: what the environment says, and whose process group it is."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onstep import Callback, pretrain
from onstep.config import ConfigContainer, DistributedInitConfig
from onstep.distributed import World, open_world, world_size_from_environment
from onstep.errors import CollectiveAfterErrorError, ConfigError
from tests.support.forked_processes import Processes, held_port, output_of

JOBS = "tests.support.jobs.rank_jobs"
NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


CPU = DistributedInitConfig(device="cpu")


def test_a_world_of_one_has_a_group_which_goes_with_it() -> None:
    world = open_world(CPU)
    assert (world.rank, world.size, world.is_main, world.owns_group) == (0, 1, True, True)
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    world.close()
    assert not dist.is_initialized()
    world.close()


def test_a_run_of_one_rank_leaves_tracebacks_as_they_are(tiny_config: ConfigContainer) -> None:
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters, before = 1, 0, sys.excepthook
    hooks = []

    class Fails(Callback):
        def on_train_start(self, context: Any) -> None:
            hooks.append(sys.excepthook)
            raise ValueError("of the test")

    with pytest.raises(ValueError, match="of the test"):
        pretrain(tiny_config, callbacks=[Fails()])
    assert hooks == [before]
    assert sys.excepthook is before


@pytest.mark.distributed
def test_a_traceback_of_several_ranks_names_its_rank_once(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "tracebacks", tmp_path, {}, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)
    for rank in (0, 1):
        during, after_error, later, after = json.loads((tmp_path / f"result-{rank}.json").read_text())
        assert [during, after_error, later] == [f"[rank{rank}]: ValueError: seen"] * 3
        assert after == "ValueError: seen"


def test_one_rank_agrees_with_itself() -> None:
    world = open_world(CPU)
    try:
        assert world.agree([0, 1]) == [0, 1]
        assert world.gather("mine") == ["mine"]
        assert world.share({"a": 1}) == {"a": 1}
        assert world.sum(torch.ones(2)).tolist() == [1, 1]
        world.barrier()
    finally:
        world.close()


@pytest.mark.distributed
def test_after_an_error_a_rank_waits_for_nobody_until_it_begins_anew(processes: Processes, tmp_path: Path) -> None:
    first, second = processes.results(JOBS, "after_an_error", tmp_path, {"how": "error"})
    agreed = [1, 0, *[1] * 150, 1]
    assert first == {"refused": {}, "agreed": agreed}
    assert second["agreed"] == agreed
    names = ["agree", "gather", "gather_numbers", "broadcast", "share", "sum", "max", "barrier"]
    assert list(second["refused"]) == names
    assert all(
        re.match(f"World.{name} was called on rank 1 of 2 after ValueError; .*call it earlier", text)
        for name, text in second["refused"].items()
    )


@pytest.mark.distributed
@pytest.mark.parametrize("other", ["flags", "sum"])
def test_ranks_on_different_paths_do_not_agree(processes: Processes, tmp_path: Path, other: str) -> None:
    first, _ = processes.results(JOBS, "other_votes", tmp_path, {"other": other})
    assert re.match("rank 0 of 2 agrees on 2 flags, and another rank is at another collective", first)


@pytest.mark.distributed
def test_ranks_go_on_together_after_a_decided_exit(processes: Processes, tmp_path: Path) -> None:
    results = processes.results(JOBS, "after_an_error", tmp_path, {"how": "exit"})
    agreed = [1, 0, *[1] * 150, 1]
    assert results == [{"refused": {}, "agreed": agreed}] * 2


def test_one_rank_agrees_with_itself_also_after_an_error() -> None:
    world = World()
    with pytest.raises(KeyError), world.no_collectives_after_an_error():
        raise KeyError("x")
    assert world.agree([3]) == [1]
    assert world == World()


def test_an_error_that_was_handled_inside_is_forgotten_at_the_end() -> None:
    world = World(size=2)
    with world.no_collectives_after_an_error():
        with pytest.raises(KeyError), world.no_collectives_after_an_error():
            raise KeyError("x")
        with pytest.raises(CollectiveAfterErrorError, match="after KeyError"):
            world.barrier()
    with pytest.raises(ValueError, match="process group has not been init"):
        world.barrier()


def test_after_a_run_the_caller_can_make_a_group(tiny_config: ConfigContainer) -> None:
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 1, 0
    pretrain(tiny_config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_a_group_of_the_caller_is_used_and_left_alone(tiny_config: ConfigContainer) -> None:
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 1, 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs = dist.group.WORLD
        state = pretrain(tiny_config)
        assert not state.world.owns_group
        assert dist.group.WORLD is theirs
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_the_group_goes_also_when_the_run_fails(tiny_config: ConfigContainer) -> None:
    tiny_config.dataset.paths = ["/nowhere/at/all"]
    with pytest.raises(ValueError, match="nowhere"):
        pretrain(tiny_config)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "two"}, r"\$WORLD_SIZE must be an integer.*'two'.*unset"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, r"rank 2 of 2.*torchrun"),
        ({"WORLD_SIZE": "9" * 5_000}, r"\$WORLD_SIZE must be an integer of 32 bits.{0,200}$"),
        ({"LOCAL_RANK": "1e400"}, r"\$LOCAL_RANK must be an integer"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x", "RANK": "0"}, r"\$MASTER_PORT must be"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999", "RANK": "0"}, r"\$MASTER_PORT must"),
        ({"RANK": "1"}, r"rank 1 of 1.*torchrun"),
        ({"WORLD_SIZE": "0"}, r"rank 0 of 0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, r"\$MASTER_ADDR is not set.*torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost"}, r"\$MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, r"\$RANK is not set"),
    ],
)
def test_a_broken_environment_is_refused_with_help(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        open_world(CPU)


def test_a_rank_that_waits_in_vain_names_the_key_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_port() as port:
        place = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            ConfigError, match=r"rank 0 has not met .*dist\.distributed_timeout_minutes=0\.0005: .*start all"
        ):
            open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.0005))


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        ("0", "address already in use"),
        pytest.param("1", "does not answer, and may be another program", marks=pytest.mark.slow),
    ],
)
def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch, rank: str, reason: str) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        said = rf"^rank {rank} cannot join .* \$MASTER_PORT={port}: .*{reason}; pass the address of .* a free port"
        with pytest.raises(ConfigError, match=said):
            open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.005))


def test_the_number_of_ranks_is_known_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_size_from_environment() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world_size_from_environment() == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dist\.device=cuda requires a CUDA GPU.*dist\.device=cpu"):
        open_world(DistributedInitConfig(device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPU 99, but torch sees"):
        open_world(DistributedInitConfig(device="cuda:99"))
