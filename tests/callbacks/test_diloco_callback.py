"""A run with the callback is a worker: it trains on what the server gives it, and what it learns arrives there."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import Trainer, TrainerCallback
from onstep.callbacks import DiLoCoCallback
from onstep.diloco.client import DiLoCoClient, RefusedByServerError, ServerLostError
from onstep.diloco.protocol.messages import Settings, Submit
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.worker import DiLoCoWorker, first_contact
from onstep.errors import ConfigError
from tests.support.diloco.tls import make_tls_files
from tests.support.small_models import IGNORE, Regression, TokenModel, arguments, ragged_rows, regression_rows

OTHERS = ("CA_FILE", "TOKEN", "TOKEN_FILE")
VARIABLES = ("SERVER", "SYNC_EVERY", "WORKER_ID", "BF16_COMM", "DYLU", "HEARTBEAT_INTERVAL", "NUM_FRAGMENTS", "CODEC")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES + OTHERS:
        monkeypatch.delenv(f"DILOCO_{name}", raising=False)
    monkeypatch.setenv("ONSTEP_DILOCO_TOKENS", str(tmp_path / "tokens"))


def sgd(parameters: list[Tensor], lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def serve(sync_every: int = 3, codec: str = "fp32", outer_lr: float = 1.0) -> DiLoCoServer:
    settings = Settings(num_workers=1, min_workers=1, sync_every=sync_every, codec=codec)
    return DiLoCoServer(Regression(), settings=settings, outer_optimizer_factory=partial(sgd, lr=outer_lr), port=0)


def train(directory: Path, *callbacks: Any, seed: int = 0, resume: bool = False, **options: Any) -> nn.Module:
    values = {"max_steps": 6, "learning_rate": 0.1, "logging_steps": 1, "save_steps": 100} | options
    trainer = Trainer(
        Regression(seed=seed),
        arguments(directory, **values),
        train_dataset=regression_rows(16),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    model: nn.Module = trainer.model
    return model


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for name, value in one.named_parameters():
        torch.testing.assert_close(value, other.get_parameter(name), rtol=0, atol=tolerance)


class Logs(TrainerCallback):
    """What is logged, and the learning rates before each step."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_without_a_server_it_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onstep.callbacks.diloco_callback"):
        model = train(tmp_path, callback := DiLoCoCallback())
    assert not callback.active
    assert callback.state_dict() == {}
    assert "no-op" in caplog.text
    assert_close(model, train(tmp_path / "alone"), 0)


def test_without_a_server_the_environment_is_of_no_interest(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "often"):
        monkeypatch.setenv("DILOCO_SYNC_EVERY", text)
        assert not DiLoCoCallback().active
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "")
    one = DiLoCoCallback("here:1")
    assert (one.sync_every, one.bf16_comm, one.dylu, one.num_fragments) == (500, True, False, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "the server decides sync_every=3, codec=fp32 (by default sync_every=500, bf16_comm=True)"),
        ({"sync_every": 2}, "submits every 2 steps, the others every 3"),
        ({"bf16_comm": True}, "submits bf16 where the server's codec is fp32"),
        ({"dylu": True}, "dylu=True has no effect"),
        ({"sync_every": 3, "bf16_comm": False, "dylu": False, "num_fragments": 1}, None),
    ],
)
def test_a_worker_is_told_where_the_server_has_other_values(
    options: dict[str, Any], words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve() as server, caplog.at_level(logging.INFO, "onstep"):
        train(tmp_path, DiLoCoCallback(server.address, **options))
    told = [line for line in caplog.messages if "the server decides" in line or "this worker" in line or "dylu" in line]
    assert told == [] if words is None else any(words in line for line in told)


COMMANDED = {
    "save": (6, [2, 6]),
    "stop": (2, [2]),
    "save-stop": (2, [2]),
    "abort": (2, []),
}


@pytest.mark.parametrize("command", COMMANDED)
def test_an_operators_command_at_the_server_is_carried_out_by_the_worker(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.callbacks.diloco_callback")
    last, saved = COMMANDED[command]
    with serve(sync_every=100) as server:
        commander = Commander(server.address, command)
        callback = DiLoCoCallback(server.address, worker_id="w", heartbeat_interval=0.02)
        train(tmp_path, commander, callback)
    assert commander.last_step == last
    assert commander.saved == saved
    assert ("the checkpoint that the server asks for is that of step 2" in caplog.text) == (command == "save")


class Commander(TrainerCallback):
    """Gives a command in the second step, and waits in it until the worker has received it."""

    def __init__(self, address: str, command: str) -> None:
        self.address, self.command = address, command
        self.saved: list[int] = []
        self.last_step = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        with DiLoCoClient(self.address) as client:
            answer = client.control("command", {"command": self.command})
            assert answer["workers"] == ["w"]
            while client.get_status()["workers"]["w"]["command_number"] < answer["number"]:
                pass

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_step = state.global_step


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ("host:1", "7", "me", "No", "YES", "2.5", "4", "int4")
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.setenv(f"DILOCO_{name}", value)
    one = DiLoCoCallback()
    assert (one.server_addr, one.sync_every, one.worker_id, one.bf16_comm) == ("host:1", 7, "me", False)
    assert (one.dylu, one.heartbeat_interval, one.num_fragments, one.codec) == (True, 2.5, 4, "int4")
    assert one.active
    other = DiLoCoCallback("", 9, "you", True, False, 1.0, 2, codec="int8")
    assert (other.server_addr, other.sync_every, other.worker_id, other.bf16_comm) == ("", 9, "you", True)
    assert (other.dylu, other.heartbeat_interval, other.num_fragments, other.codec) == (False, 1.0, 2, "int8")
    assert not other.active
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "often")
    with pytest.raises(ConfigError, match=r"\$DILOCO_SYNC_EVERY must be a number, got 'often'"):
        DiLoCoCallback()


def test_a_worker_alone_trains_as_without_a_server_and_everything_arrives_there(tmp_path: Path) -> None:
    expected = train(tmp_path / "alone")
    with serve() as server:
        model = train(tmp_path, DiLoCoCallback(server.address), seed=7)
        assert server.sync_round == 2
        assert_close(model, expected)


def test_work_is_weighted_by_the_labels_that_were_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submits: list[Submit] = []
    submit = ServedRun.submit
    monkeypatch.setattr(ServedRun, "submit", lambda *given: submits.append(given[1]) or submit(*given))
    rows, settings = ragged_rows(12), Settings(num_workers=1, min_workers=1, sync_every=3)
    with DiLoCoServer(TokenModel(), settings=settings, port=0) as server:
        values = arguments(tmp_path, max_steps=6, per_device_train_batch_size=2)
        callbacks = [DiLoCoCallback(server.address)]
        Trainer(TokenModel(), values, train_dataset=rows, callbacks=callbacks, default_callbacks=False).train()
    assert sum(one.steps for one in submits) == 6
    assert sum(one.tokens for one in submits) == sum(int((row["labels"] != IGNORE).sum()) for row in rows)


def test_the_metrics_are_in_the_logs_whatever_the_order_of_the_callbacks(tmp_path: Path) -> None:
    with serve(codec="int8") as server:
        train(tmp_path, logs := Logs(), DiLoCoCallback(server.address, worker_id="w"))
    last = logs.logs[5]
    assert last["diloco/sync_count"] == 2
    assert last["diloco/version"] == 2
    assert last["diloco/contributors"] == 1
    assert 0 < last["diloco/quantization_error"] < 0.01
    assert last["diloco/last_send_mb"] > 0
    assert last["diloco/total_sync_time"] >= last["diloco/last_sync_time"] > 0
    assert logs.logs[4]["diloco/local_step"] == 2


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_run_that_resumes_within_a_cycle_continues_exactly(codec: str, tmp_path: Path) -> None:
    ends = []
    for interrupted in (False, True):
        with serve(sync_every=4, codec=codec) as server:
            directory = tmp_path / str(interrupted)
            if interrupted:
                with pytest.raises(ArithmeticError):
                    train(directory, DiLoCoCallback(server.address), Fail(at=7), save_steps=6, max_steps=9)
                model = train(directory, DiLoCoCallback(server.address), max_steps=9, seed=3, resume=True)
            else:
                model = train(directory, DiLoCoCallback(server.address), save_steps=6, max_steps=9)
            ends.append(model)
            assert server.sync_round == 3
    assert_close(ends[0], ends[1], 0)


class Fail(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            raise ArithmeticError("it fails")


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_joiner_continues_the_learning_rate_and_ends_with_the_run(scheduler: str, tmp_path: Path) -> None:
    options = {"lr_scheduler_type": scheduler, "max_steps": 9, "warmup_steps": 2}
    train(tmp_path / "alone", alone := Logs(), **options)
    with serve() as server:
        first = DiLoCoCallback(server.address, worker_id="first")
        train(tmp_path / "first", first, Stop(at=6), **options)
        train(tmp_path / "second", joiner := Logs(), DiLoCoCallback(server.address, worker_id="second"), **options)
        assert server.sync_round == 3
    assert joiner.rates == alone.rates[6:]


def test_a_joiner_that_resumes_continues_its_learning_rate(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "linear", "max_steps": 18, "warmup_steps": 2}
    train(tmp_path / "alone", alone := Logs(), **options)
    with serve() as server:
        train(tmp_path / "first", DiLoCoCallback(server.address, worker_id="first"), Stop(at=6), **options)
        joiner = DiLoCoCallback(server.address, worker_id="second")
        with pytest.raises(RuntimeError, match="of the test"):
            train(tmp_path / "second", began := Logs(), joiner, Crash(at=7), save_steps=6, **options)
        again = DiLoCoCallback(server.address, worker_id="second")
        train(tmp_path / "second", ended := Logs(), again, resume=True, **options)
    assert began.rates[:6] + ended.rates == alone.rates[6:]


class Weights(TrainerCallback):
    """The weights that checkpoints have, and those that were evaluated."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []

    def on_save_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.saved.append(torch.cat([one.detach().flatten() for one in model.parameters()]))


def test_the_last_steps_are_submitted_before_the_last_checkpoint(tmp_path: Path) -> None:
    with serve(outer_lr=0.5) as server:
        model = train(tmp_path, DiLoCoCallback(server.address), weights := Weights(), max_steps=5, save_steps=5)
        assert server.sync_round == 2
        newest = server.get_global_params()
        assert [one.shape for one in weights.saved] == [torch.cat([one.flatten() for one in newest.values()]).shape]
        assert torch.equal(
            weights.saved[0], torch.cat([newest[name].flatten() for name, _ in model.named_parameters()])
        )
    assert all(torch.equal(newest[name], one) for name, one in model.named_parameters())


class Preempt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_that_is_asked_to_stop_submits_the_steps_until_there(tmp_path: Path) -> None:
    with serve(outer_lr=0.5) as server:
        model = train(tmp_path, DiLoCoCallback(server.address), Stop(at=4))
        assert server.sync_round == 2
        newest = server.get_global_params()
    assert all(torch.equal(newest[name], one) for name, one in model.named_parameters())


def test_a_run_that_is_preempted_within_a_cycle_submits_nothing_and_resumes_exactly(tmp_path: Path) -> None:
    expected = train(tmp_path / "alone", max_steps=9)
    with serve() as server:
        with pytest.raises(SystemExit):
            train(tmp_path / "run", DiLoCoCallback(server.address), Preempt(), max_steps=9)
        assert server.sync_round == 1
        model = train(tmp_path / "run", DiLoCoCallback(server.address), max_steps=9, resume=True, seed=3)
        assert server.sync_round == 3
    assert_close(model, expected)


class Crash(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 >= self.at:
            raise RuntimeError("an error of the test")


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.at


class Samples(TrainerCallback):
    """The samples that were trained on."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def on_train_step_end(self, args: Any, state: Any, control: Any, sample_ids: Any = None, **kwargs: Any) -> None:
        self.ids += [sample for row in sample_ids for sample in row]


def test_workers_train_on_shares_of_the_data_and_a_successor_continues_its_share(tmp_path: Path) -> None:
    options = {"num_workers": 2, "min_workers": 1, "initial_deadline": 0.01, "patience": 1.0, "sync_every": 2}
    server = DiLoCoServer(Regression(), settings=Settings(codec="fp32", **options), outer_optimizer_factory=sgd, port=0)
    seen = {name: Samples() for name in ("one", "two", "three")}
    samples = {"per_device_train_batch_size": 1, "max_steps": 4}
    with server:
        train(tmp_path / "1", DiLoCoCallback(server.address, worker_id="one"), seen["one"], **samples)
        train(
            tmp_path / "2", DiLoCoCallback(server.address, worker_id="two"), seen["two"], **samples | {"max_steps": 8}
        )
        train(
            tmp_path / "3",
            DiLoCoCallback(server.address, worker_id="one"),
            seen["three"],
            **samples | {"max_steps": 12},
        )
    everything = seen["one"].ids + seen["two"].ids + seen["three"].ids
    assert len(everything) == len(set(everything)) == 12


class Evict(TrainerCallback):
    """Has the server evict the worker `one`, and give its share of the data to another."""

    def __init__(self, client: DiLoCoClient) -> None:
        self.client = client

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.client.control("kick_worker", {"worker_id": "one"})
            for name in ("two", "three"):
                self.client.register(name, parameters=dict(model.named_parameters()))
            self.client.control("kick_worker", {"worker_id": "two"})


def test_a_worker_whose_share_was_given_away_continues_with_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_workers": 2, "min_workers": 1, "initial_deadline": 0.01, "patience": 1.0, "sync_every": 2}
    made = {"settings": Settings(codec="fp32", **options), "outer_optimizer_factory": sgd, "port": 0}
    seen, samples = {name: Samples() for name in ("one", "x", "y")}, {"per_device_train_batch_size": 1}
    with DiLoCoServer(Regression(), **made) as server:
        for name, max_steps in (("x", 4), ("y", 8)):  # y joins at step 4
            callback = DiLoCoCallback(server.address, worker_id=name)
            train(tmp_path / name, callback, seen[name], max_steps=max_steps, **samples)
    with DiLoCoServer(Regression(), **made) as server, DiLoCoClient(server.address) as client:
        callback = DiLoCoCallback(server.address, worker_id="one")
        train(tmp_path / "one", callback, Evict(client), seen["one"], max_steps=8, **samples)
    assert seen["one"].ids == seen["x"].ids + seen["y"].ids
    assert "one was away, and another worker has its share of the data; it continues with share 1 of 2" in caplog.text


def test_a_server_with_a_certificate_of_its_own_is_trusted_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, settings = make_tls_files(tmp_path), Settings(num_workers=1, min_workers=1, sync_every=3)
    with DiLoCoServer(Regression(), settings=settings, port=0, tls=files, token="secret") as server:
        monkeypatch.setenv("DILOCO_TOKEN", "secret")
        with pytest.raises(ServerLostError, match="certificate verify failed"):
            train(tmp_path / "no", DiLoCoCallback(server.address, max_sync_retries=0, timeout=0.5))
        monkeypatch.setenv("DILOCO_CA_FILE", str(files.certificate))
        train(tmp_path / "yes", DiLoCoCallback(server.address))
        assert server.sync_round == 2


def test_a_successor_that_resumes_continues_its_data_where_its_checkpoint_is(tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 1, "max_steps": 12}
    alone, began, ended = Samples(), Samples(), Samples()
    train(tmp_path / "alone", alone, **options)
    with serve() as server:
        train(tmp_path / "first", DiLoCoCallback(server.address, worker_id="first"), Stop(at=3), **options)
        second = DiLoCoCallback(server.address, worker_id="second")
        with pytest.raises(RuntimeError, match="of the test"):
            train(tmp_path / "second", began, second, Crash(at=6), save_steps=4, **options)
        again = DiLoCoCallback(server.address, worker_id="second")
        train(tmp_path / "second", ended, again, resume=True, **options)
    assert began.ids == alone.ids[3:8]
    assert ended.ids == alone.ids[7:12]


def test_samples_of_steps_that_are_lost_with_an_old_checkpoint_come_again(tmp_path: Path) -> None:
    settings = Settings("sync", 2, 1, sync_every=3, codec="fp32", initial_deadline=0.01, patience=1.0)
    options = {"per_device_train_batch_size": 1, "max_steps": 30}
    began, ended = Samples(), Samples()
    with DiLoCoServer(Regression(), settings=settings, outer_optimizer_factory=sgd, port=0) as server:
        one = DiLoCoCallback(server.address, worker_id="a")
        with pytest.raises(RuntimeError, match="of the test"):
            train(tmp_path / "a", began, one, Crash(at=5), save_steps=4, **options)
        train(tmp_path / "b", DiLoCoCallback(server.address, worker_id="b"), Stop(at=3), **options)
        again = DiLoCoCallback(server.address, worker_id="a")
        train(tmp_path / "a", ended, again, Stop(at=5), resume=True, **options)
    assert ended.ids[0] == began.ids[3], "its first three steps were submitted, and the fourth is lost"


class Other(BaseHTTPRequestHandler):
    """A web server that knows nothing of workers."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def elsewhere(kind: str) -> Iterator[str]:
    """An address where no DiLoCo server is."""
    if kind == "web":
        with HTTPServer(("127.0.0.1", 0), Other) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"127.0.0.1:{server.server_port}"
            server.shutdown()
    else:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            if kind == "silent":
                bound.listen()
            yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("closed", ServerLostError, "no answer from the server.*is it running"),
        ("silent", ServerLostError, "no answer from the server.*did not answer within 0.2 s"),
        ("web", RefusedByServerError, "this is not a DiLoCo server \\(it sent text/html\\); give the address and port"),
    ],
)
@pytest.mark.parametrize("door", ["trainer", "worker"])
def test_nothing_is_built_without_the_server(
    kind: str, error: type[Exception], words: str, door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_contact, "ANSWER_SECONDS", 0.2)
    with elsewhere(kind) as address:
        options = {"train_dataset": regression_rows(), "model_init": never}
        callback = DiLoCoCallback(address, max_sync_retries=0)
        start = {
            "worker": DiLoCoWorker(Regression(), None, address, max_sync_retries=0).start,
            "trainer": Trainer(None, arguments(tmp_path), callbacks=[callback], **options).train,
        }
        with pytest.raises(error, match=words):
            start[door]()
    assert not (tmp_path / "run").exists()


def never() -> nn.Module:
    raise AssertionError("the model was built")


def test_a_server_that_starts_later_is_waited_for_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    servers: list[DiLoCoServer] = []
    with elsewhere("closed") as address:
        port = int(address.rpartition(":")[2])

    class Starts(logging.Handler):
        """Starts the server when the worker says that it waits."""

        def emit(self, record: logging.LogRecord) -> None:
            if "waiting at most" in record.getMessage():
                settings = Settings(num_workers=1, min_workers=1, sync_every=3)
                servers.append(DiLoCoServer(Regression(), settings=settings, port=port))
                servers[0].start()

    log, handler = logging.getLogger(first_contact.__name__), Starts()
    log.addHandler(handler)
    try:
        train(tmp_path, DiLoCoCallback(address))
    finally:
        log.removeHandler(handler)
        for server in servers:
            server.stop()
    assert "waiting at most 14 s for the server" in caplog.text
    assert servers[0].sync_round == 2


def their_trainer(directory: Path, seed: int, *callbacks: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        str(directory),
        max_steps=6,
        learning_rate=0.1,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        Regression(seed=seed), args, train_dataset=regression_rows(16), callbacks=list(callbacks)
    )


def test_after_an_exception_in_hugging_faces_trainer_the_next_training_replaces_the_worker(tmp_path: Path) -> None:
    with serve() as server, DiLoCoClient(server.address) as client:
        trainer = their_trainer(tmp_path, 5, DiLoCoCallback(server.address), failing := Fail(at=4))
        with pytest.raises(ArithmeticError):
            trainer.train()
        assert client.get_status()["num_registered"] == 1
        failing.at = 0
        trainer.train()
        counts = client.get_status()["counts"]
        assert (counts["joins"], counts["departures"], counts["contributions"]) == (2, 2, 2)
        assert not [one.name for one in threading.enumerate() if one.name == "diloco-heartbeat"]


def test_it_works_in_hugging_faces_own_trainer(tmp_path: Path) -> None:
    alone = their_trainer(tmp_path / "alone", 0)
    alone.train()
    with serve() as server:
        trainer = their_trainer(tmp_path / "worker", 5, DiLoCoCallback(server.address), logs := Logs())
        trainer.train()
        assert server.sync_round == 2
    assert_close(trainer.model, alone.model)
    assert [one["diloco/sync_count"] for one in logs.logs] == [0, 0, 1, 1, 1, 2, 2]


def test_a_worker_for_which_no_share_is_free_does_not_train_on_the_samples_of_another(tmp_path: Path) -> None:
    samples = {"per_device_train_batch_size": 1, "max_steps": 4}
    settings = Settings(codec="fp32", num_workers=1, sync_every=2)
    with DiLoCoServer(Regression(), settings=settings, port=0) as server, DiLoCoClient(server.address) as client:
        client.register("first", parameters=dict(Regression().named_parameters()))
        with pytest.raises(ConfigError, match="all 1 shares of the data are taken, so 'second' would train on"):
            train(tmp_path / "2", DiLoCoCallback(server.address, worker_id="second"), Samples(), **samples)
        client.control("kick_worker", {"worker_id": "first"})
        train(tmp_path / "3", DiLoCoCallback(server.address, worker_id="second"), Samples(), **samples)
        assert server.sync_round == 2
