"""`onstep rewind`: repeats a run to a step of its past, compares it with the record, and shows the step."""

from __future__ import annotations

import code
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.analysis.text_tables import printable, table
from onstep.cli.application import Imports
from onstep.cli.completed_words import complete_runs
from onstep.cli.config import import_file, load_callback
from onstep.cli.first_checks import is_main
from onstep.cli.program import Program
from onstep.cli.script import MODULE_OPTION, WORDS, run_to_training
from onstep.cli.why import find_run
from onstep.errors import ConfigError, OnstepError, named_text
from onstep.exchange.install import exchanged

if TYPE_CHECKING:
    from onstep.past import Past, Plan
    from onstep.past.metrics import Log
    from onstep.past.view import StepView

Rewind = Callable[..., AbstractContextManager["Past"]]
"""`onstep.rewind`, or what does the same with the Trainer of a script."""
_MOST_ROWS = 50
"""Steps of `--log` that a terminal shows: the last ones."""
_OPERATORS = 15
"""Operators that `--profile` shows."""


def rewind(
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", autocompletion=complete_runs, help="A run's directory, or its name below runs/."),
    ],
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="The step; the first one is 1. Not with --when.")
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR", help='Find the first step for which this holds, such as "grad_norm > 10", logged or not.'
        ),
    ] = None,
    from_step: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="With --when: look at each step from this one on.")
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="each", help="Drop each sample of the step in turn, and rank them by the losses that would follow."
        ),
    ] = None,
    horizon: Annotated[
        int, typer.Option(min=1, metavar="K", help="With --without each: how many losses that follow.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is found as JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the run's report, with a section on the step.")
    ] = None,
    all_samples: Annotated[bool, typer.Option("--all", help="Show all samples of the step.")] = False,
    callbacks: Annotated[
        list[str] | None,
        typer.Option("--callback", metavar="FILE.py:CLASS", help="Attach a callback (or module:CLASS); repeatable."),
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="A,B", help="Print these metrics of each repeated step, logged or not.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Profile the step instead, and write its trace to this file.")
    ] = None,
    shell: Annotated[
        bool, typer.Option("--shell", help="Then open Python at the end of the step, with `past`.")
    ] = False,
    imports: Imports = None,
    script: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py [ARGS]",
            help="The script of a Trainer's run, with its arguments: the last option. It runs until it would train.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(MODULE_OPTION, metavar="MODULE [ARGS]", help="A module in place of the script, as in python -m."),
    ] = None,
) -> None:
    """Repeat a run in memory from its nearest checkpoint to a step, and show what happened there.

    With --when, the step is found first: in the record, else by repeating the run. With --without each, what the next
    losses would have been without each of its samples is shown instead.

    Nothing in the run's directory changes, and the run may still be training. What the repeated steps log is compared
    with the record, to the bit. A run of a Trainer requires --script or -m.
    """
    if as_json and shell:
        raise ConfigError("--json and --shell both use standard output; drop one of them.")
    _check_choice(step, when, from_step, without)
    shown = {"--log": log is not None, "--report": report is not None, "--all": all_samples}
    if without is not None:
        _refuse("--without each", {**shown, "--profile": profile is not None, "--shell": shell})
    if profile is not None:
        _refuse("--profile", {**shown, "--json": as_json})
    directory = find_run(run)
    names = [one.strip() for one in log.split(",") if one.strip()] if log else []

    def look(rewound: Rewind) -> None:
        from onstep.past import plan_rewind

        wanted = step
        if when is not None:
            with _errors_in_one_line("while --when was looked for"):
                wanted = _found(rewound, directory, when, from_step, callbacks or [])
        assert wanted is not None
        plan = plan_rewind(directory, wanted)
        _say(f"{plan.cost}; loading ...")
        given = [_callback(one) for one in callbacks or []]
        with _errors_in_one_line(f"on the way to step {wanted}"):
            if without is not None:
                _drop_each(rewound, plan, given, horizon, as_json)
            else:
                _show(rewound, plan, given, names, profile, as_json, report, all_samples, shell)

    name = module if script is None else str(script)
    with exchanged() if name is not None else nullcontext():
        for path in imports or []:
            import_file(path)
        if name is not None:
            run_to_training(Program(name, script is None, context.meta[WORDS]), look)
        else:
            from onstep.past import rewind as rewound

            look(rewound)


def _check_choice(step: int | None, when: str | None, from_step: int | None, without: str | None) -> None:
    """Refuse options that exclude or lack each other, and anything but an expression, before anything is loaded."""
    if (step is None) == (when is None):
        raise ConfigError('give either a STEP or --when "EXPR", such as --when "grad_norm > 10".')
    if when is not None:
        from onstep.past.expressions import parse

        parse(when)
    if from_step is not None and when is None:
        raise ConfigError("--from requires --when; to look at a step, give its number alone.")
    if without not in (None, "each"):
        raise ConfigError(
            f"--without must be each, got {without!r}; to train without certain samples: onstep fork RUN@STEP "
            "--without-samples."
        )


def _refuse(option: str, others: dict[str, bool]) -> None:
    """Refuse options that have no effect beside another one, which shows something else than the step."""
    for name in (name for name, is_given in others.items() if is_given):
        raise ConfigError(f"{name} has no effect with {option}, which does not show the step; drop one of them.")


def _found(rewound: Rewind, directory: Path, when: str, from_step: int | None, callbacks: list[str]) -> int:
    """The first step for which an expression holds.

    Raises:
        ConfigError: for anything but an expression, and if it holds for no step.
    """
    from onstep.past.expressions import parse

    expression = parse(when)
    from onstep.past.search import plan_search

    search = plan_search(directory, expression, from_step)
    _say(f"{search.cost} ...")
    found = search.run([_callback(one) for one in callbacks], rewound)
    if found is None:
        more = "; the steps that were not logged are looked at with --from 1" if search.is_recorded else ""
        raise ConfigError(f"{when} holds at no step from {search.plan.step} to {search.last} of {directory}{more}.")
    _say(f"{when}: first at step {found.step} ({', '.join(f'{name} {one:.6g}' for name, one in found.values.items())})")
    return found.step


def _drop_each(rewound: Rewind, plan: Plan, callbacks: list[Any], horizon: int, as_json: bool) -> None:
    from onstep.past.blame import drop_each
    from onstep.past.tables import blame_lines

    with rewound(plan.directory, plan.step, callbacks=callbacks, plan=plan) as past:
        found = drop_each(past, horizon)
    if is_main():
        print(json.dumps(_finite(asdict(found)), indent=2) if as_json else "\n".join(blame_lines(found)))


def _show(
    rewound: Rewind,
    plan: Plan,
    callbacks: list[Any],
    names: list[str],
    profile: Path | None,
    as_json: bool,
    report: Path | None,
    shows_all: bool,
    shell: bool,
) -> None:
    profiler = _profiler() if profile is not None else None

    def around(number: int) -> AbstractContextManager[object]:
        return profiler if profiler is not None and number == plan.step else nullcontext()

    around_step = None if profiler is None else around
    with rewound(plan.directory, plan.step, callbacks=callbacks, log=names, around_step=around_step, plan=plan) as past:
        if profiler is not None and profile is not None:
            profiler.export_chrome_trace(str(profile))
            _say(past.comparison.summary)
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_OPERATORS))
            print(f"trace: {profile}")
        else:
            from onstep.past.view import examine

            view = examine(past)
            if is_main():
                _print(view, past.log, as_json=as_json, shows_all=shows_all)
                if report is not None:
                    _write_report(view, plan.directory, report)
        if shell:
            _open_shell(past)


def _print(view: StepView, log: Log | None, *, as_json: bool, shows_all: bool) -> None:
    from onstep.past.tables import step_lines

    if as_json:
        content = view.as_dict() | ({} if log is None else {"log": log.rows})
        print(json.dumps(_finite(content), indent=2))
        return
    if log is not None:
        steps = sorted(log.rows)[-_MOST_ROWS:]
        head = list(log.rows[steps[-1]])
        rows = [["step", *head], *([str(step), *(_number(log.rows[step][key]) for key in head)] for step in steps)]
        print("\n".join([*table(rows, ">" * (len(head) + 1)), ""]))
    print("\n".join(step_lines(view, shows_all=shows_all)))


def _write_report(view: StepView, directory: Path, target: Path) -> None:
    from onstep.analysis.reports.report import write_report
    from onstep.cli.logs.lookup import read_logs
    from onstep.past.tables import report_section

    write_report(read_logs([str(directory)], [], expand=False), target, further=report_section(view))
    _say(f"report: {target}")


def _open_shell(past: Past) -> None:
    names = {"past": past, "batch": past.batches[0], "model": past.model, "gradients": past.gradients}
    banner = (
        f"the end of step {past.step}: past, past.batches, past.model, past.gradients, past.forward(), past.next(); "
        "Ctrl-D ends it"
    )
    try:
        embed: Any = importlib.import_module("IPython.terminal.embed")
    except ImportError:
        code.interact(banner, local=names, exitmsg="")
    else:
        embed.InteractiveShellEmbed(banner1=banner, user_ns=names)()


def _callback(name: str) -> Any:
    """The callback that `FILE.py:CLASS` or `module:CLASS` names.

    Raises:
        ConfigError: if it cannot be imported or made.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"--callback {name}: the file does not exist; give FILE.py:CLASS or module:CLASS.")
    try:
        if place.endswith(".py"):
            import_file(place)
            return load_callback(f"{Path(place).stem}:{attribute}")
        return load_callback(name)
    except OnstepError:
        raise
    except Exception as error:
        raise ConfigError(f"--callback {name} cannot be made: {printable(named_text(error))}.") from error


def _profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True)


@contextmanager
def _errors_in_one_line(place: str) -> Iterator[None]:
    """Say what raised an error that is not Onstep's, and where."""
    try:
        yield
    except OnstepError:
        raise
    except Exception as error:
        from onstep.training.watchdog.stacks import callback_of_error

        event, callback = callback_of_error(error)
        raiser = f"callback {callback!r} in {event}" if callback else "the repeated run"
        raise ConfigError(f"{raiser} raised {printable(named_text(error))}, {place}.") from error


def _finite(value: Any) -> Any:
    """A value for JSON, in which NaN and infinity are texts."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _say(text: str) -> None:
    if is_main():
        print(text, file=sys.stderr, flush=True)
