"""The registry: who may have a job's directory, who lives, and what is removed."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from onstep.control.registry import (
    JobInfo,
    Registration,
    check_job_id,
    cleanup,
    describe_jobs,
    is_alive,
    is_endpoint_pid_alive,
    list_infos,
    read_info,
    read_token,
    registry_root,
)
from onstep.errors import ConfigError
from tests.support.waiting import until

HOLDS_A_JOB = """
import sys, time
from onstep.control.registry import JobInfo, Registration
one = Registration(sys.argv[1]).open()
one.publish(JobInfo.of_this_process(sys.argv[1], port=8900), "secret")
print("ready", flush=True)
time.sleep(600)
"""


def start_job(job_id: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS_A_JOB, job_id], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_an_entry_is_there_for_its_owner_alone_while_the_job_runs(registry: Path) -> None:
    umask = os.umask(0)
    try:
        with Registration("job") as entry:
            entry.publish(JobInfo.of_this_process("job", port=8901, output_dir="/runs/a"), "secret")
            assert {path.name: mode(path) for path in entry.directory.iterdir()} == {
                "auth_token": 0o600,
                "endpoint.json": 0o600,
                "lock": 0o600,
            }
            assert (mode(registry), mode(entry.directory)) == (0o700, 0o700)
            assert read_token("job") == "secret"
            info = read_info("job")
            assert info is not None
            assert (info.port, info.output_dir, info.pid) == (8901, "/runs/a", os.getpid())
            assert is_alive(info)
            assert "secret" not in (entry.directory / "endpoint.json").read_text()
        assert list(registry.iterdir()) == []
    finally:
        os.umask(umask)


def test_an_entry_without_a_token_has_no_token_file(registry: Path) -> None:
    with Registration("job") as entry:
        entry.publish(JobInfo.of_this_process("job"), None)
        assert not (entry.directory / "auth_token").exists()
        assert read_token("job") is None


@pytest.mark.parametrize(
    "job_id",
    ["", ".", "..", "a/b", "../a", "/etc", "a..b", "-a", ".a", "a\0b", "a" * 129, "ä", "a b", "a\n", "a%2fb", 3, None],
)
def test_an_id_that_could_leave_the_registry_is_refused(registry: Path, job_id: str) -> None:
    with pytest.raises(ConfigError, match="job_id must have 1 to 128 letters"):
        Registration(job_id)
    with pytest.raises(ConfigError, match="job_id must have 1 to 128 letters"):
        read_info(job_id)
    with pytest.raises(ConfigError):
        read_token(job_id)


def test_a_usual_id_is_accepted() -> None:
    assert check_job_id("job_1731_host-a.example_77") == "job_1731_host-a.example_77"


@pytest.mark.process
def test_a_live_job_with_the_same_id_is_named_and_a_killed_one_replaced(registry: Path) -> None:
    process = start_job("job")
    info = read_info("job")
    assert info is not None
    with pytest.raises(ConfigError) as refused:
        Registration("job").open()
    assert f"process {process.pid} on {info.hostname}, started 2" in str(refused.value)
    assert "choose another job_id, or stop that one: onstep control stop job" in str(refused.value)
    assert read_token("job") == "secret"
    assert cleanup() == []
    end(process)
    assert not is_alive(info)
    with Registration("job") as entry:
        assert read_info("job") is None
        assert read_token("job") is None
        entry.publish(JobInfo.of_this_process("job"), "new")
        assert read_token("job") == "new"


@pytest.mark.process
def test_what_a_killed_job_left_is_removed_by_cleanup(registry: Path) -> None:
    process = start_job("job")
    (registry / "job" / "control.sock").touch()
    end(process)
    assert [one["alive"] for one in describe_jobs()] == [False]
    assert cleanup(is_dry=True) == ["job"]
    assert (registry / "job").is_dir()
    assert cleanup() == ["job"]
    assert list(registry.iterdir()) == []


def test_the_same_id_twice_in_one_process_is_refused(registry: Path) -> None:
    with Registration("job") as entry:
        entry.publish(JobInfo.of_this_process("job"), "secret")
        with pytest.raises(ConfigError, match="is running"):
            Registration("job").open()
        assert read_token("job") == "secret"
    with Registration("job"):
        pass


@pytest.mark.process
def test_of_many_processes_that_start_at_once_one_gets_the_id(registry: Path) -> None:
    code = HOLDS_A_JOB.replace("time.sleep(600)", "sys.stdin.read()")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, "job"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    winners = [
        process for process in processes if process.stdout is not None and process.stdout.readline() == "ready\n"
    ]
    for process in processes:
        _, errors = process.communicate()
        assert ("is running" in errors) == (process not in winners), errors
    assert len(winners) == 1


def test_a_recycled_process_id_is_not_alive(registry: Path) -> None:
    mine = JobInfo.of_this_process("job")
    assert is_alive(mine)
    assert mine.process_started_at is not None
    recycled = JobInfo.from_dict({**mine.to_dict(), "process_started_at": mine.process_started_at - 60})
    assert not is_alive(recycled)
    assert not is_alive(JobInfo.from_dict({**mine.to_dict(), "boot_id": "another boot"}))
    assert not is_alive(JobInfo.from_dict({**mine.to_dict(), "pid": None}))


def test_an_endpoint_of_another_program_is_alive_within_ten_seconds() -> None:
    created = psutil.Process().create_time()
    assert is_endpoint_pid_alive(os.getpid(), None)
    assert is_endpoint_pid_alive(os.getpid(), created - 10.0)
    assert not is_endpoint_pid_alive(os.getpid(), created - 10.1)
    assert not is_endpoint_pid_alive(None, None)
    assert not is_endpoint_pid_alive(-1, None)
    assert not is_endpoint_pid_alive(2**31 - 1, None)


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["true"])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert not is_endpoint_pid_alive(process.pid, time.time())
    process.wait()


def leave(registry: Path, job_id: str, **content: object) -> Path:
    directory = registry / job_id
    directory.mkdir(mode=0o700, parents=True)
    (directory / "endpoint.json").write_text(json.dumps({"job_id": job_id, **content}))
    return directory


def test_a_job_of_another_machine_is_unknown_and_is_removed_only_by_force(registry: Path) -> None:
    leave(registry, "job", host="127.0.0.1", port=1, pid=2**22, hostname="elsewhere", started_at=1.0)
    assert [(one["alive"], one["is_here"]) for one in describe_jobs()] == [(False, False)]
    assert cleanup() == []
    assert cleanup(force=True) == ["job"]


def test_a_directory_without_an_endpoint_is_removed_when_it_is_old(registry: Path) -> None:
    directory = registry / "job"
    directory.mkdir(parents=True)
    assert cleanup(60) == []
    os.utime(directory, (time.time() - 120,) * 2)
    assert cleanup(60) == ["job"]


def test_files_of_others_in_a_dead_jobs_directory_are_kept(registry: Path) -> None:
    directory = leave(registry, "job", pid=2**22, started_at=1.0)
    (directory / "notes.txt").write_text("mine")
    cleanup()
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_a_link_in_place_of_a_directory_is_refused_and_not_followed(registry: Path, tmp_path: Path) -> None:
    registry.mkdir(mode=0o700)
    elsewhere = leave(tmp_path / "other", "job", pid=os.getpid())
    (elsewhere / "auth_token").write_text("stolen")
    (registry / "job").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not a link"):
        Registration("job").open()
    assert (read_info("job"), read_token("job"), list_infos()) == (None, None, [])
    assert cleanup(0, force=True) == []
    assert (elsewhere / "auth_token").exists()


def test_a_link_in_place_of_a_file_is_not_followed(registry: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    directory = registry / "job"
    directory.mkdir(parents=True)
    for name in ("endpoint.json", "auth_token"):
        (directory / name).symlink_to(target)
    assert (read_info("job"), read_token("job")) == (None, None)
    with Registration("job") as entry:
        entry.publish(JobInfo.of_this_process("job"), "secret")
        (entry.directory / "auth_token.tmp").symlink_to(target)
        entry.publish(JobInfo.of_this_process("job"), "secret")
    assert target.read_text() == "precious"
    assert not directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(registry: Path) -> None:
    directory = leave(registry, "job", pid=os.getpid())
    os.chown(directory, 12345, 12345)
    with pytest.raises(ConfigError, match="must be a directory of this user"):
        Registration("job").open()
    assert read_info("job") is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nonsense", '{"pid": 1', "[" * 100_000, '{"job_id": 5, "port": "x", "pid": 1e99}', "\xff", "x" * 70_000],
)
def test_an_endpoint_that_is_damaged_is_read_as_far_as_it_makes_sense(registry: Path, text: str) -> None:
    directory = leave(registry, "job")
    (directory / "endpoint.json").write_text(text)
    info = read_info("job")
    assert info is None or (info.job_id, info.port, info.pid) == ("job", 0, None)
    assert all(one["alive"] is False for one in describe_jobs())


def test_unknown_and_missing_keys_of_an_endpoint_are_tolerated() -> None:
    info = JobInfo.from_dict({"job_id": "a", "host": "::1", "port": 8900, "future": [1]})
    assert info == JobInfo("a", "::1", 8900, None, None)
    assert info.endpoint_url == "http://[::1]:8900"
    assert JobInfo.from_dict(info.to_dict()) == info
    assert JobInfo("a", "0.0.0.0", 8900, None, None).endpoint_url == "http://127.0.0.1:8900"


def test_jobs_are_listed_newest_first(registry: Path) -> None:
    for number in (1, 3, 2):
        leave(registry, f"job{number}", started_at=float(number))
    assert [info.job_id for info in list_infos()] == ["job3", "job2", "job1"]


def test_the_registry_is_in_the_users_configuration_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ONSTEP_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert registry_root() == tmp_path / "onstep" / "jobs"
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "here"))
    assert registry_root() == tmp_path / "here"


def test_a_registry_that_cannot_be_written_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "file" / "jobs"))
    with pytest.raises(ConfigError, match="set ONSTEP_REGISTRY to another directory"):
        Registration("job").open()


@pytest.mark.process
def test_a_forked_child_does_not_hold_the_job_after_its_parent_has_died(registry: Path) -> None:
    code = HOLDS_A_JOB.replace('print("ready"', 'import os\nif os.fork() == 0: time.sleep(600)\nprint("ready"')
    process = subprocess.Popen([sys.executable, "-c", code, "job"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    try:
        with Registration("job"):
            assert [child.is_running() for child in children] == [True]
    finally:
        for child in children:
            child.kill()
        process.stdout.close()
