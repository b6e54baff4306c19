"""The parts of the documentation that are read from the code: a mkdocs hook, named in mkdocs.yml, writes no file.

A page holds a marker, a comment such as `<!-- generated: moments -->`, and the site shows the table in its place.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from onstep.cli.why_features import PARTS, Row
from onstep.config import ConfigContainer, ConfigPart, TrainingArguments
from onstep.config.argument_rules import REASONS, ReservedArguments
from onstep.events import MOMENTS
from onstep.events.events import Moment
from onstep.training import loop
from onstep.training.feature import HOOKS, Feature

MARKER = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)
_TRAINING_FIELDS = ("optimizer", "scheduler", "train_dataloader", "eval_dataloader")


@dataclass(frozen=True)
class Entry:
    """One field of a dataclass, as a row of a table shows it."""

    name: str
    annotation: str
    default: str
    text: str


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts where a page has their markers. Called by mkdocs for every page."""
    return fill(markdown)


def fill(markdown: str) -> str:
    """`markdown` with every marker replaced.

    Raises:
        KeyError: for a marker that names nothing; mkdocs stops the build.
    """
    return MARKER.sub(lambda match: GENERATED[match[1]](), markdown)


def moments_table() -> str:
    """Every moment, in firing order."""
    rows = [(_names(moment), f"{moment.when}.", _fields_of(moment)) for moment in MOMENTS]
    return _table(("Moment", "When it is told", "Has, beyond the common fields"), rows)


def loop_source() -> str:
    """The loop itself."""
    return f"```python\n{inspect.getsource(loop)}```"


def feature_table() -> str:
    """Every feature of the loop, in order."""
    rows = []
    for part, (kinds, _) in PARTS.items():
        for row in map(Row.of, kinds):
            hooks = [f"`{name}`" for name in row.hooks] + [f"`wrap_{name}`" for name in row.wraps]
            when = re.sub(r"(?<!`)\b([a-z_]+\.[a-z_]+)\b(?!`)", r"`\1`", row.when)
            collective = "yes" if row.is_collective else ""
            rows.append((f"`{row.name}`", part, when, ", ".join(hooks), row.state, collective))
    return _table(("Feature", "Part", "Wanted", "Hooks and wrappers", "State", "Collective"), rows)


def hook_table() -> str:
    """What a feature may override, in the order in which a run meets it."""
    rows = [(f"`{name}`", _prose(inspect.getdoc(getattr(Feature, name)) or "")) for name in HOOKS]
    return _table(("Hook", "When it is called, or what it gives"), rows)


def configuration_tables() -> str:
    """Every key of `ConfigContainer`: a section and a table for each part, then the keys beside them."""
    sections, loose = [], []
    for field in fields(ConfigContainer):
        part = field.default_factory if inspect.isclass(field.default_factory) else None
        if part is not None and issubclass(part, ConfigPart):
            keys = _key_table(entries(part), f"{field.name}.")
            sections.append(f"### `{field.name}`\n\n{_prose(inspect.getdoc(part) or '')}\n\n{keys}")
        else:
            loose.append(field.name)
    beside = [entry for entry in entries(ConfigContainer) if entry.name in loose]
    return "\n\n".join([*sections, f"### Beside the sections\n\n{_key_table(beside, '')}"])


def argument_table() -> str:
    """The `TrainingArguments` that have an effect."""
    reserved = {field.name for field in fields(ReservedArguments)}
    return _key_table([entry for entry in entries(TrainingArguments) if entry.name not in reserved], "")


def refused_table() -> str:
    """The `TrainingArguments` that are accepted at their default only."""
    rows = [
        (f"`{entry.name}`", f"`{entry.default}`", _prose(REASONS.get(entry.name, "")))
        for entry in entries(ReservedArguments)
    ]
    return _table(("Argument", "Accepted value", "Why, or what instead"), rows)


GENERATED: dict[str, Callable[[], str]] = {
    "moments": moments_table,
    "loop": loop_source,
    "features": feature_table,
    "hooks": hook_table,
    "configuration": configuration_tables,
    "arguments": argument_table,
    "refused arguments": refused_table,
}
"""What a marker may name."""


def entries(cls: type) -> Iterator[Entry]:
    """The fields of a dataclass, each with the doc string that follows it in the source."""
    texts = _field_docs(cls)
    for field in fields(cls):
        if field.init:
            yield Entry(field.name, str(field.type), _default(field), texts.get(field.name, ""))


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return "required"


def _field_docs(cls: type) -> dict[str, str]:
    """The string below each annotated name of a class body."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    [definition] = tree.body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs


def _names(moment: Moment) -> str:
    same = moment.hf_name == moment.name
    return f"`{moment.name}`" if same else f"`{moment.name}`<br>`{moment.hf_name}`"


def _fields_of(moment: Moment) -> str:
    names = [name for name in moment.fields if name not in _TRAINING_FIELDS]
    training = [name for name in moment.fields if name in _TRAINING_FIELDS]
    shown = [f"`{name}`" for name in names]
    if training == list(_TRAINING_FIELDS):
        shown.append("the training objects")
    else:
        shown += [f"`{name}`" for name in training]
    return ", ".join(shown)


def _key_table(rows: Iterable[Entry], prefix: str) -> str:
    return _table(
        ("Key", "Type", "Default", "Meaning"),
        [(f"`{prefix}{row.name}`", f"`{row.annotation}`", f"`{row.default}`", _prose(row.text)) for row in rows],
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """One line; a `|` outside of code would end the cell."""
    return " ".join(_outside_code(text, {"|": "\\|"}).split())


def _prose(text: str) -> str:
    """A doc string as Markdown: what looks like HTML outside of code is text."""
    return _outside_code(text, {"<": "&lt;", "*": "\\*"})


def _outside_code(text: str, replacements: dict[str, str]) -> str:
    parts = text.split("`")
    parts[::2] = ["".join(replacements.get(letter, letter) for letter in part) for part in parts[::2]]
    return "`".join(parts)
