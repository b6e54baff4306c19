"""Writes docs/promises.md: what Onstep promises, which tests show it, and what the last run of them counted.

    python tools/promises.py RESULTS.json

`make promises` runs every test, the long sweeps included, and then this, if nothing has failed; results with a failure
are refused.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"


@dataclass(frozen=True)
class Promise:
    """A promise and the tests that show it."""

    title: str
    how: str
    tests: tuple[str, ...]
    """Patterns of test files, relative to `tests/`; a file counts for every promise that names it."""


PROMISES = (
    Promise(
        "A resumed run gives the bits of the uninterrupted one",
        "Runs are killed with SIGKILL at random times, at every step and in every phase, on one and two ranks, with "
        "data workers and asynchronous saves; weights, optimizer, random states, logs and the trajectory hash of the "
        "resumed run are compared byte by byte with a run that nobody killed.",
        (
            "training/test_resume*.py",
            "trainer/test_trainer_resume.py",
            "distributed/test_resume_on_ranks.py",
            "distributed/test_restart.py",
            "cli/test_verify_resume.py",
            "faults/test_kill_storm.py",
        ),
    ),
    Promise(
        "Any time may be the last: a verified checkpoint is always there",
        "Every file operation of a save fails, or is the last one of the process; power cuts are replayed in the worst "
        "order that the disk is allowed; the disk is full, or two runs share it.",
        ("faults/*.py", "checkpoint/test_async_save.py", "checkpoint/test_retention.py", "checkpoint/test_store.py"),
    ),
    Promise(
        "Nothing that is read can be executed, and hostile files end in an error that helps",
        "Hypothesis changes bytes and values of every format and runs the commands that read it: no Python error, "
        "no hang over 10 seconds, no growth over 1 GB. Pickles are refused unread.",
        (
            "files/test_bounded_reading.py",
            "checkpoint/test_no_pickle.py",
            "checkpoint/test_malicious_tensor_files.py",
            "checkpoint/test_codec.py",
            "checkpoint/test_manifest.py",
            "checkpoint/test_forked_children.py",
            "*/test_*hostile*.py",
            "data/test_chat_template_limits.py",
            "faults/test_fuzz.py",
        ),
    ),
    Promise(
        "Numbers are those of plain PyTorch",
        "Losses and weights are compared with a loop in plain PyTorch, with float64, with `transformers.Trainer` and "
        "with Megatron Bridge's formulas; any split of the same samples over micro-batches, accumulation and ranks "
        "gives the same loss.",
        (
            "parity/*.py",
            "trainer/test_trainer_matches_transformers.py",
            "trainer/test_trainer_split_invariance.py",
            "trainer/test_loss_convention.py",
            "training/test_losses.py",
            "training/test_training_log_golden.py",
            "optim/*.py",
            "models/*.py",
            "metrics/*.py",
        ),
    ),
    Promise(
        "A NaN or a spike never reaches the weights",
        "Non-finite losses and gradients and spikes are injected on chosen ranks and micro-batches: no rank applies "
        "the update, the log shows the NaN, the policy (stop, skip, roll back) is applied on all ranks at one step, "
        "and bad samples are not met again after a resume.",
        (
            "training/test_nonfinite.py",
            "training/test_anomal*.py",
            "training/test_spikes.py",
            "training/test_skipping.py",
            "distributed/test_anomalies*.py",
        ),
    ),
    Promise(
        "Ranks decide together",
        "Random callbacks on random ranks ask to stop, save, evaluate, skip or roll back; with real gloo processes all "
        "ranks act at the same step, and a signal to one of them saves once on all.",
        (
            "distributed/*.py",
            "training/test_decisions.py",
            "training/test_control_in_the_loop.py",
            "training/test_signals.py",
            "cli/test_train_signals.py",
        ),
    ),
    Promise(
        "Every run ends once, with its reason",
        "Exceptions of every kind at every event, signals and anomalies: the exit events fire in reverse order, the "
        "first error is the one that is raised, and the exit code is never 0 after a failure.",
        ("training/test_run_endings.py", "events/test_event_run_end.py", "cli/test_exits_and_progress.py"),
    ),
    Promise(
        "The logs are complete, and a tracker neither stops nor slows training",
        "The metrics log, csv and TensorBoard contain each step once after any number of kills; trackers that raise, "
        "hang or lose their network cost a warning.",
        (
            "record/test_metrics_log.py",
            "training/test_metrics_log_durability.py",
            "trackers/*.py",
            "callbacks/test_tb_after_kills.py",
            "callbacks/test_json_logger.py",
        ),
    ),
    Promise(
        "A callback is written once",
        "Every callback of the library, and those of the pages of Megatron Bridge and Forgather, run through both "
        "entry points; Hugging Face's own callbacks are called in its order with its arguments.",
        ("contract/*.py", "events/*.py", "callbacks/*.py", "trainer/test_trainer_callbacks.py"),
    ),
    Promise(
        "What is configured has an effect, or is refused by name",
        "Every key of the configuration and every argument of `TrainingArguments` is walked; a change between start "
        "and resume is named with its effect.",
        ("config/*.py", "cli/test_config_command.py", "trainer/test_trainer_arguments.py"),
    ),
    Promise(
        "A run is trained on the data that it was started with, each sample as often as it should be",
        "Corpora, packing, blends, shuffles, workers and ranks: the samples of an epoch are counted, also across a "
        "resume with another number of ranks. Documents are encoded whole. A changed corpus, chat or tokenizer file is "
        "named, and training continues on it only if asked.",
        (
            "data/*.py",
            "trainer/test_trainer_data.py",
            "distributed/test_data_kinds_on_ranks.py",
            "cli/test_train_changed_data.py",
            "training/test_data_identity.py",
        ),
    ),
    Promise(
        "The loop does no work when nobody listens",
        "Calls, allocations and device reads of a quiet step are counted; times are measured by `benchmarks/`, never "
        "asserted.",
        ("training/test_quiet_step.py", "training/test_device_reads.py", "trainer/test_trainer_step_cost.py"),
    ),
    Promise(
        "A hang names its cause",
        "Ranks are stopped, killed and put to sleep in collectives, data and callbacks: the run ends within its time "
        "limit with one report that names rank, place and stack.",
        ("training/test_watchdog.py", "training/test_diagnosis.py", "distributed/test_watchdog_on_ranks.py"),
    ),
    Promise(
        "What sites contribute to one model counts exactly once",
        "DiLoCo over real processes and sockets: workers and servers are killed and stopped at every state of the "
        "protocol, requests and answers are lost, repeated and overtaken, networks are cut in two, servers are "
        "restarted, bodies are hostile. The committed parameters are those of the contributions, to the last bit "
        "equal at all workers, and without faults those of data-parallel training.",
        ("diloco/*.py", "diloco/*/*.py", "cli/test_diloco*.py"),
    ),
    Promise(
        "The documentation is true",
        "The examples of the README and the guides run; tables are generated from the code.",
        ("docs/*.py",),
    ),
)


def files_of(promise: Promise, tests: Path = ROOT / "tests") -> list[str]:
    """The test files of a promise, relative to the repository.

    Raises:
        FileNotFoundError: if a pattern matches no file.
    """
    found: set[str] = set()
    for pattern in promise.tests:
        matches = [path for path in tests.glob(pattern) if path.name.startswith("test_")]
        if not matches:
            raise FileNotFoundError(f"tests/{pattern}, named for {promise.title!r}, matches no test file")
        found |= {f"tests/{path.relative_to(tests).as_posix()}" for path in matches}
    return sorted(found)


def page(results: Mapping[str, Any]) -> str:
    """The page, in Markdown."""
    total = _sum(results, results["files"])
    lines = [
        "<!-- written by `make promises`; do not edit -->",
        "# What Onstep promises and how it is tested",
        "",
        f"Each promise with the tests that show it, and the counts of the last complete run (`make promises`): "
        f"{results['date']}, revision {results['revision']}, {results['machine']}, {results['versions']}, "
        f"{results['seconds'] / 60:.0f} minutes. It ran {_counted(total)}. Skipped tests need a GPU or an optional "
        "package.",
        "",
        "| Promise | How it is tested | Tests |",
        "| --- | --- | --- |",
    ]
    for promise in PROMISES:
        files = files_of(promise)
        counted = _counted(_sum(results, files))
        lines.append(f"| **{promise.title}.** | {promise.how} {_shown_tests(promise)} | {counted} |")
    rest = sorted(set(results["files"]) - {name for promise in PROMISES for name in files_of(promise)})
    lines += [f"| Everything else | {len(rest)} test files | {_counted(_sum(results, rest))} |", ""]
    lines += _sweeps(results["counts"])
    return "\n".join(lines) + "\n"


def _shown_tests(promise: Promise) -> str:
    return ", ".join(f"`{pattern}`" for pattern in promise.tests)


def _sum(results: Mapping[str, Any], files: Sequence[str]) -> Counter[str]:
    return sum((Counter(results["files"].get(name, {})) for name in files), Counter())


def _counted(counter: Mapping[str, int]) -> str:
    parts = [f"{counter.get('passed', 0):,} passed"]
    return ", ".join([*parts, f"{counter['skipped']:,} skipped"] if counter.get("skipped") else parts)


def _sweeps(counts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A table for every test that counted something; the counts of its parameters are added up."""
    sums: dict[str, dict[str, Any]] = {}
    for case, values in counts.items():
        of_test = sums.setdefault(case.partition("[")[0], {})
        for key, value in values.items():
            of_test[key] = of_test.get(key, 0) + value if isinstance(value, int) else value
    lines = ["## Sweeps", "", "What the sweeps of that run counted.", ""]
    for name, values in sums.items():
        file, _, test = name.partition("::")
        lines += [f"### {test.removeprefix('test_').replace('_', ' ').capitalize()}", "", f"`{file}`", ""]
        lines += [
            "| Counted | |",
            "| --- | --- |",
            *(f"| {key} | {_shown(value)} |" for key, value in values.items()),
            "",
        ]
    return lines[:-1]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: list[str]) -> int:
    """Write the page; 1 if a test failed, so that it is not written, or the arguments are wrong."""
    if len(arguments) != 1:
        print(__doc__)
        return 1
    results = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    failed = _sum(results, results["files"]).get("failed", 0)
    if failed:
        print(f"{failed} tests failed; the page is not written: fix them and run `make promises` again.")
        return 1
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"{PAGE.name}: {len(PROMISES)} promises")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
