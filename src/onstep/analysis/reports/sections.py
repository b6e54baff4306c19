"""Writes the parts of the report that need no script: tables and texts, as HTML in which everything is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import islice
from typing import Any

from onstep.analysis.logs.decisions_log import EVERYDAY, Decision, decision_lines
from onstep.analysis.logs.samples_log import TextSample, newest_by_step
from onstep.analysis.logs.task_results import Evaluation, metric_words
from onstep.analysis.reports.comparison import Comparison, difference_cells, metric_cells, value_text
from onstep.analysis.reports.ledger import TimeLedger

Cell = tuple[str, str]
"""Text, and the class of the cell."""

MOST_DECISIONS = 100
"""Decisions shown per run: the last ones."""
_MOST_PROMPTS = 4
_TEXT_LENGTH = 1200
_PHASES = ("before", "during", "after")


def summary(comparison: Comparison) -> str:
    """The table of metrics, with the best of the runs in bold."""
    best = {row.name: row.best for row in comparison.metrics}
    head, *rows = metric_cells(comparison)
    body = [
        [
            (cell.removesuffix(" *"), "best" if column - 1 in best.get(row[0], []) else "")
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
    return _section("Summary", _table(head, body))


def configuration(comparison: Comparison) -> str:
    """The differences of the configurations; for a single run, the whole configuration, collapsed."""
    if len(comparison.labels) == 1:
        config = comparison.configs[0]
        if config is None:
            return ""
        rows = [[(key, ""), (value_text(value, 200), "")] for key, value in config.items()]
        return _folded("Configuration", _table(["key", "value"], rows))
    head, *cells = difference_cells(comparison)
    if not cells:
        return _section("Configuration differences", "<p>None known.</p>")
    classes = ["" if one.changes_learning else "safe" for one in comparison.differences]
    body = [[(cell, name) for cell in row] for row, name in zip(cells, classes, strict=True)]
    quiet = '<p class="quiet">Gray: does not affect training results.</p>' if "safe" in classes else ""
    return _section("Configuration differences", f"{quiet}{_table(head, body)}")


def tasks(labels: Sequence[str], of_runs: Sequence[Iterable[Evaluation]]) -> str:
    """What lm-eval's tasks found about each run's weights, newest last."""
    rows = []
    for label, found in zip(labels, of_runs, strict=True):
        for one in found:
            step = "-" if one.step is None else f"{one.step:,}"
            for name, result in one.tasks.items():
                counts = ("-" if each is None else str(each) for each in (result.num_fewshot, result.num_samples))
                cells = (label, step, one.weights, name, *counts, ", ".join(metric_words(result)))
                rows.append([(cell, "") for cell in cells])
    head = ("run", "step", "weights", "task", "shots", "questions", "result")
    return _section("Tasks", _table(head, rows)) if rows else ""


def samples(labels: Sequence[str], of_runs: Sequence[Iterable[TextSample]]) -> str:
    """What each run's model wrote before, during and after training, side by side."""
    parts = [_samples_of(label, newest_by_step(found)) for label, found in zip(labels, of_runs, strict=True)]
    return _section("Text samples", "".join(parts)) if any(parts) else ""


def _samples_of(label: str, by_step: Mapping[int, Mapping[str, str]]) -> str:
    prompts = dict.fromkeys(prompt for texts in by_step.values() for prompt in texts)
    blocks = []
    for prompt in islice(prompts, _MOST_PROMPTS):
        steps = [step for step, texts in by_step.items() if prompt in texts]
        chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
        names = _PHASES if len(chosen) == 3 else (_PHASES[0], _PHASES[2])
        cells = [_sample(step, name, prompt, by_step[step][prompt]) for step, name in zip(chosen, names, strict=False)]
        blocks.append(f'<div class="samples">{"".join(cells)}</div>')
    return f"<h3>{escape(label)}</h3>{''.join(blocks)}" if blocks else ""


def _sample(step: int, phase: str, prompt: str, text: str) -> str:
    shown = text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}..."
    head = f'<figcaption><b>{phase}</b> <span class="quiet">step {step:,}</span></figcaption>'
    return f'<figure>{head}<pre><span class="prompt">{escape(prompt)}</span>{escape(shown)}</pre></figure>'


def time(labels: Sequence[str], ledgers: Sequence[TimeLedger | None]) -> str:
    """Where the wall time of each run went: bars, and a table of the seconds."""
    known = [(label, ledger) for label, ledger in zip(labels, ledgers, strict=True) if ledger is not None]
    if not known:
        return ""
    names = list(dict.fromkeys(name for _, ledger in known for name in ledger.seconds))
    bars = "".join(_bar(label, ledger, names) for label, ledger in known)
    rows = [[(name, ""), *((_share(ledger, name), "") for _, ledger in known)] for name in names]
    rows.append([("total", ""), *((_duration(ledger.total), "best") for _, ledger in known)])
    keys = "".join(f'<li><span class="key part-{index}"></span>{escape(name)}</li>' for index, name in enumerate(names))
    hint = ""
    if not all(ledger.is_measured for _, ledger in known):
        hint = '<p class="quiet">With the callback ThroughputMonitor, the log has a full breakdown.</p>'
    content = f'{hint}<div class="bars">{bars}</div><ul class="keys">{keys}</ul>'
    return _section("Where the time went", content + _table(["", *(label for label, _ in known)], rows))


def _bar(label: str, ledger: TimeLedger, names: Sequence[str]) -> str:
    parts = "".join(
        f'<span class="part-{names.index(name)}" style="width:{100 * seconds / ledger.total:.2f}%"></span>'
        for name, seconds in ledger.seconds.items()
    )
    return f'<div class="label">{escape(label)}</div><div class="bar" aria-hidden="true">{parts}</div>'


def _share(ledger: TimeLedger, name: str) -> str:
    seconds = ledger.seconds.get(name)
    return "-" if seconds is None else f"{_duration(seconds)} ({100 * seconds / ledger.total:.0f} %)"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def decisions(labels: Sequence[str], of_runs: Sequence[Iterable[Decision]]) -> str:
    """What was decided in each run, by whom and why; logs and evaluations are left out."""
    parts, total = [], 0
    for label, found in zip(labels, of_runs, strict=True):
        chosen = [one for one in found if one.get("flag") not in EVERYDAY]
        if chosen:
            total += len(chosen)
            parts.append(_decisions_of(label, chosen))
    return _folded(f"Decisions ({total:,})", "".join(parts)) if parts else ""


def _decisions_of(label: str, found: Sequence[Decision]) -> str:
    rows = []
    for one in found[-MOST_DECISIONS:]:
        first, *more = decision_lines(one)
        rows.append([(f"step {one.get('step', '?')}", ""), (_when(one.get("timestamp")), "quiet"), (first, "words")])
        rows += [[("", ""), ("", ""), (line.strip(), "words quiet")] for line in more]
    left_out = len(found) - MOST_DECISIONS
    note = f'<p class="quiet">{left_out:,} earlier ones: onstep why</p>' if left_out > 0 else ""
    return f"<h3>{escape(label)}</h3>{note}{_table((), rows)}"


def machines(labels: Sequence[str], records: Sequence[Mapping[str, Any]]) -> str:
    """Machine, versions and code of each run, as its run.json records them."""
    facts = [_facts(record) for record in records]
    names = list(dict.fromkeys(name for one in facts for name in one))
    rows = [[(name, ""), *((one.get(name, "-"), "") for one in facts)] for name in names]
    return _section("Machine, versions and code", _table(["", *labels], rows)) if rows else ""


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    code, machine, versions = (_mapping(record.get(name)) for name in ("code", "machine", "versions"))
    later = _mapping(record.get("continued_with"))
    found = {"started": _when(record.get("started_at")) if "started_at" in record else ""}
    if code:
        found["code"] = _revision(code)
    gpus = machine.get("gpus")
    found |= {name: str(machine[name]) for name in ("host", "system", "processor", "cpus") if name in machine}
    if isinstance(gpus, list):
        found["GPUs"] = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(map(str, gpus)))
    found |= {str(name): str(value) for name, value in versions.items()}
    if later:
        found["continued with"] = _changes(record, later)
    return {name: text for name, text in found.items() if text}


def _revision(code: Mapping[str, Any]) -> str:
    branch = f" ({code['branch']})" if "branch" in code else ""
    return f"{str(code.get('revision', ''))[:12]}{branch}{', with uncommitted changes' if code.get('dirty') else ''}"


def _changes(before: Mapping[str, Any], later: Mapping[str, Any]) -> str:
    """What was different when the run was continued."""
    words = [f"code {_revision(_mapping(later['code']))}"] if "code" in later else []
    for part in ("machine", "versions"):
        known = _mapping(before.get(part))
        changed = ((name, value) for name, value in _mapping(later.get(part)).items() if known.get(name) != value)
        words += [f"{name} {value}" for name, value in changed]
    return "; ".join(words)


def rewound_step(
    title: str,
    facts: Sequence[str],
    samples: Sequence[Sequence[str]],
    notes: Sequence[tuple[str, str]],
    layers: Sequence[Sequence[str]],
) -> str:
    """A step of the past that was repeated: its facts, its samples with a note on each, and its layers.

    Args:
        title: of the section.
        facts: a paragraph each.
        samples: rows of a table, heading first.
        notes: a heading and a text each, which may have several lines.
        layers: rows of a table, heading first.
    """
    paragraphs = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    tables = [_table(rows[0], [[(cell, "") for cell in row] for row in rows[1:]]) for rows in (samples, layers)]
    texts = "".join(f"<h3>{escape(head)}</h3><pre>{escape(text)}</pre>" for head, text in notes)
    return _section(title, paragraphs + tables[0]) + _folded("Its samples", texts) + _folded("Its layers", tables[1])


def notes(texts: Sequence[str]) -> str:
    """Remarks on what was unknown or had to be recovered."""
    return _section("Notes", f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>") if texts else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _when(timestamp: Any) -> str:
    """Unix seconds as a date and time in UTC; empty for anything else."""
    try:
        return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary><h2>{escape(title)}</h2></summary>{content}</details>"


def _table(head: Sequence[str], body: Sequence[Sequence[Cell]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f'<td class="{name}">{escape(cell)}</td>' for cell, name in row) + "</tr>" for row in body
    )
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{above}<tbody>{rows}</tbody></table></div>'
