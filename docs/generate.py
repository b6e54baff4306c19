"""Writes the parts of the documentation that are read from the code into the pages, and the typed methods of commands.

    python docs/generate.py [--check]

A part is the text between two comments, such as `<!-- generated: events -->` and `<!-- end of generated part -->`; in a
module of `MODULES` they begin with `#`. The pages are committed with it, so the repository shows what the site shows.
`--check` writes nothing, and exits with 1 and the names of the pages whose text is stale.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import typer

from onstep import callbacks, control
from onstep.cli.application import application_at
from onstep.cli.control.group import VERBS
from onstep.cli.device_waits import DEVICE_WAITS
from onstep.cli.main import COMMANDS as CLI
from onstep.cli.memory import GPU_SIZES, USABLE
from onstep.cli.why_features import PARTS, Row
from onstep.commands import COMMANDS, Command, Parameter
from onstep.config import KEYS, Key, TrainingArguments
from onstep.config.bridge.rules import Rule
from onstep.config.bridge_outcomes import outcome, rules
from onstep.config.hf.argument import KEY_OF
from onstep.config.hf.reserved import REASONS, reserved_fields
from onstep.control.client import functions
from onstep.events import EVENTS, Callback, TrainerCallback
from onstep.events.events import Event
from onstep.exchange.names import KEPT, NAMES
from onstep.metrics.flops import num_floating_point_operations
from onstep.metrics.memory.estimate import estimate_training_memory
from onstep.recipes import get_recipe
from onstep.trackers import TRACKERS, tracker_class
from onstep.trainer.overrides import METHODS
from onstep.training import loop
from onstep.training.feature import HOOKS, Feature

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
RENEW = "make docs-tables"
"""The command that writes the parts again."""

END = "<!-- end of generated part -->"
CONTROL = DOCS.parent / "src/onstep/control"
MODULES = (CONTROL / "__init__.py", CONTROL / "client/functions.py", CONTROL / "client/interface.py")
"""Modules with typed names for the commands of the table."""
CODE = re.compile(r"^(?P<head> *# generated: (?P<name>.+?)\n).*?^(?P<end> *# end of generated part)$", re.M | re.S)
PART = re.compile(rf"^<!-- generated: (?P<name>.+?) -->\n(?P<text>.*?)^{re.escape(END)}$", re.MULTILINE | re.DOTALL)
_USAGE = {"set": " KEY=VALUE ...", "send": " COMMAND --data JSON"}
"""Words of the verbs of `onstep control` that the table of commands does not have."""
_TRAINING_FIELDS = ("optimizer", "scheduler", "train_dataloader", "eval_dataloader")


@dataclass(frozen=True)
class Entry:
    """One field of a dataclass, as shown in a row of a table."""

    name: str
    annotation: str
    default: str
    text: str


def fill(markdown: str) -> str:
    """`markdown` with every generated part renewed.

    Raises:
        KeyError: for a part with an unknown name.
    """
    return PART.sub(
        lambda part: f"<!-- generated: {part['name']} -->\n\n{GENERATED[part['name']]()}\n\n{END}", markdown
    )


def fill_code(source: str) -> str:
    """The source of a module with every generated part renewed."""
    return CODE.sub(lambda part: f"{part['head']}{COMMAND_PARTS[part['name']]()}\n{part['end']}", source)


def stale_pages(docs: Path = DOCS, modules: Sequence[Path] = MODULES) -> dict[Path, str]:
    """The pages whose generated parts differ from what the code says, each with the text that it should have."""
    files = [*((page, fill) for page in sorted(docs.rglob("*.md"))), *((module, fill_code) for module in modules)]
    texts = ((file, renew, file.read_text(encoding="utf-8")) for file, renew in files)
    return {file: renewed for file, renew, text in texts if (renewed := renew(text)) != text}


_PEAKS = {"H100": (80, 989e12), "RTX 4090": (24, 165e12)}
"""Memory in GB and dense bfloat16 operations per second. Source: NVIDIA's data sheet of the H100 SXM, and its white
paper of the Ada architecture (with accumulation in float32)."""
_UTILIZATION, _TOKENS, _SEQ_LENGTH = 0.35, 10_000_000, 2048
_SIZES = ("llama32_1b", "qwen25_3b", "qwen25_7b", "llama31_8b", "qwen25_14b", "llama31_70b")
_METHODS = {"all weights": ("", None), "LoRA": ("_lora", None), "QLoRA": ("_lora", "nf4")}


def hours_table() -> str:
    """Memory and hours of fine-tuning each size, as estimates."""
    rows = [_hours_row(name, method) for name in _SIZES for method in _METHODS]
    cards = [f"Hours on {card}" for card in _PEAKS]
    return _table(("Recipe", "Trained", "Memory, GB", "One GPU of", *cards), rows)


def _hours_row(name: str, method: str) -> tuple[str, ...]:
    form, quantization = _METHODS[method]
    config = get_recipe(f"{name}_finetune{form}")()
    config.dataset.seq_length = config.model.seq_length = _SEQ_LENGTH
    config.model.recompute_granularity, config.peft.base_quantization = "full", quantization
    estimate = estimate_training_memory(config)
    assert estimate is not None
    needed = estimate.total / USABLE / 1024**3
    size = next((str(size) for size in GPU_SIZES if needed <= size), "none")
    operations = num_floating_point_operations(config, 1) / _SEQ_LENGTH * _TOKENS
    hours = [
        f"{operations / (_UTILIZATION * peak) / 3600:.2g}" if needed <= memory else "does not fit"
        for memory, peak in _PEAKS.values()
    ]
    size = size if size == "none" else f"{size} GB"
    return (f"`{name}_finetune{form}`", method, f"{estimate.total / 1e9:.1f}", size, *hours)


def events_table() -> str:
    """Every event, in firing order."""
    rows = [(_names(event), f"{event.when}.", _fields_of(event)) for event in EVENTS]
    return _table(("Event", "When it fires", "Fields beyond the common ones"), rows)


def readme() -> str:
    """README, with links from `docs/`, without its title and the sections that the site itself is."""
    _, *sections = re.split(r"^##? ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    introduction = sections.pop(0).partition("\n")[2]
    kept = [f"## {section}" for section in sections if not section.startswith(("Documentation\n", "License\n"))]
    return "".join([introduction, *kept]).strip().replace("](docs/", "](")


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


def wait_table() -> str:
    """What makes the host wait for an accelerator in a quiet step."""
    return _table(("What", "How often in a step", "Why"), [(one.what, one.times, one.why) for one in DEVICE_WAITS])


def hook_table() -> str:
    """The hooks of a feature, in the order in which a run reaches them."""
    rows = [(f"`{name}`", _prose(inspect.getdoc(getattr(Feature, name)) or "")) for name in HOOKS]
    return _table(("Hook", "When it is called, or what it returns"), rows)


def common_table() -> str:
    """The keys that most runs set."""
    return _key_table([key for key in KEYS.values() if key.option.common])


def configuration_tables(keys: Mapping[str, Key] = KEYS) -> str:
    """Every key of a configuration: a heading and a table for each section, then the keys outside the sections."""
    tables = []
    for kind, group in itertools.groupby(keys.values(), key=lambda key: key.section):
        table, (name, dot, _) = list(group), next(key for key in keys if keys[key].section is kind).partition(".")
        head = f"### `{name}`\n\n{_prose(inspect.getdoc(kind) or '')}" if dot else "### Outside the sections"
        tables.append(f"{head}\n\n{_key_table(table)}")
    return "\n\n".join(tables)


def argument_table() -> str:
    """The `TrainingArguments` that have an effect."""
    reserved = {field.name for field in reserved_fields()}
    rows = [
        (f"`{entry.name}`", f"`{entry.annotation}`", f"`{entry.default}`", _prose(entry.text or _help_of(entry.name)))
        for entry in entries(TrainingArguments)
        if entry.name not in reserved
    ]
    return _table(("Argument", "Type", "Default", "Meaning"), rows)


def refused_table() -> str:
    """The `TrainingArguments` that are accepted at their default only."""
    rows = [
        (f"`{field.name}`", f"`{_default(field)}`", _prose(REASONS.get(field.name, ""))) for field in reserved_fields()
    ]
    return _table(("Argument", "Accepted value", "Why, or what instead"), rows)


def called_overrides() -> str:
    """When each overridden method of a Trainer is called."""
    when: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        if method.called:
            when.setdefault(method.called, []).append(f"`{name}`")
    return _table(("Called", "Override of"), [(moment, ", ".join(names)) for moment, names in when.items()])


def refused_overrides() -> str:
    """Which overridden methods of a Trainer are refused in which training, and those that no training needs."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, method in METHODS.items():
        if not method.called:
            row = (method.refused, method.instead) if method.refused else ("never", f"nothing: {method.unneeded}")
            rows.setdefault(row, []).append(f"`{name}`")
    cells = [(", ".join(names), when, instead) for (when, instead), names in rows.items()]
    return _table(("Override of", "Refused", "Instead"), cells)


def tracker_table() -> str:
    """Every tracker, from its class."""
    kinds = map(tracker_class, TRACKERS)
    rows = [(f"`{kind.name}`", f"`onstep[{kind.name}]`" if kind.package else "", kind.place) for kind in kinds]
    return _table(("Name in `report_to`", "Extra", "Where it writes"), rows)


def callback_table() -> str:
    """Every built-in callback, from its docstring, with its section of the pages beside the table."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in sorted((DOCS / "callbacks").glob("*.md"))}
    rows = []
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        is_alias = getattr(kind, "__name__", "") != name
        if inspect.isclass(kind) and issubclass(kind, Callback | TrainerCallback) and not is_alias:
            summary = (inspect.getdoc(kind) or "").partition("\n\n")[0]
            own = f"[`{name}`](../reference/callbacks.md#onstep.callbacks.{name})"
            rows.append((own, _prose(summary.replace("``", "`")), _section_of(name, pages)))
    return _table(("Callback", "What it does", "More"), rows)


def _section_of(name: str, pages: Mapping[str, str]) -> str:
    """A link to the heading with this name, and the title of its page.

    Raises:
        KeyError: if no page has one.
    """
    for page, text in pages.items():
        if heading := re.search(rf"^(##?) {name}$", text, re.MULTILINE):
            anchor, title = f"#{name.lower()}" if heading[1] == "##" else "", text.splitlines()[0].removeprefix("# ")
            return f"[{title}]({page}{anchor})"
    raise KeyError(f"no page of docs/callbacks has a heading {name}")


def exchanged_names() -> str:
    """The table of names that are Onstep's after the exchange."""
    rows = [
        (f"`{module}`", f"`{name}`", f"`{to.replace(':', '.')}`")
        for module, names in NAMES.items()
        for name, to in names.items()
    ]
    return _table(("Module", "Name", "Is then"), rows)


def kept_names() -> str:
    """The table of names that remain those of transformers."""
    rows = [(f"`{module}`", ", ".join(f"`{name}`" for name in names.split())) for module, names in KEPT.items()]
    return _table(("Module", "Names"), rows)


def verbs_of_control() -> str:
    """The verbs of `onstep control`."""
    usage = {command.verb: "".join(map(_option, command.parameters)) for command in COMMANDS.values()} | _USAGE
    asking = [command.verb for command in COMMANDS.values() if command.loses]
    rows = []
    for verb, function in VERBS.items():
        text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        rows.append((f"`{verb}{usage.get(verb, '')}`", _prose(text) + (" Asks first." if verb in asking else "")))
    return _table(("Command", "What it does"), rows)


def _option(parameter: Parameter) -> str:
    """An option of a command, with a blank before it."""
    name, *_ = parameter.options or (f"--{parameter.name.replace('_', '-')}",)
    return f" {name} {'TEXT' if parameter.kind is list else 'N'}"


def counts_of_bridge() -> str:
    """How many keys of each recipe of Megatron Bridge have an effect, are neutral and are refused."""
    rows = []
    for name, values in _recipes_of_bridge().items():
        kinds = Counter(outcome(key, value).kind for key, value in values.items())
        rows.append((f"`{name}`", str(kinds.total()), *(str(kinds[kind]) for kind in ("effect", "neutral", "refused"))))
    return _table(("Recipe", "Keys", "Effect", "Neutral", "Refused"), rows)


def effects_of_bridge() -> str:
    """Bridge's keys with an effect under another name, and those of its recipes with the same name, by section."""
    renamed = [
        (f"`{key}`", ", ".join(f"`{one}`" for one in rule.becomes), _said(rule))
        for key, rule in rules()
        if rule.becomes
    ]
    same: dict[str, list[str]] = {}
    for key in sorted({key for values in _recipes_of_bridge().values() for key in values} - dict(rules()).keys()):
        section, _, name = key.rpartition(".")
        same.setdefault(section or "(beside the sections)", []).append(f"`{name}`")
    table = _table(("Section", "The same name here"), [(f"`{one}`", ", ".join(names)) for one, names in same.items()])
    return f"{_table(('Key', 'Sets', 'How'), renamed)}\n\n{table}"


def _said(rule: Rule) -> str:
    """How a key with an effect acts, and which values it must have."""
    return f"{' or '.join(f'`{value}`' for value in rule.written)}: {rule.why}" if rule.remedy else rule.why


def neutral_keys_of_bridge() -> str:
    """Bridge's neutral keys, together where the reason is the same; with the values that are accepted."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, rule in rules():
        section, _, name = key.rpartition(".")
        if not rule.becomes:
            accepted = "" if rule.accepts is None else " " + " or ".join(f"`{value}`" for value in rule.written)
            groups.setdefault((section, rule.why, rule.remedy), []).append(f"`{name}`{accepted}")
    rows = [
        (f"`{section}`" if section else "", ", ".join(names), why, remedy)
        for (section, why, remedy), names in groups.items()
    ]
    return _table(("Section", "Keys and accepted values", "Why", "Instead of another value"), rows)


def refused_values_of_bridge() -> str:
    """The values in the recipes that are refused, as the error says it."""
    rows = [
        (f"`{name}`", found.text)
        for name, values in _recipes_of_bridge().items()
        for key, value in values.items()
        if (found := outcome(key, value)).kind == "refused"
    ]
    return _table(("Recipe", "Refused"), rows)


def _recipes_of_bridge() -> dict[str, dict[str, Any]]:
    """The configurations that Megatron Bridge writes for six of its recipes, by dotted keys."""
    written = json.loads((DOCS.parent / "tests/support/contract/bridge_recipes.json").read_text(encoding="utf-8"))
    first = {"qwen25_500m": written["qwen25_500m"]}
    others = {name: {**first["qwen25_500m"], **values} for name, values in written["differences"].items()}
    return {
        name: {key: value for key, value in values.items() if not key.endswith("_target_")}
        for name, values in (first | others).items()
    }


def command_line() -> str:
    """Every command of `onstep`: its usage, what it does, its arguments and options."""
    return "\n\n".join(
        part for name, (place, _) in CLI.items() for part in _commands(f"onstep {name}", application_at(place))
    )


def _commands(path: str, application: typer.Typer) -> Iterator[str]:
    command: Any = typer.main.get_command(application)
    yield f"## {path}"
    if subcommands := getattr(command, "commands", {}):
        yield _prose(inspect.cleandoc(command.help or ""))
    for name, one in (subcommands or {"": command}).items():
        if name:
            yield f"### {path} {name}"
        yield from _command(one, f"{path} {name}".strip())


def _command(command: Any, path: str) -> Iterator[str]:
    """One command, as its `--help` has it."""
    context = command.context_class(command, info_name=path)
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```"
    yield _prose(inspect.cleandoc(command.help or ""))
    records = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [(f"`{_typed(words)}`", _prose(" ".join(text.split()))) for words, text in filter(None, records)]
    yield _table(("Argument or option", "Meaning"), [row for row in rows if "--help" not in row[0]])


def _typed(words: str) -> str:
    """The names of a parameter and its value; the type only where no word stands for the value."""
    names, _, kind = " ".join(words.split()).partition(" <")
    value = ("N" if "int" in kind else "X" if "float" in kind else "TEXT") if kind and names.startswith("-") else ""
    return f"{names} {value}".strip()


GENERATED: dict[str, Callable[[], str]] = {
    "readme": readme,
    "called overrides": called_overrides,
    "refused overrides": refused_overrides,
    "events": events_table,
    "hours": hours_table,
    "loop": loop_source,
    "features": feature_table,
    "waits": wait_table,
    "hooks": hook_table,
    "common keys": common_table,
    "configuration": configuration_tables,
    "arguments": argument_table,
    "refused arguments": refused_table,
    "trackers": tracker_table,
    "callbacks": callback_table,
    "counts of bridge": counts_of_bridge,
    "effects of bridge": effects_of_bridge,
    "neutral keys of bridge": neutral_keys_of_bridge,
    "refused values of bridge": refused_values_of_bridge,
    "control verbs": verbs_of_control,
    "command line": command_line,
    "exchanged names": exchanged_names,
    "kept names": kept_names,
}
"""The generated parts, by the name in their marker."""


def command_methods() -> str:
    """The methods of a client, one for each command."""
    return "\n\n".join(map(_method, _sent())) + "\n"


def command_functions() -> str:
    """The functions of `onstep.control`."""
    text = '{0} = _client.{0}\n"""`TrainerControlClient.{0}` for the jobs of this user on this machine."""'
    return "\n".join(text.format(command.function) for command in _sent())


def names_of_control() -> str:
    """`onstep.control.__all__`."""
    return "\n".join(["__all__ = [", *(f'    "{name}",' for name in sorted({*control.HOMES, *_functions()})), "]"])


COMMAND_PARTS = {
    "methods": command_methods,
    "functions": command_functions,
    "names": names_of_control,
}
"""The generated parts of modules."""


def _sent() -> list[Command]:
    return [command for command in COMMANDS.values() if command.verb]


def _functions() -> list[str]:
    own = {name for name, value in vars(functions).items() if inspect.isroutine(value)}
    return sorted(own | {command.function for command in _sent()})


def _method(command: Command) -> str:
    arguments = ["job_id: str", *map(_argument, command.parameters), f"wait: float | None = {command.wait}"]
    head = ", ".join(["self", *arguments])
    lines = [f"    def {command.function}({head}) -> ControlResponse:"]
    if len(lines[0]) > 120:
        lines = [f"    def {command.function}(", f"        {head}", "    ) -> ControlResponse:"]
    lines.append(f'        """{command.help}."""')
    values = {one.name: f"_texts({one.name})" if one.kind is list else one.name for one in command.parameters}
    given = "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}, wait"
    call = f'self.send_command(job_id, "{command.name}", {given if values else "wait=wait"})'
    if len(call) > 105:
        lines.append(f"        data = {given.removesuffix(', wait')}")
        call = f'self.send_command(job_id, "{command.name}", data, wait)'
    return "\n".join([*lines, f"        return {call}"])


def _argument(parameter: Parameter) -> str:
    kind = "Sequence[str]" if parameter.kind is list else parameter.kind.__name__
    optional = " | None" if parameter.may_be_null else ""
    default = "" if parameter.required else f" = {parameter.default!r}"
    return f"{parameter.name}: {kind}{optional}{default}"


def entries(cls: type) -> Iterator[Entry]:
    """The fields of a dataclass, each with the docstring that follows it in the source."""
    texts = _field_docs(cls)
    for field in fields(cls):
        if field.init:
            yield Entry(field.name, _annotation(cls, field.name), _default(field), texts.get(field.name, ""))


def _annotation(cls: type, name: str) -> str:
    """As it is written; the field's own `type` is replaced by those who parse arguments, such as HfArgumentParser."""
    return str(next(kind.__annotations__[name] for kind in cls.__mro__ if name in inspect.get_annotations(kind)))


def _default(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    if field.default_factory is not MISSING:
        return repr(field.default_factory())
    return "required"


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring below each annotated name of the bodies of a class and its bases."""
    docs: dict[str, str] = {}
    for kind in reversed([one for one in cls.__mro__ if one.__module__.startswith("onstep")]):
        docs |= _own_field_docs(kind)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
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


def _names(event: Event) -> str:
    same = event.hf_name == event.name
    return f"`{event.name}`" if same else f"`{event.name}`<br>`{event.hf_name}`"


def _fields_of(event: Event) -> str:
    names = [name for name in event.fields if name not in _TRAINING_FIELDS]
    training = [name for name in event.fields if name in _TRAINING_FIELDS]
    shown = [f"`{name}`" for name in names]
    if training == list(_TRAINING_FIELDS):
        shown.append("the training objects")
    else:
        shown += [f"`{name}`" for name in training]
    return ", ".join(shown)


def _key_table(keys: Iterable[Key]) -> str:
    rows = [
        (
            f"`{key.name}`",
            f"`{_written(key)}`",
            f"`{key.default!r}`",
            _prose(_help(key)),
            key.option.on_change.value,
            f"`{key.option.hf}`" if key.option.hf else "",
        )
        for key in keys
    ]
    return _table(("Key", "Type", "Default", "Meaning", "If changed", "In `TrainingArguments`"), rows)


def _written(key: Key) -> str:
    """The type as the source spells it."""
    return _annotation(key.section, key.name.rpartition(".")[2])


def _help(key: Key) -> str:
    bound = key.option.bound
    return f"{key.option.help} Must be {bound.text}." if bound else key.option.help


def _help_of(argument: str) -> str:
    """The help of the key that has the same value as an argument."""
    return _help(KEY_OF[argument]) if argument in KEY_OF else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """`text` on one line, with each `|` written so that neither GitHub nor the site ends the cell there."""
    parts = text.split("`")
    parts[::2] = [prose.replace("|", "\\|") for prose in parts[::2]]
    parts[1::2] = [f"<code>{_as_html(code)}</code>" if "|" in code else f"`{code}`" for code in parts[1::2]]
    return " ".join("".join(parts).split())


def _as_html(code: str) -> str:
    """`code` for a `<code>` element, inside of which Markdown is still read."""
    return "".join(f"&#{ord(letter)};" if letter in "&<>|*_[]`" else letter for letter in code)


def _prose(text: str) -> str:
    """A docstring as Markdown, with what looks like HTML outside of code escaped."""
    return _outside_code(text, {"<": "&lt;", "*": "\\*"})


def _outside_code(text: str, replacements: dict[str, str]) -> str:
    parts = text.split("`")
    parts[::2] = ["".join(replacements.get(letter, letter) for letter in part) for part in parts[::2]]
    return "`".join(parts)


def main(arguments: Sequence[str] = ()) -> int:
    """Renew the pages, or with `--check` only name those that are stale; the exit code."""
    stale = stale_pages()
    names = ", ".join(str(page.relative_to(DOCS.parent)) for page in stale)
    if "--check" in arguments:
        print(f"stale: {names}; run {RENEW}" if stale else "every generated part is up to date")
        return bool(stale)
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
    print(f"renewed: {names or 'nothing, every part was up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
