"""The console's rows, golden in both modes, and the bars' totals."""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onstep.callbacks import ProgressCallback

PLAIN_TIME = r"\d\d:\d\d:\d\d "

FIRST = {
    "epoch": 0.5,
    "loss": 3.25,
    "grad_norm": 1.5,
    "max_grad_norm": 9.0,
    "tokens": 8192,
    "total_tokens": 999_999,
    "learning_rate": 3e-4,
}
LATER = {**FIRST, "loss": 2.123456, "tok_per_sec": 12345, "mfu": 0.4123, "peak_mem": [2**30, 3 * 2**29]}
FINAL = {
    "train_runtime": 12.3456,
    "step": 2000,
    "train_steps_per_second": float("nan"),
    "epoch": 1.0,
    "other": 0.5,
    "first_loss": 5.5,
    "last_loss": 2.125,
}

FIRST_HEADER = "    step  split   epoch      loss      grad        lr  total_tok"
FIRST_ROW = "   1,000  train  0.5000   3.25000    1.5000  3.00e-04         1M"
LATER_HEADER = "    step  split   epoch      loss      grad        lr  total_tok    tok/s    mfu     memory"
LATER_ROW = "   2,000  train  0.5000   2.12346    1.5000  3.00e-04         1M   12,345  41.2%  1.500 GiB"
SUMMARY = [
    "Training complete: loss 5.5 at the start, 2.125 at the end",
    "  Runtime:                12.35 s  Epoch:                  1",
    "  Total steps:            2,000    other:                  0.5",
    "  Steps/sec:              nan",
]
GOLDEN = [
    FIRST_HEADER,
    FIRST_ROW,
    LATER_HEADER,
    LATER_ROW,
    "   2,000  eval   0.5000   2.12346",
    "   2,000  test   0.5000   2.50000",
    SUMMARY,
]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def notify(callback: ProgressCallback, event: str, state: Any, args: Any = None, **kwargs: Any) -> None:
    getattr(callback, event)(args=args, state=state, control=None, **kwargs)


def golden_run(callback: ProgressCallback, make_state: Any) -> None:
    state = make_state(step=1000, epoch=0, steps_in_epoch=1, steps_per_epoch=2, max_steps=2000)
    notify(callback, "on_train_begin", state)
    notify(callback, "on_step_end", state)
    notify(callback, "on_log", state, logs=FIRST)
    state = make_state(step=2000, epoch=0, steps_in_epoch=1, steps_per_epoch=2, max_steps=2000)
    notify(callback, "on_step_end", state)
    notify(callback, "on_log", state, logs=LATER)
    notify(callback, "on_prediction_step", state)
    notify(callback, "on_evaluate", state, metrics={"eval_loss": 2.1234567, "eval_perplexity": 8.36, "epoch": 0.5})
    notify(callback, "on_log", state, logs=FINAL)
    notify(callback, "on_train_end", state)
    notify(callback, "on_predict", state, metrics={"test_loss": 2.5, "test_perplexity": 12.18})
    notify(callback, "on_run_end", state)


def expected(prefix: str) -> str:
    lines = []
    narrow = {line: line[:53] + line[64:] for line in (LATER_HEADER, LATER_ROW)}
    for line in GOLDEN if prefix else [one if isinstance(one, list) else narrow.get(one, one) for one in GOLDEN]:
        first, *rest = [line] if isinstance(line, str) else line
        lines += [prefix + re.escape(first), *map(re.escape, rest)]
    return "\n".join(lines) + "\n"


def plain_rows(stream: io.StringIO) -> list[str]:
    return [re.sub(PLAIN_TIME, "", line) for line in stream.getvalue().splitlines()]


def test_signature_is_the_documented_one() -> None:
    parameters = inspect.signature(ProgressCallback).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "use_tqdm": None,
        "output_stream": None,
        "step_columns": None,
        "final_metrics": None,
        "header_interval": 20,
        "max_str_len": 100,
        "level": "default",
        "expected": (),
    }
    assert ProgressCallback.shows_progress


def test_golden_plain_rows(make_state: Any) -> None:
    stream = io.StringIO()
    golden_run(ProgressCallback(use_tqdm=False, output_stream=stream), make_state)
    assert re.fullmatch(expected(PLAIN_TIME), stream.getvalue())


def test_golden_rows_with_bars(make_state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    golden_run(ProgressCallback(use_tqdm=True), make_state)
    captured = capsys.readouterr()
    assert re.fullmatch(expected(""), captured.out)
    assert "2000/2000" in captured.err


def test_rows_go_to_the_standard_output_unless_told(make_state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    golden_run(ProgressCallback(), make_state)
    captured = capsys.readouterr()
    assert re.fullmatch(expected(PLAIN_TIME), captured.out)
    assert captured.err == ""
    golden_run(ProgressCallback(output_stream="stderr"), make_state)
    assert re.fullmatch(expected(PLAIN_TIME), capsys.readouterr().err)


def test_unknown_output_stream_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="output_stream"):
        ProgressCallback(output_stream="file.txt")


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_terminal_gets_bars_unless_disabled(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, disable_tqdm: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    args = SimpleNamespace(disable_tqdm=disable_tqdm)
    callback = ProgressCallback()
    state = make_state(step=5)
    notify(callback, "on_train_begin", state, args)
    notify(callback, "on_log", state, args, logs=FIRST)
    notify(callback, "on_train_end", state, args)
    text = terminal.getvalue()
    assert ("5/100" in text) is not disable_tqdm
    assert not re.search(PLAIN_TIME, text), "somebody is watching"
    assert "3.25000" in text


def test_bar_keeps_to_the_terminal_when_errors_go_to_a_file(make_state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", file)
    callback = ProgressCallback()
    notify(callback, "on_train_begin", make_state(step=5))
    notify(callback, "on_train_end", make_state(step=5))
    assert "5/100" in terminal.getvalue()
    assert file.getvalue() == ""


@pytest.mark.parametrize("has_widgets", [False, True])
def test_a_notebook_gets_rows_without_times_and_bars_if_it_has_widgets(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_widgets: bool
) -> None:
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    widgets = ModuleType("ipywidgets")
    widgets.__spec__ = ModuleSpec("ipywidgets", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets if has_widgets else None)
    callback = ProgressCallback()
    notify(callback, "on_train_begin", make_state())
    notify(callback, "on_log", make_state(step=1000), logs=FIRST)
    notify(callback, "on_train_end", make_state())
    captured = capsys.readouterr()
    assert captured.out == f"{FIRST_HEADER}\n{FIRST_ROW}\n"
    assert ("train:" in captured.err) is has_widgets


def test_rows_are_printed_while_another_thread_imports_ipython(
    make_state: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))  # as a tracker's package does, in its thread
    callback = ProgressCallback()
    notify(callback, "on_train_begin", make_state())
    notify(callback, "on_log", make_state(step=1000), logs=FIRST)
    assert FIRST_ROW.split()[-1] in capsys.readouterr().out


def test_a_notebook_without_widgets_does_not_warn(tmp_path: Path) -> None:
    """As tqdm does where `tqdm.auto` is imported there; a reader of the notebook would see it above each output."""
    script = """if True:
        import sys, warnings
        from types import ModuleType, SimpleNamespace
        class ZMQInteractiveShell:
            config = {"IPKernelApp": {}}
        sys.modules["IPython"] = SimpleNamespace(get_ipython=ZMQInteractiveShell)
        sys.modules["ipykernel.zmqshell"] = ModuleType("ipykernel.zmqshell")
        sys.modules["ipywidgets"] = None
        warnings.simplefilter("always")  # shown: tqdm handles it as an error
        import onstep.console
        print(onstep.console.ProgressCallback().training_bar)
    """
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_the_columns_of_a_run_of_many_epochs_are_straight(make_state: Any) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    notify(callback, "on_train_begin", make_state())
    for epoch in (9.87654, 10.0, 123.456789, 12345.6789):
        notify(callback, "on_log", make_state(step=1), logs={**FIRST, "epoch": epoch})
    header, *rows = plain_rows(stream)
    assert [row.split()[2] for row in rows] == ["9.8765", "10.000", "123.45", "12345"]
    assert {len(row) for row in rows} == {len(header)}


def test_two_instances_do_not_double_lines(make_state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        golden_run(ProgressCallback(use_tqdm=False), make_state)
    assert capsys.readouterr().out.count(FIRST_ROW) == 2


@pytest.mark.parametrize(("interval", "headers_before"), [(3, [0, 3, 6]), (1, [0, 1, 2, 3, 4, 5, 6]), (0, [0])])
def test_header_interval(make_state: Any, interval: int, headers_before: list[int]) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream, header_interval=interval)
    for step in range(7):
        notify(callback, "on_log", make_state(step=step), logs={"loss": 1.0})
    found, rows = [], 0
    for line in plain_rows(stream):
        if line.endswith("loss"):
            found.append(rows)
        else:
            rows += 1
    assert (found, rows) == (headers_before, 7)


def test_negative_header_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="header_interval must be >= 0, got -1"):
        ProgressCallback(header_interval=-1)


def test_next_training_begins_with_a_header(make_state: Any) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    for _ in range(2):
        notify(callback, "on_train_begin", make_state())
        notify(callback, "on_log", make_state(), logs={"loss": 1.0})
    assert [line.split()[0] for line in plain_rows(stream)] == ["step", "0", "step", "0"]


def test_columns_and_final_metrics_can_be_changed(make_state: Any) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(
        use_tqdm=False,
        output_stream=stream,
        step_columns={
            "epoch": None,
            "loss": {"fmt": ".1f"},
            "rms": {"key": "grad_norm", "width": 6, "fmt": ".0f"},
        },
        final_metrics={"train_runtime": {"label": "Time", "suffix": " seconds"}, "step": None},
    )
    notify(callback, "on_log", make_state(), logs={"epoch": 1.0, "loss": 2.0, "grad_norm": 3.0})
    notify(callback, "on_log", make_state(), logs={"train_runtime": 1.0, "step": 5})
    notify(callback, "on_run_end", make_state())
    assert plain_rows(stream) == [
        "    step  split      loss      grad     rms",
        "       0  train       2.0    3.0000       3",
        "Training complete:",
        "  Time:                   1.00 seconds",
    ]


def test_logs_with_nothing_to_show_print_no_row(make_state: Any) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    notify(callback, "on_log", make_state(), logs={"epoch": 1.0, "eval_loss": 2.0})
    assert stream.getvalue() == ""


def test_evaluation_without_a_loss_shows_everything(make_state: Any) -> None:
    stream = io.StringIO()
    callback = ProgressCallback(use_tqdm=False, output_stream=stream)
    notify(callback, "on_evaluate", make_state(), metrics={"eval_accuracy": 0.5, "epoch": 1.0, "eval_runtime": 2.0})
    assert plain_rows(stream)[1:] == ["       0  eval   0.0000  accuracy 0.5"]


def test_other_ranks_print_nothing(make_state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ProgressCallback(use_tqdm=True)
    state = make_state(rank=1)
    for event, kwargs in [
        ("on_train_begin", {}),
        ("on_step_end", {}),
        ("on_prediction_step", {}),
        ("on_evaluate", {"metrics": {"eval_loss": 1.0}}),
        ("on_predict", {"metrics": {"test_loss": 1.0}}),
        ("on_log", {"logs": FIRST}),
        ("on_log", {"logs": FINAL}),
        ("on_run_end", {}),
    ]:
        notify(callback, event, state, **kwargs)
    assert capsys.readouterr() == ("", "")


class Endless:
    """A loader without a length."""


@pytest.mark.parametrize(
    ("loader", "cap", "total"),
    [
        ([0] * 7, -1, "7"),
        ([0] * 7, 3, "3"),
        ([0] * 3, 7, "3"),
        (Endless(), 4, "4"),
        (Endless(), -1, None),
        (None, -1, None),
    ],
)
def test_evaluation_bar_is_as_long_as_the_evaluation(
    make_state: Any, capsys: pytest.CaptureFixture[str], loader: Any, cap: int, total: str | None
) -> None:
    callback = ProgressCallback(use_tqdm=True)
    state = make_state(max_eval_steps=cap)
    notify(callback, "on_prediction_step", state, eval_dataloader=loader)
    notify(callback, "on_evaluate", state, metrics={"eval_loss": 1.0})
    err = capsys.readouterr().err
    assert f"1/{total} " in err if total else "1step" in err


def test_evaluation_without_a_length_takes_that_of_the_one_before(
    make_state: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ProgressCallback(use_tqdm=True)
    state = make_state()
    for _ in range(2):
        for _ in range(5):
            notify(callback, "on_prediction_step", state, eval_dataloader=Endless())
        notify(callback, "on_evaluate", state, metrics={"eval_loss": 1.0})
    assert "/5 " in capsys.readouterr().err


def test_bar_follows_a_changed_end_of_training(make_state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ProgressCallback(use_tqdm=True)
    notify(callback, "on_train_begin", make_state(max_steps=100))
    notify(callback, "on_log", make_state(step=1, max_steps=250), logs={"loss": 1.0})
    notify(callback, "on_train_end", make_state())
    assert "/250 " in capsys.readouterr().err


@pytest.mark.parametrize("event", ["on_exception", "on_run_end"])
def test_bars_of_a_broken_run_are_closed(make_state: Any, capsys: pytest.CaptureFixture[str], event: str) -> None:
    callback = ProgressCallback(use_tqdm=True)
    state = make_state()
    notify(callback, "on_train_begin", state)
    notify(callback, "on_prediction_step", state, eval_dataloader=[0, 0])
    notify(callback, event, state)
    assert capsys.readouterr().err.endswith("\r"), "the bars are erased"
    notify(callback, "on_step_end", make_state(step=50))
    assert "50/100" not in capsys.readouterr().err


def test_the_bar_shows_no_loss_of_an_earlier_step(make_state: Any, monkeypatch: pytest.MonkeyPatch, args: Any) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    callback = ProgressCallback(use_tqdm=True)
    state = make_state(step=0)
    callback.on_train_begin(args, state, None)
    callback.on_log(args, make_state(step=1), None, {"loss": 2.5})
    callback.training_bar.refresh()
    drawn = terminal.getvalue()
    callback.on_train_end(args, state, None)
    assert "0/100" in drawn
    assert "loss" not in drawn.rpartition("train:")[2]
