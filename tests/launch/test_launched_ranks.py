"""Ranks that `onstep launch` starts: what they print, who failed first, signals, and the exit code."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from onstep.cli.main import main

RANK = """\
import os, signal, sys, time
from pathlib import Path

rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
ready = Path("ready-" + attempt)


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)
"""


class Launcher:
    """Runs `onstep launch` in this process, with ranks that do as a script says."""

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.directory, self.capture = directory, capture

    def run(self, code: str, *options: str) -> tuple[int, list[str], list[str]]:
        """The exit code, and the lines on standard output and error."""
        (self.directory / "ranks.py").write_text(RANK + code)
        code_ = main(["launch", "--nproc=2", *options, "--", "python", "ranks.py"])
        out, err = self.capture.readouterr()
        return code_, out.splitlines(), err.splitlines()


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Launcher]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # torch closes the files of ranks only if it ended them
        os.environ.pop("OMP_NUM_THREADS", None)
        yield Launcher(tmp_path, capsys)
        gc.collect()


def test_lines_of_ranks_have_their_rank_in_front(launcher: Launcher) -> None:
    code, out, err = launcher.run(
        """
sys.stdout.buffer.write(b"\\xc3")  # the first half of a letter
sys.stdout.flush()
time.sleep(0.3)
sys.stdout.buffer.write(b"\\xa9")
print("b of", os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], os.environ.get("TQDM_DISABLE"))
print("10%\\r50%\\r100%", file=sys.stderr)
"""
    )
    assert code == 0
    assert sorted(out) == ["[rank 0] éb of 2 1 None", "[rank 1] éb of 2 1 1"]
    assert sorted(err) == ["[rank 0] 100%", "[rank 1] 100%"]
    assert not list(launcher.directory.glob("onstep-launch-*")), "kept only after a failure"


def test_the_first_failure_is_one_line_and_the_others_that_follow_are_none(launcher: Launcher) -> None:
    code, _, err = launcher.run(
        """
if rank == 1:
    print("bye", flush=True)
    raise ValueError("bad value")
time.sleep(60)
"""
    )
    assert code == 1
    [said] = [line for line in err if line.startswith("onstep launch: ")]
    found = re.fullmatch(r"onstep launch: rank 1 failed first: exit code 1 \(ValueError: bad value\); .* in (.*)", said)
    assert found
    assert "raise ValueError" in Path(found[1]).read_text()


def test_ranks_start_again_after_a_failure_until_there_were_too_many(launcher: Launcher) -> None:
    code, out, err = launcher.run(
        """
print("attempt", attempt, flush=True)
if rank == 0:
    wait_for(ready)
    os.kill(os.getpid(), signal.SIGKILL)
ready.touch()
time.sleep(60)
""",
        "--max-restarts=1",
        "--log-dir=logs",
    )
    assert code == 128 + signal.SIGKILL
    assert {"[rank 1] attempt 0", "[rank 1] attempt 1"} <= set(out)
    said = [line for line in err if line.startswith("onstep launch: ")]
    first = "onstep launch: rank 0 failed first: killed by SIGKILL; its output is in logs/attempt"
    assert said == [f"{first}-0/rank-0.out; restart 1 of 1", f"{first}-1/rank-0.out"]


def test_the_rank_that_ranks_agree_on_is_named_although_another_ended_first(launcher: Launcher) -> None:
    code, _, err = launcher.run(
        """
from onstep.launch.failures import note_first_failure
if rank == 1:
    wait_for(ready)
    time.sleep(60)
note_first_failure(1, "rank 1, pp 1: no embedding", is_own=False, is_refusal=True)
ready.touch()
raise ValueError("a consequence")
""",
        "--max-restarts=3",
    )
    assert code == 1
    [said] = [line for line in err if line.startswith("onstep launch: ")]
    assert re.match(r"onstep launch: rank 1 failed first: exit code 1 \(rank 1, pp 1: no embedding\); .*rank-1", said)


REFUSING = {
    "a command": "from onstep.cli.main import main; sys.exit(main(['train', 'nosuchrecipe']))",
    "a script": "from onstep.errors import ConfigError; raise ConfigError('nosuchrecipe is no value')",
}


@pytest.mark.parametrize("kind", REFUSING)
def test_a_command_that_is_refused_at_the_first_start_is_not_started_again(launcher: Launcher, kind: str) -> None:
    code, _, err = launcher.run(REFUSING[kind], "--max-restarts=3")
    [said] = [line for line in err if line.startswith("onstep launch: ")]
    assert code == 1
    assert "nosuch" in said
    assert "restart" not in said


def test_a_run_that_was_refused_only_after_a_restart_is_started_again(launcher: Launcher) -> None:
    """As with a number of nodes that does not divide the batch."""
    refuses = "from onstep.errors import ConfigError; raise ConfigError('not with so many')"
    code, _, err = launcher.run(f"if attempt == '0': sys.exit(1)\nif attempt == '1': {refuses}", "--max-restarts=3")
    assert code == 0
    assert [line.rpartition("; ")[2] for line in err if "restart" in line] == ["restart 1 of 3", "restart 2 of 3"]


def test_a_host_that_does_not_answer_is_named_in_one_line(launcher: Launcher) -> None:
    options = ["--nnodes=2", "--rdzv=127.0.0.1:9", "--rdzv-conf=read_timeout=1,is_host=0"]
    code, _, [*_, said] = launcher.run("", *options)
    assert code == 1
    assert said.startswith("error: the nodes cannot meet at 127.0.0.1:9: ")


def test_nodes_meet_again_when_one_was_lost_while_they_met(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's agent sees it: a node does not say which ranks it has."""
    timeouts: list[float] = []
    assign = SimpleElasticAgent._assign_worker_ranks

    def assign_or_miss(agent: Any, store: Any, *arguments: Any) -> Any:
        timeouts.append(store.timeout.total_seconds())
        if len(timeouts) == 1:
            store.wait(["torchelastic/assigned_ranks/2"], timedelta(seconds=0.1))
        return assign(agent, store, *arguments)

    monkeypatch.setattr(SimpleElasticAgent, "_assign_worker_ranks", assign_or_miss)
    settings = ["--nnodes=1:2", "--rdzv=./meeting", "--rdzv-conf=last_call_timeout=1"]
    code, out, err = launcher.run("print(os.environ['WORLD_SIZE'])", *settings)
    assert (code, sorted(out)) == (0, ["[rank 0] 2", "[rank 1] 2"])
    [said] = err
    assert said.startswith("onstep launch: a node was lost while the nodes met (")
    assert said.endswith("; they meet again")
    assert timeouts == [60, 60]


def test_a_preempted_run_is_not_restarted_and_its_ranks_end_by_themselves(launcher: Launcher) -> None:
    code, out, err = launcher.run(
        """
time.sleep(rank)
print("saved", flush=True)
sys.exit(75)
""",
        "--max-restarts=3",
    )
    assert (code, sorted(out), err) == (75, ["[rank 0] saved", "[rank 1] saved"], [])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR2"])
def test_a_signal_is_forwarded_to_all_ranks_and_the_exit_code_is_theirs(launcher: Launcher, name: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code, out, err = launcher.run(
        f"""
def leave(number, frame):
    print(signal.Signals(number).name, flush=True)
    time.sleep(0.3 * rank)
    sys.exit(75)


signal.signal(signal.{name}, leave)
if rank == 1:
    ready.touch()
else:
    wait_for(ready)
    os.kill(os.getppid(), signal.{name})
time.sleep(60)
""",
        "--max-restarts=3",
    )
    assert (code, sorted(out), err) == (75, [f"[rank 0] {name}", f"[rank 1] {name}"], [])
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_ranks_do_not_handle_ends_them_without_a_restart(launcher: Launcher) -> None:
    code, _, err = launcher.run(
        """
if rank == 1:
    ready.touch()
else:
    wait_for(ready)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
""",
        "--max-restarts=3",
    )
    assert code == 128 + signal.SIGTERM
    assert "killed by SIGTERM" in err[-1]


def test_a_signal_that_is_ignored_when_the_launch_starts_stays_ignored(launcher: Launcher) -> None:
    """As SIGHUP under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, out, err = launcher.run(
            """
ready.touch() if rank == 1 else wait_for(ready)
os.kill(os.getppid(), signal.SIGHUP)
time.sleep(0.5)
print("done")
"""
        )
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, sorted(out), err) == (0, ["[rank 0] done", "[rank 1] done"], [])


def test_a_signal_while_other_nodes_still_save_leaves_the_exit_code_75(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimpleElasticAgent, "_exit_barrier", lambda agent: signal.raise_signal(signal.SIGUSR2))
    assert launcher.run("sys.exit(75)") == (75, [], [])
