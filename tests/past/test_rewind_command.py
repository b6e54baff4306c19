"""`onstep rewind RUN STEP` shows a step of the past; what it attaches sees each repeated step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep import pretrain
from onstep.cli.main import main
from tests.support.forked_processes import Processes
from tests.support.past_runs import STEPS, content_of, run_config
from tests.support.shell import Shell
from tests.support.train_command import SMALL

SPY = """
from onstep import Callback

class Spy(Callback):
    def on_step_end(self, context):
        print("spied on", context.step)

class Angry(Callback):
    def on_train_step_end(self, context):
        raise ValueError("no more")

class Picky(Callback):
    def __init__(self, path):
        pass
"""


@pytest.fixture
def spy(tmp_path: Path) -> Path:
    path = tmp_path / "spies.py"
    path.write_text(SPY)
    return path


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["rewind", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["rewind", *map(str, words)]) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("repeating ")]
    assert len(lines) == 1
    return lines[0]


def test_json_has_the_step_with_its_samples_and_layers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content_of(run)
    view = as_json(capsys, run, 5)
    assert view["comparison"]["is_equal"]
    assert view["comparison"]["steps"] == [4, 5]
    assert len(view["samples"]) == 4
    assert sum(one["share"] for one in view["samples"]) == pytest.approx(1, abs=0.05)  # dropout masks are others
    assert all(one["place"] and one["text"] and one["grad_norm"] > 0 for one in view["samples"])
    assert [one["name"] for one in view["layers"]] == ["embedding", "layers.0", "layers.1", "final_norm", "output"]
    assert all(one["update"] > 0 and one["mean_update"] > 0 for one in view["layers"])
    assert view["layers"][1]["attention_logit"] is not None
    assert content_of(run) == before


def test_the_terminal_and_the_report_show_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, report = content_of(run), tmp_path / "report.html"
    assert main(["rewind", str(run), "5", "--report", str(report)]) == 0
    shown = capsys.readouterr()
    assert "repeating 2 steps from the checkpoint of step 3" in shown.err
    assert "equal to the bit" in shown.out
    assert "Step 5 of the past" in report.read_text()
    assert content_of(run) == before


def test_metrics_that_were_not_logged_are_given_for_each_repeated_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = as_json(capsys, run, 6, "--log", "params_norm,gradient/layers.0,max_attention_logit")["log"]
    assert list(rows) == ["4", "5", "6"]
    assert all(value > 0 for row in rows.values() for value in row.values())
    assert "'parms_norm'. Did you mean 'params_norm'?" in error_of(capsys, run, 6, "--log", "parms_norm")


def test_a_callback_sees_the_repeated_steps(run: Path, spy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewind", str(run), "6", "--callback", f"{spy}:Spy"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "spied" in line] == [
        "spied on 4",
        "spied on 5",
        "spied on 6",
    ]
    assert "no more, on the way to step 6" in error_of(capsys, run, 6, "--callback", f"{spy}:Angry")


def test_a_callback_that_cannot_be_attached_is_one_line(
    run: Path, spy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken_spies.py"
    broken.write_text("raise KeyError('at import')")
    for name, why in [
        (f"{spy}:Picky", "cannot be made: TypeError"),
        (f"{broken}:Spy", "cannot be made: KeyError"),
        (f"{tmp_path}/gone.py:Spy", "--callback"),
    ]:
        assert why in error_of(capsys, run, 4, "--callback", name)
    said = error_of(capsys, run, "--when", "spied > 1", "--callback", f"{spy}:Angry")
    assert "no more, while --when was looked for" in said


def test_a_profile_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["rewind", str(run), "4", "--profile", str(trace)]) == 0
    assert "aten::" in capsys.readouterr().out
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_shell_has_the_past(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setitem(__import__("sys").modules, "IPython.terminal.embed", None)
    monkeypatch.setattr(
        "code.interact", lambda banner, local, exitmsg: given.update(local, norm=local["past"].grad_norm)
    )
    assert main(["rewind", str(run), "4", "--shell"]) == 0
    assert given["gradients"]
    assert given["norm"] > 0


def test_a_planted_document_is_the_first_sample(
    corpus: Path, token_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "it was a mild day and the wind came from the sea, as so often in that year. "
    texts = [line * 3] * 120 + ["\x07\x7f\x01\x03\x02" * 50]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    changes = {"train__train_iters": 40, "train__micro_batch_size": 4, "optimizer__lr": 1e-2, "dataset__split": "1"}
    pretrain(run_config(path, token_cache, tmp_path / "runs", **changes, dataset__eod_mask_loss=True))
    lines = map(json.loads, (tmp_path / "runs" / "x" / "record.jsonl").read_text().splitlines())
    losses = {one["global_step"]: one["loss"] for one in lines if one["kind"] == "log" and "grad_norm" in one}
    jumps = {step: losses[step] - losses[step - 1] for step in range(10, 41)}
    view = as_json(capsys, tmp_path / "runs" / "x", max(jumps, key=lambda step: jumps[step]))
    first = max(view["samples"], key=lambda one: one["share"])
    assert f"{path}:121" in " ".join([first["place"], *(one["place"] or "" for one in first["documents"])])


def test_a_step_beyond_the_run_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"choose 1 to {STEPS}" in error_of(capsys, run, STEPS + 1)


def test_a_condition_finds_the_step_that_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewind", str(run), "--when", "gradient/layers.1 > 0", "--from", "4"]) == 0
    said = capsys.readouterr()
    assert "repeating up to 5 steps, from step 3, until it holds" in said.err
    assert "gradient/layers.1 > 0: first at step 4 (gradient/layers.1 " in said.err
    assert "equal to the bit: " in said.out
    assert main(["rewind", str(run), "--when", "eval_loss > 0", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == 2
    assert said.err.startswith("looking through the record")


def test_dropping_each_sample_ranks_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content_of(run)
    assert main(["rewind", str(run), "5", "--without", "each", "--horizon", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mean loss of steps 6 to 7: ")
    assert lines[0].endswith("trained again with all samples: equal to the bit")
    assert len(lines) == 7
    assert main(["rewind", str(run), "5", "--without", "each", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(one["losses"]) for one in found["dropped"]] == [3] * 4
    assert content_of(run) == before


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give either a STEP or --when"),
        (["5", "--when", "loss > 1"], "give either a STEP or --when"),
        (["5", "--from", "3"], "--from requires --when"),
        (["5", "--without", "3"], "--without must be each"),
        (["5", "--without", "each", "--shell"], "--shell has no effect with --without each"),
        (["5", "--profile", "trace.json", "--json"], "--json has no effect with --profile"),
        ([str(STEPS), "--without", "each"], f"no step follows step {STEPS}"),
        (["--when", "loss >"], "is not an expression (at its end)"),
        (["--when", "loss > 1e9"], f"holds at no step from 1 to {STEPS}"),
        (["--when", "nothing > 1"], "no step has the metric 'nothing'"),
    ],
)
def test_what_cannot_be_found_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    capsys.readouterr()
    assert main(["rewind", str(run), *words]) == 1
    [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error")]
    assert error in line


DIVIDED = [
    "use_distributed_optimizer=true",
    "overlap_grad_reduce=true",
    "overlap_param_gather=true",
    "bucket_cap_mb=0.01",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [[], ["parallel.data_parallel_shard_size=2"], [f"ddp.{one}" for one in DIVIDED]],
    ids=["ddp", "fsdp", "distopt"],
)
def test_two_ranks_find_a_step_and_blame_its_samples(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, layout: list[str]
) -> None:
    shell = Shell(processes, tmp_path)
    words = [*SMALL, *layout, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}", "run.name=x"]
    done = shell.onstep(
        "train", *words, "train.micro_batch_size=1", "logger.log_interval=1", "checkpoint.save_interval=3", ranks=2
    )
    assert done.returncode == 0, done.stderr
    done = shell.onstep("rewind", "x", "--when", "max_activation > 0 and loss > 0", "--from", "5", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "first at step 5 (" in done.stderr
    assert "equal to the bit" in done.stdout
    done = shell.onstep("rewind", "x", "5", "--without", "each", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "with all samples: equal to the bit" in done.stdout
    assert len(done.stdout.splitlines()) == 7
