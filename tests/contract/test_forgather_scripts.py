"""Scripts in Forgather's form run with changed imports, as processes that talk over sockets."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onstep.diloco import DiLoCoClient, DiLoCoServer
from tests.support.forked_processes import Child, Processes, held_port, output_of
from tests.support.waiting import until

pytestmark = pytest.mark.process

SCRIPTS = Path(__file__).parents[1] / "support" / "forgather_scripts"
PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "forgather.md"
JOBS = "tests.support.jobs.script_jobs"
WORKERS = ("one", "two")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts with the imports that the page says."""
    table = dict(re.findall(r"^\| `(forgather[\w.]*)` \| `([\w.]+)` \|$", PAGE.read_text(), re.MULTILINE))
    directory = tmp_path_factory.mktemp("scripts")
    for script in SCRIPTS.glob("*.py"):
        text = re.sub(
            r"^from (forgather[\w.]*)", lambda found: f"from {table[found[1]]}", script.read_text(), flags=re.M
        )
        (directory / script.name).write_text(text)
    return directory


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Where servers keep their tokens, for this process and those that it starts."""
    found = {"ONSTEP_DILOCO_TOKENS": str(tmp_path / "tokens")}
    monkeypatch.setenv(*found.popitem())
    return {"ONSTEP_DILOCO_TOKENS": str(tmp_path / "tokens")}


def names_of(script: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a script defines."""
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    return SimpleNamespace(**runpy.run_path(str(script)))


def printed(directory: Path, pattern: str) -> list[Any]:
    text = "".join(path.read_text() for path in sorted(directory.glob("rank-*.out")))
    return re.findall(pattern, text, re.MULTILINE)


# a trainer alone


def train(processes: Processes, scripts: Path, place: Path, output: Path, **environment: str) -> int:
    settings = {"script": str(scripts / "train.py"), "arguments": [str(output)], "environment": environment}
    return processes.run(JOBS, "script", place, settings)[0]


def plain_training(script: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and final weights of a loop in plain PyTorch."""
    model, rows = script.make_model(), script.make_rows()
    groups = [[], []]
    for name, parameter in model.named_parameters():
        groups["norm" in name].append(parameter)
    optimizer = torch.optim.SGD(
        [{"params": groups[1], "lr": script.RATE / 2}, {"params": groups[0]}], lr=script.RATE, weight_decay=0.0
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses, size = [], script.BATCH
    for step in range(script.STEPS):
        total = 0.0
        for micro in range(script.ACCUMULATION):
            start = (step * script.ACCUMULATION + micro) * size
            ids = torch.stack([row["input_ids"] for row in rows[start : start + size]])
            loss = model(input_ids=ids, labels=ids).loss / script.ACCUMULATION
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def test_the_trainer_script_trains_as_plain_pytorch_and_survives_being_killed(
    processes: Processes, scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(processes, scripts, tmp_path / "a", whole) == 0, output_of(tmp_path / "a")
    script = names_of(scripts / "train.py", monkeypatch)
    losses, weights = plain_training(script)
    steps = printed(tmp_path / "a", r"^step (\d+) ([\d.]+) (\d+)$")
    assert [float(loss) for _, loss, _ in steps] == pytest.approx(losses, abs=1e-6)
    assert {int(tokens) for *_, tokens in steps} == {script.BATCH * script.ACCUMULATION * 11}
    found = load_file(whole / f"checkpoint-{script.STEPS}" / "model.safetensors")
    for name, value in weights.items():
        if name in found:  # tied weights are there once
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    records = json.loads((whole / "logs" / "trainer_logs.json").read_text())
    assert [one["injected"] for one in records if "loss" in one] == list(range(1, script.STEPS + 1))
    assert {"weight_norm", "tok_per_sec"} <= {key for one in records for key in one}
    files = ("logs/gradient_norms.json", "logs/parameter_norms.json", "logs/events*", "profiles/*")
    assert [pattern for pattern in files if not list(whole.glob(pattern))] == []

    assert train(processes, scripts, tmp_path / "b", killed, KILL_AT="5") == -9
    assert train(processes, scripts, tmp_path / "b2", killed) == 0, output_of(tmp_path / "b2")
    again = printed(tmp_path / "b2", r"^step (\d+) ([\d.]+) (\d+)$")
    assert again == steps[3:]
    resumed = load_file(killed / f"checkpoint-{script.STEPS}" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in resumed.items())


# a server and two workers


class Site:
    """A server and its workers, each a process."""

    def __init__(
        self, processes: Processes, scripts: Path, place: Path, environment: dict[str, str], port: int
    ) -> None:
        self.processes, self.scripts, self.place = processes, scripts, place
        self.address = f"127.0.0.1:{port}"
        self.environment = {**environment, "DILOCO_SERVER": self.address}
        self.children: list[Child] = []

    def start(self, script: str, name: str, *arguments: str, **environment: str) -> Child:
        settings = {
            "script": str(self.scripts / script),
            "arguments": arguments,
            "environment": self.environment | environment,
        }
        child = self.processes.start(JOBS, "script", self.place / name, settings)[0]
        self.children.append(child)
        return child

    def worker(self, name: str, steps: int, place: str = "", **environment: str) -> Child:
        output = str(self.place / "runs" / name)
        variables = {"DILOCO_WORKER_ID": name, **environment}
        return self.start("diloco_worker.py", place or name, output, str(steps), **variables)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait as long as everything lives."""
        until(
            is_so,
            lambda: f"waiting for {what}: {self.said()}",
            while_true=lambda: all(child.is_alive for child in self.children),
        )

    def said(self) -> str:
        return "".join(output_of(path) for path in self.place.iterdir() if path.is_dir())[-6000:]

    def final(self, name: str) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = torch.load(self.place / "runs" / name / "final.pt")
        return weights


@pytest.fixture
def site(
    processes: Processes, scripts: Path, tmp_path: Path, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    names_of(scripts / "diloco_worker.py", monkeypatch).make_model().save_pretrained(tmp_path / "model")
    with held_port() as port:
        found = Site(processes, scripts, tmp_path / "site", tokens, port)
        try:
            found.start("diloco_server.py", "server", str(tmp_path / "model"), str(port))
            found.until(lambda: bool(printed(found.place / "server", "^serving")), "the server")
            yield found
        finally:
            for child in found.children:
                child.end()


@contextmanager
def operator(site: Site) -> Iterator[DiLoCoClient]:
    with DiLoCoClient(site.address) as client:
        yield client


def plain_rounds(script: Any, rounds: int, steps: int) -> dict[str, Tensor]:
    """DiLoCo in plain PyTorch: two workers on every other sample each, and an outer optimizer step of their mean."""
    rows = torch.stack([row["input_ids"] for row in script.make_rows()])
    shared = script.make_model()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(rounds):
        moved = []
        for slot in range(2):
            local = script.make_model()
            local.load_state_dict(shared.state_dict())
            optimizer = torch.optim.SGD(local.parameters(), lr=script.RATE)
            for step in range(number * steps, (number + 1) * steps):
                ids = rows[slot::2][2 * step : 2 * step + 2]
                optimizer.zero_grad()
                local(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
            moved.append([parameter.detach() for parameter in local.parameters()])
        for parameter, *theirs in zip(shared.parameters(), *moved, strict=True):
            parameter.grad = parameter.detach() - torch.stack(theirs).mean(0)
        outer.step()
    return {name: value.detach() for name, value in shared.named_parameters()}


def test_a_server_and_two_workers_train_as_plain_pytorch_one_of_them_killed(
    site: Site, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.worker("one", 8)
    second = site.worker("two", 8, SAVE_STEPS="5", KILL_AT="6")
    assert second.wait(600) == -9, site.said()
    site.children.remove(second)
    again = site.worker("two", 8, "two again", SAVE_STEPS="5")
    assert [first.wait(600), again.wait(600)] == [0, 0], site.said()
    assert printed(site.place / "two again", r"^step (\d+)$")[0] == "6"
    with operator(site) as client:
        assert client.get_status()["sync_round"] == 2
        client.control("shutdown")
    assert site.children[0].wait(600) == 0
    expected = plain_rounds(names_of(scripts / "diloco_worker.py", monkeypatch), rounds=2, steps=4)
    for name, value in expected.items():
        assert torch.equal(site.final("one")[name], site.final("two")[name])
        torch.testing.assert_close(site.final("one")[name], value, rtol=0, atol=2e-6)
    assert list((site.place.parent / "model" / "checkpoints").glob("checkpoint-*"))


def test_an_operators_save_and_stop_reach_all_workers(site: Site) -> None:
    workers = [site.worker(name, 100_000) for name in WORKERS]
    with operator(site) as client:
        site.until(lambda: client.get_status()["sync_round"] >= 1, "a round")
        client.control("command", {"command": "save"})
        site.until(lambda: all(printed(site.place / name, r"^saved") for name in WORKERS), "two saves")
        client.control("command", {"command": "graceful_stop"})
        assert [one.wait(600) for one in workers] == [0, 0], site.said()
        client.control("shutdown")
    assert site.children[0].wait(600) == 0
    assert all(int(printed(site.place / name, r"^step (\d+)$")[-1]) < 100_000 for name in WORKERS)


def test_a_loop_of_ones_own_and_a_client(
    processes: Processes, scripts: Path, tmp_path: Path, tokens: dict[str, str]
) -> None:
    with DiLoCoServer(nn.Linear(3, 1), num_workers=1, port=0) as server:
        settings = {
            "script": str(scripts / "diloco_loop.py"),
            "arguments": [server.address, "mine"],
            "environment": tokens,
        }
        assert processes.run(JOBS, "script", tmp_path / "loop", settings) == [0], output_of(tmp_path / "loop")
    assert printed(tmp_path / "loop", r"^syncs .*|^beat .*|^round .*") == ["syncs 1 local 3", "beat ok", "round 3"]
