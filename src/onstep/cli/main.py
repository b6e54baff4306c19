"""`onstep COMMAND ...`: finds the command and runs it; what a command needs is imported when it runs."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version

from onstep.cli.exit_codes import ERROR, OK
from onstep.errors import OnstepError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train:train", "Train a model: onstep train [config.yaml] [key=value ...]"),
    "finetune": (
        "train:finetune",
        "Train trained weights further: onstep finetune [RECIPE] [key=value ...]",
    ),
    "generate": (
        "generate:generate",
        'Continue a text with a trained run: onstep generate runs/NAME "def "',
    ),
    "config": ("config:app", "Show a configuration: onstep config show|defaults"),
    "recipes": ("recipes:app", "Named configurations: onstep recipes list|show NAME"),
    "memory": ("recipes:memory", "Tell what memory a training takes: onstep memory RECIPE [key=value ...]"),
    "why": (
        "why:why",
        "Explain why a run stopped, saved or went back: onstep why RUN [--step N]; --features",
    ),
    "checkpoint": (
        "checkpoint:app",
        "Look into checkpoints: onstep checkpoint list|verify|diff|export PATH",
    ),
    "logs": (
        "logs:app",
        "Read logs of runs: onstep logs list|summary|tail|plot|compare|report|replay [RUN]",
    ),
    "plot": ("plot:app", "Plot what diagnostics recorded: onstep plot heatmap [FILE]"),
    "verify-resume": (
        "verify_resume:verify_resume",
        "Prove that kills change nothing: onstep verify-resume CONFIG.yaml",
    ),
}
"""Command name: the function, or the application of a group, and one line of help."""
_TRAINING = ("train", "finetune", "verify-resume")
"""Commands that run the user's own code; their OSErrors keep the traceback that says where."""
_DRAWING = ("logs", "plot")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return OK
    if arguments[0] == "--version":
        print(f"onstep {version('onstep')}")
        return OK
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from onstep.config.part import nearest

        print(f"error: there is no command {name!r}.{nearest(name, list(COMMANDS))}\n\n{overview()}", file=sys.stderr)
        return ERROR
    return _run(name, rest)


def overview() -> str:
    """What `onstep --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Onstep trains PyTorch models, and lets you hook into every moment of it.",
            "",
            "Usage: onstep COMMAND [ARGUMENTS]",
            "",
            *lines,
            "",
            "`onstep COMMAND --help` tells more. Several ranks: torchrun --nproc-per-node 2 -m onstep train ...",
        ]
    )


def _run(name: str, arguments: list[str]) -> int:
    from onstep.cli.application import application_at

    app = application_at(COMMANDS[name][0])
    try:
        result = app(args=arguments, prog_name=f"onstep {name}", standalone_mode=True)
    except OnstepError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        text = in_options(str(error)) if name in _DRAWING else str(error)
        print(f"error: {text}{notes}", file=sys.stderr)
        return ERROR
    except BrokenPipeError:  # the reader of the pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except OSError as error:
        if name in _TRAINING:
            raise
        file = f"{error.filename}: " if error.strerror and error.filename is not None else ""
        print(f"error: {file}{error.strerror or error}", file=sys.stderr)
        return ERROR
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else ERROR if exit_.code else OK
    return result if isinstance(result, int) else OK


_OPTIONS = {
    "smooth_window": "--smooth", "x_axis": "--x-axis", "x_min": "--x-min", "x_max": "--x-max", "y_min": "--y-min",
    "y_max": "--y-max", "vmin": "--vmin", "vmax": "--vmax", "v_min": "--vmin", "v_max": "--vmax",
    "step_stride": "--step-stride", "figsize": "--figsize", "log_scale": "--log-scale", "filter_pattern": "--filter",
}  # fmt: skip
"""Parameters of the functions that draw, and the options that set them."""
_FIRST_WORDS = {"metric": "--metric", "metrics": "--metrics", "filter": "--filter", "format": "--format"}
"""Words that are parameters only where an error begins with them."""
_NAME = re.compile(rf"(?<![\w'\"./-])({'|'.join(_OPTIONS)})(?![\w'\"./-])")
_BEGIN = re.compile(rf"\A({'|'.join(_FIRST_WORDS)}) must\b")


def in_options(message: str) -> str:
    """The text of an error with options in place of parameters: ``y_min must be below y_max`` names --y-min, --y-max.

    Names in quotes and in paths stay as they are.
    """
    message = _BEGIN.sub(lambda match: f"{_FIRST_WORDS[match[1]]} must", message)
    return _NAME.sub(lambda match: _OPTIONS[match[1]], message)


if __name__ == "__main__":
    sys.exit(main())
