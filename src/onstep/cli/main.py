"""Entry point of `onstep COMMAND ...`; each command's modules are imported only when it runs."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from onstep.cli.exit_codes import BROKEN_PIPE, ERROR, INTERRUPTED, OK
from onstep.cli.streams import lead_nowhere
from onstep.errors import ConfigError, OnstepError
from onstep.launch.failures import note_refusal
from onstep.slurm.ranks import adopt_ranks

if TYPE_CHECKING:
    from onstep.cli.program import Program

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train:train", "Train a model: onstep train [config.yaml] [key=value ...]"),
    "finetune": (
        "train:finetune",
        "Fine-tune pretrained weights: onstep finetune [RECIPE] [key=value ...]",
    ),
    "demo": ("demo.command:demo", "Train a small GPT on Python's source in a minute or two, and see what it learns"),
    "generate": ("generation.generate:generate", 'Continue a text with a trained model: onstep generate NAME "def "'),
    "chat": ("generation.chat:chat", "Talk with a trained model: onstep chat NAME"),
    "config": ("config:app", "Show or describe a configuration: onstep config show|defaults|explain|schema"),
    "evaluate": ("evaluate:evaluate", "Evaluate weights on tasks of lm-eval: onstep evaluate RUN --tasks NAME,NAME"),
    "recipes": ("recipes:app", "List and show recipes (named configurations): onstep recipes list|show NAME"),
    "data": ("data:app", "Show or empty the cache of downloaded data: onstep data cache [--clear]"),
    "memory": ("memory:memory", "Estimate GPU memory before training: onstep memory RECIPE [key=value ...]"),
    "why": (
        "why:why",
        "Explain why a run stopped, saved or rolled back: onstep why RUN [--step N]",
    ),
    "rewind": (
        "rewind:rewind",
        "Repeat a run to a step of its past and show it: onstep rewind RUN STEP",
    ),
    "run": (
        "run:app",
        "Run an unmodified script of transformers' Trainer: onstep run train.py [ARGS]",
    ),
    "launch": (
        "launch:app",
        "Start a run on several ranks, here or on a cluster: onstep launch --nproc 2 -- train tiny_gpt",
    ),
    "fork": (
        "fork:fork",
        "Try a change from a step of a run on, as a new run: onstep fork RUN@STEP --name b key=value",
    ),
    "checkpoint": (
        "checkpoint.group:app",
        "Inspect and export checkpoints: onstep checkpoint list|verify|diff|export PATH",
    ),
    "logs": (
        "logs.group:app",
        "Read, plot and compare logs of runs: onstep logs list|summary|tail|plot|compare|report|replay [RUN]",
    ),
    "control": (
        "control.group:app",
        "Watch and steer running jobs: onstep control list|status|watch|save|stop|pause|set|... [JOB]",
    ),
    "dashboard": ("dashboard:dashboard", "Show running and finished runs in a browser: onstep dashboard [RUNS]"),
    "plot": ("plot:app", "Plot per-parameter norms, or a pipeline: onstep plot heatmap [FILE] | pipeline TRACE ..."),
    "diloco": (
        "diloco.group:app",
        "Train at several sites over thin networks: onstep diloco server|worker|status|control|simulate",
    ),
    "verify-resume": (
        "verify_resume:verify_resume",
        "Check that a killed and resumed run is bitwise identical: onstep verify-resume CONFIG.yaml",
    ),
}
"""Command name -> (function, or application of a group; one line of help)."""
_TRAINING = ("train", "finetune", "run", "launch", "rewind", "fork", "verify-resume")
"""Commands that run user code; their OSErrors keep the traceback, which shows where they were raised."""
_OF_RANKS = ("train", "finetune", "run")
"""Commands that several ranks may run as one job."""
_DRAWING = ("logs", "plot")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if sys.stdout is None and arguments[:1] in ([name] for name in _TRAINING):  # a daemon's run needs no output
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:  # Python found it closed
        print("error: standard output is closed; redirect it, for example to a file or /dev/null.", file=sys.stderr)
        return ERROR
    if arguments[:1] in ([name] for name in _OF_RANKS):
        adopt_ranks()
    programs: list[Program] = []
    try:
        code = _main(arguments, programs)
        sys.stdout.flush()
    except BrokenPipeError:
        lead_nowhere(sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if not _is_of_output(error):
            raise
        lead_nowhere(sys.stdout.fileno())
        print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return ERROR
    return _run_program(programs[0]) if programs else code


def _run_program(program: Program) -> int:
    """Run the user's program of `onstep run`, outside of all that handles the errors of commands."""
    from onstep.cli.program import NoProgramError
    from onstep.cli.run import run_exchanged

    try:
        run_exchanged(program)
    except NoProgramError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    return OK


def _is_of_output(error: OSError) -> bool:
    """Whether standard output is what failed, as on a full disk: a line end cannot be written to it either."""
    if error.filename is not None:
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _main(arguments: list[str], programs: list[Program]) -> int:
    if "_ONSTEP_COMPLETE" in os.environ:  # the shell asks for completions
        from onstep.cli.completion import complete

        return complete(COMMANDS)
    if arguments and arguments[0] in ("--install-completion", "--show-completion"):
        return _completion(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return OK
    if arguments[0] == "--version":
        print(f"onstep {version('onstep')}")
        return OK
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from onstep.config.suggestions import nearest

        print(f"error: there is no command {name!r}.{nearest(name, list(COMMANDS))}\n\n{overview()}", file=sys.stderr)
        return ERROR
    try:
        return _run(name, rest, programs)
    except KeyboardInterrupt:  # before a run handles it, or in a command that has nothing to save
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def overview() -> str:
    """The text of `onstep --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Onstep trains PyTorch models, language models first, with one loop that callbacks can observe and steer.",
            "",
            "Usage: onstep COMMAND [ARGUMENTS]",
            "",
            "Commands:",
            *lines,
            "",
            "Examples:",
            "  onstep demo                                      # a small GPT, in a minute or two on a CPU",
            "  onstep train config.yaml optimizer.lr=3e-4       # your own configuration",
            "  onstep launch --nproc 2 -- train ...             # on two GPUs",
            "",
            "`onstep COMMAND --help` describes a command and its options.",
            "`onstep --install-completion` lets the shell complete commands, options and jobs with Tab.",
        ]
    )


def _completion(arguments: list[str]) -> int:
    from onstep.cli.completion import install_or_show

    try:
        install_or_show(arguments)
    except OnstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    return OK


def _run(name: str, arguments: list[str], programs: list[Program]) -> int:
    from onstep.cli.application import WrongWords, application_at, in_one_line

    app = application_at(COMMANDS[name][0])
    try:
        result = app(args=arguments, prog_name=f"onstep {name}", standalone_mode=False, obj=programs)
    except WrongWords as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command
            error.show()
        else:
            note_refusal(text := in_one_line(error, arguments))
            print(f"error: {text}", file=sys.stderr)
        return int(error.exit_code)
    except OnstepError as error:
        from onstep.analysis.text_tables import printable
        from onstep.console.style import in_words
        from onstep.stores.urls import with_urls

        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        text = with_urls(in_options(str(error)) if name in _DRAWING else str(error))
        if isinstance(error, ConfigError):
            note_refusal(text)
        for line in f"error: {text}{notes}".expandtabs().split("\n"):  # a name in it may come from elsewhere
            print(in_words(printable(line), sys.stderr), file=sys.stderr)
        return ERROR
    except BrokenPipeError:
        raise
    except OSError as error:
        if name in _TRAINING or _is_of_output(error):
            raise
        file = f"{error.filename}: " if error.strerror and error.filename is not None else ""
        print(f"error: {file}{error.strerror or error}", file=sys.stderr)
        return ERROR
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):
            raise exit_.__context__ from None
        return exit_.code if isinstance(exit_.code, int) else ERROR if exit_.code else OK
    return result if isinstance(result, int) else OK


_OPTIONS = {
    "smooth_window": "--smooth", "x_axis": "--x-axis", "x_min": "--x-min", "x_max": "--x-max", "y_min": "--y-min",
    "y_max": "--y-max", "vmin": "--vmin", "vmax": "--vmax", "v_min": "--vmin", "v_max": "--vmax",
    "step_stride": "--step-stride", "figsize": "--figsize", "log_scale": "--log-scale", "filter_pattern": "--filter",
}  # fmt: skip
"""Parameters of the plotting functions and the options that set them."""
_FIRST_WORDS = {"metric": "--metric", "metrics": "--metrics", "filter": "--filter", "format": "--format"}
"""Words that name a parameter only at the start of an error message."""
_NAME = re.compile(rf"(?<![\w'\"./-])({'|'.join(_OPTIONS)})(?![\w'\"./-])")
_BEGIN = re.compile(rf"\A({'|'.join(_FIRST_WORDS)}) must\b")


def in_options(message: str) -> str:
    """Replace parameter names in an error message by options: ``y_min must be below y_max`` names --y-min, --y-max.

    Names in quotes and in paths are left unchanged.
    """
    message = _BEGIN.sub(lambda match: f"{_FIRST_WORDS[match[1]]} must", message)
    return _NAME.sub(lambda match: _OPTIONS[match[1]], message)


if __name__ == "__main__":
    sys.exit(main())
