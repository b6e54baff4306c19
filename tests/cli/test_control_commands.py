"""`onstep control`: each command against a real server, as a user types it."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.control import outcome
from onstep.cli.control.group import app
from onstep.cli.main import main
from onstep.control import JobInfo
from onstep.control.commands import CommandRefusedError
from onstep.control.registry import registry_root
from tests.support.steered_job import SteeredJob, commands_of, steered_job
from tests.support.waiting import until

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "registry"))
    monkeypatch.delenv("ONSTEP_CONTROL_TOKEN", raising=False)


@pytest.fixture
def job() -> Iterator[SteeredJob]:
    with steered_job() as found:
        yield found


def dead_job(job_id: str, **values: Any) -> None:
    directory = registry_root() / job_id
    directory.mkdir(parents=True, mode=0o700)
    info = JobInfo(job_id, "127.0.0.1", 1, 2**22 + 1, time.time() - 100, "runs/dead", **values)
    (directory / "endpoint.json").write_text(json.dumps(info.to_dict()))


def said(capsys: Captured, *words: str) -> str:
    """What a command prints that succeeds."""
    code = main(["control", *words])
    found = capsys.readouterr()
    assert (code, found.err) == (0, ""), found
    return found.out


def refused(capsys: Captured, *words: str) -> str:
    """The one line that a command prints that fails."""
    code = main(["control", *words])
    found = capsys.readouterr()
    assert (code, found.out) == (1, ""), found
    assert found.err.startswith("error: ")
    assert found.err.count("\n") == 1, found.err
    return found.err


def token_file(directory: Path, token: str | None) -> str:
    path = directory / "token"
    path.write_text(f"{token}\n")
    return str(path)


SENT: list[tuple[str, str, dict[str, Any]]] = [
    ("save", "save_checkpoint", {}),
    ("stop", "graceful_stop", {}),
    ("save-stop", "save_and_stop", {}),
    ("abort --force", "abort", {}),
    ("pause", "pause", {}),
    ("resume", "resume", {}),
    ("evaluate", "evaluate", {}),
    ("set lr_factor=0.5", "set", {"key": "lr_factor", "value": 0.5}),
    ("set lr_factor=none", "set", {"key": "lr_factor", "value": None}),
    ("skip --count 3", "skip_batch", {"count": 3}),
    ("rollback --step 40 --lr-factor 0.5 --force", "rollback", {"step": 40, "lr_factor": 0.5}),
    ("rollback --force", "rollback", {"step": None, "lr_factor": 1.0}),
    ("profile --steps 2", "profile", {"steps": 2}),
]


def test_a_command_is_sent_and_waited_for(job: SteeredJob, capsys: Captured) -> None:
    for words, _, _ in SENT:
        assert "applied at step 7" in said(capsys, *words.split(), "--wait")
    assert commands_of(job) == [(command, data) for _, command, data in SENT]


def test_a_command_is_acknowledged_without_waiting(job: SteeredJob, capsys: Captured) -> None:
    job.is_busy = True
    assert said(capsys, "save") == "Command save_checkpoint queued for execution\n"
    answer = json.loads(said(capsys, "stop", "--json"))
    assert (answer["success"], answer["data"]["command"]) == (True, "graceful_stop")


def test_results_are_printed(job: SteeredJob, capsys: Captured) -> None:
    assert said(capsys, "generate", "--prompt", "def ") == "generate: applied at step 7\ndef f():\n    return 1\n"
    assert said(capsys, "stacks").splitlines() == [
        "stacks: applied at step 7",
        "rank 0:",
        '  Thread "MainThread"',
        '    File "train.py", line 3',
    ]
    assert said(capsys, "profile", "--wait").endswith("\nruns/a/profile\n")
    assert json.loads(said(capsys, "stacks", "--json"))["data"]["result"]["rank 0"].startswith("Thread")
    assert job.applied[0].data == {"prompts": ["def "], "max_new_tokens": 64}


def test_a_command_of_a_callback_is_sent_by_its_name(job: SteeredJob, capsys: Captured) -> None:
    assert said(capsys, "send", "celebrate", "--wait") == "celebrate: applied at step 7\n"
    assert said(capsys, "send", "celebrate", "job_a", "--data", '{"how": "loudly"}', "--wait")
    assert commands_of(job) == [("celebrate", {}), ("celebrate", {"how": "loudly"})]
    assert "Unknown command: 'celebrat'" in refused(capsys, "send", "celebrat")
    for data in ("loudly", "[1]"):
        assert f"--data must be a JSON object, such as '{{\"n\": 1}}', got {data!r}" in refused(
            capsys, "send", "celebrate", "--data", data
        )


def test_a_result_cannot_control_the_terminal() -> None:
    assert list(outcome.result_lines({"a": ["x\x1b[2Jy", 1]})) == ["a:", "  x?[2Jy", "  1"]


def test_generate_requires_a_prompt(job: SteeredJob, capsys: Captured) -> None:
    assert main(["control", "generate"]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_a_refused_command_exits_with_1_and_says_why(capsys: Captured) -> None:
    def check(command: str, data: dict[str, Any]) -> None:
        raise CommandRefusedError("evaluate: the run has no evaluation data")

    with steered_job(check=check):
        assert "evaluate: the run has no evaluation data" in refused(capsys, "evaluate", "--wait")
        assert main(["control", "evaluate", "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert (answer["success"], "no evaluation data" in answer["message"]) == (False, True)


@pytest.mark.parametrize("command", ["abort", "rollback"])
def test_what_can_lose_work_asks_first(
    job: SteeredJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "no terminal to ask on; repeat the command with --force" in refused(capsys, command)
    for answer, code, sent in (("n\n", 1, 0), ("y\n", 0, 1)):
        with Terminal(answer, monkeypatch):
            assert main(["control", command]) == code
        until(partial(has_applied, job, sent))
        assert len(job.applied) == sent


def has_applied(job: SteeredJob, number: int) -> bool:
    return len(job.applied) >= number


class Terminal:
    """Standard input is a pseudo-terminal on which somebody has typed."""

    def __init__(self, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._typed, self._monkeypatch = typed, monkeypatch

    def __enter__(self) -> None:
        self._near, far = os.openpty()
        os.write(self._near, self._typed.encode())
        self._file = os.fdopen(far, "r")
        self._monkeypatch.setattr("sys.stdin", self._file)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        os.close(self._near)


def test_list_shows_running_jobs_first(job: SteeredJob, capsys: Captured) -> None:
    dead_job("job_0")
    heading, *lines = said(capsys, "list").splitlines()
    assert heading.split() == ["status", "job", "run", "host", "port", "pid", "started"]
    assert [line.split()[:3] for line in lines] == [["running", "job_a", "tiny"], ["dead", "job_0", "dead"]]
    assert lines[0].split()[3:6] == ["127.0.0.1", str(job.port), str(os.getpid())]
    jobs = json.loads(said(capsys, "list", "--json"))
    assert [(one["job_id"], one["alive"]) for one in jobs] == [("job_a", True), ("job_0", False)]


def test_list_says_that_the_state_of_another_machines_job_is_unknown(capsys: Captured) -> None:
    dead_job("job_far", hostname="node7.example")
    assert said(capsys, "list").splitlines()[1].startswith("on node7.example  job_far")


def test_an_empty_list_says_how_to_get_one(capsys: Captured) -> None:
    assert "onstep train --control" in said(capsys, "list")
    assert json.loads(said(capsys, "list", "--json")) == []


@pytest.mark.parametrize("words", [["job_a"], ["job"], ["tiny"], []])
def test_a_job_is_found_by_id_prefix_run_or_as_the_only_one(
    job: SteeredJob, capsys: Captured, words: list[str]
) -> None:
    dead_job("job_0")
    assert said(capsys, "status", *words).startswith("job_a: running in /somewhere/runs/tiny\n")


def test_a_job_must_be_named_when_several_run(job: SteeredJob, capsys: Captured) -> None:
    with steered_job("job_b", output_dir="/somewhere/runs/other"):
        assert "2 jobs are running, name one of them: job_b (other), job_a (tiny)." in refused(capsys, "pause")
        assert "'job' fits 2 jobs: job_b, job_a; give the whole id." in refused(capsys, "pause", "job")
        assert said(capsys, "pause", "other", "--wait")
    assert job.applied == []


def test_a_job_that_does_not_exist_is_named_with_the_nearest(job: SteeredJob, capsys: Captured) -> None:
    assert "there is no job 'jub_a'. Did you mean 'job_a'? Running: job_a." in refused(capsys, "pause", "jub_a")


def test_without_a_job_the_way_to_start_one_is_named(capsys: Captured) -> None:
    assert "no job is running; `onstep train --control` starts one" in refused(capsys, "pause")
    dead_job("job_0")
    assert "job_0 has ended: its process" in refused(capsys, "pause", "job_0")


def test_status_shows_what_the_job_does(job: SteeredJob, capsys: Captured) -> None:
    job.log(loss=2.5, learning_rate=3e-4)
    job.feed.update(memory=[{"rank": 0, "rss_bytes": 2**30, "peak_device_bytes": None}], checkpoints=[2, 4], epoch=0.5)
    assert said(capsys, "set", "lr_factor=0.5", "--wait")
    rows = dict(line.strip().split("  ", 1) for line in said(capsys, "status").splitlines()[1:])
    assert {name: text.strip() for name, text in rows.items()} == {
        "step": "8 of 100 (7.0%)",
        "epoch": "0.5",
        "loss": "2.5",
        "learning_rate": "0.0003",
        "speed": "2.5 steps/s",
        "time left": "0:01:33",
        "changed by hand": "lr_factor=0.5",
        "checkpoints": "2, 4",
        "memory": "rank 0: 1.07 GB",
    }
    assert json.loads(said(capsys, "status", "--json"))["loss"] == 2.5


def test_status_says_who_paused(job: SteeredJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "somebody")
    said(capsys, "pause", "--wait")
    assert said(capsys, "status").startswith("job_a: paused by somebody with onstep at 127.0.0.1 in ")


def test_set_lists_what_can_be_set(job: SteeredJob, capsys: Captured) -> None:
    for words in ([], ["job_a"]):
        heading, *lines = said(capsys, "set", *words).splitlines()
        assert heading.split()[:4] == ["key", "value", "configured", "minimum"]
        assert lines[0].split() == ["lr_factor", "1", "1", "0", "Multiplies", "the", "rate"]
    assert list(json.loads(said(capsys, "set", "--json"))) == ["lr_factor", "log_interval"]


def test_set_changes_several_values_or_none(job: SteeredJob, capsys: Captured) -> None:
    text = said(capsys, "set", "job_a", "lr_factor=5e-1", "log_interval=2", "--wait")
    assert text == "lr_factor=0.5: applied at step 7\nlog_interval=2 (it was 10): applied at step 7\n"
    assert len(job.applied) == 2
    message = refused(capsys, "set", "lr_factor=2", "log_intervall=3")
    assert "job_a has no value 'log_intervall' to set. Did you mean 'log_interval'?" in message
    assert len(job.applied) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr_factor=abc"], "lr_factor must be a number, or none for the configured value, got 'abc'."),
        (["lr_factor="], "got ''"),
        (["lr_factor=nan"], "got 'nan'"),
        (["lr_factor=1", "lr_factor=2"], "lr_factor is set twice"),
        (["job_a", "lr_factor", "0.5"], "write a value as lr_factor=0.5"),
    ],
)
def test_a_value_that_is_not_one_is_refused(job: SteeredJob, capsys: Captured, words: list[str], message: str) -> None:
    assert message in refused(capsys, "set", *words)


def test_a_remote_server_is_asked_with_a_token_from_a_file(job: SteeredJob, capsys: Captured, tmp_path: Path) -> None:
    remote = ["--remote", f"127.0.0.1:{job.port}", "--token-file", token_file(tmp_path, job.token)]
    assert said(capsys, "list", *remote).splitlines()[1].startswith("running  job_a")
    assert said(capsys, "pause", "--wait", *remote) == "pause: applied at step 7\n"
    with steered_job("job_b"):
        assert said(capsys, "status", *remote).startswith("job_a: paused")
        assert "job_a" in refused(capsys, "status", "job_b", *remote)


def test_a_remote_server_is_asked_with_a_token_from_the_environment(
    job: SteeredJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ["--remote", f"127.0.0.1:{job.port}"]
    assert "HTTP 401: authentication required (no token was given" in refused(capsys, "list", *remote)
    monkeypatch.setenv("ONSTEP_CONTROL_TOKEN", str(job.token))
    assert said(capsys, "list", *remote)


@pytest.mark.parametrize("words", [["--token", "sesame"], ["--token=sesame"]])
def test_a_token_is_not_accepted_as_an_argument(job: SteeredJob, capsys: Captured, words: list[str]) -> None:
    message = refused(capsys, "list", "--remote", f"127.0.0.1:{job.port}", *words)
    assert "other users see the arguments of a process" in message
    assert "--token-file FILE" in message
    assert "sesame" not in message


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":8900", "localhost:0", "localhost:99999", "http://a:80", "a@b:80", "::1:80"]
)
def test_an_address_that_is_not_one_is_refused(capsys: Captured, address: str) -> None:
    message = refused(capsys, "list", "--remote", address)
    assert "--remote must be HOST:PORT" in message
    assert repr(address) in message


def test_a_token_file_that_has_none_is_refused(capsys: Captured, tmp_path: Path) -> None:
    assert "belongs to --remote" in refused(capsys, "list", "--token-file", token_file(tmp_path, "x"))
    remote = ["--remote", "127.0.0.1:1", "--token-file"]
    assert "is empty" in refused(capsys, "list", *remote, token_file(tmp_path, ""))
    assert "single word" in refused(capsys, "list", *remote, token_file(tmp_path, "two\r\nlines"))
    assert "missing" in refused(capsys, "list", *remote, str(tmp_path / "missing"))


def test_cleanup_removes_dead_entries_and_old_directories(
    job: SteeredJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_job("job_0")
    dead_job("job_far", hostname="node7.example")
    for name, age in (("job_new", 0), ("job_old", 4000)):
        (registry_root() / name).mkdir(mode=0o700)
        os.utime(registry_root() / name, (time.time() - age, time.time() - age))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["control", "cleanup"]) == 1
    found = capsys.readouterr()
    assert found.out.splitlines() == ["job_0", "job_old"]
    assert "Remove the entries of 2 jobs?" in found.err
    assert said(capsys, "cleanup", "--force").splitlines()[-1] == "Removed 2 entries."
    assert sorted(path.name for path in registry_root().iterdir()) == ["job_a", "job_far", "job_new"]
    assert said(capsys, "cleanup", "--force") == "Nothing to remove.\n"
    monkeypatch.setenv("ONSTEP_ORPHAN_JOB_DIR_TTL_SECONDS", "soon")
    assert "ONSTEP_ORPHAN_JOB_DIR_TTL_SECONDS must be a number of seconds >= 0, got 'soon'" in refused(
        capsys, "cleanup"
    )
    assert said(capsys, "cleanup", "--force", "--ttl", "0").splitlines() == ["job_new", "Removed 1 entry."]
    assert said(capsys, "cleanup", "--force", "--other-hosts", "--ttl", "0").splitlines()[0] == "job_far"
    assert [path.name for path in registry_root().iterdir()] == ["job_a"]


def test_open_opens_a_link_without_a_token_or_prints_it(
    job: SteeredJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(opened.append(url)) or True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert said(capsys, "open") == ""
    assert opened[0].startswith(f"http://127.0.0.1:{job.port}/login/")
    assert str(job.token) not in opened[0]
    assert said(capsys, "open", "--link").startswith(f"http://127.0.0.1:{job.port}/login/")
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert said(capsys, "open").startswith("http://127.0.0.1:")
    assert len(opened) == 1


def test_help_names_every_command_and_no_token_option(capsys: Captured) -> None:
    text = said(capsys, "--help")
    names = [command.name for command in app.registered_commands]
    assert " ".join(map(str, names)) == (
        "list status watch save evaluate pause resume skip set generate profile stacks stop save-stop rollback abort "
        "send open cleanup"
    )
    for name in names:
        assert f"\n  {name} " in text
        assert "--token " not in said(capsys, str(name), "--help")
