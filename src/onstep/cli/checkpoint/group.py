"""`onstep checkpoint list|verify|diff|export`."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.application import application
from onstep.cli.exit_codes import ERROR
from onstep.errors import OnstepError

app = application(
    no_args_is_help=True,
    help="Look at the checkpoints of a run, check them, compare two, take the weights out of one.\n\n"
    "PATH is a checkpoint, a folder of checkpoints or a run; a run may be named as below runs/. PATH@STEP is the "
    "checkpoint of that step, PATH@best the best one; without either it is the newest.",
)

DIFFERENT = 1
"""Exit code of `diff` for two checkpoints that are not the same."""
TROUBLE = 2
"""Exit code of `diff` for what cannot be compared; the three are those of diff(1)."""


class Format(StrEnum):
    """What `export` writes."""

    SAFETENSORS = "safetensors"
    HF = "hf"


@app.command("list")
def list_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run, or a folder of checkpoints.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: {root, resumes_from, checkpoints: [...]}.")
    ] = False,
    quick: Annotated[bool, typer.Option(help="Look at sizes only, without hashing the newest one.")] = False,
) -> None:
    """List the checkpoints of a run, newest first.

    Damaged and unfinished ones too; the best is marked, and the one that a resume would take.
    """
    from onstep.cli.checkpoint.listing import as_json as in_json
    from onstep.cli.checkpoint.listing import as_lines, read_listing
    from onstep.cli.checkpoint.paths import locate

    listing = read_listing(locate(path).root, verifies=not quick)
    print(json.dumps(in_json(listing), indent=2) if as_json else "\n".join(as_lines(listing)))


@app.command()
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a run: its newest one.")],
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints of the run or folder.")] = False,
) -> None:
    """Compare every file with its hash in the manifest.

    Each bad file is named. Exit code 1 if one is bad.
    """
    from onstep.cli.checkpoint.listing import folders_to_verify, is_intact

    verdicts = [is_intact(folder) for folder in folders_to_verify(path, everything=everything)]
    if not all(verdicts):
        raise typer.Exit(ERROR)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as in runs/NAME@20.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    everything: Annotated[bool, typer.Option("--all", help="Show all, what is equal too.")] = False,
) -> None:
    """Compare two checkpoints.

    Configuration, components, each tensor, counters and other values; both are verified first. Exit code 0: equal,
    1: different, 2: they cannot be compared. What two equal runs differ in does not count: run id, dates, keys of the
    configuration that nothing learned depends on, values of the clock and paths in the run's own folder.
    """
    try:
        from onstep.cli.checkpoint.diff import report
        from onstep.cli.checkpoint.paths import find

        lines, is_equal = report(find(a), find(b), everything=everything)
    except OnstepError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(TROUBLE) from None
    print("\n".join(lines))
    if not is_equal:
        raise typer.Exit(DIFFERENT)


@app.command()
def export(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a run: its newest verified one.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or folder to write.")],
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Default: safetensors where OUT ends in .safetensors, else hf."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write the weights of a checkpoint for other programs.

    safetensors: one file of all weights. hf: a folder that AutoModelForCausalLM.from_pretrained of transformers opens,
    with the tokenizer's files; for Onstep's own models.
    """
    from onstep.analysis.text_tables import printable
    from onstep.cli.checkpoint.export import export_hf, export_safetensors
    from onstep.cli.checkpoint.paths import find

    info = find(path)
    is_file = form is Format.SAFETENSORS or (form is None and out.suffix == ".safetensors")
    notes = (export_safetensors if is_file else export_hf)(info, out, force=force)
    print(printable(f"{out}: the weights of {info.path}; {'; '.join(notes)}"))
