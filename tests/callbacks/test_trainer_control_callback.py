"""A running job is watched and steered over HTTP; what it is asked for is applied after one step and recorded."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from onstep import CallbackManager, JsonLogger, Trainer, TrainerCallback, TrainingArguments, pretrain
from onstep.callbacks import EarlyStopping, TrainerControlCallback
from onstep.config import ConfigContainer
from onstep.control.registry import list_infos, read_info, read_token
from onstep.errors import ConfigError
from onstep.record import read_records
from tests.support.waiting import PATIENCE, until

JOB = "job-under-test"


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="onstep-") as directory:  # a short path, for Unix sockets
        monkeypatch.setenv("ONSTEP_REGISTRY", f"{directory}/registry")
        yield


class Driver:
    """What a client does while the job runs, in a thread of its own; an error in it fails the test."""

    def __init__(self, talk: Callable[[httpx.Client], None]) -> None:
        self._talk, self._error = talk, None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with connected() as client:
                try:
                    self._talk(client)
                finally:
                    with suppress(httpx.TransportError):  # the job may have ended
                        client.post(f"/jobs/{JOB}/control", json={"command": "abort"})
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's own thread
            self._error = error

    def check(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if self._error is not None:
            raise self._error


def connected() -> httpx.Client:
    info = until(lambda: read_info(JOB))
    assert info is not None
    headers = {"Authorization": f"Bearer {read_token(JOB)}"}
    if info.uds is not None:
        return httpx.Client(transport=httpx.HTTPTransport(uds=info.uds), base_url=info.endpoint_url, timeout=PATIENCE)
    return httpx.Client(base_url=info.endpoint_url, headers=headers, timeout=PATIENCE, trust_env=False)


def send(client: httpx.Client, command: str, **data: Any) -> dict[str, Any]:
    """Send a command and wait for its outcome."""
    answer = client.post(f"/jobs/{JOB}/control", json={"command": command, "data": data, "wait": 15})
    assert answer.status_code == 200, answer.text
    ticket: dict[str, Any] = answer.json()["ticket"]
    assert ticket["status"] == "applied", ticket
    return ticket


def status(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(f"/jobs/{JOB}/status").json()
    return answer


@pytest.fixture
def steered(tiny_config: ConfigContainer, tmp_path: Path) -> Callable[..., Path]:
    """Train for long, talk to the job meanwhile, and return its directory."""

    def run(talk: Callable[[httpx.Client], None] | None, **arguments: Any) -> Path:
        config = tiny_config
        config.run.name, config.run.output_dir = "steered", str(tmp_path / "runs")
        config.train.train_iters, config.logger.log_interval = arguments.pop("steps", 1_000_000), 1000
        config.checkpoint.on_config_change = "apply"
        config.validation.eval_interval, config.checkpoint.save_interval = 1_000_000, 1_000_000
        config.dataset.seq_length = config.model.seq_length = 32
        config.model.num_layers, config.model.hidden_size, config.train.global_batch_size = 1, 16, 4
        manager = CallbackManager()
        manager.add(arguments.pop("callbacks", []))
        manager.add([JsonLogger(), TrainerControlCallback(JOB, port=arguments.pop("port", 0), **arguments)])
        driver = None if talk is None else Driver(talk)
        if driver is not None:
            driver.thread.start()
        pretrain(config, callbacks=manager)
        if driver is not None:
            driver.check()
        assert list_infos() == []
        assert not any(one.name.startswith("onstep-c") for one in threading.enumerate())
        return tmp_path / "runs" / "steered"

    return run


def decisions(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]


def test_each_command_is_applied_at_the_end_of_a_step_and_recorded_with_its_author(steered: Any) -> None:
    seen: dict[str, Any] = {}

    def talk(client: httpx.Client) -> None:
        first = status(client)
        assert first["status"] == "running"
        assert first["max_steps"] == 1_000_000
        seen["save"] = send(client, "save_checkpoint")
        assert Path(seen["save"]["result"]["checkpoint"]).is_dir()
        seen["set"] = send(client, "set", key="lr_factor", value=0.5)
        assert seen["set"]["result"] == {"key": "lr_factor", "old": 1.0, "value": 0.5}
        assert send(client, "set", key="log_interval", value=5.0)["result"]["value"] == 5
        assert "eval_loss" in send(client, "evaluate")["result"]
        seen["pause"] = send(client, "pause")
        now = status(client)
        assert (now["status"], now["overrides"]) == ("paused", {"lr_factor": 0.5, "log_interval": 5})
        time.sleep(0.3)
        assert status(client)["global_step"] == now["global_step"]
        send(client, "resume")
        send(client, "skip_batch", count=2)
        texts = send(client, "generate", prompts=["def "], max_new_tokens=3)["result"]
        assert texts[0]["prompt"] == "def "
        assert texts[0]["text"]
        seen["text"] = texts[0]
        events = client.get(f"/jobs/{JOB}/events", params={"kinds": "sample", "stream": 0}).json()["events"]
        assert [one["data"]["text"] for one in events] == [texts[0]["text"]]
        trace = Path(send(client, "profile", steps=2)["result"]["trace"])
        assert "traceEvents" in json.loads(trace.read_text())
        assert "pretrain" in send(client, "stacks")["result"]["rank 0"]
        seen["rollback"] = send(client, "rollback", step=None)
        assert seen["rollback"]["result"]["to_step"] == seen["save"]["step"]
        assert status(client)["overrides"]["lr_factor"] == 0.5
        send(client, "status")
        seen["stop"] = send(client, "graceful_stop")

    directory = steered(talk)
    samples = [json.loads(line) for line in (directory / "text_samples.jsonl").read_text().splitlines()]
    assert [(one["prompt"], one["text"]) for one in samples] == [(seen["text"]["prompt"], seen["text"]["text"])]
    abandoned = [one for one in read_records(directory / "record.branch-1.jsonl") if one["kind"] == "sample"]
    assert [(one["prompt"], one["text"]) for one in abandoned] == [(seen["text"]["prompt"], seen["text"]["text"])]
    entries = decisions(directory)
    by_id = {one["details"].get("command_id"): one for one in entries}
    assert by_id[seen["set"]["id"]]["step"] == seen["set"]["step"]
    assert "127.0.0.1" in by_id[seen["set"]["id"]]["author"]
    flags = [one["flag"] for one in entries]
    for flag in ("should_save", "set", "should_evaluate", "pause", "resume", "skip_batch", "command", "rolled_back"):
        assert flag in flags
    assert json.loads((directory / "run.json").read_text())["status"] == "stopped"


class SendsAt(TrainerCallback):
    """Sends commands over HTTP during a step, so that all of them are applied after it, and reads their outcomes."""

    def __init__(self, step: int, *commands: tuple[str, dict[str, Any]]) -> None:
        self.step, self.commands, self.ids, self.tickets = step, commands, [], {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step and not self.ids:
            with connected() as client:
                for command, data in self.commands:
                    answer = client.post(f"/jobs/{JOB}/control", json={"command": command, "data": data})
                    assert answer.status_code == 200, answer.text
                    self.ids.append(answer.json()["id"])

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with connected() as client:
            for (command, _), identity in zip(self.commands, self.ids, strict=True):
                self.tickets[command] = client.get(f"/jobs/{JOB}/commands/{identity}").json()
            self.latest = client.get(f"/jobs/{JOB}/status").json()


@pytest.mark.parametrize("stop", ["graceful_stop", "save_and_stop"])
@pytest.mark.parametrize("stops_first", [True, False])
def test_a_stop_sent_with_a_rollback_ends_the_run_after_it(steered: Any, stop: str, stops_first: bool) -> None:
    commands = [(stop, {}), ("rollback", {"step": 2})]
    saves, sends = SendsAt(2, ("save_checkpoint", {})), SendsAt(4, *(commands if stops_first else commands[::-1]))
    directory = steered(None, callbacks=[saves, sends], steps=8)
    assert json.loads((directory / "run.json").read_text())["status"] == "stopped"
    assert {one["status"] for one in sends.tickets.values()} == {"applied"}
    assert [one["flag"] for one in decisions(directory)][-2:] == ["rolled_back", "saved"]
    assert json.loads((directory / "run.json").read_text())["step"] == 2


def test_values_of_steps_that_are_rolled_back_are_no_longer_shown(steered: Any) -> None:
    class Once(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = state.global_step == 3 and not sends.ids

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.global_step == 3:
                logs["only_at_3"] = 1.0

    saves, sends = SendsAt(2, ("save_checkpoint", {})), SendsAt(4, ("rollback", {"step": 2}), ("graceful_stop", {}))
    steered(None, callbacks=[saves, Once(), sends], steps=8)
    assert "only_at_3" not in sends.latest


def test_what_cannot_be_done_after_the_last_step_is_not_answered_as_applied(steered: Any) -> None:
    values = ("set", {"key": "lr_factor", "value": 0.5})
    sent = [
        ("pause", {}),
        ("profile", {"steps": 1}),
        values,
        ("skip_batch", {}),
        ("evaluate", {}),
        ("save_checkpoint", {}),
    ]
    sends = SendsAt(4, *sent, ("graceful_stop", {}))
    directory = steered(None, callbacks=[sends], steps=4)
    outcomes = {command: one["status"] for command, one in sends.tickets.items()}
    assert outcomes == dict.fromkeys(outcomes, "applied") | dict.fromkeys(
        ("pause", "profile", "set", "skip_batch"), "refused"
    )
    assert "the run ends after this step" in sends.tickets["pause"]["message"]
    refused = [one["details"]["refused"] for one in decisions(directory) if one["flag"] == "refused"]
    assert sorted(refused) == ["pause", "set", "skip_batch"]
    assert not {"pause", "set", "skip_batch"} & {one["flag"] for one in decisions(directory)}


def test_a_value_is_set_at_the_last_step_of_a_run_that_is_lengthened_there(steered: Any) -> None:
    longer = ("set", {"key": "train_iters", "value": 5})
    sends = SendsAt(4, ("set", {"key": "lr_factor", "value": 0.5}), longer)
    directory = steered(None, callbacks=[sends], steps=4)
    sets = [one["details"]["key"] for one in decisions(directory) if one["flag"] == "set"]
    assert sets == ["train_iters", "lr_factor"]
    assert [one["status"] for one in sends.tickets.values()] == ["applied"]  # `set` twice: the last ticket


def test_a_pause_that_is_taken_back_in_its_step_is_applied(steered: Any) -> None:
    sends = SendsAt(2, ("pause", {}), ("resume", {}))
    directory = steered(None, callbacks=[sends], steps=4)
    assert [one["status"] for one in sends.tickets.values()] == ["applied", "applied"]
    assert [one["flag"] for one in decisions(directory)][:2] == ["pause", "resume"]


@pytest.mark.parametrize("door", ["pretrain", "Trainer"])
@pytest.mark.parametrize("command", ["save_checkpoint", "save_and_stop"])
def test_a_save_is_evaluated_first_where_the_best_checkpoint_is_loaded_at_the_end(
    steered: Any, tiny_config: ConfigContainer, tmp_path: Path, door: str, command: str
) -> None:
    sends, rows = SendsAt(3, (command, {})), [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 8
    if door == "pretrain":
        tiny_config.checkpoint.load_best_model_at_end = tiny_config.checkpoint.save_at_end = True
        directory = steered(None, callbacks=[sends], steps=4) / "checkpoints"
    else:
        arguments = TrainingArguments(
            output_dir=str(directory := tmp_path / "trained"),
            max_steps=4,
            eval_strategy="steps",
            eval_steps=1000,
            save_steps=1000,
            load_best_model_at_end=True,
        )
        callbacks = [sends, TrainerControlCallback(JOB, port=0)]
        Trainer(Line(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks).train()
    assert sends.tickets[command]["status"] == "applied"
    (manifest,) = [json.loads(one.read_text()) for one in directory.rglob("manifest.json") if "3" in one.parent.name]
    assert "eval_loss" in manifest["metrics"]


def test_pretrain_serves_the_job_where_the_configuration_says_so(tiny_config: ConfigContainer) -> None:
    manager, seen = CallbackManager(), []
    manager.register("on_step_end", lambda context: (seen.extend(list_infos()), context.control.stop()))
    tiny_config.run.control = True
    pretrain(tiny_config, callbacks=manager)
    assert len(seen) == 1
    assert list_infos() == []


def test_what_cannot_be_done_is_refused_with_the_reason(steered: Any) -> None:
    def refused(client: httpx.Client, code: int, command: str, **data: Any) -> str:
        answer = client.post(f"/jobs/{JOB}/control", json={"command": command, "data": data, "wait": 10})
        assert answer.status_code == code, answer.text
        return str(answer.json()["error"])

    def talk(client: httpx.Client) -> None:
        assert "not paused" in refused(client, 409, "resume")
        assert "Did you mean 'lr_factor'" in refused(client, 400, "set", key="lr_facto", value=1.0)
        assert "must be a number >= 0" in refused(client, 400, "set", key="lr_factor", value=-1.0)
        assert "would end the run" in refused(client, 409, "set", key="train_iters", value=1)
        assert "Did you mean 'pause'" in refused(client, 400, "pauze")
        ticket = client.post(f"/jobs/{JOB}/control", json={"command": "rollback", "wait": 15}).json()["ticket"]
        assert ticket["status"] == "refused"
        assert "no verified checkpoint" in ticket["message"]

    steered(talk)


def test_checkpoints_that_a_rollback_has_put_aside_are_not_shown(steered: Any) -> None:
    def talk(client: httpx.Client) -> None:
        first = send(client, "save_checkpoint")["result"]["step"]
        second = send(client, "save_checkpoint")["result"]["step"]
        send(client, "pause")
        assert status(client)["checkpoints"] == [first, second]
        send(client, "rollback", step=first)
        assert status(client)["checkpoints"] == [first]

    steered(talk)


def test_curves_end_at_the_step_that_a_rollback_went_back_to(steered: Any) -> None:
    def curve(client: httpx.Client, name: str) -> list[int]:
        return client.get(f"/jobs/{JOB}/metrics", params={"names": name}).json()["series"][name]["step"]

    def talk(client: httpx.Client) -> None:
        send(client, "set", key="log_interval", value=1)
        first = send(client, "save_checkpoint")["result"]["step"]
        until(lambda: status(client)["global_step"] >= first + 3)
        send(client, "pause")
        assert curve(client, "loss")[-1] > first
        send(client, "rollback", step=first)
        losses = curve(client, "loss")
        assert max(losses, default=0) <= first
        assert curve(client, "rss_bytes[0]")
        send(client, "resume")
        until(lambda: status(client)["global_step"] >= first + 2)
        send(client, "pause")
        assert curve(client, "loss") == sorted(set(curve(client, "loss")))

    steered(talk)


def test_a_resumed_job_shows_the_checkpoints_it_found(steered: Any) -> None:
    saved: list[int] = []

    def save_twice(client: httpx.Client) -> None:
        saved.extend(send(client, "save_checkpoint")["result"]["step"] for _ in range(2))

    def look(client: httpx.Client) -> None:
        assert status(client)["checkpoints"][:2] == saved

    steered(save_twice)
    steered(look, steps=2_000_000)


def test_a_socket_that_only_its_owner_can_open_takes_the_place_of_the_port(steered: Any) -> None:
    def talk(client: httpx.Client) -> None:
        assert status(client)["status"] == "running"
        info = read_info(JOB)
        assert info is not None
        assert info.uds is not None
        assert Path(info.uds).stat().st_mode & 0o777 == 0o600
        assert read_token(JOB) is None

    steered(talk, uds=True, port=None)


def test_the_feed_has_what_the_metrics_log_has(steered: Any) -> None:
    seen: dict[str, Any] = {}

    def talk(client: httpx.Client) -> None:
        send(client, "set", key="log_interval", value=1)
        step = send(client, "status")["step"]
        until(lambda: status(client)["global_step"] >= step + 5)
        send(client, "pause")
        seen["metrics"] = client.get(f"/jobs/{JOB}/metrics", params={"names": "loss"}).json()
        seen["status"] = status(client)

    directory = steered(talk)
    records = json.loads((directory / "trainer_logs.json").read_text())
    losses = {one["global_step"]: one["loss"] for one in records if "loss" in one}
    series = seen["metrics"]["series"]["loss"]
    assert len(series["step"]) >= 5
    assert all(losses[step] == value for step, value in zip(series["step"], series["value"], strict=True))
    assert seen["status"]["memory"][0]["rss_bytes"] > 1e6


def test_a_second_live_job_of_the_same_name_is_refused_before_it_trains(steered: Any, tmp_path: Path) -> None:
    def talk(client: httpx.Client) -> None:
        callback = TrainerControlCallback(JOB, port=0)
        with pytest.raises(ConfigError, match="is running"):
            callback._server.open(callback.feed, callback.inbox, {})

    steered(talk)


def test_a_trainer_is_steered_the_same_way(tmp_path: Path) -> None:
    rows = [{"x": torch.tensor([float(number)]), "labels": torch.tensor([2.0 * number])} for number in range(8)]
    seen: dict[str, Any] = {}

    def talk(client: httpx.Client) -> None:
        assert "eval_loss" in send(client, "evaluate")["result"]
        assert send(client, "set", key="EarlyStopping.patience", value=7)["result"]["old"] == 3
        seen["patience"] = early.patience
        assert Path(send(client, "save_checkpoint")["result"]["checkpoint"]).parent == tmp_path / "out"
        seen["status"] = status(client)
        seen["records"] = client.get(f"/jobs/{JOB}/events", params={"kinds": "evaluation", "stream": 0}).json()
        send(client, "graceful_stop")

    early = EarlyStopping()
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=1_000_000, eval_strategy="steps", eval_steps=900_000, control=True
    )
    driver = Driver(talk)
    trainer = Trainer(
        Line(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[early, TrainerControlCallback(JOB, port=0)]
    )
    assert sum(isinstance(one, TrainerControlCallback) for one in trainer.callback_manager.callbacks) == 1
    driver.thread.start()
    trainer.train()
    driver.check()
    assert seen["patience"] == 7
    assert seen["status"]["output_dir"] == str(tmp_path / "out")
    assert len(seen["records"]["events"]) == 1


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"port": 70_000}, "port must be an integer from 0 to 65535"),
        ({"job_id": "../x"}, "job_id must have"),
        ({"uds": True, "port": 1}, "drop these, or uds"),
        ({"auth_token": "short"}, "16 to 4096"),
        ({"auth_token": "x" * 20, "disable_auth": True}, "no effect"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainerControlCallback(**arguments)
