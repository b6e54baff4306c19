"""Prints an explanation for a terminal."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from textwrap import wrap

from onstep.explain.explaining import ClassRow, Explanation, Row, count

_WIDTH = 80
_A = {
    "trainer": "a Trainer",
    "args": "TrainingArguments",
    "callback": "a callback",
    "callback_handler": "a CallbackHandler",
    "state": "a TrainerState",
    "control": "a TrainerControl",
    "collator": "a data collator, called as it is",
}


def report(explanation: Explanation, program: str, width: int = _WIDTH) -> list[str]:
    """The explanation of a script as lines of at most `width` columns.

    What is honoured is counted, and in the script itself listed; everything else is listed with its remedy.
    """
    lines = [*_exchanged(explanation, program, width), ""]
    by_owner = defaultdict[str, list[Row]](list)
    for row in [*explanation.overrides, *explanation.attributes]:
        by_owner[row.owner].append(row)
    for one in explanation.classes:
        lines += [*_class(one, by_owner.pop(one.name, []), width), ""]
    for owner, rows in by_owner.items():
        others = [row for row in rows if row.outcome != "honoured"]
        if others:
            lines += [f"{owner}, outside of those classes", *_rows(others, width), ""]
    if explanation.assigned:
        lines += ["Assigned to classes and modules of transformers", *_rows(explanation.assigned, width), ""]
    if explanation.not_found:
        words = f"Not found, and not looked into: {', '.join(explanation.not_found)}."
        lines += [*wrap(words, width, subsequent_indent="  "), ""]
    return [*lines, *wrap(_sum(explanation), width)]


def _exchanged(explanation: Explanation, program: str, width: int) -> Iterator[str]:
    number = sum(map(len, explanation.exchanged.values()))
    yield from wrap(f"onstep run {program}: {number} names of transformers would be Onstep's", width)
    for module, names in explanation.exchanged.items():
        yield from wrap(f"{module}: {', '.join(names)}", width, initial_indent="  ", subsequent_indent="    ")


def _class(one: ClassRow, rows: list[Row], width: int) -> Iterator[str]:
    place = f"{os.path.basename(one.path)}:{one.line}"
    is_script = one.name.startswith("__main__.")
    yield from wrap(
        f"{one.name.removeprefix('__main__.')} ({place}), {_A.get(one.kind, one.kind)}", width, subsequent_indent="  "
    )
    overrides = [row for row in rows if row.verb in ("override", "assign")]
    honoured = [row for row in overrides if row.outcome == "honoured"]
    if is_script and honoured:
        yield from _rows(honoured, width)
    elif overrides:
        yield f"  {len(honoured)} of {len(overrides)} overrides honoured"
    uses = [row for row in rows if row not in overrides]
    if uses:
        known = sum(row.outcome == "honoured" for row in uses)
        yield f"  {known} of {len(uses)} attributes are there"
    yield from _rows([row for row in rows if row.outcome != "honoured"], width)


def _rows(rows: Iterable[Row], width: int) -> Iterator[str]:
    for row in rows:
        text = f"{row.words:<12}  {row.name}{f': {row.remark}' if row.remark else ''} (line {row.line})"
        yield from wrap(text, width, initial_indent="  ", subsequent_indent=" " * 18, break_long_words=False)


def _sum(explanation: Explanation) -> str:
    overrides, attributes = count(explanation.overrides), count(explanation.attributes)
    return (
        f"In all: {overrides['honoured']} of {overrides.total()} overrides honoured, {overrides['refused']} refused, "
        f"{overrides['never']} never called, {overrides['missing']} missing; {attributes['honoured']} of "
        f"{attributes.total()} attributes are there, {attributes['refused']} refused, {attributes['missing']} missing."
    )
